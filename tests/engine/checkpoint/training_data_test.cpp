// Training data in checkpoints: the loader's position, without the caller's doing, and what the data is known
// by.
#include <gtest/gtest.h>

#include "base/log.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/initialize.h"
#include "support/expect_error.h"
#include "support/odd_models.h"
#include "support/temp_folder.h"

namespace sherd::test {
namespace {

using sherd::testing::expect_error;
using sherd::testing::TempFolder;
using tensor::Tensor;

/// Samples that all differ, so that losses tell which were read.
std::shared_ptr<const data::Dataset> numbered_samples(device::Device& host) {
  return data::make_dataset(40, [&host](std::int64_t index) -> tensor::Batch {
    std::vector<float> x;
    for (int i = 0; i < 8; ++i)
      x.push_back(uniform_at({5, static_cast<std::uint64_t>(index)}, static_cast<std::uint64_t>(i)));
    return {{"x", Tensor::of<float>(host, {8}, x)},
            {"y", Tensor::of<float>(host, {1}, std::vector<float>{static_cast<float>(index) / 40})}};
  });
}

class TrainingData : public ::testing::Test {
 protected:
  Initialized make(const DistributedPtr& dist) {
    return initialize({.dist = dist,
                       .model = std::make_shared<Odd>(),
                       .config = odd_config(2),
                       .training_data = numbered_samples(*host_)});
  }
  static std::vector<double> losses(Initialized& run, int steps) {
    std::vector<double> out;
    for (int i = 0; i < steps; ++i)
      out.push_back(run.engine->train_batch([&] { return run.loader->next(); }).loss);
    return out;
  }
  std::string folder() const { return folder_.path().string(); }

  std::shared_ptr<device::Device> host_ = device::make_cpu_device(1);
  TempFolder folder_;
};

TEST_F(TrainingData, LoadingGoesOnWithTheNextSample) {
  launch_ranks(2, [&](DistributedPtr dist) {
    Initialized whole = make(dist);
    losses(whole, 7);  // the epoch has 5 steps
    whole.engine->save_checkpoint(folder());
    const std::int64_t position = whole.loader->position();
    EXPECT_EQ(position, 7 * 8);
    const std::vector<double> expected = losses(whole, 5);

    Initialized resumed = make(dist);
    resumed.engine->load_checkpoint(folder());
    EXPECT_EQ(resumed.loader->position(), position);
    EXPECT_EQ(losses(resumed, 5), expected);

    whole.engine->load_checkpoint(folder());  // also back, in the engine that wrote it
    EXPECT_EQ(whole.loader->position(), position);
    EXPECT_EQ(losses(whole, 5), expected);
  });
}

/// 40 samples; a step takes 8 on two ranks, 4 on one and 12 on three.
TEST_F(TrainingData, AnotherNumberOfRanksGoesOnWithTheNextSample) {
  launch_ranks(2, [&](DistributedPtr dist) {
    Initialized run = make(dist);
    losses(run, 6);
    run.engine->save_checkpoint(folder());
  });
  for (const int ranks : {1, 3}) {
    set_log_level(LogLevel::info);
    ::testing::internal::CaptureStderr();
    launch_ranks(ranks, [&](DistributedPtr dist) {
      Initialized run = make(dist);
      run.engine->load_checkpoint(folder());
      // One rank's epoch has 40 samples, as that of two; that of three 42.
      EXPECT_EQ(run.loader->position(), (ranks == 3 ? 42 : 40) + 8);
      losses(run, 1);
      EXPECT_EQ(run.loader->position(), (ranks == 3 ? 42 : 40) + 8 + 4 * ranks);
    });
    const std::string log = ::testing::internal::GetCapturedStderr();
    EXPECT_THAT(log, ::testing::HasSubstr(cat("2 ranks wrote it, and it goes on with ", ranks)));
    EXPECT_THAT(log, ::testing::HasSubstr(cat("train_batch_size was 8 and is ", 4 * ranks)));
    const auto off =
        ::testing::HasSubstr("the data go on at sample 50, which is no multiple of train_batch_size (12)");
    if (ranks == 3) {
      EXPECT_THAT(log, off);
    } else {
      EXPECT_THAT(log, ::testing::Not(::testing::HasSubstr("the data go on at")));
    }
  }
}

TEST_F(TrainingData, TheLoaderMayGoBeforeTheEngine) {
  launch_ranks(1, [&](DistributedPtr dist) {
    Initialized run = make(dist);
    losses(run, 3);
    run.loader.reset();
    run.engine->save_checkpoint(folder());
    run.engine->load_checkpoint(folder());
    Initialized resumed = make(dist);
    resumed.engine->load_checkpoint(folder());
    EXPECT_EQ(resumed.loader->position(), 3 * 4);
  });
}

TEST_F(TrainingData, ACheckpointWithoutAPositionLeavesTheLoaderAndSaysSo) {
  launch_ranks(1, [&](DistributedPtr dist) {
    Engine engine(dist, std::make_shared<Odd>(), odd_config(2));
    engine.save_checkpoint(folder());
    Initialized run = make(dist);
    run.loader->seek(12);
    set_log_level(LogLevel::info);  // other tests may have lowered it
    ::testing::internal::CaptureStderr();
    run.engine->load_checkpoint(folder());
    EXPECT_THAT(
        ::testing::internal::GetCapturedStderr(),
        ::testing::HasSubstr("does not say where in the data it stopped: the loader stays at sample 12"));
    EXPECT_EQ(run.loader->position(), 12);
  });
}

}  // namespace
}  // namespace sherd::test
