#include "models/adapters/initial_adapter.h"

#include <algorithm>
#include <cmath>

#include "models/adapters/read_values.h"
#include "models/adapters/weight_parts.h"
#include "models/hub/adapter_tables.h"
#include "tensor/formats/stored_format.h"
#include "tensor/host_values.h"

namespace sherd::models {

using tensor::Slice;
using tensor::Tensor;

namespace {

constexpr const char* of_magnitudes = ".adapter.magnitude";
constexpr const char* of_rows = ".adapter.rows";

std::vector<float> whole_weight(nn::WeightSource& base, const std::string& layer,
                                const PublishedParameter& weight, device::Device& device) {
  const std::int64_t rows = weight.rows.back().row + weight.rows.back().rows;
  return read_values(base, layer + ".weight", {rows, weight.columns}, device);
}

}  // namespace

const InitialProducts::Layer* InitialProducts::of(const std::string& layer) {
  const auto [found, is_new] = layers_.try_emplace(layer);
  Layer& out = found->second;
  if (!is_new) return out.row_of.empty() ? nullptr : &out;
  AdaptedWeight adapted = adapted_weight(config_, layer);
  if (adapted.tensors.empty()) return nullptr;
  const std::int64_t in = adapted.weight.columns, rank = adapted.rank;
  const std::vector<float> weight = whole_weight(base_, layer, adapted.weight, device_);
  out.b.resize(static_cast<std::size_t>(out.find_rows(adapted) * rank));
  for (const int tensor : adapted.tensors) {
    const PublishedTensor& published = adapted.weight.tensors[static_cast<std::size_t>(tensor)];
    const std::int64_t rows = published.shape[published.transposed ? 1 : 0];
    std::vector<float> values(static_cast<std::size_t>(rows * in));
    const auto for_each_row = [&](const auto& visit) {  // of the weight, and of the published one
      for (const PublishedParameter::RowRun& run : adapted.weight.rows)
        for (std::int64_t i = 0; run.tensor == tensor && i < run.rows; ++i)
          visit(run.row + i, run.tensor_row + i);
    };
    for_each_row([&](std::int64_t row, std::int64_t own) {
      std::copy_n(weight.begin() + row * in, in, values.begin() + own * in);
    });
    const bool largest = config_.adapter.lora.init == config::LoraInit::pissa;
    WeightPart part = (largest ? largest_part : orthogonal_part)(values, rows, in, rank, *processor_);
    if (largest)  // the whole product is scale·B·A
      for (std::vector<float>* factor : {&part.a, &part.b})
        for (float& value : *factor) value /= static_cast<float>(std::sqrt(adapted.scale));
    out.a.insert(out.a.end(), part.a.begin(), part.a.end());
    for_each_row([&](std::int64_t row, std::int64_t own) {
      std::copy_n(part.b.begin() + own * rank, rank,
                  out.b.begin() + out.row_of[static_cast<std::size_t>(row)] * rank);
    });
  }
  out.adapted = std::move(adapted);
  return &out;
}

bool InitialAdapter::is_for(const config::Adapter& adapter) {
  const config::LoraKeys& lora = adapter.lora;
  return lora.dora || !lora.token_indices.empty() || config::takes_from_base(lora.init);
}

bool InitialAdapter::has(const std::string& name) const {
  return name.ends_with(of_magnitudes) || name.ends_with(of_rows) ||
         (products_ && name.find(".adapter.lora_") != std::string::npos);
}

std::vector<float> InitialAdapter::magnitudes(const std::string& layer) {
  const AdaptedWeight adapted = adapted_weight(config_, layer);
  const std::int64_t columns = adapted.weight.columns;
  std::vector<float> values = whole_weight(base_, layer, adapted.weight, device_);
  if (const StoredFormat format = config_.adapter.stored_base(); format != StoredFormat::compute)
    tensor::round_to_format(format, values, device_.arena());  // where it cannot, loading it says so
  std::vector<float> out;
  for (const PublishedParameter::RowRun& run : adapted.weight.rows) {
    if (std::find(adapted.tensors.begin(), adapted.tensors.end(), run.tensor) == adapted.tensors.end())
      continue;
    for (std::int64_t row = run.row; row < run.row + run.rows; ++row) {
      double squares = 0;
      for (std::int64_t c = 0; c < columns; ++c) {
        const double value = values[static_cast<std::size_t>(row * columns + c)];
        squares += value * value;
      }
      out.push_back(static_cast<float>(std::sqrt(squares)));
    }
  }
  return out;
}

std::vector<float> InitialAdapter::token_rows(const std::string& table) {
  return read_rows(base_, table + ".weight", config_.padded_vocab(), config_.hidden_size,
                   trained_tokens(config_).of(table), device_);
}

void InitialAdapter::read(const std::string& name, const Slice& slice, std::int64_t begin, const Tensor& to) {
  if (name != name_) {
    const std::string layer = name.substr(0, name.find(".adapter."));
    if (name.ends_with(of_magnitudes))
      values_ = magnitudes(layer);
    else if (name.ends_with(of_rows))
      values_ = token_rows(layer);
    else
      values_ = name.ends_with("lora_A") ? products_->of(layer)->a : products_->of(layer)->b;
    name_ = name;
  }
  write_slice(values_, slice, begin, to);
}

config::Adapter PlainLora::keys(const config::Adapter& adapter) {
  config::Adapter out = adapter;
  config::LoraKeys& lora = out.lora;
  lora.init = config::LoraInit::uniform;
  const double of_alpha = lora.rslora ? std::sqrt(2.0) : 2.0;  // the scale stays
  lora.rank *= 2, lora.alpha *= of_alpha;
  for (auto& [pattern, rank] : lora.rank_pattern) rank *= 2;
  for (auto& [pattern, alpha] : lora.alpha_pattern) alpha *= of_alpha;
  return out;
}

void PlainLora::read(const std::string& name, const Slice& slice, std::int64_t begin, const Tensor& to) {
  const bool is_a = name.ends_with(".adapter.lora_A");
  if (!is_a && !name.ends_with(".adapter.lora_B")) return adapter_.read(name, slice, begin, to);
  if (name != name_) {
    const InitialProducts::Layer* layer = products_.of(name.substr(0, name.find(".adapter.")));
    require(layer, "'", name, "' is of no layer with an adapter");
    const std::int64_t rank = layer->adapted.rank;
    const std::vector<float>& begun = is_a ? layer->a : layer->b;
    const auto elements = std::ssize(begun);
    const tensor::Shape shape =
        is_a ? tensor::Shape{elements / layer->adapted.weight.columns, layer->adapted.weight.columns}
             : tensor::Shape{elements / rank, rank};
    const std::vector<float> trained = read_values(adapter_, name, shape, device_);
    // In A, a target's rows of A₀ come behind its own rows; in B, a row's columns of -B₀ behind its own.
    const std::int64_t part = is_a ? rank * shape[1] : rank;
    values_.clear();
    for (std::int64_t at = 0; at < elements; at += part) {
      values_.insert(values_.end(), trained.begin() + at, trained.begin() + at + part);
      for (std::int64_t i = at; i < at + part; ++i)
        values_.push_back(is_a ? begun[static_cast<std::size_t>(i)] : -begun[static_cast<std::size_t>(i)]);
    }
    name_ = name;
  }
  write_slice(values_, slice, begin, to);
}

void WithoutProducts::read(const std::string& name, const Slice& slice, std::int64_t begin,
                           const Tensor& to) {
  const InitialProducts::Layer* layer =
      name.ends_with(".weight") ? products_.of(name.substr(0, name.rfind('.'))) : nullptr;
  if (!layer) return source_.read(name, slice, begin, to);
  device::Device& device = products_.device();
  const Tensor values = Tensor::on_host(device, {to.numel()}, DType::f32);
  source_.read(name, slice, begin, values);
  const std::int64_t columns = layer->columns;
  const auto scale = static_cast<float>(layer->adapted.scale);
  slice.for_each_run(
      begin, begin + to.numel(), [&](std::int64_t local, std::int64_t logical, std::int64_t count) {
        for (std::int64_t at = logical; at < logical + count;) {
          const std::int64_t row = at / columns, first = at % columns,
                             n = std::min(columns - first, logical + count - at);
          layer->add(row, first, first + n, -scale, values.data<float>() + (local - begin) + (at - logical));
          at += n;
        }
      });
  tensor::convert_values(std::as_bytes(std::span(values.data<float>(), static_cast<std::size_t>(to.numel()))),
                         DType::f32, {to.raw(), to.bytes()}, to.dtype());
}

}  // namespace sherd::models
