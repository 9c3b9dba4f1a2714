#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "autograd/ops.h"
#include "tensor/tensor.h"

// The entries of a batch that a Gpt reads, as Gpt::forward_part() lists them. All functions throw Error{data}
// for an entry that does not fit.
namespace sherd::models {

using autograd::Tape;
using tensor::Tensor;

/// The tensor of that name.
const Tensor& entry(const tensor::Batch& batch, const char* name);
/// Null where every row is one text. On a meta device nobody can read them.
std::shared_ptr<const autograd::Documents> documents_of(Tape& tape, const tensor::Batch& batch);
/// Marks the rows that hold no token, at the end of sequences; null where there are none. On a meta device
/// nobody can read them.
std::shared_ptr<const std::vector<bool>> filling_of(Tape& tape, const tensor::Batch& batch);
/// How many of each sequence's encoder rows hold tokens; null where all do, and on a meta device, where
/// nobody can read it.
std::shared_ptr<const std::vector<std::int32_t>> source_lengths_of(Tape& tape, const tensor::Batch& batch,
                                                                   std::int64_t rows);
/// The columns of labels [batch, rows] from `first` on.
Tensor columns_from(Tape& tape, const Tensor& labels, std::int64_t first);
/// Each token's type: as the batch says, else the first; always the first where `types` is 1.
Tensor token_types_of(Tape& tape, const tensor::Batch& batch, std::int64_t types);
/// labels[rows[i]], [1, n]; on a meta device nobody can read them.
Tensor labels_at(Tape& tape, const Tensor& labels, const Tensor& rows);

/// While it lives, what is put on a tape keeps its dtype: scores are differences of numbers that the model's
/// own would round away.
struct KeepDtypes {
  explicit KeepDtypes(Tape& on) : tape(on), input_dtype(std::exchange(on.input_dtype, {})) {}
  ~KeepDtypes() { tape.input_dtype = input_dtype; }
  KeepDtypes(const KeepDtypes&) = delete;
  KeepDtypes& operator=(const KeepDtypes&) = delete;
  Tape& tape;
  std::optional<DType> input_dtype;
};

}  // namespace sherd::models
