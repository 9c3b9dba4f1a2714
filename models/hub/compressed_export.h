#pragma once

#include <functional>
#include <set>
#include <string>
#include <vector>

#include "models/compressed/calibration.h"
#include "models/hub/low_bit_export.h"

namespace sherd::models {

/// The errors that compressing made in a published matrix.
struct CompressedLayer {
  std::string weight;        ///< its published name
  double weight_error = 0;   ///< ‖Q(W) - W‖ / ‖W‖
  double output_error = -1;  ///< Calibration::Matrix::output_error; negative: not known
};

/// Writes the weights of linear layers in the forms of compressed-tensors: int8 and fp8 NAME in codes with
/// `weight_scale` [out, 1] and, where inputs have one scale, `input_scale` [1]; int4 `weight_packed` with
/// `weight_scale` [out, in / group] and `weight_shape`. Scales are in the scheme's dtype.
class CompressedExport final : public MatrixExport {
 public:
  /// `linear`: as of LowBitExport. Without `calibration`, which outlives it, values are rounded to nearest.
  /// `told` hears of each matrix. Throws Error{config} for a model that this form is not made for.
  CompressedExport(const CompressedScheme& scheme, const GptConfig& model, std::set<std::string> linear,
                   Calibration* calibration, std::function<void(const CompressedLayer&)> told = {});

  bool takes(const std::string& parameter, const PublishedTensor& tensor) const override;
  std::vector<tensor::SafetensorsSpec> specs(const PublishedTensor& tensor) const override;
  void write(tensor::SafetensorsFolderWriter& files, const PublishedTensor& tensor,
             std::span<const float> values) override;
  std::string described(const std::string& config, const std::vector<std::string>& plain,
                        const std::string& dtype) const override;

 private:
  void write_scales(tensor::SafetensorsFolderWriter& files, const std::string& name,
                    std::span<const float> scales) const;

  const CompressedScheme scheme_;
  std::set<std::string> linear_;
  Calibration* calibration_;
  std::function<void(const CompressedLayer&)> told_;
};

}  // namespace sherd::models
