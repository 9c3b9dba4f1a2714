// Recompute of a part of the blocks and micro-batches: what each stage holds in activations is what the
// papers' formulas say, the blocks that recompute are the first ones, and no bit changes.
#include "comm/dry/dry_world.h"
#include "engine/step/recompute.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "autograd/ops.h"
#include "models/gpt.h"
#include "nn/layers.h"
#include "support/equality.h"
#include "support/full_suite.h"
#include "support/temp_folder.h"

namespace sherd::test {
namespace {

using device::Category;
using device::Tier;
using Bytes = std::uint64_t;

// ---- what is held ----

constexpr Bytes s = 24, b = 2, h = 64, a = 4, n = s * b;

struct Part {
  const char* schedule;
  int stages = 1, chunks = 1;
  long blocks = -1, micro_batches = -1;
  const char* recompute = "full";

  config::Config config() const {
    RunSpec spec;
    spec.tied = false, spec.dtype = "bf16", spec.layers = 6, spec.hidden = h, spec.accumulation = 6;
    spec.recompute = recompute, spec.recompute_blocks = blocks;
    spec.recompute_micro_batches = micro_batches;
    spec.schedule = schedule, spec.pipeline = stages, spec.virtual_stages = chunks,
    spec.partition = "uniform";
    config::Config config = config::parse_text(spec.config());
    config.model->num_kv_heads = a;
    return config;
  }
  std::string str() const {
    return cat(recompute, ", ", schedule, ", ", stages, " stages, blocks ", blocks, ", micro-batches ",
               micro_batches);
  }
};

/// Takes down the most activations that there are behind a forward.
class Watch final : public engine::InstructionObserver {
 public:
  explicit Watch(const device::Ledger& ledger) : ledger_(ledger) {}
  void begin(const sharding::Instruction&) override {}
  void end(const sharding::Instruction& i, double) override {
    if (i.op == sharding::Instruction::Op::forward)
      most = std::max(most, ledger_.current(Tier::device, Category::activations));
  }
  Bytes most = 0;

 private:
  const device::Ledger& ledger_;
};

/// On that stage, in its second step. Of pipelines on a dry device, where nothing depends on time.
Bytes held(const Part& part, int stage) {
  const config::Config config = part.config();
  const bool dry = part.stages > 1;
  Bytes most = 0;
  const auto measure = [&](const DistributedPtr& dist) {
    Engine engine(dist, std::make_shared<models::Gpt>(models::gpt_config(config, 101)), config,
                  dry ? device::make_meta_device(1) : nullptr);
    if (dry) engine.assume_values(std::vector<engine::ValueForm>(7, {{b, s, h}, DType::bf16}));
    Watch watch(engine.device().ledger());
    const auto next = [&] { return synthetic_batch(engine.device(), b, s, 101, 0, 0, 0); };
    const auto none = [&] {
      return tensor::Batch{{"tokens", tensor::Tensor::empty(engine.device(), {b, s}, DType::i32)},
                           {"labels", tensor::Tensor::empty(engine.device(), {b, s}, DType::i32)}};
    };
    for (int step = 0; step < 2; ++step) {
      engine.set_observer(&watch);
      watch.most = 0;
      if (dry)
        engine.train_batch(none);
      else
        engine.train_batch(next);
    }
    most = watch.most;
  };
  if (dry)
    measure(std::make_shared<Distributed>(comm::make_dry_world(stage, part.stages), stage, part.stages));
  else
    launch_ranks(1, measure);
  return most;
}

/// Korthikanti et al. 2022, table 2, less what attention makes again and dropout's counters (see
/// tests/models/parallel_counts_test.cpp): what a block holds between forward and backward.
Bytes block_holds(const std::string& recompute) {
  if (recompute == "full") return 2 * n * h;
  return n * ((recompute == "none" ? 32 : 18) * h + 16 + 4 * a);
}

/// Stage `stage` of 1F1B has stages − stage micro-batches in flight, and GPipe and layered have all 6. Each
/// keeps all of as many as the first stage does, which recomputes `micro_batches` of its own.
Bytes less(const Part& part, long blocks_of_stage, int stage) {
  const bool window = std::string(part.schedule) == "1f1b";
  const long first = window ? part.stages : 6, own = window ? part.stages - stage : 6;
  const long keep = part.micro_batches < 0 ? 0 : std::max(0L, first - part.micro_batches);
  const long flights = std::max(0L, own - keep);
  const long blocks = part.blocks < 0 ? blocks_of_stage : std::min(part.blocks, blocks_of_stage);
  return static_cast<Bytes>(flights * blocks) * (block_holds("none") - block_holds(part.recompute));
}

/// Eight parts are cut into stages of as many: the embedding, six blocks, and the head.
TEST(PartialRecompute, HoldsWhatTheFormulasSay) {
  for (const Part& part : {Part{"1f1b", 4, 1, 1}, Part{"1f1b", 4, 1, -1, 1}, Part{"1f1b", 4, 1, -1, 3},
                           Part{"1f1b", 2, 1, 2, 1}, Part{"1f1b", 2, 1, 9, 9}, Part{"gpipe", 2, 1, 2, 4},
                           Part{"1f1b", 4, 1, 1, 2, "selective"}, Part{"1f1b", 2, 1, 0}}) {
    SCOPED_TRACE(part.str());
    Part none = part;
    none.recompute = "none", none.blocks = none.micro_batches = -1;
    for (int stage = 0; stage < part.stages; ++stage) {
      const bool end = stage == 0 || stage + 1 == part.stages;
      const long blocks = 8 / part.stages - (end ? 1 : 0);
      EXPECT_EQ(held(none, stage) - held(part, stage), less(part, blocks, stage)) << "stage " << stage;
    }
  }
}

/// On one rank, which is measured: the blocks of the chunks of `layered` count as one stage's.
TEST(PartialRecompute, HoldsWhatTheFormulasSayOnOneRank) {
  const Bytes kept = held({"layered", 1, 1, -1, -1, "none"}, 0);
  for (const Part& part : {Part{"layered", 1, 1, 2}, Part{"layered", 1, 1, -1, 2},
                           Part{"layered", 1, 1, 4, 1}, Part{"layered", 1, 1, 3, 0}}) {
    SCOPED_TRACE(part.str());
    EXPECT_EQ(kept - held(part, 0), less(part, 6, 0));
  }
  const Bytes alone = held({"accumulate", 1, 1, -1, -1, "none"}, 0);
  const Bytes saved = block_holds("none") - block_holds("full");
  EXPECT_EQ(alone - held({"accumulate", 1, 1, 2}, 0), 2 * saved);
  EXPECT_EQ(alone - held({"accumulate", 1, 1, 2, 1}, 0), 2 * saved) << "the only one in flight";
  EXPECT_EQ(alone - held({"accumulate", 1, 1, 2, 0}, 0), 0u);
}

// ---- which blocks ----

/// A block that counts its forward passes, and may have another inside.
class Counting : public nn::Layer {
 public:
  explicit Counting(bool has_inner = false) : weight_(add("linear", std::make_shared<nn::Linear>(4, 4))) {
    if (has_inner) inner_ = add("inner", std::make_shared<Counting>()), inner_->mark_block();
  }
  int forwards = 0;
  const std::shared_ptr<Counting>& inner() const { return inner_; }

 protected:
  nn::Var forward(nn::Tape& tape, const nn::Var& x) override {
    forwards += tape.training;
    const nn::Var y = autograd::tanh((*weight_)(tape, x));
    return inner_ ? (*inner_)(tape, y) : y;
  }

 private:
  std::shared_ptr<nn::Linear> weight_;
  std::shared_ptr<Counting> inner_;
};

/// Four of them, of which the second has another inside; no list of parts.
class Counters : public nn::Model {
 public:
  Counters() {
    for (int i = 0; i < 4; ++i) list->append(std::make_shared<Counting>(i == 1));
    add("list", list);
  }
  Counting& at(std::size_t i) const { return dynamic_cast<Counting&>((*list)[i]); }
  std::shared_ptr<nn::LayerList> list = std::make_shared<nn::LayerList>();

 protected:
  nn::Var forward(nn::Tape& tape, const tensor::Batch& batch) override {
    return autograd::mean_squared_error((*list)(tape, tape.input(batch.at("x"))), batch.at("x"));
  }
};

TEST(PartialRecompute, TakesTheFirstBlocksAndWhatIsInThem) {
  for (const int blocks : {0, 1, 2, 4, 9}) {
    SCOPED_TRACE(blocks);
    const auto model = std::make_shared<Counters>();
    const auto config =
        config::parse_text(cat(R"({"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
                "training": {"recompute": "full", "recompute_blocks": )",
                               blocks, "}}"));
    launch_ranks(1, [&](const DistributedPtr& dist) {
      Engine engine(dist, model, config);
      const tensor::Tensor x = tensor::Tensor::empty(engine.device(), {2, 4}, DType::f32);
      engine.kernels().fill(x, 0.5);
      const autograd::Var loss = engine.forward({{"x", x}});
      for (std::size_t i = 0; i < 4; ++i) EXPECT_EQ(model->at(i).forwards, 1);
      engine.backward(loss);
      engine.step();
    });
    for (int i = 0; i < 4; ++i)
      EXPECT_EQ(model->at(static_cast<std::size_t>(i)).forwards, i < blocks ? 2 : 1) << i;
    // Its own input is kept inside of the block's second run, which then runs it a third time.
    EXPECT_EQ(model->at(1).inner()->forwards, blocks > 1 ? 3 : 1);
  }
}

// ---- bits ----

TEST(PartialRecompute, ChangesNoBit) {
  std::vector<Part> parts{{"accumulate", 1, 1, 2},
                          {"layered", 1, 1, 2, 1},
                          {"1f1b", 3, 1, 1, 1},
                          {"interleaved", 2, 2, 2, -1, "selective"},
                          {"zero_bubble", 2, 1, -1, 1}};
  if (full_suite())
    for (const char* recompute : {"selective", "full"})
      for (const long blocks : {-1, 0, 1, 2, 3})
        for (const long micro_batches : {-1, 0, 1, 2})
          for (const Part& way : {Part{"accumulate"}, Part{"layered"}, Part{"gpipe", 2}, Part{"1f1b", 4},
                                  Part{"interleaved", 2, 2}, Part{"zero_bubble", 3}})
            parts.push_back({way.schedule, way.stages, way.chunks, blocks, micro_batches, recompute});
  std::map<int, RunResult> expected;  // by ZeRO's stage
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const Part& part = parts[i];
    RunSpec spec;
    spec.stage = i % 2 ? 3 : 1, spec.ranks = 1, spec.layers = 6, spec.hidden = 16, spec.tied = false;
    spec.steps = 2, spec.accumulation = 4, spec.schedule = "accumulate";
    SCOPED_TRACE(cat(part.str(), ", ZeRO ", spec.stage));
    const auto [want, fresh] = expected.try_emplace(spec.stage);
    if (fresh) want->second = train_local(spec);
    const sherd::testing::TempFolder folder;
    spec.schedule = part.schedule, spec.pipeline = spec.ranks = part.stages,
    spec.virtual_stages = part.chunks;
    spec.recompute = part.recompute, spec.recompute_blocks = part.blocks;
    spec.recompute_micro_batches = part.micro_batches;
    if (spec.stage == 3) spec.nvme_path = folder.path().string(), spec.offload_param = "nvme";
    spec.nvme_checkpointing = spec.stage == 3, spec.cpu_checkpointing = spec.stage == 1;
    EXPECT_TRUE(train_local(spec).bits() == want->second.bits());
  }
}

}  // namespace
}  // namespace sherd::test
