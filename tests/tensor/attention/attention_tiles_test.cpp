// Attention by AMX against attention by AVX512-BF16 products of registers: the same roundings to bf16, other
// orders of fp32 sums. (attention_test.cpp holds whichever this processor takes to a computation in double.)
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/cpu_isa.h"
#include "base/dtype.h"
#include "base/random.h"
#include "tensor/cpu/isa/attention.h"

namespace sherd::tensor::cpu {
namespace {

#if defined(__x86_64__)
struct Shape {
  std::int64_t seq, dim;
  bool causal;
  bool dropout;
  std::int64_t window = 0;
};

class Attended {
 public:
  Attended(const Shape& shape, const AttentionOps& ops) : s_(shape) {
    std::vector<std::vector<bf16>> in(4);
    for (std::size_t i = 0; i < in.size(); ++i) in[i] = rows(i + 1);
    AttentionHead head;
    head.q = in[0].data(), head.k = in[1].data(), head.v = in[2].data(), head.dout = in[3].data();
    head.stride = head.out_stride = stride();
    head.seq = s_.seq, head.dim = s_.dim;
    head.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(s_.dim)));
    head.seen = {s_.causal ? 1 : s_.seq, s_.window ? s_.window - 1 : s_.seq};
    if (s_.dropout) head.threshold = 1u << 22, head.factor = 4.0f / 3, head.seed = 5, head.stream = 6;
    head.score_row = s_.seq;
    out.resize(in[0].size()), lse.resize(static_cast<std::size_t>(s_.seq));
    ops.forward(head, out.data(), lse.data(), room(ops.forward_scratch(head)));
    head.out = out.data();
    dq.resize(in[0].size());
    dk.resize(static_cast<std::size_t>(s_.seq * attention_row(s_.dim)));
    dv = dk;
    ops.backward(head, lse.data(), dq.data(), stride(), dk.data(), dv.data(),
                 room(ops.backward_scratch(head)));
  }

  std::vector<bf16> out, dq;
  std::vector<float> lse, dk, dv;

 private:
  std::int64_t stride() const { return s_.dim + 6; }
  std::vector<bf16> rows(std::uint64_t which) const {
    std::vector<bf16> out(static_cast<std::size_t>(s_.seq * stride()));
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = bf16(2 * uniform_at({which, 9}, i) - 1);
    return out;
  }
  void* room(std::int64_t bytes) {
    scratch_.assign(static_cast<std::size_t>(bytes) + 64, 0xff);  // NaN, so that nothing unwritten is read
    const auto at = reinterpret_cast<std::uintptr_t>(scratch_.data());
    return scratch_.data() + (64 - at % 64) % 64;
  }
  Shape s_;
  std::vector<std::uint8_t> scratch_;
};

template <class T>
void expect_close(const std::vector<T>& got, const std::vector<T>& expected, const char* what) {
  float most = 0, off = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    most = std::max(most, std::abs(static_cast<float>(expected[i])));
    const float by = std::abs(static_cast<float>(got[i]) - static_cast<float>(expected[i]));
    off = std::isnan(by) ? by : std::max(off, by);
  }
  EXPECT_GT(most, 0) << what;
  EXPECT_LE(off, most * 0x1p-7f) << what;
}

TEST(AttentionTiles, AgreeWithProductsOfRegisters) {
  if (!cpu_has_bf16_tiles()) GTEST_SKIP() << "this processor has no AMX, or DNNL_MAX_CPU_ISA hides it";
  for (const Shape& shape : {Shape{2, 2, true, false},
                             {15, 64, true, false},
                             {17, 64, false, false},
                             {33, 30, true, true},
                             {130, 80, true, false},
                             {145, 128, false, true},
                             {300, 64, true, true},
                             {161, 34, false, false},
                             {300, 64, true, true, 70},
                             {400, 34, true, false, 129}}) {
    SCOPED_TRACE(::testing::Message() << shape.seq << " x " << shape.dim << (shape.causal ? ", causal" : "")
                                      << (shape.dropout ? ", dropout" : "") << ", window " << shape.window);
    const Attended got(shape, avx512::attention_amx), expected(shape, avx512::attention_bf16);
    expect_close(got.out, expected.out, "out");
    expect_close(got.lse, expected.lse, "lse");
    expect_close(got.dq, expected.dq, "dq");
    expect_close(got.dk, expected.dk, "dk");
    expect_close(got.dv, expected.dv, "dv");
  }
}
#endif

}  // namespace
}  // namespace sherd::tensor::cpu
