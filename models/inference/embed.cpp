#include "models/inference/embed.h"

#include <algorithm>
#include <cmath>

#include "tensor/host_values.h"

namespace sherd::models {
namespace {

using Ids = std::vector<std::int32_t>;

/// The texts in rows of one length, whose ends are documents that no text sees.
tensor::Batch padded_batch(device::Device& device, std::span<const Ids> texts, std::int64_t width) {
  Ids tokens, positions, documents{0}, filling;
  for (const Ids& text : texts) {
    tokens.insert(tokens.end(), text.begin(), text.end());
    tokens.resize(tokens.size() + static_cast<std::size_t>(width) - text.size(), text.back());
    for (std::int64_t i = 0; i < width; ++i)
      positions.push_back(static_cast<std::int32_t>(i < std::ssize(text) ? i : i - std::ssize(text)));
    filling.push_back(static_cast<std::int32_t>(width - std::ssize(text)));
    const std::int32_t begin = documents.back();
    documents.push_back(begin + static_cast<std::int32_t>(text.size()));
    if (std::ssize(text) < width) documents.push_back(begin + static_cast<std::int32_t>(width));
  }
  const tensor::Shape shape{std::ssize(texts), width};
  tensor::Batch out{{"tokens", tensor::Tensor::of<std::int32_t>(device, shape, tokens)},
                    {"positions", tensor::Tensor::of<std::int32_t>(device, shape, positions)}};
  out["documents"] = tensor::Tensor::on_host(device, documents);
  out["filling"] = tensor::Tensor::on_host(device, filling);
  return out;
}

tensor::Tensor padded_types(device::Device& device, std::span<const Ids> types, std::int64_t width) {
  Ids all(types.size() * static_cast<std::size_t>(width), 0);
  for (std::size_t i = 0; i < types.size(); ++i)
    std::copy(types[i].begin(), types[i].end(), all.begin() + static_cast<std::ptrdiff_t>(i) * width);
  return tensor::Tensor::of<std::int32_t>(device, {std::ssize(types), width}, all);
}

/// One vector of the `tokens` of a text, which lie behind each other.
std::vector<float> pooled(const float* vectors, std::int64_t tokens, std::int64_t width, Pooling pooling) {
  const auto size = static_cast<std::size_t>(width);
  if (pooling != Pooling::mean) {
    const float* at = vectors + (pooling == Pooling::cls ? 0 : (tokens - 1) * width);
    return {at, at + width};
  }
  std::vector<double> sum(size, 0);
  for (std::int64_t t = 0; t < tokens; ++t)
    for (std::size_t k = 0; k < size; ++k)
      sum[k] += static_cast<double>(vectors[t * width + static_cast<std::int64_t>(k)]);
  std::vector<float> out(size);
  for (std::size_t k = 0; k < size; ++k) out[k] = static_cast<float>(sum[k] / static_cast<double>(tokens));
  return out;
}

/// Appends the probabilities of so many scores.
void append_softmax(const float* scores, std::size_t count, std::vector<double>& out) {
  const std::size_t first = out.size();
  const double most = *std::max_element(scores, scores + count);
  double sum = 0;
  for (std::size_t i = 0; i < count; ++i)
    sum += out.emplace_back(std::exp(static_cast<double>(scores[i]) - most));
  for (std::size_t i = first; i < out.size(); ++i) out[i] /= sum;
}

/// Calls run_batch(tape, batch) for some texts after others, on a tape; its result, as fp32 on the host,
/// goes to take(text, its place among these, how many these are, values) for each of them.
template <class RunBatch, class Take>
void in_batches(const Gpt& model, const RunPass& run, std::span<const Ids> texts, std::span<const Ids> types,
                std::int64_t batch, const RunBatch& run_batch, const Take& take) {
  require(types.empty() || types.size() == texts.size(), types.size(), " lists of types for ", texts.size(),
          " texts");
  require(batch >= 1, "texts go through the model one at a time or more, not ", batch);
  for (std::size_t begin = 0; begin < texts.size();) {
    const std::span<const Ids> some =
        texts.subspan(begin, std::min(static_cast<std::size_t>(batch), texts.size() - begin));
    std::int64_t width = 0;
    for (const Ids& text : some) {
      require(!text.empty(), "a text needs a token at least");
      width = std::max(width, std::ssize(text));
    }
    tensor::Tensor values;
    run([&](Tape& tape) {
      tensor::Batch padded = padded_batch(tape.device(), some, width);
      if (!types.empty() && model.config().token_types > 1)
        padded["token_types"] = padded_types(tape.device(), types.subspan(begin, some.size()), width);
      tape.texts_apart = true;
      values = tape.on_host(run_batch(tape, padded), DType::f32);
      tape.texts_apart = false;
    });
    for (std::size_t i = 0; i < some.size(); ++i) take(begin + i, i, some.size(), values);
    begin += some.size();
  }
}

}  // namespace

void embed_texts(Gpt& model, const RunPass& run, std::span<const Ids> texts, std::span<const Ids> types,
                 std::int64_t batch, Pooling pooling, const OnEmbedding& on_embedding) {
  in_batches(
      model, run, texts, types, batch,
      [&](Tape& tape, const tensor::Batch& padded) { return model.hidden(tape, padded); },
      [&](std::size_t text, std::size_t place, std::size_t, const tensor::Tensor& vectors) {
        const std::int64_t width = vectors.shape()[1], hidden = vectors.shape()[2];
        on_embedding(text, pooled(vectors.data<float>() + static_cast<std::int64_t>(place) * width * hidden,
                                  std::ssize(texts[text]), hidden, pooling));
      });
}

void classify_texts(Gpt& model, const RunPass& run, std::span<const Ids> texts, std::span<const Ids> types,
                    std::int64_t batch, const OnProbabilities& on_probabilities) {
  const auto labels = static_cast<std::size_t>(model.config().scores());
  in_batches(
      model, run, texts, types, batch,
      [&](Tape& tape, const tensor::Batch& padded) { return model.class_scores(tape, padded); },
      [&](std::size_t text, std::size_t place, std::size_t together, const tensor::Tensor& scores) {
        const std::int64_t columns = scores.shape()[1],
                           rows = scores.shape()[0] / static_cast<std::int64_t>(together);
        const float* row = scores.data<float>() + static_cast<std::int64_t>(place) * rows * columns;
        std::vector<double> out;
        const std::size_t counted = model.config().labels_tokens() ? texts[text].size() : 1;
        for (std::size_t i = 0; i < counted; ++i, row += columns) append_softmax(row, labels, out);
        on_probabilities(text, out);
      });
}

}  // namespace sherd::models
