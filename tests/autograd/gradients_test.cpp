// Every operation's gradient against central differences in fp64.
#include <gtest/gtest.h>

#include "autograd/ops.h"
#include "support/numeric_gradient.h"

namespace sherd::autograd {
namespace {

using Vars = std::vector<Var>;
using tensor::Attention;

class Gradients : public ::testing::Test {
 protected:
  /// Turns any value into a scalar with no symmetric gradient.
  Var squash(const Var& y) { return mean_squared_error(y, cpu_.normal(y.shape(), 99)); }
  Tensor normal(const Shape& shape, std::uint64_t seed, double scale = 1.0) {
    return cpu_.normal(shape, seed, DType::f64, scale);
  }
  void check(std::vector<Tensor> inputs, const std::function<Var(Tape&, const Vars&)>& f) {
    test::expect_gradients(cpu_, std::move(inputs),
                           [&](Tape& tape, const Vars& in) { return squash(f(tape, in)); });
  }

  test::Cpu cpu_;
};

TEST_F(Gradients, Linear) {
  for (const auto kind : {Activation::none, Activation::gelu_tanh, Activation::gelu_erf}) {
    check({normal({2, 3, 5}, 1), normal({7, 5}, 2), normal({7}, 3)},
          [&](Tape&, const Vars& in) { return linear(in[0], in[1], in[2], kind); });
    check({normal({3, 5}, 1), normal({1, 5}, 2)},
          [&](Tape&, const Vars& in) { return linear(in[0], in[1], {}, kind); });
  }
}

TEST_F(Gradients, WhatAdaptersAreMadeOf) {
  const RowSpread to{{{0, 1, 2, 1}, {2, 4, 1, 0}, {3, 0, 1, 1}}, 6, 2};
  check({normal({2, 3, 5}, 1), normal({2, 3, 4}, 2), normal({5, 4}, 3)},
        [&](Tape&, const Vars& in) { return linear_onto(scale(in[0], 1.5), in[1], in[2]); });
  check({normal({4, 3}, 1)}, [&](Tape&, const Vars& in) { return spread(in[0], to, 0.5); });
  check({normal({2, 3, 6}, 1), normal({2, 3, 6}, 2), normal({4, 3}, 3)},
        [&](Tape&, const Vars& in) { return linear_onto(scale(in[0], 1.5), in[1], in[2], to); });
  check({normal({2, 3, 5}, 1), normal({5}, 2)},
        [&](Tape&, const Vars& in) { return scale_columns(in[0], in[1]); });
  // As a layer has them together, from one input.
  check({normal({3, 4}, 1), normal({5, 4}, 2), normal({2, 4}, 3), normal({4, 2}, 4)},
        [&](Tape&, const Vars& in) {
          const RowSpread rows{{{0, 0, 2, 0}, {2, 3, 2, 0}}, 5, 1};
          return linear_onto(linear(in[0], in[1]), linear(in[0], in[2]), in[3], rows);
        });
}

TEST_F(Gradients, SpreadPutsRowsWhereTheyBelong) {
  Tape tape(*cpu_.kernels);
  const Var x = tape.input(Tensor::of<double>(*cpu_.device, {3, 2}, std::vector<double>{1, 2, 3, 4, 5, 6}));
  const Var out = spread(x, {{{0, 1, 2, 1}, {2, 0, 1, 0}}, 3, 2}, -1);
  EXPECT_EQ(cpu_.values(out.value()), (std::vector<double>{5, 6, -1, -1, -1, -1, 1, 2, -1, -1, 3, 4}));
}

TEST_F(Gradients, MatmulInEveryOrientation) {
  for (const bool ta : {false, true})
    for (const bool tb : {false, true})
      check({ta ? normal({5, 3}, 1) : normal({3, 5}, 1), tb ? normal({7, 5}, 2) : normal({5, 7}, 2)},
            [&](Tape&, const Vars& in) { return matmul(in[0], in[1], ta, tb); });
}

TEST_F(Gradients, Elementwise) {
  const Shape shape{3, 2, 11};
  const auto two = [&] { return std::vector{normal(shape, 1), normal(shape, 2)}; };
  const auto one = [&] { return std::vector{normal(shape, 1)}; };
  check(two(), [](Tape&, const Vars& in) { return add(in[0], in[1]); });
  check(two(), [](Tape&, const Vars& in) { return multiply(in[0], in[1]); });
  check(one(), [](Tape&, const Vars& in) { return scale(in[0], -1.75); });
  check(one(), [](Tape&, const Vars& in) { return reshape(in[0], {11, 6}); });
  check(one(), [](Tape&, const Vars& in) { return gelu(in[0]); });
  check(one(), [](Tape&, const Vars& in) { return activation(in[0], Activation::gelu_erf); });
  check(one(), [](Tape&, const Vars& in) { return tanh(in[0]); });
  using tensor::Glu;
  for (const Glu kind : {Glu::swiglu, Glu::geglu_tanh, Glu::geglu_erf, Glu::swiglu_clamped})
    check({normal({3, 2, 10}, 1)}, [=](Tape&, const Vars& in) { return glu(in[0], kind); });
}

TEST_F(Gradients, ReluAwayFromItsKink) {
  Tensor x = normal({37}, 1);
  for (std::int64_t i = 0; i < x.numel(); ++i) x.data<double>()[i] += x.data<double>()[i] < 0 ? -0.1 : 0.1;
  check({x}, [](Tape&, const Vars& in) { return relu(in[0]); });
}

TEST_F(Gradients, ValuesUsedMoreThanOnce) {
  check({normal({4, 4}, 1)}, [](Tape&, const Vars& in) { return add(in[0], in[0]); });
  check({normal({4, 4}, 1)}, [](Tape&, const Vars& in) { return multiply(in[0], in[0]); });
  check({normal({4, 4}, 1)}, [](Tape&, const Vars& in) { return matmul(in[0], in[0], true, false); });
  check({normal({4, 4}, 1), normal({4, 4}, 2)}, [](Tape&, const Vars& in) {
    const Var y = linear(in[0], in[1], {}, Activation::gelu_tanh);
    const Var z = add(linear(y, in[1]), y);  // a residual around a layer that shares its weight
    return add(multiply(z, tanh(z)), add(scale(z, 0.5), y));
  });
}

TEST_F(Gradients, Dropout) {
  const RandomKey key{5, 6};
  check({normal({5, 13}, 1)}, [&](Tape&, const Vars& in) { return dropout(in[0], 0.4f, key); });
  check({normal({5, 13}, 1), normal({5, 13}, 2)},
        [&](Tape&, const Vars& in) { return dropout_add(in[0], in[1], 0.4f, key); });
  check({normal({5, 13}, 1)}, [&](Tape&, const Vars& in) { return dropout_add(in[0], in[0], 0.4f, key); });
  check({normal({5, 13}, 1), normal({5, 13}, 2)},
        [&](Tape&, const Vars& in) { return dropout_add(in[0], in[1], 0.0f, key); });
  const tensor::Slice elements({9, 13}, {{{1, 3}, {5, 8}}, {{0, 13}}});
  check({normal({5, 13}, 1)}, [&](Tape&, const Vars& in) { return dropout(in[0], 0.4f, key, elements); });
  check({normal({5, 13}, 1), normal({5, 13}, 2)},
        [&](Tape&, const Vars& in) { return dropout_add(in[0], in[1], 0.4f, key, elements); });
}

TEST_F(Gradients, Norms) {
  for (const std::int64_t width : {1, 7, 64, 65}) {
    SCOPED_TRACE(width);
    if (width > 1)
      check({normal({2, 3, width}, 1), normal({width}, 2), normal({width}, 3)},
            [](Tape&, const Vars& in) { return layer_norm(in[0], in[1], in[2]); });
    for (const double shift : {0, 1})
      check({normal({2, 3, width}, 1), normal({width}, 2)},
            [=](Tape&, const Vars& in) { return rms_norm(in[0], in[1], 1e-2, shift); });
  }
}

TEST_F(Gradients, NormsOfHeads) {
  for (const auto& [heads, kv_heads] : {std::pair{4, 2}, {3, 3}, {4, 1}}) {
    Attention geometry;
    geometry.heads = heads, geometry.kv_heads = kv_heads;
    const std::int64_t width = (heads + 2 * kv_heads) * 6;
    check({normal({2, 3, width}, 1), normal({6}, 2), normal({6}, 3)},
          [&, heads = heads](Tape&, const Vars& in) {
            return head_norm(in[0], in[1], in[2], geometry, 1e-2, heads == 3);
          });
  }
}

TEST_F(Gradients, NormsOfAllHeadsTogether) {
  Attention geometry;
  geometry.heads = 4, geometry.kv_heads = 2;
  check({normal({2, 3, 8 * 6}, 1), normal({24}, 2), normal({12}, 3)},
        [&](Tape&, const Vars& in) { return head_norm(in[0], in[1], in[2], geometry, 1e-2); });
}

TEST_F(Gradients, Embeddings) {
  const Tensor ids =
      Tensor::of<std::int32_t>(*cpu_.device, {2, 4}, std::vector<std::int32_t>{3, 0, 3, 1, 4, 3, 0, 0});
  check({normal({6, 5}, 1)}, [&](Tape&, const Vars& in) { return embedding(ids, in[0]); });
  check({normal({2, 4, 5}, 1), normal({7, 5}, 2)},
        [](Tape&, const Vars& in) { return add_positions(in[0], in[1]); });
  check({normal({2, 5}, 1)}, [&](Tape&, const Vars& in) { return embedding(ids, in[0], {1, 5}); });
  check({normal({2, 4, 5}, 1), normal({9, 5}, 2)}, [](Tape&, const Vars& in) {
    return add_positions(in[0], in[1], {.first = 7, .count = 2, .second = 3});
  });
}

TEST_F(Gradients, RotaryAndAttention) {
  struct Case {
    int heads, kv_heads;
    std::int64_t seq, head_dim;
    bool causal;
    float dropout;
  };
  for (const Case c :
       {Case{1, 1, 1, 2, true, 0}, Case{4, 2, 7, 4, true, 0}, Case{6, 2, 9, 6, true, 0.3f},
        Case{3, 1, 5, 8, false, 0}, Case{2, 2, 6, 2, false, 0.5f}, Case{2, 1, 37, 4, true, 0.1f}}) {
    SCOPED_TRACE(cat(c.heads, " heads, ", c.kv_heads, " kv heads, seq ", c.seq));
    Attention geometry{
        .heads = c.heads, .kv_heads = c.kv_heads, .causal = c.causal, .dropout = c.dropout, .key = {7, 8}};
    const Shape qkv{2, c.seq, (c.heads + 2 * c.kv_heads) * c.head_dim};
    check({normal(qkv, 1)}, [&](Tape&, const Vars& in) { return rotary(in[0], geometry, {.base = 100}); });
    check({normal(qkv, 1)}, [&](Tape&, const Vars& in) { return attention(in[0], geometry); });
    check({normal(qkv, 1)},
          [&](Tape&, const Vars& in) { return attention(rotary(in[0], geometry), geometry); });
  }
  Attention part;
  part.heads = 2, part.positions = {.first = 3, .count = 1, .second = 9};
  check({normal({2, 3, 16}, 1)}, [&](Tape&, const Vars& in) { return rotary(in[0], part, {.base = 100}); });
  for (const tensor::Rotary& angles :
       {tensor::Rotary{.base = 50, .scaling = RotaryScaling::linear, .factor = 3},
        {.base = 50, .scaling = RotaryScaling::llama3, .factor = 3, .original_positions = 20},
        {.base = 50, .scaling = RotaryScaling::yarn, .factor = 3, .beta_fast = 4, .original_positions = 40},
        {.base = 50, .attention_factor = 0.7}})
    check({normal({2, 3, 16}, 1)}, [&](Tape&, const Vars& in) { return rotary(in[0], part, angles); });
  for (const std::int64_t window : {1, 3, 8})
    check({normal({2, 9, 16}, 1)}, [&](Tape&, const Vars& in) {
      return attention(in[0], {.heads = 2, .kv_heads = 1, .window = window, .dropout = 0.2f, .key = {7, 8}});
    });
  Attention scaled;
  scaled.heads = 2, scaled.kv_heads = 1, scaled.scale = 0.3f;
  check({normal({1, 5, 16}, 1)}, [&](Tape&, const Vars& in) { return attention(in[0], scaled); });
  scaled.cap = 0.5f, scaled.dropout = 0.2f, scaled.key = {7, 8};
  check({normal({2, 5, 16}, 1)}, [&](Tape&, const Vars& in) { return attention(in[0], scaled); });
  for (const std::int64_t window : {0, 2}) {
    scaled.window = window;
    check({normal({2, 5, 16}, 1), normal({2}, 2)},
          [&](Tape&, const Vars& in) { return attention(in[0], scaled, in[1]); });
  }
}

TEST_F(Gradients, CrossEntropy) {
  const Tensor targets =
      Tensor::of<std::int32_t>(*cpu_.device, {2, 3}, std::vector<std::int32_t>{0, 4, -100, 2, 10, -100});
  for (const std::int64_t valid : {0, 11})
    test::expect_gradients(cpu_, {normal({2, 3, 13}, 1, 3.0)}, [&](Tape&, const Vars& in) {
      // The product stands between, as the leaf's memory must survive backward.
      return cross_entropy(scale(in[0], 1.5), targets, valid);
    });
  test::expect_gradients(cpu_, {normal({6, 13}, 1)}, [&](Tape&, const Vars& in) {
    return scale(cross_entropy(in[0], targets, 0, -100), 2.5);
  });
}

TEST_F(Gradients, ChainsUnderCheckpoint) {
  check({normal({3, 6}, 1), normal({6, 6}, 2), normal({6}, 3), normal({6}, 4)},
        [&](Tape& tape, const Vars& in) {
          const Var x = gelu(in[0]);
          return add(tape.recompute_later({x, in[1], in[2], in[3]},
                                          [](Tape& t, const Vars& v) {
                                            const Var h = layer_norm(
                                                linear(v[0], v[1], v[2], Activation::gelu_tanh), v[2], v[3]);
                                            return add(dropout(h, 0.3f, t.random.at(3)), v[0]);
                                          }),
                     x);
        });
}

}  // namespace
}  // namespace sherd::autograd
