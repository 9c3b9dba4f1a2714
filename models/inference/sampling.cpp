#include "models/inference/generate.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "base/error.h"

namespace sherd::models {
namespace {

/// Logits of the ids that may be drawn, with what the text so far changes in them.
std::vector<float> penalized(std::span<const float> logits, double penalty,
                             std::span<const std::int32_t> text) {
  std::vector<float> out(logits.begin(), logits.end());
  if (penalty == 1) return out;
  std::vector<bool> seen(out.size());
  for (const std::int32_t id : text) {
    const auto at = static_cast<std::size_t>(id);
    if (at >= out.size() || seen[at]) continue;
    seen[at] = true;
    out[at] = static_cast<float>(out[at] > 0 ? out[at] / penalty : out[at] * penalty);
  }
  return out;
}

/// Ids of the tokens that may be drawn, the likeliest first, and the running sums of their probabilities (of
/// all that top_k leaves, times some factor).
class Candidates {
 public:
  Candidates(const std::vector<float>& logits, const Sampling& sampling)
      : logits_(logits), ids_(logits.size()), temperature_(sampling.temperature) {
    std::iota(ids_.begin(), ids_.end(), 0);
    highest_ = *std::max_element(logits.begin(), logits.end());
    std::size_t most = logits.size();
    if (sampling.top_k > 0) most = std::min(most, static_cast<std::size_t>(sampling.top_k));
    if (most < logits.size()) sort_to(most);
    if (most < logits.size() || sampling.top_p >= 1)
      take(most);  // in any order
    else
      for (const float logit : logits) total_ += weight(logit);
    if (sampling.top_p < 1) cut(most, sampling.top_p);
  }

  std::int32_t draw(double uniform) const {
    const auto chosen = std::upper_bound(upto_.begin(), upto_.end(), uniform * upto_.back());
    return chosen == upto_.end() ? ids_[upto_.size() - 1]
                                 : ids_[static_cast<std::size_t>(chosen - upto_.begin())];
  }

 private:
  double weight(float logit) const {
    return std::exp((static_cast<double>(logit) - highest_) / temperature_);
  }
  void sort_to(std::size_t count) {
    const auto likelier = [&](std::int32_t a, std::int32_t b) {
      const float x = logits_[static_cast<std::size_t>(a)], y = logits_[static_cast<std::size_t>(b)];
      return x != y ? x > y : a < b;
    };
    const auto from = ids_.begin() + static_cast<std::ptrdiff_t>(sorted_);
    std::partial_sort(from, ids_.begin() + static_cast<std::ptrdiff_t>(count), ids_.end(), likelier);
    sorted_ = count;
  }
  void take(std::size_t count) {
    double sum = upto_.empty() ? 0 : upto_.back();
    for (std::size_t i = upto_.size(); i < count; ++i)
      upto_.push_back(sum += weight(logits_[static_cast<std::size_t>(ids_[i])]));
    if (total_ == 0) total_ = sum;
  }
  /// Keeps the fewest that reach `share`. Most often these are few, and the rest need not be sorted.
  void cut(std::size_t most, double share) {
    while (upto_.size() < most && (upto_.empty() || upto_.back() < share * total_)) {
      const std::size_t count = std::min(most, std::max<std::size_t>(64, 8 * upto_.size()));
      sort_to(count);
      take(count);
    }
    const auto reached = std::lower_bound(upto_.begin(), upto_.end(), share * total_);
    if (reached != upto_.end()) upto_.erase(reached + 1, upto_.end());
  }

  const std::vector<float>& logits_;
  std::vector<std::int32_t> ids_;
  std::vector<double> upto_;
  double temperature_, highest_ = 0, total_ = 0;
  std::size_t sorted_ = 0;
};

}  // namespace

void check_sampling(const Sampling& sampling) {
  require(sampling.temperature >= 0, "the temperature must not be negative, but is ", sampling.temperature);
  require(sampling.top_k >= 0, "top_k must not be negative, but is ", sampling.top_k);
  require(sampling.top_p > 0 && sampling.top_p <= 1, "top_p is a probability above 0, up to 1, and not ",
          sampling.top_p);
  require(sampling.repetition_penalty > 0 && std::isfinite(sampling.repetition_penalty),
          "a repetition penalty must be positive (1: none), but is ", sampling.repetition_penalty);
}

std::int32_t sample_token(std::span<const float> logits, const Sampling& sampling, std::uint64_t index,
                          std::span<const std::int32_t> text) {
  require(!logits.empty(), "no logits to sample from");
  check_sampling(sampling);
  for (const float logit : logits)
    if (std::isnan(logit)) fail(ErrorKind::numerics, "the model's logits hold NaN: its weights are damaged");
  if (sampling.ids > 0)
    logits = logits.first(std::min(logits.size(), static_cast<std::size_t>(sampling.ids)));
  const std::vector<float> scores = penalized(logits, sampling.repetition_penalty, text);
  if (sampling.temperature == 0)
    return static_cast<std::int32_t>(std::max_element(scores.begin(), scores.end()) - scores.begin());
  return Candidates(scores, sampling).draw(uniform_at(sampling.key, index));
}

}  // namespace sherd::models
