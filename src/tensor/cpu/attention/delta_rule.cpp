#include <cmath>
#include <span>
#include <vector>

#include "tensor/cpu/gemm_blocks.h"
#include "tensor/cpu/loops.h"
#include "tensor/extents.h"

// The gated delta rule by blocks of rows (Yang et al. 2024, "Parallelizing linear transformers with the delta
// rule", arXiv 2406.06484, section 3): with the changes U that a block's rows make, out and the next state
// are products of matrices, and U solves a triangular system that knows no state but the block's first.

namespace sherd::tensor::cpu {
namespace {

/// Rows of a block's documents, which follow each other.
struct Segment {
  Count begin = 0, end = 0;
  bool fresh = false;  ///< begins with a state of zeros
};

/// A matrix, `stride` elements from row to row, or its transpose.
template <class C>
struct Matrix {
  const C* data;
  Count stride;
  bool transposed = false;
};

/// to[rows, cols] (+)= a[rows, depth]·b[depth, cols]. One for each thread.
template <class C>
class Products;

template <>
class Products<double> {
 public:
  void operator()(Matrix<double> a, Matrix<double> b, Count rows, Count depth, Count cols, double* to,
                  Count stride, bool add) {
    const auto at = [](Matrix<double> m, Count i, Count j) {
      return m.transposed ? m.data[j * m.stride + i] : m.data[i * m.stride + j];
    };
    for (Count i = 0; i < rows; ++i) {
      if (!add) std::fill_n(to + i * stride, cols, 0.0);
      for (Count k = 0; k < depth; ++k)
        for (Count j = 0; j < cols; ++j) to[i * stride + j] += at(a, i, k) * at(b, k, j);
    }
  }
};

template <>
class Products<float> {
 public:
  void operator()(Matrix<float> a, Matrix<float> b, Count rows, Count depth, Count cols, float* to,
                  Count stride, bool add) {
    GemmBlock block{.rows = rows, .cols = cols, .depth = depth, .full_rows = rows, .a_stride = a.stride};
    block.count = depth;
    right_.resize(static_cast<std::size_t>(product_.packed_bytes(block)) / sizeof(float));
    product_.pack(block, {0, cols, 0, depth}, b.data, b.transposed ? 1 : b.stride,
                  b.transposed ? b.stride : 1, right_.data());
    const float* left = a.data;
    if (a.transposed) {
      left_.resize(static_cast<std::size_t>(product_.packed_left_bytes(block)) / sizeof(float));
      product_.pack_left(block, a.data, a.stride, left_.data());
      left = left_.data(), block.a_stride = 0;
    }
    const GemmFinish finish{.out = to, .out_stride = stride, .wide = true, .accumulate = add};
    product_.multiply(block, left, right_.data(), nullptr, &finish);
  }

 private:
  const BlockProduct& product_ = block_product(DType::f32);
  std::vector<float> left_, right_;
};

/// The rows of one block of one key head, and what all of its value heads have in common.
template <class C>
struct KeyRows {
  std::vector<C> q, k;        ///< [rows, key_dim], divided by their lengths
  std::vector<C> q_by, k_by;  ///< what they were multiplied by
  std::vector<C> kk, qk;      ///< [rows, rows]
};

template <class C>
class Worker {
 public:
  Worker(const IsaTable& isa, const DeltaExtents& e, const Tensor& qkv, const Tensor& gates,
         const DeltaRule& rule)
      : isa_(isa), e_(e), qkv_(qkv), gates_(gates), rule_(rule) {}

  /// Takes rows [begin, begin + n) of a sequence's key head.
  void take(Count batch, Count head, Count begin, Count n) {
    batch_ = batch, head_ = head, begin_ = begin, n_ = n;
    const C scale = C{1} / std::sqrt(static_cast<C>(e_.key_dim));
    load_key_rows(0, scale, rows_.q, rows_.q_by), load_key_rows(e_.key_dim, 1, rows_.k, rows_.k_by);
    rows_.kk.resize(size(n, n)), rows_.qk.resize(size(n, n));
    const Count d = e_.key_dim;
    product_({rows_.k.data(), d}, {rows_.k.data(), d, true}, n, d, n, rows_.kk.data(), n, false);
    product_({rows_.q.data(), d}, {rows_.k.data(), d, true}, n, d, n, rows_.qk.data(), n, false);
  }

  /// The values and gates of value head r of these.
  void take_values(Count r) {
    value_head_ = head_ * e_.repeats + r;
    v_.resize(size(n_, e_.value_dim)), beta_.resize(size(n_)), g_.resize(size(n_));
    for (Count i = 0; i < n_; ++i) {
      load_values(isa_, qkv_, row(i) + 2 * e_.key_dim + r * e_.value_dim, v_.data() + i * e_.value_dim,
                  e_.value_dim);
      const C* gates = gates_.data<C>() + (batch_ * e_.rows + begin_ + i) * 2 * e_.value_heads;
      beta_[idx(i)] = gates[value_head_], g_[idx(i)] = gates[e_.value_heads + value_head_];
    }
  }

  /// Rows [s.begin, s.end) of the block, from `state` on, which becomes the one behind them. With `out` they
  /// are written.
  void forward(const Segment& s, C* state, const Tensor* out) {
    solve(s, state);
    const Count n = s.end - s.begin, dk = e_.key_dim, dv = e_.value_dim;
    if (out) {
      // out = exp(γ)·q·S + (tril(q·kᵀ)·decay)·U
      y_.resize(size(n, dv));
      if (!s.fresh) product_({q(s), dk}, {state, dv}, n, dk, dv, y_.data(), dv, false);
      for (Count i = 0; i < n && !s.fresh; ++i) scale_row(y_, i, dv, decay_[idx(i)]);
      product_({scores(s), n}, {u_.data(), dv}, n, n, dv, y_.data(), dv, !s.fresh);
      for (Count i = 0; i < n; ++i)
        store_values(isa_, y_.data() + i * dv, *out,
                     (batch_ * e_.rows + begin_ + s.begin + i) * e_.value_heads * dv + value_head_ * dv, dv);
    }
    for (Count i = 0; i < dk * dv; ++i) state[i] = s.fresh ? C{0} : state[i] * decay_[idx(n - 1)];
    product_({late_keys(s), dk, true}, {u_.data(), dv}, dk, n, dv, state, dv, true);
  }

  /// The gradients of rows [s.begin, s.end). state: the one before them; dstate: of the one behind them,
  /// which becomes that of the one before. Adds to dq and dk, [rows, key_dim] of the block.
  void backward(const Segment& s, const C* state, C* dstate, const Tensor& dout, C* dq, C* dk,
                const Tensor& dqkv, const Tensor& dgates, Count r);

  /// Writes the gradients of the block's queries and keys.
  void finish(const std::vector<C>& dq, const std::vector<C>& dk, const Tensor& dqkv) {
    store_key_rows(0, rows_.q, rows_.q_by, dq, dqkv, C{1} / std::sqrt(static_cast<C>(e_.key_dim)));
    store_key_rows(e_.key_dim, rows_.k, rows_.k_by, dk, dqkv, 1);
  }

 private:
  static std::size_t idx(Count i) { return static_cast<std::size_t>(i); }
  static std::size_t size(Count a, Count b = 1) { return static_cast<std::size_t>(a * b); }
  /// The first element of packed row i of the block.
  Count row(Count i) const {
    return (batch_ * e_.rows + begin_ + i) * e_.width + head_ * (e_.width / e_.key_heads);
  }
  const C* q(const Segment& s) const { return rows_.q.data() + s.begin * e_.key_dim; }
  const C* k(const Segment& s) const { return rows_.k.data() + s.begin * e_.key_dim; }
  static void scale_row(std::vector<C>& rows, Count i, Count width, C by) {
    for (Count j = 0; j < width; ++j) rows[idx(i * width + j)] *= by;
  }

  void load_key_rows(Count column, C scale, std::vector<C>& to, std::vector<C>& by) {
    const Count d = e_.key_dim;
    to.resize(size(n_, d)), by.resize(size(n_));
    for (Count i = 0; i < n_; ++i) {
      C* x = to.data() + i * d;
      load_values(isa_, qkv_, row(i) + column, x, d);
      C sum = 0;
      for (Count j = 0; j < d; ++j) sum += x[j] * x[j];
      by[idx(i)] = scale / std::sqrt(sum + static_cast<C>(rule_.epsilon));
      for (Count j = 0; j < d; ++j) x[j] *= by[idx(i)];
    }
  }

  /// The backward of y = x·by, by = scale/√(Σx² + ε): dx = by·(dy − y·(y·dy)/scale²).
  void store_key_rows(Count column, const std::vector<C>& y, const std::vector<C>& by,
                      const std::vector<C>& dy, const Tensor& to, C scale) {
    const Count d = e_.key_dim;
    std::vector<C> dx(size(d));
    for (Count i = 0; i < n_; ++i) {
      const C *own = y.data() + i * d, *given = dy.data() + i * d;
      C dot = 0;
      for (Count j = 0; j < d; ++j) dot += own[j] * given[j];
      dot /= scale * scale;
      for (Count j = 0; j < d; ++j) dx[idx(j)] = by[idx(i)] * (given[j] - own[j] * dot);
      store_values(isa_, dx.data(), to, row(i) + column, d);
    }
  }

  /// exp(γ_i − γ_j) for j <= i of a segment.
  C between(Count i, Count j) const { return i == j ? C{1} : std::exp(sums_[idx(i)] - sums_[idx(j)]); }

  /// tril(q·kᵀ)·decay, [n, n].
  const C* scores(const Segment& s) {
    const Count n = s.end - s.begin;
    scores_.resize(size(n, n));
    for (Count i = 0; i < n; ++i)
      for (Count j = 0; j < n; ++j)
        scores_[idx(i * n + j)] =
            j > i ? C{0} : rows_.qk[idx((s.begin + i) * n_ + s.begin + j)] * decays_[idx(i * n + j)];
    return scores_.data();
  }

  /// k times what is left of a row's change at the segment's end.
  const C* late_keys(const Segment& s) {
    const Count n = s.end - s.begin, d = e_.key_dim;
    late_.assign(k(s), k(s) + n * d);
    for (Count j = 0; j < n; ++j) scale_row(late_, j, d, decays_[idx((n - 1) * n + j)]);
    return late_.data();
  }

  /// Computes the segment's decays and its changes U, by forward substitution: (1 + A)·U = beta·(v −
  /// exp(γ)·k·S), A_ij = beta_i·decay_ij·(k_i·k_j) for j < i.
  void solve(const Segment& s, const C* state) {
    const Count n = s.end - s.begin, dk = e_.key_dim, dv = e_.value_dim;
    sums_.resize(size(n)), decay_.resize(size(n)), decays_.resize(size(n, n)), system_.resize(size(n, n));
    C sum = 0;
    for (Count i = 0; i < n; ++i) {
      sums_[idx(i)] = sum += g_[idx(s.begin + i)];
      decay_[idx(i)] = std::exp(sum);
    }
    for (Count i = 0; i < n; ++i)
      for (Count j = 0; j < n; ++j) {
        const C decay = j > i ? C{0} : between(i, j);
        decays_[idx(i * n + j)] = decay;
        system_[idx(i * n + j)] =
            j >= i ? C{0}
                   : -beta_[idx(s.begin + i)] * decay * rows_.kk[idx((s.begin + i) * n_ + s.begin + j)];
      }
    wanted_.assign(v_.begin() + s.begin * dv, v_.begin() + s.end * dv);  // v − exp(γ)·k·S
    if (!s.fresh) {
      known_.resize(size(n, dv));
      product_({k(s), dk}, {state, dv}, n, dk, dv, known_.data(), dv, false);
      for (Count i = 0; i < n; ++i)
        for (Count j = 0; j < dv; ++j) wanted_[idx(i * dv + j)] -= decay_[idx(i)] * known_[idx(i * dv + j)];
    }
    u_ = wanted_;
    for (Count i = 0; i < n; ++i) scale_row(u_, i, dv, beta_[idx(s.begin + i)]);
    // Forward, by small blocks: what rows before the block add is a product.
    for (Count first = 0; first < n; first += small_block) {
      const Count end = std::min(n, first + small_block);
      if (first > 0)
        product_({system_.data() + first * n, n}, {u_.data(), dv}, end - first, first, dv,
                 u_.data() + first * dv, dv, true);
      for (Count i = first + 1; i < end; ++i)
        for (Count j = first; j < i; ++j) add_row(u_, i, system_[idx(i * n + j)], u_, j, dv);
    }
  }

  /// to[i] += by·from[j]
  static void add_row(std::vector<C>& to, Count i, C by, const std::vector<C>& from, Count j, Count width) {
    C* out = to.data() + i * width;
    const C* in = from.data() + j * width;
    for (Count c = 0; c < width; ++c) out[c] += by * in[c];
  }

  static constexpr Count small_block = 8;

  const IsaTable& isa_;
  const DeltaExtents& e_;
  const Tensor &qkv_, &gates_;
  const DeltaRule& rule_;
  Count batch_ = 0, head_ = 0, begin_ = 0, n_ = 0, value_head_ = 0;
  Products<C> product_;
  KeyRows<C> rows_;
  std::vector<C> v_, beta_, g_;                 // of a value head
  std::vector<C> sums_, decay_, decays_;        // γ, exp(γ), exp(γ_i − γ_j) of a segment
  std::vector<C> system_, known_, wanted_, u_;  // −A; k·S; v − exp(γ)·k·S; U
  std::vector<C> scores_, late_, y_;
  std::vector<C> dout_, du_, dscores_, dlate_, dsystem_, dwanted_, dy_;  // backward
};

template <class C>
void Worker<C>::backward(const Segment& s, const C* state, C* dstate, const Tensor& dout, C* dq, C* dk,
                         const Tensor& dqkv, const Tensor& dgates, Count r) {
  solve(s, state);
  const Count n = s.end - s.begin, d = e_.key_dim, dv = e_.value_dim;
  std::vector<C> dsums(size(n));  // of γ
  const auto dot = [](const C* a, const C* b, Count count) {
    C sum = 0;
    for (Count i = 0; i < count; ++i) sum += a[i] * b[i];
    return sum;
  };
  dout_.resize(size(n, dv));
  for (Count i = 0; i < n; ++i)
    load_values(isa_, dout,
                (batch_ * e_.rows + begin_ + s.begin + i) * e_.value_heads * dv + value_head_ * dv,
                dout_.data() + i * dv, dv);
  C *dq_rows = dq + s.begin * d, *dk_rows = dk + s.begin * d;

  // U's gradient: of out by the scores, of the next state by late keys.
  du_.resize(size(n, dv));
  product_({scores(s), n, true}, {dout_.data(), dv}, n, n, dv, du_.data(), dv, false);
  const C* late = late_keys(s);
  product_({late, d}, {dstate, dv}, n, d, dv, du_.data(), dv, true);
  dlate_.resize(size(n, d));
  product_({u_.data(), dv}, {dstate, dv, true}, n, dv, d, dlate_.data(), d, false);
  for (Count j = 0; j < n; ++j) {
    const C change = dot(dlate_.data() + j * d, late + j * d, d);
    dsums[idx(n - 1)] += change, dsums[idx(j)] -= change;
    for (Count c = 0; c < d; ++c)
      dk_rows[j * d + c] += decays_[idx((n - 1) * n + j)] * dlate_[idx(j * d + c)];
  }
  if (!s.fresh) dsums[idx(n - 1)] += decay_[idx(n - 1)] * dot(state, dstate, d * dv);
  for (Count i = 0; i < d * dv; ++i) dstate[i] *= s.fresh ? C{0} : decay_[idx(n - 1)];

  // The scores'.
  dscores_.resize(size(n, n));
  product_({dout_.data(), dv}, {u_.data(), dv, true}, n, dv, n, dscores_.data(), n, false);
  for (Count i = 0; i < n; ++i)
    for (Count j = 0; j < n; ++j) {
      C& x = dscores_[idx(i * n + j)];
      if (j < i) {
        const C change = x * scores_[idx(i * n + j)];
        dsums[idx(i)] += change, dsums[idx(j)] -= change;
      }
      x = j > i ? C{0} : x * decays_[idx(i * n + j)];
    }
  product_({dscores_.data(), n}, {k(s), d}, n, n, d, dq_rows, d, true);
  product_({dscores_.data(), n, true}, {q(s), d}, n, n, d, dk_rows, d, true);

  // The gradient of the system's right side, by the transposed system, last rows first.
  dwanted_ = du_;
  for (Count first = (n - 1) / small_block * small_block; first >= 0; first -= small_block) {
    const Count end = std::min(n, first + small_block);
    if (end < n)
      product_({system_.data() + end * n + first, n, true}, {dwanted_.data() + end * dv, dv}, end - first,
               n - end, dv, dwanted_.data() + first * dv, dv, true);
    for (Count i = end - 1; i >= first; --i)
      for (Count j = i + 1; j < end; ++j) add_row(dwanted_, i, system_[idx(j * n + i)], dwanted_, j, dv);
  }
  // The system's: of −A, dwanted·Uᵀ.
  dsystem_.resize(size(n, n));
  product_({dwanted_.data(), dv}, {u_.data(), dv, true}, n, dv, n, dsystem_.data(), n, false);
  std::vector<C> dbeta(size(n));
  for (Count i = 0; i < n; ++i) {
    const C beta = beta_[idx(s.begin + i)];
    for (Count j = 0; j < n; ++j) {
      C& x = dsystem_[idx(i * n + j)];
      if (j >= i) {
        x = 0;
        continue;
      }
      const C decay = decays_[idx(i * n + j)], keys = rows_.kk[idx((s.begin + i) * n_ + s.begin + j)];
      dbeta[idx(i)] -= x * decay * keys;
      const C change = -x * beta * decay * keys;
      dsums[idx(i)] += change, dsums[idx(j)] -= change;
      x *= -beta * decay;
    }
  }
  product_({dsystem_.data(), n}, {k(s), d}, n, n, d, dk_rows, d, true);
  product_({dsystem_.data(), n, true}, {k(s), d}, n, n, d, dk_rows, d, true);

  // wanted = v − exp(γ)·k·S, times beta; and out's part exp(γ)·q·S.
  for (Count i = 0; i < n; ++i) {
    C* given = dwanted_.data() + i * dv;
    dbeta[idx(i)] += dot(given, wanted_.data() + i * dv, dv);
    for (Count j = 0; j < dv; ++j) given[j] *= beta_[idx(s.begin + i)];
    store_values(isa_, given, dqkv, row(s.begin + i) + 2 * d + r * dv, dv);
  }
  if (!s.fresh) {
    y_.resize(size(n, dv));
    product_({q(s), d}, {state, dv}, n, d, dv, y_.data(), dv, false);
    for (Count i = 0; i < n; ++i) {
      C *of_known = dwanted_.data() + i * dv, *of_y = dout_.data() + i * dv;
      const C decay = decay_[idx(i)];
      for (Count j = 0; j < dv; ++j) of_known[j] *= -decay, of_y[j] *= decay;
      dsums[idx(i)] += dot(of_known, known_.data() + i * dv, dv) + dot(of_y, y_.data() + i * dv, dv);
    }
    product_({dwanted_.data(), dv}, {state, dv, true}, n, dv, d, dk_rows, d, true);
    product_({dout_.data(), dv}, {state, dv, true}, n, dv, d, dq_rows, d, true);
    product_({k(s), d, true}, {dwanted_.data(), dv}, d, n, dv, dstate, dv, true);
    product_({q(s), d, true}, {dout_.data(), dv}, d, n, dv, dstate, dv, true);
  }
  C sum = 0;
  for (Count i = n - 1; i >= 0; --i) {
    C* to = dgates.data<C>() + (batch_ * e_.rows + begin_ + s.begin + i) * 2 * e_.value_heads;
    to[value_head_] = dbeta[idx(i)], to[e_.value_heads + value_head_] = sum += dsums[idx(i)];
  }
}

/// The segments of rows [begin, end) of a sequence, by documents among the rows of all.
std::vector<Segment> segments(const Documents* documents, Count sequence, Count rows, Count begin,
                              Count end) {
  std::vector<Segment> out;
  const Count first = sequence * rows;
  auto next = documents ? std::upper_bound(documents->begin(), documents->end(), first + begin)
                        : Documents::const_iterator();
  for (Count at = begin; at < end;) {
    const bool starts = at == 0 || (documents && *(next - 1) == first + at);
    const Count stop = documents && next != documents->end() ? std::min(end, *next - first) : end;
    out.push_back({at - begin, stop - begin, starts});
    at = stop;
    if (documents && next != documents->end() && *next == first + at) ++next;
  }
  return out;
}

/// One text, or a sequence, of one key head: all blocks in order.
template <class C>
void run_forward(const IsaTable& isa, const DeltaExtents& e, const Tensor& qkv, const Tensor& gates,
                 const DeltaRule& rule, const StateStore& store, const Tensor& states, const Tensor& out,
                 Count batch, Count head) {
  Worker<C> worker(isa, e, qkv, gates, rule);
  const Count size = e.key_dim * e.value_dim;
  std::vector<C> state(static_cast<std::size_t>(e.repeats * size));
  Count rows = e.rows;
  C* stored = nullptr;
  bool fresh = true;
  if (store.states) {
    const std::int32_t* place = store.places.data<std::int32_t>() + 3 * batch;
    stored = store.states.data<C>() + (place[0] * e.value_heads + head * e.repeats) * size;
    fresh = place[1] == 0, rows = place[2];
    if (!fresh) std::copy_n(stored, e.repeats * size, state.data());
  }
  for (Count begin = 0; begin < rows; begin += Kernels::delta_block) {
    const Count end = std::min(rows, begin + Kernels::delta_block);
    worker.take(batch, head, begin, end - begin);
    std::vector<Segment> parts =
        segments(store.states ? nullptr : rule.documents.get(), batch, e.rows, begin, end);
    if (begin == 0) parts[0].fresh = fresh;
    for (Count r = 0; r < e.repeats; ++r) {
      C* own = state.data() + r * size;
      if (states)
        std::copy_n(own, size,
                    states.data<C>() + ((batch * e.value_heads + head * e.repeats + r) * e.blocks +
                                        begin / Kernels::delta_block) *
                                           size);
      worker.take_values(r);
      for (const Segment& s : parts) worker.forward(s, own, &out);
    }
  }
  if (stored) std::copy_n(state.data(), e.repeats * size, stored);
  for (Count row = rows; row < e.rows; ++row) {
    const std::vector<C> zeros(static_cast<std::size_t>(e.repeats * e.value_dim));
    store_values(isa, zeros.data(), out,
                 ((batch * e.rows + row) * e.value_heads + head * e.repeats) * e.value_dim,
                 e.repeats * e.value_dim);
  }
}

template <class C>
void run_backward(const IsaTable& isa, const DeltaExtents& e, const Tensor& qkv, const Tensor& gates,
                  const DeltaRule& rule, const Tensor& states, const Tensor& dout, const Tensor& dqkv,
                  const Tensor& dgates, Count batch, Count head) {
  Worker<C> worker(isa, e, qkv, gates, rule);
  const Count size = e.key_dim * e.value_dim;
  std::vector<C> dstate(static_cast<std::size_t>(e.repeats * size)), dq, dk, before;
  for (Count block = e.blocks - 1; block >= 0; --block) {
    const Count begin = block * Kernels::delta_block, end = std::min(e.rows, begin + Kernels::delta_block);
    worker.take(batch, head, begin, end - begin);
    dq.assign(static_cast<std::size_t>((end - begin) * e.key_dim), 0), dk = dq;
    const std::vector<Segment> parts = segments(rule.documents.get(), batch, e.rows, begin, end);
    for (Count r = 0; r < e.repeats; ++r) {
      const C* first =
          states.data<C>() + ((batch * e.value_heads + head * e.repeats + r) * e.blocks + block) * size;
      worker.take_values(r);
      // Only the first of a block's segments may have a state before it.
      for (auto s = parts.rbegin(); s != parts.rend(); ++s)
        worker.backward(*s, first, dstate.data() + r * size, dout, dq.data(), dk.data(), dqkv, dgates, r);
    }
    worker.finish(dq, dk, dqkv);
  }
}

}  // namespace

void CpuKernels::delta_rule(const Tensor& qkv, const Tensor& gates, const DeltaRule& rule,
                            const StateStore& store, const Tensor& states, const Tensor& out) {
  const DeltaExtents e = check_delta_rule(qkv, gates, rule, store, states, out);
  with_compute_type(qkv.dtype(), [&](auto type) {
    using C = decltype(type);
    for_items(device_, e.batch * e.key_heads, 1, [&](Count item) {
      run_forward<C>(isa_, e, qkv, gates, rule, store, states, out, item / e.key_heads, item % e.key_heads);
    });
  });
}

void CpuKernels::delta_rule_backward(const Tensor& qkv, const Tensor& gates, const DeltaRule& rule,
                                     const Tensor& states, const Tensor& dout, const Tensor& dqkv,
                                     const Tensor& dgates) {
  const DeltaExtents e = check_delta_rule_backward(qkv, gates, rule, states, dout, dqkv, dgates);
  with_compute_type(qkv.dtype(), [&](auto type) {
    using C = decltype(type);
    for_items(device_, e.batch * e.key_heads, 1, [&](Count item) {
      run_backward<C>(isa_, e, qkv, gates, rule, states, dout, dqkv, dgates, item / e.key_heads,
                      item % e.key_heads);
    });
  });
}

}  // namespace sherd::tensor::cpu
