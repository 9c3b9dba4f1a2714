#pragma once

#include "autograd/tape.h"

namespace sherd::autograd {

/// Rows of `table` by id. ids: int32 of any shape; table: [vocab, width]; the result: [ids..., width].
/// `slice`: the part of the vocabulary that the table holds; other ids give zeros, and their gradients are
/// left out. Throws Error{data} for an id outside the vocabulary.
Var embedding(const Tensor& ids, const Var& table, const tensor::VocabSlice& slice = {});
/// x[b, s, :] + table[positions.at(s), :]. x: [batch, seq, width]; table: [at least positions.end(seq),
/// width].
Var add_positions(const Var& x, const Var& table, const tensor::Positions& positions = {});

}  // namespace sherd::autograd
