#include "data/packing/masked_samples.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/error.h"
#include "data/tokenizer.h"

namespace sherd::data {
namespace {

bool is_in(const std::vector<bool>& ids, std::int32_t id) {
  return !ids.empty() && ids[static_cast<std::size_t>(id)];
}

/// Draws of one place: whether it, or its word, is a target, what becomes of it, and a token.
enum Draw : std::uint64_t { is_target, becomes, token, draws };

}  // namespace

MaskingOptions masking_of(const Tokenizer& tokenizer, std::int64_t vocab_size) {
  MaskingOptions out;
  out.vocab_size = vocab_size;
  std::optional<std::int32_t> mask = tokenizer.token_id("[MASK]");
  if (!mask) mask = tokenizer.token_id("<mask>");
  if (mask && *mask >= vocab_size)
    fail(ErrorKind::config, "the mask token of ", tokenizer.spec(), " has the id ", *mask,
         ", and model.vocab_size is ", vocab_size, ": leave it out");
  if (!mask)
    fail(ErrorKind::config, "training.objective \"mlm\" masks tokens, and the tokenizer ", tokenizer.spec(),
         " has no token [MASK] or <mask>: prepare the dataset with one that has, such as BERT's "
         "(--tokenizer hf:FOLDER)");
  out.mask_token = *mask;
  const auto ids = static_cast<std::size_t>(vocab_size);
  out.special.assign(ids, false);
  // How vocabularies write that a word goes on, or that one begins.
  std::vector<std::string> texts(ids);
  const std::int64_t known = std::min(vocab_size, tokenizer.vocab_size());
  for (std::int64_t id = 0; id < known; ++id) {
    const auto at = static_cast<std::size_t>(id);
    texts[at] = tokenizer.token(static_cast<std::int32_t>(id));
    out.special[at] = id == *mask || tokenizer.is_special(static_cast<std::int32_t>(id));
  }
  const auto count = [&](const char* mark) {
    return std::count_if(texts.begin(), texts.end(),
                         [&](const std::string& text) { return text.starts_with(mark) && text != mark; });
  };
  const std::ptrdiff_t spaces[] = {count("\u0120"), count("\u2581")}, going_on = count("##");
  const char* space = spaces[0] > spaces[1] ? "\u0120" : "\u2581";
  // Code has "##" too.
  const bool marked = going_on > std::max(spaces[0], spaces[1]),
             spaced = !marked && spaces[0] + spaces[1] > 0;
  out.goes_on.assign(ids, false);
  for (std::size_t id = 0; id < ids && (marked || spaced); ++id)
    out.goes_on[id] = marked ? texts[id].starts_with("##") : !texts[id].starts_with(space);
  return out;
}

MaskedSamples::MaskedSamples(std::shared_ptr<const Samples> samples, MaskingOptions options)
    : samples_(std::move(samples)), options_(std::move(options)) {
  require(options_.probability > 0 && options_.probability < 1,
          "the probability of a target must be in (0, 1)");
  require(options_.mask_token >= 0 && options_.mask_token < options_.vocab_size, "the mask token ",
          options_.mask_token, " is not one of ", options_.vocab_size, " ids");
  for (const std::vector<bool>* ids : {&options_.special, &options_.goes_on})
    require(ids->empty() || static_cast<std::int64_t>(ids->size()) == options_.vocab_size,
            "masking needs to know of ", options_.vocab_size, " ids, and is told of ", ids->size());
}

void MaskedSamples::load(std::int64_t position, SampleRow& row) const {
  samples_->load(position, row);
  row.labels.assign(row.tokens.size(), no_label);
  const RandomKey random =
      RandomKey{options_.seed, stable_hash("masked tokens")}.at(static_cast<std::uint64_t>(position));
  const std::size_t places = row.tokens.size() - static_cast<std::size_t>(row.filling);
  auto document = row.ends.begin();
  std::size_t word = 0;  // where the present word begins
  for (std::size_t i = 0; i < places; ++i) {
    const bool first = document != row.ends.end() && i == static_cast<std::size_t>(*document);
    if (first) ++document;
    std::int32_t& id = row.tokens[i];
    if (id < 0 || id >= options_.vocab_size)
      fail(ErrorKind::data, "token ", id, " is not one of the vocabulary's ", options_.vocab_size, " ids");
    if (!options_.whole_words || first || !is_in(options_.goes_on, id) || is_in(options_.special, id))
      word = i;
    if (is_in(options_.special, id)) continue;
    const auto draw = [&](std::size_t place, Draw what) {
      return uniform_at(random, static_cast<std::uint64_t>(place) * draws + what);
    };
    if (draw(word, is_target) >= static_cast<float>(options_.probability)) continue;
    row.labels[i] = id;
    const float fate = draw(i, becomes);
    if (fate < 0.8f)
      id = options_.mask_token;
    else if (fate < 0.9f)
      id = std::min(static_cast<std::int32_t>(static_cast<double>(draw(i, token)) *
                                              static_cast<double>(options_.vocab_size)),
                    static_cast<std::int32_t>(options_.vocab_size - 1));
  }
}

}  // namespace sherd::data
