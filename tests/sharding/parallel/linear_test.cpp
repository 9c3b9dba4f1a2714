#include "sharding/parallel/linear.h"

#include <gtest/gtest.h>

#include <atomic>

#include "autograd/ops.h"
#include "nn/layers.h"
#include "sharding/parallel/ranks.h"
#include "support/expect_error.h"

namespace sherd::parallel {
namespace {

using autograd::WeightGradients;
using comm::Communicator;
using tensor::Activation;
using tensor::Shape;
using tensor::Tensor;
using test::Cpu;
using testing::expect_error;

constexpr std::int64_t mlp_batch = 2, mlp_seq = 12, mlp_width = 12, mlp_inner = 24;

struct Shaped {
  bool gated = false, norm = true;
  std::function<Var(const Var&)> between{};  ///< beside the activation
};

/// An MLP as transformers have it, of one rank's layers or of those that ranks share.
class Mlp : public nn::Layer {
 public:
  Mlp(const Layout& layout, const Shaped& shaped) : shaped_(shaped) {
    if (shaped.norm) norm_ = add("norm", on_stream(std::make_shared<nn::LayerNorm>(mlp_width), layout));
    std::vector<std::int64_t> blocks;
    if (shaped.gated) blocks = {mlp_inner, mlp_inner};
    up_ = add("up", std::make_shared<ColumnLinear>(mlp_width, shaped.gated ? 2 * mlp_inner : mlp_inner,
                                                   layout, options(), blocks));
    down_ = add("down", std::make_shared<RowLinear>(mlp_inner, mlp_width, layout));
    mark_block();
  }
  explicit Mlp(const Shaped& shaped) : shaped_(shaped) {
    if (shaped.norm) norm_ = add("norm", std::make_shared<nn::LayerNorm>(mlp_width));
    up_ = add("up",
              std::make_shared<nn::Linear>(mlp_width, shaped.gated ? 2 * mlp_inner : mlp_inner, options()));
    down_ = add("down", std::make_shared<nn::Linear>(mlp_inner, mlp_width));
    mark_block();
  }

 protected:
  Var forward(Tape& tape, const Var& x) override {
    Var h = (*up_)(tape, norm_ ? (*norm_)(tape, x) : x);
    if (shaped_.gated) h = autograd::glu(h);
    if (shaped_.between) h = shaped_.between(h);
    return (*down_)(tape, h);
  }

 private:
  nn::LinearOptions options() const {
    return {.activation = shaped_.gated ? Activation::none : Activation::gelu_tanh};
  }
  Shaped shaped_;
  std::shared_ptr<nn::Layer> norm_, up_, down_;
};

/// How a run differs from a plain one.
struct How {
  DType dtype = DType::f64;
  Recompute recompute = Recompute::none;
  WeightGradients weights = WeightGradients::now;
  std::string frozen{};
};

class QuietScope : public autograd::Scope {
 public:
  void pre_forward(Tape&) override {}
  void post_forward(Tape&) override {}
  void pre_backward(Tape&) override {}
  void post_backward(Tape&) override {}
  void pre_weight_gradients(Tape&) override {}
  void gradients_complete(Tape&) override {}
};

/// Forward and backward of `model` on this rank's part of the same input and gradient.
void run_model(Cpu& cpu, nn::Layer& model, const Layout& layout, const How& how, Found& found) {
  const test::PlainParameters held(*cpu.kernels, model, how.dtype, 7);
  for (const auto& p : held.all()) p->trainable = p->name != how.frozen;
  model.set_scope(std::make_shared<QuietScope>());
  found.add_parameters(cpu, "", held, layout);
  Tape tape(*cpu.kernels);
  tape.recompute = how.recompute;
  const Var x =
      tape.variable(stream_part(cpu, cpu.normal({mlp_batch, mlp_seq, mlp_width}, 1, how.dtype), layout));
  const Var y = model(tape, x);
  found.add_stream(cpu, "y", y.value(), layout);
  const Tensor dy = stream_part(cpu, cpu.normal({mlp_batch, mlp_seq, mlp_width}, 2, how.dtype), layout);
  tape.begin_backward({{y, dy}}, how.weights);
  while (tape.continue_backward()) {
  }
  while (tape.continue_weight_gradients()) {
  }
  found.add_stream(cpu, "dx", x.grad(), layout);
  found.add_parameters(cpu, "gradient ", held, layout);
}

void run_serial(const Shaped& shaped, const How& how, Found& found) {
  Cpu cpu(1);
  Mlp model(shaped);
  run_model(cpu, model, {}, how, found);
}

void run_parallel(int ranks, bool sequence, const Shaped& shaped, const How& how, Found& found) {
  on_ranks(ranks, [&](Cpu& cpu, Communicator& group) {
    const Layout layout{.tensor = &group, .sequence_parallel = sequence};
    Mlp model(layout, shaped);
    run_model(cpu, model, layout, how, found);
  });
}

TEST(ParallelLinear, AnMlpIsThatOfOneRank) {
  for (const bool gated : {false, true}) {
    Found want;
    run_serial({gated}, {}, want);
    EXPECT_EQ(want.all().size(), 6u + 6u + 2u);
    for (const int ranks : {1, 2, 3, 4})
      for (const bool sequence : {false, true}) {
        Found got;
        run_parallel(ranks, sequence, {gated}, {}, got);
        expect_found(got, want.all(), 1e-12, cat(ranks, sequence ? " sequence-parallel" : "", " ranks"));
      }
  }
}

/// The MLP without its norm in plain loops, from the parameters of `held`.
std::map<std::string, std::vector<double>> mlp_by_hand(Cpu& cpu,
                                                       const std::map<std::string, std::vector<double>>& p) {
  using Vector = std::vector<double>;
  const Vector x = cpu.values(cpu.normal({mlp_batch, mlp_seq, mlp_width}, 1)),
               dy = cpu.values(cpu.normal({mlp_batch, mlp_seq, mlp_width}, 2));
  const Vector &w1 = p.at("up.weight"), &b1 = p.at("up.bias"), &w2 = p.at("down.weight"),
               &b2 = p.at("down.bias");
  Vector y(x.size()), dx(x.size()), dw1(w1.size()), db1(b1.size()), dw2(w2.size()), db2(b2.size());
  for (std::int64_t row = 0; row < mlp_batch * mlp_seq; ++row) {
    const std::int64_t at = row * mlp_width;
    for (std::int64_t o = 0; o < mlp_width; ++o) y[at + o] = b2[o], db2[o] += dy[at + o];
    for (std::int64_t f = 0; f < mlp_inner; ++f) {
      double s = b1[f], dh = 0;
      for (std::int64_t i = 0; i < mlp_width; ++i) s += w1[f * mlp_width + i] * x[at + i];
      const double c = std::sqrt(2 / std::acos(-1.0)), t = std::tanh(c * (s + 0.044715 * s * s * s));
      const double h = 0.5 * s * (1 + t);
      for (std::int64_t o = 0; o < mlp_width; ++o) {
        y[at + o] += w2[o * mlp_inner + f] * h;
        dw2[o * mlp_inner + f] += dy[at + o] * h;
        dh += dy[at + o] * w2[o * mlp_inner + f];
      }
      const double ds = dh * (0.5 * (1 + t) + 0.5 * s * (1 - t * t) * c * (1 + 3 * 0.044715 * s * s));
      db1[f] += ds;
      for (std::int64_t i = 0; i < mlp_width; ++i) {
        dw1[f * mlp_width + i] += ds * x[at + i];
        dx[at + i] += ds * w1[f * mlp_width + i];
      }
    }
  }
  return {{"y", y},
          {"dx", dx},
          {"up.weight", w1},
          {"up.bias", b1},
          {"down.weight", w2},
          {"down.bias", b2},
          {"gradient up.weight", dw1},
          {"gradient up.bias", db1},
          {"gradient down.weight", dw2},
          {"gradient down.bias", db2}};
}

TEST(ParallelLinear, AnMlpIsThatOfPlainLoops) {
  Cpu cpu(1);
  for (const int ranks : {1, 2, 4})
    for (const bool sequence : {false, true}) {
      Found got;
      run_parallel(ranks, sequence, {.norm = false}, {}, got);
      expect_found(got, mlp_by_hand(cpu, got.all()), 1e-12, cat(ranks, " ranks"));
    }
}

TEST(ParallelLinear, RecomputeAndDeferredWeightGradientsChangeNoBit) {
  for (const bool gated : {false, true})
    for (const bool sequence : {false, true}) {
      Found want;
      run_parallel(3, sequence, {gated}, {}, want);
      for (const How& how : {How{.recompute = Recompute::selective}, How{.recompute = Recompute::full},
                             How{.weights = WeightGradients::later}}) {
        Found got;
        run_parallel(3, sequence, {gated}, how, got);
        expect_found(got, want.all(), 0, cat("recompute ", static_cast<int>(how.recompute)));
      }
    }
}

TEST(ParallelLinear, NarrowTypesAgreeToRounding) {
  Found want;
  run_serial({}, {}, want);
  const auto expect_near = [&](DType dtype, double tolerance) {
    for (const bool sequence : {false, true}) {
      Found got;
      run_parallel(4, sequence, {}, {.dtype = dtype}, got);
      expect_found(got, want.all(), tolerance, std::string(name_of(dtype)));
    }
  };
  expect_near(DType::f32, 2e-6);
  expect_near(DType::f16, 4e-3);
  expect_near(DType::bf16, 3e-2);
}

TEST(ParallelLinear, OneRankIsTheSerialLayerToTheBit) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    Found want, of_none, of_one;
    run_serial({}, {.dtype = dtype}, want);
    Cpu cpu(1);
    Mlp alone(Layout{}, {});
    run_model(cpu, alone, {}, {.dtype = dtype}, of_none);
    run_parallel(1, true, {}, {.dtype = dtype}, of_one);
    expect_found(of_none, want.all(), 0, "no group");
    expect_found(of_one, want.all(), 0, "a group of one rank");
  }
}

/// Payload of one forward and backward of column and row, in units of what one rank sends of one tensor of
/// the stream's size in an all-gather or a reduce-scatter.
comm::Traffic traffic_of(int ranks, bool sequence, const How& how) {
  Found found;
  comm::Traffic seen;
  on_ranks(ranks, [&](Cpu& cpu, Communicator& group) {
    const Layout layout{.tensor = &group, .sequence_parallel = sequence};
    Mlp model(layout, {});
    group.reset_traffic();
    run_model(cpu, model, layout, how, found);
    if (group.rank() == 0) seen = group.traffic();
  });
  const std::uint64_t unit = mlp_batch * mlp_seq * mlp_width * size_of(how.dtype) * (ranks - 1) / ranks;
  EXPECT_EQ(seen.payload(), seen.all_reduce + seen.all_gather + seen.reduce_scatter);
  for (std::uint64_t* bytes : {&seen.all_reduce, &seen.all_gather, &seen.reduce_scatter}) {
    EXPECT_EQ(*bytes % unit, 0u);
    *bytes /= unit;
  }
  return seen;
}

TEST(ParallelLinear, BytesAreThoseOfTheFormulas) {
  const auto expect = [](const comm::Traffic& seen, std::uint64_t sums, std::uint64_t gathers,
                         std::uint64_t scatters) {
    EXPECT_EQ(seen.all_reduce, 2 * sums);  // each as much as a reduce-scatter and an all-gather
    EXPECT_EQ(seen.all_gather, gathers);
    EXPECT_EQ(seen.reduce_scatter, scatters);
  };
  for (const int ranks : {2, 4})
    for (const DType dtype : {DType::f32, DType::bf16}) {
      expect(traffic_of(ranks, false, {.dtype = dtype}), 2, 0, 0);
      expect(traffic_of(ranks, true, {.dtype = dtype}), 0, 1 + 2, 1 + 1);
    }
  expect(traffic_of(2, true, {.frozen = "up.weight"}), 0, 1 + 1, 1 + 1);  // nothing needs the input again
  expect(traffic_of(2, false, {.recompute = Recompute::full}), 3, 0, 0);
  expect(traffic_of(2, true, {.recompute = Recompute::full}), 0, 2 + 2, 2 + 1);
}

/// Under sequence parallelism backward keeps no whole input of the column-parallel layer.
TEST(ParallelLinear, KeepsItsPartOfTheInputAlone) {
  const auto kept_bytes = [](bool sequence) {
    std::atomic<std::uint64_t> kept = 0;
    on_ranks(4, [&](Cpu& cpu, Communicator& group) {
      const Layout layout{.tensor = &group, .sequence_parallel = sequence};
      ColumnLinear layer(mlp_width, mlp_inner, layout, {.bias = false});
      const test::PlainParameters held(*cpu.kernels, layer, DType::f64);
      const auto used = [&] {
        return cpu.device->ledger().current(device::Tier::device, device::Category::activations);
      };
      const auto before = used();
      Tape tape(*cpu.kernels);
      layer(tape, tape.variable(stream_part(cpu, cpu.normal({mlp_batch, mlp_seq, mlp_width}, 1), layout)));
      if (group.rank() == 0) kept = used() - before;
    });
    return kept.load();
  };
  constexpr std::uint64_t stream = mlp_batch * mlp_seq * mlp_width * 8;
  EXPECT_EQ(kept_bytes(false), stream);
  EXPECT_EQ(kept_bytes(true), stream / 4);
}

TEST(ParallelLinear, ParametersAreSlicesOfTheSerialOnes) {
  on_ranks(2, [](Cpu&, Communicator& group) {
    const std::int64_t r = group.rank();
    const Layout layout{.tensor = &group};
    ColumnLinear gated(4, 12, layout, {}, {8, 4});
    EXPECT_EQ(gated.weight()->shape, (Shape{6, 4}));
    EXPECT_EQ(gated.weight()->slice,
              tensor::Slice({12, 4}, {{{4 * r, 4 * r + 4}, {8 + 2 * r, 10 + 2 * r}}, {{0, 4}}}));
    EXPECT_EQ(gated.bias()->slice, tensor::Slice({12}, {{{4 * r, 4 * r + 4}, {8 + 2 * r, 10 + 2 * r}}}));
    EXPECT_FALSE(gated.bias()->decay);
    EXPECT_FALSE(gated.bias()->partial_gradient);
    RowLinear row(4, 12, layout), whole_rows(4, 12, {.tensor = &group, .sequence_parallel = false});
    EXPECT_EQ(row.weight()->slice, tensor::Slice({12, 4}, {{{0, 12}}, {{2 * r, 2 * r + 2}}}));
    EXPECT_EQ(row.weight()->init.b, 0.5);  // 1/√4, whatever the ranks
    EXPECT_FALSE(row.bias()->slice.has_value());
    EXPECT_TRUE(row.bias()->partial_gradient);
    EXPECT_FALSE(whole_rows.bias()->partial_gradient);
  });
}

TEST(ParallelLinear, ATiedWeightIsOfTheSameSlice) {
  on_ranks(2, [](Cpu&, Communicator& group) {
    const Layout layout{.tensor = &group};
    const ColumnLinear first(4, 8, layout), other(4, 4, layout), blocked(4, 8, layout, {}, {4, 4});
    EXPECT_EQ(ColumnLinear(4, 8, layout, {.tied = first.weight()}).weight(), first.weight());
    for (const auto& wrong : {other.weight(), blocked.weight()})
      expect_error(ErrorKind::usage, "cannot serve", [&] { ColumnLinear(4, 8, layout, {.tied = wrong}); });
  });
}

TEST(ParallelLinear, SizesThatDoNotDivideAreNamed) {
  on_ranks(4, [](Cpu& cpu, Communicator& group) {
    const Layout layout{.tensor = &group};
    expect_error(ErrorKind::config,
                 "a column-parallel linear layer from 8 to 6 features cannot be cut over 4 tensor-parallel "
                 "ranks: 6 is no multiple of 4; take parallel.tensor of 1, 2, 3, 6, or sizes that 4 divides",
                 [&] { ColumnLinear(8, 6, layout); });
    expect_error(ErrorKind::config, "6 + 6 are not all multiples of 4", [&] {
      ColumnLinear(8, 12, layout, {}, {6, 6});
    });
    expect_error(ErrorKind::usage, "do not add up to 12", [&] { ColumnLinear(8, 12, layout, {}, {4, 4}); });
    expect_error(ErrorKind::config, "a row-parallel linear layer from 6 to 8 features",
                 [&] { RowLinear(6, 8, layout); });
    expect_error(ErrorKind::usage, "takes neither an activation",
                 [&] { RowLinear(8, 8, layout, {.activation = Activation::gelu_erf}); });
    RowLinear row(8, 8, layout);
    const test::PlainParameters held(*cpu.kernels, row, DType::f32);
    Tape tape(*cpu.kernels);
    expect_error(ErrorKind::usage, "row-parallel linear output: dimension 1 of a tensor of shape [1, 6, 8]",
                 [&] {
                   row(tape, tape.variable(cpu.normal({1, 6, 2}, 1, DType::f32)));
                 });
    expect_error(ErrorKind::usage, "does not take inputs of shape [1, 4, 8]", [&] {
      row(tape, tape.variable(cpu.normal({1, 4, 8}, 1, DType::f32)));
    });
  });
}

/// Rows that are samples, which every rank has: taken for parts of sequences, they would count once per rank
/// in the gradients of what is cut.
TEST(ParallelLinear, RowsWithoutSequencesAreRefusedWhereTheseAreCut) {
  on_ranks(2, [](Cpu& cpu, Communicator& group) {
    for (const bool sequence : {true, false}) {
      const Layout layout{.tensor = &group, .sequence_parallel = sequence};
      ColumnLinear up(4, 8, layout);
      RowLinear down(8, 4, layout);
      const test::PlainParameters of_up(*cpu.kernels, up, DType::f32),
          of_down(*cpu.kernels, down, DType::f32);
      Tape tape(*cpu.kernels);
      const auto run_up = [&] { return up(tape, tape.variable(cpu.normal({6, 4}, 1, DType::f32))); };
      const auto run_down = [&] { return down(tape, tape.variable(cpu.normal({6, 4}, 1, DType::f32))); };
      if (!sequence) {
        EXPECT_EQ(run_up().shape(), (Shape{6, 4}));
        EXPECT_EQ(run_down().shape(), (Shape{6, 4}));
        continue;
      }
      expect_error(ErrorKind::usage, "column-parallel linear: sequence parallelism cuts the rows of", run_up);
      expect_error(ErrorKind::usage, "set parallel.sequence_parallel to false", run_down);
    }
  });
}

/// One rank fails between the two layers, on the way forward or back: the others get one error each, in time.
TEST(ParallelLinear, ADeadRankIsAnErrorOnTheOthers) {
  for (const bool backward : {false, true})
    for (const bool sequence : {false, true}) {
      std::atomic<int> told = 0;
      expect_error(ErrorKind::numerics, "rank 1 has had enough", [&] {
        on_ranks(3, [&](Cpu& cpu, Communicator& group) {
          const auto fails = [&](const Var& x) {
            if (group.rank() != 1) return x;
            if (!backward) fail(ErrorKind::numerics, "rank 1 has had enough");
            return x.tape().record(x.value(), {x}, [](Tape&, const Tensor&) {
              fail(ErrorKind::numerics, "rank 1 has had enough");
            });
          };
          const Layout layout{.tensor = &group, .sequence_parallel = sequence};
          Mlp model(layout, {.between = fails});
          Found found;
          if (group.rank() == 1) return run_model(cpu, model, layout, {}, found);
          expect_error(ErrorKind::comm, "rank 1 has had enough",
                       [&] { run_model(cpu, model, layout, {}, found); });
          ++told;
        });
      });
      EXPECT_EQ(told, 2);
    }
}

}  // namespace
}  // namespace sherd::parallel
