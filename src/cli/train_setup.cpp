#include "cli/train_setup.h"

#include <algorithm>

#include "base/log.h"
#include "base/random.h"
#include "cli/inference/inference.h"
#include "cli/referenced_base.h"
#include "cli/weights.h"
#include "comm/gather.h"
#include "engine/checkpoint/format.h"
#include "engine/preference/reference_copy.h"
#include "engine/setup/process_grid.h"
#include "models/adapters/prompt_weights.h"
#include "models/gpt.h"

namespace sherd::cli {

TrainSetup::TrainSetup(DistributedPtr dist, const config::Config& config,
                       std::shared_ptr<const engine::TokenData> data)
    : dist_(std::move(dist)), data_(std::move(data)), shape_(models::gpt_config(config, data_->vocab_size)) {
  groups_ = make_groups(dist_, config);
  engine_ =
      std::make_unique<Engine>(dist_, std::make_shared<models::Gpt>(shape_, layout_of(*groups_, config)),
                               config, nullptr, nullptr, groups_);
  loader_ = data_->training_loader(engine_->loader_rank(), engine_->device());
  engine_->set_training_data(*loader_, data_);
  if (!config.learns_preferences()) return;
  if (engine_->config().reference() == config::Reference::copy) make_reference();
  preferences_ = std::make_unique<engine::PreferenceRun>(*engine_, data_, reference_.get());
}

/// A second model, whose weights are those that training begins from, and stay so.
void TrainSetup::make_reference() {
  const config::Config& config = engine_->config();
  const auto model = std::make_shared<models::Gpt>(shape_, layout_of(*groups_, config));
  reference_ = engine::make_reference_copy(*engine_, model, groups_);
  const std::string& folder = config.training.init_from;
  if (folder.empty()) return;  // the same were drawn
  Weights weights(folder, shape_, reference_->device(), config.training.adapter, prompt_ids());
  engine::load_reference_copy(*reference_, *engine_, weights.source());
}

const engine::StepReport& TrainSetup::train_step() {
  const std::function<tensor::Batch()> next = [this] { return loader_->next(); };
  if (!preferences_) return engine_->train_batch(next);
  const engine::StepReport& report = engine_->train_batch(preferences_->begin_step(next));
  preferences_->end_step();
  return report;
}

void TrainSetup::begin() {
  const std::string& folder = engine_->config().training.init_from;
  if (folder.empty())
    require_base();
  else
    begin_from(folder);
}

/// An adapter means nothing without the model that it belongs to.
void TrainSetup::require_base() const {
  const config::Adapter& adapter = engine_->config().training.adapter;
  if (!adapter.init_from.empty())
    fail(ErrorKind::config, "training.adapter.init_from names an adapter, '", adapter.init_from,
         "', and nothing names the model that it belongs to: give its folder as training.init_from");
  if (adapter.prompt.init != config::PromptInit::random)
    fail(
        ErrorKind::config,
        "training.adapter.init is of vectors of the model's own table, and nothing names the model: give its "
        "folder as training.init_from, or \"init\": \"random\"");
  if (adapter.type != config::AdapterType::none && speaks())
    log_warning(
        "training.adapter trains beside weights that stay as they are, and these are drawn by chance: "
        "give training.init_from");
}

/// Warns where the weights were trained on ids of another tokenizer, to which these mean nothing.
void TrainSetup::warn_of_other_tokenizer(const engine::ExtraFiles& companions) const {
  const std::string prefix = companion_prefix;
  const auto came = companions.find(prefix + engine::tokenizer_file_of(data_->tokenizer));
  const bool any = companions.contains(prefix + engine::tokenizer_file) ||
                   companions.contains(prefix + engine::tokenizer_json_file) ||
                   companions.contains(prefix + "vocab.json");
  const bool other = came != companions.end() && !data_->tokenizer_model.empty()
                         ? came->second != data_->tokenizer_model
                         : any;
  if (other && !data_->tokenizer.empty())
    log_warning("the weights came with a tokenizer of their own, and the data were made with '",
                data_->tokenizer, "': ids will mean other text than the weights were trained on");
}

/// The ids whose vectors all prompts' vectors are at first; none: they are drawn.
std::vector<std::int32_t> TrainSetup::prompt_ids() const {
  const config::PromptKeys& prompt = engine_->config().training.adapter.prompt;
  std::vector<std::int32_t> out;
  if (prompt.init == config::PromptInit::sample_vocab) {
    const RandomKey key{engine_->config().training.seed, stable_hash("the prompt's ids")};
    for (std::int64_t i = 0; i < prompt.prompts() * prompt.virtual_tokens; ++i) {
      const double drawn =
          uniform_at(key, static_cast<std::uint64_t>(i)) * static_cast<double>(shape_.vocab_size);
      out.push_back(static_cast<std::int32_t>(
          std::min<std::int64_t>(static_cast<std::int64_t>(drawn), shape_.vocab_size - 1)));
    }
  }
  if (prompt.init != config::PromptInit::text) return out;
  if (data_->tokenizer.empty())
    fail(
        ErrorKind::config,
        "training.adapter.init_text is tokenised as the data were, and nothing says how: set data.tokenizer");
  const auto tokenizer = data::make_tokenizer(data_->tokenizer);
  for (std::int64_t i = 0; i < prompt.prompts(); ++i) {
    const std::string own = prompt.tasks.empty() ? "" : prompt.tasks[static_cast<std::size_t>(i)].init_text;
    const std::vector<std::int32_t> ids =
        models::repeated(prompt_of(*tokenizer, own.empty() ? prompt.init_text : own), prompt.virtual_tokens);
    out.insert(out.end(), ids.begin(), ids.end());
  }
  return out;
}

/// Checkpoints name the base's files. Ranks share the work of finding their checksums.
void TrainSetup::refer_to(const std::string& folder) {
  engine::BaseReference base = base_files(folder);
  std::vector<std::pair<std::string, FileChecksum*>> files;
  for (auto& [name, sum] : base.files)
    if (sum.crc32c == 0) files.emplace_back(name, &sum);
  const auto ranks = static_cast<std::size_t>(dist_->world_size()),
             rank = static_cast<std::size_t>(dist_->rank());
  for (std::size_t first = 0; first < files.size(); first += ranks) {
    const auto sums = comm::gather_results(dist_->world(), "checksums of the base", [&] {
      const std::size_t mine = first + rank;
      return mine < files.size()
                 ? engine::checksum_file(std::filesystem::path(base.folder) / files[mine].first)
                 : FileChecksum{};
    });
    for (std::size_t i = 0; i < ranks && first + i < files.size(); ++i) *files[first + i].second = sums[i];
  }
  engine_->set_checkpoint_base(std::move(base));
}

void TrainSetup::begin_from(const std::string& folder) {
  const config::Config& config = engine_->config();
  Weights weights(folder, shape_, engine_->device(), config.training.adapter, prompt_ids());
  comm::gather_results(dist_->world(), "weights verified", [&] {
    weights.verify_share(dist_->rank(), dist_->world_size());
    return true;
  });
  engine_->load_weights(weights.source());
  if (config.training.adapter.type != config::AdapterType::none && !config.training.adapter.save_base)
    refer_to(folder);
  if (config.reference() == config::Reference::adapter && weights.continues_adapter() &&
      config.training.preference.reference == config::Reference::automatic)
    fail(ErrorKind::config, "the adapter goes on from the one in '", folder,
         "', and the model without it is not the one that training begins from: set "
         "training.preference.reference to \"precomputed\" (the model as it begins), or to \"adapter\" (the "
         "model without its adapter)");
  if (speaks()) engine_->set_checkpoint_files(weights.companions());
  if (!speaks()) return;
  log_info("weights from ", folder);
  for (const std::string& part : weights.begins_anew(engine_->module().parameters()))
    log_info(part, " is not among them, and begins anew");
  if (!weights.grew()) warn_of_other_tokenizer(weights.companions());
  const auto& indices = config.training.adapter.lora.token_indices;
  if (!shape_.tied() && indices.size() == 1 && indices[0].first.empty())
    log_info(
        "training.adapter.trainable_token_indices are of the table of tokens; the head's rows are another "
        "table's, and are trained where it is named, too");
  for (const std::string& note : weights.notes()) log_info(note);
}

}  // namespace sherd::cli
