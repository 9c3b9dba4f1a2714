#include "engine/token_data.h"

#include <algorithm>
#include <string_view>

#include "base/error.h"
#include "data/tokenizer.h"

namespace sherd::engine {
namespace {

void describe(const config::Config& config, TokenData& data) {
  data.info = data::read_dataset_info(config.data->path);
  data.tokenizer = !config.data->tokenizer.empty() ? config.data->tokenizer
                   : data.info                     ? data.info->tokenizer
                                                   : "";
}

std::int64_t vocabulary(const config::Config& config, const TokenData& data) {
  const std::int64_t asked = config.model->vocab_size;
  std::int64_t known = data.info ? data.info->vocab_size : 0;
  if (known == 0 && !data.tokenizer.empty()) known = data::make_tokenizer(data.tokenizer)->vocab_size();
  if (asked == 0 && known == 0)
    fail(ErrorKind::config, "model.vocab_size is not given and ", data::info_path(config.data->path).string(),
         " does not exist to tell it: set model.vocab_size or data.tokenizer, or make the dataset with "
         "`sherd prepare`");
  if (asked > 0 && known > asked)
    fail(ErrorKind::config, "model.vocab_size is ", asked, ", but the tokenizer of ", config.data->path,
         " has ", known, " ids: raise it or leave it out");
  return asked > 0 ? asked : known;
}

/// Training needs none, so a file that is missing is no error here; Engine::set_training_data() tells of it.
std::string tokenizer_model(const std::string& spec) {
  constexpr std::string_view spm = "spm:";
  if (!spec.starts_with(spm)) return {};
  try {
    return data::read_model_file(spec.substr(spm.size()));
  } catch (const Error&) {
    return {};
  }
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
  out->dataset = data::IndexedDataset::open(config.data->path);
  out->fingerprint = out->dataset->fingerprint();
  describe(config, *out);
  out->vocab_size = vocabulary(config, *out);
  out->tokenizer_model = tokenizer_model(out->tokenizer);
  const auto ranges = data::split_sequences(out->dataset->sequences(), config.data->split);
  data::PackingOptions packing;
  packing.seq_length = config.model->seq_length;
  packing.seed = config.data->seed;
  packing.shuffle = config.data->shuffle;
  packing.vocab_size = out->vocab_size;
  out->train = std::make_shared<data::PackedSamples>(out->dataset, ranges[0], packing, "training split");
  packing.shuffle = false;
  if (ranges[1].size() > 0)
    out->validation =
        std::make_shared<data::PackedSamples>(out->dataset, ranges[1], packing, "validation split");
  return out;
}

std::unique_ptr<data::Loader> TokenData::training_loader(const data::LoaderRank& rank,
                                                         device::Device& device) const {
  return std::make_unique<data::TokenLoader>(train, rank, device);
}

std::unique_ptr<data::Loader> TokenData::validation_loader(const data::LoaderRank& rank, std::int64_t samples,
                                                           device::Device& device) const {
  require(validation != nullptr, "this dataset has no validation split");
  const std::int64_t round = rank.micro_batch * rank.world;
  const std::int64_t there = std::max(round, validation->samples_per_round() / round * round);
  return std::make_unique<data::TokenLoader>(validation, rank, device, std::min(samples, there));
}

}  // namespace sherd::engine
