#include <algorithm>
#include <cstring>
#include <vector>

#include "tensor/cpu/loops.h"
#include "tensor/extents.h"

namespace sherd::tensor::cpu {
namespace {

void check_ids(const char* kernel, const Tensor& ids, const Tensor& table, const VocabSlice& slice) {
  const Count vocab = check_vocab_slice(kernel, table.shape()[0], slice);
  const std::int32_t* id = ids.data<std::int32_t>();
  for (Count i = 0; i < ids.numel(); ++i)
    if (id[i] < 0 || id[i] >= vocab) [[unlikely]]
      fail(ErrorKind::data, kernel, ": token id ", id[i], " at position ", i, " of ", ids.shape().str(),
           " is outside the vocabulary of ", vocab,
           ". Prepare the data with the model's tokenizer, or raise the model's vocabulary size");
}

/// Positions in `ids` in order of the table's rows, those of one row in index order, and where each row's run
/// begins.
struct Runs {
  std::vector<std::uint64_t> keys;  ///< row in the upper 32 bits, position in the lower
  std::vector<Count> begin;         ///< one more than there are runs
};

/// The ids that a table of `rows` from id `first` on holds.
Runs runs_of(const Tensor& ids, Count first, Count rows) {
  Runs runs;
  const std::int32_t* id = ids.data<std::int32_t>();
  runs.keys.reserve(static_cast<std::size_t>(ids.numel()));
  require(ids.numel() <= std::numeric_limits<std::uint32_t>::max(), "embedding_backward: too many ids");
  for (Count i = 0; i < ids.numel(); ++i)
    if (const Count row = id[i] - first; row >= 0 && row < rows)
      runs.keys.push_back(static_cast<std::uint64_t>(row) << 32 | static_cast<std::uint64_t>(i));
  std::sort(runs.keys.begin(), runs.keys.end());
  for (std::size_t i = 0; i < runs.keys.size(); ++i)
    if (i == 0 || runs.keys[i] >> 32 != runs.keys[i - 1] >> 32) runs.begin.push_back(static_cast<Count>(i));
  runs.begin.push_back(static_cast<Count>(runs.keys.size()));
  return runs;
}

/// dtable[row, from .. from + n) += the rows of dy that `keys` names, in order, rounded once; or their sum is
/// folded, onto that or, without `accumulate`, in its place.
void add_run(const IsaTable& isa, std::span<const std::uint64_t> keys, const Tensor& dy, const Tensor& dtable,
             Count from, Count n, std::optional<DType> fold, bool accumulate) {
  const Count width = dtable.shape()[1], target = static_cast<Count>(keys[0] >> 32) * width + from;
  if (dy.dtype() == DType::f64) {
    for (const std::uint64_t key : keys) {
      const double* row = dy.data<double>() + static_cast<Count>(key & 0xffffffffu) * width + from;
      for (Count i = 0; i < n; ++i) dtable.data<double>()[target + i] += row[i];
    }
    return;
  }
  float sums[stack_block] = {};
  if (!fold) isa.convert[storage_index(dtable)].load(at(dtable, target), sums, n);
  const auto add_to = isa.convert[storage_index(dy)].add_to;
  for (const std::uint64_t key : keys)
    add_to(at(dy, static_cast<Count>(key & 0xffffffffu) * width + from), sums, n);
  if (fold) return fold_values(isa, sums, *fold, dtable, target, n, accumulate);
  isa.convert[storage_index(dtable)].store(sums, at(dtable, target), n);
}

/// The range's rows of dtable (+)= the sum over sequences of its rows of dy.
void sum_batch(Device& device, const IsaTable& isa, const Tensor& dy, const Tensor& dtable,
               const PositionRange& range, bool accumulate) {
  const Count width = dtable.shape()[1], sequence = dy.shape()[-2] * width;
  const Count batch = sequence == 0 ? 0 : dy.numel() / sequence;
  sum_strided(device, isa, dy, range.row * width, sequence, batch, dtable, range.position * width,
              range.count * width, accumulate);
}

}  // namespace

void CpuKernels::embedding(const Tensor& ids, const Tensor& table, const Tensor& out,
                           const VocabSlice& slice) {
  const Count width = check_embedding("embedding", ids, table, out);
  require(out.dtype() == table.dtype(), "embedding: the output must be ", name_of(table.dtype()), ", not ",
          name_of(out.dtype()));
  check_ids("embedding", ids, table, slice);
  const std::int32_t* id = ids.data<std::int32_t>();
  const std::size_t bytes = static_cast<std::size_t>(width) * size_of(table.dtype());
  for_items(device_, ids.numel(), row_grain(width), [&](Count i) {
    const Count row = id[i] - slice.first;
    if (row >= 0 && row < table.shape()[0])
      std::memcpy(at(out, i * width), at(table, row * width), bytes);
    else
      std::memset(at(out, i * width), 0, bytes);
  });
}

void CpuKernels::embedding_backward(const Tensor& ids, const Tensor& dy, const Tensor& dtable,
                                    bool accumulate, const VocabSlice& slice, std::optional<DType> fold) {
  constexpr const char* name = "embedding_backward";
  const Count width = check_embedding(name, ids, dtable, dy);
  check_summable(name, dy, dtable);
  check_ids(name, ids, dtable, slice);
  require(!fold || (dtable.dtype() != DType::f64 && is_floating(*fold) && *fold != DType::f64),
          "embedding_backward: gradients are folded rounded to fp32, bf16 or fp16, and none of fp64");
  if (!accumulate) fill(dtable, 0);
  if (dy.numel() == 0) return;
  const Runs runs = runs_of(ids, slice.first, dtable.shape()[0]);
  const Count run_count = static_cast<Count>(runs.begin.size()) - 1;
  // Columns are cut as well, for texts in which one id makes up most of the rows.
  constexpr Count columns = 256;
  const Count pieces = (width + columns - 1) / columns;
  for_items(device_, run_count * pieces, 16, [&](Count task) {
    const auto run = static_cast<std::size_t>(task / pieces);
    const Count from = task % pieces * columns;
    const std::span keys(runs.keys);
    add_run(isa_,
            keys.subspan(static_cast<std::size_t>(runs.begin[run]),
                         static_cast<std::size_t>(runs.begin[run + 1] - runs.begin[run])),
            dy, dtable, from, std::min(columns, width - from), fold, accumulate);
  });
}

void CpuKernels::add_positions(const Tensor& x, const Tensor& table, const Tensor& out,
                               const Positions& positions) {
  require_alike("add_positions", out, {&x});
  check_positions("add_positions", x, table, positions);
  const Count seq = x.shape()[-2], width = table.shape()[1];
  require(table.dtype() == x.dtype(), "add_positions: dtypes differ: ", name_of(table.dtype()), " and ",
          name_of(x.dtype()));
  if (x.numel() == 0) return;
  for_items(device_, x.shape().rows(), row_grain(width), [&](Count row) {
    const Count position = positions.at(row % seq);
    if (x.dtype() != DType::f64) {
      isa_.elementwise[storage_index(x)].add(at(x, row * width), at(table, position * width),
                                             at(out, row * width), width);
      return;
    }
    for (Count i = 0; i < width; ++i)
      out.data<double>()[row * width + i] =
          x.data<double>()[row * width + i] + table.data<double>()[position * width + i];
  });
}

void CpuKernels::add_positions_backward(const Tensor& dy, const Tensor& dtable, bool accumulate,
                                        const Positions& positions) {
  sum_positions(*this, dy, dtable, accumulate, positions,
                [&](const PositionRange& range) { sum_batch(device_, isa_, dy, dtable, range, accumulate); });
}

}  // namespace sherd::tensor::cpu
