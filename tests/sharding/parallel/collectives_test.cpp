#include "sharding/parallel/collectives.h"

#include <gtest/gtest.h>

#include <new>
#include <numeric>

#include "base/dtype.h"
#include "sharding/parallel/exchanges.h"
#include "sharding/parallel/ranks.h"
#include "support/expect_error.h"

namespace sherd::parallel {
namespace {

using tensor::Shape;
using tensor::Tensor;
using test::Cpu;
using testing::expect_error;

/// A tensor of the oracle: values by multi-index.
struct OracleTensor {
  std::vector<std::int64_t> shape;
  std::vector<double> values;

  explicit OracleTensor(std::vector<std::int64_t> s)
      : shape(std::move(s)), values(static_cast<std::size_t>(numel())) {}
  std::int64_t numel() const {
    return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
  }
  double& at(const std::vector<std::int64_t>& index) {
    std::int64_t flat = 0;
    for (std::size_t i = 0; i < shape.size(); ++i) flat = flat * shape[i] + index[i];
    return values[static_cast<std::size_t>(flat)];
  }
  /// Calls visit(index, value) for every element.
  template <class Visit>
  void for_each(const Visit& visit) {
    std::vector<std::int64_t> index(shape.size());
    for (double& value : values) {
      visit(index, value);
      for (std::size_t i = shape.size(); i-- > 0;) {
        if (++index[i] < shape[i]) break;
        index[i] = 0;
      }
    }
  }
};
using AllRanks = std::vector<OracleTensor>;

OracleTensor joined(AllRanks parts, std::size_t dim) {
  const std::int64_t extent = parts[0].shape[dim];
  std::vector<std::int64_t> shape = parts[0].shape;
  shape[dim] *= static_cast<std::int64_t>(parts.size());
  OracleTensor out(shape);
  out.for_each([&](std::vector<std::int64_t> index, double& value) {
    const auto from = static_cast<std::size_t>(index[dim] / extent);
    index[dim] %= extent;
    value = parts[from].at(index);
  });
  return out;
}

OracleTensor part(OracleTensor x, std::size_t dim, std::size_t rank, std::size_t ranks) {
  std::vector<std::int64_t> shape = x.shape;
  shape[dim] /= static_cast<std::int64_t>(ranks);
  OracleTensor out(shape);
  out.for_each([&](std::vector<std::int64_t> index, double& value) {
    index[dim] += static_cast<std::int64_t>(rank) * shape[dim];
    value = x.at(index);
  });
  return out;
}

OracleTensor sum(const AllRanks& all) {
  OracleTensor out(all[0].shape);
  for (const OracleTensor& each : all)
    for (std::size_t i = 0; i < out.values.size(); ++i) out.values[i] += each.values[i];
  return out;
}

/// A collective: as an operation, as arithmetic on what all ranks have, and what it says of them.
struct Collective {
  std::string name;
  std::function<Var(const Var&, Communicator*)> run;
  std::function<AllRanks(const AllRanks&)> define;
  bool same_input = false;  ///< all ranks have the same x
  bool same_after = false;  ///< they compute the same with the result
};

template <class Each>
AllRanks on_each(const AllRanks& all, const Each& each) {
  AllRanks out;
  for (std::size_t r = 0; r < all.size(); ++r) out.push_back(each(r));
  return out;
}

Collective of_sum(bool same) {
  if (same)
    return {"all_reduce", [](const Var& x, Communicator* g) { return all_reduce(x, g); },
            [](const AllRanks& x) { return on_each(x, [&](auto) { return sum(x); }); }, false, true};
  return {"copy_to(all_reduce)", [](const Var& x, Communicator* g) { return copy_to(all_reduce(x, g), g); },
          [](const AllRanks& x) { return on_each(x, [&](auto) { return sum(x); }); }};
}

Collective of_copy() {
  return {"copy_to", [](const Var& x, Communicator* g) { return copy_to(x, g); },
          [](const AllRanks& x) { return x; }, true};
}

std::vector<Collective> along(int dim, int rank = 3) {
  const auto axis = static_cast<std::size_t>(dim < 0 ? dim + rank : dim);
  const auto gathered = [axis](const AllRanks& x) {
    return on_each(x, [&](auto) { return joined(x, axis); });
  };
  return {
      {"all_gather", [dim](const Var& x, Communicator* g) { return all_gather(x, dim, g); }, gathered},
      {"gather", [dim](const Var& x, Communicator* g) { return gather(x, dim, g); }, gathered, false, true},
      {"reduce_scatter", [dim](const Var& x, Communicator* g) { return reduce_scatter(x, dim, g); },
       [axis](const AllRanks& x) {
         return on_each(x, [&](auto r) { return part(sum(x), axis, r, x.size()); });
       }}};
}

Collective exchanging(int split, int join) {
  const auto from = static_cast<std::size_t>(split), to = static_cast<std::size_t>(join);
  return {"all_to_all", [=](const Var& x, Communicator* g) { return all_to_all(x, split, join, g); },
          [=](const AllRanks& x) {
            return on_each(x, [&](auto r) {
              return joined(on_each(x, [&](auto s) { return part(x[s], from, r, x.size()); }), to);
            });
          }};
}

/// The gradient of Σ weights·result by every rank's x, over the results of all ranks, or of one where they
/// are the same: the collective is linear, so unit vectors tell.
AllRanks defined_gradient(const Collective& c, const AllRanks& x, const AllRanks& weights) {
  AllRanks out(x.size(), OracleTensor(x[0].shape));
  for (std::size_t r = 0; r < x.size(); ++r)
    for (std::size_t i = 0; i < x[r].values.size(); ++i) {
      AllRanks unit(x.size(), OracleTensor(x[0].shape));
      for (std::size_t s = 0; s < x.size(); ++s) unit[s].values[i] = c.same_input || s == r ? 1 : 0;
      const AllRanks result = c.define(unit);
      for (std::size_t s = 0; s < (c.same_after ? 1 : x.size()); ++s)
        for (std::size_t k = 0; k < result[s].values.size(); ++k)
          out[r].values[i] += weights[s].values[k] * result[s].values[k];
    }
  return out;
}

OracleTensor random(std::vector<std::int64_t> shape, std::uint64_t seed) {
  OracleTensor out(std::move(shape));
  for (std::size_t i = 0; i < out.values.size(); ++i) out.values[i] = normal_at({seed, 5}, i);
  return out;
}

Tensor tensor_of(Cpu& cpu, const OracleTensor& x) {
  return Tensor::of<double>(*cpu.device, Shape(std::span<const std::int64_t>(x.shape)), x.values);
}

void expect_close(const std::vector<double>& got, const std::vector<double>& want, const std::string& what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  for (std::size_t i = 0; i < got.size(); ++i)
    ASSERT_NEAR(got[i], want[i], 1e-12) << what << ", element " << i;
}

void expect_as_defined(const Collective& c, int ranks, const std::vector<std::int64_t>& shape) {
  AllRanks x, weights;
  for (int r = 0; r < ranks; ++r) x.push_back(random(shape, c.same_input ? 1 : 1 + r));
  const AllRanks want = c.define(x);
  for (int r = 0; r < ranks; ++r) weights.push_back(random(want[r].shape, c.same_after ? 50 : 50 + r));
  const AllRanks gradients = defined_gradient(c, x, weights);
  on_ranks(ranks, [&](Cpu& cpu, Communicator& group) {
    const auto r = static_cast<std::size_t>(group.rank());
    const std::string what = cat(c.name, " on ", ranks, " ranks, of [", shape[0], ", ", shape[1], ", ..");
    Tape tape(*cpu.kernels);
    const Var in = tape.variable(tensor_of(cpu, x[r]));
    const Var out = c.run(in, &group);
    ASSERT_EQ(std::vector(out.shape().dims().begin(), out.shape().dims().end()), want[r].shape) << what;
    expect_close(cpu.values(out.value()), want[r].values, what);
    tape.backward({{out, tensor_of(cpu, weights[r])}});
    expect_close(cpu.values(in.grad()), gradients[r].values, "gradient of " + what);
    expect_close(cpu.values(in.value()), x[r].values, "input of " + what);
  });
}

TEST(Collectives, ValuesAndGradientsAreAsDefined) {
  for (const int ranks : {1, 2, 3, 4}) {
    const std::vector<std::vector<std::int64_t>> shapes{{12, 2, 3}, {2, 12, 3}, {3, 2, 12}};
    for (int dim = 0; dim < 3; ++dim)
      for (const Collective& c : along(dim))
        expect_as_defined(c, ranks, shapes[static_cast<std::size_t>(dim)]);
    for (const Collective& c : along(-2)) expect_as_defined(c, ranks, shapes[1]);
    for (const Collective& c : {of_sum(true), of_sum(false), of_copy()})
      expect_as_defined(c, ranks, {3, 4, 5});
  }
}

TEST(Collectives, ManyRowsGoAsBlocks) {
  for (const int ranks : {2, 3})
    for (const Collective& c : along(1)) expect_as_defined(c, ranks, {70, 6, 1});
}

TEST(Collectives, AllToAllExchangesAnyTwoDimensions) {
  for (const int ranks : {1, 2, 3})
    for (int split = 0; split < 3; ++split)
      for (int join = 0; join < 3; ++join) {
        std::vector<std::int64_t> shape{2, 3, 4};
        shape[static_cast<std::size_t>(split)] = 6;
        expect_as_defined(exchanging(split, join), ranks, shape);
      }
}

TEST(Collectives, ARankAloneGetsItsInputAndRecordsNothing) {
  on_ranks(1, [](Cpu& cpu, Communicator& self) {
    Tape tape(*cpu.kernels);
    const Var x = tape.variable(cpu.normal({2, 3}, 1));
    for (Communicator* group : {&self, static_cast<Communicator*>(nullptr)})
      for (const Var& same : {copy_to(x, group), all_reduce(x, group), all_gather(x, 0, group),
                              gather(x, 1, group), reduce_scatter(x, -1, group), all_to_all(x, 0, 1, group)})
        EXPECT_EQ(same.value().raw(), x.value().raw());
    EXPECT_EQ(tape.size(), 0u);
  });
}

/// The sum of all ranks' values of 16 bits: in rank order in fp32, rounded once.
template <class T>
std::vector<T> folded(Cpu& cpu, int ranks, const Shape& shape) {
  std::vector<float> sums;
  for (int r = 0; r < ranks; ++r) {
    const Tensor wide = cpu.convert(cpu.normal(shape, 10 + r, dtype_of<T>()), DType::f32);
    for (std::int64_t i = 0; i < wide.numel(); ++i) {
      if (r == 0)
        sums.push_back(wide.data<float>()[i]);
      else
        sums[static_cast<std::size_t>(i)] += wide.data<float>()[i];
    }
  }
  return {sums.begin(), sums.end()};
}

template <class T>
void expect_sums_round_once() {
  constexpr int ranks = 3;
  const Shape shape{2, 6, 5};
  on_ranks(ranks, [&](Cpu& cpu, Communicator& group) {
    const std::vector<T> want = folded<T>(cpu, ranks, shape);
    const auto bits = [](const T* x) { return std::bit_cast<std::uint16_t>(*x); };
    Tape tape(*cpu.kernels);
    const Var x = tape.variable(cpu.normal(shape, 10 + group.rank(), dtype_of<T>()));
    const Tensor whole = all_reduce(x, &group).value(), cut = reduce_scatter(x, 1, &group).value();
    const Var copy = copy_to(tape.variable(x.value()), &group);
    tape.backward({{copy, x.value()}});
    for (std::int64_t i = 0; i < whole.numel(); ++i)
      ASSERT_EQ(bits(whole.data<T>() + i), bits(&want[static_cast<std::size_t>(i)])) << i;
    for (std::int64_t i = 0; i < cut.numel(); ++i) {
      const std::int64_t from = i / 10 * 30 + group.rank() * 10 + i % 10;
      ASSERT_EQ(bits(cut.data<T>() + i), bits(&want[static_cast<std::size_t>(from)])) << i;
    }
  });
}

TEST(Collectives, SumsOf16BitsRunInRankOrderAndRoundOnce) {
  expect_sums_round_once<bf16>();
  expect_sums_round_once<f16>();
}

/// Another consumer's gradient of the same value must not see what copy_to() sums up in place.
TEST(Collectives, AGradientThatOthersReadIsNotSummedInPlace) {
  on_ranks(2, [](Cpu& cpu, Communicator& group) {
    Tape tape(*cpu.kernels);
    const Var x = tape.variable(cpu.normal({4}, 1));
    const Var out = copy_to(x, &group);
    const Tensor seed = cpu.normal({4}, 2);
    const std::vector<double> before = cpu.values(seed);
    tape.backward({{out, seed}});
    EXPECT_EQ(cpu.values(seed), before);
  });
}

/// Selective recompute makes a copy again from what made its input.
TEST(Collectives, RunUnderRecompute) {
  on_ranks(2, [](Cpu& cpu, Communicator& group) {
    std::vector<double> seen[3];
    for (const auto how : {Recompute::none, Recompute::selective, Recompute::full}) {
      Tape tape(*cpu.kernels);
      tape.recompute = how;
      const Var x = tape.variable(cpu.normal({4, 2}, 1 + group.rank()));
      const auto body = [&](Tape&, const std::vector<Var>& in) {
        return reduce_scatter(all_gather(copy_to(in[0], &group), 1, &group), 0, &group);
      };
      const Var out = how == Recompute::full ? tape.recompute_later({x}, body) : body(tape, {x});
      tape.backward({{out, cpu.normal(out.shape(), 9)}});
      seen[static_cast<int>(how)] = cpu.values(x.grad());
    }
    EXPECT_EQ(seen[0], seen[1]);
    EXPECT_EQ(seen[0], seen[2]);
  });
}

TEST(Collectives, UnevenExtentsAreNamed) {
  on_ranks(4, [](Cpu& cpu, Communicator& group) {
    Tape tape(*cpu.kernels);
    const Var x = tape.variable(cpu.normal({2, 6, 3}, 1));
    const std::string part = "dimension 1 of a tensor of shape [2, 6, 3] has no equal parts for 4 ranks";
    expect_error(ErrorKind::usage, part, [&] { reduce_scatter(x, -2, &group); });
    expect_error(ErrorKind::usage, "heads: " + part, [&] { all_to_all(x, 1, 0, &group, "heads"); });
    expect_error(ErrorKind::usage, "has no dimension 3", [&] { all_gather(x, 3, &group); });
    group.barrier();  // nothing was broken
  });
}

TEST(Collectives, ADeadRankIsAnErrorOnTheOthers) {
  std::atomic<int> told = 0;
  expect_error(ErrorKind::data, "rank 1 read a bad page", [&] {
    on_ranks(3, [&](Cpu& cpu, Communicator& group) {
      if (group.rank() == 1) fail(ErrorKind::data, "rank 1 read a bad page");
      Tape tape(*cpu.kernels);
      expect_error(ErrorKind::comm, "rank 1 read a bad page",
                   [&] { all_gather(tape.variable(cpu.normal({2}, 1)), 0, &group, "features"); });
      ++told;
    });
  });
  EXPECT_EQ(told, 2);
}

/// It is gone while an error of this rank's own unwinds, perhaps.
TEST(Exchanges, ThatAreDroppedDropWhateverTheyThrew) {
  struct OutOfMemory final : comm::Work::Completion {
    bool done() override { return true; }
    void wait() override {
      ++waits;
      throw std::bad_alloc();
    }
    int waits = 0;
  };
  const auto state = std::make_shared<OutOfMemory>();
  { const Exchange dropped(comm::Work(state), {}, {}); }
  EXPECT_EQ(state->waits, 1);
  EXPECT_THROW(Exchange(comm::Work(state), {}, {}).wait(), std::bad_alloc);
}

TEST(Collectives, RanksThatCallOtherThingsAreTold) {
  on_ranks(2, [](Cpu& cpu, Communicator& group) {
    Tape tape(*cpu.kernels);
    const Var x = tape.variable(cpu.normal({2, 2}, 1));
    expect_error(ErrorKind::comm, "mismatched calls",
                 [&] { group.rank() == 0 ? all_reduce(x, &group, "here") : all_reduce(x, &group, "there"); });
  });
}

}  // namespace
}  // namespace sherd::parallel
