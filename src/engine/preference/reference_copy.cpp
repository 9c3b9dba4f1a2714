#include "engine/preference/reference_copy.h"

#include <filesystem>
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

}  // namespace sherd::engine
