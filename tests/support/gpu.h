#pragma once

#include <gtest/gtest.h>

#include "device/cuda.h"

/// At the start of a test that needs a GPU: skips it, with the reason, where there is none.
#define SHERD_NEEDS_GPU()                                        \
  if (const auto status = ::sherd::device::cuda_status(); !status.usable()) \
  GTEST_SKIP() << "no GPU: " << status.why_not
