#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/cpu_isa.h"
#include "tensor/cpu/cpu_kernels.h"
#include "tensor/cpu/isa/attention.h"
#include "tensor/cpu/loops.h"

namespace sherd::tensor::cpu {
namespace {

struct Extents {
  Count batch = 0, seq = 0, dim = 0;
  Count heads = 0, kv_heads = 0;
  double scale = 0;

  Count group() const { return heads / kv_heads; }  ///< query heads per key-value head
  Count width() const { return (heads + 2 * kv_heads) * dim; }
  /// Columns of the packed projections where the heads of group g begin.
  Count query_col(Count g, Count r) const { return (g * (group() + 2) + r) * dim; }
  Count key_col(Count g) const { return query_col(g, group()); }
  Count value_col(Count g) const { return query_col(g, group() + 1); }
};

Extents check(const char* kernel, const Tensor& qkv, const Attention& geometry, const Tensor& out, const Tensor& lse) {
  require_floating(kernel, "qkv", qkv);
  Extents e;
  e.heads = geometry.heads, e.kv_heads = geometry.kv_heads;
  require(e.heads >= 1 && e.kv_heads >= 1 && e.heads % e.kv_heads == 0, kernel, ": ", e.heads,
          " query heads cannot share ", e.kv_heads, " key-value heads evenly");
  require(qkv.shape().rank() == 3 && qkv.shape()[2] % (e.heads + 2 * e.kv_heads) == 0, kernel, ": qkv is ",
          qkv.shape().str(), " and must be [batch, seq, (", e.heads, " + 2·", e.kv_heads, ")·head_dim]");
  e.batch = qkv.shape()[0], e.seq = qkv.shape()[1];
  e.dim = geometry.head_dim(qkv.shape()[2]);
  require(e.dim >= 1, kernel, ": heads are empty");
  e.scale = geometry.scale != 0 ? static_cast<double>(geometry.scale) : 1 / std::sqrt(static_cast<double>(e.dim));
  require(geometry.dropout >= 0 && geometry.dropout < 1, kernel, ": dropout ", geometry.dropout, " is outside [0, 1)");
  require_vector(kernel, "out", out, e.batch * e.seq * e.heads * e.dim, qkv.dtype());
  require_vector(kernel, "lse", lse, e.batch * e.heads * e.seq, compute_type(qkv.dtype()));
  return e;
}

// ---- fp64: numeric gradients are checked in it; one query row at a time ----

struct HeadF64 {
  const Extents& e;
  const Attention& geometry;
  Count b, g, r;

  Count head() const { return g * e.group() + r; }
  Count keys(Count i) const { return geometry.causal ? i + 1 : e.seq; }
  /// The factor that dropout puts on score (i, j).
  double kept(Count i, Count j) const {
    if (geometry.dropout == 0) return 1;
    const auto index = static_cast<std::uint64_t>(((b * e.heads + head()) * e.seq + i) * e.seq + j);
    return uniform_at(geometry.key, index) >= geometry.dropout ? 1 / (1 - static_cast<double>(geometry.dropout)) : 0;
  }
};

double dot(const double* a, const double* b, Count n) {
  double sum = 0;
  for (Count i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

void forward_f64(const HeadF64& h, const double* qkv, double* out, double* lse) {
  const Extents& e = h.e;
  std::vector<double> scores(static_cast<std::size_t>(e.seq));
  for (Count i = 0; i < e.seq; ++i) {
    const Count keys = h.keys(i);
    double top = -INFINITY, total = 0;
    for (Count j = 0; j < keys; ++j) {
      const double s = e.scale * dot(qkv + i * e.width() + e.query_col(h.g, h.r), qkv + j * e.width() + e.key_col(h.g),
                                     e.dim);
      scores[static_cast<std::size_t>(j)] = s;
      top = std::max(top, s);
    }
    for (Count j = 0; j < keys; ++j) total += std::exp(scores[static_cast<std::size_t>(j)] - top);
    lse[i] = top + std::log(total);
    double* row = out + (i * e.heads + h.head()) * e.dim;
    std::fill_n(row, e.dim, 0.0);
    for (Count j = 0; j < keys; ++j) {
      const double p = std::exp(scores[static_cast<std::size_t>(j)] - lse[i]) * h.kept(i, j);
      for (Count d = 0; d < e.dim; ++d) row[d] += p * qkv[j * e.width() + e.value_col(h.g) + d];
    }
  }
}

void backward_f64(const HeadF64& h, const double* qkv, const double* out, const double* lse, const double* dout,
                  double* dqkv) {
  const Extents& e = h.e;
  for (Count i = 0; i < e.seq; ++i) {
    const Count row = (i * e.heads + h.head()) * e.dim, query = i * e.width() + e.query_col(h.g, h.r);
    const double delta = dot(dout + row, out + row, e.dim);
    for (Count j = 0; j < h.keys(i); ++j) {
      const Count key = j * e.width() + e.key_col(h.g), value = j * e.width() + e.value_col(h.g);
      const double p = std::exp(e.scale * dot(qkv + query, qkv + key, e.dim) - lse[i]), kept = h.kept(i, j);
      const double ds = p * (kept * dot(dout + row, qkv + value, e.dim) - delta) * e.scale;
      for (Count d = 0; d < e.dim; ++d) {
        dqkv[query + d] += ds * qkv[key + d];
        dqkv[key + d] += ds * qkv[query + d];
        dqkv[value + d] += p * kept * dout[row + d];
      }
    }
  }
}

// ---- fp32, bf16 and fp16 ----

const AttentionOps& ops_for(bool bf16_products) {
  if (bf16_products) return avx512::attention_bf16;
  switch (cpu_isa()) {
    case CpuIsa::avx512: return avx512::attention_f32;
    case CpuIsa::avx2: return avx2::attention_f32;
    case CpuIsa::portable: break;
  }
  return portable::attention_f32;
}

/// What the loops need of one call, and the conversion of rows to what they take.
class Heads {
 public:
  Heads(Device& device, const IsaTable& isa, const Extents& e, const Attention& geometry, DType dtype)
      : e_(e), geometry_(geometry), device_(device), bf16_(dtype == DType::bf16 && cpu_has_bf16_products()),
        convert_(isa.convert[dtype == DType::f32 ? storage_f32 : dtype == DType::bf16 ? storage_bf16 : storage_f16]),
        element_(static_cast<Count>(size_of(dtype))), dim_(bf16_ ? (e.dim + 1) / 2 * 2 : e.dim),
        converts_(dtype != (bf16_ ? DType::bf16 : DType::f32) || dim_ != e.dim) {}

  const AttentionOps& ops() const { return ops_for(bf16_); }
  const ConvertOps& convert() const { return convert_; }
  Count element() const { return element_; }
  Count row() const { return attention_row(dim_); }

  AttentionHead head(Count b, Count h) const {
    AttentionHead out;
    out.seq = e_.seq, out.dim = dim_;
    out.scale = static_cast<float>(e_.scale);
    out.causal = geometry_.causal;
    if (geometry_.dropout > 0) {
      out.threshold = static_cast<std::uint32_t>(std::ceil(static_cast<double>(geometry_.dropout) * 0x1p24));
      out.factor = 1 / (1 - geometry_.dropout);
      out.seed = geometry_.key.seed, out.stream = geometry_.key.stream;
      out.first = static_cast<std::uint64_t>((b * e_.heads + h) * e_.seq * e_.seq);
    }
    return out;
  }

  device::Storage scratch(Count bytes) const {
    return device_.allocate(static_cast<std::size_t>(bytes), device::Category::workspace);
  }

  /// Points the head's operands at the tensors' rows, or, where the loops cannot read these, at copies in `kept`.
  void point(AttentionHead& head, const std::byte* q, const std::byte* k, const std::byte* v, Count stride,
             const std::byte* dout, Count dout_stride, device::Storage& kept) const {
    const std::byte* from[4] = {q, k, v, dout};
    const void** to[4] = {&head.q, &head.k, &head.v, &head.dout};
    bool direct = !converts_;
    for (const std::byte* rows : from) direct = direct && reinterpret_cast<std::uintptr_t>(rows) % 4 == 0;
    if (direct && stride * element_ % 4 == 0 && dout_stride * element_ % 4 == 0) {
      for (int i = 0; i < 4; ++i) *to[i] = from[i];
      head.stride = stride, head.dout_stride = dout_stride;
      return;
    }
    const Count bytes = e_.seq * dim_ * (bf16_ ? 2 : 4);
    kept = scratch(4 * bytes);
    for (int i = 0; i < 4; ++i) {
      if (!from[i]) continue;
      copy_rows(from[i], i == 3 ? dout_stride : stride, kept.data() + i * bytes);
      *to[i] = kept.data() + i * bytes;
    }
    head.stride = head.dout_stride = dim_;
  }

 private:
  void copy_rows(const std::byte* from, Count stride, std::byte* to) const {
    for (Count i = 0; i < e_.seq; ++i, from += stride * element_) {
      if (bf16_) {
        std::memset(to, 0, static_cast<std::size_t>(dim_) * 2);
        std::memcpy(to, from, static_cast<std::size_t>(e_.dim) * 2);
        to += dim_ * 2;
      } else {
        convert_.load(from, reinterpret_cast<float*>(to), e_.dim);
        to += dim_ * 4;
      }
    }
  }

  const Extents& e_;
  const Attention& geometry_;
  Device& device_;
  bool bf16_;
  const ConvertOps& convert_;
  Count element_, dim_;
  bool converts_;
};

/// Rounds fp32 rows into `dim` columns of a tensor's rows.
void store_rows(const Heads& heads, const float* from, Count rows, Count dim, std::byte* to, Count stride) {
  for (Count i = 0; i < rows; ++i)
    heads.convert().store(from + i * heads.row(), to + i * stride * heads.element(), dim);
}

void forward_head(const Heads& heads, const Extents& e, const Tensor& qkv, const Tensor& out, const Tensor& lse, Count b,
                  Count h) {
  const Count g = h / e.group(), r = h % e.group();
  const std::byte* rows = at(qkv, b * e.seq * e.width());
  AttentionHead head = heads.head(b, h);
  device::Storage copies;
  heads.point(head, rows + e.query_col(g, r) * heads.element(), rows + e.key_col(g) * heads.element(),
              rows + e.value_col(g) * heads.element(), e.width(), nullptr, 0, copies);
  const AttentionOps& ops = heads.ops();
  const device::Storage scratch = heads.scratch(ops.forward_scratch(head));
  const device::Storage result = heads.scratch(e.seq * heads.row() * 4);
  auto* values = reinterpret_cast<float*>(result.data());
  ops.forward(head, values, lse.data<float>() + (b * e.heads + h) * e.seq, scratch.data());
  store_rows(heads, values, e.seq, e.dim, at(out, (b * e.seq * e.heads + h) * e.dim), e.heads * e.dim);
}

/// The query heads of one key-value head in turn, so that its gradient has one order of sums.
void backward_group(const Heads& heads, const Extents& e, const Tensor& qkv, const Tensor& out, const Tensor& lse,
                    const Tensor& dout, const Tensor& dqkv, Count b, Count g) {
  const AttentionOps& ops = heads.ops();
  const Count element = heads.element(), matrix = e.seq * heads.row(), out_stride = e.heads * e.dim;
  const device::Storage results = heads.scratch((3 * matrix + e.seq + 2 * e.dim) * 4);
  auto* dq = reinterpret_cast<float*>(results.data());
  float *dk = dq + matrix, *dv = dk + matrix, *delta = dv + matrix, *row_a = delta + e.seq, *row_b = row_a + e.dim;
  std::fill_n(dk, 2 * matrix, 0.0f);
  const std::byte* rows = at(qkv, b * e.seq * e.width());
  std::byte* drows = at(dqkv, b * e.seq * e.width());
  for (Count r = 0; r < e.group(); ++r) {
    const Count h = g * e.group() + r, first = (b * e.seq * e.heads + h) * e.dim;
    AttentionHead head = heads.head(b, h);
    device::Storage copies;
    heads.point(head, rows + e.query_col(g, r) * element, rows + e.key_col(g) * element,
                rows + e.value_col(g) * element, e.width(), at(dout, first), out_stride, copies);
    for (Count i = 0; i < e.seq; ++i) {
      heads.convert().load(at(out, first + i * out_stride), row_a, e.dim);
      heads.convert().load(at(dout, first + i * out_stride), row_b, e.dim);
      delta[i] = ops.dot(row_a, row_b, e.dim);
    }
    const device::Storage scratch = heads.scratch(ops.backward_scratch(head));
    ops.backward(head, lse.data<float>() + (b * e.heads + h) * e.seq, delta, dq, dk, dv, scratch.data());
    store_rows(heads, dq, e.seq, e.dim, drows + e.query_col(g, r) * element, e.width());
  }
  store_rows(heads, dk, e.seq, e.dim, drows + e.key_col(g) * element, e.width());
  store_rows(heads, dv, e.seq, e.dim, drows + e.value_col(g) * element, e.width());
}

}  // namespace

void CpuKernels::attention(const Tensor& qkv, const Attention& geometry, const Tensor& out, const Tensor& lse) {
  const Extents e = check("attention", qkv, geometry, out, lse);
  if (e.seq == 0) return;
  if (qkv.dtype() == DType::f64) {
    return device_.arena().parallel_for(e.batch * e.heads, 1, [&](Count item, Count) {
      const Count b = item / e.heads, h = item % e.heads;
      forward_f64({e, geometry, b, h / e.group(), h % e.group()}, qkv.data<double>() + b * e.seq * e.width(),
                  out.data<double>() + b * e.seq * e.heads * e.dim, lse.data<double>() + item * e.seq);
    });
  }
  const Heads heads(device_, isa_, e, geometry, qkv.dtype());
  device_.arena().parallel_for(e.batch * e.heads, 1, [&](Count item, Count) {
    forward_head(heads, e, qkv, out, lse, item / e.heads, item % e.heads);
  });
}

void CpuKernels::attention_backward(const Tensor& qkv, const Attention& geometry, const Tensor& out, const Tensor& lse,
                                    const Tensor& dout, const Tensor& dqkv) {
  const Extents e = check("attention_backward", qkv, geometry, out, lse);
  require_vector("attention_backward", "dout", dout, out.numel(), qkv.dtype());
  require_vector("attention_backward", "dqkv", dqkv, qkv.numel(), qkv.dtype());
  if (e.seq == 0) return;
  if (qkv.dtype() == DType::f64) {
    fill(dqkv, 0);
    return device_.arena().parallel_for(e.batch * e.kv_heads, 1, [&](Count item, Count) {
      const Count b = item / e.kv_heads, g = item % e.kv_heads, rows = b * e.seq;
      for (Count r = 0; r < e.group(); ++r)
        backward_f64({e, geometry, b, g, r}, qkv.data<double>() + rows * e.width(),
                     out.data<double>() + rows * e.heads * e.dim,
                     lse.data<double>() + (b * e.heads + g * e.group() + r) * e.seq,
                     dout.data<double>() + rows * e.heads * e.dim, dqkv.data<double>() + rows * e.width());
    });
  }
  const Heads heads(device_, isa_, e, geometry, qkv.dtype());
  device_.arena().parallel_for(e.batch * e.kv_heads, 1, [&](Count item, Count) {
    backward_group(heads, e, qkv, out, lse, dout, dqkv, item / e.kv_heads, item % e.kv_heads);
  });
}

}  // namespace sherd::tensor::cpu
