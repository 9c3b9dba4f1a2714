#include "cli/inference/embed_request.h"

#include <algorithm>

#include "base/text/excerpt.h"
#include "data/packing/packing.h"
#include "data/text/labelled_example.h"

namespace sherd::cli {

namespace {

Completion labelled_text(const std::vector<std::string>& labels, std::span<const double> probabilities) {
  Completion out;
  for (std::size_t i = 0; i < labels.size(); ++i) out.labels.emplace_back(labels[i], probabilities[i]);
  return out;
}

/// The likeliest label of each word's first token.
Completion labelled_words(const TextWords& text, const std::vector<std::string>& labels,
                          std::span<const double> probabilities) {
  Completion out;
  std::vector<WordLabel>& words = out.words.emplace();
  for (std::size_t i = 0; i < text.words.size(); ++i) {
    words.push_back({text.words[i], "", 0});
    if (text.first[i] < 0) continue;
    const std::span<const double> of =
        probabilities.subspan(static_cast<std::size_t>(text.first[i]) * labels.size(), labels.size());
    const auto likeliest = std::max_element(of.begin(), of.end());
    words.back().label = labels[static_cast<std::size_t>(likeliest - of.begin())];
    words.back().probability = *likeliest;
  }
  return out;
}

}  // namespace

void add_words(EmbedRequest& request, const Prompt& prompt) {
  const data::Tokenizer& tokenizer = request.from.tokenizer();
  const config::Model& model = *request.from.config().model;
  if (prompt.pair)
    fail(ErrorKind::data, prompt.place,
         ": \"text_pair\" is for models whose labels are of texts: take it out");
  TextWords own{prompt.words.empty() ? data::words_in(prompt.text) : prompt.words, {}};
  data::EncodedWords encoded = data::encode_words(tokenizer, own.words);
  data::cut_words(encoded, model.seq_length, tokenizer.end_of_document());
  require_rows(encoded.ids, tokenizer, model.vocab_size, prompt.place);
  own.first = std::move(encoded.first);
  request.texts.push_back(std::move(encoded.ids));
  request.words.push_back(std::move(own));
}

std::vector<std::int32_t> text_to_embed(const Inference& inference, const Prompt& prompt, bool cut) {
  const data::Tokenizer& tokenizer = inference.tokenizer();
  const config::Model& model = *inference.config().model;
  if (prompt.text.empty() && !prompt.words.empty())
    fail(ErrorKind::data, prompt.place,
         ": \"tokens\" are for --classify by a model whose labels are of tokens: give a \"text\"");
  if (prompt.pair && model.causal)
    fail(ErrorKind::data, prompt.place, ": \"text_pair\" is for encoders, which read pairs of texts");
  std::vector<std::int32_t> ids = model.causal ? prompt_of(tokenizer, prompt.text)
                                               : data::encode_parts(tokenizer, prompt.text, prompt.pair);
  if (std::ssize(ids) > model.seq_length && !cut)
    fail(ErrorKind::data, prompt.place, prompt.place.empty() ? "" : ": ", "the text '",
         excerpt(prompt.text, 40), "' has ", ids.size(), " tokens, and the model takes ", model.seq_length,
         ": cut it");
  data::cut_text(ids, model.seq_length, tokenizer.end_of_document());
  require_rows(ids, tokenizer, model.vocab_size, prompt.place);
  return ids;
}

void embed(const EmbedRequest& request, const DistributedPtr& dist) {
  InferenceModel from(request.from.reader(), request.from.config(), dist);
  const bool writes = dist->rank() == 0;
  const std::vector<std::string>& labels = request.from.config().model->labels;
  const std::int32_t end = request.from.tokenizer().end_of_document();
  std::vector<std::vector<std::int32_t>> types;
  for (const auto& text : request.texts) types.push_back(data::types_of_parts(text, end));
  if (!request.pooling) {
    models::classify_texts(from.model(), from.run(), request.texts, types, request.batch,
                           [&](std::size_t text, std::span<const double> probabilities) {
                             if (!writes) return;
                             Completion out = request.words.empty() ? labelled_text(labels, probabilities)
                                                                    : labelled_words(request.words[text],
                                                                                     labels, probabilities);
                             out.tokens = request.texts[text].size();
                             request.out.add(text, std::move(out));
                           });
    return;
  }
  models::embed_texts(from.model(), from.run(), request.texts, types, request.batch, *request.pooling,
                      [&](std::size_t text, std::span<const float> embedding) {
                        if (writes)
                          request.out.add(text, {.tokens = request.texts[text].size(),
                                                 .embedding = {embedding.begin(), embedding.end()}});
                      });
}

}  // namespace sherd::cli
