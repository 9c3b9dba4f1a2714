// A meta device charges what the CPU's kernels charge, call by call.
#include <gtest/gtest.h>

#include <functional>

#include "support/print_dtype.h"
#include "tensor/kernels.h"

namespace sherd::tensor {
namespace {

using device::Tier;
using Call = std::function<void(Kernels&)>;

/// The workspace that `call` held at most, what of it stayed, and to what size the device's memory grew.
struct HeapUse {
  std::uint64_t peak, kept, memory;
};

HeapUse heap_used_by(const std::shared_ptr<Device>& device, const Call& call) {
  const auto kernels = make_kernels(*device);
  call(*kernels);
  const device::Ledger& ledger = device->ledger();
  const std::uint64_t kept = ledger.current(Tier::device, Category::workspace);
  return {ledger.peak(Tier::device, Category::workspace), kept, kept + device->unused_bytes()};
}

void expect_meta_alike(const Call& call, const std::string& what) {
  const HeapUse real = heap_used_by(device::make_cpu_device(1), call),
                meta = heap_used_by(device::make_meta_device(1), call);
  EXPECT_EQ(meta.peak, real.peak) << what;
  EXPECT_EQ(meta.kept, real.kept) << what;
  // A kernel may take in parts, of which some are small, what is booked as one: heaps grow by 2 MiB.
  EXPECT_NEAR(static_cast<double>(meta.memory), static_cast<double>(real.memory), 2.3 * (1 << 20)) << what;
}

Tensor hundredths(Kernels& kernels, const Shape& shape, DType dtype) {
  const Tensor out = Tensor::empty(kernels.device(), shape, dtype);
  kernels.fill(out, 0.01);
  return out;
}

class MetaKernels : public ::testing::TestWithParam<DType> {};

TEST_P(MetaKernels, BookTheProductsWorkspace) {
  const DType dtype = GetParam();
  // Rows, columns and depth below, at and beyond the limits at which products are cut; odd ones are copied.
  const std::int64_t extents[][3] = {{1, 1, 1},       {3, 5, 7},      {130, 768, 64},   {257, 1600, 1601},
                                     {64, 900, 5000}, {300, 9, 4096}, {20, 3000, 9217}, {128, 1537, 1537}};
  for (const auto& [m, n, k] : extents) {
    if (dtype == DType::f64 && m * n * k > 1000) continue;  // slow, and without workspace
    for (const bool trans_a : {false, true})
      for (const bool trans_b : {false, true})
        for (const bool wide : {false, true}) {
          const auto call = [&, m = m, n = n, k = k](Kernels& kernels) {
            Matmul args;
            args.a = hundredths(kernels, trans_a ? Shape{k, m} : Shape{m, k}, dtype);
            args.b = hundredths(kernels, trans_b ? Shape{n, k} : Shape{k, n}, dtype);
            args.c = hundredths(kernels, {m, n}, wide && dtype != DType::f64 ? DType::f32 : dtype);
            args.trans_a = trans_a, args.trans_b = trans_b, args.accumulate = wide;
            kernels.matmul(args);
          };
          expect_meta_alike(call, cat(m, "x", n, "x", k, trans_a ? " a^T" : "", trans_b ? " b^T" : ""));
        }
  }
}

TEST_P(MetaKernels, BookTheWorkspaceOfSumsAndNorms) {
  const DType dtype = GetParam(), compute = dtype == DType::f64 ? DType::f64 : DType::f32;
  for (const std::int64_t rows : {1, 129, 1000, 40000}) {
    expect_meta_alike(
        [&](Kernels& kernels) {
          kernels.sum_rows(hundredths(kernels, {rows, 40}, dtype), hundredths(kernels, {40}, dtype), false);
        },
        cat("sum_rows of ", rows));
    for (const bool layer : {true, false})
      expect_meta_alike(
          [&](Kernels& kernels) {
            const Tensor x = hundredths(kernels, {rows, 40}, dtype), row = hundredths(kernels, {40}, dtype),
                         one = hundredths(kernels, {rows}, compute),
                         dweight = hundredths(kernels, {40}, dtype);
            if (layer)
              kernels.layer_norm_backward(x, row, one, one, x, x, dweight, hundredths(kernels, {40}, dtype),
                                          false);
            else
              kernels.rms_norm_backward(x, row, one, x, x, dweight, false);
          },
          cat(layer ? "layer norms of " : "rms norms of ", rows));
  }
}

TEST_P(MetaKernels, BookTheWorkspaceOfAttention) {
  const DType dtype = GetParam(), compute = dtype == DType::f64 ? DType::f64 : DType::f32;
  for (const std::int64_t head : {8, 33, 64})
    for (const std::int64_t seq : {1, 65, dtype == DType::f64 ? 66 : 300})
      for (const int kv_heads : {1, 4}) {
        const auto call = [&](Kernels& kernels) {
          Attention geometry;
          geometry.heads = 4, geometry.kv_heads = kv_heads;
          const Tensor qkv = hundredths(kernels, {2, seq, (4 + 2 * kv_heads) * head}, dtype);
          const Tensor out = hundredths(kernels, {2, seq, 4 * head}, dtype),
                       lse = hundredths(kernels, {2, 4, seq}, compute);
          if (head % 2 == 0) kernels.rotary(qkv, geometry, {}, false, qkv);
          kernels.attention(qkv, geometry, out, lse);
          kernels.attention_backward(qkv, geometry, out, lse, out, hundredths(kernels, qkv.shape(), dtype));
        };
        expect_meta_alike(call, cat("heads of ", head, ", seq ", seq, ", ", kv_heads, " key-value heads"));
      }
}

TEST_P(MetaKernels, BookTheWorkspaceOfTheLongestDocument) {
  const DType dtype = GetParam(), compute = dtype == DType::f64 ? DType::f64 : DType::f32;
  for (const Documents& bounds : {Documents{0, 100, 130}, {0, 30, 30, 130}, {0, 1, 65, 66, 130}}) {
    Attention geometry{.heads = 4, .kv_heads = 2};
    geometry.documents = std::make_shared<const Documents>(bounds);
    const auto call = [&](Kernels& kernels) {
      const Tensor qkv = hundredths(kernels, {1, 130, 8 * 33}, dtype),
                   out = hundredths(kernels, {1, 130, 4 * 33}, dtype),
                   lse = hundredths(kernels, {1, 4, 130}, compute);
      kernels.attention(qkv, geometry, out, lse);
      kernels.attention_backward(qkv, geometry, out, lse, out, hundredths(kernels, qkv.shape(), dtype));
    };
    expect_meta_alike(call, cat(bounds.size() - 1, " documents"));
  }
}

TEST_P(MetaKernels, BookTheAnglesUpToTheLastPosition) {
  Attention geometry;
  for (const Positions& at : {Positions{.first = 5000}, Positions{.first = 10, .count = 4, .second = 9000},
                              Positions{.first = 9000, .count = 4, .second = 10}}) {
    geometry.positions = at;
    expect_meta_alike(
        [&](Kernels& k) {
          const Tensor qkv = hundredths(k, {2, 20, 3 * 64}, GetParam());
          k.rotary(qkv, geometry, {}, false, qkv);
        },
        cat("from ", at.first));
  }
}

INSTANTIATE_TEST_SUITE_P(All, MetaKernels, ::testing::Values(DType::f32, DType::bf16, DType::f16, DType::f64),
                         [](const auto& test) { return std::string(name_of(test.param)); });

TEST(MetaKernelsOfLargeTensors, TakeNoMemory) {
  const auto device = device::make_meta_device(2);
  const auto kernels = make_kernels(*device);
  Matmul args;  // two terabytes
  args.a = Tensor::empty(*device, {1 << 19, 1 << 20}, DType::bf16);
  args.b = Tensor::empty(*device, {1 << 20, 1 << 10}, DType::bf16);
  args.c = Tensor::empty(*device, {1 << 19, 1 << 10}, DType::bf16);
  kernels->fill(args.a, 1);
  kernels->matmul(args);
  kernels->copy(args.c, args.c);
  EXPECT_GT(device->ledger().peak(Tier::device, Category::workspace), 0u);
}

TEST(MetaKernelsOfWrongShapes, AreRefused) {
  const auto device = device::make_meta_device(1);
  const auto kernels = make_kernels(*device);
  Matmul args;
  args.a = args.b = args.c = Tensor::empty(*device, {3, 4}, DType::f32);
  EXPECT_THROW(kernels->matmul(args), Error);
}

}  // namespace
}  // namespace sherd::tensor
