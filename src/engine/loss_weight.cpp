#include "engine/loss_weight.h"

namespace sherd::engine {

double loss_weight(const config::Config& config, device::Device& device, const tensor::Batch& batch) {
  const auto targets = batch.find("target_tokens");
  if (targets == batch.end() || !config.model || device.kind() == device::Kind::meta ||
      config.training.loss_average == config::LossAverage::micro_batches)
    return 1;
  return *targets->second.data<std::int32_t>() /
         (static_cast<double>(config.batch.micro_batch_size) * static_cast<double>(config.model->seq_length));
}

}  // namespace sherd::engine
