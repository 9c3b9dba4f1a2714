#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "config/config.h"
#include "data/packing/samples.h"
#include "engine/engine.h"
#include "engine/step/step_report.h"

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
  std::string communicate_in;  ///< communication_data_type; empty: its default
  std::string fp8;             ///< keys of section fp8 beside `enabled`; empty: no FP8
  int shard_size = 0;          ///< parallel.shard_size; 0: all ranks
  int tensor = 1, context = 1;
  int expert = 1;     ///< parallel.expert
  std::string moe;    ///< keys of model.moe; empty: no experts
  std::string model;  ///< more keys of section model, ", \"qk_norm\": true"
  bool sequence_parallel = true;
  std::string context_method = "ring";
  std::string reduction;  ///< parallel.reduction; empty: its default
  int pipeline = 1, virtual_stages = 1;
  std::string schedule;        ///< parallel.schedule; empty: its default
  std::string partition;       ///< parallel.partition_method; empty: its default
  long micro_batch_group = 0;  ///< 0: its default
  long recompute_blocks = -1, recompute_micro_batches = -1;
  int steps = 8;  ///< the rate is constant from the sixth on
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
  /// Keys of section `optimizer`.
  std::string optimizer =
      R"("type": "AdamW", "params": {"lr": 0.003, "weight_decay": 0.1, "betas": [0.9, 0.95]})";
  std::string adapter;   ///< keys of training.adapter; empty: none
  std::string sparsity;  ///< keys of training.sparsity; empty: none
  /// The prompt, of an adapter with prompts, in front of a row of the step's global batch; null: each in
  /// turn.
  std::function<std::int64_t(int step, std::int64_t row)> prompt_of = nullptr;
  bool tied = true;
  bool llama = false;
  int hidden = 32, layers = 3;
  int kv_heads = 0;        ///< of 4 heads; 0: 2, and 4 of a GPT-2 with an adapter
  int rows = 2, seq = 24;  ///< of a micro-batch
  /// Micro-batches leave out other numbers of targets, so that they weigh differently, and rows' ends hold no
  /// token.
  bool ragged = false;
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
  std::string groups;  ///< optimizer.groups; empty: none
  bool cpu_checkpointing = false, nvme_checkpointing = false;
  long device_limit = 0;  ///< bytes; 0: none
  bool bind_cores = false;
  double timeout_seconds = 60;  ///< of every wait
  std::string device = "cpu";   ///< device.type
  bool lazy = false;    ///< on a device that does everything as late as it may (support/gpu/lazy_kernels.h)
  bool graphs = false;  ///< device.cuda_graphs, also of the lazy device
  /// Called before each batch: for ranks that are to fail.
  std::function<void(int rank, int step)> before_batch = nullptr;
  /// Called before each instruction of a step's list.
  std::function<void(int rank, int step, const sharding::Instruction&)> before_instruction = nullptr;
  std::function<void(Engine&)> between_steps = nullptr;
  /// Called after the last step, on every rank.
  std::function<void(Engine&)> at_end = nullptr;
  /// Called with the engine of a step that threw.
  std::function<void(Engine&)> when_failed = nullptr;

  /// The configuration as JSON.
  std::string config() const;

 private:
  std::string stages_keys() const;
};

/// Calls RunSpec::before_instruction.
class Before final : public engine::InstructionObserver {
 public:
  Before(const RunSpec& spec, int rank) : spec_(spec), rank_(rank) {}
  void begin(const sharding::Instruction& instruction) override {
    if (spec_.before_instruction) spec_.before_instruction(rank_, step, instruction);
  }
  void end(const sharding::Instruction&, double) override {}
  int step = 0;

 private:
  const RunSpec& spec_;
  int rank_;
};

/// Every bit of the outcome, plus the counters by which a test sees that a setting took effect.
struct RunResult {
  std::vector<double> losses, norms, scales;
  /// fp32 weights by parameter, of all stages and experts; where tensor ranks hold slices, one after the
  /// other.
  std::map<std::string, std::vector<std::byte>> masters;
  std::map<std::string, std::vector<std::byte>> parameters;  ///< compute parameters
  sharding::ResidencyStats residency;
  sharding::ReducerStats reducer;
  std::int64_t persistent = 0;
  std::uint64_t activation_peak = 0;
  /// Bytes of this rank after construction, by tier: parameters, gradients, optimizer.
  std::uint64_t state_bytes[device::tier_count] = {};
  std::uint64_t device_peak = 0;
  engine::IoBytes io;
  std::int64_t skipped = 0;
  std::vector<std::int64_t> early_updates;  ///< by step
  std::vector<device::GraphCounts> graphs;  ///< after each step, on GPUs
  tensor::AttentionRoutes attention{};      ///< of the last engine

  /// Losses, norms, loss scales and weights as raw bytes: what must be the same. No std::byte, which == would
  /// compare one by one.
  std::vector<unsigned char> bits() const;
};

/// Tokens as a function of step, micro-batch and rank alone. `prompt`: the virtual tokens that stand in place
/// of a row's first ones.
tensor::Batch synthetic_batch(device::Device& device, std::int64_t rows, std::int64_t seq, int vocab,
                              std::int64_t step, int micro, int rank,
                              const std::function<data::VirtualTokens(std::int64_t row)>& prompt = nullptr);

/// Whole fp32 weights and compute parameters of every parameter, on every rank. Collective. Throws where
/// stages hold different copies of one.
void collect_weights(Engine& engine, RunResult& out);

/// Flips the lowest bit of the largest of the first master weights that this rank updates: of a small one,
/// the next update may round it away.
void nudge(Engine& engine);

std::unique_ptr<Engine> make_engine(DistributedPtr dist, const RunSpec& spec);

/// The run of one rank; every rank returns the same result but for its own counters. `from`: the step to
/// begin with, out of a checkpoint of the run before it, and `last`, whose state is then saved; 0 and 0:
/// none, and none is.
RunResult train(const DistributedPtr& dist, const RunSpec& spec, int from = 0, int last = 0);

/// Starts `ranks` ranks, calls the body with each one's world, and returns when all have ended.
using StartRanks = std::function<void(int ranks, const comm::CommOptions& options,
                                      const std::function<void(comm::Communicator&)>& body)>;

/// The run on ranks of this process that `start` starts: rank 0's result, after checking that all ranks
/// agree.
RunResult train_on(const StartRanks& start, const RunSpec& spec, int from = 0, int last = 0);

/// The same on local ranks.
RunResult train_local(const RunSpec& spec, int from = 0, int last = 0);

}  // namespace sherd::test
