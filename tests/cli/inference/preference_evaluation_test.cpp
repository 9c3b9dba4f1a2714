// `sherd evaluate` of answers that people compared or judged.
#include <cstdint>
#include <cstdio>

#include "cli/preferences/preference_fixture.h"
#include "engine/checkpoint/format.h"

namespace sherd::cli {
namespace {

class PreferenceEvaluation : public PreferenceRuns {
 protected:
  Words command(const std::string& run, const std::string& data, const Words& more = {}) const {
    return joined_words({"evaluate", "--checkpoint", in(run), "--data", in(data)}, more);
  }
  Outcome evaluated(const std::string& run, const std::string& data, const Words& more = {}) const {
    const Outcome got = sherd(command(run, data, more));
    EXPECT_EQ(got.code, 0) << got.err;
    return got;
  }
  Json report(const std::string& run, const std::string& data, const Words& more = {}) const {
    return Json::parse(evaluated(run, data, joined_words({"--json"}, more)).out, nullptr, false);
  }
  /// The lines of --output.
  std::vector<Json> details(const std::string& run, const std::string& data, const Words& more = {}) const {
    evaluated(run, data, joined_words({"--output", in("details.jsonl")}, more));
    std::vector<Json> out;
    std::istringstream lines(read_text(folder_ / "details.jsonl"));
    for (std::string line; std::getline(lines, line);) out.push_back(Json::parse(line));
    return out;
  }
  /// The same numbers in the order of texts.
  std::vector<double> scores(const std::string& run, const std::string& data, const Words& more = {}) const {
    std::vector<double> out;
    for (const Json& line : details(run, data, more))
      for (const char* side : {"chosen", "rejected"}) out.push_back(line.at(side).get<double>());
    return out;
  }
  /// A model that has learned the text of other tests, in folder NAME.
  void make_base(const std::string& name, const Words& sets = {}) {
    trained(joined_words({"training.objective=next_token", "data.path=" + prefix(), "data.packing=stream",
                          "training.save_dir=" + in(name)},
                         sets),
            1, {"--steps", "8"});
  }
  std::string from(const std::string& name) const { return "training.init_from=" + in(name); }
  /// Gives the masters of a checkpoint's weights another lower half: 0, that of numbers of bf16, or 0x8000,
  /// that of numbers between two of these.
  void set_lower_halves(const std::string& name, std::uint16_t half) const {
    const fs::path folder = folder_ / name / "global_step8", path = folder / "manifest.json";
    engine::Manifest manifest = engine::Manifest::from_json(read_text(path), path);
    std::size_t set = 0;
    for (auto& [file, sum] : manifest.files) {
      if (!file.ends_with(".safetensors")) continue;
      std::string bytes = read_text(folder / file);
      std::uint64_t head = 0;
      std::memcpy(&head, bytes.data(), sizeof head);
      const Json entries = Json::parse(bytes.substr(8, head));
      for (const auto& [tensor, entry] : entries.items()) {
        if (!tensor.starts_with("fp32.")) continue;
        const auto offsets = entry["data_offsets"].get<std::vector<std::size_t>>();
        for (std::size_t at = offsets[0]; at < offsets[1]; at += 4, ++set)
          std::memcpy(bytes.data() + 8 + head + at, &half, sizeof half);
      }
      write_text(folder / file, bytes);
      sum = engine::checksum_file(folder / file);
    }
    ASSERT_GT(set, 50'000u);
    write_text(path, manifest.to_json());
  }
};

/// Training packs pairs into rows on two ranks that share the weights; this reads them one by one.
TEST_F(PreferenceEvaluation, FindsTheNumbersOfTheReferenceToTheBit) {
  for (const std::string precision : {"bf16.enabled=false", "bf16.enabled=true"}) {
    SCOPED_TRACE(precision);
    make_base("base", {precision});
    set_lower_halves("base", 0);
    trained({precision, from("base"), "zero_optimization.stage=3"}, 2, {"--steps", "1"});
    const std::vector<double> reference = values_in(reference_of("pairs"));
    ASSERT_EQ(reference.size(), 80u);
    EXPECT_EQ(scores("base", "pairs"), reference);
    for (const Words& layout : {Words{"--ranks", "2"}, Words{"--batch-tokens", "1"}})
      EXPECT_EQ(scores("base", "pairs", layout), reference) << layout.front();
    fs::remove_all(folder_ / "base");
  }
}

/// A master between two numbers of bf16 becomes the same one everywhere.
TEST_F(PreferenceEvaluation, RoundsMastersAsTrainingDoes) {
  make_base("base", {"bf16.enabled=true"});
  set_lower_halves("base", 0x8000);
  trained({"bf16.enabled=true", from("base")}, 1, {"--steps", "1"});
  EXPECT_EQ(scores("base", "pairs"), values_in(reference_of("pairs")));
}

TEST_F(PreferenceEvaluation, CopiesRoundMastersAsTrainingDoes) {
  make_base("base", {"bf16.enabled=true"});
  set_lower_halves("base", 0x8000);
  expect_begins_as_the_reference(
      trained({"bf16.enabled=true", from("base"), "training.preference.reference=copy"}).front());
}

TEST_F(PreferenceEvaluation, TellsHowOftenTheChosenAnswerIsAbove) {
  make_base("base");
  const std::vector<Json> lines = details("base", "pairs");
  ASSERT_EQ(lines.size(), 40u);
  double chosen = 0, rejected = 0;
  int above = 0, above_by_token = 0;
  for (std::size_t i = 0; i < lines.size(); ++i) {
    const Json& line = lines[i];
    EXPECT_EQ(line["document"], i);
    const double one = line["chosen"].get<double>(), other = line["rejected"].get<double>();
    chosen += one / 40, rejected += other / 40, above += one > other;
    // A byte is a token, and so is the end.
    const auto tokens = [&](const char* side) {
      const std::string answer = pair(static_cast<int>(i))[side].get<std::string>();
      EXPECT_EQ(line[cat(side, "_tokens")], answer.size() + 1);
      return static_cast<double>(answer.size() + 1);
    };
    above_by_token += one / tokens("chosen") > other / tokens("rejected");
  }
  EXPECT_GT(above, 0);
  EXPECT_LT(above, 40);
  const Json all = report("base", "pairs");
  EXPECT_EQ(all["pairs"], 40);
  EXPECT_EQ(all["answers"], 80);
  EXPECT_DOUBLE_EQ(all["accuracy"].get<double>(), above / 40.0);
  EXPECT_DOUBLE_EQ(all["accuracy_by_token"].get<double>(), above_by_token / 40.0);
  EXPECT_NEAR(all["logps/chosen"].get<double>(), chosen, 1e-9);
  EXPECT_NEAR(all["logps/rejected"].get<double>(), rejected, 1e-9);
  EXPECT_NEAR(all["logps/margins"].get<double>(), chosen - rejected, 1e-9);
  EXPECT_EQ(report("base", "pairs", {"--ranks", "2"}), all);

  const Json few = report("base", "pairs", {"--limit", "3", "--output", in("few.jsonl")});
  EXPECT_EQ(few["pairs"], 3);
  EXPECT_NEAR(few["logps/chosen"].get<double>(),
              (lines[0]["chosen"].get<double>() + lines[1]["chosen"].get<double>() +
               lines[2]["chosen"].get<double>()) /
                  3,
              1e-9);
  EXPECT_EQ(count(read_text(folder_ / "few.jsonl"), "\n"), 3u);
  const std::string table = evaluated("base", "pairs").out;
  EXPECT_THAT(table, HasSubstr(in("pairs") + ": 40 pairs, 80 answers\n"));
  char row[80];
  std::snprintf(row, sizeof row, "\naccuracy           %12.4f\n", above / 40.0);
  EXPECT_THAT(table, HasSubstr(row));
}

/// The second half of the data is the first once more: what an evaluation while training finds of it, this
/// finds.
TEST_F(PreferenceEvaluation, FindsWhatTrainingFinds) {
  std::string lines;
  for (int i = 0; i < 40; ++i) lines += pair(i % 20).dump() + "\n";
  prepare("twice", lines);
  const Words keys{"data.path=" + in("twice"), "data.split=[0.5, 0.5]", "training.eval_steps=20"};
  for (const std::string objective : {"dpo", "reward"}) {
    Words sets =
        joined_words(keys, {"training.objective=" + objective, "training.save_dir=" + in(objective)});
    const bool rewards = objective == "reward";
    if (rewards) sets.emplace_back("model.head=reward");
    const Json found = trained(sets, 2).back().at("metrics");
    const Json all = report(objective, "twice", {"--limit", "20"});
    EXPECT_EQ(all["pairs"], 20);
    const std::string of = rewards ? "rewards/" : "logps/";
    for (const std::string& name : {of + "chosen", of + "rejected"})
      EXPECT_NEAR(all.at(name).get<double>(), found.at(name).get<double>(), 1e-6) << name;
    if (!rewards) continue;
    EXPECT_NEAR(all.at("rewards/margins").get<double>(), found.at("rewards/margins").get<double>(), 1e-6);
    EXPECT_NEAR(all.at("accuracy").get<double>(), found.at("rewards/accuracies").get<double>(), 1e-9);
  }
}

TEST_F(PreferenceEvaluation, OfARewardModelIsOfRewards) {
  trained({"training.objective=reward", "model.head=reward", "training.save_dir=" + in("judge")}, 2,
          {"--steps", "10"});
  const std::vector<Json> lines = details("judge", "pairs");
  ASSERT_EQ(lines.size(), 40u);
  double above = 0;
  for (const Json& line : lines) {
    above += line["chosen"].get<double>() > line["rejected"].get<double>();
    EXPECT_FALSE(line.contains("chosen_tokens"));
  }
  const Json all = report("judge", "pairs");
  EXPECT_DOUBLE_EQ(all["accuracy"].get<double>(), above / 40);
  EXPECT_GT(above, 36);
  EXPECT_FALSE(all.contains("accuracy_by_token") || all.contains("logps/chosen"));
  EXPECT_EQ(report("judge", "pairs", {"--ranks", "2"}), all);
  EXPECT_EQ(details("judge", "pairs", {"--batch-tokens", "1"}), lines);
  const Json judged = report("judge", "judged");
  EXPECT_EQ(judged["pairs"], 0);
  EXPECT_FALSE(judged.contains("accuracy"));
  EXPECT_GT(judged["rewards/chosen"].get<double>(), judged["rewards/rejected"].get<double>());

  write_text(folder_ / "tasks.jsonl", R"({"context": "a", "completion": "b"})");
  for (const Words& asked : {Words{"--data", prefix()}, Words{"--tasks", in("tasks.jsonl")}}) {
    const Outcome refused = sherd(joined_words({"evaluate", "--checkpoint", in("judge")}, asked));
    EXPECT_EQ(refused.code, 2) << refused.out;
    EXPECT_THAT(refused.err, HasSubstr("the model gives rewards, and texts no likelihood: give --data of "
                                       "answers that people compared"));
  }
}

TEST_F(PreferenceEvaluation, OfARewardModelIsNoNextWord) {
  trained({"training.objective=reward", "model.head=reward", "training.save_dir=" + in("judge")}, 1,
          {"--steps", "1"});
  const Outcome refused =
      sherd({"generate", "--checkpoint", in("judge"), "--prompt", "Q", "--max-tokens", "2"});
  EXPECT_EQ(refused.code, 2) << refused.out;
  EXPECT_THAT(refused.err, HasSubstr("gives texts rewards, and does not continue them"));
}

TEST_F(PreferenceEvaluation, OfAnswersJudgedByThemselvesHasMeansOfBothSides) {
  make_base("base");
  const std::vector<Json> lines = details("base", "judged");
  ASSERT_EQ(lines.size(), 40u);
  double good = 0, bad = 0;
  for (std::size_t i = 0; i < lines.size(); ++i) {
    const bool is_good = i % 4 != 3;
    EXPECT_EQ(lines[i].contains("chosen"), is_good);
    EXPECT_EQ(lines[i].contains("rejected"), !is_good);
    (is_good ? good : bad) += lines[i].at(is_good ? "chosen" : "rejected").get<double>();
  }
  const Json all = report("base", "judged");
  EXPECT_EQ(all["pairs"], 0);
  EXPECT_EQ(all["answers"], 40);
  EXPECT_FALSE(all.contains("accuracy"));
  EXPECT_NEAR(all["logps/chosen"].get<double>(), good / 30, 1e-9);
  EXPECT_NEAR(all["logps/rejected"].get<double>(), bad / 10, 1e-9);
  const Outcome texts = sherd(command("base", "../data", {"--output", in("x")}));
  EXPECT_EQ(texts.code, 1) << "that is no dataset";
  const Outcome refused =
      sherd({"evaluate", "--checkpoint", in("base"), "--data", prefix(), "--output", in("x")});
  EXPECT_EQ(refused.code, 2);
  EXPECT_THAT(refused.err, HasSubstr("or with --data of answers that people compared"));
}

}  // namespace
}  // namespace sherd::cli
