#include "cli/inference/embed_request.h"

#include "base/excerpt.h"

namespace sherd::cli {

std::vector<std::int32_t> text_to_embed(const Inference& inference, const std::string& text,
                                        const std::string& place) {
  const data::Tokenizer& tokenizer = inference.tokenizer();
  const config::Model& model = *inference.config().model;
  std::vector<std::int32_t> ids = prompt_of(tokenizer, text);
  if (!model.causal && (ids.size() == 1 || ids.back() != tokenizer.end_of_document()))
    ids.push_back(tokenizer.end_of_document());
  if (std::ssize(ids) > model.seq_length)
    fail(ErrorKind::data, place, place.empty() ? "" : ": ", "the text '", excerpt(text, 40), "' has ",
         ids.size(), " tokens, and the model takes ", model.seq_length, ": cut it, or set model.seq_length");
  require_rows(ids, tokenizer, model.vocab_size, place);
  return ids;
}

void embed(const EmbedRequest& request, const DistributedPtr& dist) {
  InferenceModel from(request.from.reader(), request.from.config(), dist);
  const bool writes = dist->rank() == 0;
  const std::vector<std::string>& labels = request.from.config().model->labels;
  if (!request.pooling) {
    models::classify_texts(from.model(), from.run(), request.texts, {}, request.batch,
                           [&](std::size_t text, std::span<const double> probabilities) {
                             if (!writes) return;
                             Completion out{.tokens = request.texts[text].size()};
                             for (std::size_t i = 0; i < labels.size(); ++i)
                               out.labels.emplace_back(labels[i], probabilities[i]);
                             request.out.add(text, std::move(out));
                           });
    return;
  }
  models::embed_texts(from.model(), from.run(), request.texts, request.batch, *request.pooling,
                      [&](std::size_t text, std::span<const float> embedding) {
                        if (writes)
                          request.out.add(text, {.tokens = request.texts[text].size(),
                                                 .embedding = {embedding.begin(), embedding.end()}});
                      });
}

}  // namespace sherd::cli
