#pragma once

#include "autograd/ops.h"
#include "nn/layered_model.h"
#include "nn/layers.h"
#include "sharding/sharded_model.h"
#include "support/cpu_fixture.h"

/// A small model in parts, its batches, and how the tests of this folder shard it.
namespace sherd::test {

/// Embeddings' and head's parts are no blocks, those between are. With dropout in the first part and a block.
class Tower : public nn::LayeredModel {
 public:
  explicit Tower(bool tied) {
    in_ = add("in", std::make_shared<nn::Linear>(8, 8));
    in_dropout_ = add("in_dropout", std::make_shared<nn::Dropout>(0.25f));
    append_part({in_, in_dropout_});
    blocks_ = add("blocks", std::make_shared<nn::LayerList>());
    for (int i = 0; i < 3; ++i) append_part({blocks_->append(std::make_shared<nn::Linear>(8, 8))});
    out_dropout_ = add("out_dropout", std::make_shared<nn::Dropout>(0.25f));
    out_ = add("out",
               std::make_shared<nn::Linear>(8, 8, nn::LinearOptions{.tied = tied ? in_->weight() : nullptr}));
    append_part({out_dropout_, out_});
  }
  const nn::Linear& in() const { return *in_; }
  const nn::Linear& out() const { return *out_; }

 protected:
  nn::Var forward_part(nn::Tape& tape, std::size_t part, const nn::Var& x,
                       const tensor::Batch& batch) override {
    if (part == 0) return (*in_dropout_)(tape, (*in_)(tape, tape.input(batch.at("x"))));
    if (part + 1 < parts()) return autograd::tanh((*blocks_)[part - 1](tape, x));
    return autograd::mean_squared_error((*out_)(tape, (*out_dropout_)(tape, x)), batch.at("y"));
  }

 private:
  std::shared_ptr<nn::Linear> in_, out_;
  std::shared_ptr<nn::Dropout> in_dropout_, out_dropout_;
  std::shared_ptr<nn::LayerList> blocks_;
};

/// One micro-batch of a rank with data of its own.
inline tensor::Batch batch_of(Cpu& cpu, int rank, int micro) {
  const auto seed = static_cast<std::uint64_t>(rank * 100 + micro);
  return {{"x", cpu.normal({4, 8}, seed, DType::f32)}, {"y", cpu.normal({4, 8}, seed + 50, DType::f32)}};
}

/// In fp32, with small buckets.
inline sharding::ShardingOptions options_of(int stage) {
  sharding::ShardingOptions options;
  options.placements = sharding::make_placements(stage, DType::f32, DType::f32, DType::f32);
  options.seed = 3;
  options.reduce_bucket = 64;
  options.residency = {1000, 10'000, 0};
  return options;
}

using Bits = std::vector<std::vector<std::byte>>;

}  // namespace sherd::test
