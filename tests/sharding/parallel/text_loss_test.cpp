#include "sharding/parallel/text_loss.h"

#include <gtest/gtest.h>

#include <mutex>

#include "sharding/parallel/dense_head.h"
#include "support/expect_error.h"
#include "support/gpu/lazy_kernels.h"
#include "support/print_dtype.h"

namespace sherd::parallel {
namespace {

constexpr double tail = 0.5;

/// A loss of a text's sums, whose derivatives differ from text to text.
double of_text(double weighted, double plain, std::size_t text) {
  return 0.01 * weighted * weighted + 0.1 * static_cast<double>(text + 1) * plain;
}
double loss_of(const nn::TextScores& scores, nn::TextGradients& gradients) {
  double sum = 0;
  for (std::size_t i = 0; i < scores.log_prob.size(); ++i) {
    sum += of_text(scores.weighted[i], scores.log_prob[i], i);
    gradients.weighted[i] = 0.02 * scores.weighted[i];
    gradients.log_prob[i] = 0.1 * static_cast<double>(i + 1);
  }
  return sum;
}

/// Which text a token is of, and how its log-probability counts.
struct Part {
  std::size_t text;
  double weight;
};

/// A head, the loss of texts and the gradients in double. Each sequence has `per_row` texts, of equal length.
struct DenseTexts : Dense {
  std::int64_t per_row;
  std::vector<double> log_prob, weighted;
  std::vector<std::int64_t> targets;

  DenseTexts(DType dtype, std::int64_t batch_, std::int64_t seq_, std::int64_t hidden_, std::int64_t per)
      : Dense(dtype, batch_, seq_, hidden_, 37), per_row(per) {
    ignore([](std::int64_t at) { return at % 3 == 1; });
  }
  std::int64_t texts() const { return batch * per_row; }
  std::int64_t length() const { return seq / per_row; }
  /// The second half of a text is its tail where a row has several.
  Part part(std::int64_t token) const {
    const std::int64_t at = token % seq;
    const bool last = per_row > 1 && at % length() >= length() / 2;
    return {static_cast<std::size_t>(token / seq * per_row + at / length()), last ? tail : 1};
  }
  std::vector<double> probabilities(std::size_t token) const {
    std::vector<double> p;
    double sum = 0;
    for (std::int64_t id = 0; id < ids; ++id) {
      double logit = bias[static_cast<std::size_t>(id)];
      for (std::int64_t k = 0; k < hidden; ++k) logit += at(x, token, k) * at(weight, id, k);
      p.push_back(std::exp(logit)), sum += p.back();
    }
    for (double& each : p) each /= sum;
    return p;
  }

  void find(double dy) {
    const auto n = static_cast<std::size_t>(texts());
    log_prob.assign(n, 0), weighted.assign(n, 0), targets.assign(n, 0);
    dx.assign(x.size(), 0), dweight.assign(weight.size(), 0), dbias.assign(bias.size(), 0);
    for (std::size_t token = 0; token < labels.size(); ++token) {
      if (labels[token] == no_label) continue;
      const auto [text, counts] = part(static_cast<std::int64_t>(token));
      const double found = std::log(probabilities(token)[static_cast<std::size_t>(labels[token])]);
      log_prob[text] += found, weighted[text] += counts * found, ++targets[text];
    }
    nn::TextGradients by{std::vector<double>(n), std::vector<double>(n)};
    loss = loss_of({log_prob, weighted, targets}, by);
    for (std::size_t token = 0; token < labels.size(); ++token) {
      if (labels[token] == no_label) continue;
      const auto [text, counts] = part(static_cast<std::int64_t>(token));
      const double factor = dy * (by.log_prob[text] + counts * by.weighted[text]);
      const std::vector<double> p = probabilities(token);
      for (std::int64_t id = 0; id < ids; ++id) {
        const double slope = factor * ((id == labels[token]) - p[static_cast<std::size_t>(id)]);
        dbias[static_cast<std::size_t>(id)] += slope;
        for (std::int64_t k = 0; k < hidden; ++k) {
          at(dx, token, k) += slope * at(weight, id, k);
          at(dweight, id, k) += slope * at(x, token, k);
        }
      }
    }
  }

  /// Runs over the rows of labels that a rank has.
  std::vector<TextRows> runs(std::int64_t inner_rows) const {
    std::vector<TextRows> out;
    for (std::int64_t b = 0; b < batch; ++b) {
      if (per_row == 1) {
        out.push_back({b * inner_rows, (b + 1) * inner_rows, static_cast<std::int32_t>(b), 1});
        continue;
      }
      for (std::int64_t i = 0; i < per_row; ++i) {
        const std::int64_t begin = b * seq + i * length(), middle = begin + length() / 2;
        const auto text = static_cast<std::int32_t>(b * per_row + i);
        out.push_back({begin, middle, text, 1}), out.push_back({middle, begin + length(), text, tail});
      }
    }
    return out;
  }
};

struct Found {
  std::vector<double> losses, dx, dweight, dbias;
  nn::TextScores scores;
};

/// Which of the head's gradients are asked for.
enum class Trained { all, stream_alone };

Found run(const DenseTexts& dense, DType dtype, const HeadGrid& sizes, double dy, Trained trained) {
  Found out;
  out.dx.resize(dense.x.size()), out.dweight.resize(dense.weight.size()), out.dbias.resize(dense.bias.size());
  std::mutex mutex;
  on_grid(dense, dtype, sizes, [&](Rank& rank) {
    Tape tape(*rank.cpu.kernels);
    const bool all = trained == Trained::all;
    const Var x = tape.variable(rank.x());
    const Var weight = all ? tape.variable(rank.weight()) : tape.input(rank.weight()),
              bias = all ? tape.variable(rank.bias()) : tape.input(rank.bias());
    const std::vector<TextRows> runs = dense.runs(rank.inner_rows());
    const VocabHead head{weight, bias, dense.ids};
    const Var loss = vocab_text_loss(x, head, rank.labels(), runs, dense.texts(), loss_of, rank.layout);
    const double value = rank.cpu.values(loss.value())[0];
    tape.backward(loss, dy);
    nn::TextScores scores;
    {
      Tape::NoGrad pause(tape);
      scores = vocab_text_scores(x, head, rank.labels(), runs, dense.texts(), rank.layout);
    }
    const std::vector<double> dx = rank.cpu.values(x.grad());
    const std::lock_guard lock(mutex);
    out.losses.push_back(value), out.scores = scores;
    rank.for_stream([&](std::int64_t from, std::int64_t to) {
      for (std::int64_t k = 0; k < dense.hidden; ++k) dense.at(out.dx, to, k) = dense.at(dx, from, k);
    });
    if (!all) return;
    const std::vector<double> dw = rank.cpu.values(weight.grad()), db = rank.cpu.values(bias.grad());
    for (std::int64_t row = 0; row < rank.table_rows() && rank.first_id() + row < dense.ids; ++row) {
      out.dbias[static_cast<std::size_t>(rank.first_id() + row)] += db[static_cast<std::size_t>(row)];
      for (std::int64_t k = 0; k < dense.hidden; ++k)
        dense.at(out.dweight, rank.first_id() + row, k) += dense.at(dw, row, k);
    }
  });
  return out;
}

void expect_agreement(DenseTexts dense, DType dtype, const std::vector<HeadGrid>& grids) {
  const double dy = 8;
  dense.find(dy);
  const double sums = dtype == DType::f64   ? 1e-12
                      : dtype == DType::f32 ? 1e-5
                                            : 6e-3,
               gradients = dtype == DType::f64   ? 1e-11
                           : dtype == DType::f32 ? 2e-5
                                                 : 3e-2;
  for (const HeadGrid& sizes : grids)
    for (const Trained trained : {Trained::all, Trained::stream_alone}) {
      SCOPED_TRACE(cat(name_of(dtype), ", tensor ", sizes.tensor, ", context ", sizes.context,
                       sizes.sequence ? ", sequence-parallel" : "",
                       trained == Trained::all ? "" : ", the stream alone"));
      const Found found = run(dense, dtype, sizes, dy, trained);
      for (const double loss : found.losses) {
        EXPECT_EQ(loss, found.losses[0]);  // the same bits on all ranks
        EXPECT_NEAR(loss, dense.loss, sums * std::abs(dense.loss));
      }
      expect_near_most(found.scores.log_prob, dense.log_prob, sums, "the log-probability");
      expect_near_most(found.scores.weighted, dense.weighted, sums, "the weighted log-probability");
      EXPECT_EQ(found.scores.targets, dense.targets);
      expect_near_most(found.dx, dense.dx, gradients, "the tokens' gradient");
      if (trained == Trained::stream_alone) continue;
      expect_near_most(found.dweight, dense.dweight, gradients, "the weight's gradient");
      expect_near_most(found.dbias, dense.dbias, gradients, "the bias's gradient");
      if (::testing::Test::HasFatalFailure()) return;
    }
}

class VocabTextLoss : public ::testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(All, VocabTextLoss, ::testing::Values(DType::f32, DType::bf16, DType::f64),
                         [](const auto& test) { return std::string(name_of(test.param)); });

/// Logits are kept: 32 tokens beside a table of 40 columns.
TEST_P(VocabTextLoss, OfKeptLogitsIsTheDenseOne) {
  expect_agreement(DenseTexts(GetParam(), 2, 16, 40, 2), GetParam(),
                   {{1, 1, true}, {2, 1, true}, {2, 1, false}, {4, 1, true}});
}

/// Chunks of 64 tokens: made again in backward, or differentiated at once where x alone takes a gradient.
/// Texts end within chunks.
TEST_P(VocabTextLoss, InChunksIsTheDenseOne) {
  expect_agreement(DenseTexts(GetParam(), 2, 160, 24, 2), GetParam(),
                   {{1, 1, true}, {2, 1, true}, {4, 1, false}});
}

TEST_P(VocabTextLoss, OfTextsThatContextRanksShareIsTheDenseOne) {
  for (const std::int64_t seq : {16, 192})
    expect_agreement(DenseTexts(GetParam(), 2, seq, 24, 1), GetParam(), {{1, 2, true}, {2, 2, true}});
}

TEST(VocabTextLossOfOneRank, SaysThatAScoreIsNotFinite) {
  const DenseTexts dense(DType::f32, 1, 8, 16, 1);
  Cpu cpu(1);
  const Rank rank{cpu, dense, {}, DType::f32};
  Tape tape(*cpu.kernels);
  const Tensor bad = rank.weight();
  cpu.kernels->fill(bad, std::numeric_limits<double>::quiet_NaN());
  const Var x = tape.variable(rank.x());
  testing::expect_error(ErrorKind::numerics, "no finite score", [&] {
    vocab_text_loss(x, {tape.input(bad), {}, dense.ids}, rank.labels(), dense.runs(8), 1, loss_of,
                    rank.layout);
  });
}

/// The results of a rank with a GPU do not depend on when its kernels run.
TEST(VocabTextLossOnAGpu, GivesTheSameBitsHoweverLateItsKernelsRun) {
  for (const std::int64_t seq : {16, 192})
    for (const bool frozen : {false, true}) {
      const DenseTexts dense(DType::bf16, 1, seq, 24, 2);
      const auto found = [&](Cpu& machine) {
        const Rank rank{machine, dense, {}, DType::bf16};
        Tape tape(*machine.kernels);
        const Var x = tape.variable(rank.x()),
                  weight = frozen ? tape.input(rank.weight()) : tape.variable(rank.weight());
        const Var loss = vocab_text_loss(x, {weight, {}, dense.ids}, rank.labels(), dense.runs(seq),
                                         dense.texts(), loss_of, rank.layout);
        std::vector<Tensor> out{loss.value()};
        tape.backward(loss);
        out.push_back(x.grad());
        if (!frozen) out.push_back(weight.grad());
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

TEST(ScoreLoss, GivesTheDerivativesToTheFirstColumn) {
  Cpu cpu(1);
  Tape tape(*cpu.kernels);
  const std::vector<double> values{0.5, 9, -2, 9, 1.5, 9};
  const Var scores = tape.variable(Tensor::of<double>(*cpu.device, {3, 2}, values));
  const Var loss = score_loss(scores, loss_of);
  EXPECT_DOUBLE_EQ(cpu.values(loss.value())[0],
                   of_text(0.5, 0.5, 0) + of_text(-2, -2, 1) + of_text(1.5, 1.5, 2));
  tape.backward(loss, 2);
  const std::vector<double> got = cpu.values(scores.grad());
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_DOUBLE_EQ(got[2 * i], 2 * (0.02 * values[2 * i] + 0.1 * static_cast<double>(i + 1)));
    EXPECT_EQ(got[2 * i + 1], 0);
  }
}

}  // namespace
}  // namespace sherd::parallel
