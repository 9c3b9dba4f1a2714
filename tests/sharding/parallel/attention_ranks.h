#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "autograd/ops.h"
#include "sharding/parallel/attention.h"
#include "support/cpu_fixture.h"

// Attention of the ranks of a grid against one rank's, on the same values.
namespace sherd::parallel {

using tensor::Tensor;

/// Attention over whole sequences with all heads.
struct AttentionCase {
  std::int64_t batch, seq;
  int heads, kv_heads;
  std::int64_t dim;
  bool causal = true;
  float dropout = 0;
  std::int64_t window = 0;
  float cap = 0;
  bool sinks = false;

  tensor::Attention geometry() const {
    return {.heads = heads,
            .kv_heads = kv_heads,
            .causal = causal,
            .window = window,
            .cap = cap,
            .dropout = dropout,
            .key = {11, 12}};
  }
  tensor::Shape qkv() const { return {batch, seq, (heads + 2 * kv_heads) * dim}; }
  tensor::Shape out() const { return {batch, seq, heads * dim}; }
  std::string str() const {
    return cat(batch, " x ", seq, ", heads ", heads, "/", kv_heads, " of ", dim,
               causal ? ", causal" : ", full", ", dropout ", dropout, ", window ", window, ", cap ", cap,
               sinks ? ", sinks" : "");
  }
};

struct AttentionGrid {
  int tensor, context;
};

/// Runs body(cpu, layout) on all ranks of a grid, each with a CPU of one thread.
inline void on_grid(const AttentionGrid& grid, ContextMethod method,
                    const std::function<void(test::Cpu&, const Layout&)>& body) {
  comm::run_local(grid.tensor * grid.context, {.timeout_seconds = 30}, [&](comm::Communicator& world) {
    test::Cpu cpu(1);
    const int t = world.rank() % grid.tensor, c = world.rank() / grid.tensor;
    const auto tensor_ranks = world.split(c, t), context_ranks = world.split(t, c);
    body(cpu, {.tensor = tensor_ranks.get(), .context = context_ranks.get(), .context_method = method});
  });
}

/// This context rank's rows of x [batch, seq, width], of columns [first, end).
inline Tensor rows_of_rank(test::Cpu& cpu, const Layout& layout, const Tensor& x, std::int64_t first,
                           std::int64_t end) {
  const std::int64_t batch = x.shape()[0], seq = x.shape()[1], width = x.shape()[2];
  const std::int64_t rows = seq / layout.context_size();
  const tensor::Positions positions = layout.inner_positions(rows);
  const std::vector<double> all = cpu.values(x);
  std::vector<double> own;
  for (std::int64_t b = 0; b < batch; ++b)
    for (std::int64_t row = 0; row < rows; ++row) {
      const auto at = all.begin() + (b * seq + positions.at(row)) * width;
      own.insert(own.end(), at + first, at + end);
    }
  return cpu.convert(Tensor::of<double>(*cpu.device, {batch, rows, end - first}, own), x.dtype());
}

/// This tensor rank's equal cut of columns.
inline Tensor part_of_rank(test::Cpu& cpu, const Layout& layout, const Tensor& x) {
  const std::int64_t width = x.shape().back() / layout.tensor_size();
  return rows_of_rank(cpu, layout, x, layout.tensor_rank() * width, (layout.tensor_rank() + 1) * width);
}

inline Tensor whole_qkv(test::Cpu& cpu, const AttentionCase& c, DType dtype) {
  return cpu.normal(c.qkv(), 1, dtype);
}
inline Tensor own_part(test::Cpu& cpu, const Layout& layout, const AttentionCase& c, DType dtype) {
  return part_of_rank(cpu, layout, whole_qkv(cpu, c, dtype));
}

/// Sinks of all heads, and those of a tensor rank's.
inline Tensor whole_sinks(test::Cpu& cpu, const AttentionCase& c, DType dtype) {
  return cpu.normal({c.heads}, 4, dtype);
}
inline Tensor own_heads(const Layout& layout, const Tensor& of_heads) {
  const std::int64_t each = of_heads.numel() / layout.tensor_size(), first = layout.tensor_rank() * each;
  return of_heads.range(first, first + each);
}

/// Forward and backward of one rank's part. between() is called after forward.
struct RankPass {
  Tensor out, dqkv, dsinks;
  std::uint64_t forward_peak = 0, peak = 0;  ///< bytes of the device beside qkv and dout
  RankPass(test::Cpu& cpu, const Layout& layout, const AttentionCase& c, DType dtype,
           Recompute recompute = Recompute::none, const std::function<void()>& between = {}) {
    autograd::Tape tape(*cpu.kernels);
    tape.recompute = recompute;
    const Var qkv = tape.variable(own_part(cpu, layout, c, dtype));
    const Tensor dout = part_of_rank(cpu, layout, cpu.normal(c.out(), 2, dtype));
    const Var ones = tape.variable(cpu.normal(dout.shape(), 3, dtype, 0, 1));
    const Var sinks = c.sinks ? tape.variable(own_heads(layout, whole_sinks(cpu, c, dtype))) : Var();
    device::Ledger& ledger = cpu.device->ledger();
    ledger.reset_peaks();
    const std::uint64_t before = ledger.current(device::Tier::device);
    // A product, whose gradient reads attention's result.
    const Var result = autograd::multiply(
        attention(exchange_heads(qkv, c.geometry(), layout), rank_heads(c.geometry(), layout), layout, sinks),
        ones);
    forward_peak = ledger.peak(device::Tier::device) - before;
    if (between) between();
    tape.backward({{result, dout}});
    peak = ledger.peak(device::Tier::device) - before;
    out = result.value(), dqkv = qkv.grad();
    if (c.sinks) dsinks = sinks.grad();
  }
};

/// The largest difference, relative to the largest value.
inline double worst_difference(test::Cpu& cpu, const Tensor& got, const Tensor& want) {
  const std::vector<double> a = cpu.values(got), b = cpu.values(want);
  if (a.size() != b.size()) return INFINITY;
  double difference = 0, magnitude = 1e-300;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!std::isfinite(a[i])) return INFINITY;
    difference = std::max(difference, std::abs(a[i] - b[i])), magnitude = std::max(magnitude, std::abs(b[i]));
  }
  return difference / magnitude;
}

/// Every rank's result and gradient are those of one rank that attends to whole sequences with all heads, in
/// double, of the same rounded values.
inline void expect_one_ranks(const AttentionCase& c, const AttentionGrid& grid, ContextMethod method,
                             DType dtype) {
  const double tolerance = dtype == DType::f64 ? 1e-12 : dtype == DType::f32 ? 1e-5 : 2e-2;
  on_grid(grid, method, [&](test::Cpu& cpu, const Layout& layout) {
    SCOPED_TRACE(cat(c.str(), " on ", grid.tensor, " x ", grid.context,
                     method == ContextMethod::ring ? " ring" : " Ulysses", " ranks"));
    const RankPass pass(cpu, layout, c, dtype);
    autograd::Tape tape(*cpu.kernels);
    const Var qkv = tape.variable(cpu.convert(whole_qkv(cpu, c, dtype), DType::f64));
    const Var sinks = c.sinks ? tape.variable(cpu.convert(whole_sinks(cpu, c, dtype), DType::f64)) : Var();
    const Var out = autograd::attention(qkv, c.geometry(), sinks);
    tape.backward({{out, cpu.convert(cpu.normal(c.out(), 2, dtype), DType::f64)}});
    EXPECT_LE(worst_difference(cpu, pass.out, part_of_rank(cpu, layout, out.value())), tolerance);
    EXPECT_LE(worst_difference(cpu, pass.dqkv, part_of_rank(cpu, layout, qkv.grad())), tolerance);
    if (!c.sinks) return;
    const Tensor sum = cpu.convert(pass.dsinks, DType::f64);  // of context ranks, each of which found a part
    layout.context->all_reduce(sum, comm::ReduceOp::sum, 1, {}).wait();
    EXPECT_LE(worst_difference(cpu, sum, own_heads(layout, sinks.grad())), 4 * tolerance);
  });
}

}  // namespace sherd::parallel
