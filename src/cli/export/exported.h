#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <string>

#include "cli/export/few_bits.h"
#include "engine/checkpoint/checkpoint.h"
#include "models/gguf/gguf_blocks.h"
#include "models/gpt.h"
#include "models/hub/hugging_face_weights.h"

namespace sherd::cli {

/// The model that is exported, and how.
struct Exported {
  const engine::CheckpointReader& reader;
  const config::Config& config;
  models::GptConfig options;
  models::ExportOptions files;
  std::int64_t prompt = 0;                           ///< which one of several
  FewBits few_bits = {};                             ///< how linear layers' weights are written
  double error = 0;                                  ///< norm of what that rounded away, over the weights'
  std::vector<models::CompressedLayer> layers = {};  ///< of --quantize
  std::optional<models::GgufType> gguf = {};         ///< a GGUF file of that type; nothing: a folder
  std::string base = {};                             ///< --base
};

/// Gives `write` the run's adapter as it is published: a model, its weights, and the adapter's keys. One that
/// began as a part of the weights comes as LoRA of twice the rank beside the weights as the model has them.
/// Throws Error{config} for a run without one.
void with_published_adapter(const Exported& what, device::Device& device,
                            const std::function<void(const models::Gpt& model, nn::WeightSource& weights,
                                                     const config::Adapter& keys)>& write);

/// Writes the adapter alone, as PEFT or AdapterHub has it. Returns the number of files of weights.
std::size_t write_adapter(const Exported& what, const std::filesystem::path& folder, device::Device& device);

/// Writes the model, into which an adapter is merged, or the adapter alone, as the GGUF file of that name.
/// Returns its bytes.
std::uint64_t write_gguf(const Exported& what, bool adapter, const std::filesystem::path& folder,
                         const std::string& name, device::Device& device);

}  // namespace sherd::cli
