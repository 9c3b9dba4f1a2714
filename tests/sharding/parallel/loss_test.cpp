#include "sharding/parallel/loss.h"

#include <gtest/gtest.h>

#include <mutex>

#include "autograd/ops.h"
#include "sharding/parallel/dense_head.h"
#include "support/expect_error.h"
#include "support/gpu/lazy_kernels.h"
#include "support/print_dtype.h"

namespace sherd::parallel {
namespace {

using autograd::Parameter;
using autograd::ParameterPtr;

/// The losses of all ranks, and their gradients put together.
struct HeadLosses {
  std::vector<double> losses, dx, dweight, dbias;
  double padding = 0;  ///< the largest gradient of a row that is padding
};

HeadLosses run_head(const Dense& dense, DType dtype, const HeadGrid& sizes, double dy) {
  HeadLosses out;
  out.dx.resize(dense.x.size()), out.dweight.resize(dense.weight.size());
  out.dbias.resize(dense.bias.size());
  std::mutex mutex;
  on_grid(dense, dtype, sizes, [&](Rank& rank) {
    Tape tape(*rank.cpu.kernels);
    const Var x = tape.variable(rank.x()), weight = tape.variable(rank.weight()),
              bias = tape.variable(rank.bias());
    const Var loss = rank.loss(x, weight, bias);
    const double value = rank.cpu.values(loss.value())[0];
    tape.backward(loss, dy);
    const std::vector<double> dx = rank.cpu.values(x.grad()), dw = rank.cpu.values(weight.grad()),
                              db = rank.cpu.values(bias.grad());
    const std::lock_guard lock(mutex);
    out.losses.push_back(value);
    rank.for_stream([&](std::int64_t from, std::int64_t to) {
      for (std::int64_t k = 0; k < dense.hidden; ++k) dense.at(out.dx, to, k) = dense.at(dx, from, k);
    });
    for (std::int64_t row = 0; row < rank.table_rows(); ++row) {
      if (rank.first_id() + row < dense.ids)
        out.dbias[static_cast<std::size_t>(rank.first_id() + row)] += db[static_cast<std::size_t>(row)];
      else
        out.padding = std::max(out.padding, std::abs(db[static_cast<std::size_t>(row)]));
      for (std::int64_t k = 0; k < dense.hidden; ++k) {
        const std::int64_t id = rank.first_id() + row;
        if (id < dense.ids)
          dense.at(out.dweight, id, k) += dense.at(dw, row, k);  // over context ranks
        else
          out.padding = std::max(out.padding, std::abs(dense.at(dw, row, k)));
      }
    }
  });
  return out;
}

struct Tolerance {
  double loss, gradient;
};
Tolerance tolerance(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return {1e-13, 1e-12};
    case DType::f32:
      return {1e-6, 1e-5};
    case DType::f16:
      return {1e-3, 6e-3};
    default:
      return {5e-3, 3e-2};
  }
}

/// Runs the head on these grids and holds it to the dense one.
void expect_agreement(Dense dense, DType dtype, const std::vector<HeadGrid>& grids) {
  const double dy = 24;
  dense.compute(dy);
  for (const HeadGrid& sizes : grids) {
    SCOPED_TRACE(cat(name_of(dtype), ", tensor ", sizes.tensor, ", context ", sizes.context,
                     sizes.sequence ? ", sequence-parallel" : ""));
    const HeadLosses found = run_head(dense, dtype, sizes, dy);
    const Tolerance most = tolerance(dtype);
    for (const double loss : found.losses) {
      EXPECT_EQ(loss, found.losses[0]);  // the same bits on all ranks
      EXPECT_NEAR(loss, dense.loss, most.loss * dense.loss);
    }
    expect_near_most(found.dx, dense.dx, most.gradient, "the tokens' gradient");
    expect_near_most(found.dweight, dense.dweight, most.gradient, "the weight's gradient");
    expect_near_most(found.dbias, dense.dbias, most.gradient, "the bias's gradient");
    EXPECT_EQ(found.padding, 0);
    if (::testing::Test::HasFatalFailure()) return;
  }
}

std::vector<HeadGrid> all_grids() {
  std::vector<HeadGrid> out;
  for (const int tensor : {1, 2, 4})
    for (const int context : {1, 2})
      for (const bool sequence : {false, true})
        if (tensor > 1 || sequence) out.push_back({tensor, context, sequence});
  return out;
}

class VocabCrossEntropy : public ::testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(All, VocabCrossEntropy,
                         ::testing::Values(DType::f32, DType::bf16, DType::f16, DType::f64),
                         [](const auto& test) { return std::string(name_of(test.param)); });

// 32 or 16 tokens of 40 numbers: the logits take little memory next to the weight's gradient.
TEST_P(VocabCrossEntropy, OfKeptLogitsIsTheDenseOne) {
  Dense dense(GetParam(), 2, 16, 40, 37);  // padding in the last slice
  dense.ignore([](std::int64_t at) { return at % 3 == 1 || at > 12; });
  expect_agreement(dense, GetParam(), all_grids());
}

// 320 or 160 tokens of 24 numbers: chunks of 64.
TEST_P(VocabCrossEntropy, InChunksIsTheDenseOne) {
  Dense dense(GetParam(), 2, 160, 24, 37);
  dense.ignore([](std::int64_t at) { return at % 3 == 1 || at > 130; });
  expect_agreement(dense, GetParam(), all_grids());
}

TEST_P(VocabCrossEntropy, OfASliceThatIsAllPaddingIsTheDenseOne) {
  for (const std::int64_t seq : {8, 224}) {
    const Dense dense(GetParam(), 1, seq, 24, 5);  // of 8 rows on 4 ranks
    expect_agreement(dense, GetParam(), {{4, 1, true}, {4, 2, false}});
  }
}

TEST(VocabCrossEntropyLabels, MayAllBeIgnoredOnOneContextRank) {
  for (const std::int64_t seq : {16, 192}) {
    Dense dense(DType::f32, 2, seq, 24, 37);
    // The ring's second rank has the two middle quarters.
    dense.ignore([&](std::int64_t at) { return at >= seq / 4 && at < 3 * seq / 4; });
    expect_agreement(dense, DType::f32, {{1, 2, true}, {2, 2, true}});
  }
}

TEST(VocabCrossEntropyLabels, MayAllBeIgnored) {
  for (const std::int64_t seq : {16, 192}) {
    Dense dense(DType::f32, 2, seq, 24, 37);
    dense.ignore([](std::int64_t) { return true; });
    const HeadLosses found = run_head(dense, DType::f32, {2, 2, true}, 1);
    EXPECT_EQ(found.losses, std::vector<double>(4, 0));
    EXPECT_EQ(found.dx, std::vector<double>(dense.x.size(), 0));
    EXPECT_EQ(found.dweight, std::vector<double>(dense.weight.size(), 0));
  }
}

/// The logits of GPT-2's head on a GPU, of 16 sequences of 1024 tokens: four chunks of 412 MB, not the eleven
/// whose logits take what the weight's gradient does.
TEST(VocabCrossEntropyOfOneRank, TakesFewChunksOnAGpu) {
  constexpr std::int64_t vocabulary = 50304, hidden = 768, rows = 16 * 1024;
  const auto peak = [&](const std::shared_ptr<device::Device>& device) {
    const auto kernels = tensor::make_kernels(*device);
    Tape tape(*kernels);
    const Var x = tape.variable(Tensor::empty(*device, {16, 1024, hidden}, DType::bf16)),
              weight = tape.variable(Tensor::empty(*device, {vocabulary, hidden}, DType::bf16));
    const Tensor labels = Tensor::empty(*device, {16, 1024}, DType::i32);
    const std::uint64_t before =
        device->ledger().current(device::Tier::device, device::Category::activations);
    const Var loss = vocab_cross_entropy(x, {weight, {}, vocabulary}, labels, {});
    return device->ledger().peak(device::Tier::device, device::Category::activations) - before;
  };
  const std::uint64_t gradients = (rows * 2 + vocabulary * 4) * hidden;
  EXPECT_NEAR(static_cast<double>(peak(device::make_meta_gpu(1)) - gradients), rows / 4.0 * vocabulary * 2,
              2e6);
  EXPECT_NEAR(static_cast<double>(peak(device::make_meta_device(1)) - gradients),
              rows / 11.0 * vocabulary * 2, 5e6);
}

TEST(VocabCrossEntropyOfOneRank, IsThatOfALinearLayerAndALossInSixteenBitsToo) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
    for (const std::int64_t seq : {16, 300}) {
      const Dense dense(dtype, 1, seq, 48, 37);
      Cpu cpu(1);
      const Rank rank{cpu, dense, {}, dtype};  // without groups
      const auto with = [&](const std::function<Var(const Var&, const Var&)>& loss) {
        Tape tape(*cpu.kernels);
        const Var x = tape.variable(rank.x()), weight = tape.variable(rank.weight());
        const Var out = loss(x, weight);
        std::vector<std::vector<double>> found{cpu.values(out.value())};
        tape.backward(out, 1024);
        for (const Var& leaf : {x, weight}) found.push_back(cpu.values(leaf.grad()));
        return found;
      };
      const auto got = with([&](const Var& x, const Var& weight) { return rank.loss(x, weight); });
      const auto want = with([&](const Var& x, const Var& weight) {
        return autograd::cross_entropy(autograd::linear(x, weight), rank.labels(), dense.ids);
      });
      EXPECT_EQ(got[0], want[0]);
      const double most = dtype == DType::f32 ? 1e-6 : dtype == DType::f16 ? 2e-3 : 1.6e-2;
      expect_near_most(got[1], want[1], most, "the tokens' gradient");
      expect_near_most(got[2], want[2], most, "the weight's gradient");
    }
}

/// Rows that are trained apart, of which two are neighbours: what the table has in their place is never seen.
TEST(VocabCrossEntropyOfTrainedRows, IsThatOfTheTableWithTheseRows) {
  const std::vector<std::int64_t> ids{5, 6, 30, 7};
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const std::int64_t seq : {16, 300}) {  // logits kept, and in chunks
      Dense dense(dtype, 1, seq, 24, 37);
      dense.compute(1);
      Cpu cpu(1);
      const Rank rank{cpu, dense, {}, dtype};
      Tape tape(*cpu.kernels);
      const Tensor table = rank.weight(), values = Tensor::empty(*cpu.device, {4, dense.hidden}, dtype);
      for (std::size_t i = 0; i < ids.size(); ++i) {
        const auto row = static_cast<std::int64_t>(i);
        cpu.kernels->copy(table.rows(ids[i], ids[i] + 1), values.rows(row, row + 1));
        cpu.kernels->fill(table.rows(ids[i], ids[i] + 1), 50);
      }
      const Var x = tape.variable(rank.x()), rows = tape.variable(values), bias = tape.variable(rank.bias());
      const VocabHead head{
          tape.input(table), bias, dense.ids, 0, {rows, {{0, 5, 2, 0}, {2, 30, 1, 0}, {3, 7, 1, 0}}}};
      const Var loss = vocab_cross_entropy(x, head, rank.labels(), rank.layout);
      const double most = dtype == DType::f32 ? 1e-5 : 2e-2;
      EXPECT_NEAR(cpu.values(loss.value())[0], dense.loss, most * dense.loss);
      tape.backward(loss);
      expect_near_most(cpu.values(x.grad()), dense.dx, most, "the tokens' gradient");
      std::vector<double> of_rows;
      for (const std::int64_t id : ids)
        for (std::int64_t k = 0; k < dense.hidden; ++k) of_rows.push_back(dense.at(dense.dweight, id, k));
      expect_near_most(cpu.values(rows.grad()), of_rows, most, "the rows' gradient");
      std::vector<double> of_bias = dense.dbias;
      of_bias.resize(static_cast<std::size_t>(rank.table_rows()));
      expect_near_most(cpu.values(bias.grad()), of_bias, most, "the bias's gradient");
    }
}

ParameterPtr table(const Rank& rank, DType gradient) {
  auto out = std::make_shared<Parameter>();
  out->name = "table", out->value = rank.weight(), out->shape = out->value.shape();
  out->grad = Tensor::empty(*rank.cpu.device, out->shape, gradient);
  rank.cpu.kernels->fill(out->grad, 3);
  return out;
}

TEST(VocabCrossEntropyOfAParameter, AddsToWhatItsGradientHolds) {
  for (const std::int64_t seq : {16, 160})
    for (const bool written : {false, true}) {
      Dense dense(DType::bf16, 1, seq, 24, 37);
      dense.compute(1);
      Cpu cpu(1);
      const Rank rank{cpu, dense, {}, DType::bf16};
      for (const DType gradient : {DType::f32, DType::bf16}) {
        const ParameterPtr weight = table(rank, gradient);
        weight->grad_written = written;
        Tape tape(*cpu.kernels);
        const Var x = tape.input(rank.x());
        tape.backward(rank.loss(x, tape.parameter(weight), tape.input(rank.bias())));
        EXPECT_TRUE(weight->grad_written);
        const std::vector<double> got = cpu.values(weight->grad);
        for (std::size_t i = 0; i < dense.dweight.size(); ++i)
          ASSERT_NEAR(got[i], dense.dweight[i] + (written ? 3 : 0), gradient == DType::f32 ? 2e-3 : 1e-2);
      }
    }
}

TEST(VocabCrossEntropyWithoutGradients, IsTheSameLossAndGivesOnlyWhatIsWanted) {
  for (const std::int64_t seq : {16, 192})
    on_grid(Dense(DType::f32, 1, seq, 24, 37), DType::f32, {2, 1, true}, [](Rank& rank) {
      Tape tape(*rank.cpu.kernels);
      const auto bits = [](const Var& loss) { return test::bytes_of(loss.value()); };
      const Var x = tape.variable(rank.x()), w = tape.variable(rank.weight());
      const std::vector<std::byte> want = bits(rank.loss(x, w));
      {
        Tape::NoGrad pause(tape);
        EXPECT_EQ(bits(rank.loss(x, w)), want);
      }
      EXPECT_EQ(bits(rank.loss(tape.input(rank.x()), tape.input(rank.weight()))), want);
      tape.clear();
      tape.backward(rank.loss(x, tape.input(rank.weight())));
      tape.backward(rank.loss(tape.input(rank.x()), w));
      const std::vector<double> dx = rank.cpu.values(x.grad()), dw = rank.cpu.values(w.grad());
      const Var both_x = tape.variable(rank.x()), both_w = tape.variable(rank.weight());
      tape.backward(rank.loss(both_x, both_w));
      EXPECT_EQ(rank.cpu.values(both_x.grad()), dx);
      EXPECT_EQ(rank.cpu.values(both_w.grad()), dw);
    });
}

TEST(VocabCrossEntropyOnAGpu, GivesTheSameBitsHoweverLateItsKernelsRun) {
  for (const std::int64_t seq : {16, 192}) {
    const Dense dense(DType::bf16, 1, seq, 24, 37);
    const auto found = [&](Cpu& machine) {
      const Rank rank{machine, dense, {}, DType::bf16};
      Tape tape(*machine.kernels);
      const Var x = tape.variable(rank.x()), weight = tape.variable(rank.weight());
      std::vector<Tensor> out;
      {
        const Var loss = rank.loss(x, weight);
        out.push_back(loss.value());
        tape.backward(loss);
      }
      out.push_back(x.grad()), out.push_back(weight.grad());
      std::vector<std::vector<std::byte>> bits;
      for (const Tensor& each : out) bits.push_back(test::bytes_of(to_host(*machine.device, each)));
      return bits;
    };
    Cpu cpu(1), late(1);
    const auto gpu = std::make_shared<testing::LazyCudaDevice>();
    late.kernels = std::make_unique<testing::LazyKernels>(*gpu);
    late.device = gpu;
    EXPECT_EQ(found(late), found(cpu)) << seq;
  }
}

struct Block final : autograd::Scope {
  void pre_forward(Tape&) override {}
  void post_forward(Tape&) override {}
  void pre_backward(Tape&) override {}
  void post_backward(Tape&) override {}
  void pre_weight_gradients(Tape&) override {}
  void gradients_complete(Tape&) override {}
};

TEST(VocabCrossEntropyOfAParameter, GivesTheSameBitsWhereWeightGradientsCanWait) {
  for (const std::int64_t seq : {16, 160}) {
    const Dense dense(DType::bf16, 1, seq, 24, 37);
    Cpu cpu(1);
    const Rank rank{cpu, dense, {}, DType::bf16};
    const auto gradient = [&](autograd::WeightGradients when) {
      const ParameterPtr weight = table(rank, DType::f32);
      const auto block = std::make_shared<Block>();
      Tape tape(*cpu.kernels);
      tape.enter(block);
      const Var loss = rank.loss(tape.variable(rank.x()), tape.parameter(weight));
      tape.leave(block);
      tape.begin_backward(loss, 1, when);
      while (tape.continue_backward()) {
      }
      // The product waits where logits were kept; of chunks it was computed in forward.
      EXPECT_EQ(weight->grad_written, when == autograd::WeightGradients::now || seq == 160);
      while (tape.continue_weight_gradients()) {
      }
      EXPECT_TRUE(weight->grad_written);
      return test::bytes_of(weight->grad);
    };
    EXPECT_EQ(gradient(autograd::WeightGradients::later), gradient(autograd::WeightGradients::now));
  }
}

TEST(VocabCrossEntropyInChunks, HoldsTheLogitsOfAChunkAndTwoGradients) {
  const Dense dense(DType::f32, 1, 1024, 64, 4096);
  Cpu cpu(1);
  const Rank rank{cpu, dense, {}, DType::f32};
  Tape tape(*cpu.kernels);
  const Var x = tape.variable(rank.x()), weight = tape.variable(rank.weight());
  device::Ledger& ledger = cpu.device->ledger();
  const auto held = [&](const std::function<void()>& body) {
    const std::uint64_t before = ledger.current(device::Tier::device, device::Category::activations);
    ledger.reset_peaks();
    body();
    return ledger.peak(device::Tier::device, device::Category::activations) - before;
  };
  const std::uint64_t table = 4096 * 64 * 4, tokens = 1024 * 64 * 4, small = 32 << 10;
  const std::uint64_t forward = held([&] {
    Tape::NoGrad pause(tape);
    rank.loss(x, weight);
  });
  EXPECT_LE(forward, table + small);  // logits of 64 tokens
  const std::uint64_t all = held([&] { tape.backward(rank.loss(x, weight)); });
  EXPECT_LE(all, 2 * table + tokens + small);
  EXPECT_GE(all, 2 * table + tokens);
}

TEST(VocabCrossEntropyTraffic, IsOfTokensAndNeverOfLogits) {
  for (const std::int64_t seq : {8, 192})
    for (const bool sequence : {false, true})
      on_grid(Dense(DType::f32, 2, seq, 24, 4000), DType::f32, {4, 1, sequence}, [&](Rank& rank) {
        Tape tape(*rank.cpu.kernels);
        const Var x = tape.variable(rank.x()), weight = tape.variable(rank.weight());
        comm::Communicator& group = *rank.layout.tensor;
        group.reset_traffic();
        tape.backward(rank.loss(x, weight));
        const comm::Traffic traffic = group.traffic();
        const std::uint64_t tokens = 2 * static_cast<std::uint64_t>(seq), pairs = tokens * 2 * 4 * 3;
        const std::uint64_t part = tokens * 24 * 4 / 4 * 3;  // what a gather of the stream sends
        const bool kept = seq == 8;                          // backward gathers the stream again
        EXPECT_EQ(traffic.all_gather, pairs + (sequence ? (kept ? 2 : 1) * part : 0));
        EXPECT_EQ(traffic.reduce_scatter, sequence ? part : 0);
        EXPECT_EQ(traffic.all_reduce, sequence ? 0 : 2 * part);
      });
}

TEST(VocabCrossEntropyErrors, NameTheShapes) {
  const Dense dense(DType::f32, 2, 8, 24, 37);
  Cpu cpu(1);
  const Rank rank{cpu, dense, {}, DType::f32};
  Tape tape(*cpu.kernels);
  const Var x = tape.variable(rank.x()), weight = tape.variable(rank.weight());
  using testing::expect_error;
  const auto call = [&](const Var& tokens, const Var& rows, const Tensor& labels, std::int64_t ids) {
    return [=] { vocab_cross_entropy(tokens, {rows, {}, ids}, labels, {}); };
  };
  const Tensor labels = rank.labels();
  expect_error(ErrorKind::usage, "a table of fp32 [40, 24] does not take fp32 [16, 24]",
               call(tape.input(rank.x().reshape({16, 24})), weight, labels, 37));
  expect_error(ErrorKind::usage, "does not take",
               call(x, tape.input(cpu.normal({40, 8}, 1, DType::f32)), labels, 37));
  expect_error(ErrorKind::usage, "does not take",
               call(x, tape.input(cpu.convert(rank.weight(), DType::bf16)), labels, 37));
  expect_error(ErrorKind::usage, "labels must be int32 [2, 8], not int32 [16]",
               call(x, weight, labels.reshape({16}), 37));
  expect_error(ErrorKind::usage, "a table of 40 rows on each of 1 tensor-parallel ranks does not hold 41 ids",
               call(x, weight, labels, 41));
  expect_error(ErrorKind::data, "is outside the vocabulary of 10", call(x, weight, labels, 10));
}

}  // namespace
}  // namespace sherd::parallel
