#include "cli/inference/exported_tokenizer.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/files.h"
#include "base/log.h"
#include "cli/weights.h"
#include "data/hugging_face/tokenizer.h"
#include "data/templates/chat_template.h"

namespace sherd::cli {
namespace fs = std::filesystem;
namespace {

using nlohmann::ordered_json;

ordered_json object_of(const fs::path& path) {
  if (!fs::exists(path)) return ordered_json::object();
  const auto object = ordered_json::parse(read_file(path), nullptr, /*allow_exceptions=*/false);
  return object.is_object() ? object : ordered_json::object();
}

void write(const fs::path& path, const ordered_json& object) {
  write_file_atomically(path, object.dump(2) + "\n");
}

/// The token in front of a text is the run's choice, where the file may have another.
void set_begin(const fs::path& path, const data::HuggingFaceSpec& spec, std::optional<std::int32_t> id) {
  const std::string begin = spec.begin.value_or("");
  const data::HuggingFaceSpec of_file{path.string(), spec.end, {}};
  if (data::make_tokenizer(of_file.text())->begin_of_document() == id) return;
  ordered_json file = object_of(path);
  const ordered_json text{{"Sequence", {{"id", "A"}, {"type_id", 0}}}},
      token{{"SpecialToken", {{"id", begin}, {"type_id", 0}}}};
  file["post_processor"] = nullptr;
  if (id) {
    ordered_json second = text, second_token = token;
    second["Sequence"]["id"] = "B", second["Sequence"]["type_id"] = 1;
    second_token["SpecialToken"]["type_id"] = 1;
    file["post_processor"] = {
        {"type", "TemplateProcessing"},
        {"single", {token, text}},
        {"pair", {token, text, second_token, second}},
        {"special_tokens", {{begin, {{"id", begin}, {"ids", {*id}}, {"tokens", {begin}}}}}}};
  }
  write_file_atomically(path, file.dump() + "\n");
}

/// Written for a run whose weights came without a tokenizer.
void write_tokenizer_config(const data::Tokenizer& tokenizer, const config::Model& model,
                            const fs::path& to) {
  const data::HuggingFaceSpec spec = data::HuggingFaceSpec::parse(tokenizer.spec());
  const std::string begin = spec.begin.value_or("");
  set_begin(to / engine::tokenizer_json_file, spec, tokenizer.begin_of_document());
  ordered_json config{
      {"tokenizer_class", "PreTrainedTokenizerFast"},
      {"bos_token", begin.empty() ? ordered_json() : ordered_json(begin)},
      {"eos_token", *spec.end},
      {"clean_up_tokenization_spaces", false},
      {"model_max_length", model.has_encoder() ? model.encoder.seq_length : model.seq_length}};
  // Users of encoders ask for these by name: texts are padded, and tokens masked.
  for (const auto& [name, token] : {std::pair("unk_token", "[UNK]"),
                                    {"sep_token", "[SEP]"},
                                    {"pad_token", "[PAD]"},
                                    {"cls_token", "[CLS]"},
                                    {"mask_token", "[MASK]"},
                                    {"mask_token", "<mask>"}})
    if (!model.causal && tokenizer.token_id(token)) config[name] = token;
  if (model.token_types > 1) config["model_input_names"] = {"input_ids", "token_type_ids", "attention_mask"};
  write(to / "tokenizer_config.json", config);
}

/// The special tokens with which the run's template wrote, where the file says others.
void set_tokens(const fs::path& path, const data::ChatTemplate& chat) {
  ordered_json config = object_of(path);
  bool differs = false;
  for (const auto& [name, token] : chat.given_tokens()) {
    ordered_json& said = config[name.str()];
    if ((said.is_object() ? said.value("content", ordered_json()) : said) == token.str()) continue;
    said = token.str(), differs = true;
  }
  if (differs) write(path, config);
}

void write_generation_config(const std::vector<std::int32_t>& ends, const data::Tokenizer& tokenizer,
                             const config::Model& model, const fs::path& to) {
  ordered_json object = object_of(to / "generation_config.json");
  if (model.has_encoder())
    object["decoder_start_token_id"] = object["pad_token_id"] = model.decoder_start_token_id;
  object["eos_token_id"] = ends.size() == 1 ? ordered_json(ends[0]) : ordered_json(ends);
  if (!object.contains("bos_token_id"))
    object["bos_token_id"] =
        tokenizer.begin_of_document() ? ordered_json(*tokenizer.begin_of_document()) : ordered_json();
  if (!object.contains("pad_token_id")) object["pad_token_id"] = tokenizer.end_of_document();
  write(to / "generation_config.json", object);
}

}  // namespace

void write_tokenizer_settings(const engine::CheckpointReader& reader, const fs::path& to) {
  const engine::Manifest& manifest = reader.manifest();
  const auto tokenizer = tokenizer_of(reader);
  const std::string& name = manifest.data.chat_template;
  if (data::kind_of_tokenizer(tokenizer->spec()) != "hf") {
    if (!name.empty())
      log_warning("the run's tokenizer (", tokenizer->spec(), ") is no tokenizer.json: the chat template ",
                  data::name_of_spec(name),
                  " is not written, and what reads the folder must write conversations itself");
    return;
  }
  const bool came = fs::exists(to / "tokenizer_config.json");
  const config::Model model = *config::parse_text(manifest.config, "the run's").model;
  if (!came) write_tokenizer_config(*tokenizer, model, to);
  std::vector<std::int32_t> ends = end_ids_of(reader, *tokenizer);
  if (!name.empty()) {
    const auto chat = data::ChatTemplate::of_spec(name, *tokenizer);
    for (const std::int32_t id : chat.answer_end().ids)
      if (std::find(ends.begin(), ends.end(), id) == ends.end()) ends.push_back(id);
    write_file_atomically(to / "chat_template.jinja", chat.text());
    set_tokens(to / "tokenizer_config.json", chat);
  }
  if (!came || !name.empty()) write_generation_config(ends, *tokenizer, model, to);
}

}  // namespace sherd::cli
