#include "engine/update/rules/whole_matrices.h"

#include <algorithm>
#include <numeric>

#include "comm/gather.h"
#include "device/trace_range.h"
#include "engine/update/rules/packed_tensors.h"

namespace sherd::engine {

using autograd::Parameter;
using device::Category;
using device::Device;
using sharding::Segment;
using tensor::Tensor;

namespace {

/// Logical rows of each matrix of a parameter.
std::vector<std::vector<tensor::Range>> rows_of(const Parameter& parameter) {
  if (!parameter.packing.tensors.empty()) return parameter.packing.tensors;
  return {{{0, parameter.logical_slice().logical()[0]}}};
}

std::int64_t count_of(std::span<const tensor::Range> rows) {
  return std::accumulate(rows.begin(), rows.end(), std::int64_t{0},
                         [](std::int64_t sum, const tensor::Range& range) { return sum + range.size(); });
}

}  // namespace

std::vector<Matrix> matrices_of(const Segment& segment) {
  std::vector<Matrix> out;
  const sharding::SegmentLayout& layout = segment.layout();
  for (std::size_t slot = 0; slot < layout.parameters().size(); ++slot) {
    const Parameter& parameter = *layout.parameters()[slot];
    const std::int64_t columns = parameter.logical_slice().logical()[1];
    for (const std::vector<tensor::Range>& rows : rows_of(parameter)) {
      Matrix& matrix = out.emplace_back(Matrix{&segment, slot, count_of(rows), columns, {}});
      for (const tensor::Range& range : rows)
        matrix.ranges.push_back({range.begin * columns, range.end * columns});
    }
  }
  return out;
}

void for_each_shape(
    const Parameter& parameter, std::int64_t begin, std::int64_t end,
    const std::function<void(std::int64_t, std::int64_t, std::int64_t, std::int64_t)>& visit) {
  std::vector<std::int64_t> rows;
  for (const std::vector<tensor::Range>& matrix : rows_of(parameter)) rows.push_back(count_of(matrix));
  const std::vector<PackedRun> runs = packed_runs(parameter);
  const auto rows_at = [&](std::size_t i) { return rows[static_cast<std::size_t>(runs[i].tensor)]; };
  for (std::size_t i = 0; i < runs.size();) {
    std::size_t next = i + 1;
    while (next < runs.size() && rows_at(next) == rows_at(i)) ++next;
    const std::int64_t from = std::max(begin, runs[i].begin), to = std::min(end, runs[next - 1].end);
    if (from < to) visit(from, to - from, rows_at(i), parameter.logical_slice().logical()[1]);
    i = next;
  }
}

std::vector<int> deal_out(std::span<const double> work, int ranks) {
  std::vector<std::size_t> order(work.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return work[a] > work[b]; });
  std::vector<double> load(static_cast<std::size_t>(ranks));
  std::vector<int> out(work.size());
  for (const std::size_t i : order) {
    const auto least = std::min_element(load.begin(), load.end());
    *least += work[i];
    out[i] = static_cast<int>(least - load.begin());
  }
  return out;
}

namespace {

/// The way of a batch's matrices to their ranks, and back.
class MatrixExchange {
 public:
  using Directions = std::map<const Segment*, Tensor>;
  using Slices = std::vector<std::vector<tensor::Slice>>;

  /// `slices`: of each segment, by rank and slot.
  MatrixExchange(const std::vector<const Segment*>& segments, Directions& directions,
                 std::map<const Segment*, const Slices*> slices, tensor::Kernels& kernels)
      : directions_(directions),
        slices_(std::move(slices)),
        kernels_(kernels),
        device_(kernels.device()),
        group_(segments.front()->groups().holders_of_all()),
        cuts_(group_.size() / segments.front()->groups().shards()),
        replicated_(segments.front()->optimizer_replicated()),
        dtype_(directions.at(segments.front()).dtype()),
        label_(cat(segments.front()->name(), " to ", segments.back()->name(), " matrices")) {
    std::vector<double> work;
    for (const Segment* segment : segments)
      for (Matrix& matrix : matrices_of(*segment)) {
        work.push_back(matrix.work());
        matrices_.push_back(std::move(matrix));
      }
    owners_ = deal_out(work, group_.size());
  }

  /// Calls work(matrix, x) with each whole matrix, on the rank that has it, between the two ways.
  template <class Work>
  void run(const Work& work) {
    const int me = group_.rank();
    const auto give = [&](std::size_t i) { return given(i, me, owners_[i]); };
    const Counts gives = counts_by_owner(give);
    const Counts takes = counts_by_rank([&](std::size_t i, int rank) { return given(i, rank, me); });
    const Tensor own = room(sum(gives)), theirs = group_.size() > 1 ? room(sum(takes)) : own;
    for_each_given(give, [&](std::size_t i, std::int64_t at) {
      if (give(i) > 0) pack(matrices_[i], own, at, false);
    });
    if (group_.size() > 1) group_.all_to_all(own, theirs, gives, takes, {.label = label_}).wait();

    // As much goes back, but where all shards have the same: each gets its own then.
    const auto hold = [&](std::size_t i) { return held(i, me); };
    const Counts returns = counts_by_rank([&](std::size_t i, int rank) { return held(i, rank); });
    const Counts comes = counts_by_owner(hold);
    const bool apart = replicated_ && group_.size() > cuts_;
    const Tensor out = apart ? room(sum(returns)) : theirs, back = apart ? room(sum(comes)) : own;
    work_on(theirs, takes, out, returns, work);
    if (group_.size() > 1) group_.all_to_all(out, back, returns, comes, {.label = label_}).wait();
    for_each_given(hold, [&](std::size_t i, std::int64_t at) { pack(matrices_[i], back, at, true); });
  }

 private:
  using Counts = std::vector<std::int64_t>;  ///< elements by rank

  bool mine(std::size_t matrix) const { return owners_[matrix] == group_.rank(); }

  /// Elements that a rank updates of a matrix, and so holds its directions of.
  std::int64_t held(std::size_t matrix, int rank) const {
    std::int64_t count = 0;
    for_each_part(matrices_[matrix], rank, [&](const RowBlock& part) { count += part.numel(); });
    return count;
  }
  /// How many of them its owner needs: of what all shards hold, its own shard's.
  std::int64_t given(std::size_t matrix, int rank, int owner) const {
    return replicated_ && rank / cuts_ != owner / cuts_ ? 0 : held(matrix, rank);
  }

  static std::int64_t sum(const Counts& counts) {
    return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  }
  /// count(matrix) of all matrices, by their owners.
  template <class Count>
  Counts counts_by_owner(const Count& count) const {
    Counts out(static_cast<std::size_t>(group_.size()));
    for (std::size_t i = 0; i < matrices_.size(); ++i) out[static_cast<std::size_t>(owners_[i])] += count(i);
    return out;
  }
  /// count(matrix, rank) of this rank's matrices, by rank.
  template <class Count>
  Counts counts_by_rank(const Count& count) const {
    Counts out(static_cast<std::size_t>(group_.size()));
    for (std::size_t i = 0; i < matrices_.size(); ++i)
      for (int rank = 0; mine(i) && rank < group_.size(); ++rank)
        out[static_cast<std::size_t>(rank)] += count(i, rank);
    return out;
  }

  Tensor room(std::int64_t elements) const {
    return Tensor::empty(device_, {std::max<std::int64_t>(1, elements)}, dtype_, Category::workspace)
        .range(0, elements);
  }
  void copy(const Tensor& from, std::int64_t from_begin, const Tensor& to, std::int64_t to_begin,
            std::int64_t count) const {
    if (device_.kind() == device::Kind::meta || count == 0) return;
    const auto bytes = [&](std::int64_t elements) {
      return static_cast<std::size_t>(elements) * size_of(dtype_);
    };
    device_.copy(to.raw() + bytes(to_begin), from.raw() + bytes(from_begin), bytes(count));
  }

  /// Rows of a matrix, or of as much of them as a rank holds: without gaps in the segment, from flat element
  /// `flat` on; in the matrix from `place` on, `step` apart.
  struct RowBlock {
    std::int64_t flat, place, rows, columns, step;
    std::int64_t numel() const { return rows * columns; }
    /// Whether this part goes on there.
    bool joins(std::int64_t next_flat, std::int64_t next_place, std::int64_t count) const {
      return next_flat == flat + numel() && count == columns &&
             (rows == 1 || next_place == place + rows * step);
    }
  };
  /// Calls visit(part) for what a rank updates of a matrix, in the segment's order within each of its ranges.
  template <class Visit>
  void for_each_part(const Matrix& matrix, int rank, const Visit& visit) const {
    const sharding::SegmentLayout& layout = matrix.segment->layout();
    const tensor::Slice& slice = (*slices_.at(matrix.segment))[static_cast<std::size_t>(rank)][matrix.slot];
    const std::int64_t offset = layout.offset(matrix.slot), shard = layout.shard();
    const std::int64_t first = replicated_ ? 0 : rank / cuts_ * shard - offset,
                       last = replicated_ ? layout.padded() : first + shard;
    RowBlock part{};
    std::int64_t at = 0;
    for (const tensor::Range& range : matrix.ranges) {
      slice.for_each_run(std::max(first, slice.lower_bound(range.begin)),
                         std::min(last, slice.lower_bound(range.end)),
                         [&](std::int64_t local, std::int64_t logical, std::int64_t count) {
                           const std::int64_t flat = offset + local, place = at + logical - range.begin;
                           if (part.rows > 0 && part.joins(flat, place, count)) {
                             part.step = place - (part.place + (part.rows - 1) * part.step);
                             ++part.rows;
                             return;
                           }
                           if (part.rows > 0) visit(part);
                           part = {flat, place, 1, count, 0};
                         });
      at += range.size();
    }
    if (part.rows > 0) visit(part);
  }

  const Tensor& directions_of(const Matrix& matrix) const { return directions_.at(matrix.segment); }
  /// Moves what this rank updates of a matrix to where `packed` has room for it, or back.
  void pack(const Matrix& matrix, const Tensor& packed, std::int64_t at, bool back) const {
    for_each_part(matrix, group_.rank(), [&](const RowBlock& part) {
      const std::int64_t begin = part.flat - matrix.segment->update_begin();
      if (back)
        copy(packed, at, directions_of(matrix), begin, part.numel());
      else
        copy(directions_of(matrix), begin, packed, at, part.numel());
      at += part.numel();
    });
  }

  /// Calls visit(matrix, place) in the order of the owners, with the place of each among what all give of
  /// `count` elements each.
  template <class Count, class Visit>
  void for_each_given(const Count& count, const Visit& visit) const {
    std::int64_t at = 0;
    for (int owner = 0; owner < group_.size(); ++owner)
      for (std::size_t i = 0; i < matrices_.size(); ++i)
        if (owners_[i] == owner) visit(i, at), at += count(i);
  }

  /// Moves a rank's parts, which lie one after the other from `at` on, into the whole matrix `x`, or back.
  void move_parts(const Matrix& matrix, int rank, const Tensor& parts, std::int64_t at, const Tensor& x,
                  bool back) {
    for_each_part(matrix, rank, [&](const RowBlock& part) {
      const tensor::StridedRows packed{parts, at, part.columns}, whole{x, part.place, part.step};
      if (part.rows > 1)
        kernels_.copy_rows(back ? whole : packed, back ? packed : whole, part.rows, part.columns);
      else if (back)
        copy(x, part.place, parts, at, part.columns);
      else
        copy(parts, at, x, part.place, part.columns);
      at += part.numel();
    });
  }

  /// `theirs` has each rank's parts of this one's matrices, `takes` of them by rank; `out` gets what goes
  /// back, `returns` by rank.
  template <class Work>
  void work_on(const Tensor& theirs, const Counts& takes, const Tensor& out, const Counts& returns,
               const Work& work) {
    Counts from(takes.size()), to(returns.size());
    std::exclusive_scan(takes.begin(), takes.end(), from.begin(), std::int64_t{0});
    std::exclusive_scan(returns.begin(), returns.end(), to.begin(), std::int64_t{0});
    for (std::size_t i = 0; i < matrices_.size(); ++i) {
      if (!mine(i)) continue;
      const Matrix& matrix = matrices_[i];
      const Tensor x = room(matrix.numel()).reshape({matrix.rows, matrix.columns});
      for (int rank = 0; rank < group_.size(); ++rank) {
        const std::int64_t count = given(i, rank, group_.rank());
        std::int64_t& at = from[static_cast<std::size_t>(rank)];
        if (count > 0) move_parts(matrix, rank, theirs, at, x, false);
        at += count;
      }
      work(matrix, x);
      for (int rank = 0; rank < group_.size(); ++rank) {
        std::int64_t& at = to[static_cast<std::size_t>(rank)];
        move_parts(matrix, rank, out, at, x, true);
        at += held(i, rank);
      }
    }
  }

  Directions& directions_;
  std::map<const Segment*, const Slices*> slices_;
  tensor::Kernels& kernels_;
  Device& device_;
  comm::Communicator& group_;
  int cuts_;  ///< tensor ranks that hold a part of each shard
  bool replicated_;
  DType dtype_;
  std::string label_;
  std::vector<Matrix> matrices_;
  std::vector<int> owners_;
};

/// Blocks of each slice, as numbers.
std::vector<std::int64_t> numbers_of(const std::vector<tensor::Slice>& slices) {
  std::vector<std::int64_t> out;
  for (const tensor::Slice& slice : slices)
    for (const std::vector<tensor::Range>& blocks : slice.blocks()) {
      out.push_back(std::ssize(blocks));
      for (const tensor::Range& block : blocks) out.insert(out.end(), {block.begin, block.end});
    }
  return out;
}

/// Makes slices of the same tensors of what numbers_of() gave.
std::vector<tensor::Slice> slices_from(std::span<const std::int64_t> numbers,
                                       const std::vector<tensor::Slice>& like) {
  std::vector<tensor::Slice> out;
  auto next = numbers.begin();
  for (const tensor::Slice& own : like) {
    tensor::Slice::Blocks blocks(own.blocks().size());
    for (std::vector<tensor::Range>& ranges : blocks) {
      ranges.resize(static_cast<std::size_t>(*next++));
      for (tensor::Range& range : ranges) range.begin = *next++, range.end = *next++;
    }
    out.emplace_back(own.logical(), std::move(blocks));
  }
  return out;
}

}  // namespace

const WholeMatrices::Slices& WholeMatrices::slices_of(const Segment& segment, Device& device) {
  Slices& out = slices_[&segment];
  if (!out.empty()) return out;
  std::vector<tensor::Slice> own;
  for (const auto& parameter : segment.layout().parameters()) own.push_back(parameter->logical_slice());
  comm::Communicator& group = segment.groups().holders_of_all();
  if (!segment.groups().whole) {
    out.assign(static_cast<std::size_t>(group.size()), own);
    return out;
  }
  for (const auto& numbers :
       comm::gather_lists(group, device, numbers_of(own), cat(segment.name(), " slices of matrices")))
    out.push_back(slices_from(numbers, own));
  return out;
}

const Tensor& WholeMatrices::of(const Segment& segment, Device& device, device::Tier tier) {
  Tensor& directions = directions_[&segment];
  if (!directions) {
    tier_ = tier;
    directions =
        Tensor::empty(device, {segment.update_end() - segment.update_begin()},
                      optim::direction_dtype(segment.parameters().dtype()), Category::workspace, tier);
    order_.push_back(&segment);
  }
  return directions;
}

void WholeMatrices::orthogonalize(const std::function<const optim::Hyper&(const Parameter&)>& hyper_of,
                                  tensor::Kernels& kernels) {
  const device::TraceRange range("matrices", order_.front()->name());
  Device& device = kernels.device();
  const bool beside_gpu = device.has_own_memory() && tier_ != device::Tier::device;
  std::map<const Segment*, Tensor> there;
  for (const Segment* segment : order_) {
    Tensor& directions = there[segment] = directions_.at(segment);
    if (!beside_gpu) continue;
    const Tensor here = directions;
    directions = Tensor::empty(device, here.shape(), here.dtype(), Category::workspace);
    device.copy(directions.raw(), here.raw(), here.bytes());
  }
  std::map<const Segment*, const Slices*> slices;
  for (const Segment* segment : order_) slices[segment] = &slices_of(*segment, device);
  MatrixExchange(order_, there, std::move(slices), kernels).run([&](const Matrix& matrix, const Tensor& x) {
    optim::orthogonalize(x, hyper_of(matrix.parameter()), kernels);
  });
  for (const Segment* segment : order_)
    if (beside_gpu)
      device.copy(directions_.at(segment).raw(), there.at(segment).raw(), there.at(segment).bytes());
  device.synchronize();  // the processor may read them
  order_.clear();
}

}  // namespace sherd::engine
