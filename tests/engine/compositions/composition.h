#pragma once

#include <cstdint>
#include <string>

#include "support/equality.h"

/// Random trainings: which model, numbers and optimizer (the problem), over which ranks, schedule, stage,
/// tiers and traffic (the layout).
namespace sherd::test {

/// One problem over two layouts, the second of which goes on from the first one's checkpoint.
struct Composition {
  std::uint64_t seed = 0;
  RunSpec first, second;
  int middle = 1;  ///< steps of the first; the second goes on to RunSpec::steps

  /// Its seed, and both configurations, with which `sherd train --ranks N` would run it, given data.
  std::string text() const;
};

/// The same of a seed on every machine. Nearly all are valid, by construction.
Composition draw_composition(std::uint64_t seed);

/// Ranks that take micro-batches of their own.
inline int data_ranks(const RunSpec& spec) {
  return spec.ranks / (spec.tensor * spec.context * spec.pipeline);
}

/// Groups of ranks that share states, each of which holds a replica.
inline int replicas(const RunSpec& spec) {
  return spec.shard_size > 0 ? data_ranks(spec) * spec.context / spec.shard_size : 1;
}

/// Whether the section `optimizer` names a rule that begins so.
inline bool takes_rule(const RunSpec& spec, const char* type) {
  return spec.optimizer.find(cat("\"type\": \"", type)) != std::string::npos;
}

}  // namespace sherd::test
