#pragma once

#include <memory>

#include "bench/programs/serving.h"
#include "config/config.h"
#include "engine/initialize.h"
#include "engine/token_data.h"
#include "models/gpt.h"

namespace sherd::bench {

/// The model of a configuration in training, on one batch of random tokens over and over, so that no dataset
/// is needed.
class GptInTraining {
 public:
  GptInTraining(const std::vector<std::string>& files, const std::vector<std::string>& overrides,
                const DistributedPtr& dist)
      : config_(config::parse_files(files, overrides)),
        shape_(models::gpt_config(config_, engine::vocabulary_size(config_))) {
    config_.data.reset();  // which random ids stand for
    const auto model = [&](const parallel::Layout& layout) {
      return std::make_shared<models::Gpt>(shape_, layout);
    };
    build_seconds_ = seconds_of([&] {
      engine_ = initialize({.dist = dist, .model = model, .config = config_}).engine;
      batch_ = {{"tokens", random_ids(1)}, {"labels", random_ids(2)}};
      engine_->device().synchronize();
    });
  }

  const config::Config& config() const { return config_; }
  const models::GptConfig& shape() const { return shape_; }
  Engine& engine() const { return *engine_; }
  const tensor::Batch& batch() const { return batch_; }
  double build_seconds() const { return build_seconds_; }

  /// `count` optimizer steps, until the device is idle.
  void steps(int count) {
    for (int i = 0; i < count; ++i) engine_->train_batch([&] { return batch_; });
    engine_->device().synchronize();
  }

 private:
  tensor::Tensor random_ids(std::uint64_t stream) {
    const tensor::Shape shape{engine_->config().batch.micro_batch_size, shape_.seq_length};
    std::vector<std::int32_t> ids(static_cast<std::size_t>(shape.numel()));
    for (std::size_t i = 0; i < ids.size(); ++i)
      ids[i] = static_cast<std::int32_t>(philox({9, stream}, i)[0] %
                                         static_cast<std::uint64_t>(shape_.vocab_size));
    return tensor::Tensor::of<std::int32_t>(engine_->device(), shape, ids);
  }

  config::Config config_;
  models::GptConfig shape_;
  std::unique_ptr<Engine> engine_;
  tensor::Batch batch_;
  double build_seconds_ = 0;
};

}  // namespace sherd::bench
