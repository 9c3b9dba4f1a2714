// What a step asks of a card, per layer and beside its layers, against a written budget (docs/gpu.md), so
// that no change asks for more without saying so. Attention runs on own kernels here, one forward and three
// backward, which on a card are one call of cuDNN each way.
#include <gtest/gtest.h>

#include "emulated_gpu/card.h"
#include "support/equality.h"
#include "support/print_dtype.h"

namespace sherd::test {
namespace {

namespace card = emulated_gpu;

/// A step's kernels launched, products, copies and fills, and the bytes of copies to the card and to the
/// host. The last two are of parameters that lie there, or of what the host looks at.
struct Asked {
  long kernels, products, copies, fills, up, down;

  static Asked of(const card::Counts& counts) {
    const auto number = [](std::size_t n) { return static_cast<long>(n); };
    return {number(counts.kernels), number(counts.library_calls), number(counts.copies), number(counts.fills),
            number(counts.up),      number(counts.down)};
  }
  Asked minus(const Asked& other, long times = 1) const {
    return {kernels - times * other.kernels, products - times * other.products,
            copies - times * other.copies,   fills - times * other.fills,
            up - times * other.up,           down - times * other.down};
  }
  bool operator==(const Asked&) const = default;
};
void PrintTo(const Asked& a, std::ostream* out) {
  *out << "{" << a.kernels << ", " << a.products << ", " << a.copies << ", " << a.fills << ", " << a.up
       << ", " << a.down << "}";
}

/// The second step's requests, and how often the host waits in it.
struct Step {
  Asked asked;
  std::size_t host_waits;
};
Step second_step(RunSpec spec, int layers) {
  spec.device = "cuda", spec.ranks = 1, spec.layers = layers, spec.steps = 2;
  spec.hidden = 128, spec.rows = 1, spec.seq = 16, spec.dropout = 0;
  card::Counts first;
  spec.between_steps = [&](Engine& engine) {
    if (engine.global_steps() == 1) first = card::counts();
  };
  card::Counts step;
  spec.at_end = [&](Engine&) { step = card::counts() - first; };
  train_local(spec);
  return {Asked::of(step), step.host_waits};
}

struct Budget {
  const char* name;
  void (*change)(RunSpec&);
  Asked layer, rest;
  std::size_t host_waits;  ///< of three layers, at most
};

class GpuBudget : public ::testing::TestWithParam<Budget> {};

TEST_P(GpuBudget, IsWhatAStepAsksFor) {
  RunSpec spec;
  GetParam().change(spec);
  const Step two = second_step(spec, 2), three = second_step(spec, 3);
  const Asked layer = three.asked.minus(two.asked);
  EXPECT_EQ(layer, GetParam().layer) << "a layer";
  EXPECT_EQ(two.asked.minus(layer, 2), GetParam().rest) << "beside the layers";
  EXPECT_LE(three.host_waits, GetParam().host_waits);
}

INSTANTIATE_TEST_SUITE_P(
    Of, GpuBudget,
    ::testing::Values(Budget{"gpt2", [](RunSpec&) {}, {24, 12, 0, 0, 0, 0}, {22, 3, 7, 2, 136, 212}, 4},
                      Budget{"llama",
                             [](RunSpec& s) { s.llama = true, s.kv_heads = 2; },
                             {18, 12, 0, 0, 0, 0},
                             {20, 3, 7, 2, 136, 212},
                             4},
                      Budget{"experts",
                             [](RunSpec& s) { s.moe = R"("experts": 4, "top_k": 2, "ffn_hidden_size": 64)"; },
                             {66, 33, 13, 1, 272, 640},
                             {22, 3, 7, 2, 136, 212},
                             10},
                      Budget{"gpt2_recomputed",
                             [](RunSpec& s) { s.recompute = "full"; },
                             {30, 16, 0, 0, 0, 0},
                             {22, 3, 7, 2, 136, 212},
                             4},
                      Budget{"gpt2_stage_3",
                             [](RunSpec& s) { s.stage = 3; },
                             {24, 12, 0, 0, 0, 0},
                             {22, 3, 7, 2, 136, 212},
                             4},
                      Budget{"gpt2_optimizer_on_host",
                             [](RunSpec& s) { s.stage = 2, s.offload_optimizer = "cpu"; },
                             {23, 12, 14, 0, 363520, 727040},
                             {20, 3, 15, 2, 37512, 74964},
                             9},
                      Budget{"gpt2_all_on_host",
                             [](RunSpec& s) { s.stage = 3, s.offload_optimizer = s.offload_param = "cpu"; },
                             {23, 12, 3, 0, 727040, 363520},
                             {20, 3, 15, 2, 148616, 37588},
                             16}),
    [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace sherd::test
