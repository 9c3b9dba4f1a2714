#include "engine/token_data.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <string_view>
#include <utility>

#include "base/crc32c.h"
#include "base/error.h"
#include "base/log.h"
#include "base/text/excerpt.h"
#include "data/blend.h"
#include "data/packing/answer_samples.h"
#include "data/packing/document_packing.h"
#include "data/packing/masked_samples.h"
#include "data/packing/packing.h"
#include "data/packing/pair_samples.h"
#include "data/packing/preference_samples.h"
#include "data/packing/span_samples.h"
#include "data/templates/chat_template.h"
#include "data/tokenizer.h"

namespace sherd::engine {
namespace {

void describe(const config::Config& config, TokenData& data) {
  const std::string& first = config.data->sources.front().path;
  data.info = data::read_dataset_info(first);
  data.tokenizer = !config.data->tokenizer.empty() ? config.data->tokenizer
                   : data.info                     ? data.info->tokenizer
                                                   : "";
  for (const config::DataSource& source : config.data->sources) {
    const auto info = data::read_dataset_info(source.path);
    if (!info || info->chat_template.empty()) continue;
    if (data.chat_template.empty()) data.chat_template = info->chat_template;
    if (data.chat_template != info->chat_template)
      fail(ErrorKind::config, "data.sources: the conversations of '", source.path,
           "' are written by ", data::name_of_spec(info->chat_template), ", others by ",
           data::name_of_spec(data.chat_template), ": prepare them by one, with --chat-template");
  }
  if (config.data->tokenizer.empty() || data::kind_of_tokenizer(data.tokenizer) != "hf") return;
  try {  // what the files beside it say must not be lost where its copies lie
    data.tokenizer = data::make_tokenizer(data.tokenizer)->spec();
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::io) throw;
  }
}

std::int64_t vocabulary(const config::Config& config, const TokenData& data) {
  const std::int64_t asked = config.model->vocab_size;
  std::int64_t known = data.info ? data.info->vocab_size : 0;
  if (known == 0 && !data.tokenizer.empty()) known = data::make_tokenizer(data.tokenizer)->vocab_size();
  if (asked == 0 && known == 0)
    fail(ErrorKind::io, "model.vocab_size is not given and ",
         data::info_path(config.data->sources.front().path).string(),
         " does not exist to tell it: set model.vocab_size or data.tokenizer, or make the dataset with "
         "`sherd prepare`");
  return asked > 0 ? asked : known;
}

/// Training needs none, so a file that is missing is no error here; Engine::set_training_data() tells of it.
std::string tokenizer_model(const std::string& spec) {
  try {
    const std::string file = data::model_file_of(spec);
    return file.empty() ? file : data::read_model_file(file);
  } catch (const Error&) {
    return {};
  }
}

/// A tokenizer by what it does: its kind, its ids and, where it is read from a file, that file's bytes.
std::uint32_t digest_of(const std::string& spec, std::int64_t vocabulary) {
  const std::string facts = cat(data::kind_of_tokenizer(spec), ' ', vocabulary, ' ', tokenizer_model(spec));
  return crc32c(facts.data(), facts.size());
}

/// Ids mean the same in all sources, as far as their descriptions tell.
void require_one_tokenizer(const config::Data& section) {
  std::optional<std::uint32_t> digest;
  std::string first;
  for (const config::DataSource& source : section.sources) {
    const auto info = data::read_dataset_info(source.path);
    if (!info) continue;
    const std::uint32_t here = digest_of(info->tokenizer, info->vocab_size);
    if (!digest) digest = here, first = source.path;
    if (here != *digest)
      fail(ErrorKind::config, "data.sources: '", source.path, "' is tokens of another tokenizer (",
           info->tokenizer, ", ", info->vocab_size, " ids) than '", first,
           "': prepare both with the same one, as `--tokenizer spm:MODEL` or `hf:PATH`");
  }
}

/// Prompts and answers are learned as what they are, or where that was asked for.
void require_objective(const config::Config& config) {
  for (const config::DataSource& source : config.data->sources) {
    const auto info = data::read_dataset_info(source.path);
    if (!info) continue;
    if (config.model->has_encoder() && info->masked_tokens > 0 &&
        config.training.objective == config::Objective::automatic)
      fail(ErrorKind::config, "the texts of '", source.path,
           "' are prompts and answers: set training.objective to \"seq2seq\" to learn the answers, or to "
           "\"spans\" to learn what is cut out of all of it");
    if (config.objective() == config::Objective::seq2seq && !info->seq2seq && info->chat_template.empty())
      log_warning("the completions of '", source.path,
                  "' go on with their prompts' texts, and answers are texts of their own: prepare them with "
                  "`sherd prepare --seq2seq`");
    if (!config.model->has_encoder() && info->seq2seq)
      log_warning(
          "the prompts and completions of '", source.path,
          "' are texts of their own (sherd prepare --seq2seq), and the model has no encoder: it learns "
          "them behind each other, with an end between");
  }
}

/// Answers that people compared or judged are learned as such, and nothing else is.
void require_preferences(const config::Config& config) {
  const std::string_view objective = config::name_of(config.objective());
  const bool kto = config.objective() == config::Objective::kto;
  for (const config::DataSource& source : config.data->sources) {
    const auto info = data::read_dataset_info(source.path);
    const data::Preferences there = info ? info->preferences : data::Preferences::none;
    if (!config.learns_preferences() && there != data::Preferences::none)
      fail(ErrorKind::config, "the answers of '", source.path, "' were ",
           there == data::Preferences::pairs ? "compared: set training.objective to \"dpo\" or one of its kin"
                                             : "judged: set training.objective to \"kto\"",
           ", or prepare texts to learn as they are (docs/preferences.md)");
    if (config.learns_preferences() && there == data::Preferences::none)
      fail(ErrorKind::config, "training.objective \"", objective, "\" learns which answers people prefer, and '",
           source.path, "' has none: prepare it from lines with 'chosen' and 'rejected'",
           kto ? ", or with 'label'" : "", " (docs/preferences.md)");
    if (config.learns_preferences() && !kto && there == data::Preferences::labels)
      fail(ErrorKind::config, "the answers of '", source.path,
           "' are judged by themselves, and training.objective \"", objective,
           "\" compares two: set it to \"kto\"");
  }
}

/// Answers with sides, of a dataset whose sequences are `before` others'.
std::shared_ptr<const data::Samples> preferences(std::shared_ptr<const data::IndexedDataset> dataset,
                                                 data::SequenceRange range,
                                                 const data::PackingOptions& packing,
                                                 const config::Config& config, const TokenData& data,
                                                 std::int64_t before, const char* name) {
  const bool kto = config.objective() == config::Objective::kto,
             packed = config.data->packing == config::SamplePacking::documents;
  const auto out = std::make_shared<data::PreferenceSamples>(
      dataset, range,
      data::PreferenceOptions{.seq_length = packing.seq_length,
                              .seed = packing.seed,
                              .shuffle = packing.shuffle,
                              .vocab_size = data.vocab_size,
                              .padding = data.info ? data.info->end_of_document : 0,
                              .packed = packed,
                              .pairs = !kto,
                              .whole = config.objective() == config::Objective::reward,
                              .mismatched = config.has_baseline(),
                              .first_text = before},
      name);
  const char* what = kto ? "answer" : "pair";
  log_info("the ", name, " of ", dataset->prefix(), " has ", counted(out->items(), what), " and fills ",
           100 * out->filled(), " % of its ", counted(out->samples_per_round(), "sample"));
  if (out->cut() > 0)
    log_warning("of the ", name, " of ", dataset->prefix(), " ", counted(out->cut(), what),
                out->cut() == 1 ? " does" : " do", " not fit ",
                packed && !kto ? "model.seq_length, which holds both texts of a pair" : "model.seq_length",
                ": their ends are left out");
  if (out->left_out() > 0)
    log_warning("of the ", name, " of ", dataset->prefix(), " ", counted(out->left_out(), what),
                out->left_out() == 1 ? " is" : " are",
                " left out, as the prompt leaves no room for an answer in model.seq_length");
  return out;
}

/// The data's classes are those of the model, of texts or of tokens.
void require_labels(const config::Config& config) {
  const bool of_tokens = config.model->labels_tokens();
  const auto list = [](const std::vector<std::string>& labels) {
    return joined_text(labels, ",", [](const std::string& label) { return excerpt(label); });
  };
  for (const config::DataSource& source : config.data->sources) {
    const auto info = data::read_dataset_info(source.path);
    const std::vector<std::string> there = info ? info->labels : std::vector<std::string>();
    if (there == config.model->labels && (there.empty() || info->labels_of_tokens == of_tokens)) continue;
    if (there.empty())
      fail(ErrorKind::config, "the texts of '", source.path,
           "' have no labels: prepare them with `sherd prepare --labels ", list(config.model->labels), "`");
    const config::Head head =
        info->labels_of_tokens ? config::Head::token_classification : config::Head::sequence_classification;
    fail(ErrorKind::config, info->labels_of_tokens ? "the tokens of '" : "the texts of '", source.path,
         "' have the labels ", list(there), ", and model.head is \"", config::name_of(config.model->head),
         "\" with model.labels ", config.model->labels.empty() ? "none" : list(config.model->labels),
         ": set model.head to \"", config::name_of(head),
         "\" and model.labels to these names, in their order, or prepare the texts without --labels to learn "
         "anything else of them");
  }
}

data::PackingOptions packing_of(const config::Config& config, const TokenData& data) {
  data::PackingOptions packing;
  packing.seq_length = config.model->seq_length;
  if (config.objective() == config::Objective::spans)
    packing.seq_length = data::span_lengths(config.model->encoder.seq_length, config.training.span_density,
                                            config.training.span_length)
                             .tokens;
  packing.seed = config.data->seed;
  packing.vocab_size = data.vocab_size;
  const config::Objective objective = config.objective();
  packing.targets = objective == config::Objective::mlm              ? data::Targets::tokens
                    : objective != config::Objective::classification ? data::Targets::next_tokens
                    : config.model->labels_tokens()                  ? data::Targets::token_classes
                                                                     : data::Targets::classes;
  return packing;
}

/// The virtual tokens in front of the texts of a source.
data::VirtualTokens prompt_of(const config::Config& config, const TokenData& data,
                              const config::DataSource& source) {
  const config::Adapter& adapter = config.training.adapter;
  if (!adapter.has_prompt()) return {};
  const std::int64_t task = std::max<std::int64_t>(0, adapter.prompt.find(source.task));
  return {
      config::first_virtual_id(adapter.prompt, data.vocab_size, config.model->pad_vocab_to_multiple_of, task),
      adapter.prompt.virtual_tokens};
}

/// The tokenizer that the objective needs for what it does.
std::shared_ptr<const data::Tokenizer> tokenizer_for(const char* objective, const char* does,
                                                     const config::Config& config, const TokenData& data) {
  if (data.tokenizer.empty())
    fail(ErrorKind::config, "training.objective \"", objective, "\" ", does,
         ", and nothing tells the tokenizer of ", config.data->sources.front().path, ": set data.tokenizer");
  return data::make_tokenizer(data.tokenizer);
}

/// The samples as an encoder in front of a decoder learns what was cut out of them.
std::shared_ptr<const data::Samples> with_spans(std::shared_ptr<const data::Samples> samples,
                                                const config::Config& config, const TokenData& data) {
  const config::Model& model = *config.model;
  data::SpanOptions options{.density = config.training.span_density,
                            .mean_length = config.training.span_length,
                            .source = model.encoder.seq_length,
                            .places = model.seq_length,
                            .seed = config.data->seed,
                            .start = static_cast<std::int32_t>(model.decoder_start_token_id)};
  const data::SpanLengths lengths = data::span_lengths(options.source, options.density, options.mean_length);
  const auto tokenizer = tokenizer_for("spans", "cuts tokens out", config, data);
  options.end = tokenizer->end_of_document();
  options.sentinels = data::sentinels_of(*tokenizer, data.vocab_size, lengths.spans);
  if (const std::int64_t needed = options.source + lengths.target(); model.seq_length > needed)
    log_info("model.seq_length ", model.seq_length, " leaves places of each sample without a token: ", needed,
             " are enough for spans of ", lengths.tokens, " tokens");
  return std::make_shared<data::SpanSamples>(std::move(samples), std::move(options));
}

/// The prompts of a dataset and their answers.
std::shared_ptr<const data::Samples> answers(std::shared_ptr<const data::IndexedDataset> dataset,
                                             data::SequenceRange range, const data::PackingOptions& packing,
                                             const config::Config& config, const TokenData& data,
                                             const char* name) {
  const config::Model& model = *config.model;
  const auto tokenizer = tokenizer_for("seq2seq", "ends texts", config, data);
  const auto info = data::read_dataset_info(dataset->prefix());
  const bool apart = info && info->seq2seq;
  const auto out = std::make_shared<data::AnswerSamples>(
      dataset, range,
      data::AnswerOptions{.source = model.encoder.seq_length,
                          .places = model.seq_length,
                          .seed = packing.seed,
                          .shuffle = packing.shuffle,
                          .vocab_size = data.vocab_size,
                          .start = static_cast<std::int32_t>(model.decoder_start_token_id),
                          .end = tokenizer->end_of_document(),
                          .ended = apart},
      name);
  if (out->cut() > 0)
    log_warning("of the ", name, " of ", dataset->prefix(), " ", counted(out->cut(), "sample"),
                out->cut() == 1 ? " has" : " have",
                " a prompt longer than model.encoder.seq_length or an answer longer than what that leaves "
                "of model.seq_length: their ends are left out");
  return out;
}

/// The samples as an encoder learns them.
std::shared_ptr<const data::Samples> masked(std::shared_ptr<const data::Samples> samples,
                                            const config::Config& config, const TokenData& data) {
  data::MaskingOptions options =
      data::masking_of(*tokenizer_for("mlm", "masks tokens", config, data), data.vocab_size);
  options.probability = config.training.mlm_probability;
  options.whole_words = config.training.whole_word_mask;
  options.seed = config.data->seed;
  return std::make_shared<data::MaskedSamples>(std::move(samples), std::move(options));
}

/// How the texts of datasets become pairs.
data::PairOptions pairing_of(const config::Config& config, const TokenData& data,
                             const data::PackingOptions& packing) {
  const auto tokenizer = tokenizer_for("mlm", "pairs texts", config, data);
  const auto begin = tokenizer->begin_of_document();
  if (!begin)
    fail(
        ErrorKind::config,
        "model.head \"pretraining\" learns pairs of texts behind a token as BERT's [CLS], and the tokenizer ",
        tokenizer->spec(), " puts none in front of documents: take one that does, or head \"mlm\"");
  return {.seq_length = packing.seq_length,
          .seed = packing.seed,
          .shuffle = packing.shuffle,
          .vocab_size = data.vocab_size,
          .begin = *begin,
          .end = tokenizer->end_of_document(),
          .goes_on = data::masking_of(*tokenizer, data.vocab_size).goes_on};
}

/// One part of every dataset, by weight where they are several; null where none has that part.
std::shared_ptr<const data::Samples> part_of(TokenData& data, const config::Config& config, std::size_t part,
                                             data::PackingOptions packing) {
  const config::Data& section = *config.data;
  const bool classifies = config.objective() == config::Objective::classification;
  static constexpr std::array names{"training split", "validation split"};
  std::vector<std::shared_ptr<const data::Samples>> parts;
  std::vector<double> weights;
  data::PairOptions pairing;
  std::int64_t before = 0;
  for (std::size_t i = 0; i < data.datasets.size(); ++i) {
    const std::int64_t together = config.learns_preferences() ? 2 : 1;  // sequences that are not parted
    data::SequenceRange range =
        data::split_sequences(data.datasets[i]->sequences() / together, section.split)[part];
    range = {range.begin * together, range.end * together};
    before += i == 0 ? 0 : data.datasets[i - 1]->sequences();
    if (range.size() == 0 && part > 0) continue;
    packing.prompt = prompt_of(config, data, section.sources[i]);
    try {
      if (config.objective() == config::Objective::seq2seq) {
        parts.push_back(answers(data.datasets[i], range, packing, config, data, names[part]));
      } else if (config.learns_preferences()) {
        parts.push_back(preferences(data.datasets[i], range, packing, config, data, before, names[part]));
        data.parts.push_back(parts.back());
      } else if (config.model->pairs_texts()) {
        if (pairing.seq_length == 0) pairing = pairing_of(config, data, packing);
        parts.push_back(std::make_shared<data::PairSamples>(data.datasets[i], range, pairing, names[part]));
      } else if (config.keeps_texts_apart()) {
        const auto documents = std::make_shared<data::DocumentSamples>(
            data.datasets[i], range, packing, data.info ? data.info->end_of_document : 0, names[part]);
        log_info("the ", names[part], " of ", data.datasets[i]->prefix(), " fills ",
                 100 * documents->filled(), " % of its ", counted(documents->samples_per_round(), "sample"));
        if (documents->cut() > 0 && classifies)
          log_warning(counted(documents->cut(), "text"), " of the ", names[part], " of ",
                      data.datasets[i]->prefix(), documents->cut() == 1 ? " is" : " are",
                      " longer than model.seq_length: their ends are left out");
        else if (documents->cut() > 0 && data.datasets[i]->has_mask())
          log_warning(counted(documents->cut(), "document"), " of the ", names[part], " of ",
                      data.datasets[i]->prefix(), documents->cut() == 1 ? " is" : " are",
                      " longer than model.seq_length, and learned in pieces that do not see each other");
        parts.push_back(documents);
      } else {
        parts.push_back(std::make_shared<data::PackedSamples>(data.datasets[i], range, packing, names[part]));
      }
    } catch (const Error& error) {
      if (part == 0 || data.datasets.size() == 1) throw;
      log_info("not among the data of validation: ", error.what());
      continue;
    }
    const double given = section.sources[i].weight;
    weights.push_back(given > 0 ? given : static_cast<double>(parts.back()->tokens()));
  }
  if (parts.empty()) return nullptr;
  std::shared_ptr<const data::Samples> all = parts.front();
  if (parts.size() > 1) all = std::make_shared<data::BlendedSamples>(std::move(parts), std::move(weights));
  if (config.objective() == config::Objective::mlm) return masked(std::move(all), config, data);
  return config.objective() == config::Objective::spans ? with_spans(std::move(all), config, data) : all;
}

}  // namespace

std::int64_t vocabulary_size(const config::Config& config) {
  require(config.model.has_value(), "a vocabulary belongs to a `model` section");
  if (config.model->vocab_size > 0) return config.model->vocab_size;
  if (!config.data)
    fail(ErrorKind::config,
         "model.vocab_size is not given, and there is no `data` section whose dataset would tell it: set "
         "model.vocab_size");
  TokenData data;
  describe(config, data);
  return vocabulary(config, data);
}

std::shared_ptr<const TokenData> open_token_data(const config::Config& config) {
  if (!config.data)
    fail(ErrorKind::config,
         "there is no `data` section: add {\"data\": {\"path\": PREFIX}} with the PREFIX that "
         "`sherd prepare` wrote, in this file or a further --config");
  if (!config.model)
    fail(ErrorKind::config,
         "there is no `model` section: add one to the configuration or give a further --config");
  auto out = std::make_shared<TokenData>();
  for (const config::DataSource& source : config.data->sources) {
    out->datasets.push_back(data::IndexedDataset::open(source.path));
    const std::uint32_t print = out->datasets.back()->fingerprint();
    out->fingerprint = out->datasets.size() == 1 ? print : crc32c(&print, sizeof print, out->fingerprint);
  }
  require_one_tokenizer(*config.data);
  require_labels(config);
  require_objective(config);
  require_preferences(config);
  describe(config, *out);
  out->vocab_size = vocabulary(config, *out);
  // Now, and not after hours of training.
  if (out->info && out->info->vocab_size > out->vocab_size)
    for (const auto& dataset : out->datasets) dataset->check_all_ids(out->vocab_size);
  out->tokenizer_model = tokenizer_model(out->tokenizer);
  data::PackingOptions packing = packing_of(config, *out);
  packing.shuffle = config.data->shuffle;
  out->train = part_of(*out, config, 0, packing);
  packing.shuffle = false;
  out->validation = part_of(*out, config, 1, packing);
  return out;
}

std::int64_t TokenData::tokens() const {
  return std::accumulate(datasets.begin(), datasets.end(), std::int64_t{0},
                         [](std::int64_t sum, const auto& dataset) { return sum + dataset->tokens(); });
}

std::int64_t TokenData::sequences() const {
  return std::accumulate(datasets.begin(), datasets.end(), std::int64_t{0},
                         [](std::int64_t sum, const auto& dataset) { return sum + dataset->sequences(); });
}

std::string TokenData::name() const {
  return joined_text(datasets, " + ", [](const auto& dataset) { return dataset->prefix(); });
}

std::unique_ptr<data::Loader> TokenData::training_loader(const data::LoaderRank& rank,
                                                         device::Device& device) const {
  return std::make_unique<data::TokenLoader>(train, rank, device);
}

std::unique_ptr<data::Loader> TokenData::validation_loader(const data::LoaderRank& rank, std::int64_t samples,
                                                           device::Device& device) const {
  require(validation != nullptr, "this dataset has no validation split");
  return std::make_unique<data::TokenLoader>(validation, rank, device, samples);
}

}  // namespace sherd::engine
