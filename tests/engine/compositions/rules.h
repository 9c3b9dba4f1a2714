#pragma once

#include <string>
#include <vector>

#include "tests/engine/compositions/composition.h"

/// The values that must be equal (docs/guarantees.md, "Equal to the bit"), and how nearly the rest.
namespace sherd::test {

/// All of a layout that the bits of a run may depend on: two runs of one problem with equal texts are equal
/// to the bit. Empty: none are promised.
std::string bits_of(const RunSpec& spec);

/// The layout with the bits of this one that does least beside computing: on the fewest ranks, in memory,
/// without overlap.
RunSpec plainest(const RunSpec& spec);

/// One rank that takes one micro-batch after the other.
RunSpec one_rank(const RunSpec& spec);

/// How far runs of different bits may be apart.
struct Tolerance {
  double loss;     ///< absolute
  double norm;     ///< the gradient's, relative
  double weights;  ///< L2 of the difference of all weights, relative to that of what training changed
};
Tolerance tolerance_of(const RunSpec& spec);

/// Whether a run of `second` begins with the bits that one of `first` ended with.
bool keeps_states(const RunSpec& first, const RunSpec& second);

/// Ways to have a composition do less, those that take away most first. What comes out may be refused.
using Simplification = void (*)(RunSpec&);
const std::vector<Simplification>& simpler_layouts();
const std::vector<Simplification>& simpler_problems();

}  // namespace sherd::test
