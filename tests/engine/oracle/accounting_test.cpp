// Measured model-state bytes are those of the placement table, and traffic is that of the algorithm, to the
// byte.
#include <gtest/gtest.h>

#include <mutex>

#include "autograd/ops.h"
#include "models/gpt.h"
#include "nn/layers.h"
#include "support/equality.h"

namespace sherd::test {
namespace {

using device::Category;
using device::Tier;

struct Books {
  std::uint64_t parameters, gradients, optimizer, padding, communication;
};

/// Per rank: model-state bytes after construction and traffic of the third step, by stage and ranks.
struct Measured {
  std::vector<Books> books;
  std::vector<comm::Traffic> traffic;
  std::int64_t elements = 0, padded = 0, first_padded = 0;
};

Measured measure(const RunSpec& spec) {
  Measured out;
  std::mutex mutex;
  launch_ranks(spec.ranks, [&](DistributedPtr dist) {
    auto engine = make_engine(dist, spec);
    const device::Ledger& ledger = engine->device().ledger();
    const auto held = [&](Category category) { return ledger.current(Tier::device, category); };
    const Books books{held(Category::parameters), held(Category::gradients), held(Category::optimizer),
                      held(Category::padding), held(Category::communication)};
    comm::Traffic traffic;
    for (int step = 0; step < 3; ++step) {
      dist->world().reset_traffic();
      engine->train_batch(
          [&] { return synthetic_batch(engine->device(), 2, 24, 101, step, 0, dist->rank()); });
      traffic = dist->world().traffic();
    }
    // Between steps nothing but model states (and idle exchange buffers, tracked as communication) is
    // held.
    EXPECT_EQ(held(Category::parameters), books.parameters);
    EXPECT_EQ(held(Category::gradients), books.gradients);
    EXPECT_EQ(held(Category::optimizer), books.optimizer);
    EXPECT_EQ(held(Category::padding), books.padding);
    std::lock_guard lock(mutex);
    out.books.resize(static_cast<std::size_t>(spec.ranks));
    out.traffic.resize(static_cast<std::size_t>(spec.ranks));
    out.books[static_cast<std::size_t>(dist->rank())] = books;
    out.traffic[static_cast<std::size_t>(dist->rank())] = traffic;
    if (dist->rank() != 0) return;
    for (const auto& unit : engine->sharded().units())
      for (const auto& segment : unit->segments()) {
        out.elements += segment->layout().payload();
        out.padded += segment->layout().padded();
        if (unit == engine->sharded().units().front()) out.first_padded += segment->layout().padded();
      }
  });
  return out;
}

class Accounting : public ::testing::TestWithParam<std::tuple<int, int, std::string>> {};

TEST_P(Accounting, ModelStatesFollowThePlacementFormula) {
  RunSpec spec;
  std::tie(spec.stage, spec.ranks, spec.dtype) = GetParam();
  const Measured got = measure(spec);
  const auto ranks = static_cast<std::uint64_t>(spec.ranks);
  const auto psi = static_cast<std::uint64_t>(got.elements), padded = static_cast<std::uint64_t>(got.padded);
  const std::uint64_t width = spec.dtype == "fp32" ? 4 : 2;  // of parameters and gradients
  const std::uint64_t k = spec.dtype == "fp32" ? 8 : 10;  // moments, and what bf16 parameters lack of masters
  const auto share = [&](int first_stage) { return spec.stage >= first_stage ? ranks : 1; };
  Books sum{};
  for (const Books& rank : got.books) {
    // Each rank holds exactly its part of the padded layout …
    EXPECT_EQ(rank.parameters + rank.gradients + rank.optimizer + rank.padding,
              width * padded / share(3) + width * padded / share(2) + k * padded / share(1));
    sum.parameters += rank.parameters, sum.gradients += rank.gradients, sum.optimizer += rank.optimizer;
  }
  // … and all ranks together hold every element as often as its placement says, padding apart.
  EXPECT_EQ(sum.parameters, width * psi * ranks / share(3));
  EXPECT_EQ(sum.gradients, width * psi * ranks / share(2));
  EXPECT_EQ(sum.optimizer, k * psi * ranks / share(1));
}

/// At stage 3 the first part's unit, whose table is tied, comes for the last part too.
TEST_P(Accounting, TrafficIsTwoPsiOrThreePsi) {
  RunSpec spec;
  std::tie(spec.stage, spec.ranks, spec.dtype) = GetParam();
  const Measured got = measure(spec);
  const auto ranks = static_cast<std::uint64_t>(spec.ranks);
  const auto sent_of = [&](std::int64_t elements) {
    return static_cast<std::uint64_t>(elements) * (spec.dtype == "fp32" ? 4 : 2) * (ranks - 1) / ranks;
  };
  const std::uint64_t once = sent_of(got.padded), tied = sent_of(got.first_padded);
  for (const comm::Traffic& sent : got.traffic) {
    EXPECT_EQ(sent.reduce_scatter, once);
    EXPECT_EQ(sent.all_gather, spec.stage == 3 ? 2 * (once + tied) : once);
    EXPECT_EQ(sent.all_reduce + sent.all_to_all + sent.broadcast + sent.p2p, 0u);
  }
}

INSTANTIATE_TEST_SUITE_P(All, Accounting,
                         ::testing::Combine(::testing::Values(0, 1, 2, 3), ::testing::Values(1, 2, 4),
                                            ::testing::Values("bf16", "fp32")),
                         [](const auto& test) {
                           return "stage" + std::to_string(std::get<0>(test.param)) + "_ranks" +
                                  std::to_string(std::get<1>(test.param)) + "_" + std::get<2>(test.param);
                         });

/// A model whose parameters need no padding for four ranks: then a rank's share is the textbook's to the
/// byte.
class Square : public nn::Model {
 public:
  Square() {
    for (int i = 0; i < 3; ++i)
      layers_.push_back(add("layer" + std::to_string(i),
                            std::make_shared<nn::Linear>(64, 64, nn::LinearOptions{.bias = false})));
    layers_[1]->mark_block();
  }

 protected:
  nn::Var forward(nn::Tape& tape, const tensor::Batch& batch) override {
    nn::Var x = tape.input(batch.at("x"));
    for (const auto& layer : layers_) x = (*layer)(tape, x);
    return autograd::mean_squared_error(x, batch.at("x"));
  }

 private:
  std::vector<std::shared_ptr<nn::Linear>> layers_;
};

TEST(AccountingWithoutPadding, EachRankHoldsItsNth) {
  for (const int stage : {0, 1, 2, 3}) {
    launch_ranks(4, [&](DistributedPtr dist) {
      config::Config config = config::parse_text(cat(
          R"({"bf16": {"enabled": true}, "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, )",
          R"("zero_optimization": {"stage": )", stage, R"(, "stage3_param_persistence_threshold": 0}})"));
      Engine engine(dist, std::make_shared<Square>(), config);
      const device::Ledger& ledger = engine.device().ledger();
      const std::uint64_t psi = 3 * 64 * 64;
      const auto share = [&](int first) { return stage >= first ? 4u : 1u; };
      EXPECT_EQ(ledger.current(Tier::device, Category::parameters), 2 * psi / share(3));
      EXPECT_EQ(ledger.current(Tier::device, Category::gradients), 2 * psi / share(2));
      EXPECT_EQ(ledger.current(Tier::device, Category::optimizer), 10 * psi / share(1));
      EXPECT_EQ(ledger.current(Tier::device, Category::padding), 0u);
    });
  }
}

TEST(DeviceMemoryLimit, RefusesWhatDoesNotFitAndNamesTheHolders) {
  RunSpec spec;
  spec.ranks = 2;
  config::Config config = config::parse_text(spec.config(), "test", {"device.device_memory_limit=100000"});
  try {
    launch_ranks(2, [&](DistributedPtr dist) {
      Engine engine(dist, std::make_shared<models::Gpt>(models::gpt_config(config, 101)), config);
    });
    FAIL() << "the limit was not enforced";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::memory);
    EXPECT_NE(std::string(error.what()).find("out of device memory"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("device_memory_limit"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace sherd::test
