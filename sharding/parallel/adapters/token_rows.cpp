#include "sharding/parallel/adapters/token_rows.h"

#include <numeric>
#include <set>

#include "autograd/ops.h"
#include "sharding/parallel/collectives.h"

namespace sherd::parallel {

using autograd::SpreadRows;
using tensor::Tensor;

namespace {

/// Which of the ids lie in rows [first, first + held) of the table, as runs of neighbours.
std::vector<SpreadRows> runs_in(const std::vector<std::int64_t>& ids, std::int64_t first, std::int64_t held) {
  std::vector<SpreadRows> out;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const std::int64_t to = ids[i] - first, from = static_cast<std::int64_t>(i);
    if (to < 0 || to >= held) continue;
    if (SpreadRows* last = out.empty() ? nullptr : &out.back();
        last && last->to + last->count == to && last->from + last->count == from)
      ++last->count;
    else
      out.push_back({from, to, 1, 0});
  }
  return out;
}

}  // namespace

void put_columns(Tape& tape, const Tensor& x, const TrainedRows& of, const Tensor& bias,
                 const Tensor& scores) {
  const std::int64_t rows = x.shape().rows(), columns = scores.shape().back();
  const Tensor flat = x.reshape({rows, x.shape().back()});
  for (const SpreadRows& run : of.runs) {
    const Tensor own = tape.empty({rows, run.count}, scores.dtype());
    tape.kernels().matmul({.a = flat,
                           .b = of.rows.value().rows(run.from, run.from + run.count),
                           .c = own,
                           .trans_b = true,
                           .bias = bias ? bias.range(run.to, run.to + run.count) : Tensor()});
    tape.kernels().copy_rows({own, 0, run.count}, {scores, run.to, columns}, rows, run.count);
  }
}

std::vector<Tensor> take_columns(Tape& tape, const std::vector<SpreadRows>& runs, const Tensor& gradient) {
  const std::int64_t rows = gradient.shape().rows(), columns = gradient.shape().back();
  std::vector<Tensor> out;
  for (const SpreadRows& run : runs) {
    const tensor::StridedRows there{gradient, run.to, columns};
    const Tensor own = tape.empty({rows, run.count}, gradient.dtype()),
                 zeros = tape.empty({rows, run.count}, gradient.dtype());
    tape.kernels().fill(zeros, 0);
    tape.kernels().copy_rows(there, {own, 0, run.count}, rows, run.count);
    tape.kernels().copy_rows({zeros, 0, run.count}, there, rows, run.count);
    out.push_back(own);
  }
  return out;
}

TokenRows::TokenRows(std::vector<std::int64_t> ids, const Table& table, const Layout& layout,
                     const nn::ParameterPtr& tied)
    : ids_(std::move(ids)),
      table_(table),
      held_(table.rows / layout.tensor_size()),
      layout_(layout),
      runs_(runs_in(ids_, layout.tensor_rank() * held_, held_)) {
  require(!ids_.empty() && std::set(ids_.begin(), ids_.end()).size() == ids_.size(),
          "rows of tokens need ids, each once");
  for (const std::int64_t id : ids_)
    require(0 <= id && id < table.vocabulary, "a row of id ", id, " in a vocabulary of ", table.vocabulary);
  const tensor::Shape shape{std::ssize(ids_), table.width};
  require(!tied || tied->shape == shape, "rows of another shape are not these");
  rows_ = tied ? share("rows", tied) : declare("rows", shape, nn::Init::normal(0, 0.02));
  if (tied) return;
  rows_->is_table = true;
  rows_->partial_gradient = layout.tensor_size() > 1;
}

/// This rank's trained rows are looked up behind the table's last; those of others are in no part of the
/// table here, either.
Var TokenRows::look_up(Tape& tape, const Tensor& ids, const Var& table, std::int64_t first) {
  const std::int64_t behind = table_.rows, end = behind + std::ssize(ids_);
  if (!places_) {
    std::vector<std::int32_t> places(static_cast<std::size_t>(table_.vocabulary));
    std::iota(places.begin(), places.end(), 0);
    for (const SpreadRows& run : runs_)
      for (std::int64_t i = 0; i < run.count; ++i)
        places[static_cast<std::size_t>(first + run.to + i)] =
            static_cast<std::int32_t>(behind + run.from + i);
    places_ = Tensor::of<std::int32_t>(tape.device(), {table_.vocabulary, 1}, places);
  }
  const Tensor mapped = tape.empty(ids.shape(), DType::i32);
  tape.kernels().embedding(ids.reshape({ids.numel()}), places_, mapped.reshape({ids.numel(), 1}));
  const Var own = autograd::embedding(mapped, tape.parameter(rows_), {.first = behind, .ids = end});
  return autograd::add(autograd::embedding(mapped, table, {.first = first, .ids = end}), own);
}

void TokenRows::attach(const nn::ParameterPtr&, const nn::ParameterPtr& bias) {
  bias_ = bias;
}

Var TokenRows::output(Tape& tape, const Var& x, const Var& y, const std::vector<std::int64_t>&) {
  const Tape::NoGrad pause(tape);
  const Var all = layout_.cuts_stream() ? all_gather(x, row_dim, layout_.tensor, cat(path(), " rows")) : x;
  put_columns(tape, all.value(), rows(tape), bias_ ? tape.parameter(bias_).value() : Tensor(), y.value());
  return y;
}

}  // namespace sherd::parallel
