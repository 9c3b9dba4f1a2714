#include "models/adapters/adapters.h"

#include <algorithm>
#include <cmath>

#include "models/adapters/layer_products.h"
#include "models/adapters/read_values.h"
#include "models/hub/adapter_tables.h"

namespace sherd::models {

using tensor::Shape;

/// A layer's adapter, whole, and what it does to each row of the weight.
struct MergedWeights::Layer : LayerProducts {
  std::string name;  ///< "blocks.0.attention.qkv"; empty: nothing is held
  bool adapted = false;
  std::vector<float> factors;
  bool of_inputs = false;
  float scale = 1;
  std::vector<float> magnitudes,
      norms;  ///< DoRA's, and those of the rows of weight and products, as `b` has them

  void merge(std::int64_t row, std::int64_t first, std::int64_t end, float* to) const;
};

MergedWeights::MergedWeights(nn::WeightSource& source, const GptConfig& config, device::Device& device)
    : source_(source), config_(config.resolved()), device_(device), layer_(std::make_unique<Layer>()) {}
MergedWeights::~MergedWeights() = default;

void MergedWeights::check(const std::vector<nn::ParameterPtr>&) const {}

std::vector<float> MergedWeights::whole(const std::string& name, const Shape& shape) {
  return read_values(source_, name, shape, device_);
}

/// The adapter of the layer whose weight or bias that is; null where it has none.
const MergedWeights::Layer* MergedWeights::layer_of(const std::string& name) {
  const std::string layer = name.substr(0, name.rfind('.'));
  if (layer_->name == layer) return layer_->adapted ? layer_.get() : nullptr;
  *layer_ = {};
  layer_->name = layer;
  const config::Adapter& adapter = config_.adapter;
  const AdaptedWeight weight = adapted_weight(config_, layer);
  if (weight.tensors.empty()) return nullptr;
  Layer& out = *layer_;
  out.adapted = true, out.of_inputs = weight.of_inputs, out.scale = static_cast<float>(weight.scale);
  const std::int64_t held = out.find_rows(weight);
  const std::string at = layer + ".adapter.";
  if (adapter.type == config::AdapterType::lora) {
    out.a = whole(at + "lora_A", {std::ssize(weight.tensors) * out.rank, out.columns});
    out.b = whole(at + "lora_B", {held, out.rank});
    if (adapter.lora.dora) {
      out.magnitudes = whole(at + "magnitude", {held});
      find_norms(out, std::ssize(out.row_of));
    }
  } else {
    out.factors = whole(at + "ia3", {out.of_inputs ? out.columns : held});
  }
  return &out;
}

/// Elements [first, end) of a row, of which `to` is element `first`.
void MergedWeights::Layer::merge(std::int64_t row, std::int64_t first, std::int64_t end, float* to) const {
  const std::int64_t held = row_of[static_cast<std::size_t>(row)];
  if (held < 0) return;
  if (!factors.empty()) {
    for (std::int64_t c = first; c < end; ++c)
      to[c - first] *= factors[static_cast<std::size_t>(of_inputs ? c : held)];
    return;
  }
  add(row, first, end, scale, to);
  if (norms.empty()) return;
  const auto at = static_cast<std::size_t>(held);
  for (float* value = to; value < to + (end - first); ++value) *value *= magnitudes[at] / norms[at];
}

/// Reads the weight row by row.
void MergedWeights::find_norms(Layer& layer, std::int64_t rows) {
  const tensor::Tensor row = tensor::Tensor::on_host(device_, {layer.columns}, DType::f32);
  const tensor::Slice slice = tensor::Slice::whole({rows, layer.columns});
  std::vector<float> norms(layer.magnitudes.size());
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::int64_t held = layer.row_of[static_cast<std::size_t>(r)];
    if (held < 0) continue;
    source_.read(layer.name + ".weight", slice, r * layer.columns, row);
    layer.merge(r, 0, layer.columns, row.data<float>());
    double squares = 0;
    for (std::int64_t c = 0; c < layer.columns; ++c)
      squares += static_cast<double>(row.data<float>()[c]) * row.data<float>()[c];
    norms[static_cast<std::size_t>(held)] = static_cast<float>(std::sqrt(squares));
  }
  layer.norms = std::move(norms);
}

/// Rows of tokens that were trained stand in the place of the table's.
void MergedWeights::put_rows(const std::string& name, std::int64_t begin, const tensor::Tensor& to) {
  const std::string table = name.substr(0, name.find('.'));
  const std::vector<std::int64_t> ids = trained_tokens(config_).of(table);
  if (ids.empty()) return;
  const std::int64_t width = config_.hidden_size;
  if (rows_.first != table) rows_ = {table, whole(table + ".adapter.rows", {std::ssize(ids), width})};
  require(to.dtype() == DType::f32, "weights are merged in fp32");
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const std::int64_t first = std::max(begin, ids[i] * width),
                       end = std::min(begin + to.numel(), (ids[i] + 1) * width);
    if (first < end)
      std::copy_n(rows_.second.begin() + static_cast<std::int64_t>(i) * width + first - ids[i] * width,
                  end - first, to.data<float>() + first - begin);
  }
}

void MergedWeights::read(const std::string& name, const tensor::Slice& slice, std::int64_t begin,
                         const tensor::Tensor& to) {
  source_.read(name, slice, begin, to);
  if (name == "tokens.weight" || name == "head.weight") return put_rows(name, begin, to);
  const Layer* layer = layer_of(name);
  if (!layer) return;
  const bool bias = name.ends_with(".bias");
  if (bias && (layer->factors.empty() || layer->of_inputs)) return;
  require(to.dtype() == DType::f32 && slice.is_whole(), "weights are merged whole, in fp32");
  const std::int64_t columns = bias ? 1 : layer->columns;
  for (std::int64_t i = 0; i < to.numel();) {
    const std::int64_t first = (begin + i) % columns, end = std::min(columns, first + to.numel() - i);
    layer->merge((begin + i) / columns, first, end, to.data<float>() + i);
    i += end - first;
  }
}

}  // namespace sherd::models
