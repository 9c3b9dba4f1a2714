#include <cmath>
#include <vector>

#include "tensor/cpu/loops.h"
#include "tensor/extents.h"

namespace sherd::tensor::cpu {
namespace {

template <class C>
C sigmoid(C x) {
  return C{1} / (C{1} + std::exp(-x));
}
/// log(1 + exp(x))
template <class C>
C softplus(C x) {
  return std::max(x, C{0}) + std::log1p(std::exp(-std::abs(x)));
}

/// Columns that a thread takes together; a multiple of a cache line's elements.
constexpr Count column_grain = 64;

/// One sequence's columns [first, first + n), in the compute type, with the rows before it.
template <class C>
class ConvColumns {
 public:
  ConvColumns(const IsaTable& isa, const ConvExtents& e, const Tensor& weight, Count first, Count n)
      : isa_(isa), e_(e), first_(first), n_(n), before_(e.taps - 1) {
    weights_.resize(static_cast<std::size_t>(n * e.taps));
    load_values(isa, weight, first * e.taps, weights_.data(), n * e.taps);
  }

  /// Loads rows [begin, end) of x and those that they see, from here on counted from `begin`; before row 0
  /// are zeros, or a text's state.
  void take(const Tensor& x, Count batch, Count begin, Count end) {
    x_.assign(static_cast<std::size_t>((before_ + end - begin) * n_), C{0});
    for (Count t = std::max<Count>(0, begin - before_); t < end; ++t)
      load_values(isa_, x, element(batch, t), x_.data() + (before_ + t - begin) * n_, n_);
  }
  void take_state(const Tensor& states, Count text) {
    for (Count j = 0; j < before_; ++j)
      load_values(isa_, states, (text * before_ + j) * e_.columns + first_, x_.data() + j * n_, n_);
  }
  /// The last rows behind `rows` of them.
  void give_state(const Tensor& states, Count text, Count rows) const {
    for (Count j = 0; j < before_; ++j)
      store_values(isa_, x_.data() + (rows + j) * n_, states, (text * before_ + j) * e_.columns + first_, n_);
  }

  /// The sums of row t, of a document that began `since` rows before it.
  void sums(Count t, Count since, C* to) const {
    std::fill_n(to, n_, C{0});
    for (Count j = std::max<Count>(0, before_ - since); j < e_.taps; ++j)
      for (Count c = 0; c < n_; ++c)
        to[c] += weights_[static_cast<std::size_t>(c * e_.taps + j)] *
                 x_[static_cast<std::size_t>((t + j) * n_ + c)];
  }
  /// Adds row t's part of the gradients, dsum of its sums.
  void backward(Count t, Count since, const C* dsum, std::vector<C>& dx, std::vector<C>& dweights) const {
    for (Count j = std::max<Count>(0, before_ - since); j < e_.taps; ++j)
      for (Count c = 0; c < n_; ++c) {
        const auto w = static_cast<std::size_t>(c * e_.taps + j),
                   at = static_cast<std::size_t>((t + j) * n_ + c);
        dx[at] += weights_[w] * dsum[c], dweights[w] += x_[at] * dsum[c];
      }
  }

  Count element(Count batch, Count t) const { return (batch * e_.rows + t) * e_.columns + first_; }
  Count size() const { return n_; }

 private:
  const IsaTable& isa_;
  const ConvExtents& e_;
  Count first_, n_, before_;
  std::vector<C> weights_, x_;
};

/// For each row of a sequence how many rows of its document stand before it.
std::vector<Count> rows_since(const Documents* documents, Count batch, Count rows) {
  std::vector<Count> out(static_cast<std::size_t>(rows));
  auto next = documents ? std::upper_bound(documents->begin(), documents->end(), batch * rows)
                        : Documents::const_iterator();
  for (Count t = 0; t < rows; ++t) {
    bool starts = false;
    for (; documents && next != documents->end() && *next == batch * rows + t; ++next) starts = true;
    out[static_cast<std::size_t>(t)] = t == 0 || starts ? 0 : out[static_cast<std::size_t>(t - 1)] + 1;
  }
  return out;
}

/// Rows that a thread has of its columns at a time.
constexpr Count conv_rows = 1024;

template <class C>
void convolve(const IsaTable& isa, const ConvExtents& e, const Tensor& x, const Tensor& weight,
              const Documents* documents, const StateStore& store, const Tensor& out, Count batch,
              Count first) {
  ConvColumns<C> columns(isa, e, weight, first, std::min(column_grain, e.columns - first));
  std::vector<Count> since = rows_since(store.states ? nullptr : documents, batch, e.rows);
  const std::int32_t* place = store.states ? store.places.data<std::int32_t>() + 3 * batch : nullptr;
  const bool continues = place && place[1] > 0;
  if (continues)
    for (Count& rows : since) rows += e.taps;
  std::vector<C> sums(static_cast<std::size_t>(columns.size()));
  // A text's state is of its last rows, wherever they are among these.
  const Count step = place ? std::max<Count>(1, e.rows) : conv_rows;
  for (Count begin = 0; begin < e.rows; begin += step) {
    const Count end = std::min(e.rows, begin + step);
    columns.take(x, batch, begin, end);
    if (continues) columns.take_state(store.states, place[0]);
    for (Count t = begin; t < end; ++t) {
      columns.sums(t - begin, since[static_cast<std::size_t>(t)], sums.data());
      for (C& value : sums) value *= sigmoid(value);
      store_values(isa, sums.data(), out, columns.element(batch, t), columns.size());
    }
  }
  if (place) columns.give_state(store.states, place[0], place[2]);
}

/// The gradients of some columns over all sequences, in order; of their weights the sums.
template <class C>
void convolve_backward(const IsaTable& isa, const ConvExtents& e, const Tensor& x, const Tensor& weight,
                       const Documents* documents, const Tensor& dout, const Tensor& dx,
                       const Tensor& dweight, bool accumulate, Count first) {
  ConvColumns<C> columns(isa, e, weight, first, std::min(column_grain, e.columns - first));
  const Count n = columns.size(), before = e.taps - 1;
  std::vector<C> sums(static_cast<std::size_t>(n)), given(sums.size()),
      dweights(static_cast<std::size_t>(n * e.taps)), dxs;
  for (Count batch = 0; batch < e.batch; ++batch) {
    const std::vector<Count> since = rows_since(documents, batch, e.rows);
    // Rows of dx from `before` rows before `begin` on: those are complete when the rows behind them are.
    dxs.assign(static_cast<std::size_t>((before + std::min(conv_rows, e.rows)) * n), C{0});
    for (Count begin = 0; begin < e.rows; begin += conv_rows) {
      const Count end = std::min(e.rows, begin + conv_rows), last = end == e.rows ? end : end - before;
      columns.take(x, batch, begin, end);
      for (Count t = begin; t < end; ++t) {
        columns.sums(t - begin, since[static_cast<std::size_t>(t)], sums.data());
        load_values(isa, dout, columns.element(batch, t), given.data(), n);
        for (std::size_t c = 0; c < sums.size(); ++c) {
          const C s = sigmoid(sums[c]);
          given[c] *= s * (C{1} + sums[c] * (C{1} - s));
        }
        columns.backward(t - begin, since[static_cast<std::size_t>(t)], given.data(), dxs, dweights);
      }
      for (Count t = std::max<Count>(0, begin - before); dx && t < last; ++t)
        store_values(isa, dxs.data() + (before + t - begin) * n, dx, columns.element(batch, t), n);
      const auto rest = static_cast<std::ptrdiff_t>((end - begin) * n);
      std::copy(dxs.begin() + rest, dxs.begin() + rest + static_cast<std::ptrdiff_t>(before * n),
                dxs.begin());
      std::fill(dxs.begin() + static_cast<std::ptrdiff_t>(before * n), dxs.end(), C{0});
    }
  }
  if (dweight) add_values(isa, dweights.data(), dweight, first * e.taps, n * e.taps, accumulate);
}

}  // namespace

void CpuKernels::short_conv(const Tensor& x, const Tensor& weight,
                            const std::shared_ptr<const Documents>& documents, const StateStore& store,
                            const Tensor& out) {
  const ConvExtents e = check_short_conv("short_conv", x, weight, documents.get(), store, out);
  with_compute_type(x.dtype(), [&](auto type) {
    const Count parts = ceil_div(e.columns, column_grain);
    for_items(device_, e.batch * parts, 1, [&](Count item) {
      convolve<decltype(type)>(isa_, e, x, weight, documents.get(), store, out, item / parts,
                               item % parts * column_grain);
    });
  });
}

void CpuKernels::short_conv_backward(const Tensor& x, const Tensor& weight,
                                     const std::shared_ptr<const Documents>& documents, const Tensor& dout,
                                     const Tensor& dx, const Tensor& dweight, bool accumulate) {
  const ConvExtents e = check_short_conv_backward(x, weight, documents.get(), dout, dx, dweight);
  with_compute_type(x.dtype(), [&](auto type) {
    for_items(device_, ceil_div(e.columns, column_grain), 1, [&](Count part) {
      convolve_backward<decltype(type)>(isa_, e, x, weight, documents.get(), dout, dx, dweight, accumulate,
                                        part * column_grain);
    });
  });
}

void CpuKernels::delta_gates(const Tensor& x, const Tensor& a_log, const Tensor& dt_bias, int key_heads,
                             const Tensor& gates) {
  const GateExtents e = check_delta_gates("delta_gates", x, a_log, dt_bias, key_heads, gates);
  with_compute_type(x.dtype(), [&](auto type) {
    using C = decltype(type);
    const std::vector<C> logs = all_values<C>(isa_, a_log), biases = all_values<C>(isa_, dt_bias);
    in_chunks(device_, e.rows, row_grain(2 * e.heads), [&](Count begin, Count count) {
      std::vector<C> row(static_cast<std::size_t>(2 * e.heads));
      for (Count i = begin; i < begin + count; ++i) {
        load_values(isa_, x, i * 2 * e.heads, row.data(), 2 * e.heads);
        C* to = gates.data<C>() + i * 2 * e.heads;
        for (Count h = 0; h < e.heads; ++h) {
          const auto head = static_cast<std::size_t>(h);
          to[h] = sigmoid(row[e.b(h)]);
          to[e.heads + h] = -std::exp(logs[head]) * softplus(row[e.a(h)] + biases[head]);
        }
      }
    });
  });
}

void CpuKernels::delta_gates_backward(const Tensor& x, const Tensor& a_log, const Tensor& dt_bias,
                                      int key_heads, const Tensor& dgates, const Tensor& dx,
                                      const Tensor& parts) {
  const GateExtents e = check_delta_gates_backward(x, a_log, dt_bias, key_heads, dgates, dx, parts);
  with_compute_type(x.dtype(), [&](auto type) {
    using C = decltype(type);
    const std::vector<C> logs = all_values<C>(isa_, a_log), biases = all_values<C>(isa_, dt_bias);
    in_chunks(device_, e.rows, row_grain(2 * e.heads), [&](Count begin, Count count) {
      std::vector<C> row(static_cast<std::size_t>(2 * e.heads)), drow(row.size());
      for (Count i = begin; i < begin + count; ++i) {
        load_values(isa_, x, i * 2 * e.heads, row.data(), 2 * e.heads);
        const C* given = dgates.data<C>() + i * 2 * e.heads;
        C *of_logs = parts.data<C>() + i * e.heads, *of_biases = of_logs + e.rows * e.heads;
        for (Count h = 0; h < e.heads; ++h) {
          const auto head = static_cast<std::size_t>(h);
          const C beta = sigmoid(row[e.b(h)]), step = row[e.a(h)] + biases[head],
                  rate = -std::exp(logs[head]), dg = given[e.heads + h];
          drow[e.b(h)] = given[h] * beta * (C{1} - beta);
          of_logs[h] = dg * rate * softplus(step);
          of_biases[h] = drow[e.a(h)] = dg * rate * sigmoid(step);
        }
        store_values(isa_, drow.data(), dx, i * 2 * e.heads, 2 * e.heads);
      }
    });
  });
}

}  // namespace sherd::tensor::cpu
