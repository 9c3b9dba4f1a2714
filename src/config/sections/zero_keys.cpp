#include "config/sections/tables.h"

// Section `zero_optimization`.
namespace sherd::config {
namespace {

std::vector<Key<Zero>> sharding_keys() {
  using Z = Zero;
  return {integer("stage", &Z::stage, "2", 0, 3)
              .means("what ranks share out: 0 nothing, 1 optimizer states, 2 also gradients, 3 also "
                     "parameters; the whole section may be true (stage 1) or false"),
          integer("reduce_bucket_size", &Z::reduce_bucket_size, "1000", 0)
              .means("elements of gradients that travel together, and wait on the device until then; no bit "
                     "depends on it"),
          integer("allgather_bucket_size", &Z::allgather_bucket_size, "1000", 0)
              .then([](Zero& zero, const Value& value) {
                if (zero.allgather_bucket_size % 2 != 0)
                  value.error("must be even, not ", value.node.brief());
              })
              .takes({integers(0).words + ", even", R"({"type": "integer", "minimum": 0, "multipleOf": 2})"})
              .means("elements per all-gather of updated parameters"),
          // At stage 3, where an example of a key is tried, the default is true.
          field_key("overlap_comm", "false", &Z::overlap_comm, &Value::boolean)
              .takes({"true or false", R"({"type": "boolean"})"})
              .means("communicate beside computation", by("true at stage 3, else false"))};
}

std::vector<Key<Zero>> stage3_keys() {
  using Z = Zero;
  std::vector<Key<Z>> keys = {
      integer("stage3_prefetch_bucket_size", &Z::prefetch_bucket_size, "1000", 0)
          .means("stage 3: elements gathered ahead of their use; 0: no prefetch",
                 also("prefetch_bucket_size")),
      integer("stage3_param_persistence_threshold", &Z::param_persistence_threshold, "10", 0)
          .means("stage 3: parameters of at most so many elements stay gathered; counts what this rank's "
                 "layers hold, of a matrix cut in two half",
                 also("param_persistence_threshold")),
      integer("stage3_model_persistence_threshold", &Z::model_persistence_threshold, "10", 0)
          .means("stage 3: most elements that may stay gathered in all", also("model_persistence_threshold")),
      integer("stage3_max_live_parameters", &Z::max_live_parameters, "1000", 0)
          .means("stage 3: gathered elements that prefetch stays within", also("max_live_parameters")),
      integer("stage3_max_reuse_distance", &Z::max_reuse_distance, "1000", 0)
          .means("stage 3: what is used again within so many elements stays gathered",
                 also("max_reuse_distance"))};
  for (Key<Z>& key : keys)
    key.idle = [](const Config& config) {
      const int stage = config.zero.stage;
      return stage == 3 ? "" : cat("no effect at stage ", stage, ", only at 3");
    };
  return keys;
}

/// As DeepSpeed: at lower stages each rank computes with parameters of its own, which stay where they are.
void drop_offload_param(Zero& zero, const Given& given, const Value& section) {
  if (zero.offload_param.device == OffloadDevice::none) return;
  zero.offload_param.device = OffloadDevice::none;
  section.context.note(
      join(section.path, given.contains("offload_param") ? "offload_param" : "cpu_offload_param"),
      cat("no effect at stage ", zero.stage,
          ": parameters are sharded, and offloaded, at stage 3 only, here as in DeepSpeed"));
}

void finish_zero(Zero& zero, const Given& given, const Value& section) {
  if (!given.contains("overlap_comm")) zero.overlap_comm = zero.stage == 3;
  if (zero.stage < 3) drop_offload_param(zero, given, section);
  check_offload(zero, given, section);
}

/// The section is one of Config, of which a key of it means another one.
Table<Config> zero_table() {
  std::vector<Key<Zero>> keys = sharding_keys();
  append(keys, stage3_keys());
  append(keys, offload_keys());
  append(keys, foreign_keys<Zero>("zero_optimization"));
  Table<Config> table{Auto::to_default};
  for (const Key<Zero>& key : keys) table.keys.push_back(inside(&Config::zero, key));
  table.keys.push_back(mics_shard_size_key());
  table.finish = [](Config& config, const Given& given, const Value& section) {
    finish_zero(config.zero, given, section);
  };
  return table;
}

}  // namespace

Key<Config> zero_key() {
  Key<Config> key = section<Config>("zero_optimization", zero_table()).with(Concerns::run);
  key.read = [read = key.read](Config& config, const Value& section) {
    if (!section.node.is(Node::Kind::boolean)) return read(config, section);
    const int stage = config.zero.stage = section.node.boolean ? 1 : 0;
    section.note(cat("the boolean form means stage ", stage, "; write {\"stage\": ", stage, "}"));
  };
  key.schema = R"({"type": "boolean"})";
  return key;
}

}  // namespace sherd::config
