#include "models/inference/embed.h"

#include <algorithm>

#include "tensor/host_values.h"

namespace sherd::models {
namespace {

using Ids = std::vector<std::int32_t>;

/// The texts in rows of one length, whose ends are documents that no text sees.
tensor::Batch padded_batch(device::Device& device, std::span<const Ids> texts, std::int64_t width) {
  Ids tokens, positions, documents{0};
  for (const Ids& text : texts) {
    tokens.insert(tokens.end(), text.begin(), text.end());
    tokens.resize(tokens.size() + static_cast<std::size_t>(width) - text.size(), text.back());
    for (std::int64_t i = 0; i < width; ++i)
      positions.push_back(static_cast<std::int32_t>(i < std::ssize(text) ? i : i - std::ssize(text)));
    const std::int32_t begin = documents.back();
    documents.push_back(begin + static_cast<std::int32_t>(text.size()));
    if (std::ssize(text) < width) documents.push_back(begin + static_cast<std::int32_t>(width));
  }
  const tensor::Shape shape{std::ssize(texts), width};
  tensor::Batch out{{"tokens", tensor::Tensor::of<std::int32_t>(device, shape, tokens)},
                    {"positions", tensor::Tensor::of<std::int32_t>(device, shape, positions)}};
  const tensor::Tensor bounds = tensor::Tensor::empty(device, {std::ssize(documents)}, DType::i32,
                                                      device::Category::activations, device.processor_tier());
  std::copy(documents.begin(), documents.end(), bounds.data<std::int32_t>());
  out["documents"] = bounds;
  return out;
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

}  // namespace

void embed_texts(Gpt& model, const RunPass& run, std::span<const Ids> texts, std::int64_t batch,
                 Pooling pooling, const OnEmbedding& on_embedding) {
  require(batch >= 1, "texts are embedded one at a time or more, not ", batch);
  const std::int64_t hidden = model.config().hidden_size;
  for (std::size_t begin = 0; begin < texts.size();) {
    const std::span<const Ids> some =
        texts.subspan(begin, std::min(static_cast<std::size_t>(batch), texts.size() - begin));
    std::int64_t width = 0;
    for (const Ids& text : some) {
      require(!text.empty(), "a text to embed needs a token at least");
      width = std::max(width, std::ssize(text));
    }
    tensor::Tensor vectors;
    run([&](Tape& tape) {
      const tensor::Tensor found = model.hidden(tape, padded_batch(tape.device(), some, width));
      const tensor::Tensor wide = tape.empty(found.shape(), DType::f32);
      tape.kernels().copy(found, wide);
      vectors = tensor::to_host(tape.device(), wide);
    });
    for (std::size_t i = 0; i < some.size(); ++i)
      on_embedding(begin + i, pooled(vectors.data<float>() + static_cast<std::int64_t>(i) * width * hidden,
                                     std::ssize(some[i]), hidden, pooling));
    begin += some.size();
  }
}

}  // namespace sherd::models
