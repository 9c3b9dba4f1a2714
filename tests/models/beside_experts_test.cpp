// The parts beside experts, put together in double as Qwen2-MoE and DeepSpeed's MoE layer do.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "models/transformer_block.h"
#include "support/tiny_gpt.h"

namespace sherd::models {
namespace {

using Values = std::vector<double>;

class BesideExperts : public ::testing::Test {
 protected:
  /// All of a layer's output, that of its experts alone and that of what lies beside them; and x·wᵀ + b of a
  /// gate of so many outputs.
  void run(const GptConfig& options, const char* beside, std::int64_t width, const std::string& gate,
           std::size_t outputs) {
    const GptConfig o = options.resolved();
    const tensor::Tensor x = cpu_.normal({2, 5, o.hidden_size}, 9);
    ExpertsAndShared whole(o, "blocks.0.mlp", {}, nullptr);
    const test::PlainParameters all(*cpu_.kernels, whole, DType::f64);
    Values w, b(outputs);
    for (const auto& p : all.all()) {
      if (p->name == gate + ".bias")
        for (std::size_t i = 0; i < outputs; ++i)
          b[i] = p->value.data<double>()[i] = 0.4 - 0.9 * static_cast<double>(i);
      if (p->name == gate + ".weight") w = cpu_.values(p->value);
    }
    autograd::Tape tape(*cpu_.kernels);
    whole_ = cpu_.values(whole(tape, tape.input(x)).value());
    parallel::Moe experts(o.experts());
    const test::PlainParameters of_experts(*cpu_.kernels, experts, DType::f64);
    experts_ = cpu_.values(experts(tape, tape.input(x)).value());
    const auto dense = std::make_shared<FeedForward>(o, width, "", parallel::Layout());
    Within within(beside, dense);
    const test::PlainParameters of_dense(*cpu_.kernels, within, DType::f64);
    beside_ = cpu_.values((*dense)(tape, tape.input(x)).value());
    const Values rows = cpu_.values(x);
    hidden_ = static_cast<std::size_t>(o.hidden_size);
    gates_.clear();
    for (std::size_t t = 0; t < 10; ++t)
      for (std::size_t i = 0; i < outputs; ++i)
        gates_.push_back(
            b[i] + std::inner_product(&w[i * hidden_], &w[i * hidden_] + hidden_, &rows[t * hidden_], 0.0));
  }
  void expect(std::size_t token, double of_experts, double of_beside) const {
    for (std::size_t i = token * hidden_; i < (token + 1) * hidden_; ++i)
      ASSERT_NEAR(whole_[i], of_experts * experts_[i] + of_beside * beside_[i], 1e-12) << token;
  }

  /// Gives a part the name that it has beside experts, and so the same parameters.
  struct Within : nn::Module {
    Within(const char* name, std::shared_ptr<FeedForward> part) { add(name, std::move(part)); }
  };
  test::Cpu cpu_;
  Values whole_, experts_, beside_, gates_;
  std::size_t hidden_ = 0;
};

TEST_F(BesideExperts, ASharedPartIsAddedTimesItsGate) {
  GptConfig o = test::with_experts(test::tiny_llama());
  o.moe.shared_experts = 2;
  run(o, "shared", 20, "", 0);
  for (std::size_t t = 0; t < 10; ++t) expect(t, 1, 1);
  o.moe.shared_expert_gate = true;
  run(o, "shared", 20, "shared_gate", 1);
  for (std::size_t t = 0; t < 10; ++t) expect(t, 1, 1 / (1 + std::exp(-gates_[t])));
}

TEST_F(BesideExperts, AResidualPartIsWeighedAgainstThem) {
  GptConfig o = test::with_experts(test::tiny_gpt2());
  o.moe.use_residual = true, o.moe.ffn_hidden_size = 6;
  run(o, "dense", 10, "coefficient", 2);
  bool first = false, second = false;  // which weighs more
  for (std::size_t t = 0; t < 10; ++t) {
    const double a = std::exp(gates_[2 * t]), b = std::exp(gates_[2 * t + 1]);
    expect(t, a / (a + b), b / (a + b));
    first |= a > b, second |= b > a;
  }
  EXPECT_TRUE(first && second);
}

}  // namespace
}  // namespace sherd::models
