#include "optim/pruned.h"

#include <gtest/gtest.h>

#include <bit>

#include "device/device.h"
#include "optim/span_fixture.h"
#include "simt/emulated.h"

namespace sherd::optim {
namespace {

constexpr float negative_zero = -0.0f;

/// Weights of which every third is pruned, and their gradients; `moved`: what a rule may have made of them.
struct PrunedCase {
  std::vector<float> before{negative_zero, 1.5f,   -2.0f, negative_zero, 0.0f,  3.0f,
                            negative_zero, -1e-9f, 5.0f,  negative_zero, -7.0f, 0.25f};
  std::vector<float> moved{0.0f,          1.25f,  negative_zero, 4.0f,  -0.5f, 0.0f,
                           negative_zero, -1e-9f, 5.5f,          -3.0f, -7.5f, negative_zero};
  std::vector<float> gradients{0, 1, negative_zero, 0, 0, negative_zero, 0, 2, 3, 0, 0, 1};
};

/// On the processor, and by the emulated kernels of a GPU.
void on_both_sides(const std::function<void(const std::function<void(const PrunedSpan&)>& mark,
                                            const std::function<void(const PrunedSpan&)>& restore)>& test) {
  Arena arena(2);
  test([&](const PrunedSpan& span) { mark_pruned(span, arena); },
       [&](const PrunedSpan& span) { restore_pruned(span, arena); });
  const auto device = device::make_cpu_device(1);
  test([&](const PrunedSpan& span) { test::emulated_mark_pruned(span, *device); },
       [&](const PrunedSpan& span) { test::emulated_restore_pruned(span, *device); });
}

bool same_bits(float a, float b) {
  return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b);
}

void expect_kept(const PrunedCase& c, std::size_t i, float weight, float copy) {
  if (i % 3 == 0) {
    EXPECT_TRUE(same_bits(weight, negative_zero)) << i;
    EXPECT_TRUE(same_bits(copy, negative_zero)) << i;
  } else {
    EXPECT_TRUE(same_bits(weight, c.moved[i] == 0 ? 0.0f : c.moved[i])) << i << ' ' << weight;
    EXPECT_FALSE(same_bits(copy, negative_zero)) << i;
  }
}

TEST(PrunedSpans, weights_that_a_rule_has_moved_are_minus_zero_again_and_no_others) {
  for (const DType grads : {DType::f32, DType::bf16, DType::f16})
    for (const DType params : {DType::f32, DType::bf16, DType::f16})
      for (const bool split : {false, true}) {
        if (split && params != DType::bf16) continue;
        SCOPED_TRACE(
            cat(name_of(grads), " gradients, parameters in ", name_of(params), split ? ", split" : ""));
        on_both_sides([&](const auto& mark, const auto& restore) {
          const PrunedCase c;
          Arena arena(1);
          Span all(c.before.size(), grads, params);
          const auto put = [&](const std::vector<float>& values) {
            all.master = values;
            const auto n = static_cast<std::int64_t>(values.size());
            if (split) {
              all.low.resize(values.size());
              split_master(all.master.data(), all.param.bytes.data(), all.low.data(), n, arena);
            } else if (params != DType::f32) {
              round_masters(all.master.data(), all.param.bytes.data(), params, n, arena);
            }
          };
          for (std::size_t i = 0; i < c.gradients.size(); ++i) all.grad.set(i, c.gradients[i]);
          put(c.before);
          PrunedSpan span{.master = split ? nullptr : all.master.data(),
                          .grad = all.grad.bytes.data(),
                          .grad_dtype = grads,
                          .n = static_cast<std::int64_t>(c.before.size())};
          if (params != DType::f32) span.param = all.param.bytes.data();
          if (split) span.low = all.low.data();
          mark(span);
          for (std::size_t i = 0; i < c.gradients.size(); ++i) {
            EXPECT_EQ(same_bits(all.grad.get(i), negative_zero), i % 3 == 0) << i;
            EXPECT_EQ(all.grad.get(i), c.gradients[i]) << i;  // zeros are equal
          }
          put(c.moved);
          if (split) span.low = all.low.data();
          restore(span);
          if (split) join_master(all.param.bytes.data(), all.low.data(), all.master.data(), span.n, arena);
          for (std::size_t i = 0; i < c.before.size(); ++i)
            expect_kept(c, i, all.master[i], params == DType::f32 ? all.master[i] : all.param.get(i));
        });
      }
}

}  // namespace
}  // namespace sherd::optim
