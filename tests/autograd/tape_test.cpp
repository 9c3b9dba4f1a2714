// The tape's promises beside derivatives: where gradients go, what is kept, what is made again.
#include <gtest/gtest.h>

#include "autograd/key_cache.h"
#include "autograd/ops.h"
#include "support/cpu_fixture.h"
#include "support/expect_error.h"
#include "support/numeric_gradient.h"
#include "tensor/formats/stored_format.h"

namespace sherd::autograd {
namespace {

using sherd::testing::expect_error;
using test::bytes_of;
using Vars = std::vector<Var>;

class TapeTest : public ::testing::Test {
 protected:
  ParameterPtr parameter(const Shape& shape, std::uint64_t seed, DType dtype, DType grad_dtype) {
    auto p = std::make_shared<Parameter>();
    p->name = cat("p", seed);
    p->shape = shape;
    p->value = cpu_.normal(shape, seed, dtype);
    p->grad = Tensor::empty(*cpu_.device, shape, grad_dtype);
    cpu_.kernels->fill(p->grad, 1e30);  // whoever adds to what was never written will show
    return p;
  }
  /// Puts the values of `plain` into `stored` as blocks in NF4, and what these stand for into `plain`.
  void put_into_blocks(Parameter& stored, Parameter& plain) {
    stored.stored_as = StoredFormat::nf4;
    Tensor& blocks = stored.in_blocks.blocks;
    blocks = Tensor::empty(*cpu_.device, {tensor::stored_bytes(stored.stored_as, stored.numel())}, DType::u8);
    const std::span values(plain.value.data<float>(), static_cast<std::size_t>(plain.numel()));
    ASSERT_TRUE(tensor::quantize(stored.stored_as, values, blocks.raw(), cpu_.device->arena()));
    tensor::dequantize(stored.stored_as, blocks.raw(), 0, values);
    stored.value = {};
  }
  std::uint64_t activation_bytes() {
    return cpu_.device->ledger().current(device::Tier::device, device::Category::activations);
  }
  Var loss_of(const Var& y) { return mean_squared_error(y, cpu_.normal(y.shape(), 99, y.dtype())); }

  test::Cpu cpu_;
};

/// One layer of every kind that has parameters.
struct Net {
  ParameterPtr table, positions, gain, offset, w1, b1, rms, w2;

  Var operator()(Tape& tape, const Tensor& ids) const {
    Var x = add_positions(embedding(ids, tape.parameter(table)), tape.parameter(positions));
    x = layer_norm(x, tape.parameter(gain), tape.parameter(offset));
    x = linear(x, tape.parameter(w1), tape.parameter(b1), Activation::gelu_tanh);
    return linear(rms_norm(x, tape.parameter(rms)), tape.parameter(w2));
  }
  std::vector<ParameterPtr> all() const { return {table, positions, gain, offset, w1, b1, rms, w2}; }
};

class NetTest : public TapeTest {
 protected:
  Net net(DType dtype, DType grad_dtype) {
    return {parameter({11, 6}, 1, dtype, grad_dtype), parameter({5, 6}, 2, dtype, grad_dtype),
            parameter({6}, 3, dtype, grad_dtype),     parameter({6}, 4, dtype, grad_dtype),
            parameter({8, 6}, 5, dtype, grad_dtype),  parameter({8}, 6, dtype, grad_dtype),
            parameter({8}, 7, dtype, grad_dtype),     parameter({3, 8}, 8, dtype, grad_dtype)};
  }
  void run(const Net& net, int times = 1) {
    for (int i = 0; i < times; ++i) {
      Tape tape(*cpu_.kernels);
      tape.backward(loss_of(net(tape, ids_)));
    }
  }
  Tensor ids_ = cpu_.ids({2, 4}, 1, 11);
};

TEST_F(NetTest, GradientsGoIntoParametersWhateverTheirDtype) {
  const Net exact = net(DType::f64, DType::f64);
  run(exact);
  for (const auto& [value, grad, tolerance] : {std::tuple{DType::f32, DType::f32, 1e-5},
                                               {DType::bf16, DType::bf16, 6e-2},
                                               {DType::bf16, DType::f32, 6e-2},
                                               {DType::f16, DType::f32, 1e-2},
                                               {DType::f16, DType::bf16, 6e-2},
                                               {DType::f32, DType::bf16, 1e-2}}) {
    SCOPED_TRACE(cat(name_of(value), " with gradients in ", name_of(grad)));
    const Net rounded = net(value, grad);
    run(rounded);
    for (std::size_t i = 0; i < exact.all().size(); ++i) {
      EXPECT_TRUE(rounded.all()[i]->grad_written);
      test::expect_close_gradients(cpu_.values(rounded.all()[i]->grad), cpu_.values(exact.all()[i]->grad),
                                   rounded.all()[i]->name, tolerance);
    }
  }
}

TEST_F(NetTest, FurtherMicroBatchesAccumulate) {
  for (const auto& [value, grad] : {std::pair{DType::f32, DType::f32}, {DType::bf16, DType::f32}}) {
    const Net once = net(value, grad), thrice = net(value, grad);
    run(once);
    run(thrice, 3);
    for (std::size_t i = 0; i < once.all().size(); ++i) {
      std::vector<double> want = cpu_.values(once.all()[i]->grad);
      for (double& w : want) w *= 3;
      test::expect_close_gradients(cpu_.values(thrice.all()[i]->grad), want, once.all()[i]->name, 1e-5);
    }
  }
}

TEST_F(NetTest, FrozenParametersCostNothing) {
  const Net all = net(DType::f32, DType::f32), some = net(DType::f32, DType::f32);
  run(all);
  // Freezing one of a pair that a kernel writes together must leave the other's gradient as it was.
  for (const ParameterPtr& p : {some.table, some.gain, some.b1, some.w2}) p->trainable = false, p->grad = {};
  run(some);
  for (const auto& [want, got] : {std::pair{all.positions, some.positions},
                                  {all.offset, some.offset},
                                  {all.w1, some.w1},
                                  {all.rms, some.rms}})
    EXPECT_EQ(bytes_of(want->grad), bytes_of(got->grad)) << got->name;
  EXPECT_FALSE(some.gain->grad_written);
}

TEST_F(NetTest, NothingIsRecordedWhereNoGradientIsWanted) {
  const Net frozen = net(DType::f32, DType::f32);
  for (const ParameterPtr& p : frozen.all()) p->trainable = false;
  Tape tape(*cpu_.kernels);
  const Var loss = loss_of(frozen(tape, ids_));
  EXPECT_EQ(tape.size(), 0u);
  expect_error(ErrorKind::usage, "depends on nothing", [&] { tape.backward(loss); });
}

TEST_F(NetTest, ReleasedParametersAreNamed) {
  const Net released = net(DType::f32, DType::f32);
  Tape tape(*cpu_.kernels);
  const Var loss = loss_of(released(tape, ids_));
  released.w2->value = {};
  expect_error(ErrorKind::usage, "'p8' is not gathered", [&] { tape.backward(loss); });
}

/// Sums for operations to fold into, of every parameter.
std::vector<Tensor> attach_sums(test::Cpu& cpu, const Net& net, DType dtype, DType rounding, bool onto) {
  std::vector<Tensor> sums;
  for (const ParameterPtr& p : net.all()) {
    sums.push_back(cpu.normal(p->shape, 77, dtype));
    p->grad_sum = {sums.back(), rounding, onto, false};
  }
  return sums;
}

TEST_F(NetTest, ProductsAndTablesFoldTheirGradientsIntoTheSum) {
  for (const bool onto : {false, true})
    for (const DType sum : {DType::bf16, DType::f32})
      for (const Recompute recompute : {Recompute::none, Recompute::selective, Recompute::full}) {
        const Net apart = net(DType::bf16, sum), folding = net(DType::bf16, sum);
        run(apart);
        const std::vector<Tensor> sums = attach_sums(cpu_, folding, sum, DType::bf16, onto);
        Tape tape(*cpu_.kernels);
        tape.recompute = recompute;
        const Var y = recompute == Recompute::full
                          ? tape.recompute_later({}, [&](Tape& t, const Vars&) { return folding(t, ids_); })
                          : folding(tape, ids_);
        tape.backward(loss_of(y));
        for (std::size_t i = 0; i < sums.size(); ++i) {
          const ParameterPtr p = folding.all()[i], want = apart.all()[i];
          const bool folds = p == folding.table || p == folding.w1 || p == folding.w2;
          ASSERT_EQ(p->grad_sum.folded, folds) << p->name;
          ASSERT_EQ(p->grad_written, !folds) << p->name;
          const Tensor expected = cpu_.normal(p->shape, 77, sum);
          if (folds) cpu_.kernels->fold(want->grad, DType::bf16, expected, onto);
          EXPECT_EQ(bytes_of(sums[i]), bytes_of(expected)) << p->name;
          if (!folds) {
            EXPECT_EQ(bytes_of(p->grad), bytes_of(want->grad)) << p->name;
          }
        }
      }
}

/// A rank's share of the sum is rounded alone, so that all uses of a parameter have to come first.
TEST_F(NetTest, WhatIsUsedTwiceIsNotFolded) {
  const Net twice = net(DType::bf16, DType::f32), want = net(DType::bf16, DType::f32);
  const auto backward = [&](const Net& each) {
    Tape tape(*cpu_.kernels);
    const Var y = tape.recompute_later({}, [&](Tape& t, const Vars&) {
      const Var table = t.parameter(each.table);
      const Var x = layer_norm(add_positions(embedding(ids_, table), t.parameter(each.positions)),
                               t.parameter(each.gain), t.parameter(each.offset));
      return linear(x, table);
    });
    tape.backward(loss_of(y));
  };
  const std::vector<Tensor> sums = attach_sums(cpu_, twice, DType::f32, DType::bf16, true);
  backward(twice);
  backward(want);
  EXPECT_FALSE(twice.table->grad_sum.folded);
  EXPECT_EQ(bytes_of(twice.table->grad), bytes_of(want.table->grad));
  EXPECT_EQ(bytes_of(sums[0]), bytes_of(cpu_.normal(twice.table->shape, 77, DType::f32)));
}

TEST_F(NetTest, EachPassCountsUsesAnew) {
  const Net some = net(DType::f32, DType::f32);
  Tape tape(*cpu_.kernels);
  for (int i = 0; i < 2; ++i) {
    tape.clear();
    attach_sums(cpu_, some, DType::f32, DType::f32, false);
    {
      Tape::NoGrad pause(tape);  // an evaluation between passes
      some(tape, ids_);
    }
    tape.clear();
    tape.backward(loss_of(some(tape, ids_)));
    EXPECT_TRUE(some.w2->grad_sum.folded);
  }
}

TEST_F(TapeTest, ASecondGradientBehindAFoldedOneIsRefused) {
  const ParameterPtr w = parameter({3, 8}, 1, DType::f32, DType::f32);
  w->grad_sum = {cpu_.normal({3, 8}, 2, DType::f32), DType::f32, true, false};
  Tape tape(*cpu_.kernels);
  const Var weight = tape.parameter(w), x = tape.variable(cpu_.normal({4, 8}, 3, DType::f32));
  const Var y =
      tape.record(x.value(), {x}, [&, dw = weight.grad_ref(), dx = x.grad_ref()](Tape& t, Tensor dy) {
        t.accumulate(dw, cpu_.normal({3, 8}, 4, DType::f32));  // of an input that record() was not told of
        t.accumulate(dx, std::move(dy));
      });
  const Var loss = loss_of(linear(y, weight));
  expect_error(ErrorKind::usage, "a second gradient for parameter 'p1'", [&] { tape.backward(loss); });
}

TEST_F(TapeTest, AGradientBesideOneThatIsWrittenIsWrittenToo) {
  const ParameterPtr w = parameter({3, 8}, 1, DType::f32, DType::f32);
  const Tensor sum = cpu_.normal({3, 8}, 2, DType::f32), more = cpu_.normal({3, 8}, 4, DType::f32);
  const std::vector<double> before = cpu_.values(sum), added = cpu_.values(more);
  const Tensor x = cpu_.normal({4, 8}, 3, DType::f32);
  const auto gradient = [&](bool both) {
    Tape tape(*cpu_.kernels);
    w->grad_sum = {sum, DType::f32, true, false};
    w->grad_written = false;
    const Var weight = tape.parameter(w), y = linear(tape.input(x), weight);
    // The last operation runs backward first.
    tape.backward(loss_of(
        tape.record(y.value(), {y}, [&, dw = weight.grad_ref(), to = y.grad_ref()](Tape& t, Tensor dy) {
          if (both) t.accumulate(dw, more);
          t.accumulate(to, std::move(dy));
        })));
    EXPECT_EQ(w->grad_sum.folded, !both);
    return cpu_.values(both ? w->grad : sum);
  };
  const std::vector<double> written = gradient(true), folded = gradient(false);
  for (std::size_t i = 0; i < written.size(); ++i)
    EXPECT_NEAR(written[i], folded[i] - before[i] + added[i], 1e-5);
}

TEST_F(TapeTest, LogitsBecomeTheirGradientInPlace) {
  const Tensor targets = cpu_.ids({64}, 3, 1000);
  const Tensor x = cpu_.normal({64, 8}, 1, DType::f32);
  const ParameterPtr w = parameter({1000, 8}, 2, DType::f32, DType::f32);
  const std::uint64_t logits_bytes = 64 * 1000 * 4;
  const auto peak_of_backward = [&](bool keep_logits) {
    Tape tape(*cpu_.kernels);
    Var logits = linear(tape.input(x), tape.parameter(w));
    Var kept = keep_logits ? logits : Var();
    const std::vector<std::byte> before = bytes_of(logits.value());
    Var loss = cross_entropy(std::move(logits), targets);
    logits = {};
    cpu_.device->ledger().reset_peaks();
    tape.backward(loss);
    if (keep_logits) {
      EXPECT_EQ(bytes_of(kept.value()), before);
    }
    return cpu_.device->ledger().peak(device::Tier::device, device::Category::activations);
  };
  EXPECT_LT(peak_of_backward(false), logits_bytes * 3 / 2);
  const std::vector<std::byte> consumed = bytes_of(w->grad);
  w->grad_written = false;
  EXPECT_GE(peak_of_backward(true), logits_bytes * 2);
  EXPECT_EQ(bytes_of(w->grad), consumed);
}

TEST_F(TapeTest, SelectiveRecomputeKeepsLessAndChangesNoBit) {
  const ParameterPtr w1 = parameter({96, 96}, 1, DType::bf16, DType::bf16),
                     gain = parameter({96}, 2, DType::bf16, DType::bf16),
                     offset = parameter({96}, 3, DType::bf16, DType::bf16),
                     w2 = parameter({3, 32}, 4, DType::bf16, DType::bf16);
  const Tensor input = cpu_.normal({2, 64, 96}, 5, DType::bf16);
  const auto run = [&](Recompute recompute) {
    Tape tape(*cpu_.kernels);
    tape.recompute = recompute;
    for (const auto& p : {w1, gain, offset, w2}) p->grad_written = false;
    Var x = tape.variable(input);
    const std::uint64_t before = activation_bytes();
    Var y = layer_norm(x, tape.parameter(gain), tape.parameter(offset));
    y = linear(y, tape.parameter(w1), {}, Activation::gelu_tanh);
    tensor::Attention geometry;
    geometry.heads = 2, geometry.kv_heads = 2;
    y = attention(y, geometry);
    y = loss_of(linear(reshape(y, {128, 32}), tape.parameter(w2)));
    const std::uint64_t kept = activation_bytes() - before;
    tape.backward(y);
    std::vector<std::vector<std::byte>> out{bytes_of(y.value()), bytes_of(x.grad())};
    for (const auto& p : {w1, gain, offset, w2}) out.push_back(bytes_of(p->grad));
    return std::pair(kept, out);
  };
  const auto [kept_all, want] = run(Recompute::none);
  const auto [kept_some, got] = run(Recompute::selective);
  EXPECT_EQ(want, got);
  // The norm's, the activation's and the attention's results are gone.
  EXPECT_LE(kept_some + 2 * 64 * (96 + 96 + 32) * 2, kept_all);
}

/// A weight in few bits is there while a product reads it, in both directions, and never beside another.
TEST_F(TapeTest, WeightsInBlocksAreMadeForOneProductAtATime) {
  constexpr std::int64_t width = 128, weight_bytes = width * width * 4;
  std::vector<ParameterPtr> stored, plain;
  for (std::uint64_t i = 0; i < 3; ++i) {
    stored.push_back(parameter({width, width}, i, DType::f32, DType::f32));
    plain.push_back(parameter({width, width}, i, DType::f32, DType::f32));
    stored.back()->trainable = plain.back()->trainable = false;
    put_into_blocks(*stored.back(), *plain.back());
  }
  const auto run = [&](const std::vector<ParameterPtr>& weights, std::vector<std::uint64_t>& held) {
    Tape tape(*cpu_.kernels);
    const Var x = tape.variable(cpu_.normal({1, width}, 9, DType::f32));
    Var y = x;
    for (const ParameterPtr& weight : weights) {
      {
        const Var w = tape.parameter(weight);
        y = linear(y, w);
        held.push_back(activation_bytes());
      }
      held.push_back(activation_bytes());
    }
    tape.backward(loss_of(y));
    return bytes_of(x.grad());
  };
  std::vector<std::uint64_t> without, with;
  const auto want = run(plain, without);
  cpu_.device->ledger().reset_peaks();
  EXPECT_TRUE(run(stored, with) == want) << "to the bit";
  const std::uint64_t peak = cpu_.device->ledger().peak(device::Tier::device, device::Category::activations);
  for (std::size_t i = 0; i < with.size(); ++i) {
    const auto more = static_cast<std::int64_t>(with[i] - without[i]);
    EXPECT_NEAR(static_cast<double>(more), i % 2 == 0 ? weight_bytes : 0, 1024) << i;
  }
  EXPECT_LT(peak, with.front() + weight_bytes / 2) << "in backward, too, one at a time";
}

/// Where a text is continued by one token, a product reads the blocks themselves, and gives the same bits.
TEST_F(TapeTest, TokensAreMultipliedByBlocks) {
  constexpr std::int64_t width = 512;
  const ParameterPtr stored = parameter({width, width}, 1, DType::f32, DType::f32),
                     plain = parameter({width, width}, 1, DType::f32, DType::f32);
  stored->trainable = plain->trainable = false;
  put_into_blocks(*stored, *plain);
  const auto run = [&](const ParameterPtr& weight) {
    Tape tape(*cpu_.kernels);
    KeyCache cache(1, 1);
    tape.key_cache = &cache;
    const std::vector<KeyCache::Rows> rows = {{0, 0, 1}};
    cache.begin(*cpu_.device, rows, 1);
    const Var y = linear(tape.input(cpu_.normal({1, width}, 9, DType::f32)), tape.parameter(weight),
                         tape.input(cpu_.normal({width}, 10, DType::f32)));
    return bytes_of(y.value());
  };
  const auto want = run(plain);
  const auto held = [&](std::uint64_t (device::Ledger::*of)(device::Tier, device::Category) const) {
    std::uint64_t sum = 0;
    for (const auto category : {device::Category::activations, device::Category::workspace})
      sum += (cpu_.device->ledger().*of)(device::Tier::device, category);
    return sum;
  };
  const std::uint64_t before = held(&device::Ledger::current);
  cpu_.device->ledger().reset_peaks();
  EXPECT_TRUE(run(stored) == want) << "to the bit";
  EXPECT_LT(held(&device::Ledger::peak) - before, width * width * 4 / 4) << "never the whole weight";
}

TEST_F(TapeTest, DropoutIsIdentityOutsideTraining) {
  Tape tape(*cpu_.kernels);
  const Var x = tape.variable(cpu_.normal({5, 7}, 1, DType::f32)),
            r = tape.variable(cpu_.normal({5, 7}, 2, DType::f32));
  const Var dropped = dropout(x, 0.5f, {1, 2});
  EXPECT_NE(bytes_of(dropped.value()), bytes_of(x.value()));
  tape.training = false;
  EXPECT_EQ(bytes_of(dropout(x, 0.5f, {1, 2}).value()), bytes_of(x.value()));
  EXPECT_EQ(bytes_of(dropout_add(x, r, 0.5f, {1, 2}).value()), bytes_of(add(x, r).value()));
  expect_error(ErrorKind::usage, "in [0, 1)", [&] { dropout(x, 1.0f, {1, 2}); });
}

/// Rows of two ranges of tokens, as a rank has them, and a part of the columns.
TEST_F(TapeTest, DropoutOfASliceHasTheMaskOfTheWhole) {
  const RandomKey key{1, 2};
  const Shape whole{2, 12, 6};
  const Tensor x = cpu_.normal(whole, 1, DType::f32), r = cpu_.normal(whole, 2, DType::f32);
  const auto part_of = [&](const tensor::Slice& slice, const Tensor& of) {
    const Tensor part = Tensor::empty(*cpu_.device, slice.shape(), DType::f32);
    slice.for_each_run(0, slice.numel(), [&](std::int64_t local, std::int64_t logical, std::int64_t count) {
      cpu_.kernels->copy(of.range(logical, logical + count), part.range(local, local + count));
    });
    return part;
  };
  const auto outcome = [&](const Tensor& in, const Tensor& residual, bool add,
                           const tensor::Slice& elements) {
    Tape tape(*cpu_.kernels);
    const Var a = tape.variable(in), b = tape.variable(residual);
    const Var y = add ? dropout_add(a, b, 0.5f, key, elements) : dropout(a, 0.5f, key, elements);
    tape.backward(mean_squared_error(scale(y, 1000), Tensor::zeros(*cpu_.device, in.shape(), DType::f32)));
    return std::pair(y.value(), a.grad());
  };
  for (const tensor::Slice& slice : {tensor::Slice(whole, {{{0, 2}}, {{1, 4}, {9, 12}}, {{0, 6}}}),
                                     tensor::Slice(whole, {{{1, 2}}, {{0, 12}}, {{1, 3}, {4, 5}}})})
    for (const bool add : {false, true}) {
      const auto [all, all_grad] = outcome(x, r, add, {});
      const auto [part, part_grad] = outcome(part_of(slice, x), part_of(slice, r), add, slice);
      EXPECT_EQ(bytes_of(part), bytes_of(part_of(slice, all)));
      const auto want = cpu_.values(part_of(slice, all_grad)), got = cpu_.values(part_grad);
      const double more = static_cast<double>(x.numel()) / static_cast<double>(part.numel());
      for (std::size_t i = 0; i < got.size(); ++i)
        EXPECT_NEAR(got[i], more * want[i], 1e-5 * std::abs(got[i]));
    }
  Tape tape(*cpu_.kernels);
  expect_error(ErrorKind::usage, "dropout of [2, 12, 6] as elements [0:2, 1:4] of [2, 12]", [&] {
    dropout(tape.input(x), 0.5f, key, tensor::Slice({2, 12}, {{{0, 2}}, {{1, 4}}}));
  });
}

TEST_F(TapeTest, ShapesThatDoNotFitAreNamed) {
  Tape tape(*cpu_.kernels);
  const Var x = tape.input(cpu_.normal({2, 3, 5}, 1, DType::f32)),
            w = tape.input(cpu_.normal({4, 6}, 1, DType::f32));
  expect_error(ErrorKind::usage, "[4, 6]", [&] { linear(x, w); });
  expect_error(ErrorKind::usage, "[2, 3, 5]", [&] { add(x, w); });
  expect_error(ErrorKind::usage, "matmul", [&] { matmul(w, w); });
  expect_error(ErrorKind::usage, "even", [&] { glu(x); });
  expect_error(ErrorKind::usage, "layer_norm", [&] { layer_norm(x, w, w); });
  expect_error(ErrorKind::usage, "int32", [&] { embedding(w.value(), w); });
  expect_error(ErrorKind::usage, "positions", [&] { add_positions(x, w); });
  const Var places = tape.input(cpu_.normal({4, 5}, 1, DType::f32));
  add_positions(x, places, {.first = 1});
  expect_error(ErrorKind::usage, "from position 2 on", [&] { add_positions(x, places, {.first = 2}); });
  tensor::Attention geometry;
  geometry.heads = 3, geometry.kv_heads = 2;
  expect_error(ErrorKind::usage, "evenly", [&] { attention(x, geometry); });
  expect_error(ErrorKind::usage, "5 targets", [&] { cross_entropy(x, cpu_.ids({5}, 1, 3)); });
  expect_error(ErrorKind::usage, cat(x.shape().back() + 1, " valid columns of ", x.shape().back()),
               [&] { cross_entropy(x, cpu_.ids({x.shape().rows()}, 1, 3), x.shape().back() + 1); });
  expect_error(ErrorKind::usage, "undefined", [&] { linear(Var(), w); });
}

TEST_F(TapeTest, IdsAndTargetsBeyondTheVocabularyAreDataErrors) {
  Tape tape(*cpu_.kernels);
  const auto ids = Tensor::of<std::int32_t>(*cpu_.device, {2}, std::vector<std::int32_t>{1, 7});
  const Var table = tape.input(cpu_.normal({7, 4}, 1, DType::f32));
  expect_error(ErrorKind::data, "7", [&] { embedding(ids, table); });
  embedding(ids, table, {1, 0});
  expect_error(ErrorKind::data, "7", [&] { embedding(ids, table, {1, 7}); });
  expect_error(ErrorKind::data, "7", [&] {
    cross_entropy(tape.input(cpu_.normal({2, 9}, 1, DType::f32)), ids, 7);
  });
}

TEST_F(TapeTest, AValueOfAnEarlierPassTakesNoGradientSilently) {
  Tape tape(*cpu_.kernels);
  const Var x = tape.variable(cpu_.normal({3, 4}, 1, DType::f32));
  const Var hidden = tanh(x);
  tape.clear();
  expect_error(ErrorKind::usage, "earlier forward pass", [&] { tanh(hidden); });
  tape.backward(
      loss_of(add(tanh(tape.input(hidden.value())), tanh(x))));  // cut off on purpose, and a leaf, may go on
  EXPECT_TRUE(x.grad().defined());
}

TEST_F(TapeTest, BackwardRefusesALossThatWasPassedBackBefore) {
  Tape tape(*cpu_.kernels);
  const Var loss = loss_of(tanh(tape.variable(cpu_.normal({3, 4}, 1, DType::f32))));
  tape.backward(loss);
  expect_error(ErrorKind::usage, "earlier forward pass", [&] { tape.backward(loss); });
}

TEST_F(TapeTest, BackwardRefusesALossThatWasNotRecorded) {
  Tape tape(*cpu_.kernels);
  const Var x = tape.variable(cpu_.normal({3, 4}, 1, DType::f32));
  Var constant, loss;
  {
    Tape::NoGrad pause(tape);
    constant = tanh(x);
    loss = loss_of(constant);
  }
  expect_error(ErrorKind::usage, "without recording", [&] { tape.backward(loss); });
  tape.backward(loss_of(add(constant, tanh(x))));  // what was not recorded may serve as a constant
  EXPECT_TRUE(x.grad().defined());
}

}  // namespace
}  // namespace sherd::autograd
