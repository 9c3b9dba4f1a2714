#include "sharding/parallel/exchanges.h"

#include "base/error.h"

namespace sherd::parallel {

using tensor::Kernels;
using tensor::Shape;

namespace {

/// Up to so many pieces travel from and to where they lie; more are copied into blocks of one rank each.
constexpr std::int64_t most_pieces = 64;

/// A tensor as [outer, extent, inner] around one of its dimensions.
struct Dimension {
  int axis = 0;
  std::int64_t outer = 1, extent = 1, inner = 1;

  Dimension(const std::string& label, const Shape& shape, int dim)
      : axis(dim < 0 ? dim + shape.rank() : dim) {
    require(0 <= axis && axis < shape.rank(), label, ": a tensor of shape ", shape.str(),
            " has no dimension ", dim);
    for (int i = 0; i < axis; ++i) outer *= shape[i];
    extent = shape[axis];
    for (int i = axis + 1; i < shape.rank(); ++i) inner *= shape[i];
  }
  void require_divides(const std::string& label, const Shape& shape, int ranks) const {
    require(extent % ranks == 0, label, ": dimension ", axis, " of a tensor of shape ", shape.str(),
            " has no equal parts for ", ranks, " ranks: ", extent, " is no multiple of ", ranks);
  }
};

/// Copies between a tensor whose rows, of all `ranks` parts along a dimension, are `ranks`·`columns` long and
/// blocks, one after the other, of one part each.
void copy_blocks(Kernels& kernels, const Tensor& whole, const Tensor& blocks, std::int64_t rows, int ranks,
                 bool to_blocks) {
  if (whole.numel() == 0) return;
  const std::int64_t columns = whole.numel() / rows / ranks;
  for (int r = 0; r < ranks; ++r) {
    const tensor::StridedRows in_whole{whole, r * columns, ranks * columns};
    const tensor::StridedRows in_blocks{blocks, r * rows * columns, columns};
    if (to_blocks)
      kernels.copy_rows(in_whole, in_blocks, rows, columns);
    else
      kernels.copy_rows(in_blocks, in_whole, rows, columns);
  }
}

/// Piece i of `count` equal ones.
Tensor piece(const Tensor& x, std::int64_t i, std::int64_t count) {
  const std::int64_t elements = x.numel() / count;
  return x.range(i * elements, (i + 1) * elements);
}

}  // namespace

Exchange::~Exchange() {
  try {
    work_.wait();
  } catch (...) {  // what a backend threw comes as it was, and not all of it is an Error
  }
}

Tensor Exchange::wait() {
  work_.wait();
  if (unpack_) unpack_();
  unpack_ = nullptr;
  buffers_.clear();
  return std::move(result_);
}

Exchange begin_all_gather(Kernels& kernels, Communicator& group, const Tensor& x, int dim,
                          const comm::CallOptions& options) {
  const int ranks = group.size();
  const Dimension at(options.label, x.shape(), dim);
  Tensor full = Tensor::empty(kernels.device(), x.shape().with(at.axis, ranks * at.extent), x.dtype());
  std::vector<comm::GatherPiece> pieces;
  if (at.outer <= most_pieces) {
    for (std::int64_t i = 0; i < at.outer; ++i)
      pieces.push_back({piece(x, i, at.outer), piece(full, i, at.outer)});
    return {group.all_gather(std::move(pieces), options), {x}, std::move(full)};
  }
  Tensor blocks = Tensor::empty(kernels.device(), full.shape(), x.dtype());
  pieces.push_back({x, blocks});
  return {group.all_gather(std::move(pieces), options),
          {x, blocks},
          full,
          [&kernels, full, blocks, outer = at.outer, ranks] {
            copy_blocks(kernels, full, blocks, outer, ranks, false);
          }};
}

Exchange begin_reduce_scatter(Kernels& kernels, Communicator& group, const Tensor& x, int dim,
                              const comm::CallOptions& options) {
  const int ranks = group.size();
  const Dimension at(options.label, x.shape(), dim);
  at.require_divides(options.label, x.shape(), ranks);
  Tensor shard = Tensor::empty(kernels.device(), x.shape().with(at.axis, at.extent / ranks), x.dtype());
  std::vector<comm::ReducePiece> pieces;
  if (at.outer <= most_pieces) {
    const std::int64_t elements = at.outer == 0 ? 0 : shard.numel() / at.outer;
    for (std::int64_t i = 0; i < at.outer; ++i)
      pieces.push_back({piece(x, i, at.outer), piece(shard, i, at.outer), 0, elements});
    return {group.reduce_scatter(std::move(pieces), x.dtype(), options), {x}, shard};
  }
  Tensor blocks = Tensor::empty(kernels.device(), x.shape(), x.dtype());
  copy_blocks(kernels, x, blocks, at.outer, ranks, true);
  pieces.push_back({blocks, shard, 0, shard.numel()});
  return {group.reduce_scatter(std::move(pieces), x.dtype(), options), {blocks}, shard};
}

Exchange begin_all_reduce(Communicator& group, const Tensor& x, const comm::CallOptions& options) {
  return {group.all_reduce(x, comm::ReduceOp::sum, 1, options), {x}, x};
}

Tensor all_to_all(Kernels& kernels, Communicator& group, const Tensor& x, int split_dim, int gather_dim,
                  const comm::CallOptions& options) {
  const int ranks = group.size();
  const Dimension split(options.label, x.shape(), split_dim), joined(options.label, x.shape(), gather_dim);
  split.require_divides(options.label, x.shape(), ranks);
  const Shape block = x.shape().with(split.axis, split.extent / ranks);
  const Shape result = block.with(joined.axis, ranks * block[joined.axis]);
  const auto empty = [&](const Shape& shape) { return Tensor::empty(kernels.device(), shape, x.dtype()); };
  Tensor in = x;
  if (split.outer > 1) copy_blocks(kernels, x, in = empty(x.shape()), split.outer, ranks, true);
  // In blocks, `split_dim` is shorter: where it lies before `gather_dim` there are fewer rows to join.
  const std::int64_t rows = Dimension(options.label, block, gather_dim).outer;
  Tensor received = empty(result);
  group.all_to_all(in, received, {}, {}, options).wait();
  if (rows == 1) return received;
  in = {};
  Tensor out = empty(result);
  copy_blocks(kernels, out, received, rows, ranks, false);
  return out;
}

Tensor own_part(Kernels& kernels, const Communicator& group, const Tensor& x, int dim,
                const std::string& label) {
  const int ranks = group.size();
  const Dimension at(label, x.shape(), dim);
  at.require_divides(label, x.shape(), ranks);
  Tensor out = Tensor::empty(kernels.device(), x.shape().with(at.axis, at.extent / ranks), x.dtype());
  if (x.numel() == 0) return out;
  const std::int64_t columns = out.numel() / at.outer;
  kernels.copy_rows({x, group.rank() * columns, ranks * columns}, {out, 0, columns}, at.outer, columns);
  return out;
}

}  // namespace sherd::parallel
