#pragma once

#include <cstdint>
#include <vector>

#include "autograd/tape.h"

// What adapters of linear layers are made of (sharding/parallel/adapters/adapters.h).
namespace sherd::autograd {

/// y + x·wᵀ. y: [..., out]; x: [..., in]; w: [out, in]; as many rows in both. Takes y's memory, which nobody
/// may read after: y is a value that a product or a sum has just made.
Var linear_onto(const Var& y, const Var& x, const Var& w);

/// Rows [from, from + count) of a matrix, which become rows [to, to + count) of another one, in the
/// `column`-th block of its columns.
struct SpreadRows {
  std::int64_t from, to, count;
  std::int64_t column;
};
/// The matrix of `rows` rows and `blocks` blocks of x's columns that has these rows of x, and `elsewhere` in
/// all other elements. x: [r, c]; the result: [rows, blocks·c]. Each row of x goes to one place at most.
Var spread(const Var& x, const std::vector<SpreadRows>& runs, std::int64_t rows, std::int64_t blocks,
           double elsewhere);

/// x times f, which holds a factor for each of the last extent's columns. x: [..., n]; f: [n].
Var scale_columns(const Var& x, const Var& f);

}  // namespace sherd::autograd
