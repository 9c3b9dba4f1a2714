#pragma once

#include "config/config.h"
#include "tensor/tensor.h"

namespace sherd::engine {

/// What the mean loss of a micro-batch weighs among those of a step, all ranks' together: its share of tokens
/// that are targets (labels but -100), of train_micro_batch_size_per_gpu sequences whole of them. So a step is
/// the mean over all targets of its global batch, however they lie in micro-batches; losses that a model adds
/// to its own, as routers' balance, weigh alike.
///
/// The batch says how many there are: "target_tokens", int32 [1] that the processor reads, as data::TokenLoader
/// has it. 1 without that, without a `model` section, and with `training.loss_average: micro_batches`,
/// DeepSpeed's mean of means.
double loss_weight(const config::Config& config, device::Device& device, const tensor::Batch& batch);

}  // namespace sherd::engine
