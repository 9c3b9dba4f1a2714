#pragma once

#include <ostream>

#include "base/dtype.h"

namespace sherd {

/// How GoogleTest shows one, also in the names of tests.
inline void PrintTo(DType dtype, std::ostream* out) {
  *out << name_of(dtype);
}

}  // namespace sherd
