#include "config/tables.h"

namespace sherd::config {
namespace {

constexpr Twin tensor_size{"parallel.tensor", "tensor_parallel.autotp_size",
                           "the ranks that hold slices of the same layers"};
constexpr Twin context_size{"parallel.context", "sequence_parallel_size",
                            "the ranks that hold pieces of the same sequences"};
constexpr Twin shard_size{"parallel.shard_size", "zero_optimization.mics_shard_size",
                          "the ranks that share states"};
constexpr const char* context_method = "parallel.context_method";
const std::vector<std::string> context_methods = {"ring", "ulysses"};

int ranks_of(const Value& value) {
  return static_cast<int>(value.integer(1, std::numeric_limits<int>::max()));
}

std::vector<Text> parallel_texts() {
  return {
      {"tensor", "ranks that hold slices of the same layers", "`tensor_parallel.autotp_size` means the same"},
      {"sequence_parallel",
       "with `tensor` above 1: norms, dropout and residuals work on a part of the sequence on each of these "
       "ranks"},
      {"context", "ranks that hold pieces of the same sequences",
       "`sequence_parallel_size` means the same, with `context_method` ulysses"},
      {"context_method",
       "how these attend to each other: ring passes keys and values around, ulysses exchanges heads for "
       "tokens"},
      {"sequence", "a size of sequence parallelism"},
      {"expert",
       "ranks that share out the experts of a layer, and exchange tokens instead of their parameters; "
       "divides "
       "`context` × data, and the number of experts ([mixture of experts](moe.md))"},
      derived("shard_size", "all; with a 1-bit optimizer at stage 0 none but context ranks",
              "ranks that share states, context ranks among them; each such group holds a replica (hybrid "
              "sharding). A multiple of `context`, and of `expert`, that divides `context` × data",
              "`zero_optimization.mics_shard_size` means the same"),
      {"reduction",
       "ordered: sums in rank order in fp32, with the same bits everywhere; native: the backend's own "
       "reduce-scatter and all-reduce where it has them, and one rank accumulates in place: faster, and the "
       "bits "
       "are not promised",
       "sums as NCCL does"},
      {"timeout_seconds",
       "deadline of every wait for another rank, a GPU or a drive; while ranks meet, a minute at least. Of "
       "ranks in "
       "programs of your own it is what `launch()` was given (`CommOptions::timeout_seconds`)"},
  };
}

/// Of DeepSpeed's section.
std::vector<Text> tensor_parallel_texts() {
  const char* size = "`parallel.tensor`; 0 and 1: off";
  const char* cut = "cuts public models' layers by itself; here layers say how they are cut";
  return {derived("autotp_size", "`parallel.tensor`", size, cut),
          derived("tp_size", "`parallel.tensor`", size, cut),
          {"preset_model", "the family whose layers are to be cut"},
          {"partition_config", "patterns of the layers to cut"},
          {"injection_policy_tuple", "modules whose sums are to be all-reduced"},
          {"dtype", "type of the cut parameters"},
          {"keep_module_on_host", "cut parameters in host memory"},
          {"replace_with_kernel_inject", "modules of DeepSpeed's own kernels"},
          {"tp_overlap_comm", "all-reduce beside computation"},
          {"vocab_parallel_lm_head", "cut the head along the vocabulary"},
          {"vocab_parallel_ce_backend", "whose cross-entropy over it"}};
}

Table<Parallel> parallel_table() {
  Table<Parallel> table;
  const auto add = [&](const char* name, const char* example, auto read) {
    table.keys.push_back(custom<Parallel>(name, example, read).takes(integers(1)));
  };
  add("tensor", "2", [](Parallel& p, const Value& v) { set(p.tensor, tensor_size, ranks_of(v), v); });
  table.keys.push_back(boolean("sequence_parallel", &Parallel::sequence_parallel));
  add("context", "2", [](Parallel& p, const Value& v) { set(p.context, context_size, ranks_of(v), v); });
  add("context_method", "\"ulysses\"", [](Parallel& p, const Value& v) {
    p.context_method = static_cast<ContextMethod>(v.choice(context_methods));
    v.context.given.insert(context_method);
  });
  table.keys.back().choices = context_methods;
  const auto is_one = [](const Value& value) { return ranks_of(value) == 1; };
  table.keys.push_back(
      refused<Parallel>("sequence", "2",
                        "parallel.sequence_parallel (with parallel.tensor) cuts what lies between a layer's "
                        "products along the sequence, parallel.context all of it: give one of these",
                        is_one));
  append(table.keys, schedule_keys());
  add("expert", "2", [](Parallel& p, const Value& v) { p.expert = ranks_of(v); });
  add("shard_size", "2", [](Parallel& p, const Value& v) { set(p.shard_size, shard_size, v.integer(1), v); });
  table.keys.push_back(choice("reduction", &Parallel::reduction, {"ordered", "native"}, "\"native\""));
  table.keys.push_back(real("timeout_seconds", &Parallel::timeout_seconds, "30", 0, infinity, true));
  describe(table.keys, parallel_texts());
  return table;
}

/// A size of DeepSpeed's: 0 and 1 switch it off, which leaves the word to Sherd's own key.
void read_tensor_size(Config& config, const Value& value) {
  const std::int64_t size = value.integer(0, std::numeric_limits<int>::max());
  if (size <= 1) return value.note("off");
  set(config.parallel.tensor, tensor_size, static_cast<int>(size), value);
}

Table<Config> tensor_parallel_table() {
  Table<Config> table;
  for (const char* name : {"autotp_size", "tp_size"})
    table.keys.push_back(custom<Config>(name, "2", read_tensor_size).takes(integers(0)));
  Table<Config> tp{Auto::is_a_value, {table.keys.back()}};
  tp.keys.push_back(noted<Config>("tp_grain_size", Holds::count, "heads and rows are cut evenly"));
  for (const char* name : {"mpu", "tp_group"})
    tp.keys.push_back(noted<Config>(name, Holds::anything, "`parallel` says which ranks hold slices"));
  describe(tp.keys, {derived("tp_size", "`parallel.tensor`", "the same as `autotp_size`"),
                     {"tp_grain_size", "of which sizes slices are multiples"},
                     {"mpu", "an object that knows the groups of ranks"},
                     {"tp_group", "a group of ranks"}});
  Key<Config> section = custom<Config>(
      "tp", "{}", [tp](Config& config, const Value& value) { read_section(tp, config, value); });
  section.list = [tp](const std::string& prefix, std::vector<KeyInfo>& out) { list_keys(tp, prefix, out); };
  section.aliases.push_back("tensor_parallel");
  table.keys.push_back(std::move(section));
  const char* layers = "a model's layers say themselves how they are cut";
  for (const char* name : {"preset_model", "partition_config", "injection_policy_tuple"})
    table.keys.push_back(noted<Config>(name, Holds::anything, layers));
  table.keys.push_back(noted<Config>("dtype", Holds::text, "bf16 and fp16 say it"));
  table.keys.push_back(noted<Config>("keep_module_on_host", Holds::boolean, "offload_param says it"));
  table.keys.push_back(noted<Config>("replace_with_kernel_inject", Holds::boolean, "kernels are Sherd's own")
                           .alias("kernel_inject"));
  table.keys.push_back(
      noted<Config>("tp_overlap_comm", Holds::boolean, "reductions run beside weight gradients anyway"));
  table.keys.push_back(noted<Config>("vocab_parallel_lm_head", Holds::anything,
                                     "the table and the head are cut along the vocabulary"));
  table.keys.push_back(
      noted<Config>("vocab_parallel_ce_backend", Holds::text, "the loss of a cut head is Sherd's own"));
  describe(table.keys, tensor_parallel_texts());
  return table;
}

}  // namespace

Key<Config> parallel_key() {
  return section("parallel", &Config::parallel, parallel_table());
}

void note_idle_parallel(const Config& config, const Given& given, Context& context) {
  const auto section = given.find("parallel");
  if (section == given.end()) return;
  const auto idle = [&](const char* key, int size, const char* needed) {
    if (size == 1 && section->second->find(key))
      context.note(join("parallel", key), cat("no effect without ", needed, " above 1"));
  };
  if (config.parallel.sequence_parallel) idle("sequence_parallel", config.parallel.tensor, "parallel.tensor");
  idle("context_method", config.parallel.context, "parallel.context");
}

Key<Config> tensor_parallel_key() {
  const Table<Config> table = tensor_parallel_table();
  Key<Config> key = custom<Config>("tensor_parallel", "{}", [table](Config& config, const Value& value) {
    read_section(table, config, value);
  });
  key.list = [table](const std::string& prefix, std::vector<KeyInfo>& out) { list_keys(table, prefix, out); };
  return key;
}

Key<Config> sequence_parallel_size_key() {
  Key<Config> key = custom<Config>("sequence_parallel_size", "2", [](Config& config, const Value& value) {
                      const int size = ranks_of(value);
                      if (size == 1) return value.note("off");
                      set(config.parallel.context, context_size, size, value);
                      if (!value.context.given.contains(context_method))
                        config.parallel.context_method = ContextMethod::ulysses;
                    }).takes(integers(1));
  describe(key, derived("sequence_parallel_size", "`parallel.context`",
                        "`parallel.context`, with `context_method` ulysses unless that is given; 1: off",
                        "loaders give each rank its piece; here whole sequences, which the model cuts"));
  return key;
}

void read_mics_shard_size(Config& config, const Value& value) {
  const std::int64_t size = value.integer();
  if (size <= 0) return value.note("off");
  set(config.parallel.shard_size, shard_size, size, value);
}

}  // namespace sherd::config
