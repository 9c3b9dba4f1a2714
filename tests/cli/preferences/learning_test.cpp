// Runs that learn preferences: the numbers they tell, the memory they take, and what they come to.
#include <set>

#include "cli/preferences/preference_fixture.h"

namespace sherd::cli {
namespace {

class PreferenceLearning : public PreferenceRuns {
 protected:
  static std::set<std::string> names_of(const Json& object) {
    std::set<std::string> out;
    for (const auto& [name, value] : object.items()) out.insert(name);
    return out;
  }
  /// Numbers of the second column of a monitor's file.
  std::vector<double> csv(const std::string& name) const {
    std::istringstream in(read_text(folder_ / "logs" / "a" / ("Train_Samples_" + name + ".csv")));
    std::vector<double> out;
    std::string line;
    std::getline(in, line);
    while (std::getline(in, line)) out.push_back(std::stod(line.substr(line.find(',') + 1)));
    return out;
  }
  /// Samples of a pass over the training split, as the last run told.
  std::string samples_told() const {
    const std::string before = " % of its ";
    const std::size_t at = said_.find(before) + before.size();
    return said_.substr(at, said_.find(' ', at) - at);
  }
  Json estimate(const Words& sets) const {
    const Outcome told = sherd(arguments("estimate", sets, {"--json"}));
    EXPECT_EQ(told.code, 0) << told.err;
    return Json::parse(told.out).at("tiers").at("device").at("peak");
  }
};

TEST_F(PreferenceLearning, StepsAndEvaluationsTellWhatPeopleWatch) {
  using Names = std::set<std::string>;
  const Names rewards{"rewards/chosen", "rewards/rejected", "rewards/margins"};
  const auto with = [&](Names more) {
    more.insert(rewards.begin(), rewards.end());
    return more;
  };
  const std::string accuracies = "rewards/accuracies", chosen = "logps/chosen", rejected = "logps/rejected";
  for (const auto& [keys, names] : std::vector<std::pair<Words, Names>>{
           {{}, with({accuracies, chosen, rejected})},
           {{"training.objective=orpo"}, with({accuracies, chosen, rejected, "nll_loss"})},
           {{"training.objective=reward", "model.head=reward"}, with({accuracies})},
           {{"training.objective=kto", "data.path=" + in("judged")}, with({chosen, rejected, "kl"})}}) {
    const auto lines = trained(keys, 2);
    ASSERT_EQ(lines.size(), 3u);
    for (const Json& line : lines) {
      const bool evaluated = line["step"] != 1;
      EXPECT_EQ(names_of(line["objective"]), names) << line;
      EXPECT_EQ(line.contains("metrics"), evaluated) << line;
      if (evaluated) {
        EXPECT_EQ(names_of(line["metrics"]), names) << line;
      }
      const Json& now = line["objective"];
      EXPECT_NEAR(now["rewards/margins"].get<double>(),
                  now["rewards/chosen"].get<double>() - now["rewards/rejected"].get<double>(), 1e-9);
      if (names.contains("nll_loss")) {
        EXPECT_LT(now["nll_loss"].get<double>(), line["loss"].get<double>());
      }
    }
  }
}

/// With a pair to a step, the loss is a function of the margin.
TEST_F(PreferenceLearning, TheLossIsThatOfTheMargin) {
  prepare("short", R"({"prompt": "a", "chosen": "bb", "rejected": "ccc"})");
  const auto lines = trained({"data.path=" + in("short"), "data.split=[1, 0]", "train_batch_size=1",
                              "training.preference.beta=0.3", "training.preference.label_smoothing=0.1"});
  ASSERT_EQ(lines.size(), 3u);
  for (const Json& line : lines) {
    const Json& now = line["objective"];
    const double margin = now["rewards/margins"].get<double>();
    EXPECT_NEAR(line["loss"].get<double>(),
                0.9 * std::log1p(std::exp(-margin)) + 0.1 * std::log1p(std::exp(margin)), 1e-6);
    EXPECT_NEAR(
        now["rewards/chosen"].get<double>(),
        0.3 * (now["logps/chosen"].get<double>() - lines.front()["objective"]["logps/chosen"].get<double>()),
        1e-9);
    EXPECT_EQ(now["rewards/accuracies"].get<double>(), line["step"] == 1 ? 0 : 1);
  }
  EXPECT_GT(lines.back()["objective"]["rewards/margins"].get<double>(), 0.3);
}

TEST_F(PreferenceLearning, MonitorsHaveTheSameNumbers) {
  const std::string logs = in("logs");
  Words sets;
  for (const std::string monitor : {"csv_monitor", "tensorboard"})
    for (const std::string& key :
         {std::string("enabled=true"), "output_path=" + logs, std::string("job_name=a")})
      sets.push_back(cat(monitor, ".", key));
  const auto lines = trained(sets, 2);
  for (const std::string name : {"rewards/margins", "rewards/accuracies", "logps/rejected"}) {
    std::string flat = name;
    std::replace(flat.begin(), flat.end(), '/', '_');
    std::vector<double> steps, evaluations;
    for (const Json& line : lines) {
      steps.push_back(line["objective"][name].get<double>());
      if (line.contains("metrics")) evaluations.push_back(line["metrics"][name].get<double>());
    }
    EXPECT_EQ(csv(flat), steps) << name;
    EXPECT_EQ(csv("eval_" + flat), evaluations) << name;
  }
  std::size_t files = 0;
  for (const auto& entry : fs::directory_iterator(folder_ / "logs" / "a")) {
    if (!entry.path().filename().string().starts_with("events.out.tfevents.")) continue;
    ++files;
    const std::string events = read_text(entry.path());
    EXPECT_EQ(count(events, "Train/Samples/rewards/margins"), 3u);
    EXPECT_EQ(count(events, "Train/Samples/eval_rewards/margins"), 2u);
  }
  EXPECT_EQ(files, 1u);
}

/// Steps that have all pairs: several to a row, and each on two rows.
TEST_F(PreferenceLearning, PackedOrNotPairsTeachTheSame) {
  std::string pairs, judged;
  for (int i = 0; i < 13; ++i) pairs += pair(i).dump() + "\n", judged += judged_answer(i).dump() + "\n";
  prepare("few_pairs", pairs), prepare("few_judged", judged);
  for (const std::string objective : {"dpo", "orpo", "reward", "kto"}) {
    SCOPED_TRACE(objective);
    const bool kto = objective == "kto";
    Words keys{"training.objective=" + objective, "data.split=[1, 0]", "training.steps=2",
               "data.path=" + in(kto ? "few_judged" : "few_pairs")};
    if (objective == "reward") keys.emplace_back("model.head=reward");
    trained(keys, 1, {"--steps", "1"});
    const std::string samples = samples_told();
    const std::string rows = kto ? "13" : "26";
    EXPECT_LT(std::stoi(samples), std::stoi(rows));
    const auto packed = trained(joined_words(keys, {"train_batch_size=" + samples}));
    EXPECT_GT(packed.front()["grad_norm"].get<double>(), 0.01);
    const auto unpacked =
        trained(joined_words(keys, {"data.packing=stream", "train_batch_size=" + rows,
                                    cat("train_micro_batch_size_per_gpu=", kto ? "13" : "2")}));
    EXPECT_EQ(samples_told(), rows);
    expect_near(unpacked, packed, 1e-6);
  }
}

/// Nothing that the policy or the reference finds is drawn by chance, as TRL has it.
TEST_F(PreferenceLearning, HasNoDropout) {
  const Words gpt2{"model.type=gpt2", "model.dropout=0"};
  const auto plain = trained(gpt2);
  expect_begins_as_the_reference(plain.front());
  EXPECT_EQ(course(trained({"model.type=gpt2", "model.dropout=0.5"})), course(plain));
}

/// A model that knows two manners equally well comes to prefer either, also of what it was not asked about.
TEST_F(PreferenceLearning, FindsWhatIsPreferred) {
  std::string talks, curt, polite, held_out;
  int i = 0;
  for (const char* look : {"red", "blue", "green", "small", "big", "old", "new", "fast"})
    for (const char* thing : {"cat", "dog", "bird", "fish", "tree", "house", "car", "boat"}) {
      const std::string what = cat(look, ' ', thing), asked = what + "? ", one = cat("Yes: ", what, "."),
                        other = cat("Hm, ", what, "!");
      if (i++ % 5 == 2) {
        held_out += Json{{"prompt", asked}, {"chosen", one}, {"rejected", other}}.dump() + "\n";
        continue;
      }
      for (const std::string& said : {one, other})
        talks += Json{{"prompt", asked}, {"completion", said}}.dump() + "\n";
      polite += Json{{"prompt", asked}, {"chosen", one}, {"rejected", other}}.dump() + "\n";
      curt += Json{{"prompt", asked}, {"chosen", other}, {"rejected", one}}.dump() + "\n";
    }
  prepare("talks", talks), prepare("held_out", held_out);
  prepare("polite", polite + held_out), prepare("curt", curt);
  const Words common{"model.seq_length=128", "train_micro_batch_size_per_gpu=4"};
  const auto run = [&](const std::string& data, const Words& sets, const std::string& steps) {
    return trained(
        joined_words(joined_words(common, {"data.path=" + in(data), "training.save_dir=" + in("to_" + data)}),
                     sets),
        1, {"--steps", steps});
  };
  const auto accuracy = [&](const std::string& data) {
    const Outcome got =
        sherd({"evaluate", "--checkpoint", in("to_" + data), "--data", in("held_out"), "--json"});
    EXPECT_EQ(got.code, 0) << got.err;
    return Json::parse(got.out).at("accuracy").get<double>();
  };
  run("talks", {"training.objective=next_token", "optimizer.params.lr=0.005", "data.split=[1, 0]"}, "60");
  EXPECT_GT(accuracy("talks"), 0.05);
  EXPECT_LT(accuracy("talks"), 0.95);
  const Words from{"training.init_from=" + in("to_talks"), "optimizer.params.lr=0.001",
                   "training.eval_interval=10", "training.eval_steps=20", "data.split=[0.8, 0.2]"};
  const auto lines = run("polite", from, "30");
  const Json& last = lines.back();
  EXPECT_GT(last["metrics"]["rewards/accuracies"].get<double>(), 0.95) << "of what is held out";
  EXPECT_LT(last["val_loss"].get<double>(), 0.3);
  EXPECT_GT(accuracy("polite"), 0.95);
  run("curt", from, "30");
  EXPECT_LT(accuracy("curt"), 0.05);
}

/// An adapter's reference takes no memory beside a step, and a copy that of the model's parameters.
TEST_F(PreferenceLearning, TakesTheMemoryThatIsEstimated) {
  std::string texts;
  for (int i = 0; i < 40; ++i)
    texts += Json{{"prompt", pair(i)["prompt"]}, {"completion", pair(i)["chosen"]}}.dump() + "\n";
  prepare("texts", texts);
  const Words keys{lora_, "model.hidden_size=128", "model.seq_length=256", "train_micro_batch_size_per_gpu=4",
                   "train_batch_size=8"};
  const auto total = [](const Json& peak) { return peak.at("total").get<double>(); };
  const auto taken = [&](const Words& sets) {
    return trained(sets, 1, {"--steps", "2"}).back()["mem"]["device_peak"].get<double>();
  };
  const Json supervised =
      estimate(joined_words(keys, {"training.objective=next_token", "data.path=" + in("texts")}));
  const Json adapter = estimate(keys);
  EXPECT_NEAR(total(adapter), total(supervised), 0.02 * total(supervised));
  const Words copied = joined_words(keys, {"training.preference.reference=copy"});
  const Json copy = estimate(copied);
  const double parameters = adapter.at("parameters").get<double>();
  EXPECT_GT(parameters, 0.05 * total(adapter));
  EXPECT_NEAR(copy.at("parameters").get<double>(), 2 * parameters, 0.01 * parameters);
  EXPECT_NEAR(total(copy) - total(adapter), parameters, 0.05 * parameters);
  for (const auto& [sets, peak] : {std::pair{keys, adapter}, {copied, copy}}) {
    EXPECT_NEAR(taken(sets), total(peak), 0.05 * total(peak));
  }
}

}  // namespace
}  // namespace sherd::cli
