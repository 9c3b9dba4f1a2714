#include <algorithm>
#include <map>
#include <set>
#include <span>

#include "models/hub/hugging_face_weights.h"
#include "models/hub/low_bit_export.h"
#include "tensor/host_values.h"

namespace sherd::models {
namespace {

using tensor::Tensor;

/// Reads a parameter row by row and writes its tensors.
class Exporter {
 public:
  Exporter(tensor::SafetensorsFolderWriter& files, nn::WeightSource& weights, device::Device& device,
           const ExportOptions& options)
      : files_(files),
        weights_(weights),
        device_(device),
        dtype_(options.dtype),
        low_bits_(options.low_bits) {}

  void write(const std::string& name, const tensor::Slice& whole, const PublishedParameter& parameter) {
    for (std::size_t i = 0; i < parameter.tensors.size(); ++i) {
      const PublishedTensor& tensor = parameter.tensors[i];
      if (low_bits_ && low_bits_->takes(name, tensor)) {
        write_in_few_bits(name, whole, parameter, static_cast<int>(i));
        continue;
      }
      std::vector<std::byte> matrix;  // holds a tensor that is to be written in another order
      if (tensor.transposed || tensor.takes_turns())
        matrix.resize(static_cast<std::size_t>(tensor.shape.numel()) * size_of(dtype_));
      for (const PublishedParameter::RowRun& rows : parameter.rows)
        if (rows.tensor == static_cast<int>(i))
          write_rows(name, whole, parameter.columns, rows, tensor, matrix);
      if (tensor.takes_turns()) gather(tensor, matrix);
      if (!tensor.transposed) continue;
      std::vector<std::byte> turned(matrix.size());
      tensor::transpose_values(matrix.data(), tensor.shape[1], tensor.shape[0], size_of(dtype_),
                               turned.data());
      matrix = {};
      files_.write(tensor.name, tensor.first(), turned);
    }
  }

 private:
  /// Writes a tensor whose parts take turns once all of them are there.
  void gather(const PublishedTensor& tensor, std::span<const std::byte> values) {
    Gathered& held = gathered_[tensor.name];
    held.values.insert(held.values.end(), values.begin(), values.end());
    require(tensor.place == held.parts, tensor.name, " is written out of order");
    if (++held.parts < tensor.stacked) return;
    std::vector<std::byte> turned(held.values.size());
    tensor::transpose_values(held.values.data(), tensor.stacked, tensor.shape.numel(), size_of(dtype_),
                             turned.data());
    files_.write(tensor.name, 0, turned);
    gathered_.erase(tensor.name);
  }

  void write_in_few_bits(const std::string& name, const tensor::Slice& whole,
                         const PublishedParameter& parameter, int which) {
    const PublishedTensor& tensor = parameter.tensors[static_cast<std::size_t>(which)];
    const std::int64_t columns = parameter.columns, all = tensor.shape.numel() / columns;
    FewBits& held = few_bits_[tensor.name];
    held.matrix.resize(static_cast<std::size_t>(tensor.shape.numel()));
    for (const PublishedParameter::RowRun& rows : parameter.rows) {
      if (rows.tensor != which) continue;
      const float* values = read(name, whole, rows.row * columns, rows.rows * columns);
      std::copy_n(values, rows.rows * columns, held.matrix.begin() + rows.tensor_row * columns);
      held.rows += rows.rows;
    }
    if (held.rows < all) return;  // others are another parameter's
    low_bits_->write(files_, tensor, held.matrix);
    few_bits_.erase(tensor.name);
  }

  void write_rows(const std::string& name, const tensor::Slice& whole, std::int64_t columns,
                  const PublishedParameter::RowRun& rows, const PublishedTensor& tensor,
                  std::vector<std::byte>& matrix) {
    constexpr std::int64_t most = std::int64_t{1} << 20;
    const std::int64_t count = rows.rows * columns, first = rows.row * columns,
                       to = rows.tensor_row * columns;  // within the tensor
    for (std::int64_t done = 0; done < count; done += most) {
      const std::int64_t n = std::min(most, count - done);
      const std::span<const std::byte> part = converted(name, whole, first + done, n);
      if (matrix.empty())
        files_.write(tensor.name, tensor.first() + to + done, part);
      else
        std::copy(part.begin(), part.end(),
                  matrix.begin() +
                      static_cast<std::ptrdiff_t>(to + done) * static_cast<std::ptrdiff_t>(size_of(dtype_)));
    }
  }

  /// Elements from logical index `first` on, until the next call.
  const float* read(const std::string& name, const tensor::Slice& whole, std::int64_t first,
                    std::int64_t count) {
    if (!values_ || values_.numel() < count) values_ = Tensor::on_host(device_, {count}, DType::f32);
    const Tensor part = values_.range(0, count);
    weights_.read(name, whole, first, part);
    return part.data<float>();
  }
  /// The same in the dtype that is written.
  std::span<const std::byte> converted(const std::string& name, const tensor::Slice& whole,
                                       std::int64_t first, std::int64_t count) {
    const std::span values(read(name, whole, first, count), static_cast<std::size_t>(count));
    bytes_.resize(values.size() * size_of(dtype_));
    tensor::convert_values(std::as_bytes(values), DType::f32, bytes_, dtype_);
    return bytes_;
  }

  tensor::SafetensorsFolderWriter& files_;
  nn::WeightSource& weights_;
  device::Device& device_;
  DType dtype_;
  MatrixExport* low_bits_;
  Tensor values_;
  std::vector<std::byte> bytes_;
  /// The first parts of tensors whose parts take turns.
  struct Gathered {
    std::vector<std::byte> values;
    std::int64_t parts = 0;
  };
  std::map<std::string, Gathered> gathered_;
  /// A matrix in few bits, some of whose rows are there.
  struct FewBits {
    std::vector<float> matrix;
    std::int64_t rows = 0;
  };
  std::map<std::string, FewBits> few_bits_;
};

/// Where each parameter goes. Of a table that makes the scores, too, PEFT has two copies in an adapter's
/// files, and takes the base's head for one that is missing.
std::vector<std::pair<nn::ParameterPtr, PublishedParameter>> published_with_copies(
    const HuggingFaceLayout& layout, const std::vector<nn::ParameterPtr>& parameters) {
  std::vector<std::pair<nn::ParameterPtr, PublishedParameter>> out;
  for (const nn::ParameterPtr& parameter : parameters) {
    out.emplace_back(parameter, layout.published(parameter->name));
    if (!layout.is_of_adapter() || !layout.tied() || parameter->name != "tokens.weight") continue;
    out.push_back(out.back());
    out.back().second.tensors[0].name = layout.head();
  }
  return out;
}

}  // namespace

std::size_t export_to_hugging_face(const std::filesystem::path& folder, const HuggingFaceLayout& layout,
                                   const std::vector<nn::ParameterPtr>& parameters, nn::WeightSource& weights,
                                   device::Device& device, const ExportOptions& options) {
  std::vector<tensor::SafetensorsSpec> specs;
  std::set<std::string> named;
  const auto published = published_with_copies(layout, parameters);
  for (const auto& [parameter, where] : published)
    for (const PublishedTensor& tensor : where.tensors) {
      if (!named.insert(tensor.name).second) continue;  // several parameters share it
      if (options.low_bits && options.low_bits->takes(parameter->name, tensor)) {
        for (tensor::SafetensorsSpec& spec : options.low_bits->specs(tensor))
          specs.push_back(std::move(spec));
        continue;
      }
      const tensor::Shape shape = tensor.in_file();
      const auto dims = shape.dims();
      specs.push_back({tensor.name, options.dtype, {dims.begin(), dims.end()}});
    }
  const std::map<std::string, std::vector<float>> states =
      options.stem == "model" ? weights.step_states() : std::map<std::string, std::vector<float>>();
  std::vector<std::pair<std::string, const std::vector<float>*>> written_states;
  if (options.stem == "model")
    for (const auto& [path, tensor] : layout.states()) {
      const auto found = states.find(path);
      if (found == states.end() || std::ssize(found->second) != tensor.shape.numel())
        fail(ErrorKind::data, "there are no correction biases of ", path, " to write");
      specs.push_back({tensor.name, DType::f32, {tensor.shape.numel()}});
      written_states.emplace_back(tensor.name, &found->second);
    }
  tensor::SafetensorsFolderWriter files(folder, specs, options.shard_bytes, {{"format", "pt"}}, options.stem);
  Exporter exporter(files, weights, device, options);
  for (const auto& [parameter, where] : published)
    exporter.write(parameter->name, tensor::Slice::whole(parameter->logical_slice().logical()), where);
  for (const auto& [name, values] : written_states) files.write(name, 0, std::as_bytes(std::span(*values)));
  files.finish();
  return files.shards();
}

}  // namespace sherd::models
