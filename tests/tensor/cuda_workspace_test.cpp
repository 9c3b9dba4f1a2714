// A meta device that stands for a GPU charges what the CUDA kernels charge, call by call: held to the kernels
// on the emulator, and for the libraries that are not there to their rules.
#include "tensor/cuda/workspace.h"

#include <gtest/gtest.h>

#include <functional>

#include "simt/emulated.h"
#include "support/full_suite.h"
#include "support/print_dtype.h"
#include "tensor/kernels.h"

namespace sherd::tensor {
namespace {

using device::Tier;
using Call = std::function<void(Kernels&)>;

struct EmulatedUse {
  std::uint64_t device, host, kept;
  bool operator==(const EmulatedUse&) const = default;
};
void PrintTo(const EmulatedUse& held, std::ostream* out) {
  *out << held.device << " on the device, " << held.host << " in the host tier, " << held.kept << " kept";
}

/// The workspace that `call` holds at most, beyond what the kernels hold anyway.
EmulatedUse emulated_used_by(Kernels& kernels, const Call& call) {
  device::Ledger& ledger = kernels.device().ledger();
  ledger.reset_peaks();
  const std::uint64_t in_host = ledger.current(Tier::host, Category::workspace);
  call(kernels);
  return {ledger.peak(Tier::device, Category::workspace),
          ledger.peak(Tier::host, Category::workspace) - in_host,
          ledger.current(Tier::device, Category::workspace)};
}

void expect_booked_alike(const Call& call, const std::string& what) {
  const auto cpu = device::make_cpu_device(1), meta = device::make_meta_gpu(1);
  const auto emulated = test::make_emulated_kernels(*cpu), booked = make_kernels(*meta);
  EXPECT_EQ(emulated_used_by(*booked, call), emulated_used_by(*emulated, call)) << what;
}

Tensor some(Kernels& kernels, const Shape& shape, DType dtype) {
  const Tensor out = Tensor::empty(kernels.device(), shape, dtype);
  kernels.fill(out, dtype == DType::i32 ? 1 : 0.01);
  return out;
}

class CudaWorkspace : public ::testing::TestWithParam<DType> {
 protected:
  void SetUp() override {
    if (!test::full_suite() && GetParam() == DType::f16) GTEST_SKIP() << "in part bf16 stands for it";
  }
};

TEST_P(CudaWorkspace, OfSumsAndNorms) {
  const DType dtype = GetParam(), compute = dtype == DType::f64 ? DType::f64 : DType::f32;
  for (const std::int64_t rows : {1, 65, 1000, 9000}) {
    expect_booked_alike(
        [&](Kernels& k) {
          k.sum_rows(some(k, {rows, 40}, dtype), some(k, {40}, dtype), false);
        },
        cat("sum_rows of ", rows));
    const auto norm = [&](bool layer) {
      return [&, layer](Kernels& k) {
        const Tensor x = some(k, {rows, 40}, dtype), row = some(k, {40}, dtype),
                     one = some(k, {rows}, compute), dw = some(k, {40}, dtype), db = some(k, {40}, dtype);
        if (layer)
          k.layer_norm_backward(x, row, one, one, x, x, dw, db, false);
        else
          k.rms_norm_backward(x, row, one, x, x, dw, false);
      };
    };
    expect_booked_alike(norm(true), cat("layer_norm of ", rows));
    expect_booked_alike(norm(false), cat("rms_norm of ", rows));
    expect_booked_alike(
        [&](Kernels& k) {
          ExactSum sum;
          k.sum_of_squares(some(k, {rows}, dtype), sum);
        },
        cat("sum_of_squares of ", rows));
  }
}

TEST_P(CudaWorkspace, OfLossesAndEmbeddings) {
  const DType dtype = GetParam(), compute = dtype == DType::f64 ? DType::f64 : DType::f32;
  for (const std::int64_t rows : {1, 500, 2049}) {
    if (rows > 2000 && dtype != DType::bf16 && !test::full_suite()) continue;
    expect_booked_alike(
        [&](Kernels& k) {
          const Tensor logits = some(k, {rows, 12}, dtype), targets = some(k, {rows}, DType::i32),
                       lse = some(k, {rows}, compute), picked = some(k, {rows}, compute);
          k.cross_entropy(logits, targets, {0, 12}, -100, lse, picked, {});
          k.cross_entropy_total(lse, picked, targets, -100, lse, some(k, {2}, DType::f64), false);
          k.cross_entropy_backward(logits, targets, lse, {0, 12}, -100, some(k, {1}, compute));
        },
        cat("cross_entropy of ", rows));
    expect_booked_alike(
        [&](Kernels& k) {
          const Tensor x = some(k, {rows, 12}, dtype);
          k.mean_squared_error(x, x, some(k, {1}, compute));
        },
        cat("mean_squared_error of ", rows));
    expect_booked_alike(
        [&](Kernels& k) {
          const Tensor x = some(k, {rows, 12}, dtype);
          k.mean_squared_error_backward(x, x, some(k, {1}, compute), x);
        },
        cat("mean_squared_error_backward of ", rows));
    expect_booked_alike(
        [&](Kernels& k) {
          k.embedding_backward(some(k, {rows}, DType::i32), some(k, {rows, 8}, dtype),
                               some(k, {30, 8}, dtype), false);
        },
        cat("embedding_backward of ", rows));
  }
}

TEST_P(CudaWorkspace, OfAttentionByOwnKernelsAndOfRotary) {
  const DType dtype = GetParam(), compute = dtype == DType::f64 ? DType::f64 : DType::f32;
  for (const float dropout : {0.0f, 0.1f}) {
    const std::int64_t head = dropout > 0 ? 8 : 6;  // heads of 6 are none for cuDNN
    expect_booked_alike(
        [&](Kernels& k) {
          Attention geometry;
          geometry.heads = 4, geometry.kv_heads = 2, geometry.dropout = dropout;
          const Tensor qkv = some(k, {2, 20, 8 * head}, dtype), out = some(k, {2, 20, 4 * head}, dtype),
                       lse = some(k, {2, 4, 20}, compute), dqkv = some(k, {2, 20, 8 * head}, dtype);
          k.rotary(qkv, geometry, {}, false, qkv);
          k.attention(qkv, geometry, out, lse);
          k.attention_backward(qkv, geometry, out, lse, out, dqkv);
        },
        cat("attention with dropout ", dropout));
  }
}

TEST_P(CudaWorkspace, OfAttentionThatIsNotTheLibrarys) {
  const DType dtype = GetParam(), compute = dtype == DType::f64 ? DType::f64 : DType::f32;
  Attention documents{.heads = 4, .kv_heads = 2}, varying = documents;
  documents.documents = std::make_shared<const Documents>(Documents{0, 3, 20, 40});
  varying.lengths_vary = true;
  for (const Attention& geometry : {documents, varying})
    expect_booked_alike(
        [&](Kernels& k) {
          const Tensor qkv = some(k, {2, 20, 64}, dtype), out = some(k, {2, 20, 32}, dtype),
                       lse = some(k, {2, 4, 20}, compute);
          k.attention(qkv, geometry, out, lse);
          k.attention_backward(qkv, geometry, out, lse, out, some(k, qkv.shape(), dtype));
        },
        geometry.documents ? "documents" : "varying lengths");
}

TEST_P(CudaWorkspace, OfAttentionToStoredKeys) {
  struct Case {
    std::int64_t seq, capacity, window;
  };
  for (const Case& c : {Case{1, 128, 0}, Case{1, 129, 0}, Case{1, 1000, 0}, Case{1, 1000, 128},
                        Case{1, 1000, 300}, Case{1, 200, 5000}, Case{3, 384, 0}, Case{3, 1000, 0}})
    for (const bool store_only : {false, true})
      expect_booked_alike(
          [&](Kernels& k) {
            Attention geometry;
            geometry.heads = 4, geometry.kv_heads = 2, geometry.window = c.window;
            const DType dtype = GetParam();
            const Tensor qkv = some(k, {1, c.seq, 8 * 6}, dtype), out = some(k, {1, c.seq, 4 * 6}, dtype);
            const Shape stored{2, 2, c.capacity, 6};
            k.attend_stored(qkv, geometry,
                            {some(k, stored, dtype), some(k, stored, dtype), some(k, {1, 3}, DType::i32)}, {},
                            store_only ? Tensor() : out);
          },
          cat(c.seq, " rows, ", c.capacity, " keys, window ", c.window, store_only ? ", store only" : ""));
}

TEST_P(CudaWorkspace, OfRotaryUpToTheLastPosition) {
  Attention geometry;
  for (const Positions& at : {Positions{.first = 5000}, Positions{.first = 10, .count = 4, .second = 9000},
                              Positions{.first = 9000, .count = 4, .second = 10}}) {
    geometry.positions = at;
    expect_booked_alike(
        [&](Kernels& k) {
          const Tensor qkv = some(k, {2, 20, 3 * 64}, GetParam());
          k.rotary(qkv, geometry, {}, false, qkv);
        },
        cat("from ", at.first));
  }
}

INSTANTIATE_TEST_SUITE_P(All, CudaWorkspace,
                         ::testing::Values(DType::f32, DType::bf16, DType::f16, DType::f64),
                         [](const auto& test) { return std::string(name_of(test.param)); });

TEST(CudaWorkspaceOfStoredKeys, IsOneNumberPerElementAndTwoPerHead) {
  // A row sees 1000 keys at most, in chunks of 128; with more rows chunks have as many times more.
  const auto device = device::make_meta_gpu(1);
  const auto kernels = make_kernels(*device);
  const Tensor store = Tensor::empty(*device, {3, 2, 1000, 6}, DType::bf16);
  const auto booked = [&](std::int64_t batch, std::int64_t seq) {
    const Tensor qkv = Tensor::empty(*device, {batch, seq, 8 * 6}, DType::bf16),
                 out = Tensor::empty(*device, {batch, seq, 4 * 6}, DType::bf16);
    device->ledger().reset_peaks();
    kernels->attend_stored(qkv, {.heads = 4, .kv_heads = 2, .key = {}},
                           {store, store, Tensor::empty(*device, {batch, 3}, DType::i32)}, {}, out);
    return device->ledger().peak(Tier::device, Category::workspace);
  };
  EXPECT_EQ(booked(2, 1), 2u * 4 * 8 * (6 + 2) * 4);
  EXPECT_EQ(booked(2, 3), 2u * 3 * 4 * 3 * (6 + 2) * 4);
  EXPECT_EQ(booked(2, 8), 0u);
  EXPECT_EQ(booked(0, 1), 0u);
  EXPECT_EQ(booked(2, 0), 0u);
}

/// The workspace that a GPU's backward attention is booked, in bytes.
std::uint64_t booked_for(const Shape& qkv, int heads, int kv_heads, bool deterministic) {
  const auto device = device::make_meta_gpu(1);
  const auto kernels = make_kernels(*device, {.deterministic_attention = deterministic});
  Attention geometry;
  geometry.heads = heads, geometry.kv_heads = kv_heads;
  const Tensor x = Tensor::empty(*device, qkv, DType::bf16);
  kernels->attention_backward(x, geometry, {}, {}, {}, x);
  return device->ledger().peak(Tier::device, Category::workspace);
}

TEST(CudaWorkspaceOfLibraries, FollowsTheirRules) {
  // Rows of scores in bf16 in squares of 64, and one fp32 sum per row; else fp32 sums of the queries'
  // gradient, cuDNN's own and those it is given.
  EXPECT_EQ(booked_for({2, 100, 3 * 4 * 64}, 4, 4, true), 2u * 4 * (128 * 128 * 2 + 100 * 4) + 256);
  EXPECT_EQ(booked_for({2, 100, 3 * 4 * 64}, 4, 4, false), 2u * 4 * 100 * 4 * (1 + 64 + 64) + 256);
  // Each query head has gradients of keys and values of its own; of one sequence groups take the place of
  // sequences, several are regrouped, with their gradient.
  EXPECT_EQ(booked_for({1, 100, 8 * 64}, 4, 2, true),
            2u * 2 * (128 * 128 * 2 + 100 * 4 + 2 * 100 * 64 * 2) + 256);
  EXPECT_EQ(booked_for({5, 100, 8 * 64}, 4, 2, true),
            5u * 4 * (128 * 128 * 2 + 100 * 4 + 2 * 100 * 64 * 2) + 5u * 100 * 8 * 64 * 2 * 2 + 256);
  // Scores of one sequence that fill the limit: one at a time, by groups.
  EXPECT_EQ(booked_for({5, 4096, 48 * 64}, 32, 8, true),
            std::uint64_t{8} * 4 * (4096u * 4096 * 2 + 4096 * 4 + 2 * 4096 * 64 * 2) + 256);
  // 16 sequences of 16 heads of 4096 x 4096 scores would take 8 GiB: two at a time fit.
  EXPECT_EQ(booked_for({16, 4096, 3 * 16 * 128}, 16, 16, true),
            std::uint64_t{2} * 16 * (4096u * 4096 * 2 + 4096 * 4) + 256);
}

TEST(CudaWorkspaceOfLibraries, ProductsAreBookedAtTheirCeiling) {
  const auto device = device::make_meta_gpu(1);
  const auto kernels = make_kernels(*device);
  Matmul product;
  product.a = Tensor::empty(*device, {64, 32}, DType::bf16),
  product.b = Tensor::empty(*device, {32, 16}, DType::bf16);
  product.c = Tensor::empty(*device, {64, 16}, DType::bf16);
  kernels->matmul(product);
  EXPECT_EQ(device->ledger().peak(Tier::device, Category::workspace), cuda::most_matmul_workspace);
}

TEST(CudaWorkspaceOfLibraries, ProductsInFp8HaveSumsOfTheRowsThatPadThem) {
  for (const auto& [rows, sums] : {std::pair{64, 0}, std::pair{65, 80 * 16 * 4}}) {
    const auto device = device::make_meta_gpu(1);
    const auto kernels = make_kernels(*device);
    kernels->matmul({.c = Tensor::empty(*device, {rows, 16}, DType::bf16),
                     .fp8_a = empty_fp8(*device, {}, rows, 5000),
                     .fp8_b = empty_fp8(*device, {}, 16, 5000)});
    EXPECT_EQ(device->ledger().peak(Tier::device, Category::workspace),
              cuda::most_matmul_workspace + static_cast<std::size_t>(sums));
  }
}

TEST(CudaWorkspace, OfFp8IsNone) {
  for (const Fp8Recipe& recipe : fp8_recipes())
    expect_booked_alike(
        [&](Kernels& k) {
          k.to_fp8(some(k, {40, 20}, DType::bf16), true, empty_fp8(k.device(), recipe.input, 20, 40), {});
        },
        std::string(recipe.name));
}

}  // namespace
}  // namespace sherd::tensor
