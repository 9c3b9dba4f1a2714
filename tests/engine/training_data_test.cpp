// What checkpoints hold of the training data: where the loader is, without the caller's doing, and what it is
// known by.
#include <gtest/gtest.h>

#include "base/log.h"
#include "engine/checkpoint.h"
#include "engine/initialize.h"
#include "support/expect_error.h"
#include "support/odd_models.h"
#include "support/temp_folder.h"

namespace sherd::test {
namespace {

using engine::DataRecord;
using sherd::testing::expect_error;
using sherd::testing::TempFolder;
using tensor::Tensor;

/// Samples that all differ, so that losses tell which were read.
std::shared_ptr<const data::Dataset> samples(device::Device& host) {
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
                       .training_data = samples(*host_)});
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

TEST(DataRecord, ReadsWhatItWrote) {
  DataRecord record;
  record.position = data::LoaderPosition::most;
  record.tokenizer = "spm:a folder/\"a\".model";
  record.vocab_size = 300, record.tokens = 1'000'000'000'000, record.sequences = 7,
  record.fingerprint = 0xffffffff;
  const DataRecord back = DataRecord::from_json(record.to_json(), "manifest.json");
  EXPECT_EQ(back.to_json(), record.to_json());
  EXPECT_EQ(back.position, record.position);
  EXPECT_EQ(back.tokenizer, record.tokenizer);
  EXPECT_EQ(back.fingerprint, record.fingerprint);
  EXPECT_EQ(DataRecord::from_json("{}", "manifest.json").position, std::nullopt);
}

TEST(DataRecord, NumbersOutOfRangeAreDamageOfThatFile) {
  for (const char* value : {"-1", "\"5\"", "null", "true", "1.5", "1e30", "[3]", "1152921504606846977",
                            "9223372036854775807", "18446744073709551615", "1e999"})
    expect_error(ErrorKind::data, "/runs/a/manifest.json is damaged: its data", [&] {
      DataRecord::from_json(cat(R"({"position": )", value, "}"), "/runs/a/manifest.json");
    });
  for (const char* text :
       {"[]", "3", "null", "\"x\"", R"({"tokenizer": 5})", R"({"fingerprint": 4294967296})",
        R"({"vocab_size": -257})", R"({"tokens": "many"})"})
    expect_error(ErrorKind::data, "manifest.json",
                 [&] { DataRecord::from_json(text, "/runs/a/manifest.json"); });
}

TEST(DataRecord, ReadsTheStringsOfOlderCheckpoints) {
  engine::ClientState client{{"data_position", "24"}, {"tokenizer", "byte"}, {"vocab_size", "257"}};
  const DataRecord record = DataRecord::from_client(client, "manifest.json");
  EXPECT_EQ(record.position, 24);
  EXPECT_EQ(record.tokenizer, "byte");
  EXPECT_EQ(record.vocab_size, 257);
  for (const char* value : {"", "-3", "24x", "1e3", " 24", "99999999999999999999", "1152921504606846977"}) {
    client["data_position"] = value;
    expect_error(ErrorKind::data, "/runs/a/manifest.json",
                 [&] { DataRecord::from_client(client, "/runs/a/manifest.json"); });
  }
  // Another program's strings, which happen to have one of these names.
  EXPECT_EQ(DataRecord::from_client({{"data_position", "page 3"}}, "manifest.json").position, std::nullopt);
}

}  // namespace
}  // namespace sherd::test
