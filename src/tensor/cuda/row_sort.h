#pragma once

#include "tensor/cuda/cuda_kernels.h"

namespace sherd::tensor::SHERD_CUDA {

/// The ids that a table holds, `rows` from `first` on, of a vocabulary.
struct TableIds {
  std::int64_t first, rows, vocab;
};

/// The table's rows in order, as keys, those of one row in the order of the rows that carry its id, and these
/// rows. What is no id of the table comes last, with the key `rows`.
struct SortedRows {
  const std::uint32_t *keys, *rows;
};

/// A stable sort of rows by the id that each carries (ids: int32 [rows]), on the target's stream: an LSD
/// radix sort whose ranks come from counts and ballots, never from who comes first, so that the order is the
/// same every time. Holds the memory of the result.
class RowSort {
 public:
  RowSort(const device::SHERD_CUDA::Target& target, const Tensor& ids, const TableIds& held,
          DataErrorSlot* wrong);
  SortedRows sorted() const;

 private:
  std::int64_t rows_;
  Tensor result_;
};

}  // namespace sherd::tensor::SHERD_CUDA
