#include "models/hub/hugging_face_weights.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "base/text/excerpt.h"
#include "tensor/host_values.h"

namespace sherd::models {
namespace {

using tensor::SafetensorsEntry;
using tensor::Shape;

bool is_weight_type(const std::optional<DType>& dtype) {
  return dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16 || dtype == DType::f64;
}

/// Tensors of older files that are made, not trained: causal masks, and frequencies of rotary positions.
bool is_buffer(const std::string& name, const SafetensorsEntry& entry) {
  if (name.ends_with(".attn.bias"))
    return entry.shape.size() == 4 && entry.shape[0] == 1 && entry.shape[1] == 1 &&
           entry.shape[2] == entry.shape[3];
  if (name.ends_with(".attn.masked_bias")) return entry.numel() == 1;
  if (name.ends_with("rotary_emb.inv_freq")) return entry.shape.size() == 1;
  if (name.ends_with("embeddings.position_ids")) return entry.shape.size() == 2 && entry.shape[0] == 1;
  return false;
}

/// The first of many, and how many more.
void list(std::string& out, const char* what, const std::vector<std::string>& names) {
  constexpr std::size_t most = 12;
  if (names.empty()) return;
  out += cat(out.empty() ? "" : "; ", what, " ");
  for (std::size_t i = 0; i < std::min(most, names.size()); ++i)
    out += (i > 0 ? ", " : "") + excerpt(names[i], 120);
  if (names.size() > most) out += cat(" and ", names.size() - most, " more");
}

constexpr std::size_t part_bytes = std::size_t{4} << 20;

}  // namespace

HuggingFaceWeights::HuggingFaceWeights(std::filesystem::path folder, HuggingFaceLayout layout,
                                       const std::string& stem)
    : files_(std::move(folder), stem), layout_(std::move(layout)), has_states_(stem == "model") {
  const std::vector<std::string> names = files_.names();
  const auto any_with = [&](const std::string& prefix) {
    return std::any_of(names.begin(), names.end(),
                       [&](const std::string& name) { return name.starts_with(prefix); });
  };
  for (const char* part : {"language_model.", "model.language_model."})
    if (any_with(part)) text_part_ = part;
  prefixed_ = any_with(layout_.prefix());
  if (const std::string stacked = layout_.stacked_experts();
      !stacked.empty() && files_.find(found_as(stacked)))
    layout_.take_stacked_experts();
  // A tied table may be stored as the head alone.
  const std::string own = layout_.published("tokens.weight").tensors[0].name;
  if (layout_.tied() && !files_.find(found_as(own)) && files_.find(found_as(layout_.head())))
    table_is_head_ = own;
}

std::string HuggingFaceWeights::found_as(const std::string& name) const {
  if (!table_is_head_.empty() && name == table_is_head_) return found_as(layout_.head());
  const std::string& prefix = layout_.prefix();
  if (text_part_ == "language_model.") return text_part_ + name;
  if (!text_part_.empty()) return name.starts_with(prefix) ? text_part_ + name.substr(prefix.size()) : name;
  const std::string own = !prefixed_ && name.starts_with(prefix) ? name.substr(prefix.size()) : name;
  // BERT's first files have TensorFlow's names.
  for (const auto& [today, older] : {std::pair(".weight", ".gamma"), {".bias", ".beta"}})
    if (own.ends_with(std::string("LayerNorm") + today) && !files_.find(own)) {
      const std::string other = own.substr(0, own.rfind('.')) + older;
      if (files_.find(other)) return other;
    }
  return own;
}

void HuggingFaceWeights::require_tied(const std::string& head, const std::string& table) const {
  const SafetensorsEntry &one = *files_.find(head), &other = *files_.find(table);
  // Some files have the head in another type than the table.
  const bool widens = one.dtype_name != other.dtype_name;
  const auto values = [&](const std::string& name, const SafetensorsEntry& entry, std::int64_t at,
                          std::int64_t count) {
    const std::uint64_t size = entry.bytes / static_cast<std::uint64_t>(entry.numel());
    std::vector<std::byte> out(static_cast<std::size_t>(count) * size);
    files_.read_bytes(name, static_cast<std::uint64_t>(at) * size, out);
    if (!widens) return out;
    std::vector<std::byte> wide(static_cast<std::size_t>(count) * size_of(DType::f32));
    tensor::convert_values(out, *entry.dtype, wide, DType::f32);
    return wide;
  };
  bool same =
      one.shape == other.shape && (!widens || (is_weight_type(one.dtype) && is_weight_type(other.dtype)));
  constexpr std::int64_t most = std::int64_t{1} << 20;
  for (std::int64_t at = 0; same && at < one.numel(); at += most) {
    const std::int64_t count = std::min(most, one.numel() - at);
    same = values(head, one, at, count) == values(table, other, at, count);
  }
  const std::vector<std::string> copies = layout_.copies_of_tokens();
  if (!same && std::find(copies.begin(), copies.end(), head) != copies.end())
    fail(ErrorKind::data, files_.path().string(), ": ", head, " differs from ", table,
         ", and both stacks have one table here: such a model is not supported");
  if (!same)
    fail(ErrorKind::data, files_.path().string(), ": ", head, " differs from ", table,
         ", and config.json says that they are one (tie_word_embeddings): set it to false there, or remove ",
         head);
}

void HuggingFaceWeights::check(const std::vector<nn::ParameterPtr>& parameters) const {
  std::vector<std::string> missing, misshapen, types, unexpected;
  std::set<std::string> expected;
  for (const nn::ParameterPtr& parameter : parameters)
    for (const PublishedTensor& tensor : layout_.published(parameter->name).tensors) {
      const std::string name = found_as(tensor.name);
      if (!expected.insert(name).second) continue;  // another part of the same
      const SafetensorsEntry* entry = files_.find(name);
      if (!entry && layout_.may_lack(parameter->name)) continue;
      if (const auto low_bits = find_low_bits(files_, name)) {
        low_bits->check(tensor, {expected, missing, misshapen, types});
        continue;
      }
      if (!entry)
        missing.push_back(name);
      else if (Shape{std::span<const std::int64_t>(entry->shape)} != tensor.in_file())
        misshapen.push_back(cat(name, " ", shape_of(*entry), " for ", tensor.in_file().str()));
      else if (!is_weight_type(entry->dtype))
        types.push_back(cat(name, " (", entry->dtype_name, ")"));
    }
  for (const auto& [path, tensor] : states()) {
    const std::string name = found_as(tensor.name);
    expected.insert(name);
    const SafetensorsEntry* entry = files_.find(name);
    if (!entry)
      missing.push_back(name);
    else if (shape_of(*entry) != tensor.shape.str())
      misshapen.push_back(cat(name, " ", shape_of(*entry), " for ", tensor.shape.str()));
    else if (!is_weight_type(entry->dtype))
      types.push_back(cat(name, " (", entry->dtype_name, ")"));
  }
  const std::string head = found_as(layout_.head()),
                    table = found_as(layout_.published("tokens.weight").tensors[0].name);
  const bool tied = layout_.tied() && !expected.contains(head) && files_.find(head) && files_.find(table);
  std::vector<std::string> copies;
  for (const std::string& name : layout_.copies_of_tokens())
    if (files_.find(found_as(name))) copies.push_back(found_as(name)), expected.insert(copies.back());
  for (const std::string& name : files_.names())
    if (!expected.contains(name) && name.starts_with(text_part_) && !is_buffer(name, *files_.find(name)) &&
        !(tied && name == head) && !layout_.passes_over(name) &&
        // The table in which trained rows stand, which PEFT keeps where it was resized.
        !(layout_.is_of_adapter() && name.ends_with(".token_adapter.base_layer.weight")))
      unexpected.push_back(name);
  std::string problems;
  list(problems, "missing are", missing);
  list(problems, "of another shape than the model's are", misshapen);
  list(problems, "of a type that Sherd does not read are", types);
  list(problems, "not the model's are", unexpected);
  if (!problems.empty())
    fail(ErrorKind::data, "the tensors in ", files_.path().string(), " are not the weights of this model (",
         layout_.family(), "): ", problems,
         missing == std::vector<std::string>{head} && !layout_.is_of_adapter()
             ? "; where the table of embeddings makes the scores, set model.tie_embeddings to true"
             : "");
  if (tied) require_tied(head, table);
  for (const std::string& copy : copies) require_tied(copy, table);
}

bool HuggingFaceWeights::has(const std::string& name) const {
  if (!layout_.may_lack(name)) return true;
  const std::vector<PublishedTensor> tensors = layout_.published(name).tensors;
  return std::all_of(tensors.begin(), tensors.end(),
                     [&](const PublishedTensor& tensor) { return files_.find(found_as(tensor.name)); });
}

/// The tensor as rows of the parameter. Stays until others are asked for.
std::span<const std::byte> HuggingFaceWeights::turned(const PublishedTensor& tensor) {
  const bool all = tensor.takes_turns();
  const std::string name = found_as(tensor.name);
  const std::size_t size = size_of(*files_.find(name)->dtype);
  const std::size_t bytes = static_cast<std::size_t>(tensor.shape.numel()) * size;
  const std::size_t first = all ? static_cast<std::size_t>(tensor.place) * bytes : 0;
  const std::int64_t place = all ? 0 : tensor.place;
  for (const Turned& held : turned_)
    if (held.name == tensor.name && held.place == place) return std::span(held.values).subspan(first, bytes);
  Turned& made = turned_[last_turned_ = (last_turned_ + 1) % turned_.size()];
  made = {};
  const std::int64_t rows = all ? tensor.shape.numel() : tensor.shape[0],
                     columns = all ? tensor.stacked : tensor.shape[1];
  part_.resize(static_cast<std::size_t>(rows * columns) * size), made.values.resize(part_.size());
  files_.read_bytes(name, all ? 0 : static_cast<std::size_t>(tensor.first()) * size, part_);
  tensor::transpose_values(part_.data(), rows, columns, size, made.values.data());
  part_ = {};
  made.name = tensor.name, made.place = place;
  return std::span(made.values).subspan(first, bytes);
}

void HuggingFaceWeights::read_elements(const PublishedTensor& tensor, std::int64_t first,
                                       std::span<std::byte> to, DType dtype) {
  const std::string name = found_as(tensor.name);
  const SafetensorsEntry* entry = files_.find(name);
  if (low_bits_name_ != name) low_bits_ = find_low_bits(files_, name), low_bits_name_ = name;
  if (low_bits_) return read_low_bits(tensor, first, to, dtype);
  require(entry && is_weight_type(entry->dtype), "'", files_.path().string(), "' has no weights '", name,
          "'");
  const std::size_t size = size_of(*entry->dtype), to_size = size_of(dtype);
  if (tensor.transposed || tensor.takes_turns())
    return tensor::convert_values(
        turned(tensor).subspan(static_cast<std::size_t>(first) * size, to.size() / to_size * size),
        *entry->dtype, to, dtype);
  const std::size_t offset = static_cast<std::size_t>(tensor.first() + first) * size;
  if (entry->dtype == dtype) return files_.read_bytes(name, offset, to);
  const std::size_t most = part_bytes / size, count = to.size() / to_size;
  for (std::size_t done = 0; done < count; done += most) {
    const std::size_t n = std::min(most, count - done);
    part_.resize(std::max(part_.size(), n * size));
    const std::span<std::byte> part = std::span(part_).first(n * size);
    files_.read_bytes(name, offset + done * size, part);
    tensor::convert_values(part, *entry->dtype, to.subspan(done * to_size, n * to_size), dtype);
  }
}

/// Elements from `first` on of a matrix with a row for each output.
void HuggingFaceWeights::read_low_bits(const PublishedTensor& tensor, std::int64_t first,
                                       std::span<std::byte> to, DType dtype) {
  const std::size_t size = size_of(dtype), count = to.size() / size;
  std::vector<float> values;
  for (std::size_t done = 0; done < count;) {
    values.resize(std::min(count - done, part_bytes));
    low_bits_->read(tensor, first + static_cast<std::int64_t>(done), values);
    tensor::convert_values(std::as_bytes(std::span(values)), DType::f32,
                           to.subspan(done * size, values.size() * size), dtype);
    done += values.size();
  }
}

/// The tensors that the files must have beside parameters.
std::vector<std::pair<std::string, PublishedTensor>> HuggingFaceWeights::states() const {
  if (!has_states_) return {};
  return layout_.states();
}

std::map<std::string, std::vector<float>> HuggingFaceWeights::step_states() const {
  std::map<std::string, std::vector<float>> out;
  for (const auto& [path, tensor] : states()) {
    const std::string name = found_as(tensor.name);
    const SafetensorsEntry* entry = files_.find(name);
    require(entry && is_weight_type(entry->dtype), "'", files_.path().string(), "' has no '", name, "'");
    std::vector<std::byte> bytes(entry->bytes);
    files_.read_bytes(name, 0, bytes);
    std::vector<float>& values = out[path];
    values.resize(static_cast<std::size_t>(tensor.shape.numel()));
    tensor::convert_values(bytes, *entry->dtype, std::as_writable_bytes(std::span(values)), DType::f32);
  }
  return out;
}

void HuggingFaceWeights::read(const std::string& name, const tensor::Slice& slice, std::int64_t begin,
                              const tensor::Tensor& to) {
  const PublishedParameter parameter = layout_.published(name);
  const std::size_t size = size_of(to.dtype());
  const std::int64_t columns = parameter.columns;
  const auto place = [&](std::int64_t local, std::int64_t count) {
    return std::span(to.raw() + static_cast<std::size_t>(local - begin) * size,
                     static_cast<std::size_t>(count) * size);
  };
  const auto read_run = [&](std::int64_t local, std::int64_t logical, std::int64_t count) {
    auto rows = std::upper_bound(parameter.rows.begin(), parameter.rows.end(), logical / columns,
                                 [](std::int64_t row, const auto& run) { return row < run.row; });
    for (--rows; count > 0; ++rows) {
      const std::int64_t n = std::min(count, (rows->row + rows->rows) * columns - logical);
      const std::span<std::byte> part = place(local, n);
      if (rows->tensor < 0)
        std::memset(part.data(), 0, part.size());
      else
        read_elements(parameter.tensors[static_cast<std::size_t>(rows->tensor)],
                      logical + (rows->tensor_row - rows->row) * columns, part, to.dtype());
      local += n, logical += n, count -= n;
    }
  };
  slice.for_each_run(begin, begin + to.numel(), read_run);
}

}  // namespace sherd::models
