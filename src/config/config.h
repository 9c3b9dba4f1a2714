#pragma once

// This room turns configuration files into validated structs, and back. Each key is described once, by a row
// in the table of its section; reading, writing, errors, suggestions and documents go by the rows.
//
// To change, look at:
// - add a key: docs/recipes.md, "A configuration key"; the structs are here and in zero.h, model.h, adapter.h
//   and optimizer.h, the rows in sections/
// - what a row may say: reader.h; makers of rows: rows.h; which tables there are: sections/tables.h
// - keys of DeepSpeed, PEFT and AdapterHub that set nothing here: sections/foreign_table.h
// - how files and overrides are laid over each other, and what is checked across sections: parse.cpp; values
//   with their place, for errors: value.h; JSON as a tree: json_tree.h
// - what transformers' Trainer would fill in: trainer_fill.cpp; the three batch numbers: batch.cpp
// - docs/keys.md: keys_page.cpp; the JSON Schema: json_schema.cpp; defaults that both tell: key_defaults.h
// - sections that other programs' files have too, as a config.json: published.h; families: model.cpp

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/choices.h"
#include "base/error.h"
#include "base/log.h"
#include "config/adapter.h"
#include "config/keys.h"
#include "config/model.h"
#include "config/optimizer.h"
#include "config/preference.h"
#include "config/zero.h"

namespace sherd::config {

/// Top-level batch keys. Each is 0 while neither given nor resolved; resolve_batch() fills all three.
struct Batch {
  std::int64_t train_batch_size = 0;  ///< samples per optimizer step over all data-parallel ranks
  std::int64_t micro_batch_size = 0;  ///< `train_micro_batch_size_per_gpu`: samples per forward per rank
  std::int64_t gradient_accumulation_steps = 0;  ///< forwards per optimizer step
  /// `dataloader_drop_last`: initialize()'s training data ends with its last whole batch
  /// (SampleLoaderOptions).
  bool drop_last = false;
  bool operator==(const Batch&) const = default;
};

/// An entry of `data.sources`.
struct DataSource {
  std::string path;   ///< prefix of an indexed dataset (PREFIX.bin, PREFIX.idx), as `sherd prepare` wrote it
  double weight = 0;  ///< > 0, with any sum; 0 in all sources: each weighs as its tokens
  std::string task;   ///< one of training.adapter.tasks, whose prompt stands in front of its texts
  bool operator==(const DataSource&) const = default;
};

/// How documents become samples.
enum class SamplePacking : std::uint8_t {
  stream,    ///< behind each other, cut where a sample ends (Megatron's)
  documents  ///< whole ones into each sample, none of which sees another
};

/// Section `data`: what `sherd train` reads.
struct Data {
  /// The datasets to train on, as `path` or `sources` name them: at least one. All are of one tokenizer.
  std::vector<DataSource> sources;
  /// Fractions for training and validation, each ≥ 0, sum in (0, 1].
  std::array<double, 2> split = {0.98, 0.02};
  /// byte, spm:MODEL or hf:PATH; empty (default): the one recorded beside the dataset.
  std::string tokenizer;
  std::uint64_t seed = 1234;  ///< seed of the shuffle
  bool shuffle = true;        ///< documents and samples are shuffled, anew every epoch
  SamplePacking packing = SamplePacking::stream;
  bool operator==(const Data&) const = default;
};

/// The loss of a step, and with it the gradient, is a mean over these.
enum class LossAverage : std::uint8_t {
  tokens,        ///< all targets of the global batch
  micro_batches  ///< the means of micro-batches, as DeepSpeed has it
};

/// The training objective: what a model learns of a text. automatic: the text's class, with a head for
/// labels; masked tokens in other models without `causal`; spans that were cut out of the text, with an
/// encoder in front of a decoder; else next tokens. seq2seq: the answer to a prompt, by such an encoder and
/// decoder. From dpo on: which answers people prefer.
enum class Objective : std::uint8_t {
  automatic,
  next_token,
  mlm,
  classification,
  spans,
  seq2seq,
  dpo,    ///< of two answers (Rafailov et al. 2023), and what `training.preference.loss_type` names
  orpo,   ///< the same without a reference (Hong et al. 2024)
  simpo,  ///< (Meng et al. 2024)
  cpo,    ///< (Xu et al. 2024)
  kto,    ///< answers that are judged by themselves (Ethayarajh et al. 2024)
  reward  ///< a score for answers (Bradley and Terry 1952)
};
/// "next_token", "dpo", …; "auto".
std::string_view name_of(Objective objective);

/// Which weights of each few are zero, and stay so.
enum class SparsityPattern : std::uint8_t {
  none,
  two_of_four  ///< "2:4": two of each four neighbours along the inputs of an output
};

/// Section `training.sparsity` (docs/sparsity.md; Mishra et al. 2021, "Accelerating sparse deep neural
/// networks").
struct Sparsity {
  SparsityPattern pattern = SparsityPattern::none;
  /// Shell patterns (fnmatch(3)) of full names of weights of linear layers, or of their modules: what is
  /// pruned, and what of it is not.
  std::vector<std::string> targets{"*"}, exclude;
  bool prunes() const { return pattern != SparsityPattern::none; }
  bool operator==(const Sparsity&) const = default;
};

/// Section `training`. What transformers' Trainer knows too (`learning_rate`, …) has no fields here: it fills
/// those of the optimizer, the scheduler, the batch and the precision (trainer_fill.cpp).
struct Training {
  std::int64_t steps = 0;     ///< optimizer steps of the whole run; `sherd train` needs it here or as --steps
  std::uint64_t seed = 1234;  ///< seed of initial weights and dropout
  std::int64_t eval_interval = 0;  ///< steps between evaluations on the validation split; 0: only at the end
  std::int64_t eval_steps = 10;    ///< batches (of train_batch_size samples) per evaluation, > 0
  std::string save_dir;            ///< checkpoints go here; empty: none are written
  std::int64_t save_interval = 0;  ///< steps between checkpoints; 0: only at the end
  /// Folder of weights to begin with: Hugging Face's files, or a checkpoint; empty: none.
  std::string init_from;
  /// Steps between local checkpoints (engine/checkpoint/local/local_checkpoints.h); 0: there are none.
  std::int64_t local_save_interval = 0;
  std::string local_save_dir = "/dev/shm";  ///< each machine's own folder of them
  std::int64_t keep_last = 0;               ///< checkpoints to keep, oldest deleted first; 0: all
  bool save_async = true;                   ///< `sherd train` writes checkpoints while it trains on
  bool keep_best = false;     ///< save where validation finds the lowest loss so far, and keep that one
  std::int64_t patience = 0;  ///< evaluations without a lower loss after which to stop; 0: never
  std::int64_t max_skipped_steps = 100;  ///< in a row, at which the run ends with an error; 0: any number
  Objective objective = Objective::automatic;
  double mlm_probability = 0.15;  ///< (0, 1): of a token to be a target of mlm
  bool whole_word_mask = false;   ///< mlm: the tokens of a word are targets together
  double span_density = 0.15;     ///< (0, 1): share of tokens that are cut out, of spans
  double span_length = 3;         ///< ≥ 1: tokens of a span, on average
  LossAverage loss_average = LossAverage::tokens;
  Recompute recompute = Recompute::none;
  /// `activation_checkpointing.cpu_checkpointing`: what full recompute keeps, the inputs of the blocks, lies
  /// in the host tier (Rajbhandari et al. 2020, ZeRO, P_a+cpu). No effect without full recompute.
  bool cpu_checkpointing = false;
  /// `activation_checkpointing.nvme_checkpointing`: the same on NVMe, in the folder of
  /// `zero_optimization.offload_param.nvme_path` or `offload_optimizer.nvme_path`.
  bool nvme_checkpointing = false;
  /// Blocks of a stage that recompute, the first ones in the order of the model's parts; -1: all.
  std::int64_t recompute_blocks = -1;
  /// Micro-batches that recompute of all that the fullest stage has in flight at once; -1: all.
  std::int64_t recompute_micro_batches = -1;
  /// Where compute is bf16: the optimizer keeps of each fp32 master only the 16 bits that the bf16 parameter
  /// lacks. The same values in 2 bytes less per parameter; false keeps whole masters.
  bool split_masters = true;
  /// Type of the optimizer's moments: f32, or bf16 rounded stochastically, the same way on every run.
  DType moments_dtype = DType::f32;
  Adapter adapter;        ///< none: the model's own weights are trained
  Preference preference;  ///< of the objectives from dpo on
  Sparsity sparsity;      ///< none: all weights are trained
  /// Steps between the plain progress lines of `sherd train`; 0: each has one.
  std::int64_t log_interval = 10;
  bool operator==(const Training&) const = default;
};

/// The order in which the micro-batches of a step pass the parts of a model (sharding/schedule/).
enum class Schedule : std::uint8_t {
  automatic,  ///< 1f1b, or interleaved, with a pipeline; else layered where that saves traffic, or accumulate
  accumulate,  ///< one micro-batch after the other
  layered,     ///< all of them pass a part before the next one: parameters come twice per step
  gpipe,
  one_forward_one_backward,  ///< "1f1b"
  interleaved,
  zero_bubble
};

/// As `parallel.schedule` has it: "1f1b".
std::string_view name_of(Schedule schedule);

/// Section `parallel`. Ranks that none of these dimensions takes form the data-parallel dimension.
/// comm::Grid says which sizes a world can hold.
struct Parallel {
  int tensor = 1;  ///< ranks that hold slices of the same layers, ≥ 1
  /// With tensor > 1, norms, dropout and residuals are cut along the sequence.
  bool sequence_parallel = true;
  int context = 1;  ///< ranks that hold pieces of the same sequences, ≥ 1
  ContextMethod context_method = ContextMethod::ring;
  int pipeline = 1;  ///< ranks that hold the stages of one model, ≥ 1
  int expert = 1;    ///< ranks that share out the experts of a layer; divides context × data
  Schedule schedule = Schedule::automatic;
  int virtual_stages = 1;  ///< runs of parts that each stage holds, > 1 with `interleaved` only
  /// With `interleaved`, so many micro-batches pass a virtual stage before the next one's turn; 0:
  /// `pipeline`.
  std::int64_t micro_batch_group = 0;
  /// How parts go to stages, as DeepSpeed's `partition_method`: "best" (equal work: parameters that a part
  /// computes with), "parameters" (equal numbers of them), "uniform" (of parts), or "type:REGEX" (of parts
  /// whose class matches).
  std::string partition_method = "best";
  /// Ranks that share states, context ranks among them; each such group holds a replica (Zhang et al. 2022,
  /// MiCS; hybrid sharding in PyTorch's FSDP). A multiple of `context`; 0 (default): all that hold the same
  /// parameters.
  std::int64_t shard_size = 0;
  /// `native` is faster; the bits then depend on the backend, and may on the run.
  Reduction reduction = Reduction::ordered;
  double timeout_seconds = 1800;  ///< deadline of every wait for another rank, > 0
  bool operator==(const Parallel&) const = default;
};

enum class DeviceType : std::uint8_t { automatic, cpu, cuda };

/// How numbers of bytes may be written, for errors and pages.
inline constexpr const char* bytes_form = "bytes, or a string with a unit such as \"512MiB\" or \"8GB\"";
/// The bytes of a text such as "512MiB", "8GB" or "100 B"; nothing where it is none.
std::optional<std::uint64_t> bytes_of(const std::string& text);

/// Section `device`.
struct Device {
  DeviceType type = DeviceType::automatic;  ///< auto: GPUs where there are any | cpu | cuda: GPUs or an error
  int threads_per_rank = 0;  ///< compute threads; 0 ("auto"): cores divided by the ranks on this machine
  bool bind_cores = false;   ///< pin each local rank's compute threads to cores of its own
  std::uint64_t device_memory_limit = 0;  ///< bytes, or a string such as "512MiB"; 0: none
  std::uint64_t host_memory_limit = 0;    ///< bytes, or a string such as "8GB"; 0: none
  // The rest is for GPUs only. The defaults keep every result repeatable and as accurate as on CPUs.
  bool tf32 = false;  ///< products of an fp32 model may round their operands to TF32 (10 bits of fraction)
  /// GELU (tanh) on the sum inside the product, before it rounds: faster in 16-bit models; with selective
  /// recompute on, and with it off, the results then differ in their last bits.
  bool fused_gelu = false;
  /// Attention's gradient in cuDNN without atomic sums; false: the faster one, whose bits differ from run to
  /// run.
  bool deterministic_attention = true;
  /// Run what the passes of blocks queue as CUDA graphs where it comes again with the same addresses.
  bool cuda_graphs = false;
  /// Dense TFLOP/s of one GPU in the model's dtype, the denominator of MFU; 0 ("auto"): the data sheet's.
  double peak_tflops = 0;
  bool operator==(const Device&) const = default;
};

/// Sections `tensorboard` and `csv_monitor`: what every step's scalars go to, from rank 0
/// (engine/report/monitor.h).
struct Monitor {
  bool enabled = false;
  std::string output_path;                    ///< folder; empty: the one in which the run was started
  std::string job_name = "DeepSpeedJobName";  ///< the folder in it that gets the files
  bool operator==(const Monitor&) const = default;
};

/// One validated configuration: DeepSpeed's keys with the meaning that DeepSpeed 0.19 gives them, and Sherd's
/// sections `fp8`, `model`, `data`, `training`, `parallel` and `device`. A plain value; every field has its
/// effective value, except the batch, which needs the number of ranks (resolve_batch).
struct Config {
  Batch batch;
  Optimizer optimizer;
  Scheduler scheduler;
  Precision precision;
  Fp8 fp8;
  /// Largest global L2 norm of the gradients; ≤ 0: off (default as DeepSpeed 0.19).
  double gradient_clipping = 1.0;
  Zero zero;
  Aio aio;
  std::int64_t steps_per_print = 0;   ///< optimizer steps between the engine's log lines; 0 (default): none
  bool wall_clock_breakdown = false;  ///< time forward, backward and step apart, and log them
  bool memory_breakdown = false;      ///< log the ledger at steps_per_print
  bool dump_state = false;            ///< log the whole configuration when the engine starts
  Monitor tensorboard, csv_monitor;
  std::optional<LogLevel> log_level;  ///< debug | info | warning | error

  std::optional<Model> model;  ///< absent: the caller brings a model
  std::optional<Data> data;    ///< absent: the caller brings batches
  Training training;
  Parallel parallel;
  Device device;

  /// One line per accepted key that has no effect here, with the reason, in file order, for the engine to log
  /// once: "zero_optimization.contiguous_gradients: always on in Sherd". Not part of the configuration's
  /// value.
  std::vector<std::string> notes;

  /// The objective of the model of section `model`; never automatic.
  Objective objective() const {
    if (training.objective != Objective::automatic) return training.objective;
    if (model && model->has_encoder()) return Objective::spans;
    if (!model || model->causal) return Objective::next_token;
    return model->classifies() ? Objective::classification : Objective::mlm;
  }
  /// Whether the model learns which answers people prefer.
  bool learns_preferences() const { return objective() >= Objective::dpo; }
  /// The losses of such an objective with their weights; none for another objective.
  std::vector<PreferenceTerm> preference_terms() const;
  /// The losses look at a baseline of mismatched answers (kto's).
  bool has_baseline() const;
  /// Where the reference's log-probabilities come from; never automatic.
  Reference reference() const;
  /// A row of samples holds texts that do not see each other, or one beside what fills the row up.
  bool keeps_texts_apart() const {
    return (data && data->packing == SamplePacking::documents) || objective() == Objective::classification ||
           (model && model->pairs_texts());
  }
  /// Compares everything but the notes.
  bool operator==(const Config& other) const;
};

/// Reads JSON files (`//` and `/* */` comments and trailing commas allowed) and merges them in order: later
/// files add sections and override keys. Each override is "a.b.c=VALUE" ("optimizer.groups[0].lr=VALUE" in a
/// list), VALUE in JSON or else taken as a string. Throws Error{io} for an unreadable file and Error{config}
/// for everything else, naming file, line, key and the next step.
/// `sections`: gives, as text, the `model` section of the weights that a run begins from, by
/// training.init_from and training.save_dir, over which the files' own is laid, and with it the section
/// training.adapter of an adapter that is among them, for files that name no other. It is asked where there
/// is an init_from; without, the files say all. `adapters` gives the section training.adapter likewise, where
/// that names an adapter to go on from.
using WeightSections = std::function<std::string(const std::string& init_from, const std::string& save_dir)>;
Config parse_files(const std::vector<std::string>& paths, const std::vector<std::string>& overrides = {},
                   const WeightSections& sections = nullptr, const WeightSections& adapters = nullptr);

/// The same from memory; `name` stands for the file in errors.
Config parse_text(std::string_view text, const std::string& name = "config",
                  const std::vector<std::string>& overrides = {});

/// The text of an error about a configuration, with keys as these files and overrides have them:
/// "tensor_parallel.autotp_size" for "parallel.tensor" where that key of DeepSpeed's gave the value. The text
/// itself where the files cannot be read.
std::string in_given_keys(std::string text, const std::vector<std::string>& paths,
                          const std::vector<std::string>& overrides = {});

/// The dotted keys to which files and overrides give a value other than "auto": as they are written there,
/// and where a key of DeepSpeed's says what one of Sherd's does, that one too.
std::set<std::string> given_keys(const std::vector<std::string>& paths,
                                 const std::vector<std::string>& overrides = {});

/// The resolved configuration as JSON that parse_text() reads back to an equal Config. Stable key order.
std::string dump(const Config& config);

/// A key with its value: "optimizer.params.lr", "0.001".
struct Setting {
  std::string key, value;
  Concerns concerns;        ///< who depends on its value
  bool decides_parameters;  ///< it decides which parameters the model has, and their shapes
};
/// Every key that dump() has, in its order.
std::vector<Setting> settings(const Config& config);

/// The three batch numbers for `dp_world` data-parallel ranks, by DeepSpeed's inference (reference A.1).
/// Throws Error{config} with the four numbers and a combination that would do when they do not multiply.
Batch resolve_batch(const Config& config, int dp_world);

}  // namespace sherd::config
