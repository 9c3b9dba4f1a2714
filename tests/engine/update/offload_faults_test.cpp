// A drive that fails in the middle of training: one clear error on every rank, soon, and nothing left on the
// books.
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>

#include "models/gpt.h"
#include "support/equality.h"
#include "support/temp_folder.h"

namespace sherd::test {
namespace {

using device::Tier;
using sherd::testing::TempFolder;

std::filesystem::path swap_file(const TempFolder& folder, int rank) {
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder.path()))
    if (entry.path().extension() == ".swap" &&
        entry.path().string().find(cat("rank_0000", rank)) != std::string::npos)
      return entry.path();
  throw std::runtime_error("no swap file");
}

RunSpec everything_on_nvme(const TempFolder& folder) {
  RunSpec spec;
  spec.stage = 3, spec.ranks = 2;
  spec.offload_param = spec.offload_optimizer = "nvme";
  spec.offload_param_extra = R"(, "max_in_cpu": 0)";
  spec.nvme_path = folder.path();
  return spec;
}

class DriveFault : public ::testing::TestWithParam<std::string> {};

TEST_P(DriveFault, EndsTheRunOnEveryRankAndNamesTheFileAndItsRank) {
  TempFolder folder;
  RunSpec spec = everything_on_nvme(folder);
  spec.aio = GetParam();
  const auto start = std::chrono::steady_clock::now();
  std::string told[2];
  try {
    launch_ranks(2, [&](DistributedPtr dist) {
      try {
        auto engine = make_engine(dist, spec);
        for (int step = 0; step < 6; ++step) {
          // The file loses its bytes while rank 1 still has it open.
          if (step == 2 && dist->rank() == 1) std::filesystem::resize_file(swap_file(folder, 1), 0);
          engine->train_batch(
              [&] { return synthetic_batch(engine->device(), 2, 24, 101, step, 0, dist->rank()); });
        }
      } catch (const Error& error) {
        told[dist->rank()] = error.what();
        throw;
      }
    });
    FAIL() << "nobody noticed";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::io) << error.what();
    EXPECT_NE(std::string(error.what()).find("rank_00001.swap"), std::string::npos) << error.what();
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos);
  }
  for (const std::string& message : told) {
    EXPECT_NE(message.find("rank_00001.swap"), std::string::npos) << message;
    EXPECT_NE(message.find("rank 1"), std::string::npos) << message;
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30));
}

INSTANTIATE_TEST_SUITE_P(Backends, DriveFault,
                         ::testing::Values(R"("backend": "auto")",
                                           R"("backend": "threads", "queue_depth": 2)"),
                         [](const auto& test) { return test.index == 0 ? "automatic" : "threads"; });

TEST(OffloadBooks, AreEmptyWhenTheEngineIsGone) {
  TempFolder folder;
  RunSpec spec = everything_on_nvme(folder);
  spec.cpu_checkpointing = true, spec.recompute = "full";
  launch_ranks(2, [&](DistributedPtr dist) {
    const auto device = device::make_cpu_device(1);
    {
      const config::Config config = config::parse_text(spec.config());
      Engine engine(dist, std::make_shared<models::Gpt>(models::gpt_config(config, 101)), config, device);
      engine.train_batch([&] { return synthetic_batch(engine.device(), 2, 24, 101, 0, 0, dist->rank()); });
      for (const Tier tier : {Tier::device, Tier::host, Tier::nvme})
        EXPECT_GT(device->ledger().peak(tier), 0u);
    }
    for (const Tier tier : {Tier::device, Tier::host, Tier::nvme})
      EXPECT_EQ(device->ledger().current(tier), 0u) << device::name_of(tier);
  });
}

TEST(OffloadRecovery, LoadingEndsAPassThatWasLeftOpen) {
  TempFolder folder;
  RunSpec spec = everything_on_nvme(folder);
  spec.max_reuse = 1'000'000'000;
  const auto losses = [&](bool stumble) {
    std::vector<double> out;
    launch_ranks(2, [&](DistributedPtr dist) {
      auto engine = make_engine(dist, spec);
      const auto batch = [&](int step) {
        return synthetic_batch(engine->device(), 2, 24, 101, step, 0, dist->rank());
      };
      for (int step = 0; step < 3; ++step) engine->train_batch([&] { return batch(step); });
      const auto weight = engine->sharded().trainable_segments().front()->layout().parameters().front();
      const auto value = [&] {
        const auto lease = engine->sharded().gather(*weight);
        const tensor::Tensor& held = weight->value;
        return std::vector<std::byte>(held.raw(), held.raw() + held.bytes());
      };
      const std::vector<std::byte> saved = value();
      if (stumble) {
        const std::string to = (folder.path() / "checkpoint").string();
        engine->save_checkpoint(to);
        engine->train_batch([&] { return batch(90); });
        EXPECT_NE(value(), saved);
        engine->forward(batch(91));  // and no backward: its units are still gathered
        engine->load_checkpoint(to);
        EXPECT_EQ(value(), saved);
      }
      for (int step = 3; step < 6; ++step) {
        const double loss = engine->train_batch([&] { return batch(step); }).loss;
        if (dist->rank() == 0) out.push_back(loss);
      }
    });
    return out;
  };
  EXPECT_EQ(losses(true), losses(false));
}

}  // namespace
}  // namespace sherd::test
