#pragma once

#include <algorithm>
#include <vector>

#include "autograd/gradients.h"
#include "autograd/tape.h"
#include "sharding/parallel/exchanges.h"
#include "sharding/parallel/loss.h"
#include "tensor/argument_checks.h"

// The parts that losses of the vocabulary's scores share (loss.cpp, text_loss.cpp): logits, and their
// backward.
namespace sherd::parallel {

using autograd::GradRef;
using autograd::Saved;
using autograd::Tape;
using autograd::Var;
using tensor::Shape;

/// A factor by which gradients of chunks are multiplied, whose divisor is known only when all ranks have
/// counted their labels: fp16 keeps small probabilities so, and a power of two rounds nothing.
constexpr double chunk_factor = 256;

/// A call's arguments but for the tensors that are computed.
struct HeadCall {
  Layout layout;
  Tensor labels;  ///< [rows]
  tensor::VocabSlice slice;
  Shape x_shape, inner_shape, w_shape;
  double cap;
  DType dtype;
  bool on_gpu;

  std::int64_t rows() const { return labels.numel(); }
  DType compute() const { return tensor::compute_type(dtype); }
  /// Tokens whose logits take as much memory as the weight's gradient in the compute type.
  std::int64_t most_rows() const {
    return static_cast<std::int64_t>(size_of(compute()) / size_of(dtype)) * w_shape[1];
  }
  /// Logits take no more memory than chunks would, which hold that gradient and the logits of one.
  bool keeps_logits() const { return rows() <= 2 * most_rows(); }
  /// Tokens of a chunk: equal parts of what is there, but for the last. Each chunk reads and writes the
  /// gradient of the weight, so a GPU takes half a gigabyte of logits at once where that is more; whatever
  /// part of the vocabulary a rank has, chunks are the same.
  std::int64_t chunk_rows() const {
    constexpr std::int64_t step = 64;  // what products like
    constexpr std::int64_t gpu_logits = std::int64_t{512} << 20;
    const std::int64_t whole_row = slice.ids * static_cast<std::int64_t>(size_of(dtype));
    const std::int64_t limit = std::max(most_rows(), on_gpu ? gpu_logits / whole_row : 0);
    const std::int64_t most = std::max(step, limit / step * step);
    const std::int64_t chunks = std::max<std::int64_t>(1, (rows() + most - 1) / most);
    return std::max(step, (rows() + chunks * step - 1) / (chunks * step) * step);
  }
};

/// The arguments, checked as vocab_cross_entropy() says.
HeadCall checked_head(const Var& x, const VocabHead& of, const Tensor& labels, const Layout& layout);

/// Begins to gather all tokens of this context rank from its part of the stream.
Exchange begin_inner(tensor::Kernels& kernels, const HeadCall& head, const Tensor& x, bool async);
/// The same at once, as [rows, hidden].
Tensor inner_rows(tensor::Kernels& kernels, const HeadCall& head, const Tensor& x);
/// Begins to sum dx, the gradients of all tokens, over tensor ranks; the result is the gradient of this
/// rank's part of the stream. It runs beside what comes next.
Exchange begin_stream_gradient(tensor::Kernels& kernels, const HeadCall& head, const Tensor& dx);

/// The logits of rows x [n, hidden], of this rank's part of the vocabulary.
Tensor make_logits(Tape& tape, const HeadCall& head, const Tensor& x, const VocabHead& of);

/// Rows [begin, end) whose losses are multiplied by `factor` in the whole.
struct RowFactor {
  std::int64_t begin = 0, end = 0;
  double factor = 1;
};
/// The factors of the losses of rows: dy·factor / divisor[0] in each of the runs, which follow each other and
/// have all rows. divisor: fp64 [1].
struct RowFactors {
  std::vector<RowFactor> runs;
  Tensor divisor;
};
/// dy·factor / divisor, fp64 [1].
Tensor gradient_factor(Tape& tape, const Tensor& dy, const Tensor& divisor, double factor);
/// Turns the logits of rows from `first` on, of those that `factors` has, into their gradient,
/// factor·(softmax
/// - onehot), before any cap. labels, lse: of the same rows.
void differentiate(Tape& tape, const HeadCall& head, const Tensor& logits, const Tensor& labels,
                   const Tensor& lse, const RowFactors& factors, const Tensor& dy, std::int64_t first = 0);

/// The state that backward needs for rows that are trained apart (VocabHead::trained).
struct TrainedBackward {
  GradRef rows;
  Saved values;  ///< where x's gradient is wanted
  Shape shape;
  std::vector<autograd::SpreadRows> runs;

  /// Adds to dx the part of x's gradient that comes from the rows, by their columns' gradients.
  void add_to(tensor::Kernels& kernels, const Tensor& all, const std::vector<Tensor>& columns,
              const Tensor& dx) const;
  /// Writes the rows' own gradient, by all tokens x.
  void write(tensor::Kernels& kernels, const std::vector<Tensor>& columns, const Tensor& x, const Tensor& to,
             bool add) const;
};

/// The gradients that a loss is asked for.
struct HeadGradients {
  bool recorded = false;
  GradRef x, weight, bias;
  TrainedBackward trained;
  HeadGradients(const Var& of_x, const VocabHead& of);
};

/// Backward of a loss whose logits were kept.
struct WholeBackward {
  HeadCall head;
  Saved x, weight;
  GradRef dx, dw, db;
  Tensor logits, lse;
  RowFactors factors;
  TrainedBackward trained;

  WholeBackward(HeadCall of, const Var& of_x, const VocabHead& values, HeadGradients gradients, Tensor kept,
                Tensor log_sums, RowFactors of_rows);
  void operator()(Tape& tape, const Tensor& dy);

 private:
  Tensor product(Tape& tape, const std::vector<Tensor>& columns) const;
};

}  // namespace sherd::parallel
