#pragma once

#include <string>
#include <vector>

#include "engine/engine.h"

namespace sherd::engine {

/// The errors of one linear layer in FP8, in the mean of some micro-batches and of all ranks. Experts of a
/// block count as one layer, named with * for their number.
struct Fp8LayerErrors {
  std::string layer;
  /// ‖in FP8 − in bf16‖ / ‖in bf16‖ of its products, from the same operands: its outputs, and the gradients
  /// of its inputs and of its weight. NaN where one never ran.
  double output = 0, input_gradient = 0, weight_gradient = 0;
  // Where this layer alone is in FP8:
  double gradient = 0;  ///< ‖change of all gradients‖ / ‖all gradients‖
  double loss = 0;      ///< how far the loss moves, in nats
};

struct Fp8Bounds {
  double error = 0.1;      ///< of a layer's products
  double gradient = 0.15;  ///< of all gradients, by one layer
  double loss = 0.01;      ///< nats: of one layer alone, and of all that are left in FP8 together

  bool hold(const Fp8LayerErrors& layer) const;
};

struct Fp8Report {
  double loss_in_bf16 = 0, loss_in_fp8 = 0;
  double loss_with_excluded = 0;  ///< where what is excluded stays in bf16
  std::vector<Fp8LayerErrors> layers;
  /// Layers to exclude so that all bounds hold: those beyond one, and those that move the loss most until all
  /// together keep it. Patterns of fp8.exclude.
  std::vector<std::string> exclude;
};

/// Runs `batches` (micro-batches of this rank, as many on all) forward and backward, in FP8 and in bf16, and
/// changes no weight. To be called between steps; leaves train() mode. The engine trains with fp8.enabled,
/// without fp8.gather, whose weights are not exact, and without a pipeline: else Error{config}. Collective.
Fp8Report measure_fp8(Engine& engine, const std::vector<tensor::Batch>& batches);

/// The report as a table, and what to do.
std::string fp8_table(const Fp8Report& report, const Fp8Bounds& bounds);

}  // namespace sherd::engine
