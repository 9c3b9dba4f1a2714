#include "sharding/parallel/embedding.h"

#include "autograd/ops.h"
#include "sharding/parallel/collectives.h"
#include "sharding/parallel/sequence.h"

namespace sherd::parallel {

VocabEmbedding::VocabEmbedding(std::int64_t rows, std::int64_t width, const Layout& layout, nn::Init init,
                               std::int64_t vocabulary)
    : layout_(layout) {
  const std::string what = cat("an embedding of ", rows, " rows of ", width);
  require(rows > 0 && width > 0 && 0 <= vocabulary && vocabulary <= rows, what, " for ", vocabulary, " ids");
  const tensor::Slice held = tensor_slice(what, {rows, width}, 0, layout);
  weight_ = declare("weight", held.shape(), init);
  weight_->is_table = true;
  if (0 < vocabulary && vocabulary < rows) weight_->packing.tensors = {{{0, vocabulary}}};
  set_slice(weight_, held);
  held_ = {.first = held.blocks()[0][0].begin, .ids = vocabulary ? vocabulary : rows};
}

void VocabEmbedding::set_adapter(std::shared_ptr<Prompts> prompts) {
  held_.ids = prompts->end();
  prompts_ = add("adapter", std::move(prompts));
}

void VocabEmbedding::set_adapter(std::shared_ptr<TokenRows> rows) {
  rows_ = add("adapter", std::move(rows));
}

Var VocabEmbedding::operator()(Tape& tape, const tensor::Tensor& ids) {
  return run(tape, {}, [this, ids](Tape& t, const std::vector<Var>&) {
    const Var table = t.parameter(weight_);
    const Var found =
        rows_ ? rows_->look_up(t, ids, table, held_.first) : autograd::embedding(ids, table, held_);
    const std::string label = path().empty() ? "vocabulary-parallel embedding" : path();
    Var x = layout_.cuts_stream() ? reduce_scatter(found, -2, layout_.tensor, label)
                                  : all_reduce(found, layout_.tensor, label);
    if (const double factor = scale_ ? scale_(x.dtype()) : 1; factor != 1) x = autograd::scale(x, factor);
    return prompts_ ? prompts_->add_to(t, x, stream_part(t.kernels(), ids, layout_)) : x;
  });
}

}  // namespace sherd::parallel
