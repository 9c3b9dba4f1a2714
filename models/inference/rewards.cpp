#include "models/inference/rewards.h"

#include <algorithm>
#include <numeric>

namespace sherd::models {
namespace {

using Ids = std::vector<std::int32_t>;

/// A row for each text, the longest first.
tensor::Batch batch_of(device::Device& device, std::span<const Ids> texts,
                       std::span<const std::size_t> which) {
  const auto rows = static_cast<std::int64_t>(texts[which[0]].size()), count = std::ssize(which);
  Ids tokens(static_cast<std::size_t>(count * rows), 0), labels(tokens.size(), -100), targets, sides, filling;
  for (std::int64_t i = 0; i < count; ++i) {
    const Ids& text = texts[which[static_cast<std::size_t>(i)]];
    const std::int64_t last = i * rows + std::ssize(text) - 1;
    std::copy(text.begin(), text.end(), tokens.begin() + i * rows);
    labels[static_cast<std::size_t>(last)] = text.back();
    targets.push_back(static_cast<std::int32_t>(last)), sides.push_back(1);
    filling.push_back(static_cast<std::int32_t>(rows - std::ssize(text)));
  }
  return {{"tokens", tensor::Tensor::of<std::int32_t>(device, {count, rows}, tokens)},
          {"labels", tensor::Tensor::of<std::int32_t>(device, {count, rows}, labels)},
          {"targets", tensor::Tensor::on_host(device, targets)},
          {"sides", tensor::Tensor::on_host(device, sides)},
          {"filling", tensor::Tensor::on_host(device, filling)}};
}

}  // namespace

std::vector<double> reward_texts(Gpt& model, const RunPass& run, std::span<const Ids> texts,
                                 std::int64_t batch, const std::function<void(std::size_t)>& told) {
  require(model.config().gives_rewards(), "the model has no head for rewards");
  for (const Ids& text : texts)
    require(!text.empty() && std::ssize(text) <= model.config().seq_length, "a text of ", text.size(),
            " tokens, where the model takes 1 to ", model.config().seq_length);
  std::vector<std::size_t> order(texts.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return texts[a].size() > texts[b].size(); });
  std::vector<double> out(texts.size());
  const auto step = static_cast<std::size_t>(std::max<std::int64_t>(1, batch));
  for (std::size_t begin = 0; begin < order.size(); begin += step) {
    const auto which = std::span(order).subspan(begin, std::min(step, order.size() - begin));
    run([&](Tape& tape) {
      const autograd::Replaced<bool> apart(tape.texts_apart, true);
      const nn::TextScores found = model.text_scores(tape, batch_of(tape.device(), texts, which), false);
      for (std::size_t i = 0; i < which.size(); ++i) out[which[i]] = found.log_prob[i];
    });
    if (told) told(begin + which.size());
  }
  return out;
}

}  // namespace sherd::models
