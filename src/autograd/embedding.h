#pragma once

#include "autograd/tape.h"

namespace sherd::autograd {

/// Rows of `table` by id. ids: int32 of any shape; table: [vocab, width]; the result: [ids..., width].
/// Throws Error{data} for an id outside the table.
Var embedding(const Tensor& ids, const Var& table);
/// x[b, s, :] + table[s, :]. x: [batch, seq, width]; table: [at least seq, width].
Var add_positions(const Var& x, const Var& table);

}  // namespace sherd::autograd
