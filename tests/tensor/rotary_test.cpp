#include <gtest/gtest.h>

#include "support/expect_error.h"
#include "support/gpu/kernel_machines.h"
#include "tensor/rotary_reference.h"

namespace sherd::test {
namespace {

using tensor::Attention;

class Rotary : public ::testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(All, Rotary, ::testing::ValuesIn(floating_dtypes),
                         [](const auto& test) { return std::string(name_of(test.param)); });

TEST_P(Rotary, turns_query_and_key_heads_by_their_position_and_leaves_values) {
  const DType dtype = GetParam();
  for (const auto& [batch, seq, heads, kv_heads, d, turned] : {std::tuple{1, 1, 1, 1, 2, 2},
                                                               {2, 5, 4, 2, 6, 6},
                                                               {3, 20, 6, 1, 64, 64},
                                                               {1, 33, 2, 2, 40, 40},
                                                               {2, 5, 4, 2, 10, 4},
                                                               {1, 9, 2, 1, 64, 16}}) {
    const tensor::Rotary rotary{.share = static_cast<double>(turned) / d};
    const std::int64_t width = (heads + 2 * kv_heads) * d;
    const std::vector<double> x = normals_in(dtype, batch * seq * width, 1);
    Attention geometry;
    geometry.heads = heads, geometry.kv_heads = kv_heads;
    on_every_machine(
        [&, batch = batch, seq = seq](Machine& m) {
          const Shape shape{batch, seq, width};
          Tensor out = m.empty(shape, dtype), in_place = m.of(shape, dtype, x), back = m.empty(shape, dtype);
          m.kernels.rotary(in_place, geometry, rotary, false, out);
          m.kernels.rotary(in_place, geometry, rotary, false, in_place);
          m.kernels.rotary(out, geometry, rotary, true, back);
          return std::vector<Tensor>{out, in_place, back};
        },
        [&, seq = seq, d = d, turned = turned,
         per_group = heads / kv_heads + 2](const std::vector<Tensor>& got) {
          std::vector<double> want(x);
          const std::int64_t half = turned / 2;
          for (std::int64_t h = 0; h < static_cast<std::int64_t>(x.size()) / d; ++h) {
            if (h % per_group == per_group - 1) continue;  // every group's last head is its values
            const auto position = static_cast<double>(h / (width / d) % seq);
            for (std::int64_t i = 0; i < half; ++i) {
              const double angle = position * std::pow(10000.0, -2.0 * static_cast<double>(i) / turned);
              const auto a = static_cast<std::size_t>(h * d + i), b = a + static_cast<std::size_t>(half);
              want[a] = x[a] * std::cos(angle) - x[b] * std::sin(angle);
              want[b] = x[b] * std::cos(angle) + x[a] * std::sin(angle);
            }
          }
          expect_close(values_of(got[0]), want, dtype, 2, 16, "rotary");
          EXPECT_EQ(values_of(got[0]), values_of(got[1])) << "in place";
          expect_close(values_of(got[2]), x, dtype, 2,
                       16 * roundoff(dtype) / (dtype == DType::f64 ? 0x1p-53 : 0x1p-24), "rotated back");
        });
    if (HasFatalFailure()) return;
  }
}

/// Queries grow with their position, keys do not.
TEST_P(Rotary, scales_queries_by_their_position) {
  const DType dtype = GetParam();
  const tensor::Rotary rotary{.query_beta = 0.3, .query_positions = 4};
  constexpr std::int64_t seq = 11, d = 8, half = d / 2, first = 3;
  Attention geometry;  // two query heads, a key head and a value head
  geometry.heads = 2, geometry.kv_heads = 1, geometry.positions.first = first;
  const std::vector<double> x = normals_in(dtype, seq * 4 * d, 1);
  on_every_machine(
      [&](Machine& m) {
        const Tensor in = m.of({1, seq, 4 * d}, dtype, x), out = m.empty(in.shape(), dtype),
                     back = m.empty(in.shape(), dtype);
        m.kernels.rotary(in, geometry, rotary, false, out);
        m.kernels.rotary(in, geometry, rotary, true, back);
        return std::vector<Tensor>{out, back};
      },
      [&](const std::vector<Tensor>& got) {
        std::vector<double> want(x), want_back(x);
        for (std::int64_t h = 0; h < seq * 4; ++h) {
          if (h % 4 == 3) continue;  // values
          const auto position = static_cast<double>(first + h / 4);
          const double scale = h % 4 == 2 ? 1 : 1 + 0.3 * std::log(1 + std::floor(position / 4));
          for (std::int64_t i = 0; i < half; ++i) {
            const double angle = position * std::pow(10000.0, -2.0 * static_cast<double>(i) / d);
            const auto a = static_cast<std::size_t>(h * d + i), b = a + half;
            const double c = scale * std::cos(angle), s = scale * std::sin(angle);
            want[a] = x[a] * c - x[b] * s, want[b] = x[b] * c + x[a] * s;
            want_back[a] = x[a] * c + x[b] * s, want_back[b] = x[b] * c - x[a] * s;
          }
        }
        expect_close(values_of(got[0]), want, dtype, 2, 16, "scaled queries");
        expect_close(values_of(got[1]), want_back, dtype, 2, 16, "their gradients");
      });
}

TEST_P(Rotary, of_a_part_of_a_sequence_gives_the_bits_of_the_whole) {
  const DType dtype = GetParam();
  using tensor::Positions;
  const std::int64_t seq = 24, part = 6, width = 4 * 10;
  const std::vector<double> x = normals_in(dtype, 2 * seq * width, 1);
  for (const Positions& at : {Positions{.first = 9}, Positions{.first = 3, .count = 2, .second = 20},
                              Positions{.first = 17, .count = 4, .second = 0}})
    for (const auto& machine : all_machines()) {
      Machine& m = *machine;
      Attention geometry;
      geometry.heads = 2, geometry.kv_heads = 1;
      std::vector<double> some, want;
      for (std::int64_t b = 0; b < 2; ++b)
        for (std::int64_t row = 0; row < part; ++row) {
          const std::int64_t position =
              row < at.count || at.count == 0 ? at.first + row : at.second + row - at.count;
          const auto begin = x.begin() + (b * seq + position) * width;
          some.insert(some.end(), begin, begin + width);
        }
      const Tensor turned = m.of({2, part, width}, dtype, some), all = m.of({2, seq, width}, dtype, x);
      geometry.positions = at;
      m.kernels.rotary(turned, geometry, {}, false, turned);  // makes the angles that it needs
      geometry.positions = {};
      m.kernels.rotary(all, geometry, {}, false, all);
      const std::vector<double> whole = values_of(m.host(all));
      for (std::int64_t b = 0; b < 2; ++b)
        for (std::int64_t row = 0; row < part; ++row) {
          const std::int64_t position =
              row < at.count || at.count == 0 ? at.first + row : at.second + row - at.count;
          const auto begin = whole.begin() + (b * seq + position) * width;
          want.insert(want.end(), begin, begin + width);
        }
      EXPECT_EQ(values_of(m.host(turned)), want) << m.name();
    }
}

TEST(RotaryAngles, are_scaled_as_transformers_scales_them) {
  for (const RotaryReference& want : rotary_references) {
    SCOPED_TRACE(want.name);
    tensor::check(want.rotary);
    EXPECT_NEAR(attention_scale(want.rotary), want.scale, 1e-15);
    const auto half = static_cast<std::int64_t>(want.frequencies.size());
    ASSERT_EQ(2 * half, want.head);
    const std::vector<double> got = rotary_frequencies(want.rotary, half);
    for (std::size_t i = 0; i < got.size(); ++i)
      EXPECT_NEAR(got[i], want.frequencies[i], 2e-6 * want.frequencies[i]) << "pair " << i;
  }
}

/// Up to max_position_embeddings, which is as long as sequences get, transformers leaves them as they are.
TEST(RotaryAngles, of_dynamic_scaling_are_not_scaled) {
  tensor::Rotary plain, dynamic;
  dynamic.scaling = RotaryScaling::dynamic, dynamic.factor = 4;
  EXPECT_EQ(tensor::rotary_frequencies(dynamic, 32), tensor::rotary_frequencies(plain, 32));
  EXPECT_EQ(tensor::attention_scale(dynamic), 1);
}

TEST_P(Rotary, scaled_turns_a_head_as_transformers_does) {
  for (const RotaryReference& want : rotary_references) {
    SCOPED_TRACE(want.name);
    Attention geometry;
    geometry.positions = {.first = rotary_reference_position};
    std::vector<double> x;  // one query, one key and one value head
    for (int part = 0; part < 3; ++part)
      for (std::int64_t i = 0; i < want.head; ++i) x.push_back(static_cast<double>(i % 7 - 3));
    std::vector<double> turned(want.turned);
    turned.insert(turned.end(), want.turned.begin(), want.turned.end());
    turned.insert(turned.end(), x.begin(), x.begin() + want.head);
    on_every_machine(
        [&](Machine& m) {
          const Tensor qkv = m.of({1, 1, 3 * want.head}, GetParam(), x),
                       out = m.empty(qkv.shape(), GetParam()), back = m.empty(qkv.shape(), GetParam());
          m.kernels.rotary(qkv, geometry, want.rotary, false, out);
          m.kernels.rotary(out, geometry, want.rotary, true, back);
          return std::vector<Tensor>{out, back};
        },
        [&](const std::vector<Tensor>& got) {
          // transformers rounds angles to fp32; the largest is 37.
          const double off = 8 * roundoff(GetParam()) + 4e-6;
          const std::vector<double> out = values_of(got[0]), back = values_of(got[1]);
          for (std::size_t i = 0; i < x.size(); ++i) {
            EXPECT_NEAR(out[i], turned[i], 6 * off) << i;
            // Turned back, and longer by the factor once more.
            const double longer = i < 2 * static_cast<std::size_t>(want.head) ? want.scale * want.scale : 1;
            EXPECT_NEAR(back[i], x[i] * longer, 16 * off) << i;
          }
        });
  }
}

TEST(RotaryAngles, follow_a_change_of_geometry) {
  Machine m(CpuIsa::portable, 1);
  const auto rotate = [](Machine& machine, std::int64_t seq, const tensor::Rotary& rotary, DType dtype) {
    Tensor x = machine.empty({1, seq, 12}, dtype);
    machine.kernels.fill(x, 1);
    machine.kernels.rotary(x, {}, rotary, false, x);
    return values_of(x);
  };
  const auto check = [&](std::int64_t seq, const tensor::Rotary& rotary, DType dtype) {
    Machine fresh(CpuIsa::portable, 1);
    EXPECT_EQ(rotate(m, seq, rotary, dtype), rotate(fresh, seq, rotary, dtype));
  };
  check(4, {}, DType::f32);
  check(9, {}, DType::f32);
  check(3, {}, DType::bf16);
  check(9, {.base = 5e5}, DType::f32);
  check(9, {.base = 5e5, .scaling = RotaryScaling::linear, .factor = 2}, DType::f32);
  check(9, {.base = 5e5, .scaling = RotaryScaling::linear, .factor = 4}, DType::f32);
  check(9, {.base = 5e5, .attention_factor = 1.5}, DType::f32);
  check(9, {.base = 5e5}, DType::f64);
}

TEST(RotaryErrors, name_the_geometry) {
  Machine m(CpuIsa::portable, 1);
  Attention geometry;
  geometry.heads = 3, geometry.kv_heads = 2;
  const Tensor x = m.empty({1, 2, 12}, DType::f32);
  using testing::expect_error;
  expect_error(ErrorKind::usage, "3 heads cannot share 2",
               [&] { m.kernels.rotary(x, geometry, {}, false, x); });
  geometry.kv_heads = 3;
  geometry.positions.first = -1;
  const Tensor nine = m.empty({1, 2, 18}, DType::f32);
  expect_error(ErrorKind::usage, "rotary: positions must not be negative",
               [&] { m.kernels.rotary(nine, geometry, {}, false, nine); });
  geometry.heads = 2, geometry.kv_heads = 1;
  expect_error(ErrorKind::usage, "a width of 12 does not hold 2 query and 1",
               [&] { m.kernels.rotary(x, geometry, {}, false, x); });
}

TEST(RotaryErrors, name_what_makes_no_angles) {
  const auto refuses = [](const tensor::Rotary& rotary, const char* text) {
    testing::expect_error(ErrorKind::usage, text, [&] { tensor::check(rotary); });
  };
  refuses({.base = 0}, "the base must be positive, not 0");
  refuses({.scaling = RotaryScaling::longrope}, "longrope needs a factor for each pair");
  refuses({.scaling = RotaryScaling::longrope,
           .factors = {std::make_shared<std::vector<double>>(std::vector{1.0, 0.0})}},
          "longrope's factors must be positive, not 0");
  refuses({.query_beta = 0.1}, "query_beta needs query_positions");
  refuses({.attention_factor = -1}, "attention_factor must not be negative, as -1");
  refuses({.scaling = RotaryScaling::linear, .factor = 0}, "the factor must be positive, not 0");
  for (const RotaryScaling scaling : {RotaryScaling::llama3, RotaryScaling::yarn})
    refuses({.scaling = scaling, .factor = 2}, "need original_positions");
  refuses({.scaling = RotaryScaling::llama3, .low_freq_factor = 4, .original_positions = 8},
          "low_freq_factor 4 must be positive and below high_freq_factor 4");
  refuses({.scaling = RotaryScaling::yarn, .beta_slow = 33, .original_positions = 8},
          "0 < beta_slow <= beta_fast");
  refuses({.base = 1, .scaling = RotaryScaling::yarn, .original_positions = 8}, "a base above 1");
  Machine m(CpuIsa::portable, 1);
  const Tensor x = m.empty({1, 2, 12}, DType::f32);
  testing::expect_error(ErrorKind::usage, "longrope has 1 factors for the 2 pairs", [&] {
    m.kernels.rotary(
        x, {},
        {.scaling = RotaryScaling::longrope, .factors = {std::make_shared<std::vector<double>>(1, 2.0)}},
        false, x);
  });
  testing::expect_error(ErrorKind::usage, "the base must be positive, not -1",
                        [&] { m.kernels.rotary(x, {}, {.base = -1}, false, x); });
}

}  // namespace
}  // namespace sherd::test
