#pragma once

#include <cstdint>

#include "bench/suite/limits.h"

namespace sherd::bench {

// The passes of an optimizer that takes its steps one after the other, each as fast as the compiler
// vectorises it.
void upcast(const std::uint16_t* from, float* to, std::int64_t n);
double sum_of_squares(const float* x, std::int64_t n);
void scale(float* x, float factor, std::int64_t n);
void round_to_16(const float* from, std::uint16_t* to, std::int64_t n);
struct AdamConstants {
  float beta1 = 0.9f, beta2 = 0.999f, root_scale = 1, eps = 1e-8f, decay = 1e-4f, step_size = 1e-3f;
};
void adam_pass(const bench::OptimizerStreams& s, const AdamConstants& c, std::int64_t begin,
               std::int64_t end);

}  // namespace sherd::bench
