#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "tensor/cpu/loops.h"
#include "tensor/cpu/attention/softmax_shares.h"
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

/// Query heads of a group that a task takes together: all, or some of many, which then are tasks of their
/// own. (Rows of a ring must be stored and seen in turn.)
constexpr Count most_together = 16;
Count heads_together(const StoredExtents& e) {
  return e.seq == 1 ? std::min(e.group(), most_together) : e.group();
}

/// Queries of one group against the keys that one row sees.
class GroupRow {
 public:
  GroupRow(const IsaTable& isa, const StoredExtents& e, DType dtype, float* scratch)
      : isa_(isa),
        e_(e),
        storage_(storage_index(dtype)),
        element_(static_cast<Count>(size_of(dtype))),
        sums_(scratch),
        scores_(scratch + heads_together(e) * e.dim) {}

  /// `group`: so many query heads; `sinks`: theirs; null: none.
  void attend(const std::byte* queries, Count group, const StoredHead& head, const StoredRange& seen,
              const std::byte* sinks, std::byte* out) const {
    const Count n = seen.all();
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

void attend_f64(const StoredExtents& e, const double* queries, Count group, const StoredHead& head,
                const StoredRange& seen, const double* sinks, double* out) {
  const auto* keys = reinterpret_cast<const double*>(head.keys);
  const auto* values = reinterpret_cast<const double*>(head.values);
  std::vector<double> scores(static_cast<std::size_t>(seen.all()));
  const auto place = [&](Count j) { return (j < seen.count ? seen.first + j : j - seen.count) * e.dim; };
  for (Count r = 0; r < group; ++r, queries += e.dim, out += e.dim) {
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
  return heads_together(e) * (e.dim + std::min(e.window, e.capacity));
}

}  // namespace

std::size_t attend_stored_workspace(Device& device, const Tensor& qkv, const Attention& geometry,
                                    const KeyStore& store, const Tensor& sinks, const Tensor& out) {
  const StoredExtents e = check_attend_stored(qkv, geometry, store, sinks, out);
  if (!out || e.seq == 0 || qkv.dtype() == DType::f64) return 0;
  const Count parts = (e.group() + heads_together(e) - 1) / heads_together(e);
  const Count tasks = std::min<Count>(device.arena().threads(), e.batch * e.kv_heads * parts);
  return static_cast<std::size_t>(tasks * scratch_floats(e)) * sizeof(float);
}

void CpuKernels::attend_stored(const Tensor& qkv, const Attention& geometry, const KeyStore& store,
                               const Tensor& sinks, const Tensor& out) {
  const StoredExtents e = check_attend_stored(qkv, geometry, store, sinks, out);
  if (e.seq == 0) return;
  const auto element = static_cast<Count>(size_of(qkv.dtype()));
  const auto bytes = static_cast<std::size_t>(e.dim * element);
  const auto store_row = [&](const StoredHead& head, Count b, Count g, Count i) {
    const Count row = (b * e.seq + i) * e.width();
    const Count place = (head.first + i) % e.capacity * e.dim * element;
    std::memcpy(head.keys + place, at(qkv, row + e.key_col(g)), bytes);
    if (head.values != head.keys) std::memcpy(head.values + place, at(qkv, row + e.value_col(g)), bytes);
  };
  const Count together = heads_together(e), parts = out ? (e.group() + together - 1) / together : 1;
  if (parts > 1)
    for (Count item = 0; item < e.batch * e.kv_heads; ++item) {
      const StoredHead head = head_of(e, store, item / e.kv_heads, item % e.kv_heads);
      if (head.count > 0) store_row(head, item / e.kv_heads, item % e.kv_heads, 0);
    }
  device_.arena().parallel_for(e.batch * e.kv_heads * parts, 1, [&](Count item, Count) {
    const Count b = item / parts / e.kv_heads, g = item / parts % e.kv_heads, first = item % parts * together,
                heads = std::min(together, e.group() - first);
    const StoredHead head = head_of(e, store, b, g);
    const bool wide = qkv.dtype() == DType::f64;
    device::Storage scratch;
    if (out && !wide)
      scratch =
          device_.allocate(static_cast<std::size_t>(scratch_floats(e)) * sizeof(float), Category::workspace);
    for (Count i = 0; i < e.seq; ++i) {
      std::byte* to = out ? at(out, ((b * e.seq + i) * e.heads + g * e.group() + first) * e.dim) : nullptr;
      if (i >= head.count) {
        if (to) std::memset(to, 0, static_cast<std::size_t>(heads) * bytes);
        continue;
      }
      if (parts == 1) store_row(head, b, g, i);
      if (!to) continue;
      const std::byte* queries = at(qkv, (b * e.seq + i) * e.width() + e.query_col(g, first));
      const StoredRange seen = seen_rows(e, head.first + i);
      const std::byte* group_sinks = sinks ? at(sinks, g * e.group() + first) : nullptr;
      if (wide)
        attend_f64(e, reinterpret_cast<const double*>(queries), heads, head, seen,
                   reinterpret_cast<const double*>(group_sinks), reinterpret_cast<double*>(to));
      else
        GroupRow(isa_, e, qkv.dtype(), reinterpret_cast<float*>(scratch.data()))
            .attend(queries, heads, head, seen, group_sinks, to);
    }
  });
}

}  // namespace sherd::tensor::cpu
