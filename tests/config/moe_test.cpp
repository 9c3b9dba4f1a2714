// Section model.moe.
#include <gmock/gmock.h>

#include "config/support.h"

namespace sherd::config {
namespace {

using ::testing::HasSubstr;

std::string with_moe(const std::string& moe, const std::string& rest = "") {
  return R"({"model": {"seq_length": 8, "hidden_size": 96, "num_layers": 4, "num_heads": 4, "moe": {)" + moe +
         "}}" + rest + "}";
}

Moe moe_of(const std::string& text) {
  return parse_text(with_moe(text)).model->moe;
}

TEST(MoeKeys, HaveDefaultsThatFollowFromOthers) {
  const Moe moe = moe_of(R"("experts": 8)");
  EXPECT_EQ(moe.top_k, 2);
  EXPECT_EQ(moe.ffn_hidden_size, 384);
  EXPECT_TRUE(moe.norm_topk);
  EXPECT_EQ(moe.aux_loss, 0.01);
  EXPECT_EQ(moe.aux_loss_type, BalanceLoss::all_choices);
  EXPECT_EQ(moe.bias_update, 0);
  EXPECT_EQ(moe.jitter, 0);
  EXPECT_FALSE(moe.shared_expert_gate || moe.use_residual);
  EXPECT_FALSE(moe_of(R"("experts": 8, "top_k": 1)").norm_topk);
  EXPECT_EQ(moe_of(R"("experts": 8, "aux_loss_type": "hf")").aux_loss_type, BalanceLoss::pooled);
}

TEST(MoeKeys, TellWhatDoesNotFit) {
  const auto error = [](const std::string& moe, const std::string& rest = "") {
    return error_of(with_moe(moe, rest));
  };
  EXPECT_EQ(error(R"("top_k": 2)"), "run.json:1: model.moe: needs \"experts\"");
  EXPECT_THAT(error(R"("experts": 8, "top_k": 9)"),
              HasSubstr("model.moe: top_k 9 is more than the 8 experts that a token can take"));
  EXPECT_THAT(error(R"("experts": 8, "groups": 4, "top_k": 3)"),
              HasSubstr("the 2 experts that a token can take in 1 of 4 groups"));
  EXPECT_THAT(error(R"("experts": 8, "groups": 3)"), HasSubstr("groups 3 does not divide 8 experts"));
  EXPECT_THAT(error(R"("experts": 8, "top_k": 1, "norm_topk": true)"), HasSubstr("the router learn nothing"));
  EXPECT_THAT(error(R"("experts": 8, "every": 5)"), HasSubstr("none of 4 blocks has experts"));
  EXPECT_THAT(
      error(R"("experts": 8, "shared_experts": 1, "use_residual": true)"),
      HasSubstr("use_residual and shared_experts are both a dense part beside the experts; take one"));
  EXPECT_THAT(error(R"("experts": 8, "jitter": 1)"),
              HasSubstr("model.moe.jitter: must be a number from 0 to 0.99"));
  EXPECT_THAT(error(R"("experts": 8, "bias_update": -1)"),
              HasSubstr("model.moe.bias_update: must be a number"));
  EXPECT_THAT(error(R"("experts": 8, "aux_loss_type": "swich")"), HasSubstr("did you mean \"switch\"?"));
  EXPECT_THAT(error(R"("experts": 8, "aux_loss_type": "hf")", R"(, "parallel": {"pipeline": 2})"),
              HasSubstr("model.moe.aux_loss_type: \"hf\" is a loss of all layers together, and with "
                        "parallel.pipeline 2 a stage knows its own alone; take \"switch\" or \"gshard\""));
}

TEST(MoeKeys, KnowTheWordsOfOthers) {
  const auto advice = [](const std::string& key) {
    const std::string text = error_of(with_moe("\"experts\": 8, \"" + key + "\": 1"));
    const std::string begin = "run.json:1: unknown key \"model.moe." + key + "\"; ";
    EXPECT_TRUE(text.starts_with(begin)) << text;
    return text.substr(std::min(begin.size(), text.size()));
  };
  EXPECT_EQ(advice("num_experts"), "did you mean \"model.moe.experts\"?");
  EXPECT_EQ(advice("ep_size"), "did you mean \"parallel.expert\"?");
  EXPECT_EQ(advice("k"), "did you mean \"model.moe.top_k\"?");
  EXPECT_EQ(advice("num_experts_per_tok"), "did you mean \"model.moe.top_k\"?");
  EXPECT_EQ(advice("min_capacity"),
            "\"model.moe.capacity_factor\" alone says how many choices an expert takes");
  EXPECT_EQ(advice("noisy_gate_policy"),
            "\"model.moe.jitter\" 0.01 is DeepSpeed's \"Jitter\"; its \"RSample\" is not offered");
  EXPECT_EQ(advice("drop_tokens"), "without \"model.moe.capacity_factor\" nothing is dropped");
  EXPECT_EQ(advice("eval_capacity_factor"), "\"model.moe.capacity_factor\" holds in evaluations too");
  EXPECT_EQ(advice("aux_los"), "did you mean \"aux_loss\"?");
}

TEST(MoeKeys, NoteWhatHasNoEffect) {
  const Config config = parse_text(with_moe(
      R"("experts": 8, "drop": "position", "aux_loss": 0, "aux_loss_type": "gshard", "shared_expert_gate": true)"));
  EXPECT_THAT(config.notes, ::testing::IsSupersetOf(
                                {"model.moe.drop: no effect: without capacity_factor nothing is dropped",
                                 "model.moe.aux_loss_type: no effect: aux_loss is 0",
                                 "model.moe.shared_expert_gate: no effect: there are no shared_experts"}));
}

}  // namespace
}  // namespace sherd::config
