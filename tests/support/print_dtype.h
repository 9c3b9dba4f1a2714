#pragma once

#include <gtest/gtest.h>

#include <ostream>
#include <string>

#include "base/dtype.h"

namespace sherd {

/// How GoogleTest shows one, also in the names of tests.
inline void PrintTo(DType dtype, std::ostream* out) {
  *out << name_of(dtype);
}

/// The name of a test by its type.
inline std::string dtype_name(const ::testing::TestParamInfo<DType>& tested) {
  return std::string(name_of(tested.param));
}

}  // namespace sherd
