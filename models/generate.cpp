#include "models/generate.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace sherd::models {
namespace {

/// Contexts grow to multiples of this, so that few shapes of products need to be prepared. What lies right of
/// a token cannot reach it through causal attention.
constexpr std::int64_t context_step = 32;

/// Ids of the `count` likeliest tokens, likeliest first.
std::vector<std::int32_t> likeliest(std::span<const float> logits, std::size_t count) {
  std::vector<std::int32_t> ids(logits.size());
  std::iota(ids.begin(), ids.end(), 0);
  const auto likelier = [&](std::int32_t a, std::int32_t b) {
    const float x = logits[static_cast<std::size_t>(a)], y = logits[static_cast<std::size_t>(b)];
    return x != y ? x > y : a < b;
  };
  std::partial_sort(ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(count), ids.end(), likelier);
  ids.resize(count);
  return ids;
}

class EvaluationMode {
 public:
  explicit EvaluationMode(autograd::Tape& tape) : tape_(tape), training_(tape.training) {
    tape.training = false;
  }
  ~EvaluationMode() { tape_.training = training_; }
  EvaluationMode(const EvaluationMode&) = delete;
  EvaluationMode& operator=(const EvaluationMode&) = delete;

 private:
  autograd::Tape& tape_;
  bool training_;
};

std::vector<float> next_logits(Gpt& model, autograd::Tape& tape, std::span<const std::int32_t> text) {
  const std::int64_t max_seq = model.options().max_seq;
  const auto used = std::min(static_cast<std::int64_t>(text.size()), max_seq);
  const std::int64_t length = std::min((used + context_step - 1) / context_step * context_step, max_seq);
  std::vector<std::int32_t> context(static_cast<std::size_t>(length), 0);
  std::copy(text.end() - static_cast<std::ptrdiff_t>(used), text.end(), context.begin());
  const auto tokens = tensor::Tensor::of<std::int32_t>(tape.device(), {1, length}, context);
  const tensor::Tensor scores = model.logits_at(tape, tokens, used - 1);
  tensor::Tensor wide = tape.empty({scores.numel()}, DType::f32);
  tape.kernels().copy(scores, wide);
  const tensor::Tensor read = tensor::to_host(tape.device(), wide);
  return {read.data<float>(), read.data<float>() + model.options().vocab_size};
}

}  // namespace

std::int32_t sample_token(std::span<const float> logits, const Sampling& sampling, std::uint64_t index) {
  require(!logits.empty(), "no logits to sample from");
  require(sampling.temperature >= 0, "the temperature must not be negative, but is ", sampling.temperature);
  require(sampling.top_k >= 0, "top_k must not be negative, but is ", sampling.top_k);
  for (const float logit : logits)
    if (std::isnan(logit)) fail(ErrorKind::numerics, "the model's logits hold NaN: its weights are damaged");
  if (sampling.temperature == 0) return likeliest(logits, 1).front();
  const std::size_t count =
      sampling.top_k == 0 ? logits.size() : std::min(logits.size(), static_cast<std::size_t>(sampling.top_k));
  const std::vector<std::int32_t> ids = likeliest(logits, count);
  const double highest = logits[static_cast<std::size_t>(ids.front())];
  std::vector<double> upto;
  double sum = 0;
  for (const std::int32_t id : ids)
    upto.push_back(sum += std::exp((logits[static_cast<std::size_t>(id)] - highest) / sampling.temperature));
  const double drawn = uniform_at(sampling.key, index) * sum;
  const auto chosen = std::upper_bound(upto.begin(), upto.end(), drawn);
  return chosen == upto.end() ? ids.back() : ids[static_cast<std::size_t>(chosen - upto.begin())];
}

std::vector<std::int32_t> generate(Gpt& model, autograd::Tape& tape, std::span<const std::int32_t> prompt,
                                   std::int64_t max_tokens, const Sampling& sampling,
                                   const std::function<bool(std::int32_t)>& on_token) {
  require(!prompt.empty(), "generation needs a prompt of at least one token");
  const EvaluationMode mode(tape);
  std::vector<std::int32_t> text(prompt.begin(), prompt.end());
  for (std::int64_t i = 0; i < max_tokens; ++i) {
    const auto logits = next_logits(model, tape, text);
    const std::size_t ids =
        sampling.ids > 0 ? std::min(logits.size(), static_cast<std::size_t>(sampling.ids)) : logits.size();
    text.push_back(
        sample_token(std::span<const float>(logits).first(ids), sampling, static_cast<std::uint64_t>(i)));
    if (on_token && !on_token(text.back())) break;
  }
  return {text.begin() + static_cast<std::ptrdiff_t>(prompt.size()), text.end()};
}

}  // namespace sherd::models
