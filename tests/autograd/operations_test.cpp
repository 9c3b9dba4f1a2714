// Operations on arrays, along axes and of attention over given queries, keys and values: gradients against
// central differences in fp64, values against PyTorch (scripts/references/make_operations_reference.py) and
// plain loops.
#include <gtest/gtest.h>

#include "autograd/ops.h"
#include "support/expect_error.h"
#include "support/numeric_gradient.h"
#include "support/places.h"
#include "support/reference_file.h"

namespace sherd::autograd {
namespace {

using sherd::testing::expect_error;
using Vars = std::vector<Var>;

class Operations : public ::testing::Test {
 protected:
  /// Turns any value into a scalar with no symmetric gradient.
  Var squash(const Var& y) { return mean_squared_error(y, cpu_.normal(y.shape(), 99)); }
  Tensor normal(const Shape& shape, std::uint64_t seed, double scale = 1.0, double mean = 0.0) {
    return cpu_.normal(shape, seed, DType::f64, scale, mean);
  }
  /// The gradients of f: as it is, with its inputs used twice, and inside of a checkpoint.
  void check(const std::vector<Tensor>& inputs, const std::function<Var(Tape&, const Vars&)>& f) {
    test::expect_gradients(cpu_, inputs, [&](Tape& tape, const Vars& in) { return squash(f(tape, in)); });
    test::expect_gradients(cpu_, inputs, [&](Tape& tape, const Vars& in) {
      const Var y = f(tape, in);
      return squash(add(multiply(y, f(tape, in)), y));
    });
    test::expect_gradients(cpu_, inputs, [&](Tape& tape, const Vars& in) {
      return squash(tape.recompute_later(in, [&](Tape& t, const Vars& again) { return f(t, again); }));
    });
    only_one_takes_a_gradient(inputs, f);
  }
  /// The others' being inputs changes no bit of it.
  void only_one_takes_a_gradient(const std::vector<Tensor>& inputs,
                                 const std::function<Var(Tape&, const Vars&)>& f) {
    const auto gradient = [&](std::size_t wanted, bool alone) {
      Tape tape(*cpu_.kernels);
      Vars in;
      for (std::size_t i = 0; i < inputs.size(); ++i)
        in.push_back(i == wanted || !alone ? tape.variable(inputs[i]) : tape.input(inputs[i]));
      tape.backward(squash(f(tape, in)));
      return test::bytes_of(in[wanted].grad());
    };
    for (std::size_t i = 0; inputs.size() > 1 && i < inputs.size(); ++i)
      EXPECT_EQ(gradient(i, true), gradient(i, false)) << "input " << i;
  }

  test::Cpu cpu_;
};

TEST_F(Operations, GradientsOfOperandsThatRepeat) {
  const std::pair<Shape, Shape> shapes[] = {
      {{3, 4}, {3, 4}},          {{3, 4}, {4}}, {{4}, {3, 4}},         {{3, 1}, {1, 4}}, {{2, 1, 4}, {3, 1}},
      {{2, 3, 1, 2}, {3, 4, 1}}, {{1}, {2, 3}}, {{2, 3, 2}, {1, 3, 1}}};
  for (const auto& [a, b] : shapes) {
    SCOPED_TRACE(a.str() + " and " + b.str());
    const std::vector<Tensor> two{normal(a, 1), normal(b, 2, 0.3, 2)};
    check(two, [](Tape&, const Vars& in) { return add(in[0], in[1]); });
    check(two, [](Tape&, const Vars& in) { return subtract(in[0], in[1]); });
    check(two, [](Tape&, const Vars& in) { return multiply(in[0], in[1]); });
    check(two, [](Tape&, const Vars& in) { return divide(in[0], in[1]); });
  }
  check({normal({3, 3}, 1, 0.3, 2)}, [](Tape&, const Vars& in) { return divide(in[0], in[0]); });
  check({normal({3, 3}, 1)}, [](Tape&, const Vars& in) { return subtract(in[0], in[0]); });
}

TEST_F(Operations, GradientsOfFunctions) {
  check({normal({3, 7}, 1)}, [](Tape&, const Vars& in) { return sigmoid(in[0]); });
  check({normal({3, 7}, 1)}, [](Tape&, const Vars& in) { return exp(in[0]); });
  check({normal({3, 7}, 1, 0.3, 2)}, [](Tape&, const Vars& in) { return log(in[0]); });
  for (const auto kind : {Activation::sigmoid, Activation::exp})
    check({normal({2, 3, 5}, 1, 0.5), normal({7, 5}, 2, 0.5), normal({7}, 3, 0.5)},
          [&](Tape&, const Vars& in) { return linear(in[0], in[1], in[2], kind); });
}

TEST_F(Operations, GradientsOfWhatMovesAbout) {
  for (const int axis : {0, 1, 2, -1, -3}) {
    check({normal({3, 4, 5}, 1)}, [&](Tape&, const Vars& in) { return slice(in[0], axis, 1, 3); });
    check({normal({3, 4, 5}, 1)}, [&](Tape&, const Vars& in) {
      return add(slice(in[0], axis, 0, 2), slice(in[0], axis, 1, 3));  // that overlap
    });
  }
  check({normal({2, 3, 2}, 1), normal({2, 1, 2}, 2), normal({2, 4, 2}, 3)},
        [](Tape&, const Vars& in) { return concat(in, 1); });
  check({normal({2, 3}, 1)}, [](Tape&, const Vars& in) { return concat({in[0], in[0]}, -1); });
  check({normal({2, 3, 4}, 1)}, [](Tape&, const Vars& in) { return transpose(in[0], 0, -1); });
  check({normal({2, 3, 4, 2}, 1)}, [](Tape&, const Vars& in) { return permute(in[0], {2, 0, -1, 1}); });
  check({normal({2, 6}, 1)}, [](Tape&, const Vars& in) { return reshape(in[0], {3, 4}); });
}

TEST_F(Operations, GradientsOfFolds) {
  check({normal({3, 4}, 1)}, [](Tape&, const Vars& in) { return sum(in[0]); });
  check({normal({3, 4}, 1)}, [](Tape&, const Vars& in) { return mean(in[0]); });
  for (const int axis : {0, 1, 2, -1})
    for (const bool keep : {false, true}) {
      check({normal({3, 4, 5}, 1)}, [&](Tape&, const Vars& in) { return sum(in[0], axis, keep); });
      check({normal({3, 4, 5}, 1)}, [&](Tape&, const Vars& in) { return mean(in[0], axis, keep); });
      check({normal({3, 4, 5}, 1)}, [&](Tape&, const Vars& in) { return max(in[0], axis, keep); });
    }
  for (const int axis : {0, 1, -1}) {
    check({normal({3, 4, 5}, 1)}, [&](Tape&, const Vars& in) { return softmax(in[0], axis); });
    check({normal({3, 4, 5}, 1)}, [&](Tape&, const Vars& in) { return log_softmax(in[0], axis); });
  }
}

TEST_F(Operations, GradientsOfBinaryCrossEntropy) {
  const Tensor targets = Tensor::of<double>(*cpu_.device, {2, 3}, std::vector<double>{0, 1, 0.25, 1, 0, 0.5});
  const Tensor weights = Tensor::of<double>(*cpu_.device, {2, 3}, std::vector<double>{1, 0, 2, 0.5, 3, 1});
  for (const Tensor& w : {Tensor(), weights})
    check({normal({2, 3}, 1, 2)},
          [&](Tape&, const Vars& in) { return binary_cross_entropy(in[0], targets, w); });
}

TEST_F(Operations, GradientsOfAttention) {
  struct Case {
    std::int64_t queries, keys, heads, kv_heads, width;
    bool causal, hides;
  };
  for (const Case& c : {Case{3, 5, 2, 2, 4, false, false},
                        {3, 5, 4, 2, 3, false, true},
                        {5, 3, 2, 1, 4, true, false},
                        {4, 4, 2, 2, 4, true, true},
                        {4, 4, 4, 2, 4, true, false},
                        {1, 6, 2, 2, 4, false, true}}) {
    SCOPED_TRACE(cat(c.queries, " queries, ", c.keys, " keys"));
    AttentionMask mask{.causal = c.causal};
    std::vector<std::uint8_t> seen(static_cast<std::size_t>(2 * c.keys));
    for (std::size_t i = 0; i < seen.size(); ++i) seen[i] = i % 3 != 1;
    if (c.hides) mask.seen = Tensor::of<std::uint8_t>(*cpu_.device, {2, c.keys}, seen);
    check({normal({2, c.queries, c.heads, 4}, 1), normal({2, c.keys, c.kv_heads, 4}, 2),
           normal({2, c.keys, c.kv_heads, c.width}, 3)},
          [&](Tape&, const Vars& in) { return attention(in[0], in[1], in[2], mask); });
  }
}

TEST_F(Operations, GradientsOfAttentionByDistance) {
  for (const auto& [queries, keys, causal, dropout] : {std::tuple{3, 5, false, 0.f},
                                                       {4, 4, true, 0.f},
                                                       {1, 6, false, 0.f},
                                                       {5, 3, false, 0.4f},
                                                       {4, 4, true, 0.4f}}) {
    SCOPED_TRACE(cat(queries, " queries, ", keys, " keys"));
    check({normal({2, queries, 2, 4}, 1), normal({2, keys, 2, 4}, 2), normal({2, keys, 2, 3}, 3),
           normal({2, queries + keys - 1}, 4)},
          [&](Tape&, const Vars& in) {
            return attention(
                in[0], in[1], in[2],
                {.causal = causal, .scale = 0.7f, .distances = in[3], .dropout = dropout, .key = {3, 5}});
          });
  }
}

/// Term by term, with the mask of dropout that all heads together have.
TEST_F(Operations, AttentionByDistanceIsItsTerms) {
  constexpr std::int64_t queries = 3, keys = 4, heads = 2;
  const RandomKey key{7, 9};
  Tape tape(*cpu_.kernels);
  const Var q = tape.input(normal({1, queries, heads, 4}, 1)), k = tape.input(normal({1, keys, heads, 4}, 2)),
            v = tape.input(normal({1, keys, heads, 4}, 3)),
            line = tape.input(normal({heads, queries + keys - 1}, 4));
  const std::vector<double> a = cpu_.values(q.value()), b = cpu_.values(k.value()),
                            c = cpu_.values(v.value()), d = cpu_.values(line.value());
  for (std::int64_t head = 0; head < heads; ++head) {
    const auto of_head = [&](const Var& x) { return slice(x, 2, head, head + 1); };
    const Var y = attention(of_head(q), of_head(k), of_head(v),
                            {.scale = 0.5f,
                             .distances = slice(line, 0, head, head + 1),
                             .dropout = 0.5f,
                             .key = key,
                             .first_head = head,
                             .all_heads = heads});
    const std::vector<double> got = cpu_.values(y.value());
    for (std::int64_t i = 0; i < queries; ++i) {
      std::vector<double> weights(keys);
      double sum = 0;
      for (std::int64_t j = 0; j < keys; ++j) {
        double score = d[static_cast<std::size_t>(head * (queries + keys - 1) + j - i + queries - 1)];
        for (std::int64_t e = 0; e < 4; ++e)
          score += 0.5 * a[static_cast<std::size_t>((i * heads + head) * 4 + e)] *
                   b[static_cast<std::size_t>((j * heads + head) * 4 + e)];
        sum += weights[static_cast<std::size_t>(j)] = std::exp(score);
      }
      for (std::int64_t e = 0; e < 4; ++e) {
        double want = 0;
        for (std::int64_t j = 0; j < keys; ++j)
          if (uniform_at(key, static_cast<std::uint64_t>((head * queries + i) * keys + j)) >= 0.5f)
            want += 2 * weights[static_cast<std::size_t>(j)] / sum *
                    c[static_cast<std::size_t>((j * heads + head) * 4 + e)];
        EXPECT_NEAR(got[static_cast<std::size_t>(i * 4 + e)], want, 1e-12) << head << ' ' << i << ' ' << e;
      }
    }
  }
}

TEST_F(Operations, AgreeWithPyTorch) {
  const auto file = test::read_reference(SHERD_SOURCE_DIR "/tests/autograd/reference/operations.safetensors");
  const auto tensor = [&](const std::string& name) {
    return Tensor::of<double>(*cpu_.device, file.at(name).shape, file.at(name).values<double>());
  };
  const auto expect = [&](const std::string& name, const std::vector<std::string>& inputs,
                          const std::function<Var(Tape&, const Vars&)>& f) {
    SCOPED_TRACE(name);
    Tape tape(*cpu_.kernels);
    Vars in;
    for (const std::string& each : inputs) in.push_back(tape.variable(tensor(name + "." + each)));
    const Var y = f(tape, in);
    test::expect_close_gradients(cpu_.values(y.value()), file.at(name + ".y").values<double>(), "y", 1e-12);
    tape.backward({{y, tensor(name + ".dy")}});
    for (std::size_t i = 0; i < in.size(); ++i)
      test::expect_close_gradients(cpu_.values(in[i].grad()),
                                   file.at(name + ".d" + inputs[i]).values<double>(), "d" + inputs[i], 1e-12);
  };
  expect("softmax", {"x"}, [](Tape&, const Vars& in) { return softmax(in[0], 1); });
  expect("log_softmax", {"x"}, [](Tape&, const Vars& in) { return log_softmax(in[0], -2); });
  expect("bce", {"x"}, [&](Tape&, const Vars& in) { return binary_cross_entropy(in[0], tensor("bce.t")); });
  expect("weighted_bce", {"x"}, [&](Tape&, const Vars& in) {
    return binary_cross_entropy(in[0], tensor("weighted_bce.t"), tensor("weighted_bce.w"));
  });
  for (const char* name : {"cross", "padded", "causal", "padded_causal", "self"})
    expect(name, {"q", "k", "v"}, [&](Tape& tape, const Vars& in) {
      AttentionMask mask{.causal = std::string(name).ends_with("causal") || std::string(name) == "self"};
      if (const auto lengths = file.find(std::string(name) + ".lengths"); lengths != file.end())
        mask.seen = seen_by_length(tape,
                                   Tensor::of<std::int32_t>(*cpu_.device, lengths->second.shape,
                                                            lengths->second.values<std::int32_t>()),
                                   in[1].shape()[1]);
      return attention(in[0], in[1], in[2], mask);
    });
}

TEST_F(Operations, RunInEveryDtypeNearTheirFp64Values) {
  const auto run = [&](DType dtype) {
    Tape tape(*cpu_.kernels);
    const Var q = tape.variable(cpu_.normal({2, 3, 4, 8}, 1, dtype)),
              k = tape.variable(cpu_.normal({2, 7, 2, 8}, 2, dtype)),
              v = tape.variable(cpu_.normal({2, 7, 2, 8}, 3, dtype)),
              b = tape.variable(cpu_.normal({8}, 4, dtype));
    const Var x = multiply(add(attention(q, k, v), b), sigmoid(b));
    const Var y = divide(subtract(softmax(transpose(x, 1, 2), 1), max(transpose(x, 1, 2), 1, true)), exp(b));
    const Var z = concat({slice(y, -1, 0, 3), mean(y, -1, true), sum(y, 3, true)}, 3);
    EXPECT_EQ(z.dtype(), dtype);
    const Var loss = mean(cast(multiply(z, z), dtype == DType::f64 ? DType::f64 : DType::f32));
    tape.backward(loss, 1000);
    std::vector<double> out = cpu_.values(loss.value());
    for (const Var& each : {q, k, v, b}) {
      EXPECT_EQ(each.grad().dtype(), dtype);
      const std::vector<double> grad = cpu_.values(each.grad());
      out.insert(out.end(), grad.begin(), grad.end());
    }
    return out;
  };
  const std::vector<double> want = run(DType::f64);
  test::expect_close_gradients(run(DType::f32), want, "fp32", 1e-5);
  test::expect_close_gradients(run(DType::f16), want, "fp16", 0.02);
  test::expect_close_gradients(run(DType::bf16), want, "bf16", 0.12);
}

TEST_F(Operations, FoldsToShapesThatPyTorchHas) {
  Tape tape(*cpu_.kernels);
  const Var x = tape.input(normal({2, 3, 4}, 1));
  EXPECT_EQ(sum(x).shape(), (Shape{1}));
  EXPECT_EQ(sum(x, 1).shape(), (Shape{2, 4}));
  EXPECT_EQ(mean(x, -1, true).shape(), (Shape{2, 3, 1}));
  EXPECT_EQ(max(tape.input(normal({5}, 1)), 0).shape(), (Shape{1}));
  EXPECT_EQ(permute(x, {2, 0, 1}).shape(), (Shape{4, 2, 3}));
  EXPECT_EQ(concat({x, slice(x, 1, 1, 1)}, 1).shape(), x.shape()) << "nothing goes behind";
  const Var none = slice(x, 0, 0, 0);
  EXPECT_EQ(cpu_.values(sum(none, 0).value()), std::vector<double>(12, 0.0));
  EXPECT_EQ(add(none, slice(x, 0, 0, 1)).shape(), (Shape{0, 3, 4}));
  EXPECT_EQ(attention(tape.input(normal({2, 0, 1, 4}, 1)), tape.input(normal({2, 3, 1, 4}, 1)),
                      tape.input(normal({2, 3, 1, 4}, 1)))
                .shape(),
            (Shape{2, 0, 1, 4}));
}

TEST_F(Operations, AttentionToNoKeysIsZero) {
  for (const std::int64_t keys : {0, 3}) {
    Tape tape(*cpu_.kernels);
    const Var q = tape.variable(normal({2, 2, 1, 4}, 1)), k = tape.variable(normal({2, keys, 1, 4}, 2)),
              v = tape.variable(normal({2, keys, 1, 4}, 3));
    const Var y = attention(q, k, v, {.seen = seen_by_length(tape, cpu_.ids({2}, 1, 1), keys)});
    EXPECT_EQ(cpu_.values(y.value()), std::vector<double>(16, 0.0));
    tape.backward(sum(y));
    EXPECT_EQ(cpu_.values(q.grad()), std::vector<double>(16, 0.0));
  }
}

TEST_F(Operations, AParametersGradientIsSummedInItsOwnWiderDtype) {
  const auto bias = std::make_shared<Parameter>();
  bias->name = "b", bias->shape = {3};
  bias->value = cpu_.convert(normal({3}, 1), DType::bf16);
  bias->grad = Tensor::zeros(*cpu_.device, {3}, DType::f32);
  Tape tape(*cpu_.kernels);
  const Var x = tape.input(cpu_.normal({300, 3}, 2, DType::bf16));
  const Var y = add(multiply(x, tape.parameter(bias)), tape.parameter(bias));
  const Tensor dy = cpu_.normal({300, 3}, 3, DType::bf16);
  tape.backward({{y, dy}});
  const std::vector<double> a = cpu_.values(x.value()), g = cpu_.values(dy);
  for (std::size_t i = 0; i < 3; ++i) {
    double want = 0;
    for (std::size_t row = 300; row-- > 0;) {
      const double product = g[3 * row + i] * a[3 * row + i];
      want += g[3 * row + i] + static_cast<double>(static_cast<float>(bf16(static_cast<float>(product))));
    }
    EXPECT_NEAR(bias->grad.data<float>()[i], want, 1e-4);
  }
}

TEST_F(Operations, SayWhatDoesNotFit) {
  Tape tape(*cpu_.kernels);
  const Var x = tape.input(normal({2, 3, 4}, 1)), y = tape.input(normal({2, 4}, 1)),
            narrow = tape.input(cpu_.normal({2, 3, 4}, 1, DType::bf16));
  expect_error(ErrorKind::usage, "divide: shapes differ: [2, 3, 4] and [2, 4]", [&] { divide(x, y); });
  expect_error(ErrorKind::usage, "multiply: dtypes differ: bf16 and fp64", [&] { multiply(x, narrow); });
  expect_error(ErrorKind::usage, "slice: [1, 4) is not within axis 1 of [2, 3, 4]",
               [&] { slice(x, 1, 1, 4); });
  expect_error(ErrorKind::usage, "slice: [2, 4] has no axis 2", [&] { slice(y, 2, 0, 1); });
  expect_error(ErrorKind::usage, "concat: fp64 [2, 4] does not go behind fp64 [2, 3, 4]", [&] {
    concat({x, y}, 0);
  });
  expect_error(ErrorKind::usage, "concat: bf16 [2, 3, 4] does not go behind fp64", [&] {
    concat({x, narrow}, 0);
  });
  expect_error(ErrorKind::usage, "permute: the axes of [2, 3, 4] must each", [&] { permute(x, {0, 1, 1}); });
  expect_error(ErrorKind::usage, "transpose: [2, 4] has no axes 0 and 2", [&] { transpose(y, 0, 2); });
  expect_error(ErrorKind::usage, "sum: [2, 4] has no axis -3", [&] { sum(y, -3); });
  expect_error(ErrorKind::usage, "max: there are no elements along axis 0 of [0, 4]",
               [&] { max(slice(y, 0, 0, 0), 0); });
  expect_error(ErrorKind::usage, "mean: there are no elements in [0, 4]", [&] { mean(slice(y, 0, 0, 0)); });
  expect_error(ErrorKind::usage, "log_softmax: [2, 4] has no axis 2", [&] { log_softmax(y, 2); });
  expect_error(ErrorKind::usage, "binary_cross_entropy: logits [2, 4] and targets [2, 3, 4] differ",
               [&] { binary_cross_entropy(y, x.value()); });
  const auto heads = [&](const Shape& shape) { return tape.input(normal(shape, 1)); };
  expect_error(ErrorKind::usage, "attention: q [2, 3, 2, 4], k [2, 5, 2, 3] and v", [&] {
    attention(heads({2, 3, 2, 4}), heads({2, 5, 2, 3}), heads({2, 5, 2, 4}));
  });
  expect_error(ErrorKind::usage, "attention: 3 heads cannot share 2 key-value heads", [&] {
    attention(heads({2, 3, 3, 4}), heads({2, 5, 2, 4}), heads({2, 5, 2, 4}));
  });
  expect_error(ErrorKind::usage, "attention: the mask must be uint8 [2, 5]", [&] {
    attention(heads({2, 3, 2, 4}), heads({2, 5, 2, 4}), heads({2, 5, 2, 4}),
              {.seen = cpu_.ids({2, 5}, 1, 2)});
  });
  expect_error(ErrorKind::data, "seen_by_length: length 7 of row 0 is not one of up to 5 keys", [&] {
    seen_by_length(tape, Tensor::of<std::int32_t>(*cpu_.device, {1}, std::vector<std::int32_t>{7}), 5);
  });
}

}  // namespace
}  // namespace sherd::autograd
