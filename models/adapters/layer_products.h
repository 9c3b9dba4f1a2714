#pragma once

#include <cstdint>
#include <vector>

#include "models/hub/adapter_targets.h"

namespace sherd::models {

/// LoRA's products of a layer, whole, and the rows of its weight that have them.
struct LayerProducts {
  std::vector<float> a, b;  ///< lora_A: `rank` rows of each target behind each other; lora_B: the rows of all
  std::int64_t rank = 0, columns = 0;
  /// For each row of the weight, the index of its row of `b` (for IA³ its factor, for DoRA its magnitude),
  /// and of the target whose `a` it takes; -1: none.
  std::vector<std::int64_t> row_of, target_of;

  /// Sets all but `a` and `b`; gives the number of rows that `b` is to have.
  std::int64_t find_rows(const AdaptedWeight& adapted);
  /// Adds factor·B·A to elements [first, end) of a row, of which `to` is element `first`.
  void add(std::int64_t row, std::int64_t first, std::int64_t end, float factor, float* to) const;
};

}  // namespace sherd::models
