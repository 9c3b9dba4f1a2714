#include "cli/inference/embed_request.h"

#include <algorithm>

#include "base/text/excerpt.h"
#include "data/packing/packing.h"
#include "data/text/labelled_example.h"

namespace sherd::cli {

std::vector<std::int32_t> text_to_embed(const Inference& inference, const Prompt& prompt, bool cut) {
  const data::Tokenizer& tokenizer = inference.tokenizer();
  const config::Model& model = *inference.config().model;
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
                             Completion out{.tokens = request.texts[text].size()};
                             for (std::size_t i = 0; i < labels.size(); ++i)
                               out.labels.emplace_back(labels[i], probabilities[i]);
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
