#include <algorithm>
#include <cmath>
#include <filesystem>

#include "base/files.h"
#include "base/log.h"
#include "base/text/excerpt.h"
#include "cli/export/exported.h"
#include "cli/weights.h"
#include "engine/checkpoint/format.h"
#include "models/adapters/adapters.h"
#include "models/adapters/initial_adapter.h"
#include "models/adapters/prompt_weights.h"
#include "models/hub/adapter_names.h"
#include "models/hub/adapter_tables.h"
#include "tensor/formats/stored_format.h"

namespace sherd::cli {
namespace fs = std::filesystem;
namespace {

/// The share that keeping weights in a format may round away, with room.
double most_rounding(StoredFormat format) {
  switch (format) {
    case StoredFormat::compute:
    case StoredFormat::bf16:
      return 0.005;
    case StoredFormat::int8:
      return 0.02;
    case StoredFormat::fp8:
      return 0.05;
    default:
      return 0.2;  // of 4 bits
  }
}

/// The model from whose weights an adapter took a part: --base, or what its run began from, or, where that
/// was a checkpoint of such a run itself, what that one did.
std::string began_from(const Exported& what) {
  if (!what.base.empty()) return what.base;
  if (what.reader.manifest().base) return what.reader.manifest().base->folder;
  std::string folder = what.config.training.init_from;
  for (int runs = 0; runs < 100 && holds_checkpoints(folder); ++runs) {
    const config::Config before =
        configuration_of(engine::CheckpointReader(engine::checkpoint_folder(folder)));
    if (!config::takes_from_base(before.training.adapter.lora.init)) break;
    folder = before.training.init_from;
  }
  return folder;
}

/// The initial products of an adapter that began as parts of the model's weights, computed from these again.
class Begun {
 public:
  /// Throws Error{config} for weights that the checkpoint's do not come from.
  Begun(const Exported& what, nn::WeightSource& weights, device::Device& device)
      : folder_(require_there(began_from(what))),
        base_(folder_, plain(what.options), device),
        products_(base_.source(), what.options, device) {
    if (what.reader.manifest().base)
      compare_files(*what.reader.manifest().base);
    else
      compare(what, weights, device);
  }
  models::InitialProducts& products() { return products_; }

 private:
  static models::GptConfig plain(models::GptConfig options) {
    options.adapter = {};
    return options;
  }
  static std::string require_there(std::string folder) {
    std::error_code error;
    if (!fs::is_directory(folder, error))
      fail(ErrorKind::config, "the adapter began as a part of the weights in '", excerpt(folder, 300),
           "', without which it is written for nobody: there is no such folder now; name that model with "
           "--base");
    return folder;
  }
  [[noreturn]] void another(const std::string& what) const {
    fail(ErrorKind::config, "the weights in '", excerpt(folder_, 300),
         "' are not those from which the adapter took its part: ", what,
         " is another; name the model with --base");
  }
  /// The checkpoint does not hold them, and knows their files.
  void compare_files(const engine::BaseReference& base) const {
    for (const auto& [name, sum] : base.files) {
      std::error_code error;
      const fs::path path = fs::path(folder_) / name;
      const bool there = fs::exists(path, error);
      if (there ? engine::checksum_file(path) != sum : name.ends_with(".safetensors")) another(name);
    }
  }
  void compare(const Exported& what, nn::WeightSource& weights, device::Device& device) {
    models::WithoutProducts expected(products_);
    models::Gpt model(what.options);
    model.assign_names();
    for (const nn::ParameterPtr& parameter : model.parameters()) {
      const std::string layer = parameter->name.substr(0, parameter->name.rfind('.'));
      if (!parameter->name.ends_with(".weight") || !products_.of(layer)) continue;
      const std::int64_t count = std::min<std::int64_t>(parameter->numel(), 1 << 16);
      const auto read = [&](nn::WeightSource& from) {
        tensor::Tensor out = tensor::Tensor::empty(device, {count}, DType::f32);
        from.read(parameter->name, tensor::Slice::whole(parameter->shape), 0, out);
        return out;
      };
      const tensor::Tensor there = read(expected), here = read(weights);
      const StoredFormat format = what.options.adapter.stored_base();
      const bool kept = format == StoredFormat::compute ||
                        tensor::round_to_format(
                            format, {there.data<float>(), static_cast<std::size_t>(count)}, device.arena());
      double apart = 0, squares = 0;
      for (std::int64_t i = 0; i < count; ++i) {
        const double value = there.data<float>()[i];
        apart += std::pow(value - here.data<float>()[i], 2), squares += value * value;
      }
      // Tensor ranks may have cut blocks otherwise.
      const auto ranks = what.reader.manifest().grid.find("tensor");
      const bool same_blocks = ranks == what.reader.manifest().grid.end() || ranks->second == 1;
      const double most = same_blocks ? 0.005 : most_rounding(format);
      if (!kept || !(apart <= most * most * squares)) another(parameter->name);
    }
  }

  std::string folder_;
  Weights base_;
  models::InitialProducts products_;
};

}  // namespace

void with_published_adapter(const Exported& what, device::Device& device,
                            const std::function<void(const models::Gpt& model, nn::WeightSource& weights,
                                                     const config::Adapter& keys)>& write) {
  const config::Adapter& adapter = what.config.training.adapter;
  if (adapter.type == config::AdapterType::none)
    fail(ErrorKind::config, "--adapter: checkpoint ", what.reader.folder().string(),
         " is of a run without training.adapter; without --adapter its model is exported");
  models::Gpt model(what.options);
  model.assign_names();
  engine::CheckpointWeights weights(what.reader, device);
  weights.check(model.parameters());
  if (config::takes_from_base(adapter.lora.init)) {
    Begun begun(what, weights, device);
    models::PlainLora plain(weights, begun.products(), device);
    models::GptConfig options = what.options;
    options.adapter = models::PlainLora::keys(options.adapter);
    models::Gpt doubled(options);
    doubled.assign_names();
    log_info(
        "LoRA of twice the rank, beside the weights as the model has them, computes the same",
        adapter.stored_base() == StoredFormat::compute
            ? ""
            : " but for what base_format rounds away, which only the merged model keeps: load these in 16 "
              "bits");
    return write(doubled, plain, models::PlainLora::keys(adapter));
  }
  if (!adapter.has_prompt()) return write(model, weights, adapter);
  models::Gpt one(models::TaskPrompt::config(what.options));
  one.assign_names();
  models::TaskPrompt prompt(weights, what.options, what.prompt, device);
  write(one, prompt, adapter);
}

std::size_t write_adapter(const Exported& what, const fs::path& folder, device::Device& device) {
  models::ExportOptions files = what.files;
  files.stem = models::adapter_stem(what.config.training.adapter.type);
  std::size_t shards = 0;
  with_published_adapter(
      what, device, [&](const models::Gpt& of, nn::WeightSource& from, const config::Adapter& keys) {
        const auto parameters = of.parameters();
        if (keys.lora.target_parameters.empty() &&
            std::any_of(parameters.begin(), parameters.end(), [](const nn::ParameterPtr& p) {
              return models::is_adapter(p->name) && models::is_of_expert(p->name);
            }))
          log_warning(
              "these are adapters of experts' modules, which today's PEFT reads of some models alone "
              "(docs/adapters.md, \"Experts\"): for PEFT train with training.adapter.target_parameters, or "
              "export the "
              "merged model");
        const models::GptConfig& options = keys.has_prompt() ? what.options : of.config();
        write_file_atomically(folder / "adapter_config.json",
                              models::adapter_config(keys, options, what.config.training.init_from));
        shards = models::export_to_hugging_face(
            folder, models::HuggingFaceLayout(of.config()).of_adapter(),
            models::adapter_parameters(of.parameters(), models::saved_parameters(of.config())), from, device,
            files);
      });
  return shards;
}

}  // namespace sherd::cli
