#include "engine/preference/reference_copy.h"

#include <algorithm>
#include <filesystem>
#include <set>
#include <utility>

namespace sherd::engine {
namespace {

/// Stores of one rank do not share a folder.
void put_apart(std::string& nvme_path, bool exists) {
  if (nvme_path.empty()) return;
  nvme_path = (std::filesystem::path(nvme_path) / "reference").string();
  std::error_code error;
  if (exists) std::filesystem::create_directories(nvme_path, error);  // opening the store tells what is wrong
}

/// Weights in which the bf16 parameters of `trained` are rounded as from fp32 masters.
class AsMasters final : public nn::ForwardedWeights {
 public:
  AsMasters(nn::WeightSource& source, std::set<std::string> trained, device::Device& device)
      : ForwardedWeights(source), trained_(std::move(trained)), device_(device) {}
  void read(const std::string& name, const tensor::Slice& slice, std::int64_t begin,
            const tensor::Tensor& to) override {
    if (to.dtype() != DType::bf16 || !trained_.contains(name)) return source_.read(name, slice, begin, to);
    const auto masters = tensor::Tensor::on_host(device_, {to.numel()}, DType::f32);
    source_.read(name, slice, begin, masters);
    std::transform(masters.data<float>(), masters.data<float>() + masters.numel(), to.data<bf16>(),
                   round_master_to_bf16);
  }

 private:
  std::set<std::string> trained_;
  device::Device& device_;
};

}  // namespace

std::unique_ptr<Engine> make_reference_copy(Engine& first, std::shared_ptr<nn::Model> model,
                                            std::shared_ptr<comm::ProcessGroups> groups) {
  config::Config config = first.config();
  config.notes.clear();
  config.dump_state = false;
  const bool real = first.device().kind() != device::Kind::meta;
  put_apart(config.zero.offload_param.nvme_path, real);
  put_apart(config.zero.offload_optimizer.nvme_path, real);
  model->freeze();
  return std::make_unique<Engine>(first.shared_dist(), std::move(model), config, first.shared_device(),
                                  nullptr, std::move(groups));
}

void load_reference_copy(Engine& copy, Engine& first, nn::WeightSource& source) {
  std::set<std::string> trained;
  for (const nn::ParameterPtr& parameter : first.module().parameters())
    if (parameter->trainable) trained.insert(parameter->name);
  AsMasters rounded(source, std::move(trained), copy.device());
  copy.load_weights(rounded);
}

}  // namespace sherd::engine
