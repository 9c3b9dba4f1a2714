// GPTQ in blocks of columns, by a triangle that never forms the inverse, against the paper's algorithm column
// by column in fp64 (scripts/references/make_compressed_reference.py).
#include "models/compressed/gptq.h"

#include <gtest/gtest.h>

#include <cmath>

#include "models/compressed/reference_numbers.h"
#include "support/expect_error.h"

namespace sherd::models {
namespace {

using tensor::Tensor;

constexpr std::int64_t rows = 10, columns = 192, samples = 240;

class Gptq : public ::testing::Test {
 protected:
  Tensor hessian() {
    const Tensor x = Tensor::of<float>(*cpu_.device, {samples, columns}, inputs_);
    const Tensor out = Tensor::on_host(*cpu_.device, {columns, columns}, DType::f32);
    cpu_.kernels->matmul({.a = x, .b = x, .c = out, .trans_a = true});
    return out;
  }
  /// ‖x·Qᵀ - x·Wᵀ‖², in fp64.
  double output_error(const CompressedMatrix& made) const {
    std::vector<float> stand_for(values_.size());
    decompress(CompressedKind::int4, made, stand_for);
    double out = 0;
    for (std::int64_t s = 0; s < samples; ++s)
      for (std::int64_t row = 0; row < rows; ++row) {
        double away = 0;
        for (std::int64_t i = 0; i < columns; ++i) {
          const auto at = static_cast<std::size_t>(row * columns + i);
          away += static_cast<double>(inputs_[static_cast<std::size_t>(s * columns + i)]) *
                  (static_cast<double>(stand_for[at]) - static_cast<double>(values_[at]));
        }
        out += away * away;
      }
    return out;
  }

  test::Cpu cpu_{2};
  test::Numbers numbers_{"gptq.safetensors"};
  std::vector<float> values_ = numbers_.of<float>("values"), inputs_ = numbers_.of<float>("inputs");
};

TEST_F(Gptq, IsThePapers) {
  struct Case {
    const char* name;
    CompressedScheme scheme;
  };
  for (const auto& [name, scheme] :
       {Case{"group", {.kind = CompressedKind::int4, .group = 64}},
        Case{"uneven", {.kind = CompressedKind::int4, .group = 96}},
        Case{"rows", {.kind = CompressedKind::int4, .group = 192}},
        Case{"ordered", {.kind = CompressedKind::int4, .group = 64, .activation_order = true}}}) {
    SCOPED_TRACE(name);
    const CompressedMatrix made = gptq(scheme, "w", values_, rows, hessian(), *cpu_.kernels);
    const auto codes = numbers_.of<std::uint8_t>(cat(name, ".codes"));
    const auto scales = numbers_.of<float>(cat(name, ".scales"));
    ASSERT_EQ(made.codes.size(), codes.size());
    ASSERT_EQ(made.scales.size(), scales.size());
    // A value half-way between two codes may go the other way in fp32.
    std::size_t other = 0;
    for (std::size_t i = 0; i < codes.size(); ++i) other += codes[i] != made.codes[i];
    EXPECT_LE(other, 2U);
    for (std::size_t i = 0; i < scales.size(); ++i) EXPECT_NEAR(made.scales[i], scales[i], 1e-5 * scales[i]);
    CompressedMatrix theirs = made;
    theirs.codes = codes, theirs.scales = scales;
    EXPECT_NEAR(output_error(made) / output_error(theirs), 1, 1e-3);
    const CompressedScheme nearest = scheme;
    EXPECT_LT(output_error(made), 0.5 * output_error(round_to_nearest(nearest, "w", values_, rows, columns)));
  }
}

/// Without inputs that go together there is nothing to spread.
TEST_F(Gptq, RoundsToNearestWhereInputsAreApart) {
  const Tensor apart = Tensor::zeros(*cpu_.device, {columns, columns}, DType::f32);
  for (std::int64_t i = 0; i < columns; ++i)
    apart.data<float>()[i * columns + i] = i % 5 == 0 ? 0.0f : 1.0f + static_cast<float>(i);
  const CompressedScheme scheme{.kind = CompressedKind::int4, .group = 96};
  const CompressedMatrix made = gptq(scheme, "w", values_, rows, apart, *cpu_.kernels),
                         nearest = round_to_nearest(scheme, "w", values_, rows, columns);
  // A group's largest magnitude lies half-way between two codes.
  for (std::size_t i = 0; i < made.codes.size(); ++i)
    ASSERT_TRUE(made.codes[i] == nearest.codes[i] || (made.codes[i] == 0xf8 && nearest.codes[i] == 0xf9))
        << i;
  EXPECT_EQ(made.scales, nearest.scales);
}

TEST_F(Gptq, RefusesInputsThatOverflow) {
  const Tensor broken = hessian();
  broken.data<float>()[3 * columns + 3] = INFINITY;
  testing::expect_error(ErrorKind::data, "the inputs of w in calibration have no finite products", [&] {
    gptq({.kind = CompressedKind::int4, .group = 64}, "w", values_, rows, broken, *cpu_.kernels);
  });
}

}  // namespace
}  // namespace sherd::models
