#include "models/adapters/layer_products.h"

#include <algorithm>

namespace sherd::models {

std::int64_t LayerProducts::find_rows(const AdaptedWeight& adapted) {
  rank = adapted.rank, columns = adapted.weight.columns;
  const std::vector<int>& targets = adapted.tensors;
  std::int64_t held = 0;
  for (const PublishedParameter::RowRun& run : adapted.weight.rows) {
    const auto target = std::find(targets.begin(), targets.end(), run.tensor);
    for (std::int64_t i = 0; i < run.rows; ++i) {
      row_of.push_back(target == targets.end() ? -1 : held++);
      target_of.push_back(target == targets.end() ? -1 : target - targets.begin());
    }
  }
  return held;
}

void LayerProducts::add(std::int64_t row, std::int64_t first, std::int64_t end, float factor,
                        float* to) const {
  const std::int64_t held = row_of[static_cast<std::size_t>(row)];
  if (held < 0) return;
  const float* of_b = b.data() + held * rank;
  const float* of_a = a.data() + target_of[static_cast<std::size_t>(row)] * rank * columns + first;
  std::vector<float> sum(static_cast<std::size_t>(end - first));
  for (std::int64_t k = 0; k < rank; ++k)
    for (std::size_t c = 0; c < sum.size(); ++c)
      sum[c] += of_b[k] * of_a[k * columns + static_cast<std::int64_t>(c)];
  for (std::size_t c = 0; c < sum.size(); ++c) to[c] += factor * sum[c];
}

}  // namespace sherd::models
