#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "support/expect_error.h"
#include "support/gpu/kernel_machines.h"

namespace sherd::test {
namespace {

template <class Small>
void widen_every_pattern(Machine& m) {
  std::vector<Small> patterns(65536);
  for (std::uint32_t i = 0; i < 65536; ++i) patterns[i].bits = static_cast<std::uint16_t>(i);
  Tensor wide = m.empty({65536}, DType::f32), back = m.empty({65536}, dtype_of<Small>());
  m.kernels.copy(m.holding({65536}, patterns), wide);
  m.kernels.copy(wide, back);
  wide = m.host(wide), back = m.host(back);
  for (std::uint32_t i = 0; i < 65536; ++i)
    ASSERT_EQ(std::bit_cast<std::uint32_t>(wide.data<float>()[i]),
              std::bit_cast<std::uint32_t>(static_cast<float>(patterns[i])))
        << "pattern " << i << " on " << m.name();
  for (std::uint32_t i = 0; i < 65536; ++i)
    if (!std::isnan(static_cast<double>(wide.data<float>()[i])))
      ASSERT_EQ(back.data<Small>()[i].bits, i) << m.name();
    else
      ASSERT_TRUE(std::isnan(static_cast<float>(back.data<Small>()[i]))) << m.name();
}

TEST(Copy, widens_every_16_bit_pattern_and_brings_it_back) {
  for (const auto& machine : all_machines()) {
    widen_every_pattern<bf16>(*machine);
    widen_every_pattern<f16>(*machine);
    if (HasFatalFailure()) return;
  }
}

template <class Small>
void narrow_like_base(Machine& m, const std::vector<float>& values) {
  const auto n = static_cast<std::int64_t>(values.size());
  Tensor small = m.empty({n}, dtype_of<Small>());
  m.kernels.copy(m.holding({n}, values), small);
  small = m.host(small);
  for (std::size_t i = 0; i < values.size(); ++i)
    ASSERT_EQ(small.data<Small>()[i].bits, Small(values[i]).bits)
        << "of bits " << std::bit_cast<std::uint32_t>(values[i]) << " on " << m.name();
}

TEST(Copy, narrows_fp32_as_base_does_around_every_tie) {
  std::vector<float> values;
  for (std::uint32_t high = 0; high < 65536; high += 3)
    for (const std::uint32_t low : {0u, 1u, 0x0fffu, 0x1000u, 0x1001u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      const float value = std::bit_cast<float>(high << 16 | low);
      const float magnitude = std::fabs(value);
      // Numbers below fp32's normal range are flushed by some conversions and kept by others; all are far
      // below fp16's.
      if (magnitude == 0 || !(magnitude < 0x1p-126f)) values.push_back(value);
    }
  for (const auto& machine : all_machines()) {
    narrow_like_base<bf16>(*machine, values);
    narrow_like_base<f16>(*machine, values);
    if (HasFatalFailure()) return;
  }
}

TEST(Copy, from_fp64_rounds_once) {
  const double inf = std::numeric_limits<double>::infinity();
  for (const auto& machine : all_machines()) {
    Machine& m = *machine;
    SCOPED_TRACE(m.name());
    // Just above a tie of bf16 and of fp16, but on it after rounding to fp32 first.
    const Tensor x =
        m.of({4}, DType::f64, {1 + 0x1p-8 + 0x1p-40, 1 + 0x1p-11 + 0x1p-40, -1 - 0x1p-8 - 0x1p-40, 1e300});
    Tensor b = m.empty({4}, DType::bf16), h = m.empty({4}, DType::f16), f = m.empty({4}, DType::f32);
    m.kernels.copy(x, b);
    m.kernels.copy(x, h);
    m.kernels.copy(x, f);
    EXPECT_EQ(values_of(m.host(b)), (std::vector<double>{1 + 0x1p-7, 1, -1 - 0x1p-7, inf}));
    EXPECT_EQ(values_of(m.host(h)), (std::vector<double>{1 + 0x1p-8, 1 + 0x1p-10, -1 - 0x1p-8, inf}));
    EXPECT_EQ(values_of(m.host(f))[0], 1 + 0x1p-8);
  }
}

TEST(Copy, every_floating_pair_agrees_on_values_that_all_can_hold) {
  for (const std::int64_t n : {0, 1, 37, 70001}) {
    std::vector<double> values(static_cast<std::size_t>(n));
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<double>(i % 255) - 127;
    for (const auto& machine : all_machines())
      for (const DType from : floating_dtypes)
        for (const DType to : floating_dtypes) {
          Machine& m = *machine;
          Tensor out = m.empty({n}, to);
          m.kernels.copy(m.of({n}, from, values), out);
          ASSERT_EQ(values_of(m.host(out)), values) << name_of(from) << " to " << name_of(to);
        }
  }
}

template <class T>
std::vector<T> elements(Machine& m, const Tensor& x) {
  const Tensor here = m.host(x);
  return {here.data<T>(), here.data<T>() + here.numel()};
}

void expect_integers_convert(Machine& m) {
  const std::vector<std::uint16_t> ids{0, 1, 50256, 65535};
  const Tensor x = m.holding({4}, ids);
  Tensor narrow = m.empty({4}, DType::i32), wide = m.empty({4}, DType::i64), back = m.empty({4}, DType::u16);
  m.kernels.copy(x, narrow);
  m.kernels.copy(narrow, wide);
  m.kernels.copy(wide, back);
  EXPECT_EQ(elements<std::int32_t>(m, narrow), (std::vector<std::int32_t>{0, 1, 50256, 65535}));
  EXPECT_EQ(elements<std::int64_t>(m, wide), (std::vector<std::int64_t>{0, 1, 50256, 65535}));
  EXPECT_EQ(elements<std::uint16_t>(m, back), ids);
  Tensor real = m.empty({4}, DType::f32);
  m.kernels.copy(narrow, real);
  EXPECT_EQ(values_of(m.host(real)), (std::vector<double>{0, 1, 50256, 65535}));

  using testing::expect_error;
  wide = m.holding<std::int64_t>({4}, {0, -1, 50256, -7});
  expect_error(ErrorKind::data, "value -1 at position 1 does not fit uint16",
               [&] { m.kernels.copy(wide, back); });
  wide = m.holding<std::int64_t>({4}, {0, std::int64_t{1} << 40, 50256, 65535});
  expect_error(ErrorKind::data, "value 1099511627776 at position 1 does not fit int32",
               [&] { m.kernels.copy(wide, narrow); });
  m.kernels.copy(m.ids({4}, {-5, 1, 2, 3}), wide);
  EXPECT_EQ(elements<std::int64_t>(m, wide)[0], -5);
  expect_error(ErrorKind::data, "value -5 at position 0 does not fit uint8", [&] {
    m.kernels.copy(m.ids({4}, {-5, 1, 2, 3}), m.empty({4}, DType::u8));
  });
  expect_error(ErrorKind::usage, "fp32 to int32 would lose fractions", [&] { m.kernels.copy(real, narrow); });
  expect_error(ErrorKind::usage, "differ in their number",
               [&] { m.kernels.copy(real, m.empty({5}, DType::f32)); });
}

TEST(Copy, integers_widen_and_narrow_within_range) {
  for (const auto& machine : all_machines()) {
    SCOPED_TRACE(machine->name());
    expect_integers_convert(*machine);
  }
}

TEST(Fill, writes_one_value_of_any_dtype) {
  for (const auto& machine : all_machines()) {
    Machine& m = *machine;
    SCOPED_TRACE(m.name());
    for (const DType dtype : floating_dtypes)
      for (const std::int64_t skipped : {0, 1}) {
        Tensor x = m.empty({70001}, dtype);
        m.kernels.fill(x, 0);
        m.kernels.fill(x.range(skipped, 70000), -1.5);
        const std::vector<double> got = values_of(m.host(x));
        EXPECT_EQ(got.back(), 0);
        EXPECT_EQ(std::count(got.begin(), got.end(), -1.5), 70000 - skipped);
      }
    Tensor ids = m.empty({3}, DType::i32);
    m.kernels.fill(ids, -100);
    EXPECT_EQ(elements<std::int32_t>(m, ids)[2], -100);
    testing::expect_error(ErrorKind::usage, "0.5 is not a value of int32", [&] { m.kernels.fill(ids, 0.5); });
    testing::expect_error(ErrorKind::usage, "is not a value of uint8",
                          [&] { m.kernels.fill(m.empty({1}, DType::u8), 256); });
    m.kernels.fill(m.empty({0}, DType::f32), 1);
  }
}

}  // namespace
}  // namespace sherd::test
