// A dry run predicts for a GPU what a run on one charges: model states to the byte, the host tier
// within 5 %, and the device tier but for the products' workspace, which is booked at its ceiling.
#include <gtest/gtest.h>

#include "engine/estimate/estimate.h"
#include "models/gpt.h"
#include "support/equality.h"
#include "support/gpu/gpu.h"
#include "support/temp_folder.h"

namespace sherd::test {
namespace {

using device::Category;
using device::Tier;
using engine::MemoryReport;

constexpr std::int64_t vocab = 509;

const MemoryReport::TierMemory& book(const MemoryReport& report, Tier tier) {
  return report.tiers[static_cast<std::size_t>(tier)];
}

TEST(GpuEstimate, is_what_a_run_books) {
  SHERD_NEEDS_GPU();
  const bool small = on_emulated_gpu();
  const std::int64_t rows = 2, seq = small ? 32 : 256, hidden = small ? 64 : 512, layers = small ? 2 : 8;
  const sherd::testing::TempFolder folder;
  for (const char* optimizer : {"none", "cpu", "nvme"}) {
    SCOPED_TRACE(optimizer);
    const config::Config config = config::parse_text(cat(
        R"({"bf16": {"enabled": true}, "train_micro_batch_size_per_gpu": )", rows,
        R"(, "optimizer": {"type": "AdamW", "groups": [{"match": "*up*", "type": "Lamb"}]}, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": ")",
        optimizer, R"(", "nvme_path": ")", folder.path().string(), R"("}}, "device": {"type": "cuda"},
        "model": {"type": "gpt2", "vocab_size": )",
        vocab, R"(, "seq_length": )", seq, R"(, "hidden_size": )", hidden, R"(, "num_layers": )", layers,
        R"(, "num_heads": 8, "dropout": 0}})"));
    const auto model = [&] { return std::make_shared<models::Gpt>(models::gpt_config(config, vocab)); };
    engine::Estimate real;
    launch_ranks(1, [&](DistributedPtr dist) {
      Engine engine(dist, model(), config);
      real.states = MemoryReport::of(engine.device());
      for (int step = 0; step < 3; ++step)
        engine.train_batch([&] { return synthetic_batch(engine.device(), rows, seq, vocab, step, 0, 0); });
      real.peaks = MemoryReport::of(engine.device());
    });
    const auto batch = [&](device::Device& device) {
      return tensor::Batch{{"tokens", tensor::Tensor::empty(device, {rows, seq}, DType::i32)},
                           {"labels", tensor::Tensor::empty(device, {rows, seq}, DType::i32)}};
    };
    const engine::Estimate planned = engine::estimate(config, model(), batch, {}, {.evaluates = false});
    for (const Category category : {Category::parameters, Category::gradients, Category::optimizer})
      for (const Tier tier : {Tier::device, Tier::host, Tier::nvme})
        EXPECT_EQ(book(planned.states, tier).current[static_cast<std::size_t>(category)],
                  book(real.states, tier).current[static_cast<std::size_t>(category)])
            << name_of(category) << " in the tier " << name_of(tier);
    const auto peak = [](const engine::Estimate& e, Tier tier) {
      return static_cast<double>(book(e.peaks, tier).total_peak);
    };
    EXPECT_NEAR(peak(planned, Tier::host), peak(real, Tier::host), 0.05 * peak(real, Tier::host) + 4096);
    EXPECT_GE(peak(planned, Tier::device), 0.95 * peak(real, Tier::device));
    EXPECT_LE(peak(planned, Tier::device), 1.05 * peak(real, Tier::device) + (32 << 20));
  }
}

}  // namespace
}  // namespace sherd::test
