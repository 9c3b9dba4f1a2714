#pragma once

#include <cstddef>
#include <cstdlib>
#include <set>
#include <utility>
#include <vector>

namespace sherd::test {

/// Whether everything is to be tried: `scripts/test --full` sets SHERD_TEST_FULL. Else matrices of parameters
/// run a part in which every pair of values comes.
inline bool full_suite() {
  const char* value = std::getenv("SHERD_TEST_FULL");
  return value && *value && *value != '0';
}

/// Combinations of parameters with that many values each, as indices, in which every two values of two
/// parameters meet: greedily the one with the most new pairs, so the same on every machine.
inline std::set<std::vector<int>> pairwise(const std::vector<int>& values) {
  std::vector<std::vector<int>> all{{}};
  for (const int count : values) {
    std::vector<std::vector<int>> longer;
    for (const std::vector<int>& start : all)
      for (int value = 0; value < count; ++value) longer.push_back(start), longer.back().push_back(value);
    all = std::move(longer);
  }
  using Pair = std::pair<std::pair<std::size_t, int>, std::pair<std::size_t, int>>;
  std::set<Pair> seen;
  const auto pairs_of = [](const std::vector<int>& combination) {
    std::vector<Pair> pairs;
    for (std::size_t a = 0; a < combination.size(); ++a)
      for (std::size_t b = a + 1; b < combination.size(); ++b)
        pairs.push_back({{a, combination[a]}, {b, combination[b]}});
    return pairs;
  };
  std::set<std::vector<int>> chosen;
  while (true) {
    const std::vector<int>* best = nullptr;
    std::size_t most = 0;
    for (const std::vector<int>& combination : all) {
      std::size_t fresh = 0;
      for (const Pair& pair : pairs_of(combination)) fresh += !seen.contains(pair);
      if (fresh > most) best = &combination, most = fresh;
    }
    if (!best) return chosen;
    chosen.insert(*best);
    for (const Pair& pair : pairs_of(*best)) seen.insert(pair);
  }
}

/// Whether a test of that combination of a matrix is to run.
inline bool to_run(const std::vector<int>& values, const std::vector<int>& combination) {
  return full_suite() || pairwise(values).contains(combination);
}

/// The place of `value` among `values`.
template <class T, class Values>
int place_of(const T& value, const Values& values) {
  int place = 0;
  for (const auto& each : values) {
    if (value == each) break;
    ++place;
  }
  return place;
}

}  // namespace sherd::test
