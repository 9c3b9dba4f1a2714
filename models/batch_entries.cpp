#include "models/batch_entries.h"

#include <algorithm>

#include "base/error.h"
#include "base/text/excerpt.h"

namespace sherd::models {

const Tensor& entry(const tensor::Batch& batch, const char* name) {
  const auto found = batch.find(name);
  if (found != batch.end()) return found->second;
  std::string keys;
  for (const auto& [key, value] : batch) keys += (keys.empty() ? "'" : ", '") + key + "'";
  fail(ErrorKind::data, "a GPT reads '", name, "' from its batch, which holds ",
       keys.empty() ? "nothing" : keys);
}

std::shared_ptr<const autograd::Documents> documents_of(Tape& tape, const tensor::Batch& batch) {
  const auto found = batch.find("documents");
  if (found == batch.end() || tape.device().kind() == device::Kind::meta) return nullptr;
  const auto* bounds = found->second.data<std::int32_t>();
  return std::make_shared<const autograd::Documents>(bounds, bounds + found->second.numel());
}

std::shared_ptr<const std::vector<bool>> filling_of(Tape& tape, const tensor::Batch& batch) {
  const auto found = batch.find("filling");
  if (found == batch.end() || tape.device().kind() == device::Kind::meta) return nullptr;
  const tensor::Shape& tokens = entry(batch, "tokens").shape();
  const auto* filling = found->second.data<std::int32_t>();
  if (found->second.numel() != tokens[0])
    fail(ErrorKind::data, "'filling' tells of ", found->second.numel(), " sequences, of which there are ",
         tokens[0]);
  if (std::all_of(filling, filling + tokens[0], [](std::int32_t n) { return n == 0; })) return nullptr;
  auto out = std::make_shared<std::vector<bool>>();
  for (std::int64_t row = 0; row < tokens[0]; ++row) {
    if (filling[row] < 0 || filling[row] > tokens[1])
      fail(ErrorKind::data, "'filling' has ", filling[row], " of ", counted(tokens[1], "place"));
    out->insert(out->end(), static_cast<std::size_t>(tokens[1] - filling[row]), false);
    out->insert(out->end(), static_cast<std::size_t>(filling[row]), true);
  }
  return out;
}

std::shared_ptr<const std::vector<std::int32_t>> source_lengths_of(Tape& tape, const tensor::Batch& batch,
                                                                   std::int64_t rows) {
  const auto found = batch.find("source_lengths");
  if (found == batch.end()) return nullptr;
  if (tape.device().kind() == device::Kind::meta)
    return std::make_shared<std::vector<std::int32_t>>(static_cast<std::size_t>(found->second.numel()),
                                                       static_cast<std::int32_t>(rows));
  const auto* lengths = found->second.data<std::int32_t>();
  auto out = std::make_shared<std::vector<std::int32_t>>(lengths, lengths + found->second.numel());
  if (std::ssize(*out) != entry(batch, "tokens").shape()[0])
    fail(ErrorKind::data, "'source_lengths' tells of ", out->size(), " sequences, of which there are ",
         entry(batch, "tokens").shape()[0]);
  for (const std::int32_t length : *out)
    if (length < 1 || length > rows)
      fail(ErrorKind::data, "'source_lengths' has ", length, " of ", counted(rows, "row"), " of an encoder");
  return out;
}

Tensor columns_from(Tape& tape, const Tensor& labels, std::int64_t first) {
  const std::int64_t batch = labels.shape()[0], rows = labels.shape()[1];
  const Tensor out = tape.empty({batch, rows - first}, labels.dtype());
  tape.kernels().copy_rows({labels, first, rows}, {out, 0, rows - first}, batch, rows - first);
  return out;
}

Tensor token_types_of(Tape& tape, const tensor::Batch& batch, std::int64_t types) {
  const Tensor& tokens = entry(batch, "tokens");
  const auto found = batch.find("token_types");
  if (found == batch.end() || types == 1) {
    const Tensor first = tape.empty(tokens.shape(), DType::i32);
    tape.kernels().fill(first, 0);
    return first;
  }
  if (found->second.dtype() != DType::i32 || found->second.shape() != tokens.shape())
    fail(ErrorKind::data, "token_types ", found->second.shape().str(),
         " must be int32, of the shape of tokens, ", tokens.shape().str());
  return found->second;
}

Tensor labels_at(Tape& tape, const Tensor& labels, const Tensor& rows) {
  const Tensor out = tape.empty({1, rows.numel()}, DType::i32);
  if (tape.device().kind() == device::Kind::meta) return out;
  for (std::int64_t i = 0; i < rows.numel(); ++i) {
    const std::int32_t row = rows.data<std::int32_t>()[i];
    if (row < 0 || row >= labels.numel())
      fail(ErrorKind::data, "'targets' names row ", row, " of ", labels.numel());
    out.data<std::int32_t>()[i] = labels.data<std::int32_t>()[row];
  }
  return out;
}

}  // namespace sherd::models
