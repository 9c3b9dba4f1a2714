#include <gtest/gtest.h>

#include <limits>

#include "support/expect_error.h"
#include "support/kernel_machines.h"

namespace sherd::test {
namespace {

std::vector<std::byte> bits_of(const Tensor& x) {
  return {x.raw(), x.raw() + x.bytes()};
}

template <class Small>
void widen_every_pattern(Machine& m) {
  Tensor small = m.empty({65536}, dtype_of<Small>()), wide = m.empty({65536}, DType::f32);
  for (std::uint32_t i = 0; i < 65536; ++i) small.data<Small>()[i].bits = static_cast<std::uint16_t>(i);
  m.kernels.copy(small, wide);
  for (std::uint32_t i = 0; i < 65536; ++i)
    ASSERT_EQ(std::bit_cast<std::uint32_t>(wide.data<float>()[i]),
              std::bit_cast<std::uint32_t>(static_cast<float>(small.data<Small>()[i])))
        << "pattern " << i << " on " << m.name();
  Tensor back = m.empty({65536}, dtype_of<Small>());
  m.kernels.copy(wide, back);
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
  const Tensor wide = Tensor::of<float>(*m.device, {n}, values);
  Tensor small = m.empty({n}, dtype_of<Small>());
  m.kernels.copy(wide, small);
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
  Machine m(CpuIsa::portable, 1);
  // Just above a tie of bf16 and of fp16, but on it after rounding to fp32 first.
  const Tensor x =
      m.of({4}, DType::f64, {1 + 0x1p-8 + 0x1p-40, 1 + 0x1p-11 + 0x1p-40, -1 - 0x1p-8 - 0x1p-40, 1e300});
  Tensor b = m.empty({4}, DType::bf16), h = m.empty({4}, DType::f16), f = m.empty({4}, DType::f32);
  m.kernels.copy(x, b);
  m.kernels.copy(x, h);
  m.kernels.copy(x, f);
  const double inf = std::numeric_limits<double>::infinity();
  EXPECT_EQ(values_of(b), (std::vector<double>{1 + 0x1p-7, 1, -1 - 0x1p-7, inf}));
  EXPECT_EQ(values_of(h), (std::vector<double>{1 + 0x1p-8, 1 + 0x1p-10, -1 - 0x1p-8, inf}));
  EXPECT_EQ(values_of(f)[0], 1 + 0x1p-8);
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
          ASSERT_EQ(values_of(out), values) << name_of(from) << " to " << name_of(to);
        }
  }
}

TEST(Copy, integers_widen_and_narrow_within_range) {
  Machine m(CpuIsa::portable, 3);
  const std::vector<std::uint16_t> ids{0, 1, 50256, 65535};
  const Tensor x = Tensor::of<std::uint16_t>(*m.device, {4}, ids);
  Tensor narrow = m.empty({4}, DType::i32), wide = m.empty({4}, DType::i64), back = m.empty({4}, DType::u16);
  m.kernels.copy(x, narrow);
  m.kernels.copy(narrow, wide);
  m.kernels.copy(wide, back);
  EXPECT_EQ(narrow.data<std::int32_t>()[2], 50256);
  EXPECT_EQ(wide.data<std::int64_t>()[3], 65535);
  EXPECT_EQ(bits_of(back), bits_of(x));
  Tensor real = m.empty({4}, DType::f32);
  m.kernels.copy(narrow, real);
  EXPECT_EQ(values_of(real), (std::vector<double>{0, 1, 50256, 65535}));

  using testing::expect_error;
  wide.data<std::int64_t>()[1] = -1;
  expect_error(ErrorKind::data, "value -1 at position 1 does not fit uint16",
               [&] { m.kernels.copy(wide, back); });
  wide.data<std::int64_t>()[1] = std::int64_t{1} << 40;
  expect_error(ErrorKind::data, "does not fit int32", [&] { m.kernels.copy(wide, narrow); });
  narrow.data<std::int32_t>()[0] = -5;
  m.kernels.copy(narrow, wide);
  EXPECT_EQ(wide.data<std::int64_t>()[0], -5);
  expect_error(ErrorKind::usage, "fp32 to int32 would lose fractions", [&] { m.kernels.copy(real, narrow); });
  expect_error(ErrorKind::usage, "differ in their number",
               [&] { m.kernels.copy(real, m.empty({5}, DType::f32)); });
}

TEST(Fill, writes_one_value_of_any_dtype) {
  Machine m(CpuIsa::portable, 3);
  for (const DType dtype : floating_dtypes) {
    Tensor x = m.empty({70001}, dtype);
    m.kernels.fill(x, -1.5);
    EXPECT_EQ(values_of(x), std::vector<double>(70001, -1.5));
  }
  Tensor ids = m.empty({3}, DType::i32);
  m.kernels.fill(ids, -100);
  EXPECT_EQ(ids.data<std::int32_t>()[2], -100);
  testing::expect_error(ErrorKind::usage, "0.5 is not a value of int32", [&] { m.kernels.fill(ids, 0.5); });
  testing::expect_error(ErrorKind::usage, "is not a value of uint8",
                        [&] { m.kernels.fill(m.empty({1}, DType::u8), 256); });
  m.kernels.fill(m.empty({0}, DType::f32), 1);
}

}  // namespace
}  // namespace sherd::test
