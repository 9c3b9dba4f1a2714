#pragma once

#include <span>
#include <vector>

#include "autograd/tape.h"

// What moves parts and axes of tensors about. Negative axes count from the end. Each throws Error{usage} that
// names the operation and the shapes where they do not fit.
namespace sherd::autograd {

/// The same elements under another shape of equal size; shares memory.
Var reshape(const Var& x, const Shape& shape);

/// Indices [begin, end) along an axis, copied.
Var slice(const Var& x, int axis, std::int64_t begin, std::int64_t end);
/// Values one behind the other along an axis, alike in their dtype and in all other extents; one at least.
Var concat(std::span<const Var> parts, int axis);
inline Var concat(std::initializer_list<Var> parts, int axis) {
  return concat(std::span(parts.begin(), parts.size()), axis);
}

/// x with its axes in another order: axis i of the result is axis axes[i] of x.
Var permute(const Var& x, const std::vector<int>& axes);
/// x with two of its axes exchanged.
Var transpose(const Var& x, int a, int b);

}  // namespace sherd::autograd
