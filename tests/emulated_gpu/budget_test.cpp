// What a step asks of a card, against a written budget, so that no change makes it more without saying so:
// kernels, products by cuBLASLt, waits and bytes. Attention runs on own kernels here, one forward and three
// backward, which on a card are one call of cuDNN each way.
#include <gtest/gtest.h>

#include "emulated_gpu/card.h"
#include "support/equality.h"

namespace sherd::test {
namespace {

namespace card = emulated_gpu;

/// What the last of three steps asked for, of as many layers.
card::Counts of_a_step(RunSpec spec, int layers) {
  spec.device = "cuda", spec.ranks = 1, spec.layers = layers, spec.steps = 3;
  card::Counts before, step;
  spec.between_steps = [&](Engine&) {
    const card::Counts now = card::counts();
    step = now - before, before = now;
  };
  train_local(spec);
  return step;
}

struct Case {
  const char* name;
  void (*change)(RunSpec&);
};

TEST(GpuBudget, print) {
  for (const Case& c :
       {Case{"gpt2", [](RunSpec&) {}},
        {"llama", [](RunSpec& s) { s.llama = true; }},
        {"moe", [](RunSpec& s) { s.moe = R"("experts": 4, "top_k": 2, "ffn_hidden_size": 64)"; }},
        {"gpt2 stage 3", [](RunSpec& s) { s.stage = 3; }},
        {"gpt2 optimizer off", [](RunSpec& s) { s.stage = 2, s.offload_optimizer = "cpu"; }},
        {"gpt2 all off", [](RunSpec& s) { s.stage = 3, s.offload_optimizer = s.offload_param = "cpu"; }},
        {"gpt2 full recompute", [](RunSpec& s) { s.recompute = "full"; }}}) {
    RunSpec spec;
    spec.dropout = 0;
    c.change(spec);
    for (int layers : {2}) {
      const card::Counts a = of_a_step(spec, layers);
      std::printf(
          "%-20s %d kernels %zu library %zu copies %zu fills %zu up %zu down %zu within %zu events %zu waits "
          "%zu host_waits %zu blocks %zu\n",
          c.name, layers, a.kernels, a.library_calls, a.copies, a.fills, a.up, a.down, a.within, a.events,
          a.waits, a.host_waits, a.blocks);
    }
  }
}

}  // namespace
}  // namespace sherd::test
