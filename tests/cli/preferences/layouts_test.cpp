// Preferences are learned alike wherever they are: on any number of ranks, in each memory, on each schedule,
// with each kind of reference.
#include "cli/preferences/preference_fixture.h"

namespace sherd::cli {
namespace {

class PreferenceLayouts : public PreferenceRuns {
 protected:
  const std::string stage_3_ = "zero_optimization.stage=3", layered_ = "parallel.schedule=layered",
                    copy_ = "training.preference.reference=copy";

  struct Layout {
    int ranks;
    Words sets;
  };

  /// Runs of these layouts have the bits of `one`, which `keys` make on a rank.
  void expect_same(const std::vector<Json>& one, const Words& keys, const std::vector<Layout>& layouts) {
    ASSERT_EQ(one.size(), 3u);
    for (const Layout& layout : layouts) {
      SCOPED_TRACE(cat(layout.ranks, " ranks, ", layout.sets.empty() ? "as one" : layout.sets.front()));
      EXPECT_EQ(course(trained(joined_words(keys, layout.sets), layout.ranks)), course(one));
    }
  }
  Words offloaded_to(const std::string& device) const {
    Words out{"zero_optimization.stage=3"};
    for (const std::string section : {"offload_param", "offload_optimizer"}) {
      out.push_back(cat("zero_optimization.", section, ".device=", device));
      if (device == "nvme") out.push_back(cat("zero_optimization.", section, ".nvme_path=", in("nvme")));
    }
    if (device == "nvme") out.emplace_back("zero_optimization.offload_param.max_in_cpu=0");
    return out;
  }
  /// The keys of a run over answers that are judged by themselves.
  Words kto() const {
    return {"training.objective=kto", "data.path=" + in("judged"), "train_batch_size=8",
            "model.seq_length=64"};
  }
};

TEST_F(PreferenceLayouts, RanksRecomputeAndSchedulesGiveTheSameBits) {
  const auto one = trained({});
  ASSERT_EQ(one.size(), 3u);
  expect_begins_as_the_reference(one.front());
  EXPECT_LT(one.back()["loss"].get<double>(), 0.5);
  const std::string found = read_text(reference_of("pairs"));
  for (const auto& [ranks, sets] : std::vector<Layout>{{4, {}},
                                                       {2, {stage_3_}},
                                                       {4, {stage_3_}},
                                                       {2, {"training.recompute=full"}},
                                                       {2, {layered_, stage_3_}}}) {
    SCOPED_TRACE(cat(ranks, " ranks, ", sets.empty() ? "stage 2" : sets.front()));
    EXPECT_EQ(course(trained(sets, ranks)), course(one));
    EXPECT_EQ(read_text(reference_of("pairs")), found) << "the reference's, too";
  }
}

TEST_F(PreferenceLayouts, HostAndDriveGiveTheSameBitsWithEachReference) {
  const auto one = trained({});
  const std::string automatic = "training.preference.reference=auto";
  for (const auto& [device, reference] : std::vector<std::pair<std::string, std::string>>{
           {"cpu", automatic}, {"nvme", automatic}, {"nvme", copy_}}) {
    SCOPED_TRACE(cat(device, ", ", reference));
    const auto got = trained(joined_words(offloaded_to(device), {reference}), 2);
    EXPECT_EQ(course(got), course(one));
    EXPECT_GT(got.back()["mem"][device == "cpu" ? "host_peak" : "nvme_peak"].get<double>(), 0);
    EXPECT_EQ(fs::exists(reference_of("pairs")), reference == automatic);
  }
  expect_same(one, {}, {{1, {copy_}}, {4, {copy_, stage_3_}}});
}

TEST_F(PreferenceLayouts, StagesGiveTheSameBits) {
  const Words no_stage{"zero_optimization.stage=0"}, stages{"parallel.pipeline=2"};
  for (const Words& keys : {Words{}, kto(), Words{lora_}}) {
    const Words all = joined_words(no_stage, keys);
    expect_same(trained(all), all, {{2, stages}});
  }
}

TEST_F(PreferenceLayouts, StagesHaveCopiesOfTheirParts) {
  const Words keys{"zero_optimization.stage=0"};
  expect_same(trained(keys), keys, {{2, {"parallel.pipeline=2", copy_}}});
  const Outcome told = sherd(arguments("estimate", {"parallel.pipeline=2", copy_}, {"--ranks", "2"}));
  EXPECT_EQ(told.code, 0) << told.err;
}

TEST_F(PreferenceLayouts, TensorAndContextRanksAgreeToRounding) {
  const Words rows{"data.packing=stream", "train_micro_batch_size_per_gpu=2", "train_batch_size=8"};
  expect_near(trained({"parallel.tensor=2"}, 2), trained({}), 1e-5);
  for (const Words& keys : {rows, joined_words(kto(), rows)})
    expect_near(trained(joined_words(keys, {"parallel.context=2"}), 2), trained(keys), 1e-5);
}

TEST_F(PreferenceLayouts, AnswersJudgedByThemselvesHaveOneBaseline) {
  const auto one = trained(kto());
  ASSERT_EQ(one.size(), 3u);
  EXPECT_EQ(one.front()["loss"].get<double>(), 0.5);
  EXPECT_EQ(one.front()["objective"]["kl"].get<double>(), 0);
  double highest = 0;
  for (const Json& line : one) highest = std::max(highest, line["objective"]["kl"].get<double>());
  EXPECT_GT(highest, 1) << "mismatched answers became likelier";
  expect_same(one, kto(), {{4, {}}, {4, {stage_3_}}, {2, {layered_, stage_3_}}, {2, {copy_}}});
  for (const char* rows : {"2", "8"})
    expect_near(trained(joined_words(kto(), {cat("train_micro_batch_size_per_gpu=", rows)})), one, 1e-5);
}

TEST_F(PreferenceLayouts, AnAdapterThatIsOffIsTheModelAsItBegan) {
  const std::string in_4_bits = lora_.substr(0, lora_.size() - 1) + R"(, "base_format": "nf4"})";
  for (const Words& of : {Words{lora_}, Words{in_4_bits}, joined_words(kto(), {lora_})}) {
    const Words keys = joined_words(of, {"optimizer.params.lr=0.01"});
    const auto one = trained(keys);
    EXPECT_FALSE(fs::exists(reference_of("pairs")) || fs::exists(reference_of("judged")))
        << "there was an adapter to switch off";
    EXPECT_LT(one.back()["loss"].get<double>(), one.front()["loss"].get<double>());
    expect_same(
        one, keys,
        {{2, {stage_3_}}, {1, {"training.preference.reference=precomputed"}}, {2, {copy_, stage_3_}}});
  }
}

/// Where what the run begins from is an adapter that was trained, the reference is that.
TEST_F(PreferenceLayouts, AnAdapterThatWasTrainedIsPartOfTheReference) {
  const std::string base = "training.init_from=" + in("base");
  trained({"training.save_dir=" + in("base")}, 1, {"--steps", "2"});
  trained({base, lora_, "training.save_dir=" + in("tuned"), "optimizer.params.lr=0.02"});
  const Words keys{base, "training.adapter.init_from=" + in("tuned")};
  const auto one = trained(keys);
  EXPECT_TRUE(fs::exists(reference_of("pairs")));
  expect_begins_as_the_reference(one.front());
  expect_same(one, keys, {{2, {stage_3_}}, {2, {copy_, stage_3_}}});
}

TEST_F(PreferenceLayouts, ExpertsGiveTheSameBitsAndCountNoTokensOfTheReference) {
  const Words experts{"model.type=mixtral", "model.moe.experts=4", "model.moe.z_loss=0.01"};
  const auto one = trained(experts);
  ASSERT_EQ(one.size(), 3u);
  expect_begins_as_the_reference(one.front());
  EXPECT_TRUE(one.front()["moe"].contains("tokens"));
  expect_same(
      one, experts,
      {{2, {"parallel.expert=2"}}, {4, {"parallel.expert=4", stage_3_}}, {2, {"parallel.expert=2", copy_}}});
  const Words adapted = joined_words(experts, {lora_, "optimizer.params.lr=0.01"});
  expect_same(trained(adapted), adapted, {{1, {"training.preference.reference=precomputed"}}, {1, {copy_}}});
}

TEST_F(PreferenceLayouts, OtherObjectivesGiveTheSameBits) {
  const auto sigmoid = trained({"optimizer.params.lr=0.02", "train_batch_size=16"});
  for (const Words& keys :
       {Words{"training.objective=orpo"}, Words{"training.objective=simpo"}, Words{"training.objective=cpo"},
        Words{"training.objective=reward", "model.head=reward"},
        Words{R"(training.preference.loss_type="aot")", "optimizer.params.lr=0.02", "train_batch_size=16"},
        Words{"training.preference.ld_alpha=0.5"}}) {
    SCOPED_TRACE(keys.front());
    const auto one = trained(keys);
    if (keys.front().ends_with("\"aot\"")) {
      EXPECT_NE(course(one), course(sigmoid)) << "pairs were looked at together";
    }
    expect_same(one, keys, {{4, {stage_3_}}});
  }
}

}  // namespace
}  // namespace sherd::cli
