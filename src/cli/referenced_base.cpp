#include "cli/referenced_base.h"

#include <algorithm>

#include "base/arena.h"
#include "cli/weights.h"
#include "models/gpt.h"

namespace sherd::cli {
namespace fs = std::filesystem;

engine::BaseReference base_files(const std::string& folder) {
  fs::path place = fs::absolute(folder).lexically_normal();
  engine::BaseReference out;
  if (!is_hugging_face(folder)) {
    const engine::CheckpointReader reader(place = engine::checkpoint_folder(place));
    out.files = reader.manifest().files;
    out.files["manifest.json"] = {};
  } else {
    for (const auto& entry : fs::directory_iterator(place)) {
      const std::string name = entry.path().filename().string();
      if (entry.is_regular_file() && !name.starts_with('.') &&
          (name == "config.json" || name.ends_with(".safetensors") ||
           name.ends_with(".safetensors.index.json")))
        out.files[name] = {};
    }
  }
  out.folder = place.string();
  for (auto& [name, sum] : out.files)
    if (sum.bytes == 0) sum.bytes = fs::file_size(place / name);
  return out;
}

engine::OpenedBase open_base(const engine::CheckpointReader& reader) {
  struct Opened {
    std::shared_ptr<device::Device> processor;
    Weights weights;
  };
  const config::Config config = configuration_of(reader);
  const models::GptConfig options = models::gpt_config(config, reader.manifest().data.vocab_size);
  // Each rank of a run opens one.
  const int threads = std::max(1, available_cores() / std::max(1, reader.manifest().world_size));
  engine::OpenedBase out{device::make_cpu_device(threads), nullptr};
  const auto opened = std::make_shared<Opened>(
      Opened{out.processor, Weights::base_alone(reader.manifest().base.value().folder, options,
                                                *out.processor, config.training.adapter)});
  out.weights = std::shared_ptr<nn::WeightSource>(opened, &opened->weights.source());
  models::Gpt model(options);
  model.assign_names();
  for (const nn::ParameterPtr& parameter : model.parameters())
    if (!parameter->trainable && parameter->stored_as != StoredFormat::compute)
      out.formats[parameter->name] = parameter->stored_as;
  return out;
}

}  // namespace sherd::cli
