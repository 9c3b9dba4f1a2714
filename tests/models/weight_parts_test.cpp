// Parts of weights with which LoRA begins, against matrices whose decomposition is known.
#include "models/adapters/weight_parts.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numbers>

#include "models/gpt.h"
#include "models/hub/grown_vocabulary.h"
#include "models/hub/hugging_face_weights.h"
#include "support/hugging_face/peft_reference.h"

namespace sherd::models {
namespace {

/// Element `at` of vector `k` of an orthonormal basis of `n` dimensions, the discrete cosine transform's.
double cosine(std::int64_t k, std::int64_t at, std::int64_t n) {
  const auto size = static_cast<double>(n);
  return std::sqrt((k == 0 ? 1 : 2) / size) *
         std::cos(std::numbers::pi * (static_cast<double>(at) + 0.5) * static_cast<double>(k) / size);
}

/// The sum of these singular triplets, numbers `first` to `end`.
std::vector<float> matrix(const std::vector<double>& values, std::int64_t rows, std::int64_t columns,
                          std::size_t first, std::size_t end) {
  std::vector<double> sum(static_cast<std::size_t>(rows * columns));
  for (std::size_t k = first; k < end; ++k) {
    std::vector<double> right;
    for (std::int64_t c = 0; c < columns; ++c)
      right.push_back(values[k] * cosine(static_cast<std::int64_t>(k), c, columns));
    for (std::int64_t r = 0; r < rows; ++r) {
      const double left = cosine(static_cast<std::int64_t>(k), r, rows);
      for (std::int64_t c = 0; c < columns; ++c)
        sum[static_cast<std::size_t>(r * columns + c)] += left * right[static_cast<std::size_t>(c)];
    }
  }
  return {sum.begin(), sum.end()};
}

std::vector<float> product(const WeightPart& part, std::int64_t out, std::int64_t in, std::int64_t rank) {
  std::vector<float> sum(static_cast<std::size_t>(out * in));
  for (std::int64_t r = 0; r < out; ++r)
    for (std::int64_t k = 0; k < rank; ++k)
      for (std::int64_t c = 0; c < in; ++c)
        sum[static_cast<std::size_t>(r * in + c)] +=
            part.b[static_cast<std::size_t>(r * rank + k)] * part.a[static_cast<std::size_t>(k * in + c)];
  return sum;
}

/// Wider than the subspace that is looked at, high and wide, with values close to each other at the cut.
TEST(WeightParts, TheLargestIsThatOfTheLargestSingularValues) {
  const auto processor = device::make_cpu_device(2);
  std::vector<double> values{9, 7, 6.5, 6, 5.7};
  for (int k = 0; k < 30; ++k) values.push_back(5 * std::exp(-0.2 * k));
  constexpr std::int64_t rank = 4;
  for (const auto& [out, in] : {std::pair<std::int64_t, std::int64_t>{900, 820}, {800, 1000}, {64, 40}}) {
    const std::vector<float> all = matrix(values, out, in, 0, values.size()),
                             want = matrix(values, out, in, 0, rank);
    const WeightPart part = largest_part(all, out, in, rank, *processor);
    const std::vector<float> got = product(part, out, in, rank);
    double apart = 0, squares = 0;
    for (std::size_t i = 0; i < want.size(); ++i)
      apart += std::pow(got[i] - want[i], 2), squares += std::pow(want[i], 2);
    EXPECT_LT(std::sqrt(apart / squares), 2e-5) << out << " by " << in;
    // Each factor has the roots.
    for (std::int64_t k = 0; k < rank; ++k) {
      double a = 0, b = 0;
      for (std::int64_t c = 0; c < in; ++c) a += std::pow(part.a[static_cast<std::size_t>(k * in + c)], 2);
      for (std::int64_t r = 0; r < out; ++r) b += std::pow(part.b[static_cast<std::size_t>(r * rank + k)], 2);
      EXPECT_NEAR(a, values[static_cast<std::size_t>(k)], 1e-4);
      EXPECT_NEAR(b, values[static_cast<std::size_t>(k)], 1e-4);
    }
  }
}

/// A matrix without as many parts gives zeros, no NaN; equal singular values any of their vectors.
TEST(WeightParts, OfLowRankOrEqualValuesAreNumbers) {
  const auto processor = device::make_cpu_device(1);
  const std::vector<float> zeros(60 * 30, 0.0f), one = matrix({2.0}, 60, 30, 0, 1);
  for (const std::vector<float>& weight : {zeros, one}) {
    const std::vector<float> got = product(largest_part(weight, 60, 30, 3, *processor), 60, 30, 3),
                             other = product(orthogonal_part(weight, 60, 30, 3, *processor), 60, 30, 3);
    for (std::size_t i = 0; i < weight.size(); ++i) {
      ASSERT_NEAR(got[i], weight[i], 1e-6);
      ASSERT_NEAR(other[i], weight[i], 1e-6);
    }
  }
  const std::vector<float> equal = matrix(std::vector<double>(30, 1.0), 60, 30, 0, 30);
  for (const float value : largest_part(equal, 60, 30, 4, *processor).b) ASSERT_TRUE(std::isfinite(value));
}

/// More ids than the files have: their vectors are the mean of all others'.
TEST(GrownVocabularies, BeginAsTheMean) {
  test::Cpu cpu{1};
  for (const char* family : {"llama", "gpt2", "bert"}) {
    SCOPED_TRACE(family);
    const config::Config file = test::with_adapter(family, {});
    const GptConfig from = gpt_config(file, file.model->vocab_size);
    GptConfig to = from;
    to.vocab_size = from.vocab_size + 6;
    HuggingFaceWeights files(test::models_reference() / "hugging_face" / family, HuggingFaceLayout(from));
    GrownVocabulary grown(files, from, to, *cpu.device);
    Gpt small(from), large(to);
    const test::PlainParameters one(*cpu.kernels, small, DType::f32), other(*cpu.kernels, large, DType::f32);
    grown.check(other.all());
    const auto read = [&](nn::WeightSource& source, const nn::ParameterPtr& p, std::int64_t step) {
      std::vector<double> out;
      for (std::int64_t begin = 0; begin < p->numel(); begin += step) {
        const tensor::Tensor part =
            tensor::Tensor::empty(*cpu.device, {std::min(step, p->numel() - begin)}, DType::f32);
        source.read(p->name, p->logical_slice(), begin, part);
        for (const double value : cpu.values(part)) out.push_back(value);
      }
      return out;
    };
    int grew = 0;
    ASSERT_EQ(one.all().size(), other.all().size());
    for (std::size_t i = 0; i < one.all().size(); ++i) {
      const auto &p = one.all()[i], &q = other.all()[i];
      SCOPED_TRACE(p->name);
      const std::vector<double> before = read(files, p, p->numel()), after = read(grown, q, 23);
      if (p->shape == q->shape && p->name != "tokens.weight" && !p->name.starts_with("head.")) {
        EXPECT_EQ(after, before);
        continue;
      }
      ++grew;
      const std::int64_t columns = p->shape.rank() == 1 ? 1 : p->shape[1];
      for (std::int64_t at = 0; at < q->numel(); ++at) {
        const std::int64_t row = at / columns;
        double want = 0;
        for (std::int64_t r = 0; row >= from.vocab_size && row < to.vocab_size && r < from.vocab_size; ++r)
          want += before[static_cast<std::size_t>(r * columns + at % columns)] /
                  static_cast<double>(from.vocab_size);
        if (row < from.vocab_size) want = before[static_cast<std::size_t>(at)];
        ASSERT_NEAR(after[static_cast<std::size_t>(at)], want, 1e-6) << "row " << row;
      }
    }
    EXPECT_EQ(grew, family == std::string("gpt2") ? 1 : 2) << "the table, and the head or its bias";
  }
}

}  // namespace
}  // namespace sherd::models
