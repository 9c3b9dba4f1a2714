#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/cpu_isa.h"
#include "tensor/cpu/cpu_kernels.h"
#include "tensor/cpu/isa/attention.h"
#include "tensor/cpu/loops.h"
#include "tensor/extents.h"

namespace sherd::tensor::cpu {
namespace {

using Part = AttentionPart;

// ---- fp64: numeric gradients are checked in it; one query row at a time ----

struct HeadF64 {
  const Part& e;
  const Attention& geometry;
  Count g, r;

  Count head() const { return g * e.group() + r; }
  Count first(Count i) const { return e.seen.first(i); }
  Count end(Count i) const { return e.seen.end(i, e.seq); }
  /// The factor that dropout puts on score (i, j).
  double kept(Count i, Count j) const {
    if (geometry.dropout == 0) return 1;
    const auto index = static_cast<std::uint64_t>(e.first_score_of(0, head()) + i * e.score_seq + j);
    return uniform_at(e.key, index) >= geometry.dropout ? 1 / (1 - static_cast<double>(geometry.dropout)) : 0;
  }
};

/// A capped score of one that is scaled, and its slope.
double capped(const Part& e, double score) {
  return e.cap > 0 ? e.cap * std::tanh(score / e.cap) : score;
}
double slope_at(const Part& e, double capped) {
  return e.cap > 0 ? 1 - capped / e.cap * (capped / e.cap) : 1;
}

double dot(const double* a, const double* b, Count n) {
  double sum = 0;
  for (Count i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

void forward_f64(const HeadF64& h, const double* qkv, double* out, double* lse) {
  const Part& e = h.e;
  std::vector<double> scores(static_cast<std::size_t>(e.seq));
  for (Count i = 0; i < e.seq; ++i) {
    const Count first = h.first(i), end = h.end(i);
    double top = -INFINITY, total = 0;
    for (Count j = first; j < end; ++j) {
      const double s = capped(e, e.scale * dot(qkv + i * e.width() + e.query_col(h.g, h.r),
                                               qkv + j * e.width() + e.key_col(h.g), e.dim));
      scores[static_cast<std::size_t>(j)] = s;
      top = std::max(top, s);
    }
    for (Count j = first; j < end; ++j) total += std::exp(scores[static_cast<std::size_t>(j)] - top);
    lse[i] = top + std::log(total);
    double* row = out + (i * e.heads + h.head()) * e.dim;
    std::fill_n(row, e.dim, 0.0);
    for (Count j = first; j < end; ++j) {
      const double p = std::exp(scores[static_cast<std::size_t>(j)] - lse[i]) * h.kept(i, j);
      for (Count d = 0; d < e.dim; ++d) row[d] += p * qkv[j * e.width() + e.value_col(h.g) + d];
    }
  }
}

void backward_f64(const HeadF64& h, const double* qkv, const double* out, const double* lse,
                  const double* dout, double* dqkv) {
  const Part& e = h.e;
  for (Count i = 0; i < e.seq; ++i) {
    const Count row = (i * e.heads + h.head()) * e.dim, query = i * e.width() + e.query_col(h.g, h.r);
    const double delta = dot(dout + row, out + row, e.dim);
    for (Count j = h.first(i), end = h.end(i); j < end; ++j) {
      const Count key = j * e.width() + e.key_col(h.g), value = j * e.width() + e.value_col(h.g);
      const double score = capped(e, e.scale * dot(qkv + query, qkv + key, e.dim));
      const double p = std::exp(score - lse[i]), kept = h.kept(i, j);
      const double ds =
          p * (kept * dot(dout + row, qkv + value, e.dim) - delta) * slope_at(e, score) * e.scale;
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
  if (bf16_products) return cpu_has_bf16_tiles() ? avx512::attention_amx : avx512::attention_bf16;
  static constexpr const AttentionOps* by_isa[] = {&portable::attention_f32, &avx2::attention_f32,
                                                   &avx512::attention_f32};
  return *by_isa[static_cast<int>(cpu_isa())];
}

/// All that the loops need of one part of a call, and the conversion of rows between the tensors' dtype and
/// the loops' elements.
class Heads {
 public:
  Heads(Device& device, const IsaTable& isa, const Part& e, const Attention& geometry, DType dtype)
      : e_(e),
        geometry_(geometry),
        device_(device),
        bf16_(dtype == DType::bf16 && cpu_has_bf16_products()),
        convert_(isa.convert[storage_index(dtype)]),
        element_(static_cast<Count>(size_of(dtype))),
        dim_(bf16_ ? (e.dim + 1) / 2 * 2 : e.dim),
        converts_(dtype != (bf16_ ? DType::bf16 : DType::f32) || dim_ != e.dim) {}

  const AttentionOps& ops() const { return ops_for(bf16_); }
  Count element() const { return element_; }
  Count dim() const { return dim_; }
  Count row() const { return attention_row(dim_); }

  AttentionHead head(Count h) const {
    AttentionHead out;
    out.seq = e_.seq, out.dim = dim_;
    out.scale = static_cast<float>(e_.scale), out.cap = static_cast<float>(e_.cap);
    out.seen = e_.seen;
    if (geometry_.dropout > 0) {
      out.threshold = static_cast<std::uint32_t>(std::ceil(static_cast<double>(geometry_.dropout) * 0x1p24));
      out.factor = 1 / (1 - geometry_.dropout);
      out.seed = e_.key.seed, out.stream = e_.key.stream;
      out.first = static_cast<std::uint64_t>(e_.first_score_of(0, h)), out.score_row = e_.score_seq;
    }
    return out;
  }

  device::Storage scratch(Count bytes) const {
    return device_.allocate(static_cast<std::size_t>(bytes), device::Category::workspace);
  }

  /// Whether the loops can read and write rows where they are, if these begin at multiples of 4 bytes: units
  /// of bf16.
  bool direct() const { return e_.dim * element_ % 4 == 0 && !converts_; }
  bool direct(std::initializer_list<const std::byte*> rows) const {
    bool aligned = direct();
    for (const std::byte* at : rows) aligned = aligned && reinterpret_cast<std::uintptr_t>(at) % 4 == 0;
    return aligned;
  }
  Count row_bytes() const { return dim_ * (bf16_ ? 2 : 4); }
  /// One head's rows as elements.
  Count matrix_bytes() const { return e_.seq * row_bytes(); }
  /// The workspace of one head's forward pass, and of one group's backward pass.
  Count forward_bytes() const { return ops().forward_scratch(head(0)) + (direct() ? 0 : 4 * matrix_bytes()); }
  Count backward_bytes() const {
    return 2 * e_.seq * row() * 4 + 6 * matrix_bytes() + ops().backward_scratch(head(0));
  }

  /// The tensor's rows as elements, dim() apart.
  const void* copy_in(const std::byte* from, Count stride, std::byte* to) const {
    const std::byte* begin = to;
    for (Count i = 0; i < e_.seq; ++i, from += stride * element_, to += row_bytes()) {
      if (!bf16_) {
        convert_.load(from, reinterpret_cast<float*>(to), e_.dim);
        continue;
      }
      std::memset(to, 0, static_cast<std::size_t>(row_bytes()));
      std::memcpy(to, from, static_cast<std::size_t>(e_.dim * element_));
    }
    return begin;
  }
  void copy_out(const std::byte* from, std::byte* to, Count stride) const {
    for (Count i = 0; i < e_.seq; ++i, from += row_bytes(), to += stride * element_) {
      if (bf16_)
        std::memcpy(to, from, static_cast<std::size_t>(e_.dim * element_));
      else
        convert_.store(reinterpret_cast<const float*>(from), to, e_.dim);
    }
  }

 private:
  const Part& e_;
  const Attention& geometry_;
  Device& device_;
  bool bf16_;
  const ConvertOps& convert_;
  Count element_, dim_;
  bool converts_;
};

void forward_head(const Heads& heads, const Part& e, const Tensor& qkv, const Tensor& out, const Tensor& lse,
                  Count h) {
  const Count g = h / e.group(), r = h % e.group(), element = heads.element(), out_stride = e.heads * e.dim;
  const std::byte* rows = at(qkv, e.row * e.width());
  const std::byte* from[3] = {rows + e.query_col(g, r) * element, rows + e.key_col(g) * element,
                              rows + e.value_col(g) * element};
  std::byte* to = at(out, (e.row * e.heads + h) * e.dim);
  float* to_lse = lse.data<float>() + e.lse_of(h);
  AttentionHead head = heads.head(h);
  const AttentionOps& ops = heads.ops();
  const device::Storage scratch = heads.scratch(ops.forward_scratch(head));
  if (heads.direct({rows, to})) {
    head.q = from[0], head.k = from[1], head.v = from[2];
    head.stride = e.width(), head.out_stride = out_stride;
    return ops.forward(head, to, to_lse, scratch.data());
  }
  const Count matrix = heads.matrix_bytes();
  const device::Storage copies = heads.scratch(4 * matrix);
  head.q = heads.copy_in(from[0], e.width(), copies.data());
  head.k = heads.copy_in(from[1], e.width(), copies.data() + matrix);
  head.v = heads.copy_in(from[2], e.width(), copies.data() + 2 * matrix);
  head.stride = head.out_stride = heads.dim();
  ops.forward(head, copies.data() + 3 * matrix, to_lse, scratch.data());
  heads.copy_out(copies.data() + 3 * matrix, to, out_stride);
}

/// The tensors of one call of attention_backward.
struct BackwardTensors {
  const Tensor &qkv, &out, &lse, &dout, &dqkv;
};

/// The query heads of one key-value head in turn, so that its gradient has one order of sums.
void backward_group(const Heads& heads, const Part& e, const BackwardTensors& t, Count g) {
  const AttentionOps& ops = heads.ops();
  const Count element = heads.element(), sums = e.seq * heads.row(), matrix = heads.matrix_bytes();
  const Count out_stride = e.heads * e.dim;
  const device::Storage gradients = heads.scratch(2 * sums * 4), copies = heads.scratch(6 * matrix);
  auto* dk = reinterpret_cast<float*>(gradients.data());
  float* dv = dk + sums;
  std::fill_n(dk, 2 * sums, 0.0f);
  const std::byte* rows = at(t.qkv, e.row * e.width());
  std::byte* drows = at(t.dqkv, e.row * e.width());
  std::byte* copy = copies.data();
  const bool direct = heads.direct({rows, drows, t.out.raw(), t.dout.raw()});
  AttentionHead head;
  for (Count r = 0; r < e.group(); ++r) {
    const Count h = g * e.group() + r, first = (e.row * e.heads + h) * e.dim;
    const std::byte* from[5] = {rows + e.query_col(g, r) * element, rows + e.key_col(g) * element,
                                rows + e.value_col(g) * element, at(t.out, first), at(t.dout, first)};
    head = heads.head(h);
    head.stride = direct ? e.width() : heads.dim(), head.out_stride = direct ? out_stride : heads.dim();
    const void** to[5] = {&head.q, &head.k, &head.v, &head.out, &head.dout};
    for (int i = 0; i < 5; ++i)
      *to[i] = direct ? from[i] : heads.copy_in(from[i], i < 3 ? e.width() : out_stride, copy + i * matrix);
    std::byte* dq = drows + e.query_col(g, r) * element;
    const device::Storage scratch = heads.scratch(ops.backward_scratch(head));
    ops.backward(head, t.lse.data<float>() + e.lse_of(h), direct ? dq : copy + 5 * matrix, head.stride, dk,
                 dv, scratch.data());
    if (!direct) heads.copy_out(copy + 5 * matrix, dq, e.width());
  }
  const auto store = [&](const float* from, float factor, std::byte* to) {
    ops.store_rows(from, e.seq, heads.dim(), factor, direct ? to : copy, head.stride);
    if (!direct) heads.copy_out(copy, to, e.width());
  };
  store(dk, head.scale, drows + e.key_col(g) * element);
  store(dv, 1, drows + e.value_col(g) * element);
}

std::size_t workspace_of(Device& device, const Tensor& qkv, const Attention& geometry, bool backward) {
  const std::vector<Part> parts = attention_parts(attention_extents("attention", qkv, geometry), geometry);
  if (parts.empty() || qkv.dtype() == DType::f64) return 0;
  const Part& longest = parts.front();
  const Heads heads(device, isa_table(cpu_isa()), longest, geometry, qkv.dtype());
  const Count tasks = std::ssize(parts) * (backward ? longest.kv_heads : longest.heads);
  const Count bytes = backward ? heads.backward_bytes() : heads.forward_bytes();
  return static_cast<std::size_t>(std::min<Count>(device.arena().threads(), tasks) * bytes);
}

/// Calls body(part, i) for i in [0, count) of each part of a call, short parts side by side.
template <class Body>
void for_each_head(Device& device, const AttentionExtents& e, const Attention& geometry, Count count,
                   const Body& body) {
  const std::vector<Part> parts = attention_parts(e, geometry);
  device.arena().parallel_for(std::ssize(parts) * count, 1, [&](Count item, Count) {
    body(parts[static_cast<std::size_t>(item / count)], item % count);
  });
}

}  // namespace

std::size_t attention_workspace(Device& device, const Tensor& qkv, const Attention& geometry) {
  return workspace_of(device, qkv, geometry, false);
}
std::size_t attention_backward_workspace(Device& device, const Tensor& qkv, const Attention& geometry) {
  return workspace_of(device, qkv, geometry, true);
}

void CpuKernels::attention(const Tensor& qkv, const Attention& geometry, const Tensor& out,
                           const Tensor& lse) {
  const AttentionExtents e = check_attention("attention", qkv, geometry, out, lse);
  for_each_head(device_, e, geometry, e.heads, [&](const Part& part, Count h) {
    if (qkv.dtype() == DType::f64)
      return forward_f64(
          {part, geometry, h / e.group(), h % e.group()}, qkv.data<double>() + part.row * e.width(),
          out.data<double>() + part.row * e.heads * e.dim, lse.data<double>() + part.lse_of(h));
    forward_head({device_, isa_, part, geometry, qkv.dtype()}, part, qkv, out, lse, h);
  });
}

void CpuKernels::attention_backward(const Tensor& qkv, const Attention& geometry, const Tensor& out,
                                    const Tensor& lse, const Tensor& dout, const Tensor& dqkv) {
  const AttentionExtents e =
      check_attention_backward("attention_backward", qkv, geometry, out, lse, dout, dqkv);
  if (qkv.dtype() == DType::f64) fill(dqkv, 0);
  for_each_head(device_, e, geometry, e.kv_heads, [&](const Part& part, Count g) {
    if (qkv.dtype() != DType::f64)
      return backward_group({device_, isa_, part, geometry, qkv.dtype()}, part, {qkv, out, lse, dout, dqkv},
                            g);
    for (Count r = 0; r < e.group(); ++r)
      backward_f64({part, geometry, g, r}, qkv.data<double>() + part.row * e.width(),
                   out.data<double>() + part.row * e.heads * e.dim,
                   lse.data<double>() + part.lse_of(g * e.group() + r),
                   dout.data<double>() + part.row * e.heads * e.dim,
                   dqkv.data<double>() + part.row * e.width());
  });
}

}  // namespace sherd::tensor::cpu
