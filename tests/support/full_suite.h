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
  std::vector<std::size_t> starts;  // each parameter's values are numbered from here
  std::size_t count = 0;
  for (const int of_this : values) starts.push_back(count), count += static_cast<std::size_t>(of_this);
  std::vector<char> seen(count * count);
  // Calls take(pair) with the place in `seen` of each pair. Tests are not optimised, and every program that
  // holds a matrix looks for its part when it starts: hence no sets of pairs.
  const auto each_pair = [&](const std::vector<int>& combination, const auto& take) {
    for (std::size_t a = 0; a < combination.size(); ++a) {
      const std::size_t row = (starts[a] + static_cast<std::size_t>(combination[a])) * count;
      for (std::size_t b = a + 1; b < combination.size(); ++b)
        take(row + starts[b] + static_cast<std::size_t>(combination[b]));
    }
  };
  // The combination that follows, the last parameter's values first; false behind the last one.
  const auto next = [&](std::vector<int>& combination) {
    for (std::size_t place = values.size(); place-- > 0;) {
      if (++combination[place] < values[place]) return true;
      combination[place] = 0;
    }
    return false;
  };
  std::set<std::vector<int>> chosen;
  std::size_t bound = values.size() * values.size();  // none has more new pairs than the one before had
  while (true) {
    std::vector<int> best, combination(values.size());
    std::size_t most = 0;
    do {
      std::size_t fresh = 0;
      each_pair(combination, [&](std::size_t pair) { fresh += seen[pair] == 0; });
      if (fresh > most) best = combination, most = fresh;
    } while (most < bound && next(combination));
    if (most == 0) return chosen;
    chosen.insert(best), bound = most;
    each_pair(best, [&](std::size_t pair) { seen[pair] = 1; });
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
