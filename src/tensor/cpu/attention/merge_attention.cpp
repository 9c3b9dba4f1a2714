#include <algorithm>
#include <cstring>
#include <limits>

#include "tensor/cpu/loops.h"
#include "tensor/cpu/attention/softmax_shares.h"
#include "tensor/extents.h"

namespace sherd::tensor::cpu {
namespace {

/// sum = sum·keep + x·factor
void blend(const IsaTable& isa, const Tensor& x, Count from, float factor, float* sum, float keep, Count n) {
  isa.convert[storage_index(x)].blend(at(x, from), factor, sum, keep, n);
}
void blend(const IsaTable&, const Tensor& x, Count from, double factor, double* sum, double keep, Count n) {
  for (Count i = 0; i < n; ++i) sum[i] = sum[i] * keep + x.data<double>()[from + i] * factor;
}
void set(const IsaTable& isa, const Tensor& x, Count from, float* to, Count n) {
  isa.convert[storage_index(x)].load(at(x, from), to, n);
}
void set(const IsaTable&, const Tensor& x, Count from, double* to, Count n) {
  std::memcpy(to, x.data<double>() + from, static_cast<std::size_t>(n) * sizeof(double));
}

/// One row of one head: n elements of part from `from` on, whose sum has part_lse.
template <class C>
void merge_row(const IsaTable& isa, const Tensor& part, Count from, C part_lse, bool begin, C* out, C* lse,
               Count n) {
  constexpr C none = -std::numeric_limits<C>::infinity();
  if (begin && part_lse == none) std::fill_n(out, n, C{0});
  const SoftmaxShares<C> shares = shares_of(begin ? none : *lse, part_lse);
  *lse = shares.lse;
  // A part without weight may hold anything.
  if (shares.part == 0) return;
  if (shares.old == 0) return set(isa, part, from, out, n);
  blend(isa, part, from, shares.part, out, shares.old, n);
}

template <class C>
void merge(Device& device, const IsaTable& isa, const MergeExtents& e, const Tensor& part,
           const Tensor& part_lse, Count first, bool begin, const Tensor& out, const Tensor& lse) {
  const C* more = part_lse.data<C>();
  in_chunks(device, e.batch * e.rows, row_grain(e.heads * e.dim), [&](Count chunk, Count count) {
    for (Count at = chunk; at < chunk + count; ++at) {
      const Count b = at / e.rows, row = at % e.rows;
      for (Count h = 0; h < e.heads; ++h) {
        const Count head = b * e.heads + h;
        merge_row(isa, part, (at * e.heads + h) * e.dim, more[head * e.rows + row], begin,
                  out.data<C>() + ((b * e.seq + first + row) * e.heads + h) * e.dim,
                  lse.data<C>() + head * e.seq + first + row, e.dim);
      }
    }
  });
}

}  // namespace

void CpuKernels::merge_attention(const Tensor& part, const Tensor& part_lse, std::int64_t first, bool begin,
                                 const Tensor& out, const Tensor& lse) {
  const MergeExtents e = check_merge_attention(part, part_lse, first, out, lse);
  if (part.numel() == 0) return;
  with_compute_type(part.dtype(), [&](auto type) {
    merge<decltype(type)>(device_, isa_, e, part, part_lse, first, begin, out, lse);
  });
}

}  // namespace sherd::tensor::cpu
