// Pruned weights (training.sparsity) stay zero with every optimizer, wherever states lie, and training with
// them gives the same bits as guarantees promise of dense weights. What is pruned, and how training goes on,
// tests/engine/oracle/sparsity_oracle_test.cpp holds to PyTorch.
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <set>

#include "engine/checkpoint/states.h"
#include "models/gpt.h"

#include "support/equality.h"
#include "support/expect_error.h"
#include "support/logical_states.h"
#include "support/temp_folder.h"

namespace sherd::test {
using sherd::testing::TempFolder;

namespace {

RunSpec sparse_spec(int ranks, int stage) {
  RunSpec spec;
  spec.sparsity = R"("pattern": "2:4")";
  spec.ranks = ranks, spec.stage = stage;
  spec.accumulation = 4 / ranks;
  spec.accumulate_in = "fp32";
  spec.steps = 3, spec.layers = 2;
  spec.llama = true;
  spec.tied = false;  // layered passes sum a tied table's gradients in another order
  return spec;
}

/// A run, and all states when it began and ended.
struct SparseRun {
  RunResult result;
  LogicalStates start, end;
};

SparseRun train_sparse(RunSpec spec) {
  LogicalStateCollector start, end;
  std::vector<char> begun(static_cast<std::size_t>(spec.ranks));
  spec.between_steps = [&](Engine& engine) {
    if (!std::exchange(begun[static_cast<std::size_t>(engine.dist().rank())], 1)) start.add(engine);
  };
  spec.at_end = [&](Engine& engine) { end.add(engine); };
  SparseRun out;
  out.result = train_local(spec);
  out.start = start.take(), out.end = end.take();
  return out;
}

template <class Bits>
std::vector<bool> minus_zeros(const std::vector<std::byte>& bytes) {
  std::vector<bool> out;
  for (std::size_t i = 0; i < bytes.size() / sizeof(Bits); ++i) {
    Bits bits;
    std::memcpy(&bits, bytes.data() + i * sizeof(Bits), sizeof(Bits));
    out.push_back(bits == static_cast<Bits>(Bits{1} << (8 * sizeof(Bits) - 1)));
  }
  return out;
}

bool is_norm(const std::string& name) {
  return name.find("norm") != std::string::npos;
}
/// The weights of linear layers of blocks, pruned or not.
bool is_linear(const std::string& name) {
  return name.starts_with("blocks.") && name.ends_with(".weight") && !is_norm(name) &&
         name.find("router") == std::string::npos;
}

std::map<std::string, std::vector<bool>> masks_of(const LogicalStates& states) {
  std::map<std::string, std::vector<bool>> out;
  for (const auto& [name, bytes] : states)
    if (name.starts_with("fp32.") && is_linear(name.substr(5)))
      out[name.substr(5)] = minus_zeros<std::uint32_t>(bytes);
  return out;
}

void expect_two_of_each_four(const std::map<std::string, std::vector<bool>>& masks) {
  for (const auto& [name, mask] : masks) {
    ASSERT_EQ(mask.size() % 4, 0U);
    for (std::size_t i = 0; i < mask.size(); i += 4)
      ASSERT_EQ(mask[i] + mask[i + 1] + mask[i + 2] + mask[i + 3], 2) << name << ' ' << i;
  }
}

/// Two of each four weights are −0 and stay so, in the compute type too, the others move, and moments of
/// pruned ones are `initial`, as they began.
void expect_kept_sparse(const SparseRun& run, const std::string& dtype, std::size_t matrices,
                        float initial = 0) {
  const auto before = masks_of(run.start), after = masks_of(run.end);
  EXPECT_EQ(before.size(), matrices);
  expect_two_of_each_four(before);
  EXPECT_EQ(before, after);
  for (const auto& [kind, bytes] : run.end) {
    const std::size_t dot = kind.find('.');
    const auto mask = after.find(kind.substr(dot + 1));
    if (mask == after.end()) continue;
    const std::string state = kind.substr(0, dot);
    if (state == "parameters") {
      EXPECT_EQ(dtype == "fp32" ? minus_zeros<std::uint32_t>(bytes) : minus_zeros<std::uint16_t>(bytes),
                mask->second)
          << kind;
      continue;
    }
    ASSERT_EQ(bytes.size(), mask->second.size() * sizeof(float));
    std::size_t moved = 0;
    for (std::size_t i = 0; i < mask->second.size(); ++i) {
      float value = 0, first = 0;
      std::memcpy(&value, bytes.data() + i * 4, 4);
      std::memcpy(&first, run.start.at(kind).data() + i * 4, 4);
      moved += !mask->second[i] && value != first;
      if (mask->second[i]) {
        ASSERT_EQ(value, state == "fp32" ? 0 : initial) << kind << ' ' << i;
      }
    }
    EXPECT_GT(moved, mask->second.size() / 4) << kind;
  }
}

// ---- every optimizer ----

class SparseOptimizers : public ::testing::TestWithParam<config::OptimizerType> {};

TEST_P(SparseOptimizers, PrunedWeightsAndTheirMomentsStayZeroOnEveryTier) {
  const config::OptimizerType type = GetParam();
  const TempFolder folder;
  RunSpec spec = sparse_spec(2, 1);
  spec.accumulation = 1, spec.steps = 4;
  spec.nvme_path = folder.path().string();
  const bool adagrad = type == config::OptimizerType::adagrad,
             one_bit = config::default_rule(type).exchanges_momentum();
  spec.optimizer = cat(R"("type": ")", config::name_of(type), R"(", "params": {"weight_decay": 0.1)",
                       adagrad   ? R"(, "initial_accumulator_value": 0.3})"
                       : one_bit ? R"(, "freeze_step": 2})"
                                 : "}");
  if (one_bit) spec.shard_size = 1;
  const SparseRun plain = train_sparse(spec);
  expect_kept_sparse(plain, spec.dtype, 8, adagrad ? 0.3f : 0.0f);
  if (HasFailure()) return;
  spec.offload_optimizer = "nvme";
  EXPECT_TRUE(train_local(spec).bits() == plain.result.bits()) << "on NVMe";
  spec.offload_optimizer = "cpu", spec.ranks = 1, spec.accumulation = 2, spec.shard_size = 0;
  if (one_bit) return;  // one replica exchanges nothing
  spec.stage = 2;
  const SparseRun one = train_sparse(spec);
  expect_kept_sparse(one, spec.dtype, 8, adagrad ? 0.3f : 0.0f);
  spec.lazy = true;
  EXPECT_TRUE(train_local(spec).bits() == one.result.bits()) << "beside a GPU";
  spec.offload_optimizer = "none";
  EXPECT_TRUE(train_local(spec).bits() == one.result.bits()) << "on a GPU";
}

INSTANTIATE_TEST_SUITE_P(All, SparseOptimizers, ::testing::ValuesIn(config::optimizer_types()),
                         [](const auto& param) { return std::string(config::name_of(param.param)); });

TEST(Sparsity, StaysInEveryPrecision) {
  for (const std::string dtype : {"fp32", "bf16", "fp16"})
    for (const bool split : {true, false}) {
      if (!split && dtype != "bf16") continue;
      SCOPED_TRACE(cat(dtype, split ? "" : ", whole masters"));
      RunSpec spec = sparse_spec(2, 2);
      spec.dtype = dtype, spec.split_masters = split;
      spec.moments = dtype == "fp16" ? "bf16" : "fp32";
      if (spec.moments == "fp32") {
        expect_kept_sparse(train_sparse(spec), dtype, 8);
        continue;
      }
      const SparseRun run = train_sparse(spec);
      EXPECT_EQ(masks_of(run.start), masks_of(run.end));
    }
}

// ---- equal to the bit ----

void expect_sparse_bits(const RunSpec& spec, const RunResult& expected, const std::string& what) {
  const RunResult got = train_local(spec);
  EXPECT_EQ(got.losses, expected.losses) << what;
  EXPECT_EQ(got.norms, expected.norms) << what;
  EXPECT_TRUE(got.bits() == expected.bits()) << what;
}

TEST(Sparsity, AnyNumberOfRanksStagesTiersAndRecomputeGiveTheSameBits) {
  const RunResult expected = train_local(sparse_spec(1, 2));
  RunSpec dense = sparse_spec(1, 2);
  dense.sparsity.clear();
  ASSERT_NE(expected.losses, train_local(dense).losses);
  TempFolder folder;
  expect_sparse_bits(sparse_spec(2, 3), expected, "2 ranks, stage 3");
  RunSpec s = sparse_spec(4, 3);
  s.bucket = 3000, s.overlap = true, s.prefetch = 1'000'000;
  expect_sparse_bits(s, expected, "4 ranks, stage 3, prefetched");
  s = sparse_spec(2, 2);
  s.recompute = "full";
  expect_sparse_bits(s, expected, "2 ranks, stage 2, full recompute");
  s = sparse_spec(2, 3);
  s.nvme_path = folder.path().string(), s.offload_param = s.offload_optimizer = "nvme";
  s.offload_param_extra = R"(, "max_in_cpu": 0)", s.sub_group = 4096;
  expect_sparse_bits(s, expected, "2 ranks, everything on NVMe");
  s = sparse_spec(2, 3);
  s.schedule = "layered", s.offload_optimizer = "cpu";
  expect_sparse_bits(s, expected, "2 ranks, layered accumulation");
  s = sparse_spec(2, 3);
  s.resume_at = 2, s.directory = folder.path().string();
  expect_sparse_bits(s, expected, "2 ranks, resumed");
}

TEST(Sparsity, StagesZeroAndOneAgreeInPlaceOfFoldedSums) {
  RunSpec s = sparse_spec(2, 0);
  const RunResult expected = train_local(s);
  s.stage = 1, s.offload_optimizer = "cpu";
  expect_sparse_bits(s, expected, "stage 1");
}

/// Weight gradients that backward puts off are masked by weights that have gone meanwhile.
TEST(Sparsity, PipelinesThatPutOffWeightGradients) {
  RunSpec s = sparse_spec(2, 3);
  s.ranks = 4, s.pipeline = 2, s.schedule = "1f1b";
  const RunResult expected = train_local(s);
  s.schedule = "zero_bubble";
  expect_sparse_bits(s, expected, "zero bubble");
}

TEST(Sparsity, ExpertsToo) {
  const auto spec = [&](int ranks, int expert) {
    RunSpec s = sparse_spec(ranks, 3);
    s.expert = expert;
    s.moe = R"("experts": 4, "top_k": 2, "ffn_hidden_size": 48, "aux_loss": 0.02)";
    return s;
  };
  const SparseRun one = train_sparse(spec(1, 1));
  expect_two_of_each_four(masks_of(one.end));
  EXPECT_EQ(masks_of(one.start), masks_of(one.end));
  EXPECT_EQ(masks_of(one.end).size(), 2U * (2 + 4 * 2));
  expect_sparse_bits(spec(2, 2), one.result, "experts of 2 ranks");
  expect_sparse_bits(spec(4, 2), one.result, "experts of 2 ranks, sharded over 2");
}

/// Fours of logical rows, whoever holds which part: tensor ranks cut the inputs of every second layer.
TEST(Sparsity, TensorRanksPruneTheSameWeights) {
  RunSpec s = sparse_spec(1, 1);
  s.hidden = 64, s.dtype = "fp32";
  const SparseRun one = train_sparse(s);
  s.ranks = s.tensor = 2, s.accumulation = 4;
  const SparseRun two = train_sparse(s);
  EXPECT_EQ(masks_of(one.start), masks_of(two.start));
  EXPECT_EQ(masks_of(two.start), masks_of(two.end));
  for (std::size_t i = 0; i < one.result.losses.size(); ++i)
    EXPECT_NEAR(one.result.losses[i], two.result.losses[i], 1e-5);
}

/// Sets one of each hundred weights, beside the pruned ones, to a negative number next to zero; and the first
/// gains of norms to −0, which in a dense weight is a number.
void set_small_weights(Engine& engine) {
  for (sharding::Segment* segment : engine.sharded().trainable_segments()) {
    const std::int64_t begin = segment->update_begin(), count = segment->update_end() - begin;
    const tensor::Tensor values = tensor::Tensor::on_host(engine.device(), {count}, DType::f32);
    segment->read_masters(begin, values);
    for (const sharding::Piece& piece : segment->layout().pieces(begin, begin + count)) {
      const autograd::Parameter& parameter = *segment->layout().parameters()[piece.slot];
      float* weights = values.data<float>() + (piece.flat_begin - begin);
      for (std::int64_t i = 0; i < piece.count; ++i) {
        const std::int64_t element = piece.parameter_begin + i;
        if (parameter.pruned && element % 100 == 0 && weights[i] != 0) weights[i] = -1e-7f;
        if (is_norm(parameter.name) && element == 0) weights[i] = -0.0f;
      }
    }
    segment->write_values(begin, values);
  }
  engine::publish_all(engine.sharded());
}

/// Small weights would be −0 in FP8, and so pruned.
TEST(Sparsity, SmallWeightsAreNotPrunedWhereProductsAreInFp8) {
  RunSpec s = sparse_spec(2, 2);
  s.fp8 = R"("recipe": "blockwise")";
  LogicalStateCollector end;
  s.between_steps = [](Engine& engine) {
    if (engine.global_steps() == 0) set_small_weights(engine);
  };
  s.at_end = [&](Engine& engine) { end.add(engine); };
  const RunResult plain = train_local(s);
  const LogicalStates states = end.take();
  expect_two_of_each_four(masks_of(states));
  for (const auto& [name, bytes] : states)
    if (name.starts_with("fp32.") && is_norm(name)) {
      EXPECT_FALSE(minus_zeros<std::uint32_t>(bytes)[0]) << name;
    }
  s.at_end = nullptr, s.stage = 3;
  expect_sparse_bits(s, plain, "stage 3, which would gather in FP8");
}

// ---- what it begins from ----

TEST(Sparsity, TargetsAndExceptionsAreNamed) {
  RunSpec s = sparse_spec(1, 0);
  s.steps = 1, s.sparsity = R"("pattern": "2:4", "targets": ["*.mlp.*"], "exclude": "blocks.0.*")";
  std::set<std::string> pruned;
  for (const auto& [name, mask] : masks_of(train_sparse(s).end))
    if (std::find(mask.begin(), mask.end(), true) != mask.end()) pruned.insert(name);
  EXPECT_EQ(pruned, (std::set<std::string>{"blocks.1.mlp.down.weight", "blocks.1.mlp.up.weight"}));
}

/// Gives every weight four values, one after the other.
class FourValues final : public nn::WeightSource {
 public:
  explicit FourValues(std::array<float, 4> values) : values_(values) {}
  void check(const std::vector<nn::ParameterPtr>&) const override {}
  void read(const std::string&, const tensor::Slice& slice, std::int64_t begin,
            const tensor::Tensor& to) override {
    slice.for_each_run(begin, begin + to.numel(), [&](std::int64_t local, std::int64_t logical, auto count) {
      for (std::int64_t i = 0; i < count; ++i) {
        const float value = values_[static_cast<std::size_t>((logical + i) % 4)];
        const std::int64_t at = local - begin + i;
        if (to.dtype() == DType::f32)
          to.data<float>()[at] = value;
        else
          to.data<bf16>()[at] = bf16(value);
      }
    });
  }

 private:
  std::array<float, 4> values_;
};

/// Which of each four parameters are −0, in the type that the model computes in, once they were loaded.
std::set<std::vector<bool>> loaded_patterns(const RunSpec& spec, std::array<float, 4> values, bool frozen) {
  const config::Config config = config::parse_text(spec.config());
  LogicalStateCollector collector;
  launch_ranks(spec.ranks, [&](DistributedPtr dist) {
    const auto model = std::make_shared<models::Gpt>(models::gpt_config(config, 101));
    if (frozen) model->freeze();
    Engine engine(dist, model, config);
    FourValues source(values);
    engine.load_weights(source);
    collector.add(engine);
  });
  std::set<std::vector<bool>> out;
  for (const auto& [name, bytes] : collector.take()) {
    if (!name.starts_with("parameters.") || !is_linear(name.substr(11))) continue;
    const std::vector<bool> mask = minus_zeros<std::uint16_t>(bytes);
    for (auto at = mask.begin(); at != mask.end(); at += 4) out.insert(std::vector<bool>(at, at + 4));
  }
  return out;
}

TEST(Sparsity, IsMadeFromWhatWeightsAreInFp32) {
  const std::set<std::vector<bool>> first_two{{true, true, false, false}};
  const std::array<float, 4> alike_in_bf16{1, 1.001f, 1.002f, 1.003f};
  for (const int stage : {1, 3}) {
    EXPECT_EQ(loaded_patterns(sparse_spec(2, stage), alike_in_bf16, false), first_two);
    EXPECT_EQ(loaded_patterns(sparse_spec(2, stage), alike_in_bf16, true), first_two) << "frozen";
  }
  RunSpec half = sparse_spec(2, 1);
  half.dtype = "fp16";
  EXPECT_EQ(loaded_patterns(half, {0, 1e-10f, -3e-9f, -2e-9f}, false), first_two) << "all zero in fp16";
}

void expect_refused(RunSpec s, ErrorKind kind, const std::string& text) {
  testing::expect_error(kind, text, [&] { train_local(s); });
}

TEST(Sparsity, WhatCannotBePrunedIsAnError) {
  RunSpec s = sparse_spec(1, 0);
  s.sparsity += R"(, "targets": "*.mpl.*")";
  expect_refused(s, ErrorKind::config,
                 "training.sparsity.targets: no linear layer of a block matches '*.mpl.*'");
  s = sparse_spec(1, 0);
  s.sparsity += R"(, "exclude": "blocks.*")";
  expect_refused(s, ErrorKind::config, "targets and exclude leave none");
  s = sparse_spec(1, 0);
  s.model = R"(, "ffn_hidden_size": 42)";
  expect_refused(s, ErrorKind::config,
                 "inputs of 2 weights cannot be cut into fours on this rank (blocks.0.mlp.down");
  s.ranks = s.tensor = 2, s.model = R"(, "ffn_hidden_size": 44)";
  expect_refused(s, ErrorKind::config, "parallel.tensor");
}

TEST(Sparsity, ARunThatGoesOnPrunesWhatItPrunedBefore) {
  TempFolder folder;
  RunSpec s = sparse_spec(1, 2);
  s.steps = 2, s.directory = folder.path().string();
  const auto go_on_as = [&](const std::string& before, const std::string& after) {
    s.sparsity = before;
    train_local(s, 0, 1);
    s.sparsity = after;
    train_local(s, 1, 2);
  };
  testing::expect_error(ErrorKind::config, "is of a run without training.sparsity",
                        [&] { go_on_as("", R"("pattern": "2:4")"); });
  testing::expect_error(ErrorKind::config, "is pruned: it would not stay so",
                        [&] { go_on_as(R"("pattern": "2:4")", ""); });
  testing::expect_error(ErrorKind::config, "to go on does not prune it", [&] {
    go_on_as(R"("pattern": "2:4", "exclude": "blocks.0.*")", R"("pattern": "2:4")");
  });
  go_on_as(R"("pattern": "2:4", "targets": ["blocks.*"])", R"("pattern": "2:4")");  // the same weights
}

}  // namespace
}  // namespace sherd::test
