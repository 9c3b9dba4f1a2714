#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "base/cpu_isa.h"
#include "base/dtype.h"
#include "base/error.h"
#include "base/random.h"
#include "comm/isa/reduce_kernels.h"

namespace sherd::comm {
namespace {

using Kernel = void (*)(const ReduceArgs&);

std::vector<std::pair<std::string, Kernel>> kernels() {
  std::vector<std::pair<std::string, Kernel>> out{{"portable", portable::reduce}};
  if (cpu_isa() >= CpuIsa::avx2) out.push_back({"avx2", avx2::reduce});
  if (cpu_isa() >= CpuIsa::avx512) out.push_back({"avx512", avx512::reduce});
  return out;
}

std::size_t width(Element e) {
  return size_of(static_cast<DType>(e));
}

float as_float(Element e, const std::byte* p) {
  if (e == Element::f32) {
    float v;
    std::memcpy(&v, p, 4);
    return v;
  }
  std::uint16_t bits;
  std::memcpy(&bits, p, 2);
  if (e == Element::bf16) {
    bf16 v;
    v.bits = bits;
    return static_cast<float>(v);
  }
  f16 v;
  v.bits = bits;
  return static_cast<float>(v);
}

float rounded(Element e, float v) {
  return e == Element::bf16  ? static_cast<float>(bf16(v))
         : e == Element::f16 ? static_cast<float>(f16(v))
                             : v;
}

void put(Element e, std::byte* p, float v) {
  const std::uint16_t half = e == Element::bf16 ? bf16(v).bits : f16(v).bits;
  e == Element::f32 ? std::memcpy(p, &v, 4) : std::memcpy(p, &half, 2);
}

constexpr Element floats[] = {Element::f32, Element::bf16, Element::f16};

float at(Element e, const std::vector<std::byte>& data, std::int64_t i) {
  return as_float(e, &data[static_cast<std::size_t>(i) * width(e)]);
}

std::vector<std::byte> normals(Element e, std::int64_t n, std::uint64_t key, float scale) {
  std::vector<std::byte> out(static_cast<std::size_t>(n) * width(e));
  for (std::int64_t i = 0; i < n; ++i)
    put(e, &out[static_cast<std::size_t>(i) * width(e)],
        normal_at({key, 7}, static_cast<std::uint64_t>(i)) * scale);
  return out;
}

/// Every instruction set, type, rounding, beginning and length around the vectors' own gives the bits of the
/// plain definition.
TEST(ReduceKernels, AgreeWithTheDefinitionToTheBit) {
  constexpr std::int64_t most = 150;
  enum class Onto : std::uint8_t { nothing, out_itself, fp32 };
  int cases = 0;
  for (const int ranks : {1, 2, 3, 4, 5, 8})
    for (const Element in : floats)
      for (const Element out : floats)
        for (const Element rounding : floats)
          for (const Onto onto : {Onto::nothing, Onto::out_itself, Onto::fp32})
            for (const std::int64_t n : {std::int64_t{1}, std::int64_t{15}, std::int64_t{64}, most}) {
              std::vector<std::vector<std::byte>> data;
              for (int r = 0; r < ranks; ++r)
                data.push_back(normals(in, most, static_cast<std::uint64_t>(r), 3));
              const std::vector<std::byte> old = normals(out, most, 99, 1),
                                           wide = normals(Element::f32, most, 98, 1);
              const Element onto_type = onto == Onto::fp32 ? Element::f32 : out;
              std::vector<std::byte> expected = old;
              for (std::int64_t i = 0; i < n; ++i) {
                const auto source = [&](int r) {
                  return rounded(rounding, at(in, data[static_cast<std::size_t>(r)], i));
                };
                float sum = source(0);
                if (onto != Onto::nothing) sum = at(onto_type, onto == Onto::fp32 ? wide : old, i) + sum;
                for (int r = 1; r < ranks; ++r) sum += source(r);
                put(out, &expected[static_cast<std::size_t>(i) * width(out)], sum * 0.3f);
              }
              for (const auto& [name, kernel] : kernels()) {
                std::vector<std::byte> got = old;
                std::vector<const void*> sources;
                for (const auto& d : data) sources.push_back(d.data());
                void* target = got.data();
                ReduceArgs args;
                args.sources = sources.data(), args.ranks = ranks, args.outs = &target, args.outputs = 1;
                args.end = n, args.in = in, args.out = out, args.rounding = rounding;
                args.onto = onto == Onto::nothing ? nullptr : onto == Onto::fp32 ? wide.data() : got.data();
                args.onto_type = onto_type;
                args.factor = 0.3;
                kernel(args);
                ASSERT_EQ(got, expected) << name << ", " << ranks << " ranks, " << n << " of "
                                         << static_cast<int>(in) << " to " << static_cast<int>(out) << " by "
                                         << static_cast<int>(rounding) << " onto " << static_cast<int>(onto);
                ++cases;
              }
            }
  EXPECT_GE(cases, 6 * 27 * 3 * 4);
}

/// Where a range is cut, and at what alignment it begins, does not matter; all outputs get the same.
TEST(ReduceKernels, CutsAndSeveralOutputsDoNotMatter) {
  constexpr std::int64_t n = 333;
  std::vector<float> a(n + 1), b(n + 1);
  for (std::size_t i = 0; i <= n; ++i) a[i] = normal_at({1, 1}, i), b[i] = normal_at({2, 1}, i);
  for (const auto& [name, kernel] : kernels()) {
    const void* sources[] = {a.data() + 1, b.data() + 1};
    std::vector<float> whole(n), first(n, -1), second(n, -1);
    void* one[] = {whole.data()};
    void* two[] = {first.data(), second.data()};
    ReduceArgs args;
    args.sources = sources, args.ranks = 2, args.outs = one, args.outputs = 1, args.end = n;
    kernel(args);
    args.outs = two, args.outputs = 2;
    for (const auto& [begin, end] : {std::pair<std::int64_t, std::int64_t>{200, n}, {0, 7}, {7, 200}}) {
      args.begin = begin, args.end = end;
      kernel(args);
    }
    EXPECT_EQ(std::memcmp(whole.data(), first.data(), n * 4), 0) << name;
    EXPECT_EQ(std::memcmp(whole.data(), second.data(), n * 4), 0) << name;
    EXPECT_EQ(whole[100], a[101] + b[101]);
  }
}

/// Writing past the caches changes no bit, whatever the alignment and length; nothing outside is touched.
TEST(ReduceKernels, StreamingDoesNotMatter) {
  constexpr std::int64_t n = 1000;
  std::vector<float> a(n), b(n), c(n);
  for (std::size_t i = 0; i < n; ++i)
    a[i] = normal_at({1, 2}, i), b[i] = normal_at({2, 2}, i), c[i] = normal_at({3, 2}, i);
  const void* sources[] = {a.data(), b.data()};
  for (const auto& [name, kernel] : kernels())
    for (const Element out : {Element::f32, Element::bf16, Element::f16})
      for (const std::int64_t begin : {0, 1, 5, 17, 40})
        for (const std::int64_t end : {41, 63, 300, 999}) {
          const bool folds = begin % 2 == 1;
          std::vector<std::byte> plain(n * 4 + 64, std::byte{7}), streamed = plain;
          void* outs[] = {plain.data()};
          ReduceArgs args;
          args.sources = sources, args.ranks = 2, args.outs = outs, args.outputs = 1;
          args.begin = begin, args.end = end, args.out = out;
          if (folds) args.onto = c.data(), args.rounding = Element::bf16;
          kernel(args);
          outs[0] = streamed.data(), args.stream = true;
          kernel(args);
          ASSERT_EQ(plain, streamed) << name << " [" << begin << ", " << end << ") to "
                                     << static_cast<int>(out);
        }
}

TEST(ReduceKernels, CopiesPastTheCachesAreCopies) {
  std::vector<std::pair<std::string, void (*)(void*, const void*, std::size_t)>> copies{
      {"portable", portable::copy_past_caches}};
  if (cpu_isa() >= CpuIsa::avx2) copies.push_back({"avx2", avx2::copy_past_caches});
  if (cpu_isa() >= CpuIsa::avx512) copies.push_back({"avx512", avx512::copy_past_caches});
  std::vector<unsigned char> from(3000), to, expected;
  for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<unsigned char>(i * 7 + i / 256);
  for (const auto& [name, copy] : copies)
    for (const std::size_t in : {0, 1, 33})
      for (const std::size_t out : {0, 3, 63})
        for (const std::size_t bytes : {0, 1, 64, 127, 256, 700, 2500}) {
          to.assign(3000, 1), expected = to;
          copy(to.data() + out, from.data() + in, bytes);
          std::copy_n(from.begin() + static_cast<std::ptrdiff_t>(in), bytes,
                      expected.begin() + static_cast<std::ptrdiff_t>(out));
          ASSERT_EQ(to, expected) << name << " " << in << " " << out << " " << bytes;
        }
}

TEST(ReduceKernels, IntegersWrapAndScale) {
  const std::uint8_t a[] = {250, 3}, b[] = {10, 4};
  const std::int32_t c[] = {2147483647, 5}, d[] = {1, 6};
  for (const auto& [name, kernel] : kernels()) {
    std::uint8_t small[2];
    std::int32_t large[2];
    const void* bytes[] = {a, b};
    const void* words[] = {c, d};
    void* to_small[] = {small};
    void* to_large[] = {large};
    ReduceArgs args;
    args.sources = bytes, args.ranks = 2, args.outs = to_small, args.outputs = 1, args.end = 2;
    args.in = args.out = args.rounding = Element::u8;
    kernel(args);
    EXPECT_EQ(small[0], 4);
    EXPECT_EQ(small[1], 7);
    args.sources = words, args.outs = to_large, args.in = args.out = args.rounding = Element::i32;
    kernel(args);
    EXPECT_EQ(large[0], -2147483647 - 1);
    args.factor = 0.5;
    kernel(args);
    EXPECT_EQ(large[1], 6) << "11/2 rounds to even";
  }
}

}  // namespace
}  // namespace sherd::comm
