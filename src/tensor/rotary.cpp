#include "tensor/rotary.h"

#include "base/error.h"

namespace sherd::tensor {

void check(const Rotary& r) {
  constexpr const char* name = "rotary";
  require(r.base > 0, name, ": the base must be positive, not ", r.base);
  require(r.share > 0 && r.share <= 1, name, ": the share of a head that turns must be in (0, 1], not ",
          r.share);
  require(r.query_beta == 0 || (r.query_positions > 0 && r.share == 1), name,
          ": query_beta needs query_positions, and a whole head that turns");
  require(r.attention_factor >= 0, name, ": attention_factor must not be negative, as ", r.attention_factor);
  if (r.scaling == RotaryScaling::none) return;
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
