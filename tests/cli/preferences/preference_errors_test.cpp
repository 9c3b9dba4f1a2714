// Wrong combinations of preferences, data and layouts: a line each, that says what to do.
#include "cli/preferences/preference_fixture.h"

namespace sherd::cli {
namespace {

class PreferenceErrors : public PreferenceRuns {
 protected:
  struct Wrong {
    Words sets;
    std::string says;
    int ranks = 1;
  };
  void expect_refused(const std::vector<Wrong>& all) const {
    for (const auto& [sets, says, ranks] : all) {
      const Outcome got = learn(sets, ranks, {"--steps", "1"});
      EXPECT_EQ(got.code, 2) << sets.front() << ": " << got.err;
      EXPECT_EQ(count(got.err, "error: "), 1u) << sets.front() << ": " << got.err;
      EXPECT_THAT(got.err, HasSubstr(says)) << sets.front();
      EXPECT_FALSE(fs::exists(reference_of("pairs"))) << sets.front();
    }
  }
  std::string path_of(const std::string& name) const { return "data.path=" + in(name); }
  static std::string loss(const std::string& names) { return cat("training.preference.loss_type=", names); }
  static std::string adapter(const std::string& more) {
    return cat(R"(training.adapter={"type": )", more, "}");
  }

  const std::string dpo_ = "training.objective=dpo", kto_ = "training.objective=kto",
                    next_ = "training.objective=next_token", reward_ = "training.objective=reward",
                    reward_head_ = "model.head=reward", stream_ = "data.packing=stream",
                    adapter_ = "training.preference.reference=adapter",
                    pairs_of_rows_ = "train_micro_batch_size_per_gpu=2";
};

TEST_F(PreferenceErrors, DataOfAnotherObjective) {
  prepare("texts", R"({"prompt": "a", "completion": "b"})");
  expect_refused({
      {{next_},
       cat("'", in("pairs"), R"(' were compared: set training.objective to "dpo" or one of its kin)")},
      {{"training.objective=auto"}, R"(were compared: set training.objective to "dpo")"},
      {{next_, path_of("judged")},
       cat("'", in("judged"), R"(' were judged: set training.objective to "kto")")},
      {{dpo_, path_of("texts")},
       cat(R"("dpo" learns which answers people prefer, and ')", in("texts"),
           "' has none: prepare it from lines with 'chosen' and 'rejected'")},
      {{kto_, path_of("texts")}, "from lines with 'chosen' and 'rejected', or with 'label'"},
      {{dpo_, path_of("judged")}, R"(are judged by themselves, and training.objective "dpo" compares two)"},
      {{reward_, reward_head_, path_of("judged")}, R"("reward" compares two: set it to "kto")"},
  });
}

TEST_F(PreferenceErrors, LossesOfAnotherObjective) {
  expect_refused({
      {{loss(R"("kto")")}, R"(loss_type "kto" is not learned with the objective "dpo": take "kto")"},
      {{loss(R"("bradley_terry")")}, R"(is not learned with the objective "dpo": take "reward")"},
      {{loss(R"("sigmoid")"), kto_, path_of("judged")},
       R"("kto", whose answers are judged by themselves: take "dpo")"},
      {{loss(R"("hinge")"), "training.objective=orpo"},
       R"(loss_type is of the objectives "dpo" and "kto"; "orpo" is a loss of its own)"},
      {{loss(R"("exo_pair")")}, "takes the logarithm of label_smoothing: give one above 0"},
      {{loss(R"("orpo")")},
       R"(loss_type "orpo" has no reference, and others here would: take the objective)"},
      {{loss(R"(["sigmoid", "simpo"])")}, R"(take the objective "simpo", or set reference to "none")"},
      {{loss(R"(["aot", "aot_unpaired"])")}, "look for other partners of a pair: take one of them"},
      {{loss(R"("nca_pair")"), "training.preference.f_divergence_type=js_divergence"},
       R"(loss_type "nca_pair" is of f_divergence_type "reverse_kl" alone)"},
      {{loss(R"(["sigmoid", "sft"])"), "training.preference.loss_weights=[1]"},
       "loss_weights has 1 number for 2 of loss_type"},
      {{loss(R"("sigmoids")")}, R"(did you mean "sigmoid"?)"},
      {{"training.preference.ld_alpha=0.5", kto_, path_of("judged")},
       R"(ld_alpha compares the answers of a pair, and "kto" has none)"},
      {{"training.preference.beta=0"}, "training.preference.beta: must be a number > 0"},
      {{"training.preference.label_smoothing=0.5"}, "must be a number from 0 to 0.499"},
  });
}

TEST_F(PreferenceErrors, ReferencesThatThereAreNot) {
  expect_refused({
      {{adapter_}, R"(there is none (training.adapter): take "precomputed" or "copy")"},
      {{adapter_, adapter(R"("lora", "rank": 2, "modules_to_save": ["lm_head"])")},
       "this one changes weights that stay behind (modules_to_save"},
      {{adapter(R"("prompt_tuning", "virtual_tokens": 4)")},
       "training.adapter is a prompt: take another type"},
      {{adapter(R"("p_tuning", "virtual_tokens": 4)")}, "training.adapter is a prompt: take another type"},
  });
}

TEST_F(PreferenceErrors, ModelsThatCannot) {
  const std::string together =
      R"(objective "reward" and model.head "reward" go together: set both, or neither)";
  expect_refused({
      {{reward_}, together},
      {{reward_head_}, together},
      {{reward_, reward_head_, adapter(R"("lora", "rank": 2)")}, R"(add "modules_to_save": ["score"])"},
      {{"model.type=bert"}, R"("dpo" is learned by models that write, and model.causal is false)"},
      {{"model.type=t5", stream_, pairs_of_rows_}, R"("spans" or "seq2seq": take one of them)"},
  });
}

TEST_F(PreferenceErrors, LayoutsThatPartPairs) {
  expect_refused({
      {{stream_, "train_micro_batch_size_per_gpu=3", "train_batch_size=3"},
       R"(is 3: make it even, or set data.packing to "documents")"},
      {{stream_, pairs_of_rows_, "training.preference.ld_alpha=0.5", "parallel.context=2"},
       "of which context ranks hold parts: set parallel.context to 1, or ld_alpha to 1",
       2},
      {{"parallel.context=2"}, R"(take "stream", or set parallel.context to 1)", 2},
  });
  // Answers by themselves are no pairs, and packed ones no rows.
  for (const Words& sets : {Words{kto_, path_of("judged"), stream_}, Words{}}) {
    const Outcome got = learn(joined_words(sets, {"train_micro_batch_size_per_gpu=3", "train_batch_size=3"}),
                              1, {"--steps", "1"});
    EXPECT_EQ(got.code, 0) << got.err;
  }
}

/// A micro-batch that follows from the batch and the ranks may part pairs as one that was given may.
TEST_F(PreferenceErrors, RowsThatFollowFromTheRanks) {
  std::string text = read_text(folder_ / "p.json");
  const std::string key = R"("train_micro_batch_size_per_gpu": 1, )";
  text.erase(text.find(key), key.size());
  write_text(folder_ / "p.json", text);
  const Outcome even = learn({stream_}, 2, {"--steps", "1"});
  EXPECT_EQ(even.code, 0) << even.err;
  fs::remove(reference_of("pairs"));
  expect_refused({{{stream_}, "make it even, or set data.packing to \"documents\"", 4},
                  {{stream_, "gradient_accumulation_steps=4"}, "make it even", 1}});
}

TEST_F(PreferenceErrors, KeysWithoutEffectAreTold) {
  const auto told = [&](const Words& sets) {
    const Outcome got = learn(sets, 2, {"--steps", "1"});
    EXPECT_EQ(got.code, 0) << got.err;
    return got.err;
  };
  EXPECT_EQ(
      count(told({"training.preference.simpo_gamma=0.7", "training.preference.cpo_alpha=2"}), "no effect: "),
      2u);
  EXPECT_THAT(told({"training.preference.f_alpha_divergence_coef=0.7"}),
              HasSubstr("no effect: f_divergence_type is not alpha_divergence"));
  EXPECT_THAT(told({kto_, path_of("judged"), "training.preference.label_smoothing=0.1"}),
              HasSubstr("training.preference.label_smoothing: no effect: only "));
  EXPECT_EQ(count(told({"training.preference.label_smoothing=0.1"}), "no effect: "), 0u);
  prepare("texts", R"({"prompt": "a", "completion": "b"})");
  EXPECT_THAT(told({next_, path_of("texts"), "data.split=[1, 0]", "training.preference.beta=0.2"}),
              HasSubstr("training.preference: no effect: the objective is none of preferences"));
}

TEST_F(PreferenceErrors, AnswersWithoutRoomAreLeftOutOrCutAndTold) {
  const Outcome none = learn({"model.seq_length=8"}, 1, {"--steps", "1"});
  EXPECT_EQ(none.code, 1);
  EXPECT_THAT(none.err, HasSubstr("has no pair of answers to learn from in 36 lines whose answers fit"));
  const Outcome cut = learn({"model.seq_length=48"}, 1, {"--steps", "1"});
  EXPECT_EQ(cut.code, 0) << cut.err;
  EXPECT_THAT(cut.err,
              HasSubstr("model.seq_length, which holds both texts of a pair: their ends are left out"));
}

}  // namespace
}  // namespace sherd::cli
