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

int ranks_of(const Value& value) {
  return static_cast<int>(value.integer(1, std::numeric_limits<int>::max()));
}

Table<Parallel> parallel_table() {
  Table<Parallel> table;
  const auto add = [&](const char* name, const char* example, auto read) {
    table.keys.push_back(custom<Parallel>(name, example, read));
  };
  add("tensor", "2", [](Parallel& p, const Value& v) { set(p.tensor, tensor_size, ranks_of(v), v); });
  table.keys.push_back(boolean("sequence_parallel", &Parallel::sequence_parallel));
  add("context", "2", [](Parallel& p, const Value& v) { set(p.context, context_size, ranks_of(v), v); });
  add("context_method", "\"ulysses\"", [](Parallel& p, const Value& v) {
    p.context_method = static_cast<ContextMethod>(v.choice({"ring", "ulysses"}));
    v.context.given.insert(context_method);
  });
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
  table.keys.push_back(custom<Config>("autotp_size", "2", read_tensor_size));
  table.keys.push_back(custom<Config>("tp_size", "2", read_tensor_size));
  Table<Config> tp{Auto::is_a_value, {custom<Config>("tp_size", "2", read_tensor_size)}};
  Key<Config> section = custom<Config>(
      "tp", "{}", [tp](Config& config, const Value& value) { read_section(tp, config, value); });
  section.list = [tp](const std::string& prefix, std::vector<KeyInfo>& out) { list_keys(tp, prefix, out); };
  table.keys.push_back(std::move(section));
  const char* layers = "a model's layers say themselves how they are cut";
  for (const char* name : {"preset_model", "partition_config", "injection_policy_tuple"})
    table.keys.push_back(noted<Config>(name, Holds::anything, layers));
  table.keys.push_back(noted<Config>("dtype", Holds::text, "bf16 and fp16 say it"));
  table.keys.push_back(noted<Config>("keep_module_on_host", Holds::boolean, "offload_param says it"));
  table.keys.push_back(
      noted<Config>("replace_with_kernel_inject", Holds::boolean, "kernels are Sherd's own"));
  table.keys.push_back(
      noted<Config>("tp_overlap_comm", Holds::boolean, "reductions run beside weight gradients anyway"));
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
  return custom<Config>("sequence_parallel_size", "2", [](Config& config, const Value& value) {
    const int size = ranks_of(value);
    if (size == 1) return value.note("off");
    set(config.parallel.context, context_size, size, value);
    if (!value.context.given.contains(context_method))
      config.parallel.context_method = ContextMethod::ulysses;
  });
}

void read_mics_shard_size(Config& config, const Value& value) {
  const std::int64_t size = value.integer();
  if (size <= 0) return value.note("off");
  set(config.parallel.shard_size, shard_size, size, value);
}

}  // namespace sherd::config
