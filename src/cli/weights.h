#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "config/config.h"
#include "data/hugging_face/files_beside.h"
#include "data/templates/chat_template.h"
#include "data/tokenizer.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/weights.h"
#include "models/adapters/initial_adapter.h"
#include "models/gpt_config.h"
#include "nn/weight_source.h"

namespace sherd::cli {

// Folders of weights: Hugging Face's (config.json and safetensors) and checkpoints.

/// Whether the folder is one of Hugging Face's transformers.
bool is_hugging_face(const std::string& folder);

/// Whether there is a checkpoint, or a folder of them.
bool holds_checkpoints(const std::string& folder);

/// The configuration of the run that saved a checkpoint, with some keys replaced.
config::Config configuration_of(const engine::CheckpointReader& reader,
                                const std::vector<std::string>& overrides = {});

/// The `model` section of either kind, as text. Throws Error{io}, Error{config} or
/// Error{data} naming what is wrong.
std::string model_section(const std::string& folder);

/// The section training.adapter of PEFT's folder, or of a checkpoint of a run with an adapter, as text.
/// Throws as model_section().
std::string adapter_section(const std::string& folder);

/// The files of --config, with the overrides of --set.
struct ConfigFiles {
  std::vector<std::string> paths, overrides;
  bool resumes = false;  ///< the run's own checkpoints go before what it began from

  /// With further overrides.
  config::Config parse(const std::vector<std::string>& more = {}) const;
  /// Calls `run`, whose errors about the configuration then name keys as the files have them.
  void in_their_words(const std::function<void()>& run) const;
};

/// The weights of either kind, for the model of `options`. A model with an adapter has its own from
/// `adapter.init_from`, a folder of PEFT's or of checkpoints; where that is empty, from the checkpoint at
/// `folder` if it holds them, or as they were drawn, prompts as `prompt_ids` if there are any. From a
/// checkpoint with several prompts, or with p-tuning's network, a model with one prompt takes that of
/// `adapter`'s task.
class Weights {
 public:
  Weights(const std::string& folder, const models::GptConfig& options, device::Device& device,
          const config::Adapter& adapter = {}, std::vector<std::int32_t> prompt_ids = {});
  /// The same model's weights that do not train, alone: nothing is read of the adapter.
  static Weights base_alone(const std::string& folder, const models::GptConfig& options,
                            device::Device& device, const config::Adapter& adapter);
  nn::WeightSource& source() { return *source_; }
  /// Files that came with the weights: companion_files(), or a checkpoint's own.
  engine::ExtraFiles companions() const;
  /// Notes for the user on the files: keys of config.json that have no effect here, and signs that an adapter
  /// belongs to another base.
  const std::vector<std::string>& notes() const { return notes_; }
  /// Whether the model has more ids than the weights.
  bool grew() const { return smaller_ != nullptr; }
  /// Whether the model's adapter is the one that the weights hold, trained before.
  bool continues_adapter() const { return continues_adapter_; }
  /// Layers in a model's head whose parameters the weights do not have: "head_dense".
  std::vector<std::string> begins_anew(const std::vector<nn::ParameterPtr>& parameters) const;
  /// Checks the files of a checkpoint against its manifest: this rank's share of them.
  void verify_share(int rank, int ranks) const;

 private:
  struct BaseAlone {};
  Weights(BaseAlone, const std::string& folder, const models::GptConfig& options, device::Device& device,
          const config::Adapter& adapter);
  void open(const models::GptConfig& options, device::Device& device, const config::Adapter& adapter,
            std::vector<std::int32_t> prompt_ids);
  void grow(const models::GptConfig& there, const models::GptConfig& options, device::Device& device);
  void add_adapter(const config::Adapter& adapter, const models::GptConfig& options, device::Device& device,
                   std::vector<std::int32_t> prompt_ids);
  std::unique_ptr<nn::WeightSource> one_prompt(const engine::CheckpointReader& reader,
                                               const config::Adapter& adapter,
                                               const models::GptConfig& options, device::Device& device,
                                               std::unique_ptr<nn::WeightSource> source);

  std::string folder_;
  bool base_alone_ = false, continues_adapter_ = false;
  std::unique_ptr<engine::CheckpointReader> reader_;  ///< null: Hugging Face's
  std::unique_ptr<nn::WeightSource> smaller_;         ///< what source_ has more ids than; null: none
  std::unique_ptr<nn::WeightSource> source_;
  std::unique_ptr<engine::CheckpointReader> adapter_reader_;
  std::unique_ptr<nn::WeightSource> base_, adapter_;  ///< parts of source_; null: it is of one piece
  std::unique_ptr<models::InitialProducts> products_;
  std::unique_ptr<nn::WeightSource> without_products_;  ///< null: the base is the model's
  std::unique_ptr<nn::WeightSource> prompts_;           ///< all prompts, one of which is taken
  std::vector<std::string> notes_;
};

/// Files of a folder of Hugging Face's that are no weights: config.json, tokenizer and generation settings,
/// by the names under which a checkpoint keeps them, "hugging_face.NAME".
engine::ExtraFiles companion_files(const std::string& folder);
/// The checkpoint's own copy of its tokenizer or, where it has none, what it names. Throws Error{data} where
/// it names none.
std::shared_ptr<const data::Tokenizer> tokenizer_of(const engine::CheckpointReader& reader);
/// The tokens that end a text: the tokenizer's end of a document and, of a model that came with them, those
/// of its generation_config.json, or without one of its config.json.
std::vector<std::int32_t> end_ids_of(const engine::CheckpointReader& reader,
                                     const data::Tokenizer& tokenizer);
/// Settings of the model's generation_config.json that change which token is chosen, by name; those that
/// change nothing are left out.
std::map<std::string, double> sampling_beside(const engine::CheckpointReader& reader);
/// The files that a model came with, which its checkpoints hold. `reader` must outlive it.
data::FilesBeside companions_of(const engine::CheckpointReader& reader);
/// How the model's conversations are written: as those of its data were, else by the template that it came
/// with, else as the tokenizer's tokens tell. Throws Error{config} for a template that cannot be run.
data::ChatTemplate chat_template_of(const engine::CheckpointReader& reader, const data::Tokenizer& tokenizer);
/// The type of the weights there, by their config.json, or where it does not say, by the first of them (as
/// transformers' dtype="auto"); of fp64 fp32.
DType published_dtype(const std::string& folder);
inline constexpr const char* companion_prefix = "hugging_face.";

}  // namespace sherd::cli
