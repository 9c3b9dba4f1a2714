#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "tensor/cpu/loops.h"
#include "tensor/cpu/softmax_shares.h"
#include "tensor/extents.h"

namespace sherd::tensor::cpu {
namespace {

/// The keys that a row sees: one or two runs of a store's rows, as they lie in a ring.
struct StoredRange {
  Count first, count;  ///< the run that ends the ring, or all
  Count more;          ///< from row 0 on
  Count all() const { return count + more; }
};

StoredRange seen_rows(const StoredExtents& e, Count position) {
  const Count n = std::min(position + 1, e.window), first = (position + 1 - n) % e.capacity;
  const Count count = std::min(n, e.capacity - first);
  return {first, count, n - count};
}

/// One key-value head of one sequence of a call.
struct StoredHead {
  std::byte *keys, *values;  ///< [capacity, dim]; may be one
  Count first, count;        ///< position of the first row; rows that count
};

StoredHead head_of(const StoredExtents& e, const KeyStore& store, Count b, Count g) {
  const std::int32_t* place = store.places.data<std::int32_t>() + 3 * b;
  const Count text = place[0], begin = (text * e.kv_heads + g) * e.capacity * e.dim;
  require(text >= 0 && text < e.texts && place[1] >= 0 && place[2] >= 0 && place[2] <= e.seq,
          "attend_stored: sequence ", b, " is text ", text, " of ", e.texts, ", ", place[2], " of ", e.seq,
          " rows from position ", place[1], " on");
  require(e.window <= e.capacity || place[1] + place[2] <= e.capacity, "attend_stored: position ",
          place[1] + place[2] - 1, " of a text of which ", e.capacity, " keys are stored");
  return {at(store.keys, begin), at(store.values ? store.values : store.keys, begin), place[1], place[2]};
}

/// The queries of one group against the keys that one row sees.
class GroupRow {
 public:
  GroupRow(const IsaTable& isa, const StoredExtents& e, DType dtype, float* scratch)
      : isa_(isa),
        e_(e),
        storage_(storage_index(dtype)),
        element_(static_cast<Count>(size_of(dtype))),
        sums_(scratch),
        scores_(scratch + e.group() * e.dim) {}

  /// `sinks`: of the group's heads; null: none.
  void attend(const std::byte* queries, const StoredHead& head, const StoredRange& seen,
              const std::byte* sinks, std::byte* out) const {
    const Count n = seen.all(), group = e_.group();
    const FewRowsOps& ops = isa_.few_rows[storage_];
    const auto products = [&](Count first, Count count, float* to) {
      ops.products(queries, e_.dim, group, row(head.keys, first), e_.dim, count, e_.dim, to, n);
    };
    products(seen.first, seen.count, scores_);
    if (seen.more > 0) products(0, seen.more, scores_ + seen.count);
    scale_and_cap(group * n);
    for (Count r = 0; r < group; ++r) {
      float sink = -INFINITY;
      if (sinks) isa_.convert[storage_].load(sinks + r * element_, &sink, 1);
      softmax(scores_ + r * n, n, sink);
    }
    std::fill_n(sums_, group * e_.dim, 0.0f);
    ops.weighted_sums(scores_, n, group, row(head.values, seen.first), seen.count, e_.dim, sums_);
    if (seen.more > 0)
      ops.weighted_sums(scores_ + seen.count, n, group, head.values, seen.more, e_.dim, sums_);
    isa_.convert[storage_].store(sums_, out, group * e_.dim);
  }

 private:
  const std::byte* row(const std::byte* from, Count i) const { return from + i * e_.dim * element_; }
  void scale_and_cap(Count n) const {
    const auto& ops = isa_.elementwise[storage_f32];
    if (e_.cap == 0) return ops.scale(scores_, static_cast<float>(e_.scale), scores_, n);
    ops.scale(scores_, static_cast<float>(e_.scale / e_.cap), scores_, n);
    ops.tanh(scores_, scores_, n);
    ops.scale(scores_, static_cast<float>(e_.cap), scores_, n);
  }
  void softmax(float* scores, Count n, float sink) const {
    float top, sum;
    isa_.softmax[storage_f32].max_and_sum(scores, n, &top, &sum);
    const float lse = top + std::log(sum);
    isa_.softmax[storage_f32].gradient(scores, n, shares_of(lse, sink).lse, 1.0f);
  }

  const IsaTable& isa_;
  const StoredExtents& e_;
  StorageIndex storage_;
  Count element_;
  float *sums_, *scores_;
};

void attend_f64(const StoredExtents& e, const double* queries, const StoredHead& head,
                const StoredRange& seen, const double* sinks, double* out) {
  const auto* keys = reinterpret_cast<const double*>(head.keys);
  const auto* values = reinterpret_cast<const double*>(head.values);
  std::vector<double> scores(static_cast<std::size_t>(seen.all()));
  const auto place = [&](Count j) { return (j < seen.count ? seen.first + j : j - seen.count) * e.dim; };
  for (Count r = 0; r < e.group(); ++r, queries += e.dim, out += e.dim) {
    double top = -INFINITY, sum = 0;
    for (Count j = 0; j < seen.all(); ++j) {
      double& score = scores[static_cast<std::size_t>(j)] = 0;
      for (Count d = 0; d < e.dim; ++d) score += queries[d] * keys[place(j) + d];
      score *= e.scale;
      if (e.cap > 0) score = e.cap * std::tanh(score / e.cap);
      top = std::max(top, score);
    }
    if (sinks) sum = std::exp(sinks[r] - top);
    std::fill_n(out, e.dim, 0.0);
    for (Count j = 0; j < seen.all(); ++j) {
      const double p = std::exp(scores[static_cast<std::size_t>(j)] - top);
      sum += p;
      for (Count d = 0; d < e.dim; ++d) out[d] += p * values[place(j) + d];
    }
    for (Count d = 0; d < e.dim; ++d) out[d] /= sum;
  }
}

/// The workspace of one task: the group's sums and scores.
Count scratch_floats(const StoredExtents& e) {
  return e.group() * (e.dim + std::min(e.window, e.capacity));
}

}  // namespace

std::size_t attend_stored_workspace(Device& device, const Tensor& qkv, const Attention& geometry,
                                    const KeyStore& store, const Tensor& sinks, const Tensor& out) {
  const StoredExtents e = check_attend_stored(qkv, geometry, store, sinks, out);
  if (!out || e.seq == 0 || qkv.dtype() == DType::f64) return 0;
  const Count tasks = std::min<Count>(device.arena().threads(), e.batch * e.kv_heads);
  return static_cast<std::size_t>(tasks * scratch_floats(e)) * sizeof(float);
}

void CpuKernels::attend_stored(const Tensor& qkv, const Attention& geometry, const KeyStore& store,
                               const Tensor& sinks, const Tensor& out) {
  const StoredExtents e = check_attend_stored(qkv, geometry, store, sinks, out);
  if (e.seq == 0) return;
  const auto element = static_cast<Count>(size_of(qkv.dtype()));
  const auto bytes = static_cast<std::size_t>(e.dim * element);
  device_.arena().parallel_for(e.batch * e.kv_heads, 1, [&](Count item, Count) {
    const Count b = item / e.kv_heads, g = item % e.kv_heads;
    const StoredHead head = head_of(e, store, b, g);
    const bool wide = qkv.dtype() == DType::f64;
    device::Storage scratch;
    if (out && !wide)
      scratch =
          device_.allocate(static_cast<std::size_t>(scratch_floats(e)) * sizeof(float), Category::workspace);
    for (Count i = 0; i < e.seq; ++i) {
      std::byte* to = out ? at(out, ((b * e.seq + i) * e.heads + g * e.group()) * e.dim) : nullptr;
      if (i >= head.count) {
        if (to) std::memset(to, 0, static_cast<std::size_t>(e.group()) * bytes);
        continue;
      }
      const Count row = (b * e.seq + i) * e.width(), position = head.first + i;
      const Count place = position % e.capacity * e.dim * element;
      std::memcpy(head.keys + place, at(qkv, row + e.key_col(g)), bytes);
      if (head.values != head.keys) std::memcpy(head.values + place, at(qkv, row + e.value_col(g)), bytes);
      if (!to) continue;
      const std::byte* queries = at(qkv, row + e.query_col(g, 0));
      const StoredRange seen = seen_rows(e, position);
      const std::byte* group_sinks = sinks ? at(sinks, g * e.group()) : nullptr;
      if (wide)
        attend_f64(e, reinterpret_cast<const double*>(queries), head, seen,
                   reinterpret_cast<const double*>(group_sinks), reinterpret_cast<double*>(to));
      else
        GroupRow(isa_, e, qkv.dtype(), reinterpret_cast<float*>(scratch.data()))
            .attend(queries, head, seen, group_sinks, to);
    }
  });
}

}  // namespace sherd::tensor::cpu
