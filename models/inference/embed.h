#pragma once

#include <functional>
#include <span>
#include <vector>

#include "models/inference/generate.h"

namespace sherd::models {

/// How the vectors of a text's tokens become one: their mean, the first token's (BERT's [CLS]), or the last
/// one's.
enum class Pooling : std::uint8_t { mean, cls, last };

/// Given the embedding of a text, model.config().hidden_size numbers.
using OnEmbedding = std::function<void(std::size_t text, std::span<const float> embedding)>;

/// The embeddings of texts: what stands behind the last block and its norm, in fp32, pooled. Up to `batch`
/// texts go through the model together, and none depends on those beside it. `types`: of the texts'
/// tokens, where the model has types and not all are of the first; empty: all are. All ranks call this alike,
/// and each is given all embeddings. Throws Error{usage} for an empty text or a batch below 1, Error{data}
/// for a text longer than the model's seq_length, and as Gpt::hidden() does.
void embed_texts(Gpt& model, const RunPass& run, std::span<const std::vector<std::int32_t>> texts,
                 std::span<const std::vector<std::int32_t>> types, std::int64_t batch, Pooling pooling,
                 const OnEmbedding& on_embedding);

/// Given the probabilities of a text's labels, in their order; of labels of tokens those of each token of the
/// text, behind each other.
using OnProbabilities = std::function<void(std::size_t text, std::span<const double> probabilities)>;

/// The probabilities of the labels of texts, by a model with such a head; otherwise as embed_texts().
void classify_texts(Gpt& model, const RunPass& run, std::span<const std::vector<std::int32_t>> texts,
                    std::span<const std::vector<std::int32_t>> types, std::int64_t batch,
                    const OnProbabilities& on_probabilities);

}  // namespace sherd::models
