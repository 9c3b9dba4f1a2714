// A dry run predicts what a real run charges: model states to the byte, peaks within 5 %.
#include "engine/estimate/estimate.h"

#include <gtest/gtest.h>

#include <mutex>

#include "engine/setup/process_grid.h"
#include "models/gpt.h"
#include "support/equality.h"
#include "support/full_suite.h"
#include "support/temp_folder.h"

namespace sherd::test {
namespace {

using device::Category;
using device::Tier;
using engine::Estimate;
using engine::MemoryReport;

constexpr std::int64_t estimated_rows = 2, seq = 96, vocab = 509;

struct Shape {
  int stage = 0, ranks = 1;
  std::string dtype = "bf16", recompute = "none", param = "none", optimizer = "none";
  int accumulation = 1;
  bool llama = false, host_checkpoints = false;
  std::string zero_extra;
  std::string groups = "[]";
  int threads = 1, layers = 3, persistent = 100, shard_size = 0;
  std::string device = "cpu", schedule = "auto";
  std::string moe;  ///< keys of model.moe
  int expert = 1;
  std::string adapter;  ///< keys of training.adapter
  std::string fp8;      ///< fp8.recipe
  std::string model;    ///< more keys of model, each behind a comma
  int kv_heads = 0;     ///< 0: 2 of Llama's, else 4

  std::string text(const std::string& nvme) const {
    const auto offload = [&](const std::string& device, const char* extra) {
      return cat(R"({"device": ")", device, "\"",
                 device == "nvme" ? cat(R"(, "nvme_path": ")", nvme, "\"", extra) : "", "}");
    };
    return cat(
        "{", dtype == "fp32" ? "" : cat("\"", dtype, R"(": {"enabled": true},)"),
        fp8.empty() ? "" : cat(R"("fp8": {"enabled": true, "recipe": ")", fp8, "\"},"),
        R"("train_micro_batch_size_per_gpu": )", estimated_rows, R"(, "gradient_accumulation_steps": )",
        accumulation, R"(, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}, "groups": )", groups,
        R"(}, "zero_optimization": {"stage": )", stage, R"(, "stage3_param_persistence_threshold": )",
        persistent, zero_extra,
        param == "none" ? "" : R"(, "offload_param": )" + offload(param, R"(, "max_in_cpu": 0)"),
        optimizer == "none" ? ""
                            : R"(, "offload_optimizer": )" + offload(optimizer, R"(, "pipeline_read": true)"),
        R"(}, "model": {"type": ")", llama ? "llama" : "gpt2", R"(", "vocab_size": )", vocab,
        R"(, "seq_length": )", seq, R"(, "hidden_size": 128, "num_layers": )", layers,
        R"(, "num_heads": 4, "num_kv_heads": )",
        kv_heads > 0 ? kv_heads
        : llama      ? 2
                     : 4,
        model, moe.empty() ? "" : cat(R"(, "moe": {)", moe, "}"), R"(}, "training": {"recompute": ")",
        recompute, "\"", adapter.empty() ? "" : cat(R"(, "adapter": {)", adapter, "}"),
        R"(}, "activation_checkpointing": {"cpu_checkpointing": )", host_checkpoints ? "true" : "false",
        R"(}, "parallel": {"timeout_seconds": 60, "schedule": ")", schedule, R"(", "expert": )", expert,
        shard_size > 0 ? cat(R"(, "shard_size": )", shard_size) : "", R"(}, "device": {"threads_per_rank": )",
        threads, R"(, "type": ")", device, "\"}}");
  }

  std::string name() const {
    return cat("stage", stage, "_ranks", ranks, "_", dtype, "_", recompute, "_p", param, "_o", optimizer);
  }
};

tensor::Batch any_batch(device::Device& device) {
  return {{"tokens", tensor::Tensor::empty(device, {estimated_rows, seq}, DType::i32)},
          {"labels", tensor::Tensor::empty(device, {estimated_rows, seq}, DType::i32)}};
}

std::shared_ptr<models::Gpt> model_of(const config::Config& config, const parallel::Layout& layout = {}) {
  return std::make_shared<models::Gpt>(models::gpt_config(config, vocab), layout);
}

/// The memory that a real run charges and the bytes that it moves, by rank.
std::vector<Estimate> measure(const config::Config& config, int ranks) {
  std::vector<Estimate> out(static_cast<std::size_t>(ranks));
  launch_ranks(ranks, [&](DistributedPtr dist) {
    const auto groups = make_groups(dist, config);
    Engine engine(dist, model_of(config, layout_of(*groups, config)), config, nullptr, nullptr, groups);
    Estimate& mine = out[static_cast<std::size_t>(dist->rank())];
    mine.states = MemoryReport::of(engine.device());
    int micro = 0;
    const auto next = [&] {
      return synthetic_batch(engine.device(), estimated_rows, seq, vocab, 0, micro++, dist->rank());
    };
    const auto io_of = [&](int steps) {
      const engine::IoBytes before = engine.io_bytes();
      for (int step = 0; step < steps; ++step) {
        engine.groups().reset_traffic();
        engine.train_batch(next);
        mine.traffic = {};
        for (const auto& [axis, bytes] : engine.groups().traffic()) mine.traffic.add(bytes);
      }
      engine.synchronize();
      const engine::IoBytes after = engine.io_bytes();
      return engine::IoBytes{after.read - before.read, after.written - before.written};
    };
    for (int step = 0; step < 3; ++step) {
      mine.io = io_of(1);
      engine.eval_batch(next());
    }
    if (engine.schedule() == config::Schedule::layered) {  // updates end in the steps after them
      const engine::IoBytes more = io_of(3);
      mine.io = {(more.read - mine.io.read) / 2, (more.written - mine.io.written) / 2};
    }
    mine.peaks = MemoryReport::of(engine.device());
  });
  return out;
}

void expect_predicted(std::uint64_t predicted, std::uint64_t real, const std::string& what) {
  EXPECT_LE(std::abs(static_cast<double>(predicted) - static_cast<double>(real)),
            0.05 * static_cast<double>(real))
      << what << ": predicted " << predicted << ", measured " << real;
}

void expect_alike(const Shape& shape) {
  const sherd::testing::TempFolder folder;
  const config::Config config = config::parse_text(shape.text(folder.path().string()));
  const std::vector<Estimate> real = measure(config, shape.ranks);
  for (int rank = 0; rank < shape.ranks; ++rank) {
    const Estimate& got = real[static_cast<std::size_t>(rank)];
    const Estimate predicted =
        engine::estimate(config, [&](const parallel::Layout& layout) { return model_of(config, layout); },
                         any_batch, {.ranks = shape.ranks, .local_ranks = shape.ranks, .rank = rank});
    for (int t = 0; t < device::tier_count; ++t) {
      const auto &states = predicted.states.tiers[static_cast<std::size_t>(t)],
                 &held = got.states.tiers[static_cast<std::size_t>(t)];
      const std::string tier(device::name_of(static_cast<Tier>(t)));
      EXPECT_EQ(states.current, held.current) << tier << " after construction, rank " << rank;
      expect_predicted(predicted.peaks.tiers[static_cast<std::size_t>(t)].total_peak,
                       got.peaks.tiers[static_cast<std::size_t>(t)].total_peak,
                       cat(tier, " peak of rank ", rank));
    }
    // A heap grows by steps of 2 MiB, which models as small as these feel; tests/cli/resident_test.cpp has
    // larger.
    EXPECT_NEAR(static_cast<double>(predicted.peaks.held), static_cast<double>(got.peaks.held),
                0.05 * static_cast<double>(got.peaks.held) + (2 << 20))
        << "memory held by rank " << rank;
    EXPECT_EQ(predicted.traffic.all_gather, got.traffic.all_gather);
    EXPECT_EQ(predicted.traffic.reduce_scatter, got.traffic.reduce_scatter);
    if (shape.expert == 1)
      EXPECT_EQ(predicted.traffic.all_to_all, got.traffic.all_to_all);
    else  // whose tokens go where they have to
      EXPECT_NEAR(static_cast<double>(predicted.traffic.all_to_all),
                  static_cast<double>(got.traffic.all_to_all),
                  0.2 * static_cast<double>(got.traffic.all_to_all));
    EXPECT_EQ(predicted.traffic.scalars, got.traffic.scalars);
    EXPECT_EQ(predicted.io.read, got.io.read);
    EXPECT_EQ(predicted.io.written, got.io.written);
  }
}

const char* const by_pairs = "other tests cover its pairs of values; scripts/test --full runs it";
const std::vector<int> rank_counts{1, 2, 4};
const std::vector<std::string> estimated_dtypes{"bf16", "fp32"},
    estimated_recomputes{"none", "selective", "full"}, estimated_tiers{"none", "cpu", "nvme"};

using Placed = std::tuple<int, int, std::string, std::string>;
class EstimateOf : public ::testing::TestWithParam<Placed> {};

TEST_P(EstimateOf, IsWhatARunBooks) {
  Shape shape;
  std::tie(shape.stage, shape.ranks, shape.dtype, shape.recompute) = GetParam();
  if (!to_run({4, 3, 2, 3},
              {shape.stage, place_of(shape.ranks, rank_counts), place_of(shape.dtype, estimated_dtypes),
               place_of(shape.recompute, estimated_recomputes)}))
    GTEST_SKIP() << by_pairs;
  expect_alike(shape);
}

INSTANTIATE_TEST_SUITE_P(All, EstimateOf,
                         ::testing::Combine(::testing::Values(0, 1, 2, 3), ::testing::ValuesIn(rank_counts),
                                            ::testing::ValuesIn(estimated_dtypes),
                                            ::testing::ValuesIn(estimated_recomputes)),
                         [](const auto& test) {
                           Shape shape;
                           std::tie(shape.stage, shape.ranks, shape.dtype, shape.recompute) = test.param;
                           return shape.name();
                         });

using Offloaded = std::tuple<int, std::string, std::string, std::string>;
class EstimateOfOffload : public ::testing::TestWithParam<Offloaded> {};

TEST_P(EstimateOfOffload, IsWhatARunBooks) {
  Shape shape;
  std::tie(shape.ranks, shape.dtype, shape.param, shape.optimizer) = GetParam();
  if (!to_run({3, 2, 3, 3},
              {place_of(shape.ranks, rank_counts), place_of(shape.dtype, estimated_dtypes),
               place_of(shape.param, estimated_tiers), place_of(shape.optimizer, estimated_tiers)}))
    GTEST_SKIP() << by_pairs;
  for (shape.stage = shape.param == "none" ? 1 : 3; shape.stage <= 3; ++shape.stage) expect_alike(shape);
}

INSTANTIATE_TEST_SUITE_P(
    All, EstimateOfOffload,
    ::testing::Combine(::testing::ValuesIn(rank_counts), ::testing::ValuesIn(estimated_dtypes),
                       ::testing::ValuesIn(estimated_tiers), ::testing::ValuesIn(estimated_tiers)),
    [](const auto& test) {
      return cat("ranks", std::get<0>(test.param), "_", std::get<1>(test.param), "_param_",
                 std::get<2>(test.param), "_optimizer_", std::get<3>(test.param));
    });

TEST(EstimateOfVariants, IsWhatARunBooks) {
  Shape llama;
  llama.llama = true, llama.stage = 3, llama.ranks = 2;
  expect_alike(llama);

  Shape half;
  half.dtype = "fp16", half.stage = 2, half.ranks = 2, half.accumulation = 4;
  expect_alike(half);

  Shape accumulating;
  accumulating.stage = 1, accumulating.ranks = 2, accumulating.accumulation = 3;
  expect_alike(accumulating);
  accumulating.stage = 3, accumulating.optimizer = "nvme", accumulating.param = "nvme";
  expect_alike(accumulating);

  Shape buckets;
  buckets.stage = 3, buckets.ranks = 2;
  buckets.zero_extra =
      R"(, "reduce_bucket_size": 50000, "stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0)";
  expect_alike(buckets);
  buckets.zero_extra =
      R"(, "reduce_bucket_size": 500000, "stage3_prefetch_bucket_size": 400000, "stage3_max_live_parameters": 700000)";
  expect_alike(buckets);

  Shape checkpoints;
  checkpoints.recompute = "full", checkpoints.host_checkpoints = true;
  expect_alike(checkpoints);

  Shape threads;
  threads.threads = 2;
  expect_alike(threads);
}

TEST(EstimateOfLayered, IsWhatARunBooks) {
  Shape shape;
  shape.schedule = "layered", shape.llama = true, shape.accumulation = 4;
  shape.stage = 3, shape.recompute = "full", shape.optimizer = shape.param = "nvme";
  for (shape.ranks = 1; shape.ranks <= 2; ++shape.ranks) {
    SCOPED_TRACE(shape.name());
    expect_alike(shape);
  }
  {
    // More blocks than the reader has buffers, each with parameters that stay: what is updated goes on to the
    // next forward, which reads nothing again.
    Shape deep = shape;
    deep.llama = false, deep.ranks = 1, deep.layers = 9, deep.persistent = 600;
    deep.zero_extra = R"(, "stage3_max_live_parameters": 700000)";
    SCOPED_TRACE(deep.name());
    expect_alike(deep);
  }
  shape.llama = false, shape.stage = 1, shape.recompute = "none", shape.param = "none";  // tied embeddings
  SCOPED_TRACE(shape.name());
  shape.ranks = 2;
  expect_alike(shape);
}

/// All experts have tokens. Where ranks share them out, a rank's activations vary with its experts' load.
TEST(EstimateOfExperts, IsWhatARunBooks) {
  Shape shape;
  shape.moe = R"("experts": 4, "top_k": 2, "every": 2)";
  for (const char* tier : {"none", "nvme"})
    for (const int ranks : {1, 2}) {
      shape.stage = 3, shape.ranks = ranks, shape.optimizer = shape.param = tier;
      SCOPED_TRACE(shape.name());
      expect_alike(shape);
    }
  shape.stage = 2, shape.ranks = 4, shape.expert = 2, shape.param = "none", shape.optimizer = "cpu";
  SCOPED_TRACE("shared out");
  expect_alike(shape);
}

/// The estimate of a rank of two for steps of `shape`, on CPUs or on GPUs, which nobody needs here.
Estimate planned(Shape shape, const char* device) {
  shape.device = device;
  const config::Config config = config::parse_text(shape.text("/nowhere"));
  return engine::estimate(config, model_of(config), any_batch, {.ranks = 2, .local_ranks = 2});
}

std::uint64_t peak(const Estimate& estimate, Tier tier, Category category) {
  return estimate.peaks.tiers[static_cast<std::size_t>(tier)].peak[static_cast<std::size_t>(category)];
}

/// Latents, and states in the place of keys; matrices that Muon takes and that it leaves.
TEST(EstimateOfAttentions, IsWhatARunBooks) {
  Shape latents;
  latents.llama = true, latents.kv_heads = 4, latents.ranks = 2, latents.stage = 3;
  latents.model = R"(, "mla": {"kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 32,
                               "qk_rope_head_dim": 16, "v_head_dim": 32})";
  Shape hybrid;
  hybrid.llama = true, hybrid.ranks = 2, hybrid.stage = 3;
  hybrid.model = R"(, "layer_types": ["linear_attention", "full_attention"], "attention_gate": true,
                    "linear_attention": {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 32,
                                         "value_head_dim": 32})";
  Shape both;  // an encoder in front of a decoder
  both.llama = true, both.kv_heads = 4, both.ranks = 2, both.stage = 3;
  both.model = R"(, "position": "relative", "encoder": {"num_layers": 1, "seq_length": 20},
                  "attention_multiplier": 1)";
  for (Shape shape : {latents, hybrid, both})
    for (const char* recompute : {"none", "selective", "full"}) {
      shape.recompute = recompute;
      SCOPED_TRACE(cat(shape.model, recompute));
      expect_alike(shape);
    }
  hybrid.fp8 = "blockwise", hybrid.param = hybrid.optimizer = "cpu";
  expect_alike(hybrid);
  hybrid.fp8.clear(), hybrid.groups = R"([{"match": "blocks.*", "type": "Muon"}])";
  expect_alike(hybrid);
}

/// The traffic is exact: that of scales, too.
TEST(EstimateOfFp8, IsWhatARunBooks) {
  Shape blocks;
  blocks.fp8 = "blockwise", blocks.stage = 3, blocks.ranks = 2, blocks.llama = true;
  expect_alike(blocks);
  blocks.param = blocks.optimizer = "cpu", blocks.recompute = "selective";
  expect_alike(blocks);
  Shape current;
  current.fp8 = "current", current.stage = 2, current.accumulation = 2;
  expect_alike(current);
  Shape experts;
  experts.fp8 = "current", experts.stage = 3, experts.ranks = 4, experts.expert = 2;
  experts.moe = R"("experts": 4, "top_k": 2, "ffn_hidden_size": 64)";
  expect_alike(experts);
}

/// Frozen weights cost nothing but themselves, wherever they lie.
TEST(EstimateOfAdapters, IsWhatARunBooks) {
  const std::string lora = R"("type": "lora", "rank": 8, "targets": "all-linear", "dropout": 0.1)";
  for (const auto& [stage, param, recompute] :
       {std::tuple{0, "none", "none"}, {2, "none", "selective"}, {3, "nvme", "full"}, {3, "cpu", "none"}})
    for (const bool llama : {false, true}) {
      Shape shape;
      shape.stage = stage, shape.param = param, shape.recompute = recompute, shape.llama = llama;
      shape.ranks = 2, shape.adapter = lora;
      SCOPED_TRACE(cat(shape.name(), llama ? " llama" : " gpt2"));
      expect_alike(shape);
      if (llama == (stage == 3)) continue;
      shape.adapter += R"(, "base_dtype": "int8")";
      SCOPED_TRACE("in 8 bits");
      expect_alike(shape);
    }
}

TEST(EstimateOfGroups, OfTwoRules) {
  Shape shape;
  shape.groups =
      R"([{"match": "blocks.1.*", "type": "SGD"}, {"match": "*.weight", "type": "SGD", "momentum": 0.9}])";
  for (const char* optimizer : {"none", "cpu", "nvme"})
    for (const int stage : {1, 3}) {
      shape.stage = stage, shape.ranks = 2, shape.optimizer = optimizer;
      SCOPED_TRACE(shape.name());
      expect_alike(shape);
    }
}

/// States come twice a step, and norms travel.
TEST(EstimateOfGroups, OfRulesThatMeasure) {
  Shape shape;
  shape.groups = R"([{"match": "blocks.1.*", "type": "Lamb"}, {"match": "*.weight", "type": "LARS"}])";
  for (const char* optimizer : {"none", "nvme"}) {
    shape.stage = 3, shape.ranks = 2, shape.optimizer = optimizer;
    SCOPED_TRACE(shape.name());
    expect_alike(shape);
  }
}

/// Steps in which replicas exchange momentum, and the steps before.
TEST(EstimateOfGroups, OfReplicasThatExchangeMomentum) {
  Shape shape;
  shape.groups = R"([{"match": "*", "type": "OneBitAdam", "freeze_step": 1}])";
  for (const char* optimizer : {"none", "nvme"})
    for (const int shard_size : {1, 2}) {
      shape.stage = 2, shape.ranks = 4, shape.shard_size = shard_size, shape.optimizer = optimizer;
      SCOPED_TRACE(cat(shape.name(), ", shard_size ", shard_size));
      expect_alike(shape);
    }
}

/// Directions, whole matrices and squares of them, for a batch at a time.
TEST(EstimateOfGroups, OfRulesThatTakeMatrices) {
  Shape shape;
  shape.groups = R"([{"match": "blocks.*", "type": "Muon"}])";
  for (const int stage : {0, 1, 3})
    for (const char* optimizer : {"none", "cpu", "nvme"}) {
      if (stage == 0 && std::string(optimizer) != "none") continue;
      shape.stage = stage, shape.ranks = 2, shape.optimizer = optimizer;
      SCOPED_TRACE(shape.name());
      expect_alike(shape);
    }
}

/// Codes and their scales, beside what is small.
TEST(EstimateOfGroups, OfStatesInCodes) {
  Shape shape;
  shape.groups = R"([{"match": "*", "type": "AdamW8bit"}])";
  for (const int stage : {0, 3})
    for (const char* optimizer : {"none", "cpu", "nvme"}) {
      if (stage == 0 && std::string(optimizer) != "none") continue;
      shape.stage = stage, shape.ranks = 2, shape.optimizer = optimizer;
      SCOPED_TRACE(shape.name());
      expect_alike(shape);
    }
}

TEST(EstimateForGpus, DiffersFromCpusInWorkspaceAndStagingAlone) {
  for (const char* optimizer : {"none", "cpu"}) {
    Shape shape;
    shape.stage = 2, shape.optimizer = optimizer;
    const Estimate cpu = planned(shape, "cpu"), gpu = planned(shape, "cuda");
    for (const Tier tier : {Tier::device, Tier::host})
      for (const Category category : {Category::parameters, Category::gradients, Category::optimizer,
                                      Category::activations, Category::communication})
        EXPECT_EQ(peak(gpu, tier, category), peak(cpu, tier, category))
            << optimizer << ": " << name_of(category) << " in the tier " << name_of(tier);
    EXPECT_EQ(gpu.traffic.reduce_scatter, cpu.traffic.reduce_scatter);
    EXPECT_GE(peak(gpu, Tier::device, Category::workspace), std::uint64_t{32} << 20) << "cuBLASLt's";
    EXPECT_LT(peak(gpu, Tier::device, Category::workspace), std::uint64_t{34} << 20);
    // Whatever the processor hands to a GPU, initial values for one, passes through page-locked memory.
    EXPECT_EQ(peak(cpu, Tier::host, Category::workspace), 0u) << optimizer;
    EXPECT_GT(peak(gpu, Tier::host, Category::workspace), 0u) << optimizer;
  }
}

TEST(EstimateForGpus, TheFasterAttentionTakesLess) {
  Shape shape;
  config::Config config = config::parse_text(shape.text("/nowhere"));
  config.device.type = config::DeviceType::cuda;
  config.model->attention_dropout = 0;
  config.model->seq_length = config.model->max_positions = 4096;
  const auto attention = [&](bool deterministic) {
    config.device.deterministic_attention = deterministic;
    const auto batch = [](device::Device& device) {
      return tensor::Batch{{"tokens", tensor::Tensor::empty(device, {2, 4096}, DType::i32)},
                           {"labels", tensor::Tensor::empty(device, {2, 4096}, DType::i32)}};
    };
    return peak(engine::estimate(config, model_of(config), batch, {}), Tier::device, Category::workspace);
  };
  const std::uint64_t scores = std::uint64_t{2} * 4 * 4096 * 4096 * 2;  // of two sequences with four heads
  EXPECT_GE(attention(true), scores);
  EXPECT_LT(attention(false), scores);
}

}  // namespace
}  // namespace sherd::test
