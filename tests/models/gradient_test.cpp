// Whole tiny models: gradients against central differences in fp64, and to the bit under every choice of
// recompute.
#include <gtest/gtest.h>

#include "support/numeric_gradient.h"
#include "support/tiny_gpt.h"

namespace sherd::models {
namespace {

using test::bytes_of;

struct Style {
  const char* name;
  GptConfig options;
};

class WholeModel : public ::testing::TestWithParam<Style> {
 protected:
  struct Outcome {
    std::vector<std::vector<std::byte>> bytes;  ///< loss, then every gradient
    std::uint64_t kept = 0;                     ///< activation bytes alive between forward and backward
    bool operator==(const Outcome& other) const { return bytes == other.bytes; }
  };

  static Outcome run(test::Cpu& cpu, DType dtype, Recompute recompute, const GptConfig& options,
                     const std::function<void(Gpt&)>& change = nullptr) {
    Gpt model(options);
    if (change) change(model);
    test::PlainParameters parameters(*cpu.kernels, model, dtype);
    const tensor::Batch batch = test::tiny_batch(cpu, options, 3, options.seq_length);
    const auto before = cpu.device->ledger().current(device::Tier::device, device::Category::activations);
    autograd::Tape tape(*cpu.kernels);
    tape.random = {11, 12};
    tape.recompute = recompute;
    const Var loss = model(tape, batch);
    Outcome out;
    out.kept = cpu.device->ledger().current(device::Tier::device, device::Category::activations) - before;
    tape.backward(loss);
    out.bytes.push_back(bytes_of(loss.value()));
    for (const auto& p : parameters.all())
      if (p->trainable) out.bytes.push_back(bytes_of(p->grad));
    return out;
  }

  /// Large enough for every kernel to cut its work in several pieces.
  static GptConfig larger(GptConfig o) {
    o.vocab_size = 301, o.hidden_size = 96, o.seq_length = 70, o.num_heads = 4, o.ffn_hidden_size = 150;
    if (o.mla.kv_lora_rank > 0)
      o.mla = {.kv_lora_rank = 40, .qk_nope_head_dim = 16, .qk_rope_head_dim = 8, .v_head_dim = 24};
    else
      o.head_dim = 24;
    if (o.has_encoder()) o.encoder.seq_length = 40;
    if (o.any_linear()) o.linear_attention.key_head_dim = 12, o.linear_attention.value_head_dim = 20;
    if (o.position == config::PositionType::learned) o.num_kv_heads = 4;
    o.init_std = 0.05;
    return o;
  }

  test::Cpu cpu_;
};

TEST_P(WholeModel, GradientsMatchDifferences) {
  Gpt model(GetParam().options);
  test::PlainParameters parameters(*cpu_.kernels, model, DType::f64);
  const tensor::Batch batch = test::tiny_batch(cpu_, model.config(), 2, 5);
  autograd::Tape tape(*cpu_.kernels);
  tape.random = {1, 2};
  tape.backward(model(tape, batch));
  for (const auto& p : parameters.all()) {
    const auto numeric =
        test::numeric_gradient({p->value.data<double>(), static_cast<std::size_t>(p->numel())}, [&] {
          autograd::Tape::NoGrad pause(tape);
          return *model(tape, batch).value().data<double>();
        });
    test::expect_close_gradients(cpu_.values(p->grad), numeric, p->name);
  }
}

TEST_P(WholeModel, RecomputeChangesNoBit) {
  const GptConfig options = larger(GetParam().options);
  for (const DType dtype : {DType::f32, DType::bf16, DType::f64}) {
    SCOPED_TRACE(name_of(dtype));
    const Outcome none = run(cpu_, dtype, Recompute::none, options);
    const Outcome selective = run(cpu_, dtype, Recompute::selective, options);
    const Outcome full = run(cpu_, dtype, Recompute::full, options);
    EXPECT_EQ(none, selective);
    EXPECT_EQ(none, full);
    const bool behind = options.norm_placement == config::NormPlacement::post ||
                        options.norm_placement == config::NormPlacement::post_residual;
    EXPECT_LT(selective.kept, none.kept * (behind ? 5 : 4) / (behind ? 6 : 5));
    EXPECT_LT(full.kept, selective.kept);
  }
}

TEST_P(WholeModel, NeitherDoesTheNumberOfThreads) {
  const GptConfig options = larger(GetParam().options);
  test::Cpu one(1), three(3);
  for (const DType dtype : {DType::f32, DType::bf16})
    EXPECT_EQ(run(one, dtype, Recompute::none, options), run(three, dtype, Recompute::none, options))
        << name_of(dtype);
}

TEST_P(WholeModel, FrozenPartsLeaveTheOthersGradientsAlone) {
  const GptConfig options = larger(GetParam().options);
  const Outcome all = run(cpu_, DType::f32, Recompute::none, options);
  for (const auto recompute : {Recompute::none, Recompute::selective, Recompute::full}) {
    std::vector<bool> trains{true};  // the loss
    const Outcome some = run(cpu_, DType::f32, recompute, options, [&](Gpt& model) {
      model.children()[0].second->freeze();  // tokens
      for (const auto& [name, child] : model.children())
        if (name == "blocks") child->children()[0].second->freeze();
      for (const auto& p : model.parameters()) trains.push_back(p->trainable);
    });
    Outcome want;
    for (std::size_t i = 0; i < trains.size(); ++i)
      if (trains[i]) want.bytes.push_back(all.bytes[i]);
    EXPECT_LT(want.bytes.size(), all.bytes.size());
    EXPECT_EQ(some, want);
  }
}

/// DeepSeek-V3's router, and a dense part beside the experts.
GptConfig sigmoid_experts() {
  GptConfig o = test::with_experts(test::tiny_llama());
  o.moe.router = RouterScores::sigmoid, o.moe.routed_scaling_factor = 2.5;
  o.moe.groups = 2, o.moe.top_groups = 1;
  o.moe.shared_experts = 1, o.moe.first_dense = 1;
  return o;
}

/// Each token takes one expert, if there is room in it.
GptConfig switch_experts() {
  GptConfig o = test::with_experts(test::tiny_gpt2());
  o.moe.top_k = 1, o.moe.norm_topk = false;
  o.moe.capacity_factor = 1, o.moe.drop = Drop::by_position;
  return o;
}

/// Qwen2-MoE's dense part.
GptConfig gated_shared_experts() {
  GptConfig o = test::with_experts(test::tiny_llama());
  o.moe.norm_topk = false, o.moe.shared_experts = 2, o.moe.shared_expert_gate = true;
  return o;
}

/// DeepSpeed's Residual-MoE.
GptConfig residual_experts() {
  GptConfig o = test::with_experts(test::tiny_gpt2());
  o.moe.top_k = 1, o.moe.norm_topk = false, o.moe.use_residual = true, o.moe.ffn_hidden_size = 6;
  return o;
}

INSTANTIATE_TEST_SUITE_P(
    Styles, WholeModel,
    ::testing::Values(Style{"gpt2", test::tiny_gpt2()}, Style{"llama", test::tiny_llama()},
                      Style{"gemma", test::tiny_gemma()}, Style{"post_norms", test::tiny_post_norms()},
                      Style{"bert", test::tiny_bert()}, Style{"latents", test::tiny_latents()},
                      Style{"hybrid", test::tiny_hybrid()}, Style{"t5", test::with_dropout(test::tiny_t5())},
                      Style{"gpt_oss", test::with_experts(test::tiny_gpt_oss())},
                      Style{"gpt2_experts", test::with_experts(test::tiny_gpt2())},
                      Style{"llama_sigmoid_experts", sigmoid_experts()},
                      Style{"gpt2_switch", switch_experts()},
                      Style{"llama_gated_shared", gated_shared_experts()},
                      Style{"gpt2_residual", residual_experts()},
                      Style{"gpt2_dropout", test::with_dropout(test::tiny_gpt2())},
                      Style{"llama_dropout", test::with_dropout(test::tiny_llama())}),
    [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace sherd::models
