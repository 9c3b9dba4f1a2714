#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace sherd::test {

inline double norm(const std::vector<double>& x) {
  double squares = 0;
  for (const double v : x) squares += v * v;
  return std::sqrt(squares);
}

inline std::vector<double> minus(std::vector<double> a, const std::vector<double>& b) {
  for (std::size_t i = 0; i < a.size(); ++i) a[i] -= b[i];
  return a;
}

/// In magnitude.
inline double largest(const std::vector<double>& x) {
  double out = 0;
  for (const double v : x) out = std::max(out, std::abs(v));
  return out;
}

/// Every element is within `tolerance` of the largest.
inline void expect_near(const std::vector<double>& got, const std::vector<double>& want, double tolerance) {
  ASSERT_EQ(got.size(), want.size());
  const double scale = std::max(largest(want), 1e-3);
  for (std::size_t i = 0; i < got.size(); ++i)
    ASSERT_NEAR(got[i], want[i], tolerance * scale) << "element " << i;
}

}  // namespace sherd::test
