#include "config/tables.h"

namespace sherd::config {
namespace {

// Two keys may give it, in any order.
void set_shard_size(Parallel& parallel, std::int64_t size, const Value& value) {
  if (parallel.shard_size != 0 && parallel.shard_size != size)
    value.error(
        "parallel.shard_size and zero_optimization.mics_shard_size say the same, the ranks that share "
        "states, but are given as ",
        parallel.shard_size, " and ", size, "; keep one of them");
  parallel.shard_size = size;
}

Table<Parallel> parallel_table() {
  Table<Parallel> table;
  for (const char* name : {"tensor", "sequence", "pipeline", "expert", "context"})
    table.keys.push_back(refused<Parallel>(
        name, "2", "only 1 is in this build yet (roadmap: docs/architecture.md)",
        [](const Value& value) { return value.integer(1, std::numeric_limits<int>::max()) == 1; }));
  table.keys.push_back(custom<Parallel>("shard_size", "2", [](Parallel& parallel, const Value& value) {
    set_shard_size(parallel, value.integer(1), value);
  }));
  table.keys.push_back(choice("reduction", &Parallel::reduction, {"ordered", "native"}, "\"native\""));
  table.keys.push_back(real("timeout_seconds", &Parallel::timeout_seconds, "30", 0, infinity, true));
  return table;
}

}  // namespace

Key<Config> parallel_key() {
  return section("parallel", &Config::parallel, parallel_table());
}

void read_mics_shard_size(Config& config, const Value& value) {
  const std::int64_t size = value.integer();
  if (size <= 0) return value.note("off");
  set_shard_size(config.parallel, size, value);
}

}  // namespace sherd::config
