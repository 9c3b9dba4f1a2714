#include "optim/device_update.h"

#include <gtest/gtest.h>

#include <limits>

#include "optim/cuda/dispatch.h"
#include "optim/quantized.h"
#include "optim/span_fixture.h"
#include "simt/emulated.h"
#include "support/expect_error.h"
#include "support/gpu/gpu.h"

namespace sherd::optim {
namespace {

using test::gpu_run;

/// Where the update of a device runs in these tests: on the emulator, or in CTest's `gpu` runs on a GPU.
class Side {
 public:
  explicit Side(std::shared_ptr<device::Device> device) : device_(std::move(device)) {}

  bool update(std::span<const SpanUpdate> spans, const Hyper& h, std::int64_t step) {
    if (!gpu_run()) return test::emulated_update(spans, h, step, *device_);
    std::vector<SpanUpdate> moved(spans.begin(), spans.end());
    std::vector<Upload> all;
    for (SpanUpdate& u : moved) {
      const auto upload = [&](auto*& pointer, std::size_t element, std::int64_t count = 0) {
        if (!pointer) return;
        all.emplace_back(*device_, const_cast<void*>(static_cast<const void*>(pointer)),
                         element * static_cast<std::size_t>(count > 0 ? count : u.n));
        pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(all.back().there());
      };
      upload(u.master, 4), upload(u.low, 2), upload(u.grad, size_of(u.grad_dtype));
      upload(u.moments[0], size_of(u.moment_dtype)), upload(u.moments[1], size_of(u.moment_dtype));
      upload(u.param, size_of(u.param_dtype));
      for (float*& scale : u.scales) upload(scale, 4, (u.n + quantized_block - 1) / quantized_block);
    }
    FiniteCheck check(*device_);
    optim::update(moved, h, step, *device_, check);
    const bool finite = check.finite();
    for (Upload& each : all) each.bring_back();
    device_->synchronize();
    return finite;
  }
  bool update(const SpanUpdate& span, const Hyper& h, std::int64_t step) {
    return update(std::span(&span, 1), h, step);
  }
  bool update(Span& span, const Hyper& h, std::int64_t step) { return update(span.all(), h, step); }

  void split(const float* master, void* high, std::uint16_t* low, std::int64_t n) {
    if (!gpu_run()) return test::emulated_split_master(master, high, low, n, *device_);
    Upload from(*device_, const_cast<float*>(master), 4 * n), upper(*device_, high, 2 * n),
        lower(*device_, low, 2 * n);
    optim::split_master(from.as<float>(), upper.there(), lower.as<std::uint16_t>(), n, *device_);
    upper.bring_back(), lower.bring_back(), device_->synchronize();
  }
  void join(const void* high, const std::uint16_t* low, float* master, std::int64_t n) {
    if (!gpu_run()) return test::emulated_join_master(high, low, master, n, *device_);
    Upload to(*device_, master, 4 * n), upper(*device_, const_cast<void*>(high), 2 * n),
        lower(*device_, const_cast<std::uint16_t*>(low), 2 * n);
    optim::join_on_gpu(*device_, upper.there(), lower.as<std::uint16_t>(), to.as<float>(), n);
    to.bring_back(), device_->synchronize();
  }
  void round(const float* master, void* to, DType dtype, std::int64_t n) {
    if (!gpu_run()) return test::emulated_round_masters(master, to, dtype, n, *device_);
    Upload from(*device_, const_cast<float*>(master), 4 * n),
        rounded(*device_, to, size_of(dtype) * static_cast<std::size_t>(n));
    optim::round_masters(from.as<float>(), rounded.there(), dtype, n, *device_);
    rounded.bring_back(), device_->synchronize();
  }

 private:
  /// A copy of host memory on the device, as far from an aligned address as the original.
  class Upload {
   public:
    Upload(device::Device& device, void* here, std::size_t bytes)
        : device_(&device),
          here_(here),
          bytes_(bytes),
          offset_(reinterpret_cast<std::uintptr_t>(here) % 16),
          memory_(device.allocate(bytes + 16, device::Category::workspace)) {
      device.copy(there(), here, bytes);
    }
    Upload(device::Device& device, void* here, std::int64_t bytes)
        : Upload(device, here, static_cast<std::size_t>(bytes)) {}
    void* there() { return memory_.data() + offset_; }
    template <class T>
    T* as() {
      return static_cast<T*>(there());
    }
    void bring_back() { device_->copy(here_, there(), bytes_); }

   private:
    device::Device* device_;
    void* here_;
    std::size_t bytes_, offset_;
    device::Storage memory_;
  };

  std::shared_ptr<device::Device> device_;
};

class DeviceUpdate : public ::testing::Test {
 protected:
  void SetUp() override {
    std::shared_ptr<device::Device> device =
        gpu_run() ? test::first_gpu_or_skip() : device::make_cpu_device(1);
    if (device) side = std::make_unique<Side>(device);
  }
  std::unique_ptr<Side> side;
};

/// Three steps on the CPU and on the device from the same start, compared after each.
void expect_same_as_on_cpu(Side& side, const Span& start, const Hyper& hyper, std::int64_t first_element) {
  Arena arena(1);
  Span want = start, got = start;
  for (int step = 1; step <= 3; ++step) {
    SpanUpdate on_cpu = want.all(), on_device = got.all();
    on_cpu.first_element = on_device.first_element = first_element;
    on_cpu.grad_factor = on_device.grad_factor = 0.37;
    const bool finite = update(on_cpu, hyper, step, arena);
    ASSERT_EQ(side.update(on_device, hyper, step), finite);
    ASSERT_TRUE(got == want) << "step " << step;
  }
  ASSERT_FALSE(got == start);
}

TEST_F(DeviceUpdate, HasTheBitsOfTheCpu) {
  Arena arena(1);
  for (const Hyper& hyper : every_rule())
    for (const DType grads : {DType::f32, DType::bf16, DType::f16})
      for (const DType moments : {DType::f32, DType::bf16})
        for (const std::string master : {"fp32", "bf16", "fp16", "split"}) {
          SCOPED_TRACE(
              cat("gradients ", name_of(grads), ", moments ", name_of(moments), ", masters ", master));
          const DType params = master == "split" ? DType::bf16 : *parse_dtype(master);
          Span span = random_span(1037, grads, params, moments);
          if (master == "split") span = span.as_split(arena);
          expect_same_as_on_cpu(*side, span, hyper, 0);
          expect_same_as_on_cpu(*side, span, hyper,
                                1'000'000);  // over tiles of the noise, packs still possible
          expect_same_as_on_cpu(*side, span, hyper, 1'000'003);
          if (HasFatalFailure()) return;
        }
}

TEST_F(DeviceUpdate, HasTheBitsOfTheCpuOverManyTiles) {
  Arena arena(1);
  for (const Hyper& hyper : every_rule())
    for (const DType moments : {DType::f32, DType::bf16})
      expect_same_as_on_cpu(*side, random_span(70'001, DType::bf16, DType::bf16, moments).as_split(arena),
                            hyper, 64);
}

TEST_F(DeviceUpdate, CutsAndAddressesDoNotShow) {
  Arena arena(1);
  const std::int64_t n = 9001;
  for (const Hyper& hyper : every_rule()) {
    const Span start = random_span(static_cast<std::size_t>(n), DType::bf16, DType::f16, DType::bf16);
    Span whole = start, cut = start;
    ASSERT_TRUE(update(whole.all(), hyper, 7, arena));
    std::int64_t begin = 0;
    for (std::int64_t size = 1; begin < n; size = size * 3 + 1) {
      const std::int64_t end = std::min(begin + size, n);
      ASSERT_TRUE(side->update(cut.update(begin, end), hyper, 7));
      begin = end;
    }
    EXPECT_TRUE(cut == whole);
  }
}

/// Spans of all sizes and alignments, some without decay, some of another kind: one after the other on the
/// CPU, all in one call on the device.
TEST_F(DeviceUpdate, ManySpansAtOnceHaveTheBitsOfEachAlone) {
  Arena arena(1);
  for (const Hyper& hyper : every_rule())
    for (const DType moments : {DType::f32, DType::bf16}) {
      std::vector<Span> want;
      for (std::size_t i = 0; i < 75; ++i) {  // more than two kernels take
        const std::size_t n = i % 9 == 4 ? 9000 + i : i % 5 == 0 ? i : 64 * (1 + i % 3);
        const DType grads = i / 10 == 3 ? DType::f32 : DType::bf16;
        Span span = random_span(n, grads, DType::bf16, moments, i);
        want.push_back(i / 10 == 5 ? std::move(span) : span.as_split(arena));
      }
      std::vector<Span> got = want;
      const auto spans_of = [](std::vector<Span>& all) {
        std::vector<SpanUpdate> out;
        for (std::size_t i = 0; i < all.size(); ++i) {
          out.push_back(all[i].all());
          out.back().first_element = static_cast<std::int64_t>(i) * 1001;
          out.back().rounding = {17, i};
          out.back().decay = i % 4 != 1;
          out.back().grad_factor = i < 65 ? 0.5 : 0.25;
        }
        return out;
      };
      for (int step = 1; step <= 2; ++step) {
        for (const SpanUpdate& span : spans_of(want)) ASSERT_TRUE(update(span, hyper, step, arena));
        ASSERT_TRUE(side->update(spans_of(got), hyper, step));
        for (std::size_t i = 0; i < want.size(); ++i) ASSERT_TRUE(got[i] == want[i]) << "span " << i;
      }
      for (const std::size_t bad : {std::size_t{1}, std::size_t{31}, std::size_t{32}, std::size_t{74}}) {
        std::vector<Span> poisoned = got;
        poisoned[bad].set_grad(0, std::numeric_limits<float>::infinity());
        EXPECT_FALSE(side->update(spans_of(poisoned), hyper, 3)) << "span " << bad;
      }
      EXPECT_TRUE(side->update(std::span<const SpanUpdate>(), hyper, 3));
    }
}

TEST_F(DeviceUpdate, FlushesWhatIsBelowTheNormalRange) {
  Span span = random_span(4096, DType::f32, DType::f32);
  for (std::size_t i = 0; i < 4096; ++i) {
    const int exponent = static_cast<int>(i % 160) - 160;
    span.set_grad(i, std::ldexp(normal_at({4, 1}, i), exponent));
    span.first.set(i, std::abs(std::ldexp(normal_at({4, 2}, i), exponent)));
    span.second.set(i, std::abs(std::ldexp(normal_at({4, 3}, i), exponent)));
    if (i % 3 == 0) span.master[i] = std::ldexp(span.master[i], exponent);
  }
  for (const Hyper& hyper : every_rule()) expect_same_as_on_cpu(*side, span, hyper, 0);
}

TEST_F(DeviceUpdate, ReportsNonFiniteUpdates) {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  for (const std::size_t n : {std::size_t{5}, std::size_t{20'001}})
    for (const DType params : {DType::f32, DType::bf16, DType::f16})
      for (const std::size_t at : {std::size_t{0}, n / 2, n - 1}) {
        SCOPED_TRACE(cat(name_of(params), " at ", at, " of ", n));
        Span span(n, DType::f32, params);
        ASSERT_TRUE(side->update(span, Hyper(), 1));
        for (const float bad : {inf, -inf, nan}) {
          Span poisoned = span;
          poisoned.set_grad(at, bad);
          EXPECT_FALSE(side->update(poisoned, Hyper(), 2));
        }
        Span large = span;
        large.master[at] = params == DType::bf16 ? 3.4e38f : params == DType::f16 ? 65520.0f : inf;
        EXPECT_FALSE(side->update(large, Hyper(), 2));
      }
  for (const Hyper& hyper : every_rule())
    for (const DType moments : {DType::f32, DType::bf16})
      for (const float bad : {inf, -inf, nan}) {
        Span span = random_span(300, DType::f32, DType::bf16, moments);
        ASSERT_TRUE(side->update(span, hyper, 1));
        span.set_grad(257, bad);
        EXPECT_FALSE(side->update(span, hyper, 2)) << config::name_of(hyper.type) << " " << bad;
      }
  Hyper momentum = config::default_rule(config::OptimizerType::sgd);
  momentum.lr = 1e-30, momentum.as<config::SgdOptions>().momentum = 0.5;
  for (const auto& [bits, finite] : {std::pair{0x7f7f0000u, true}, {0x7f7f0001u, false}}) {
    Span span(100, DType::f32, DType::f32, DType::bf16);  // finite, but rounding may end at infinity
    span.set_grad(64, std::bit_cast<float>(bits));
    EXPECT_EQ(side->update(span, momentum, 1), finite);
  }
}

TEST_F(DeviceUpdate, SplitsJoinsAndRoundsMasters) {
  std::vector<float> master;
  for (std::uint32_t high = 0; high < 0x10000; high += 5)
    for (const std::uint32_t low : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu})
      master.push_back(std::bit_cast<float>(high << 16 | low));
  const auto n = static_cast<std::int64_t>(master.size());
  std::vector<std::uint16_t> high(master.size()), low(master.size()), rounded(master.size()),
      halves(master.size());
  std::vector<float> back(master.size());
  side->split(master.data(), high.data(), low.data(), n);
  side->join(high.data(), low.data(), back.data(), n);
  side->round(master.data(), rounded.data(), DType::bf16, n);
  side->round(master.data(), halves.data(), DType::f16, n);
  EXPECT_EQ(std::memcmp(back.data(), master.data(), master.size() * 4), 0);
  for (std::size_t i = 0; i < master.size(); ++i) {
    ASSERT_EQ(high[i], round_master_to_bf16(master[i]).bits);
    ASSERT_EQ(low[i], std::bit_cast<std::uint32_t>(master[i]) & 0xffff);
    ASSERT_EQ(rounded[i], high[i]);
    ASSERT_EQ(halves[i], f16(master[i]).bits);
  }
  side->round(master.data(), back.data(), DType::f32, 7);
  side->split(nullptr, nullptr, nullptr, 0);
}

// The processor's side of optim/device_update.h.

TEST(UpdateOnAProcessorsMemory, IsTheArenas) {
  const auto device = device::make_cpu_device(2);
  Span want = random_span(5000, DType::bf16, DType::bf16), got = want;
  Hyper hyper;
  ASSERT_TRUE(update(want.all(), hyper, 1, device->arena()));
  FiniteCheck check(*device);
  const SpanUpdate span = got.all();
  update(std::span(&span, 1), hyper, 1, *device, check);
  ASSERT_TRUE(check.finite());
  EXPECT_TRUE(got == want);
  std::vector<bf16> rounded(5000);
  round_masters(want.master.data(), rounded.data(), DType::bf16, 5000, *device);
  EXPECT_EQ(std::memcmp(rounded.data(), want.param.bytes.data(), 10000), 0);
  testing::expect_error(ErrorKind::usage, "not int32", [&] {
    round_masters(want.master.data(), rounded.data(), DType::i32, 5000, *device);
  });
}

TEST(FiniteCheck, RemembersUntilItIsAsked) {
  const auto device = device::make_cpu_device(1);
  FiniteCheck check(*device);
  Span good = random_span(10, DType::f32, DType::f32), bad = good;
  bad.set_grad(3, std::numeric_limits<float>::infinity());
  update(std::vector<SpanUpdate>{bad.all(), good.all()}, Hyper(), 1, *device, check);
  EXPECT_FALSE(check.finite());
  EXPECT_TRUE(check.finite());
  update(std::vector<SpanUpdate>{good.all()}, Hyper(), 2, *device, check);
  EXPECT_TRUE(check.finite());
}

/// 8-bit moments: codes and scales, too, in every form of the weights, with a short block at the end.
TEST_F(DeviceUpdate, OfCodesGivesTheBitsOfTheProcessor) {
  constexpr std::int64_t n = 9 * quantized_block + 77, blocks = 10;
  Arena arena(1);
  struct Codes {
    std::vector<std::uint8_t> first, second;
    std::vector<float> scales;
    bool operator==(const Codes&) const = default;
  };
  const auto of = [&](Span& span, Codes& codes) {
    SpanUpdate u = span.all();
    u.moments[0] = codes.first.data(), u.moments[1] = codes.second.data(), u.moment_dtype = DType::u8;
    u.scales[0] = codes.scales.data(), u.scales[1] = codes.scales.data() + blocks;
    return u;
  };
  for (const DType grads : {DType::f32, DType::bf16, DType::f16})
    for (const DType params : {DType::f32, DType::bf16, DType::f16})
      for (const bool split : {false, true}) {
        if (split && params != DType::bf16) continue;
        SCOPED_TRACE(cat(name_of(grads), " ", name_of(params), split ? " split" : ""));
        Span cpu = random_span(n, grads, params);
        if (split) cpu = cpu.as_split(arena);
        Span gpu = cpu;
        Codes here{std::vector<std::uint8_t>(n, 127), std::vector<std::uint8_t>(n),
                   std::vector<float>(2 * blocks)};
        Codes there = here;
        const Hyper hyper = config::default_rule(config::OptimizerType::adamw);
        for (std::int64_t step = 1; step <= 4; ++step) {
          for (std::int64_t i = 0; i < n; ++i) {
            const float usual =
                normal_at({7, static_cast<std::uint64_t>(step)}, static_cast<std::uint64_t>(i)) *
                std::pow(10.0f, -static_cast<float>(i % 7));
            const float g = i / quantized_block == 1 ? 1e-36f : usual;  // a block next to zero
            cpu.set_grad(static_cast<std::size_t>(i), g), gpu.set_grad(static_cast<std::size_t>(i), g);
          }
          ASSERT_TRUE(optim::update(of(cpu, here), hyper, step, arena));
          ASSERT_TRUE(side->update(of(gpu, there), hyper, step));
        }
        EXPECT_EQ(gpu, cpu);
        EXPECT_EQ(there, here);
        gpu.set_grad(n - 1, std::numeric_limits<float>::infinity());
        EXPECT_FALSE(side->update(of(gpu, there), hyper, 5));
      }
}

}  // namespace
}  // namespace sherd::optim
