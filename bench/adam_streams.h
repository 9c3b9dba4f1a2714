#pragma once

#include <cstdint>

// What bench_adam measures against: loops that only move memory, and an optimizer step in separate passes.

namespace sherd::bench {

/// The fp32 streams of n elements, and 16-bit ones.
struct Streams {
  float *p, *m, *v, *g;
  std::uint16_t *p16, *g16;
};

/// The streaming limit of a fused step: over [begin, end), a multiple of 64 elements from a multiple of 64,
/// reads p, m, v, g and writes p, m, v and (past the caches) p16 with software prefetch and next to no
/// arithmetic. Processor features are chosen at run time; needs AVX2.
void move_streams(const Streams& s, std::int64_t begin, std::int64_t end);

/// The passes of an optimizer that takes its steps one after the other, each as fast as the compiler
/// vectorises it.
void upcast(const std::uint16_t* from, float* to, std::int64_t n);
double sum_of_squares(const float* x, std::int64_t n);
void scale(float* x, float factor, std::int64_t n);
void round_to_16(const float* from, std::uint16_t* to, std::int64_t n);
struct AdamConstants {
  float beta1 = 0.9f, beta2 = 0.999f, root_scale = 1, eps = 1e-8f, decay = 1e-4f, step_size = 1e-3f;
};
void adam_pass(const Streams& s, const AdamConstants& c, std::int64_t begin, std::int64_t end);

}  // namespace sherd::bench
