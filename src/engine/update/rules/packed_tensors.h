#pragma once

#include <compare>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "autograd/parameter.h"

namespace sherd::engine {

/// A run of a parameter's local elements, [begin, end), that are of one of its tensors (autograd::Packing).
struct PackedRun {
  std::int64_t begin, end;
  int tensor;
  bool operator==(const PackedRun&) const = default;
};

/// All that this rank's slice has of the tensors, in order; what is behind the last run is padding. Pure
/// arithmetic. Throws Error{usage} for tensors that are not the parameter's first rows, each once, which
/// calls the parameter `name` where it has none yet.
std::vector<PackedRun> packed_runs(const autograd::Parameter& parameter, const std::string& name = {});
/// The same of tensors as they are published: where that is as one, of this one.
std::vector<PackedRun> measured_runs(const autograd::Parameter& parameter);

/// The local elements before the padding: [0, unpadded()).
std::int64_t unpadded(const autograd::Parameter& parameter);

/// A tensor as it is published: one of those that a parameter packs, or the whole parameter.
struct MeasuredTensor {
  const autograd::Parameter* parameter = nullptr;
  int index = 0;  ///< −1: the parameter's padding, which is none
  auto operator<=>(const MeasuredTensor&) const = default;

  bool is_padding() const { return index < 0; }
  /// The parameter's name; where it packs several, with the tensor's number: "blocks.0.mlp.up.weight/1".
  std::string name() const;
};

/// The measured tensors of a parameter.
std::vector<MeasuredTensor> measured_tensors(const autograd::Parameter& parameter);

/// Calls visit(begin, end, tensor) for the parts of local elements [begin, end) that are of one published
/// tensor each, or padding, in order.
void for_each_measured(const autograd::Parameter& parameter, std::int64_t begin, std::int64_t end,
                       const std::function<void(std::int64_t, std::int64_t, const MeasuredTensor&)>& visit);

}  // namespace sherd::engine
