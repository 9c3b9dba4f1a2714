#pragma once

#include <vector>

#include "sharding/parallel/adapters/adapters.h"

namespace sherd::parallel {

/// Rows of trained values that stand in the place of some of a table's: row from + i of `rows` for row
/// to + i of those that this rank has of the table.
struct TrainedRows {
  Var rows;  ///< [n, width]; undefined: there are none
  std::vector<autograd::SpreadRows> runs = {};
};
/// Puts x·rowsᵀ + bias in the columns of scores, [rows of x, rows of the table], which they stand for. bias:
/// of all columns, or undefined.
void put_columns(Tape& tape, const tensor::Tensor& x, const TrainedRows& of, const tensor::Tensor& bias,
                 const tensor::Tensor& scores);
/// Takes the rows' columns out of the gradient of the scores, which becomes zero there; one matrix for each
/// run.
std::vector<tensor::Tensor> take_columns(Tape& tape, const std::vector<autograd::SpreadRows>& runs,
                                         const tensor::Tensor& gradient);

/// Some rows of the table of tokens, or of the head, which are trained while the others stay as they are
/// (PEFT's trainable_token_indices): they stand in the place of the table's own. Parameter: "rows" [n,
/// width], in the order of the ids, normal(0, 0.02) at first unless weights are given. All tensor ranks have
/// all of it, and each uses and finds the gradient of those whose place is in its part of the table.
class TokenRows : public LinearAdapter {
 public:
  /// A table of `rows`, of which those from `vocabulary` on are padding.
  struct Table {
    std::int64_t rows, vocabulary, width;
  };
  /// `ids`: each once; `tied`: another table's rows, whose values these share; null: these have values of
  /// their own.
  TokenRows(std::vector<std::int64_t> ids, const Table& table, const Layout& layout,
            const nn::ParameterPtr& tied = nullptr);
  /// The rows that `ids` name of this rank's part of `table`, which begins with id `first`, or of these;
  /// zeros for those of other ranks. ids: int32 [...]; the result: [..., width]. Throws Error{data} for an id
  /// outside the vocabulary.
  Var look_up(Tape& tape, const tensor::Tensor& ids, const Var& table, std::int64_t first);
  /// The rows and their places, for the loss, which computes scores itself.
  TrainedRows rows(Tape& tape) const { return {tape.parameter(rows_), runs_}; }
  void attach(const nn::ParameterPtr& weight, const nn::ParameterPtr& bias) override;
  /// Makes the scores of these rows anew from x, among the head's scores y. Not recorded: passes with
  /// gradients have vocab_cross_entropy().
  Var output(Tape& tape, const Var& x, const Var& y, const std::vector<std::int64_t>& sources) override;
  const nn::ParameterPtr& parameter() const { return rows_; }

 private:
  std::vector<std::int64_t> ids_;
  Table table_;
  std::int64_t held_;  ///< rows of the table that this rank has
  Layout layout_;
  nn::ParameterPtr rows_, bias_;
  std::vector<autograd::SpreadRows> runs_;  ///< of this rank
  tensor::Tensor places_;                   ///< where each id is looked up; from the first pass on
};

}  // namespace sherd::parallel
