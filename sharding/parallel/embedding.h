#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "nn/module.h"
#include "sharding/parallel/adapters/prompts.h"
#include "sharding/parallel/adapters/token_rows.h"
#include "sharding/parallel/layout.h"

namespace sherd::parallel {

using autograd::Tape;
using autograd::Var;

/// A table of vectors by id, whose rows the tensor-parallel ranks of a layout share in equal parts
/// (Shoeybi et al. 2019): each looks up the ids that it holds, and the results are summed, into the stream.
/// On one rank it is nn::Embedding, to the bit. Parameter: "weight", logical [rows, width], cut by rows, with
/// nn::Embedding's initial values.
class VocabEmbedding : public nn::Module {
 public:
  /// Ids from `vocabulary` on are padding, and errors in data; 0: there is none. Throws Error{config} for
  /// rows that the ranks do not divide.
  VocabEmbedding(std::int64_t rows, std::int64_t width, const Layout& layout,
                 nn::Init init = nn::Init::normal(0, 1), std::int64_t vocabulary = 0);
  /// ids: int32 [batch.., rows] of the inner part, the same on all tensor ranks; the result: the stream,
  /// [batch.., rows, width], of which this rank has a part under sequence parallelism. Throws Error{data} for
  /// an id outside the vocabulary.
  Var operator()(Tape& tape, const tensor::Tensor& ids);
  /// Has `prompts` stand behind the table, as its part "adapter": their ids are then in the vocabulary, too.
  void set_adapter(std::shared_ptr<Prompts> prompts);
  /// Has `rows` stand in the place of some of the table's, likewise.
  void set_adapter(std::shared_ptr<TokenRows> rows);
  /// Has the table's vectors multiplied, by a factor for their dtype; prompts are not.
  void set_scale(std::function<double(DType)> scale) { scale_ = std::move(scale); }
  const nn::ParameterPtr& weight() const { return weight_; }

 private:
  Layout layout_;
  nn::ParameterPtr weight_;
  tensor::VocabSlice held_;
  std::shared_ptr<Prompts> prompts_;
  std::shared_ptr<TokenRows> rows_;
  std::function<double(DType)> scale_;  ///< null: none
};

}  // namespace sherd::parallel
