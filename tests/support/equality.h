#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "config/config.h"
#include "engine/engine.h"
#include "models/from_config.h"
#include "models/gpt.h"
#include "support/lazy_kernels.h"

/// Trains a tiny GPT for a few steps under one setting and hands back every bit of the outcome, so that
/// settings can be compared. Runs on local ranks here, or inside an MPI job
/// (tests/engine/equality_runner.cpp).
namespace sherd::test {

/// One setting. Everything that may not change a bit is a field here.
struct RunSpec {
  int stage = 0;
  int ranks = 2;
  std::string dtype = "bf16";  ///< fp32, bf16 or fp16
  std::string accumulate_in;   ///< data_types.grad_accum_dtype; empty: its default
  int shard_size = 0;          ///< parallel.shard_size; 0: all ranks
  std::string reduction;       ///< parallel.reduction; empty: its default
  int steps = 30;
  int accumulation = 1;
  long bucket = 500'000'000;
  long prefetch = 0;
  long persistence = 0;
  long max_live = 1'000'000'000;
  long max_reuse = 0;
  bool overlap = false;
  std::string recompute = "none";
  double dropout = 0.1;
  double clipping = 0.5;
  bool check_overflow = true;  ///< bf16.check_grad_overflow
  bool tied = true;
  bool llama = false;
  int hidden = 32, layers = 3;
  int resume_at = 0;             ///< save after this step, build everything anew, resume; 0: never
  std::string directory;         ///< for checkpoints when resuming
  int loss_scale_window = 1000;  ///< fp16: clean steps before the scale doubles
  int nudge_step = -1;           ///< change one master weight by one ulp before this step
  int threads = 1;
  std::string offload_param = "none";      ///< none, cpu or nvme
  std::string offload_optimizer = "none";  ///< none, cpu or nvme
  std::string nvme_path;                   ///< for nvme
  std::string param_nvme_path;             ///< for offload_param on nvme; empty: the same
  std::string offload_extra;               ///< more keys of offload_optimizer, ", \"buffer_count\": 1"
  std::string offload_param_extra;         ///< more keys of offload_param
  std::string aio;                         ///< keys of section aio
  long sub_group = 1'000'000'000;
  bool split_masters = true;
  std::string moments = "fp32";
  bool cpu_checkpointing = false;
  long device_limit = 0;  ///< bytes; 0: none
  bool bind_cores = false;
  std::string device = "cpu";  ///< device.type
  bool lazy = false;    ///< on a device that does everything as late as it may (support/lazy_kernels.h)
  bool graphs = false;  ///< device.cuda_graphs, also of the lazy device

  std::string offload(const std::string& device, const std::string& path, const std::string& extra) const {
    return R"({"device": ")" + device + "\"" + (device == "nvme" ? R"(, "nvme_path": ")" + path + "\"" : "") +
           extra + "}";
  }

  std::string config() const {
    auto str = [](auto v) { return std::to_string(v); };
    auto flag = [](bool b) { return b ? std::string("true") : std::string("false"); };
    std::string precision =
        dtype == "bf16" ? cat(R"("bf16": {"enabled": true)",
                              check_overflow ? "" : R"(, "check_grad_overflow": false)", "},")
        : dtype == "fp16"
            ? cat(R"("fp16": {"enabled": true, "initial_scale_power": 8, "loss_scale_window": )",
                  loss_scale_window, "},")
            : "";
    if (!accumulate_in.empty())
      precision += R"("data_types": {"grad_accum_dtype": ")" + accumulate_in + R"("},)";
    return "{" + precision + R"("train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": )" +
           str(accumulation) + R"(, "gradient_clipping": )" + str(clipping) +
           R"(, "optimizer": {"type": "AdamW", "params": {"lr": 0.003, "weight_decay": 0.1, "betas": [0.9, 0.95]}},)" +
           R"("scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_type": "linear"}},)" +
           R"("zero_optimization": {"stage": )" + str(stage) + R"(, "reduce_bucket_size": )" + str(bucket) +
           R"(, "allgather_bucket_size": )" + str(bucket / 2 * 2) + R"(, "overlap_comm": )" + flag(overlap) +
           R"(, "stage3_prefetch_bucket_size": )" + str(prefetch) +
           R"(, "stage3_param_persistence_threshold": )" + str(persistence) +
           R"(, "stage3_max_live_parameters": )" + str(max_live) + R"(, "stage3_max_reuse_distance": )" +
           str(max_reuse) +
           (offload_param != "none"
                ? R"(, "offload_param": )" + offload(offload_param,
                                                     param_nvme_path.empty() ? nvme_path : param_nvme_path,
                                                     offload_param_extra)
                : "") +
           (offload_optimizer != "none"
                ? R"(, "offload_optimizer": )" + offload(offload_optimizer, nvme_path, offload_extra)
                : "") +
           (sub_group != 1'000'000'000 ? R"(, "sub_group_size": )" + str(sub_group) : "") + "}," +
           (aio.empty() ? "" : R"("aio": {)" + aio + "},") +
           (cpu_checkpointing ? R"("activation_checkpointing": {"cpu_checkpointing": true},)" : "") +
           R"("model": {"type": ")" + (llama ? "llama" : "gpt2") +
           R"(", "vocab_size": 101, "seq_length": 24, "hidden_size": )" + str(hidden) +
           R"(, "num_layers": )" + str(layers) + R"(, "num_heads": 4, "num_kv_heads": 2, "dropout": )" +
           str(dropout) + R"(, "tie_embeddings": )" + flag(tied) + "}," + R"("training": {"steps": )" +
           str(steps) + R"(, "seed": 7, "recompute": ")" + recompute +
           (split_masters ? "\"" : R"(", "split_masters": false)") +
           (moments == "fp32" ? "" : R"(, "moments_dtype": ")" + moments + "\"") +
           R"(}, "parallel": {"timeout_seconds": 60)" +
           (shard_size > 0 ? R"(, "shard_size": )" + str(shard_size) : "") +
           (reduction.empty() ? "" : R"(, "reduction": ")" + reduction + "\"") +
           R"(}, "device": {"type": ")" + device + R"(", "threads_per_rank": )" + str(threads) +
           (bind_cores ? R"(, "bind_cores": true)" : "") + (graphs ? R"(, "cuda_graphs": true)" : "") +
           (device_limit > 0 ? R"(, "device_memory_limit": )" + str(device_limit) : "") + "}}";
  }
};

/// Every bit of the outcome, plus the counters by which a test sees that a setting took effect.
struct RunResult {
  std::vector<double> losses, norms, scales;
  std::map<std::string, std::vector<std::byte>> masters;     ///< fp32 weights by parameter
  std::map<std::string, std::vector<std::byte>> parameters;  ///< compute parameters
  sharding::ResidencyStats residency;
  sharding::ReducerStats reducer;
  std::int64_t persistent = 0;
  std::uint64_t activation_peak = 0;
  std::uint64_t state_bytes[device::tier_count] =
      {};  ///< of this rank after construction, by tier: parameters, gradients, optimizer
  std::uint64_t device_peak = 0;
  engine::IoBytes io;
  std::int64_t skipped = 0;
  std::vector<std::int64_t> early_updates;  ///< by step
  std::vector<device::GraphCounts> graphs;  ///< after each step, on GPUs

  /// Losses, norms, loss scales and weights as raw bytes: what must be the same.
  std::vector<std::byte> bits() const {
    std::vector<std::byte> out;
    const auto put = [&](const void* data, std::size_t bytes) {
      const auto* from = static_cast<const std::byte*>(data);
      out.insert(out.end(), from, from + bytes);
    };
    put(losses.data(), losses.size() * sizeof(double));
    put(norms.data(), norms.size() * sizeof(double));
    put(scales.data(), scales.size() * sizeof(double));
    for (const auto* weights : {&masters, &parameters})
      for (const auto& [name, bytes] : *weights)
        put(name.data(), name.size()), put(bytes.data(), bytes.size());
    return out;
  }
};

/// Tokens as a function of step, micro-batch and rank alone.
inline tensor::Batch synthetic_batch(device::Device& device, std::int64_t rows, std::int64_t seq, int vocab,
                                     std::int64_t step, int micro, int rank) {
  const RandomKey key = RandomKey{99, 0}
                            .at(static_cast<std::uint64_t>(step))
                            .at(static_cast<std::uint64_t>(micro))
                            .at(static_cast<std::uint64_t>(rank));
  std::vector<std::int32_t> tokens, labels;
  for (std::int64_t row = 0; row < rows; ++row)
    for (std::int64_t i = 0; i <= seq; ++i) {
      const auto id =
          static_cast<std::int32_t>(philox(key, static_cast<std::uint64_t>(row * (seq + 1) + i))[0] %
                                    static_cast<std::uint32_t>(vocab));
      if (i < seq) tokens.push_back(id);
      if (i > 0) labels.push_back(id);
    }
  return {{"tokens", tensor::Tensor::of<std::int32_t>(device, {rows, seq}, tokens)},
          {"labels", tensor::Tensor::of<std::int32_t>(device, {rows, seq}, labels)}};
}

/// Whole fp32 weights and compute parameters of every parameter, on every rank. Collective.
inline void collect_weights(Engine& engine, RunResult& out) {
  using tensor::Tensor;
  for (const auto& unit : engine.sharded().units()) {
    for (const auto& segment : unit->segments()) {
      const auto& layout = segment->layout();
      const auto in_host = [&](std::int64_t numel, DType dtype) {
        return Tensor::empty(engine.device(), {numel}, dtype, device::Category::activations,
                             engine.device().processor_tier());
      };
      const Tensor masters = in_host(layout.shard(), DType::f32);
      const Tensor parameters = in_host(layout.shard(), segment->parameters().dtype());
      segment->parameters().read(segment->own_begin(), parameters).wait();
      if (segment->key().trainable)
        segment->read_masters(segment->own_begin(), masters);
      else
        engine.kernels().copy(parameters, masters);  // frozen: no other weights
      const std::pair<Tensor, std::map<std::string, std::vector<std::byte>>*> kinds[] = {
          {masters, &out.masters}, {parameters, &out.parameters}};
      for (const auto& [shard, to] : kinds) {
        Tensor full = in_host(layout.padded(), shard.dtype());
        segment->groups().shard->all_gather({{shard, full}}).wait();
        for (std::size_t i = 0; i < layout.parameters().size(); ++i) {
          const Tensor part =
              full.range(layout.offset(i), layout.offset(i) + layout.parameters()[i]->numel());
          (*to)[layout.parameters()[i]->name].assign(part.raw(), part.raw() + part.bytes());
        }
      }
    }
  }
}

/// Flips the lowest bit of the largest of the first master weights that this rank updates: of a small one,
/// the next update may round it away.
inline void nudge(Engine& engine) {
  sharding::Segment& segment = *engine.sharded().trainable_segments().front();
  const std::int64_t count = std::min<std::int64_t>(segment.update_end() - segment.update_begin(), 64);
  const tensor::Tensor weights = tensor::Tensor::empty(
      engine.device(), {count}, DType::f32, device::Category::activations, engine.device().processor_tier());
  segment.read_masters(segment.update_begin(), weights);
  float& largest = *std::max_element(weights.data<float>(), weights.data<float>() + count,
                                     [](float a, float b) { return std::abs(a) < std::abs(b); });
  largest = std::bit_cast<float>(std::bit_cast<std::uint32_t>(largest) ^ 1u);
  segment.write_values(segment.update_begin(), weights);
}

inline std::unique_ptr<Engine> make_engine(DistributedPtr dist, const RunSpec& spec) {
  const config::Config config = config::parse_text(spec.config());
  const auto model = std::make_shared<models::Gpt>(models::gpt_options(config, 101));
  if (!spec.lazy) return std::make_unique<Engine>(std::move(dist), model, config);
  const auto gpu =
      std::make_shared<testing::LazyCudaDevice>(std::numeric_limits<std::size_t>::max(), spec.graphs);
  return std::make_unique<Engine>(std::move(dist), model, config, gpu,
                                  std::make_unique<testing::LazyKernels>(*gpu));
}

/// The run of one rank; every rank returns the same result but for its own counters. `from`: the step to
/// begin with, out of a checkpoint of the run before it, and `last`, whose state is then saved; 0 and 0:
/// none, and none is.
inline RunResult train(const DistributedPtr& dist, const RunSpec& spec, int from = 0, int last = 0) {
  RunResult out;
  auto engine = make_engine(dist, spec);
  if (from > 0) engine->load_checkpoint(spec.directory);
  for (int tier = 0; tier < device::tier_count; ++tier)
    for (const auto category :
         {device::Category::parameters, device::Category::gradients, device::Category::optimizer})
      out.state_bytes[tier] += engine->device().ledger().current(static_cast<device::Tier>(tier), category);
  for (int step = from; step < (last > 0 ? last : spec.steps); ++step) {
    if (step == spec.nudge_step) nudge(*engine);
    int micro = 0;
    const auto& report = engine->train_batch([&] {
      // By the global index of the micro-batch, so that every number of ranks sees the same data.
      return synthetic_batch(engine->device(), 2, 24, 101, step, micro++ * dist->world_size() + dist->rank(),
                             0);
    });
    out.losses.push_back(report.loss);
    out.norms.push_back(report.grad_norm);
    out.scales.push_back(report.loss_scale);
    out.early_updates.push_back(report.early_updates);
    if (engine->device().kind() == device::Kind::cuda)
      out.graphs.push_back(device::as_cuda(engine->device()).graph_counts());
    if (step + 1 == spec.resume_at) {
      engine->save_checkpoint(spec.directory, "middle");
      engine.reset();
      engine = make_engine(dist, spec);
      engine->load_checkpoint(spec.directory);
    }
  }
  if (last > 0) engine->save_checkpoint(spec.directory);
  collect_weights(*engine, out);
  out.residency = engine->sharded().residency_stats();
  out.reducer = engine->sharded().reducer_stats();
  out.persistent = engine->sharded().persistent_elements();
  out.activation_peak = engine->device().ledger().peak(device::Tier::device, device::Category::activations);
  out.skipped = engine->skipped_steps();
  out.device_peak = engine->device().ledger().peak(device::Tier::device);
  out.io = engine->io_bytes();
  return out;
}

/// The run on local ranks: rank 0's result, after checking that all ranks agree.
inline RunResult train_local(const RunSpec& spec, int from = 0, int last = 0) {
  std::vector<RunResult> results(static_cast<std::size_t>(spec.ranks));
  comm::CommOptions options;
  options.timeout_seconds = 60;
  launch_ranks(
      spec.ranks,
      [&](DistributedPtr dist) {
        results[static_cast<std::size_t>(dist->rank())] = train(dist, spec, from, last);
      },
      options);
  for (const RunResult& result : results)
    require(result.bits() == results[0].bits(), "ranks of one run disagree");
  return std::move(results[0]);
}

}  // namespace sherd::test
