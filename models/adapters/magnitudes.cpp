#include "models/adapters/magnitudes.h"

#include <algorithm>
#include <cmath>

#include "models/hub/adapter_targets.h"
#include "tensor/formats/stored_format.h"

namespace sherd::models {

void InitialMagnitudes::read(const std::string& name, const tensor::Slice& slice, std::int64_t begin,
                             const tensor::Tensor& to) {
  const std::string layer = name.substr(0, name.rfind(".adapter."));
  if (layer != layer_) {
    layer_.clear(), of_layer_.clear();
    const AdaptedWeight adapted = adapted_weight(config_, layer);
    const std::int64_t columns = adapted.weight.columns,
                       rows = adapted.weight.rows.back().row + adapted.weight.rows.back().rows;
    const tensor::Tensor weight = tensor::Tensor::empty(
        device_, {rows * columns}, DType::f32, device::Category::workspace, device_.processor_tier());
    base_.read(layer + ".weight", tensor::Slice::whole({rows, columns}), 0, weight);
    const std::span values(weight.data<float>(), static_cast<std::size_t>(rows * columns));
    if (const StoredFormat format = config_.adapter.stored_base(); format != StoredFormat::compute) {
      std::vector<std::byte> blocks(static_cast<std::size_t>(tensor::stored_bytes(format, rows * columns)));
      if (tensor::quantize(format, values, blocks.data(), device_.arena()))  // else loading it says so
        tensor::dequantize(format, blocks.data(), 0, values);
    }
    for (const PublishedParameter::RowRun& run : adapted.weight.rows) {
      if (std::find(adapted.tensors.begin(), adapted.tensors.end(), run.tensor) == adapted.tensors.end())
        continue;
      for (std::int64_t row = run.row; row < run.row + run.rows; ++row) {
        double squares = 0;
        for (std::int64_t c = 0; c < columns; ++c) {
          const double value = values[static_cast<std::size_t>(row * columns + c)];
          squares += value * value;
        }
        of_layer_.push_back(static_cast<float>(std::sqrt(squares)));
      }
    }
    layer_ = layer;
  }
  slice.for_each_run(begin, begin + to.numel(),
                     [&](std::int64_t local, std::int64_t logical, std::int64_t n) {
                       std::copy_n(of_layer_.begin() + logical, n, to.data<float>() + (local - begin));
                     });
}

}  // namespace sherd::models
