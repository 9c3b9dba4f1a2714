#include "tensor/rotary.h"

#include <cmath>

#include "base/error.h"

namespace sherd::tensor {
namespace {

constexpr double two_pi = 6.283185307179586;

/// The share of pair i that yarn divides: 0 for pairs that turn more than beta_fast times within the original
/// positions, 1 for those that turn less than beta_slow times.
double yarn_ramp(const Rotary& r, std::int64_t i, std::int64_t half) {
  const double dim = 2.0 * static_cast<double>(half), positions = static_cast<double>(r.original_positions);
  double low = dim * std::log(positions / (r.beta_fast * two_pi)) / (2 * std::log(r.base));
  double high = dim * std::log(positions / (r.beta_slow * two_pi)) / (2 * std::log(r.base));
  if (r.truncate) low = std::floor(low), high = std::ceil(high);
  low = low > 0 ? low : 0, high = high < dim - 1 ? high : dim - 1;
  if (low == high) high += 0.001;
  const double ramp = (static_cast<double>(i) - low) / (high - low);
  return ramp < 0 ? 0 : ramp > 1 ? 1 : ramp;
}

double frequency(const Rotary& r, std::int64_t i, std::int64_t half) {
  const double own = std::pow(r.base, -static_cast<double>(i) / static_cast<double>(half));
  switch (r.scaling) {
    case RotaryScaling::none:
    case RotaryScaling::dynamic:
      return own;
    case RotaryScaling::linear:
      return own / r.factor;
    case RotaryScaling::llama3: {
      const double turns = static_cast<double>(r.original_positions) * own / two_pi;
      const double kept = (turns - r.low_freq_factor) / (r.high_freq_factor - r.low_freq_factor);
      return kept <= 0 ? own / r.factor : kept >= 1 ? own : (1 - kept) * own / r.factor + kept * own;
    }
    case RotaryScaling::yarn: {
      const double divided = yarn_ramp(r, i, half);
      return own / r.factor * divided + own * (1 - divided);
    }
    case RotaryScaling::longrope:
      return own / (*r.factors.values)[static_cast<std::size_t>(i)];
  }
  return own;
}

}  // namespace

double attention_scale(const Rotary& r) {
  if (r.attention_factor != 0) return r.attention_factor;
  return r.scaling == RotaryScaling::yarn && r.factor > 1 ? 0.1 * std::log(r.factor) + 1 : 1;
}

std::vector<double> rotary_frequencies(const Rotary& r, std::int64_t half) {
  require(r.scaling != RotaryScaling::longrope || std::ssize(*r.factors.values) == half,
          "rotary: longrope has ", r.factors.values ? r.factors.values->size() : 0, " factors for the ", half,
          " pairs of a head that turn");
  std::vector<double> out;
  for (std::int64_t i = 0; i < half; ++i) out.push_back(frequency(r, i, half));
  return out;
}

void check(const Rotary& r) {
  constexpr const char* name = "rotary";
  require(r.base > 0, name, ": the base must be positive, not ", r.base);
  require(r.share > 0 && r.share <= 1, name, ": the share of a head that turns must be in (0, 1], not ",
          r.share);
  require(r.query_beta == 0 || (r.query_positions > 0 && r.share == 1), name,
          ": query_beta needs query_positions, and a whole head that turns");
  require(r.attention_factor >= 0, name, ": attention_factor must not be negative, as ", r.attention_factor);
  if (r.scaling == RotaryScaling::none) return;
  if (r.scaling == RotaryScaling::longrope) {
    require(r.factors.values != nullptr, name, ": longrope needs a factor for each pair of a head");
    for (const double factor : *r.factors.values)
      require(factor > 0, name, ": longrope's factors must be positive, not ", factor);
    return;
  }
  require(r.factor > 0, name, ": the factor must be positive, not ", r.factor);
  if (r.scaling == RotaryScaling::linear) return;
  require(r.original_positions > 0, name, ": llama3 and yarn need original_positions, the sequence length ",
          "that the model was first trained with; not ", r.original_positions);
  if (r.scaling == RotaryScaling::llama3)
    require(0 < r.low_freq_factor && r.low_freq_factor < r.high_freq_factor, name, ": low_freq_factor ",
            r.low_freq_factor, " must be positive and below high_freq_factor ", r.high_freq_factor);
  if (r.scaling == RotaryScaling::yarn)
    require(r.base > 1 && r.beta_slow > 0 && r.beta_slow <= r.beta_fast, name, ": yarn needs a base above 1 ",
            "and 0 < beta_slow <= beta_fast, not a base of ", r.base, " and ", r.beta_slow, " and ",
            r.beta_fast);
}

}  // namespace sherd::tensor
