#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "models/compressed/matrix.h"
#include "models/gpt.h"
#include "models/hub/hugging_face.h"
#include "nn/weight_source.h"

namespace sherd::models {

/// Texts by which a model's layers are calibrated: `sequences` of `length` tokens, one behind the other.
struct CalibrationTexts {
  std::vector<std::int32_t> tokens;
  std::int64_t sequences = 0, length = 0;
};

/// Compresses a decoder's linear layers by what they are given on some texts: int4 by GPTQ, int8 and fp8 to
/// nearest, with one scale for a layer's inputs.
///
/// It goes block by block: the texts pass a block with its weights as they are, in fp32, which tells its
/// layers' inputs; these layers are compressed; and what the next block sees is what the block makes with its
/// compressed weights. So it holds one block's weights, the Hessians of its layers (int4; 4·inputs² bytes a
/// layer, an expert's too), and a hidden state of each token. `weights` is read once, in the model's order.
class Calibration {
 public:
  /// `options` without an adapter; all outlive it. `told` hears of passes that are through, and of how many
  /// there are. Throws Error{config} for a model that is no decoder, Error{data} for ids that the model has
  /// not.
  Calibration(const GptConfig& options, const HuggingFaceLayout& layout, nn::WeightSource& weights,
              device::Device& device, const CompressedScheme& scheme, const CalibrationTexts& texts,
              std::function<void(double done, double total)> told = {});
  ~Calibration();
  Calibration(const Calibration&) = delete;
  Calibration& operator=(const Calibration&) = delete;

  /// A published matrix of a linear layer.
  struct Matrix {
    CompressedMatrix compressed;
    /// ‖Q(x)·Q(W)ᵀ - x·Wᵀ‖ / ‖x·Wᵀ‖ over some of its inputs x in calibration, Q rounding what is rounded;
    /// negative: it had none.
    double output_error = -1;
  };
  /// That matrix, which goes with this. They have to be asked for in the blocks' order.
  Matrix take(const std::string& tensor);
  /// Layers that no token has reached (experts).
  std::int64_t unseen() const { return unseen_; }

 private:
  /// The inputs of a layer so far.
  struct Inputs {
    tensor::Tensor hessian;      ///< Σ x·xᵀ, [inputs, inputs] fp32; undefined: there were none
    std::vector<float> samples;  ///< some rows
    float largest = 0;           ///< magnitude
  };
  void run_part(std::size_t part);
  void pass(std::size_t part, bool keeps);
  void load(std::size_t part);
  void watch(const autograd::Parameter& weight, const tensor::Tensor& x);
  void compress(const nn::ParameterPtr& weight);
  CompressedMatrix compressed(const nn::ParameterPtr& weight, Inputs& inputs);
  void share_out(const std::string& weight, const CompressedMatrix& whole,
                 const std::vector<std::pair<double, double>>& row_errors);
  std::vector<std::pair<double, double>> row_errors(const autograd::Parameter& weight,
                                                    const CompressedMatrix& made, const Inputs& inputs);
  float input_scale(const std::string& weight) const;

  const HuggingFaceLayout& layout_;
  nn::WeightSource& weights_;
  device::Device& device_;
  const CompressedScheme scheme_;
  std::function<void(double, double)> told_;
  std::unique_ptr<tensor::Kernels> kernels_;
  Gpt model_;
  autograd::Tape tape_;
  std::map<std::string, nn::ParameterPtr> linear_;
  std::vector<tensor::Batch> batches_;
  std::vector<tensor::Tensor> states_;  ///< of each batch, what the last part gave
  std::size_t next_part_ = 0;
  std::map<std::string, Inputs> inputs_;  ///< of the part at hand, by weight
  /// A published matrix, whose rows several parameters may have.
  struct Made {
    CompressedMatrix compressed;
    double lost = 0, whole = 0;  ///< of its outputs, squared and summed: their change, and they themselves
  };
  std::map<std::string, Made> made_;  ///< by published name
  std::int64_t unseen_ = 0;
  double passes_ = 0;
};

}  // namespace sherd::models
