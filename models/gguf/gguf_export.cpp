#include "models/gguf/gguf_export.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <map>
#include <set>

#include "base/arena.h"
#include "models/adapters/adapters.h"
#include "models/gguf/gguf_metadata.h"
#include "models/hub/config_json.h"
#include "tensor/host_values.h"

namespace sherd::models {
namespace {

/// Whether q4_k's mixture gives a layer more bits, as llama.cpp's does: the first and last eighth, and of the
/// others each third.
bool has_more_bits(std::int64_t layer, std::int64_t layers) {
  const std::int64_t eighth = layers / 8;
  return layer < eighth || layer >= 7 * layers / 8 || (layer - eighth) % 3 == 2;
}

GgufType type_of(const GgufSpec& tensor, GgufType wanted, const GptConfig& model) {
  if (wanted == GgufType::f32 || GgufLayout::stays_wide(tensor)) return GgufType::f32;
  const bool scores = tensor.name == "output.weight" || (tensor.name == "token_embd.weight" && model.tied());
  GgufType type = wanted;
  if (scores && (wanted == GgufType::q4_0 || wanted == GgufType::q4_k)) type = GgufType::q6_k;
  if (constexpr std::string_view block = "blk."; wanted == GgufType::q4_k && tensor.name.starts_with(block)) {
    std::int64_t layer = 0;
    std::from_chars(tensor.name.data() + block.size(), tensor.name.data() + tensor.name.size(), layer);
    const bool counts = tensor.name.find(".attn_v.") != std::string::npos ||
                        tensor.name.find(".ffn_down") != std::string::npos;
    if (counts && has_more_bits(layer, model.num_layers)) type = GgufType::q6_k;
  }
  for (const GgufType other : {type, GgufType::q8_0})
    if (tensor.shape.back() % values_of_block(other) == 0) return other;
  return GgufType::f16;
}

/// Reads parameters a part at a time, and writes their rows where the file has them.
class GgufRows {
 public:
  GgufRows(GgufWriter& file, const std::map<std::string, GgufType>& types, nn::WeightSource& weights,
           device::Device& device)
      : file_(file), types_(types), weights_(weights), device_(device) {}

  void write(const nn::ParameterPtr& parameter, const GgufParameter& where) {
    const tensor::Slice whole = tensor::Slice::whole(parameter->logical_slice().logical());
    const std::int64_t columns = where.columns, most = std::max<std::int64_t>(1, most_values / columns),
                       all = where.rows.empty() ? 0 : where.rows.back().row + where.rows.back().rows;
    held_.assign(where.tensors.size(), {});
    auto run = where.rows.begin();
    for (std::int64_t begin = 0; begin < all; begin += most) {
      const std::int64_t end = std::min(all, begin + most);
      values_ = {};
      values_ = tensor::Tensor::empty(device_, {(end - begin) * columns}, DType::f32,
                                      device::Category::workspace, device_.processor_tier());
      weights_.read(parameter->name, whole, begin * columns, values_);
      std::vector<PublishedParameter::RowRun> there;  // rows of this part, counted from its first
      while (run != where.rows.end() && run->row < end) {
        const std::int64_t first = std::max(run->row, begin), last = std::min(run->row + run->rows, end);
        there.push_back({first - begin, last - first, run->tensor, run->tensor_row + first - run->row});
        if (last < run->row + run->rows) break;  // the next part goes on with it
        ++run;
      }
      put(where, there);
    }
    for (std::size_t i = 0; i < held_.size(); ++i)
      if (!held_[i].empty()) write_held(where.tensors[i], held_[i]);
  }

  void encode(const std::string& tensor, std::int64_t first, std::span<const float> values) {
    const GgufType type = types_.at(tensor);
    const std::int64_t block = values_of_block(type), blocks = std::ssize(values) / block;
    check(tensor, type, values);
    bytes_.resize(static_cast<std::size_t>(blocks * bytes_of_block(type)));
    arena_.parallel_for(blocks, 512, [&](std::int64_t begin, std::int64_t end) {
      const auto part = [&](auto all, std::int64_t each) {
        return all.subspan(static_cast<std::size_t>(begin * each),
                           static_cast<std::size_t>((end - begin) * each));
      };
      encode_gguf(type, part(values, block), part(std::span(bytes_), bytes_of_block(type)));
    });
    file_.write(tensor, first, bytes_);
  }

 private:
  static constexpr std::int64_t most_values = std::int64_t{1} << 20;

  static void check(const std::string& tensor, GgufType type, std::span<const float> values) {
    const float most = type == GgufType::f16 ? 65504.0f : std::numeric_limits<float>::max();
    for (const float value : values)
      if (!(std::abs(value) <= most))
        fail(ErrorKind::data, tensor, " has a value of ", value,
             std::isfinite(value) ? ", more than fp16 holds: export with --type bf16"
                                  : ": the weights are broken; export an earlier checkpoint (--tag)");
  }

  /// Writes rows of the values at hand, those together that follow each other in the file; rows of vectors
  /// and of matrices that are turned wait.
  void put(const GgufParameter& where, std::vector<PublishedParameter::RowRun>& runs) {
    std::erase_if(runs, [](const auto& run) { return run.tensor < 0; });
    std::sort(runs.begin(), runs.end(), [](const auto& a, const auto& b) {
      return std::pair(a.tensor, a.tensor_row) < std::pair(b.tensor, b.tensor_row);
    });
    const std::int64_t columns = where.columns;
    for (auto run = runs.begin(); run != runs.end();) {
      const PublishedTensor& tensor = where.tensors[static_cast<std::size_t>(run->tensor)];
      const bool waits = tensor.transposed || tensor.shape.rank() == 1;
      std::vector<float>& to = waits ? held_[static_cast<std::size_t>(run->tensor)] : rows_;
      if (waits) to.resize(static_cast<std::size_t>(tensor.shape.numel()));
      const std::int64_t first = run->tensor_row, from = waits ? 0 : first;
      std::int64_t end = first;
      for (const int index = run->tensor; run != runs.end() && run->tensor == index && run->tensor_row == end;
           ++run) {
        end += run->rows;
        if (!waits) to.resize(static_cast<std::size_t>((end - from) * columns));
        for (std::int64_t row = 0; row < run->rows; ++row)
          change(where, values_.data<float>() + (run->row + row) * columns,
                 to.data() + (run->tensor_row + row - from) * columns);
      }
      if (!waits) encode(tensor.name, tensor.place * tensor.shape[0] + first, to);
    }
  }

  static void change(const GgufParameter& where, const float* row, float* to) {
    for (std::int64_t c = 0; c < where.columns; ++c) {
      const float value = row[where.column_of.empty() ? c : where.column_of[static_cast<std::size_t>(c)]];
      to[c] = where.decay ? -std::exp(value)
                          : static_cast<float>(where.factor * (static_cast<double>(value) + where.shift));
    }
  }

  void write_held(const PublishedTensor& tensor, const std::vector<float>& values) {
    if (!tensor.transposed) return encode(tensor.name, tensor.place, values);
    std::vector<float> turned(values.size());
    tensor::transpose_values(reinterpret_cast<const std::byte*>(values.data()), tensor.shape[1],
                             tensor.shape[0], sizeof(float), reinterpret_cast<std::byte*>(turned.data()));
    encode(tensor.name, tensor.place * tensor.shape[0], turned);
  }

  GgufWriter& file_;
  const std::map<std::string, GgufType>& types_;
  nn::WeightSource& weights_;
  device::Device& device_;
  Arena arena_{available_cores()};
  tensor::Tensor values_;  ///< the part of a parameter at hand
  std::vector<std::vector<float>> held_;
  std::vector<float> rows_;
  std::vector<std::byte> bytes_;
};

using PlacedParameters = std::vector<std::pair<nn::ParameterPtr, GgufParameter>>;
using NamedVectors = std::vector<std::pair<std::string, std::vector<float>>>;

std::uint64_t write_gguf(const std::filesystem::path& file, const GgufMetadata& metadata,
                         const GgufLayout& layout, const PlacedParameters& placed,
                         const NamedVectors& vectors, nn::WeightSource& weights, device::Device& device,
                         GgufType type) {
  std::vector<GgufSpec> specs;
  std::map<std::string, GgufType> types;
  const auto append = [&](const std::string& name, const tensor::Shape& shape) {
    if (types.contains(name)) return;  // several parameters share it
    GgufSpec spec{name, GgufType::f32, {shape.dims().begin(), shape.dims().end()}};
    spec.type = types[name] = type_of(spec, type, layout.config());
    specs.push_back(std::move(spec));
  };
  for (const auto& [parameter, where] : placed)
    for (const PublishedTensor& tensor : where.tensors) append(tensor.name, tensor.in_file());
  for (const auto& [name, values] : vectors) append(name, {std::ssize(values)});
  GgufWriter writer(file, metadata, specs);
  GgufRows rows(writer, types, weights, device);
  for (const auto& [parameter, where] : placed) rows.write(parameter, where);
  for (const auto& [name, values] : vectors) rows.encode(name, 0, values);
  return writer.finish();
}

/// Rows and columns of a parameter, 0 columns of a vector.
std::pair<std::int64_t, std::int64_t> extents_of(const nn::ParameterPtr& parameter) {
  const tensor::Shape shape = parameter->logical_slice().logical();
  return {shape[0], shape.rank() == 1 ? 0 : shape.numel() / shape[0]};
}

/// The numbers by which files name what most of their tensors are.
std::int64_t gguf_file_type(GgufType type) {
  switch (type) {
    case GgufType::f32:
      return 0;
    case GgufType::f16:
      return 1;
    case GgufType::q4_0:
      return 2;
    case GgufType::q8_0:
      return 7;
    case GgufType::bf16:
      return 32;
    default:
      return 15;
  }
}

}  // namespace

std::uint64_t export_to_gguf(const std::filesystem::path& file, GgufMetadata metadata,
                             const GgufLayout& layout, const std::vector<nn::ParameterPtr>& parameters,
                             nn::WeightSource& weights, device::Device& device, GgufType type) {
  PlacedParameters placed;
  for (const nn::ParameterPtr& parameter : parameters) {
    const auto [rows, columns] = extents_of(parameter);
    for (GgufParameter& where : layout.of(parameter->name, rows, columns))
      placed.emplace_back(parameter, std::move(where));
  }
  const GptConfig& model = layout.config();
  NamedVectors vectors = position_tensors(model, family_of(published_as(model)));
  const auto states = weights.step_states();
  for (const auto& [path, tensor] : HuggingFaceLayout(model).states()) {
    const auto found = states.find(path);
    if (found == states.end()) fail(ErrorKind::data, "there are no correction biases of ", path, " to write");
    vectors.emplace_back(GgufLayout::correction_bias(path), found->second);
  }
  metadata.set("general.file_type", gguf_file_type(type));
  metadata.set("general.quantization_version", std::int64_t{2});
  describe_gguf(metadata, model, family_of(published_as(model)));
  return write_gguf(file, metadata, layout, placed, vectors, weights, device, type);
}

std::uint64_t export_lora_to_gguf(const std::filesystem::path& file, GgufMetadata metadata,
                                  const GgufLayout& layout, const std::vector<nn::ParameterPtr>& parameters,
                                  nn::WeightSource& weights, device::Device& device, GgufType type) {
  const config::Adapter& adapter = layout.config().adapter;
  const auto refuse = [](const char* what) {
    fail(ErrorKind::config, "llama.cpp reads no adapters ", what,
         ": export the merged model (without --adapter), or the adapter as PEFT has it (without --format "
         "gguf)");
  };
  if (adapter.type != config::AdapterType::lora) refuse("but LoRA");
  if (adapter.lora.dora) refuse("with magnitudes (DoRA)");
  if (!adapter.modules_to_save.empty() || !adapter.lora.token_indices.empty())
    refuse("beside which tables of tokens are trained");
  if (layout.config().attention_gate) refuse("of attention whose gates lie among its queries");
  PlacedParameters placed;
  constexpr std::string_view between = ".adapter.";
  for (const nn::ParameterPtr& parameter : parameters) {
    const std::size_t at = parameter->name.find(between);
    if (at == std::string::npos) continue;
    for (GgufParameter& where : layout.of_adapter(
             parameter->name.substr(0, at), parameter->name.substr(at + between.size()), adapter.lora.alpha))
      placed.emplace_back(parameter, std::move(where));
  }
  metadata.set("adapter.type", "lora");
  metadata.set("adapter.lora.alpha", adapter.lora.alpha);
  metadata.set("general.file_type", gguf_file_type(type));
  return write_gguf(file, metadata, layout, placed, {}, weights, device, type);
}

}  // namespace sherd::models
