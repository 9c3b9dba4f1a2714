#include "engine/whole_matrices.h"

#include <algorithm>
#include <numeric>

#include "device/meta.h"
#include "device/trace_range.h"

namespace sherd::engine {

using autograd::Parameter;
using device::Category;
using device::Device;
using sharding::Segment;
using tensor::Tensor;

namespace {

/// Rows of each matrix of a parameter.
std::vector<std::vector<tensor::Range>> rows_of(const Parameter& parameter) {
  if (!parameter.matrices.empty()) return parameter.matrices;
  return {{{0, parameter.shape[0]}}};
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
    const std::int64_t columns = parameter.shape.back(), offset = layout.offset(slot);
    for (const std::vector<tensor::Range>& rows : rows_of(parameter)) {
      Matrix& matrix = out.emplace_back(Matrix{&segment, &parameter, count_of(rows), columns, {}});
      for (const tensor::Range& range : rows)
        matrix.runs.push_back({offset + range.begin * columns, offset + range.end * columns});
    }
  }
  return out;
}

void for_each_shape(
    const Parameter& parameter, std::int64_t begin, std::int64_t end,
    const std::function<void(std::int64_t, std::int64_t, std::int64_t, std::int64_t)>& visit) {
  const std::int64_t columns = parameter.shape.back();
  std::vector<std::pair<tensor::Range, std::int64_t>> runs;  // of rows, each with those of its matrix
  for (const std::vector<tensor::Range>& rows : rows_of(parameter))
    for (const tensor::Range& range : rows) runs.emplace_back(range, count_of(rows));
  std::sort(runs.begin(), runs.end(), [](auto& a, auto& b) { return a.first.begin < b.first.begin; });
  for (std::size_t i = 0; i < runs.size();) {
    std::size_t next = i + 1;
    while (next < runs.size() && runs[next].second == runs[i].second) ++next;
    const std::int64_t from = std::max(begin, runs[i].first.begin * columns),
                       to = std::min(end, runs[next - 1].first.end * columns);
    if (from < to) visit(from, to - from, runs[i].second, columns);
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
  using Kept = std::map<const Segment*, Tensor>;

  MatrixExchange(const std::vector<const Segment*>& segments, Kept& kept, tensor::Kernels& kernels)
      : kept_(kept),
        device_(kernels.device()),
        group_(*segments.front()->groups().shard),
        replicated_(segments.front()->optimizer_replicated()),
        dtype_(kept.at(segments.front()).dtype()),
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
    if (group_.size() == 1 || replicated_)
      work_in_place(work);
    else
      work_elsewhere(work);
    if (group_.size() > 1 && replicated_) spread();
  }

 private:
  bool mine(std::size_t matrix) const { return owners_[matrix] == group_.rank(); }
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

  /// Elements that a rank updates.
  Segment::Range range_of(const Segment& segment, int rank) const {
    if (replicated_) return {0, segment.layout().padded()};
    const std::int64_t shard = segment.layout().shard();
    return {rank * shard, (rank + 1) * shard};
  }
  /// Calls visit(flat element, place in the matrix, count) for what a rank updates of a matrix, in order.
  template <class Visit>
  void for_each_part(const Matrix& matrix, int rank, const Visit& visit) const {
    const Segment::Range range = range_of(*matrix.segment, rank);
    std::int64_t at = 0;
    for (const Segment::Range& run : matrix.runs) {
      const std::int64_t from = std::max(run.begin, range.begin), to = std::min(run.end, range.end);
      if (from < to) visit(from, at + from - run.begin, to - from);
      at += run.end - run.begin;
    }
  }
  std::int64_t count_part(const Matrix& matrix, int rank) const {
    std::int64_t count = 0;
    for_each_part(matrix, rank, [&](std::int64_t, std::int64_t, std::int64_t n) { count += n; });
    return count;
  }
  const Tensor& kept(const Matrix& matrix) const { return kept_.at(matrix.segment); }
  /// The place of a flat element in kept().
  std::int64_t place(const Matrix& matrix, std::int64_t flat) const {
    return flat - matrix.segment->update_begin();
  }

  template <class Work>
  void work_in_place(const Work& work) {
    for (std::size_t i = 0; i < matrices_.size(); ++i) {
      const Matrix& matrix = matrices_[i];
      if (!mine(i)) continue;
      const Tensor x = room(matrix.numel()).reshape({matrix.rows, matrix.columns});
      pack(matrix, x, 0);
      work(matrix, x);
      unpack(matrix, x, 0);
    }
  }

  /// What this rank updates of a matrix, to where `to` has room for it, and back. Return how much it is.
  std::int64_t pack(const Matrix& matrix, const Tensor& to, std::int64_t at) const {
    const std::int64_t begin = at;
    for_each_part(matrix, group_.rank(), [&](std::int64_t flat, std::int64_t, std::int64_t count) {
      copy(kept(matrix), place(matrix, flat), to, at, count);
      at += count;
    });
    return at - begin;
  }
  std::int64_t unpack(const Matrix& matrix, const Tensor& from, std::int64_t at) const {
    const std::int64_t begin = at;
    for_each_part(matrix, group_.rank(), [&](std::int64_t flat, std::int64_t, std::int64_t count) {
      copy(from, at, kept(matrix), place(matrix, flat), count);
      at += count;
    });
    return at - begin;
  }

  /// Each rank's matrices to all others.
  void spread() {
    for (int owner = 0; owner < group_.size(); ++owner) {
      std::int64_t all = 0, at = 0;
      for (std::size_t i = 0; i < matrices_.size(); ++i)
        if (owners_[i] == owner) all += matrices_[i].numel();
      if (all == 0) continue;
      const Tensor travelling = room(all);
      const bool own = owner == group_.rank();
      for (std::size_t i = 0; own && i < matrices_.size(); ++i)
        if (mine(i)) at += pack(matrices_[i], travelling, at);
      group_.broadcast(travelling, owner, {.label = label_}).wait();
      for (std::size_t i = 0; !own && i < matrices_.size(); ++i)
        if (owners_[i] == owner) at += unpack(matrices_[i], travelling, at);
    }
  }

  template <class Work>
  void work_elsewhere(const Work& work) {
    const auto ranks = static_cast<std::size_t>(group_.size());
    std::vector<std::int64_t> gives(ranks), takes(ranks);
    for (std::size_t i = 0; i < matrices_.size(); ++i) {
      gives[static_cast<std::size_t>(owners_[i])] += count_part(matrices_[i], group_.rank());
      for (std::size_t r = 0; mine(i) && r < ranks; ++r)
        takes[r] += count_part(matrices_[i], static_cast<int>(r));
    }
    const auto sum = [](const auto& all) { return std::accumulate(all.begin(), all.end(), std::int64_t{0}); };
    const Tensor own = room(sum(gives)), theirs = room(sum(takes));
    for_each_given([&](const Matrix& matrix, std::int64_t at) { return pack(matrix, own, at); });
    group_.all_to_all(own, theirs, gives, takes, {.label = label_}).wait();
    work_on(theirs, takes, work);
    group_.all_to_all(theirs, own, takes, gives, {.label = label_}).wait();
    for_each_given([&](const Matrix& matrix, std::int64_t at) { return unpack(matrix, own, at); });
  }

  /// Calls visit(matrix, place in what this rank gives) in the order of the ranks that take; it returns how
  /// much it is.
  template <class Visit>
  void for_each_given(const Visit& visit) const {
    std::int64_t at = 0;
    for (int owner = 0; owner < group_.size(); ++owner)
      for (std::size_t i = 0; i < matrices_.size(); ++i)
        if (owners_[i] == owner) at += visit(matrices_[i], at);
  }

  /// What came from all ranks, one after the other: each rank's parts of this one's matrices, in order.
  template <class Work>
  void work_on(const Tensor& parts, std::span<const std::int64_t> counts, const Work& work) {
    std::vector<std::int64_t> next(counts.size());
    std::exclusive_scan(counts.begin(), counts.end(), next.begin(), std::int64_t{0});
    for (std::size_t i = 0; i < matrices_.size(); ++i) {
      if (!mine(i)) continue;
      const Matrix& matrix = matrices_[i];
      const Tensor x = room(matrix.numel()).reshape({matrix.rows, matrix.columns});
      const auto each = [&](const auto& move) {
        for (int rank = 0; rank < group_.size(); ++rank) {
          std::int64_t at = next[static_cast<std::size_t>(rank)];
          for_each_part(matrix, rank, [&](std::int64_t, std::int64_t in_matrix, std::int64_t count) {
            move(at, in_matrix, count);
            at += count;
          });
        }
      };
      each([&](std::int64_t at, std::int64_t to, std::int64_t count) { copy(parts, at, x, to, count); });
      work(matrix, x);
      each([&](std::int64_t at, std::int64_t from, std::int64_t count) { copy(x, from, parts, at, count); });
      for (int rank = 0; rank < group_.size(); ++rank)
        next[static_cast<std::size_t>(rank)] += count_part(matrix, rank);
    }
  }

  Kept& kept_;
  Device& device_;
  comm::Communicator& group_;
  bool replicated_;
  DType dtype_;
  std::string label_;
  std::vector<Matrix> matrices_;
  std::vector<int> owners_;
};

}  // namespace

const Tensor& WholeMatrices::of(const Segment& segment, Device& device, device::Tier tier) {
  Tensor& directions = kept_[&segment];
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
  const bool beside_gpu = device::stands_for(device) == device::Kind::cuda && tier_ != device::Tier::device;
  std::map<const Segment*, Tensor> there;
  for (const Segment* segment : order_) {
    Tensor& directions = there[segment] = kept_.at(segment);
    if (!beside_gpu) continue;
    const Tensor here = directions;
    directions = Tensor::empty(device, here.shape(), here.dtype(), Category::workspace);
    device.copy(directions.raw(), here.raw(), here.bytes());
  }
  MatrixExchange(order_, there, kernels).run([&](const Matrix& matrix, const Tensor& x) {
    optim::orthogonalize(x, hyper_of(*matrix.parameter), kernels);
  });
  for (const Segment* segment : order_)
    if (beside_gpu) device.copy(kept_.at(segment).raw(), there.at(segment).raw(), there.at(segment).bytes());
  if (device.kind() == device::Kind::cuda) device.synchronize();  // the processor may read them
  order_.clear();
}

}  // namespace sherd::engine
