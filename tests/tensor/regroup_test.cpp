#include "tensor/cuda/attention/attention_library.h"

#include <gtest/gtest.h>

#include <numeric>

#include "simt/emulated.h"

namespace sherd::tensor {
namespace {

/// Every column of every row by the two orders' own descriptions, there and back.
TEST(RegroupHeads, PutsHeadsByKindAndBack) {
  const auto device = device::make_cpu_device(1);
  for (const auto& [heads, kv_heads, dim, rows] : {std::array{4, 2, 8, 1},
                                                   {6, 2, 16, 37},
                                                   {6, 3, 64, 5},
                                                   {32, 8, 128, 9},
                                                   {4, 1, 24, 3},
                                                   {3, 3, 8, 70}}) {
    AttentionExtents e;
    e.heads = heads, e.kv_heads = kv_heads, e.dim = dim;
    const std::int64_t width = e.width();
    std::vector<std::uint16_t> numbers(static_cast<std::size_t>(rows * width));
    std::iota(numbers.begin(), numbers.end(), std::uint16_t{1});
    const Tensor from = Tensor::empty(*device, {rows, width}, DType::bf16),
                 by_kind = Tensor::empty(*device, {rows, width}, DType::bf16),
                 back = Tensor::empty(*device, {rows, width}, DType::bf16);
    std::memcpy(from.raw(), numbers.data(), from.bytes());
    test::emulated_regroup(e, from.raw(), by_kind.raw(), rows, false, *device);
    test::emulated_regroup(e, by_kind.raw(), back.raw(), rows, true, *device);
    EXPECT_EQ(std::memcmp(back.raw(), from.raw(), from.bytes()), 0) << heads << "/" << kv_heads;
    const auto* found = reinterpret_cast<const std::uint16_t*>(by_kind.raw());
    const auto expect = [&](std::int64_t column, std::int64_t source) {
      for (std::int64_t row = 0; row < rows; ++row)
        for (std::int64_t d = 0; d < dim; ++d)
          ASSERT_EQ(found[row * width + column + d],
                    numbers[static_cast<std::size_t>(row * width + source + d)])
              << heads << "/" << kv_heads << " of " << dim << ", row " << row << ", column " << column + d;
    };
    for (std::int64_t g = 0; g < kv_heads; ++g) {
      for (std::int64_t r = 0; r < e.group(); ++r) expect((g * e.group() + r) * dim, e.query_col(g, r));
      expect((heads + g) * dim, e.key_col(g));
      expect((heads + kv_heads + g) * dim, e.value_col(g));
    }
  }
}

}  // namespace
}  // namespace sherd::tensor
