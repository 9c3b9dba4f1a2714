#include "tensor/cuda/families.cuh"
#include "tensor/cuda/math.cuh"
#include "tensor/cuda/workspace.h"

// The gated delta rule row by row: a block has the state of one value head of one sequence, and a thread some
// of its columns. Sums have one order on every GPU.

namespace sherd::tensor::SHERD_CUDA {
namespace {

/// The first rows of some of a call's documents.
struct RowStarts {
  static constexpr int most = 512;
  int count = 0;
  int row[most]{};
};

__global__ void mark_row_starts_kernel(RowStarts starts, std::int32_t* marks) {
  for (Count i = grid_thread(); i < starts.count; i += grid_threads()) marks[starts.row[i]] = 1;
}

template <class S>
struct DeltaArguments {
  using C = Compute<S>;
  const S *qkv, *dout;
  const C *gates, *scales;  ///< scales: [rows of all, key_heads, 2], what q and k are multiplied by
  S *out, *dqkv;
  C *dgates, *states, *recent;  ///< recent: [blocks of the grid, 2·recent_rows, dk, dv]
  C* parts;                     ///< [rows of all, value_heads, 2, dk], gradients of q and k by value head
  const std::int32_t *starts, *places;  ///< each may be null
  Count rows, width, blocks;
  int key_heads, value_heads, repeats, dk, dv;
  C epsilon, scale;

  /// The first element of a packed row's key head.
  __device__ Count group(Count row, int key_head) const {
    return row * width + key_head * (width / key_heads);
  }
  __device__ bool begins(Count row) const { return row % rows == 0 || (starts && starts[row] != 0); }
};

/// Computes the factors of a row's queries and keys. A warp takes one key head of a row.
template <class S>
__global__ void delta_scales_kernel(DeltaArguments<S> a, Count items, Compute<S>* scales) {
  using C = Compute<S>;
  const unsigned lane = threadIdx.x % 32;
  for (Count item = grid_thread() / 32; item < 2 * items; item += grid_threads() / 32) {
    const Count row = item / 2 / a.key_heads;
    const S* x = a.qkv + a.group(row, static_cast<int>(item / 2 % a.key_heads)) + item % 2 * a.dk;
    C sum = 0;
    for (int i = static_cast<int>(lane); i < a.dk; i += 32) sum = fused(widen(x[i]), widen(x[i]), sum);
    sum = warp_sum(sum);
    if (lane == 0) scales[item] = (item % 2 == 0 ? a.scale : C{1}) / ::sqrt(sum + a.epsilon);
  }
}

/// The q and k of a row, of all threads.
template <class S>
__device__ void load_keys(const DeltaArguments<S>& a, Count row, int key_head, Compute<S>* q, Compute<S>* k) {
  const S* x = a.qkv + a.group(row, key_head);
  const Compute<S>* by = a.scales + (row * a.key_heads + key_head) * 2;
  for (int i = static_cast<int>(threadIdx.x); i < a.dk; i += static_cast<int>(blockDim.x))
    q[i] = widen(x[i]) * by[0], k[i] = widen(x[a.dk + i]) * by[1];
}
template <class S>
__device__ Compute<S> value_of(const DeltaArguments<S>& a, Count row, int head, int j) {
  return widen(a.qkv[a.group(row, head / a.repeats) + 2 * a.dk + head % a.repeats * a.dv + j]);
}

/// A column's state behind a row: `from` and `to`, elements `stride` apart, may be the same. Returns what the
/// row's query reads.
template <class S>
__device__ Compute<S> advance(const DeltaArguments<S>& a, Count row, int head, int j, const Compute<S>* q,
                              const Compute<S>* k, const Compute<S>* from, Compute<S>* to, int stride) {
  using C = Compute<S>;
  const C* gates = a.gates + row * 2 * a.value_heads + head;
  const C decay = exp_for<C>(gates[a.value_heads]);
  const bool fresh = a.begins(row) && !a.places;
  C known = 0;
  for (int i = 0; i < a.dk; ++i) {
    const C s = fresh ? C{0} : from[i * stride] * decay;
    to[i * stride] = s;
    known = fused(s, k[i], known);
  }
  const C change = gates[0] * (value_of(a, row, head, j) - known);
  C found = 0;
  for (int i = 0; i < a.dk; ++i) {
    const C s = fused(k[i], change, to[i * stride]);
    to[i * stride] = s;
    found = fused(s, q[i], found);
  }
  return found;
}

template <class S>
__global__ void delta_rule_kernel(DeltaArguments<S> a) {
  using C = Compute<S>;
  SHERD_DYNAMIC_SHARED(C, shared);
  C *q = shared, *k = q + a.dk, *state = k + a.dk;  // state: [dk, dv]
  const int head = static_cast<int>(blockIdx.x) % a.value_heads, threads = static_cast<int>(blockDim.x),
            first = static_cast<int>(threadIdx.x);
  const Count sequence = blockIdx.x / static_cast<unsigned>(a.value_heads), size = Count{a.dk} * a.dv;
  Count rows = a.rows;
  C* stored = nullptr;
  bool kept = false;
  if (a.places) {
    const std::int32_t* place = a.places + 3 * sequence;
    stored = a.states + (place[0] * Count{a.value_heads} + head) * size;
    kept = place[1] > 0, rows = place[2];
  }
  for (Count i = first; i < size; i += threads) state[i] = kept ? stored[i] : C{0};
  for (Count t = 0; t < a.rows; ++t) {
    const Count row = sequence * a.rows + t;
    __syncthreads();
    if (a.states && !stored && t % Kernels::delta_block == 0) {
      C* to = a.states + (Count{blockIdx.x} * a.blocks + t / Kernels::delta_block) * size;
      for (Count i = first; i < size; i += threads) to[i] = state[i];
    }
    load_keys(a, row, head / a.repeats, q, k);
    __syncthreads();
    for (int j = first; j < a.dv; j += threads) {
      C found = 0;
      if (t < rows) found = advance(a, row, head, j, q, k, state + j, state + j, a.dv);
      a.out[(row * a.value_heads + head) * a.dv + j] = narrow<S>(found);
    }
  }
  __syncthreads();
  for (Count i = first; stored && i < size; i += threads) stored[i] = state[i];
}

/// Rows whose states the backward pass has at a time, and of which it has that many groups in a block.
constexpr int recent_rows = 8;
static_assert(recent_rows * recent_rows == Kernels::delta_block);

/// The gradients of a value head; of its queries and keys a part.
template <class S>
__global__ void delta_rule_backward_kernel(DeltaArguments<S> a) {
  using C = Compute<S>;
  SHERD_DYNAMIC_SHARED(C, shared);
  const int pad = a.dv + 1;  // so that rows and columns both are read without conflicts
  C *q = shared, *k = q + a.dk, *change = k + a.dk, *dchange = change + a.dv, *given = dchange + a.dv,
    *dstate = given + a.dv;  // dstate: [dk, pad], of the state behind the row; dchange: of known, k·S
  const int head = static_cast<int>(blockIdx.x) % a.value_heads, key_head = head / a.repeats,
            threads = static_cast<int>(blockDim.x), first = static_cast<int>(threadIdx.x);
  const Count sequence = blockIdx.x / static_cast<unsigned>(a.value_heads), size = Count{a.dk} * a.dv;
  C *groups = a.recent + Count{blockIdx.x} * 2 * recent_rows * size, *rows = groups + recent_rows * size;
  for (Count i = first; i < Count{a.dk} * pad; i += threads) dstate[i] = 0;
  for (Count block = a.blocks - 1; block >= 0; --block) {
    const Count begin = block * Kernels::delta_block;
    const Count end = begin + Kernels::delta_block < a.rows ? begin + Kernels::delta_block : a.rows;
    // The states before each group of rows.
    const C* known = a.states + (Count{blockIdx.x} * a.blocks + block) * size;
    for (Count i = first; i < size; i += threads) groups[i] = known[i];
    for (Count t = begin; t < end; ++t) {
      __syncthreads();
      load_keys(a, sequence * a.rows + t, key_head, q, k);
      __syncthreads();
      const Count group = (t - begin) / recent_rows, next = (t + 1 - begin) / recent_rows;
      if (next == recent_rows) break;
      // The first row of a group leaves that group's state as it is.
      C *from = (t - begin) % recent_rows == 0 ? groups + group * size : rows,
        *to = next > group ? groups + next * size : rows;
      for (int j = first; j < a.dv; j += threads)
        advance(a, sequence * a.rows + t, head, j, q, k, from + j, to + j, a.dv);
    }
    for (Count group = (end - 1 - begin) / recent_rows; group >= 0; --group) {
      const Count from = begin + group * recent_rows;
      const Count to = from + recent_rows < end ? from + recent_rows : end;
      __syncthreads();
      for (Count i = first; i < size; i += threads) rows[i] = groups[group * size + i];
      for (Count t = from; t + 1 < to; ++t) {
        __syncthreads();
        load_keys(a, sequence * a.rows + t, key_head, q, k);
        __syncthreads();
        for (int j = first; j < a.dv; j += threads)
          advance(a, sequence * a.rows + t, head, j, q, k, rows + (t - from) * size + j,
                  rows + (t - from + 1) * size + j, a.dv);
      }
      for (Count t = to - 1; t >= from; --t) {
        const Count row = sequence * a.rows + t;
        const C* state = rows + (t - from) * size;  // before the row
        const C* gates = a.gates + row * 2 * a.value_heads + head;
        const C beta = gates[0], decay = a.begins(row) ? C{0} : exp_for<C>(gates[a.value_heads]);
        __syncthreads();
        load_keys(a, row, key_head, q, k);
        __syncthreads();
        C dbeta = 0, dg = 0;
        for (int j = first; j < a.dv; j += threads) {
          const C out = widen(a.dout[(row * a.value_heads + head) * a.dv + j]);
          C read = 0, du = 0;
          for (int i = 0; i < a.dk; ++i) {
            C& d = dstate[i * pad + j];
            d = fused(q[i], out, d);
            du = fused(d, k[i], du);
            if (decay != C{0}) read = fused(state[i * a.dv + j] * decay, k[i], read);
          }
          const C missing = value_of(a, row, head, j) - read;
          change[j] = beta * missing, dchange[j] = -beta * du, given[j] = out;
          dbeta = fused(du, missing, dbeta);
          a.dqkv[a.group(row, key_head) + 2 * a.dk + head % a.repeats * a.dv + j] = narrow<S>(beta * du);
        }
        __syncthreads();
        C* part = a.parts + (row * a.value_heads + head) * 2 * a.dk;
        for (int i = first; i < a.dk; i += threads) {
          C dq = 0, dk = 0;
          for (int j = 0; j < a.dv; ++j) {
            const C s = decay == C{0} ? C{0} : state[i * a.dv + j] * decay;
            dq = fused(fused(k[i], change[j], s), given[j], dq);
            dk = fused(dstate[i * pad + j], change[j], fused(s, dchange[j], dk));
          }
          part[i] = dq, part[a.dk + i] = dk;
        }
        __syncthreads();
        for (int j = first; j < a.dv; j += threads)
          for (int i = 0; i < a.dk; ++i) {
            C& d = dstate[i * pad + j];
            d = decay == C{0} ? C{0} : fused(k[i], dchange[j], d) * decay;
            if (decay != C{0}) dg = fused(d, state[i * a.dv + j], dg);
          }
        dbeta = block_sum(dbeta), dg = block_sum(dg);
        if (first == 0) {
          C* out = a.dgates + row * 2 * a.value_heads + head;
          out[0] = dbeta, out[a.value_heads] = dg;
        }
      }
    }
  }
}

/// The gradients of queries and keys, of the parts of their value heads. A warp takes one of a row.
template <class S>
__global__ void delta_keys_backward_kernel(DeltaArguments<S> a, Count items) {
  using C = Compute<S>;
  const int lane = static_cast<int>(threadIdx.x % 32);
  for (Count item = grid_thread() / 32; item < 2 * items; item += grid_threads() / 32) {
    const Count row = item / 2 / a.key_heads, side = item % 2;
    const int key_head = static_cast<int>(item / 2 % a.key_heads);
    const Count first = a.group(row, key_head) + side * a.dk;
    const C by = a.scales[item], scale = side == 0 ? a.scale : C{1};
    const C* parts = a.parts + (row * a.value_heads + Count{key_head} * a.repeats) * 2 * a.dk + side * a.dk;
    const auto sum_of = [&](int i) {
      C sum = 0;
      for (int r = 0; r < a.repeats; ++r) sum += parts[Count{r} * 2 * a.dk + i];
      return sum;
    };
    C dot = 0;
    for (int i = lane; i < a.dk; i += 32) dot = fused(widen(a.qkv[first + i]) * by, sum_of(i), dot);
    dot = warp_sum(dot) / (scale * scale);
    for (int i = lane; i < a.dk; i += 32)
      a.dqkv[first + i] = narrow<S>(by * (sum_of(i) - widen(a.qkv[first + i]) * by * dot));
  }
}

template <class S>
DeltaArguments<S> arguments_of(const DeltaExtents& e, const Tensor& qkv, const Tensor& gates,
                               const DeltaRule& rule, const Tensor& starts, const Tensor& scales) {
  using C = Compute<S>;
  DeltaArguments<S> a{};
  a.qkv = in<S>(qkv), a.gates = in<C>(gates), a.scales = in<C>(scales);
  a.starts = in_or_null<std::int32_t>(starts);
  a.rows = e.rows, a.width = e.width, a.blocks = e.blocks;
  a.key_heads = static_cast<int>(e.key_heads), a.value_heads = static_cast<int>(e.value_heads);
  a.repeats = static_cast<int>(e.repeats), a.dk = static_cast<int>(e.key_dim),
  a.dv = static_cast<int>(e.value_dim);
  a.epsilon = static_cast<C>(rule.epsilon);
  a.scale = static_cast<C>(1 / std::sqrt(static_cast<double>(e.key_dim)));
  return a;
}

void check_shared(const Target& target, std::size_t needed, const DeltaExtents& e) {
  if (needed > target.shared_per_block)
    fail(ErrorKind::config, "linear attention with states of ", e.key_dim, " x ", e.value_dim, " needs ",
         needed, " bytes of shared memory per block, and this GPU has ", target.shared_per_block);
}

unsigned threads_for(Count n) {
  return static_cast<unsigned>(std::clamp<Count>((n + 31) / 32 * 32, 32, 256));
}

}  // namespace

Tensor CudaKernels::row_starts(const Documents* documents, Count rows) {
  if (!documents) return {};
  require(rows <= 0x7fffffff, "documents of ", rows, " rows in one call");
  const Tensor marks = scratch(rows, DType::i32);
  fill(marks, 0);
  for (std::size_t at = 0; at + 1 < documents->size();) {
    RowStarts starts;
    for (; at + 1 < documents->size() && starts.count < RowStarts::most; ++at)
      if ((*documents)[at] < (*documents)[at + 1])  // others are empty
        starts.row[starts.count++] = static_cast<int>((*documents)[at]);
    launch(mark_row_starts_kernel, 1, element_threads, 0, target_.stream, starts, out<std::int32_t>(marks));
  }
  return marks;
}

void CudaKernels::delta_rule(const Tensor& qkv, const Tensor& gates, const DeltaRule& rule,
                             const StateStore& store, const Tensor& states, const Tensor& out) {
  const DeltaExtents e = check_delta_rule(qkv, gates, rule, store, states, out);
  if (e.batch == 0 || e.rows == 0) return;
  const Count heads = e.batch * e.rows * e.key_heads;
  const Tensor scales = scratch(2 * heads, compute_type(qkv.dtype()));
  const Tensor starts = row_starts(store.states ? nullptr : rule.documents.get(), e.batch * e.rows);
  with_floating(qkv.dtype(), [&](auto type) {
    using S = decltype(type);
    using C = Compute<S>;
    DeltaArguments<S> a = arguments_of<S>(e, qkv, gates, rule, starts, scales);
    a.out = SHERD_CUDA::out<S>(out);
    if (states) a.states = SHERD_CUDA::out<C>(states);
    if (store.states) a.states = SHERD_CUDA::out<C>(store.states), a.places = in<std::int32_t>(store.places);
    const std::size_t shared = static_cast<std::size_t>(e.key_dim * (2 + e.value_dim)) * sizeof(C);
    check_shared(target_, shared, e);
    launch(delta_scales_kernel<S>, blocks_for(2 * heads, element_threads / 32, target_.processors),
           element_threads, 0, target_.stream, a, heads, SHERD_CUDA::out<C>(scales));
    launch(delta_rule_kernel<S>, static_cast<unsigned>(e.batch * e.value_heads), threads_for(e.value_dim),
           shared, target_.stream, a);
  });
}

void CudaKernels::delta_rule_backward(const Tensor& qkv, const Tensor& gates, const DeltaRule& rule,
                                      const Tensor& states, const Tensor& dout, const Tensor& dqkv,
                                      const Tensor& dgates) {
  const DeltaExtents e = check_delta_rule_backward(qkv, gates, rule, states, dout, dqkv, dgates);
  if (e.batch == 0 || e.rows == 0) return;
  const Count heads = e.batch * e.rows * e.key_heads;
  const DType compute = compute_type(qkv.dtype());
  const Tensor scales = scratch(2 * heads, compute), parts = scratch(delta_parts(e), compute),
               recent = scratch(delta_recent(e), compute);
  const Tensor starts = row_starts(rule.documents.get(), e.batch * e.rows);
  with_floating(qkv.dtype(), [&](auto type) {
    using S = decltype(type);
    using C = Compute<S>;
    DeltaArguments<S> a = arguments_of<S>(e, qkv, gates, rule, starts, scales);
    a.dout = in<S>(dout), a.dqkv = SHERD_CUDA::out<S>(dqkv), a.dgates = SHERD_CUDA::out<C>(dgates);
    a.states = const_cast<C*>(in<C>(states)), a.parts = SHERD_CUDA::out<C>(parts);
    a.recent = SHERD_CUDA::out<C>(recent);
    const std::size_t shared =
        static_cast<std::size_t>(2 * e.key_dim + 3 * e.value_dim + e.key_dim * (e.value_dim + 1)) * sizeof(C);
    check_shared(target_, shared, e);
    const unsigned warps = blocks_for(2 * heads, element_threads / 32, target_.processors);
    launch(delta_scales_kernel<S>, warps, element_threads, 0, target_.stream, a, heads,
           SHERD_CUDA::out<C>(scales));
    launch(delta_rule_backward_kernel<S>, static_cast<unsigned>(e.batch * e.value_heads),
           threads_for(std::max(e.key_dim, e.value_dim)), shared, target_.stream, a);
    launch(delta_keys_backward_kernel<S>, warps, element_threads, 0, target_.stream, a, heads);
  });
}

}  // namespace sherd::tensor::SHERD_CUDA
