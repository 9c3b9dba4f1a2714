// What kernels tell of their work, against counts by hand.
#include "tensor/meta/recording_kernels.h"

#include <gtest/gtest.h>

#include <functional>

namespace sherd::tensor::meta {
namespace {

/// The work of what `call` runs on a meta device.
std::vector<KernelWork> work_of(const std::function<void(Kernels&)>& call) {
  const auto device = device::make_meta_device(1);
  std::vector<KernelWork> told;
  RecordingKernels kernels(make_kernels(*device), [&](const KernelWork& work) { told.push_back(work); });
  call(kernels);
  return told;
}

Tensor of(Kernels& kernels, const Shape& shape, DType dtype = DType::bf16) {
  return Tensor::empty(kernels.device(), shape, dtype);
}

TEST(RecordingKernels, TellOfProductsInFp8) {
  const auto work = work_of([](Kernels& k) {
    const Fp8Rule rule{Fp8Format::e4m3, Fp8Scaling::tensor};
    const Fp8Matrix a = empty_fp8(k.device(), rule, 32, 48), b = empty_fp8(k.device(), rule, 16, 48);
    k.to_fp8(of(k, {32, 48}), false, a, {});
    k.matmul({.c = of(k, {32, 16}, DType::f32), .fp8_a = a, .fp8_b = b});
  });
  ASSERT_EQ(work.size(), 4u);
  EXPECT_EQ(work[0].family, KernelFamily::movement);
  EXPECT_EQ(work[0].bytes, 2 * 32 * 48 + 4) << "the values, for the largest";
  EXPECT_EQ(work[1].bytes, 4 + 4) << "which becomes a scale";
  EXPECT_EQ(work[2].bytes, 2 * 32 * 48 + 32 * 48 + 4) << "the values, their codes and a scale";
  EXPECT_EQ(work[3], (KernelWork{.family = KernelFamily::gemm,
                                 .dtype = DType::bf16,
                                 .flops = 2.0 * 32 * 16 * 48,
                                 .bytes = 32 * 48 + 4 + 16 * 48 + 4 + 4 * 32 * 16,
                                 .rows = 32,
                                 .columns = 16,
                                 .depth = 48,
                                 .fp8 = true}));
  const auto by_blocks = work_of([](Kernels& k) {
    k.to_fp8(of(k, {32, 128}), false,
             empty_fp8(k.device(), {Fp8Format::e4m3, Fp8Scaling::blocks_1x128}, 32, 128), {});
  });
  ASSERT_EQ(by_blocks.size(), 1u) << "a tile has its scales at hand";
  EXPECT_EQ(by_blocks[0].bytes, 2 * 32 * 128 + 32 * 128 + 4 * 32);
}

TEST(RecordingKernels, TellTheExtentsOfProducts) {
  const auto work = work_of([](Kernels& k) {
    k.matmul({.a = of(k, {6, 10}), .b = of(k, {4, 10}), .c = of(k, {6, 4}), .trans_b = true});
    Matmul gradient{.a = of(k, {10, 6}), .b = of(k, {10, 4}), .c = of(k, {6, 4}, DType::f32)};
    gradient.trans_a = gradient.accumulate = true;
    k.matmul(gradient);
  });
  ASSERT_EQ(work.size(), 2u);
  EXPECT_EQ(work[0], (KernelWork{.family = KernelFamily::gemm,
                                 .dtype = DType::bf16,
                                 .flops = 2.0 * 6 * 4 * 10,
                                 .bytes = 2 * (60 + 40 + 24),
                                 .rows = 6,
                                 .columns = 4,
                                 .depth = 10}));
  EXPECT_TRUE(work[1].weight_gradient);
  EXPECT_EQ(work[1].bytes, 2 * (60 + 40) + 2 * 4 * 24) << "what is added to is read and written";
}

TEST(RecordingKernels, CountTheScoresThatQueriesSee) {
  constexpr std::int64_t batch = 2, seq = 9, heads = 4, kv_heads = 2, dim = 8;
  for (const std::int64_t window : {0, 3})
    for (const bool causal : {true, false}) {
      if (window > 0 && !causal) continue;
      const auto work = work_of([&](Kernels& k) {
        Attention geometry{.heads = heads, .kv_heads = kv_heads, .causal = causal, .window = window};
        const Tensor qkv = of(k, {batch, seq, (heads + 2 * kv_heads) * dim}),
                     out = of(k, {batch, seq, heads * dim}), lse = of(k, {batch, heads, seq}, DType::f32);
        k.attention(qkv, geometry, out, lse);
        k.attention_backward(qkv, geometry, out, lse, out, of(k, qkv.shape()));
      });
      ASSERT_EQ(work.size(), 2u);
      double seen = 0;
      for (std::int64_t i = 0; i < seq; ++i)
        for (std::int64_t j = 0; j < seq; ++j)
          seen += (!causal || j <= i) && (window == 0 || i - window < j) ? 1 : 0;
      EXPECT_EQ(work[0].scores, batch * heads * seen) << window << causal;
      EXPECT_EQ(work[0].pairs, batch * heads * seq * seq);
      EXPECT_EQ(work[0].flops, 2 * 2 * dim * batch * heads * seen) << "two products";
      EXPECT_EQ(work[1].flops, 2 * work[0].flops) << "four products";
      EXPECT_EQ(work[0].depth, dim);
      EXPECT_EQ(work[0].keys, window == 0 ? seq : 6) << "24 scores of 9 queries: as of 6 keys";
      EXPECT_TRUE(work[1].backward && !work[0].backward);
    }
}

TEST(RecordingKernels, TellWhatTheHostReads) {
  const auto work = work_of([](Kernels& k) {
    const Tensor logits = of(k, {5, 4}), weights = of(k, {5, 2});
    k.route(logits, {}, {.top_k = 2}, of(k, {5, 4}), of(k, {5, 2}, DType::i32), weights);
    k.combine_rows(of(k, {10, 16}), of(k, {5, 2}, DType::i32), weights, of(k, {5, 16}));
  });
  ASSERT_EQ(work.size(), 2u);
  EXPECT_TRUE(work[0].host_reads && !work[1].host_reads);
  EXPECT_EQ(work[0].bytes, 2 * (2 * 5 * 4 + 5 * 2) + 4 * 5 * 2);
}

TEST(RecordingKernels, CountTheRowsOfTablesThatAreLookedUp) {
  const auto work = work_of([](Kernels& k) {
    const Tensor ids = of(k, {5}, DType::i32), table = of(k, {1000, 16}), rows = of(k, {5, 16});
    k.embedding(ids, table, rows, {});
    k.embedding_backward(ids, rows, table, true, {}, std::nullopt);
    k.embedding_backward(ids, rows, table, false, {}, std::nullopt);
    k.copy_rows({rows, 0, 16}, {of(k, {9, 16}), 0, 16}, 3, 8, true);
    k.combine_rows(of(k, {100, 16}), of(k, {5, 2}, DType::i32), of(k, {5, 2}, DType::f32), rows);
  });
  ASSERT_EQ(work.size(), 5u);
  EXPECT_EQ(work[0].bytes, 5 * 4 + 2 * (5 * 16 * 2));
  EXPECT_EQ(work[1].bytes, 5 * 4 + 3 * (5 * 16 * 2)) << "the gradient, and the table's rows twice";
  EXPECT_EQ(work[2].bytes, work[1].bytes + 1000 * 16 * 2) << "the whole table is set to zero before";
  EXPECT_EQ(work[3].bytes, 3 * (3 * 8 * 2));
  EXPECT_EQ(work[4].bytes, 5 * 16 * 2 + 5 * 2 * 4 * 2 + 10 * 16 * 2);
}

TEST(RecordingKernels, CountEachTensorOfOtherKernelsOnce) {
  const auto work = work_of([](Kernels& k) {
    const Tensor x = of(k, {8, 4});
    k.add(x, x, x);
    k.scale(x, 2, x);
    k.dropout(x, {}, 0.5f, RandomKey{}, of(k, {8, 4}));
    k.fill(of(k, {0}), 1);
  });
  ASSERT_EQ(work.size(), 3u) << "nothing is told of what does nothing";
  EXPECT_EQ(work[0].bytes, 3 * 64);
  EXPECT_EQ(work[1].bytes, 2 * 64);
  EXPECT_EQ(work[2].bytes, 2 * 64);
  EXPECT_EQ(work[0].family, KernelFamily::elementwise);
  EXPECT_EQ(work[2].family, KernelFamily::dropout);
}

}  // namespace
}  // namespace sherd::tensor::meta
