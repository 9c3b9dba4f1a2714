#include "engine/checkpoint/same_run.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <tuple>

#include "base/crc32c.h"
#include "base/text/excerpt.h"
#include "data/tokenizer.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/setup/process_grid.h"
#include "engine/setup/pruned_layers.h"

namespace sherd::engine {

DataRecord DataRecord::of(const TokenData& tokens) {
  DataRecord out;
  out.tokenizer = tokens.tokenizer;
  out.vocab_size = tokens.vocab_size;
  out.tokens = tokens.tokens();
  out.sequences = tokens.sequences();
  out.fingerprint = tokens.fingerprint;
  out.chat_template = tokens.chat_template;
  return out;
}

const char* tokenizer_file_of(const std::string& spec) {
  return data::kind_of_tokenizer(spec) == "hf" ? tokenizer_json_file : tokenizer_file;
}

std::string Manifest::tokenizer_copy() const {
  for (const char* name : {tokenizer_file, tokenizer_json_file})
    if (files.contains(name)) return name;
  return {};
}

namespace {

using data::kind_of_tokenizer;

std::string described(const DataRecord& data, const std::optional<FileChecksum>& model) {
  return cat(data.tokenizer.empty() ? "an unknown one" : cat("'", data.tokenizer, "'"), " of ",
             data.vocab_size, " ids",
             model ? cat(" (a model of ", model->bytes, " bytes with CRC-32C ", model->crc32c, ")") : "");
}

/// For a shell: tokens that end documents have characters of its own.
std::string quoted(const std::string& spec) {
  return spec.starts_with("hf:") ? "'" + spec + "'" : spec;
}

std::optional<FileChecksum> model_of(const Manifest& manifest) {
  const auto copy = manifest.files.find(manifest.tokenizer_copy());
  return copy == manifest.files.end() ? std::nullopt : std::optional(copy->second);
}

std::optional<FileChecksum> model_of(const TokenData& tokens) {
  const std::string& bytes = tokens.tokenizer_model;
  if (bytes.empty()) return std::nullopt;
  return FileChecksum{bytes.size(), crc32c(bytes.data(), bytes.size())};
}

}  // namespace

void require_same_tokenizer(const CheckpointReader& reader, const TokenData& tokens) {
  const DataRecord &saved = reader.manifest().data, here = DataRecord::of(tokens);
  const std::optional<FileChecksum> saved_model = model_of(reader.manifest()), model = model_of(tokens);
  const bool other_size = saved.vocab_size > 0 && saved.vocab_size != here.vocab_size;
  const bool both_named = !saved.tokenizer.empty() && !here.tokenizer.empty();
  const bool other_kind =
      both_named && kind_of_tokenizer(saved.tokenizer) != kind_of_tokenizer(here.tokenizer);
  if (!other_size && !other_kind && !(saved_model && model && *saved_model != *model)) return;
  const std::string copy = (reader.folder() / reader.manifest().tokenizer_copy()).string(),
                    spec = data::with_model_file(saved.tokenizer, copy);
  fail(ErrorKind::data, "checkpoint ", reader.folder().string(), " was trained on tokens of ",
       described(saved, saved_model), ", and the data here, ", tokens.name(), ", are tokens of ",
       described(here, model), ": set data.path to tokens of the checkpoint's tokenizer",
       saved_model ? cat(" (`sherd prepare --tokenizer ", quoted(spec), "` makes them)") : "",
       ", or train a new model into another folder");
}

void require_same_prompts(const CheckpointReader& reader, const config::Adapter& here) {
  if (!here.has_prompt()) return;
  const config::Adapter saved =
      config::parse_text(reader.manifest().config, "the checkpoint's configuration").training.adapter;
  if (!saved.has_prompt()) return;  // shapes and names tell
  if (here.prompt.virtual_tokens != saved.prompt.virtual_tokens)
    fail(ErrorKind::config, "training.adapter.virtual_tokens is ", here.prompt.virtual_tokens,
         ", and the prompts in checkpoint ", reader.folder().string(), " have ", saved.prompt.virtual_tokens);
  if (here.prompt.task_names() != saved.prompt.task_names())
    fail(ErrorKind::config, "training.adapter.tasks are ", excerpt(here.prompt.task_names(), 200),
         ", and checkpoint ", reader.folder().string(), " has prompts for ",
         excerpt(saved.prompt.task_names(), 200), ": name these, in this order");
}

void require_same_adapter(const config::Adapter& saved, const config::Adapter& here,
                          const std::string& where) {
  if (saved.type != here.type) return;  // names tell
  const config::LoraKeys &there = saved.lora, &own = here.lora;
  if (there.token_indices != own.token_indices)
    fail(ErrorKind::config, "training.adapter.trainable_token_indices are not those in ", where,
         ", whose rows would be other tokens': give the same, in the same order, or leave the key out");
  const bool takes = config::takes_from_base(there.init) || config::takes_from_base(own.init);
  if (takes && there.init != own.init)
    fail(ErrorKind::config, "training.adapter.init_lora_weights is not that in ", where,
         ", whose products began otherwise: give the same, or leave the key out");
  if (takes && (there.alpha != own.alpha || there.rslora != own.rslora || there.rank != own.rank ||
                there.alpha_pattern != own.alpha_pattern || there.rank_pattern != own.rank_pattern))
    fail(ErrorKind::config, "training.adapter: rank, alpha or use_rslora are not those in ", where,
         ", by which a part of the weights was taken (init_lora_weights): give the same, or leave them out");
}

void require_same_adapter(const CheckpointReader& reader, const config::Adapter& here) {
  require_same_adapter(
      config::parse_text(reader.manifest().config, "the checkpoint's configuration").training.adapter, here,
      cat("checkpoint ", reader.folder().string()));
}

void require_same_pruning(const CheckpointReader& reader, const nn::Module& model,
                          const config::Sparsity& here) {
  config::Sparsity saved;
  try {
    saved = config::parse_text(reader.manifest().config, "the checkpoint's configuration").training.sparsity;
  } catch (const Error&) {
    return;  // of another version: changes_since() says so
  }
  if (saved == here) return;
  const auto names_of = [&](const config::Sparsity& sparsity) {
    std::set<std::string> out;
    for (const auto& [name, weight] : weights_to_prune(model, sparsity)) out.insert(name);
    return out;
  };
  const std::set<std::string> there = names_of(saved), own = names_of(here);
  if (there == own) return;
  const std::string where = cat("checkpoint ", reader.folder().string());
  if (there.empty())
    fail(ErrorKind::config, where, " is of a run without training.sparsity, and to go on from it prunes ",
         "nothing: begin a run from its weights (training.init_from, into another save_dir), which prunes "
         "them, or leave out the key");
  std::vector<std::string> other;
  std::set_symmetric_difference(there.begin(), there.end(), own.begin(), own.end(),
                                std::back_inserter(other));
  const bool lost = there.contains(other.front());
  fail(ErrorKind::config, "training.sparsity is not that of ", where, ", where ", other.front(),
       lost ? " is pruned: it would not stay so" : " is not pruned: to go on does not prune it",
       other.size() > 1 ? cat(", nor would ", other.size() - 1, " more weights be as there") : "",
       ". Set the section as there, or begin a run from its weights (training.init_from, into another "
       "save_dir)");
}

namespace {

/// The keys by which what is trained goes. The tokenizer and the dataset are compared by what they hold, and
/// the log tells of tensor, context and pipeline ranks with the number of ranks.
std::map<std::string, std::string> effective_keys(const config::Config& config) {
  std::map<std::string, std::string> out;
  for (const config::Setting& setting : config::settings(config))
    if (setting.concerns == config::Concerns::training) out[setting.key] = setting.value;
  return out;
}

void add_changed_keys(const config::Config& saved, const config::Config& config,
                      std::vector<std::string>& out) {
  const auto there = effective_keys(saved), here = effective_keys(config);
  const auto value_in = [](const auto& keys, const std::string& key) {
    const auto found = keys.find(key);
    return found == keys.end() ? "not set" : found->second;
  };
  for (const auto& [key, value] : there)
    if (value_in(here, key) != value)
      out.push_back(cat(key, " was ", value, " and is ", value_in(here, key)));
  for (const auto& [key, value] : here)
    if (!there.contains(key)) out.push_back(cat(key, " was not set and is ", value));
}

}  // namespace

std::string layout_change(const Manifest& saved, const comm::Grid& grid) {
  using comm::Axis;
  const auto size_there = [&](Axis axis) {
    const auto size = saved.grid.find(std::string(comm::name_of(axis)));
    return size == saved.grid.end() ? std::int64_t{1} : size->second;
  };
  const auto differs = [&](Axis axis) { return size_there(axis) != grid.size(axis); };
  const std::int64_t tensor = size_there(Axis::tensor), context = size_there(Axis::context),
                     pipeline = size_there(Axis::pipeline), expert = size_there(Axis::expert);
  const bool same =
      !differs(Axis::tensor) && !differs(Axis::context) && !differs(Axis::pipeline) && !differs(Axis::expert);
  if (same && saved.world_size == grid.ranks()) return "";
  // Sizes of the layout where ranks share a model on one of the two sides.
  const bool only_data = same && tensor * context * pipeline * expert == 1;
  const std::string there =
      describe(tensor, context, saved.world_size / (tensor * context * pipeline), pipeline, expert);
  return cat(counted(saved.world_size, "rank"), only_data ? "" : cat(" (", there, ")"),
             " wrote it, and it goes on with ", grid.ranks(),
             only_data ? "" : cat(" (", describe(grid), ")"));
}

std::vector<std::string> changes_since(const CheckpointReader& reader, const config::Config& config,
                                       const TokenData* tokens) {
  std::vector<std::string> out;
  const DataRecord& saved = reader.manifest().data;
  if (tokens && saved.tokens > 0) {
    const DataRecord here = DataRecord::of(*tokens);
    if (std::tie(saved.tokens, saved.sequences, saved.fingerprint) !=
        std::tie(here.tokens, here.sequences, here.fingerprint))
      out.push_back(cat("the dataset had ", saved.tokens, " tokens in ", saved.sequences,
                        " sequences (fingerprint ", saved.fingerprint, ") and has ", here.tokens, " in ",
                        here.sequences, " (", here.fingerprint, ")"));
  }
  if (tokens && !data::model_file_of(saved.tokenizer).empty() &&
      !(model_of(reader.manifest()) && model_of(*tokens)))
    out.push_back(cat("whether its tokenizer, '", saved.tokenizer, "', is '", tokens->tokenizer,
                      "' cannot be told, as not both model files are there"));
  try {
    add_changed_keys(config::parse_text(reader.manifest().config, "the checkpoint's configuration"), config,
                     out);
  } catch (const Error& error) {
    out.push_back(
        cat("its configuration cannot be compared with this one: ", error.what()));  // of another version
  }
  return out;
}

namespace {

using Keys = std::map<std::string, std::string>;

std::string text_of(const std::vector<std::int64_t>& shape) {
  return tensor::Shape{std::span<const std::int64_t>(shape)}.str();
}
const std::string& text_of(const std::string& value) {
  return value;
}

/// Lists how two maps differ, an entry for each name, in their order.
template <class Map>
std::vector<std::string> differences(const Map& there, const Map& here) {
  std::vector<std::string> out;
  for (const auto& [name, value] : there) {
    const auto found = here.find(name);
    if (found == here.end())
      out.push_back(cat(name, " is only there (", text_of(value), ")"));
    else if (found->second != value)
      out.push_back(cat(name, " is ", text_of(value), " there and ", text_of(found->second), " here"));
  }
  for (const auto& [name, value] : here)
    if (!there.contains(name)) out.push_back(cat(name, " is only here (", text_of(value), ")"));
  return out;
}

/// The first few, and how many more.
std::string listed(const std::vector<std::string>& all) {
  constexpr std::size_t most = 4;
  const std::string out = joined_text(std::span(all).first(std::min(most, all.size())));
  return all.size() > most ? cat(out, ", and ", all.size() - most, " more") : out;
}

}  // namespace

ParameterShapes shapes_of(const std::vector<nn::ParameterPtr>& parameters) {
  ParameterShapes out;
  for (const nn::ParameterPtr& parameter : parameters) {
    const tensor::Slice slice = parameter->logical_slice();
    const auto dims = slice.logical().dims();
    out[parameter->name] = {dims.begin(), dims.end()};
  }
  return out;
}

namespace {

/// The keys that decide which parameters there are.
Keys model_keys(const config::Config& config) {
  Keys out;
  for (const config::Setting& setting : config::settings(config))
    if (setting.decides_parameters) out[setting.key] = setting.value;
  return out;
}

/// None where one of the two configurations has none, or the saved one cannot be read.
std::vector<std::string> differing_keys(const Manifest& manifest, const config::Config* config) {
  if (!config || !config->model) return {};
  try {
    const config::Config saved = config::parse_text(manifest.config, "the checkpoint's configuration");
    return saved.model ? differences(model_keys(saved), model_keys(*config)) : std::vector<std::string>();
  } catch (const Error&) {
    return {};  // of another version; the shapes tell
  }
}

}  // namespace

void require_same_model(const CheckpointReader& reader, const ParameterShapes& shapes,
                        const config::Config* config, const std::function<bool(const std::string&)>& part) {
  ParameterShapes there = reader.manifest().shapes;
  if (part) std::erase_if(there, [&](const auto& shape) { return !part(shape.first); });
  const std::vector<std::string> parameters = differences(there, shapes);
  if (parameters.empty()) return;
  const std::vector<std::string> keys = differing_keys(reader.manifest(), config);
  fail(ErrorKind::data, "checkpoint ", reader.folder().string(),
       " holds another model: ", keys.empty() ? "" : cat(listed(keys), "; "), "of the parameters ",
       listed(parameters),
       config
           ? cat(". Go on with the model that was saved (", reader.folder().string(),
                 "/manifest.json has its configuration), or train the new one into another folder")
           : std::string(". Take weights of this model, or leave out the keys of `model` that say otherwise: "
                         "they are the weights' own"));
}

}  // namespace sherd::engine
