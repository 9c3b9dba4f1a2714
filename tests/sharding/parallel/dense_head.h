#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "comm/process_groups.h"
#include "sharding/parallel/loss.h"
#include "support/cpu_fixture.h"

namespace sherd::parallel {

using autograd::Tape;
using autograd::Var;
using tensor::Shape;
using tensor::Tensor;
using test::Cpu;

/// A head on whole sequences, and its loss and gradients in double.
struct Dense {
  std::int64_t batch, seq, hidden, ids;
  std::vector<double> x, weight, bias;
  std::vector<std::int32_t> labels;
  double loss = 0;
  std::vector<double> dx, dweight, dbias;

  /// Values as `dtype` holds them.
  Dense(DType dtype, std::int64_t batch_, std::int64_t seq_, std::int64_t hidden_, std::int64_t ids_)
      : batch(batch_), seq(seq_), hidden(hidden_), ids(ids_) {
    Cpu cpu(1);
    x = cpu.values(cpu.normal({batch, seq, hidden}, 1, dtype));
    weight = cpu.values(cpu.normal({ids, hidden}, 2, dtype, 2 / std::sqrt(static_cast<double>(hidden))));
    bias = cpu.values(cpu.normal({ids}, 3, dtype));
    for (std::int64_t i = 0; i < batch * seq; ++i)
      labels.push_back(static_cast<std::int32_t>(i * 7919 % ids));
  }

  template <class Values, class Row>
  auto& at(Values& values, Row row, std::int64_t k) const {
    return values[static_cast<std::size_t>(static_cast<std::int64_t>(row) * hidden + k)];
  }

  void ignore(const std::function<bool(std::int64_t position)>& which) {
    for (std::int64_t i = 0; i < batch * seq; ++i)
      if (which(i % seq)) labels[static_cast<std::size_t>(i)] = no_label;
  }

  void compute(double dy) {
    dx.assign(x.size(), 0), dweight.assign(weight.size(), 0), dbias.assign(bias.size(), 0);
    double counted = 0;
    for (const std::int32_t label : labels) counted += label != no_label;
    for (std::size_t token = 0; token < labels.size(); ++token) {
      if (labels[token] == no_label) continue;
      std::vector<double> p(static_cast<std::size_t>(ids));
      double sum = 0, at_label = 0;
      for (std::int64_t id = 0; id < ids; ++id) {
        double logit = bias[static_cast<std::size_t>(id)];
        for (std::int64_t k = 0; k < hidden; ++k) logit += at(x, token, k) * at(weight, id, k);
        if (id == labels[token]) at_label = logit;
        sum += p[static_cast<std::size_t>(id)] = std::exp(logit);
      }
      loss += (std::log(sum) - at_label) / counted;
      for (std::int64_t id = 0; id < ids; ++id) {
        const double slope = (p[static_cast<std::size_t>(id)] / sum - (id == labels[token])) * dy / counted;
        dbias[static_cast<std::size_t>(id)] += slope;
        for (std::int64_t k = 0; k < hidden; ++k) {
          at(dx, token, k) += slope * at(weight, id, k);
          at(dweight, id, k) += slope * at(x, token, k);
        }
      }
    }
  }
};

/// Elements are as near as that part of the largest of them.
inline void expect_near_most(const std::vector<double>& got, const std::vector<double>& want, double relative,
                             const char* what) {
  double most = 0;
  for (const double value : want) most = std::max(most, std::abs(value));
  for (std::size_t i = 0; i < want.size(); ++i)
    ASSERT_NEAR(got[i], want[i], relative * most) << what << " of element " << i;
}

struct HeadGrid {
  int tensor = 1, context = 1;
  bool sequence = true;
};

/// One rank's part of a Dense head.
struct Rank {
  Cpu& cpu;
  const Dense& dense;
  Layout layout;
  DType dtype;

  std::int64_t inner_rows() const { return dense.seq / layout.context_size(); }
  std::int64_t stream_rows() const {
    return inner_rows() / (layout.cuts_stream() ? layout.tensor_size() : 1);
  }
  std::int64_t table_rows() const { return (dense.ids + 3) / 4 * 4 / layout.tensor_size(); }
  std::int64_t first_id() const { return table_rows() * layout.tensor_rank(); }

  /// visit(place in the tensor, index of the token) over this rank's part.
  void for_tokens(std::int64_t rows, const tensor::Positions& at,
                  const std::function<void(std::int64_t, std::int64_t)>& visit) const {
    for (std::int64_t b = 0; b < dense.batch; ++b)
      for (std::int64_t i = 0; i < rows; ++i) visit(b * rows + i, b * dense.seq + at.at(i));
  }
  void for_stream(const std::function<void(std::int64_t, std::int64_t)>& visit) const {
    for_tokens(stream_rows(), layout.stream_positions(stream_rows()), visit);
  }

  Tensor of(const Shape& shape, const std::vector<double>& values) const {
    return cpu.convert(Tensor::of<double>(*cpu.device, shape, values), dtype);
  }
  Tensor x() const {
    std::vector<double> values(static_cast<std::size_t>(dense.batch * stream_rows() * dense.hidden));
    for_stream([&](std::int64_t to, std::int64_t from) {
      for (std::int64_t k = 0; k < dense.hidden; ++k) dense.at(values, to, k) = dense.at(dense.x, from, k);
    });
    return of({dense.batch, stream_rows(), dense.hidden}, values);
  }
  /// Padding is large: it must not matter.
  Tensor weight() const {
    std::vector<double> values(static_cast<std::size_t>(table_rows() * dense.hidden), 50);
    for (std::int64_t row = 0; row < table_rows(); ++row)
      for (std::int64_t k = 0; k < dense.hidden; ++k)
        if (first_id() + row < dense.ids)
          dense.at(values, row, k) = dense.at(dense.weight, first_id() + row, k);
    return of({table_rows(), dense.hidden}, values);
  }
  Tensor bias() const {
    std::vector<double> values(static_cast<std::size_t>(table_rows()), 50);
    for (std::int64_t row = 0; row < table_rows(); ++row)
      if (first_id() + row < dense.ids)
        values[static_cast<std::size_t>(row)] = dense.bias[static_cast<std::size_t>(first_id() + row)];
    return of({table_rows()}, values);
  }
  Tensor labels() const {
    std::vector<std::int32_t> values(static_cast<std::size_t>(dense.batch * inner_rows()));
    for_tokens(inner_rows(), layout.inner_positions(inner_rows()), [&](std::int64_t to, std::int64_t from) {
      values[static_cast<std::size_t>(to)] = dense.labels[static_cast<std::size_t>(from)];
    });
    return Tensor::of<std::int32_t>(*cpu.device, {dense.batch, inner_rows()}, values);
  }
  Var loss(const Var& x, const Var& weight, const Var& bias = {}) const {
    return vocab_cross_entropy(x, {weight, bias, dense.ids}, labels(), layout);
  }
};

inline void on_grid(const Dense& dense, DType dtype, const HeadGrid& sizes,
                    const std::function<void(Rank&)>& body) {
  comm::run_local(sizes.tensor * sizes.context, {.timeout_seconds = 30}, [&](comm::Communicator& world) {
    const comm::ProcessGroups groups(
        world, comm::Grid(world.size(), {.tensor = sizes.tensor, .context = sizes.context}));
    Cpu cpu(1);
    Rank rank{cpu, dense, {}, dtype};
    rank.layout.tensor = &groups.group(comm::Axis::tensor);
    rank.layout.context = &groups.group(comm::Axis::context);
    rank.layout.sequence_parallel = sizes.sequence;
    body(rank);
  });
}

}  // namespace sherd::parallel
