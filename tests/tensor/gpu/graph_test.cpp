// Work that comes again runs as a CUDA graph only with all that it depends on: after a sequence has become a
// graph, each thing that may change about it does, and the results are those of a device without graphs.
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <vector>

#include "device/cuda.h"
#include "support/full_suite.h"
#include "support/gpu/gpu.h"
#include "tensor/kernels.h"

namespace sherd::tensor {
namespace {

using device::Accelerator;

constexpr std::int64_t rows = 32, inner = 48, cols = 64, batch = 2, seq = 16, heads = 1, dim = 8;

/// The operands of the works below, two of each, on one device.
struct Operands {
  explicit Operands(Accelerator& device, Kernels& kernels) {
    std::uint64_t stream = 1;
    const auto make = [&](const Shape& shape, DType dtype) {
      Tensor out = Tensor::empty(device, shape, dtype);
      kernels.fill_normal(out, {7, stream++}, 0, 0, 1);
      all.push_back(out);
      return out;
    };
    after = make({rows, cols}, DType::bf16);
    for (int i = 0; i < 2; ++i) {
      a[i] = make({rows, inner}, DType::bf16), b[i] = make({inner, cols}, DType::bf16);
      square[i] = make({inner, inner}, DType::bf16), bias[i] = make({cols}, DType::bf16);
      c[i] = make({rows, cols}, DType::bf16), before[i] = make({rows, cols}, DType::bf16);
      wide[i] = make({inner, inner}, DType::f32);
      qkv[i] = make({batch, seq, 3 * heads * dim}, DType::bf16),
      dqkv[i] = make({batch, seq, 3 * heads * dim}, DType::bf16);
      out[i] = make({batch, seq, heads * dim}, DType::bf16),
      dout[i] = make({batch, seq, heads * dim}, DType::bf16);
      lse[i] = make({batch, heads, seq}, DType::f32);
    }
  }
  Tensor after, a[2], b[2], square[2], bias[2], c[2], before[2], wide[2], qkv[2], dqkv[2], out[2], dout[2],
      lse[2];
  std::vector<Tensor> all;
};

/// A change of a sequence's works from what they were at first.
struct Variant {
  const char* name;
  std::function<void(Variant&)> change;
  int a = 0, b = 0, c = 0, bias = 0, before = 0, square = 0, qkv = 0, dqkv = 0, out = 0, dout = 0, lse = 0,
      wide = 0;
  bool accumulate = false, trans_a = false, trans_b = false, biased = true, causal = true, zeroed = false;
  Activation activation = Activation::gelu_tanh;
  float scale = 0, dropout = 0;
  double factor = 0.5;
  RandomKey key{3, 4};
  Documents documents{0, 5, 16, 32};

  /// Whether the first product, which gelu may be fused with, is another.
  bool changes_product() const {
    return a || b || c || bias || before || !biased || activation != Activation::gelu_tanh;
  }
};
void PrintTo(const Variant& variant, std::ostream* out) {
  *out << variant.name;
}

class Machine {
 public:
  Machine(bool graphs, bool fused_gelu)
      : device_(device::make_cuda_device({.ordinal = device::cuda_status().gpus.front().ordinal,
                                          .timeout_seconds = 60,
                                          .graphs = graphs})),
        kernels_(make_kernels(*device_, {.fused_gelu = fused_gelu})),
        x_(*device_, *kernels_) {
    device_->end_sequence();
  }

  void run(const Variant& v) {
    Matmul forward{.a = x_.a[v.a], .b = x_.b[v.b], .c = x_.c[v.c], .activation = v.activation};
    if (v.biased) forward.bias = x_.bias[v.bias];
    if (v.activation != Activation::none) forward.pre_activation = x_.before[v.before];
    kernels_->matmul(forward);
    // A square operand, so that a transposed one has the same shape.
    kernels_->matmul({.a = x_.square[v.square],
                      .b = x_.square[1 - v.square],
                      .c = x_.wide[v.wide],
                      .trans_a = v.trans_a,
                      .trans_b = v.trans_b,
                      .accumulate = v.accumulate});
    const Attention geometry{.heads = heads,
                             .kv_heads = heads,
                             .causal = v.causal,
                             .scale = v.scale,
                             .dropout = v.dropout,
                             .key = v.key};
    kernels_->attention(x_.qkv[v.qkv], geometry, x_.out[v.out], x_.lse[v.lse]);
    kernels_->attention_backward(x_.qkv[v.qkv], geometry, x_.out[v.out], x_.lse[v.lse], x_.dout[v.dout],
                                 x_.dqkv[v.dqkv]);
    Attention apart = geometry;
    apart.documents = std::make_shared<const Documents>(v.documents);
    kernels_->attention(x_.qkv[v.qkv], apart, x_.out[v.out], x_.lse[v.lse]);
    if (v.zeroed) device_->zero(x_.after.raw(), 64);
    kernels_->copy(x_.c[v.c], x_.after);
    kernels_->scale(x_.after, v.factor, x_.after);
    kernels_->dropout(x_.c[v.c], x_.after, 0.25f, v.key, x_.after);
    device_->end_sequence();
  }

  std::vector<std::byte> bytes() {
    std::vector<std::byte> out;
    for (const Tensor& each : x_.all) {
      const Tensor here = to_host(*device_, each);
      out.insert(out.end(), here.raw(), here.raw() + here.bytes());
    }
    return out;
  }
  device::GraphCounts counts() const { return device_->graph_counts(); }

 private:
  std::shared_ptr<Accelerator> device_;
  std::unique_ptr<Kernels> kernels_;
  Operands x_;
};

class ChangedSequence : public ::testing::TestWithParam<Variant> {};

TEST_P(ChangedSequence, RunsAsItIs) {
  SHERD_NEEDS_GPU();
  const Variant first{};
  Variant other{};
  GetParam().change(other);
  for (const bool fused_gelu : {false, true}) {
    // In part what is behind the product changes behind one of both.
    const bool part = test::on_emulated_gpu() && !test::full_suite();
    if (part && fused_gelu && !other.changes_product()) continue;
    Machine graphs(true, fused_gelu), plain(false, fused_gelu);
    for (const Variant* each :
         std::vector<const Variant*>{&first, &first, &first, &other, &first, &other, &other, &first}) {
      graphs.run(*each);
      plain.run(*each);
      ASSERT_TRUE(graphs.bytes() == plain.bytes()) << "fused gelu " << fused_gelu;
    }
    EXPECT_GE(graphs.counts().launches, 4u);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Graphs, ChangedSequence,
    ::testing::
        Values(Variant{"nothing", [](Variant&) {}}, Variant{"a", [](Variant& v) { v.a = 1; }},
               Variant{"b", [](Variant& v) { v.b = 1; }}, Variant{"c", [](Variant& v) { v.c = 1; }},
               Variant{"bias", [](Variant& v) { v.bias = 1; }},
               Variant{"no_bias", [](Variant& v) { v.biased = false; }},
               Variant{"pre_activation", [](Variant& v) { v.before = 1; }},
               Variant{"activation", [](Variant& v) { v.activation = Activation::none; }},
               Variant{"accumulate", [](Variant& v) { v.accumulate = true; }},
               Variant{"operands_swapped", [](Variant& v) { v.square = 1; }},
               Variant{"trans_a", [](Variant& v) { v.trans_a = true; }},
               Variant{"trans_b", [](Variant& v) { v.trans_b = true; }},
               Variant{"result", [](Variant& v) { v.wide = 1; }},
               Variant{"qkv", [](Variant& v) { v.qkv = 1; }}, Variant{"dqkv", [](Variant& v) { v.dqkv = 1; }},
               Variant{"out", [](Variant& v) { v.out = 1; }}, Variant{"dout", [](Variant& v) { v.dout = 1; }},
               Variant{"lse", [](Variant& v) { v.lse = 1; }},
               Variant{"attention_scale", [](Variant& v) { v.scale = 0.7f; }},
               Variant{"attention_mask", [](Variant& v) { v.causal = false; }},
               Variant{"attention_dropout", [](Variant& v) { v.dropout = 0.1f; }},
               Variant{"documents", [](Variant& v) { v.documents = {0, 9, 16, 32}; }},
               Variant{
                   "random_key",
                   [](Variant& v) {
                     v.key = {5, 6};
                   }},
               Variant{"factor", [](Variant& v) { v.factor = 0.25; }},
               Variant{"one_work_more", [](Variant& v) { v.zeroed = true; }}),
    [](const auto& tested) { return tested.param.name; });

}  // namespace
}  // namespace sherd::tensor
