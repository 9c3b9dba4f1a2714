#include "bench/suite/adam_bench.h"

#include <cmath>
#include <utility>

#include "base/cpu_isa.h"
#include "base/error.h"
#include "engine/report/gemm_probe.h"
#include "engine/report/report.h"
#include "optim/one_bit.h"
#include "optim/quantized.h"
#include "tensor/exact_sum.h"

namespace sherd::bench {
namespace {

using tensor::Tensor;

constexpr std::int64_t grain = 1 << 16;

std::uint16_t* halves(const Tensor& x) {
  return reinterpret_cast<std::uint16_t*>(x.raw());
}

std::int64_t blocks(std::int64_t elements) {
  return (elements + optim::quantized_block - 1) / optim::quantized_block;
}

}  // namespace

AdamBench::AdamBench(std::int64_t parameters, int threads)
    : n_(parameters),
      device_(device::make_cpu_device(threads)),
      kernels_(tensor::make_kernels(*device_)),
      p_(make(DType::f32, 0.5)),
      m_(make(DType::f32, 0)),
      v_(make(DType::f32, 0)),
      g_(make(DType::f32, 0.02)),
      p16_(make(DType::bf16, 0.5)),
      g16_(make(DType::bf16, 0.02)),
      high_(make(DType::bf16, 0.5)),
      low_(make(DType::bf16, 0)),
      m16_(make(DType::bf16, 0)),
      v16_(make(DType::bf16, 0)),
      codes_(Tensor::zeros(*device_, {2 * n_}, DType::u8)),
      scales_(Tensor::zeros(*device_, {2 * blocks(n_)}, DType::f32)),
      error_(make(DType::f32, 0.01)),
      signs_(Tensor::zeros(*device_, {n_ / 8}, DType::u8)) {
  require(n_ > 0 && n_ % 64 == 0, "the number of parameters must be a multiple of 64, not ", n_);
  hyper_.weight_decay = 0.1;
  streams_ = {p_.data<float>(), m_.data<float>(), v_.data<float>(),
              g_.data<float>(), halves(p16_),     halves(g16_)};
  add_cases();
}

Tensor AdamBench::make(DType dtype, double value) {
  Tensor x = Tensor::empty(*device_, {n_}, dtype);
  kernels_->fill(x, value);
  return x;
}

void AdamBench::each(const std::function<void(std::int64_t, std::int64_t)>& body) {
  device_->arena().parallel_for(n_, grain, body);
}

optim::SpanUpdate AdamBench::span(DType grad, Masters masters, DType moments) const {
  optim::SpanUpdate u;
  if (masters == Masters::split)
    u.low = halves(low_);
  else
    u.master = streams_.p;
  u.grad = grad == DType::bf16 ? g16_.raw() : g_.raw(), u.grad_dtype = grad;
  if (moments == DType::u8) {
    u.moments[0] = codes_.raw(), u.moments[1] = codes_.raw() + n_;
    u.scales[0] = scales_.data<float>(), u.scales[1] = u.scales[0] + blocks(n_);
  } else {
    u.moments[0] = moments == DType::bf16 ? m16_.raw() : m_.raw();
    u.moments[1] = moments == DType::bf16 ? v16_.raw() : v_.raw();
  }
  u.moment_dtype = moments, u.rounding = {1, 2};
  u.param = masters == Masters::split ? high_.raw() : p16_.raw(), u.param_dtype = DType::bf16;
  u.n = n_;
  return u;
}

void AdamBench::fused(const optim::SpanUpdate& span) {
  if (!optim::update(span, hyper_, ++step_, device_->arena()))
    fail(ErrorKind::numerics, "the measured AdamW step overflowed; this is a bug in Sherd");
}

// The engine's step: the gradients' norm, then one pass.
void AdamBench::norm_and_fused(optim::SpanUpdate span) {
  tensor::ExactSum squares;
  kernels_->sum_of_squares(g16_, squares);
  span.grad_factor = optim::gradient_factor(std::sqrt(squares.value()), 1, 1);
  fused(span);
}

void AdamBench::pack_momentum() {
  tensor::ExactSum squares;
  optim::MomentumSpan span{g16_.raw(), DType::bf16, 1.0, 0.9};
  span.momentum = streams_.m, span.error = error_.data<float>(), span.n = n_;
  span.signs = reinterpret_cast<std::uint64_t*>(signs_.raw());
  optim::compress_momentum(span, device_->arena(), squares);
  scale_ = optim::one_bit_scale(squares, n_);
}

void AdamBench::update_by_momentum() {
  optim::Hyper one_bit = config::default_rule(config::OptimizerType::onebitadam);
  one_bit.as<config::OneBitAdamOptions>().freeze_step = 0;
  optim::SpanUpdate update = span(DType::bf16, Masters::split, DType::f32);
  update.grad = nullptr;
  const auto* signs = reinterpret_cast<const std::uint64_t*>(signs_.raw());
  if (!optim::update_agreed(update, {signs, scale_, error_.data<float>(), scale_}, one_bit, ++step_,
                            device_->arena()))
    fail(ErrorKind::numerics, "the measured 1-bit Adam step overflowed; this is a bug in Sherd");
}

void AdamBench::add_cases() {
  const DType f32 = DType::f32, bf16 = DType::bf16;
  const auto add = [&](const char* name, const char* what, int bytes, std::function<void()> run) {
    cases_.push_back({name, what, bytes, std::move(run)});
  };
  add("limit", "loads and stores alone", streamed_bytes,
      [this] { each([this](std::int64_t b, std::int64_t e) { move_streams(streams_, b, e); }); });
  add("fused", "fp32 masters and gradients, bf16 copy", 30,
      [=, this] { fused(span(f32, Masters::fp32, f32)); });
  add("fused_grad16", "fp32 masters, bf16 gradients and copy", 28,
      [=, this] { fused(span(bf16, Masters::fp32, f32)); });
  add("split", "split masters, bf16 gradients", 26, [=, this] { fused(span(bf16, Masters::split, f32)); });
  add("split_moments16", "split masters, bf16 gradients and moments", 18,
      [=, this] { fused(span(bf16, Masters::split, bf16)); });
  add("split_moments8", "split masters, bf16 gradients, moments in 8 bits", 14,
      [=, this] { fused(span(bf16, Masters::split, DType::u8)); });
  // Two more bytes: the norm reads the gradients first.
  add("path", "norm + fp32 masters, bf16 gradients and copy", 30,
      [=, this] { norm_and_fused(span(bf16, Masters::fp32, f32)); });
  add("path_split", "norm + split masters, bf16 gradients", 28,
      [=, this] { norm_and_fused(span(bf16, Masters::split, f32)); });
  add("path_moments16", "norm + split masters, bf16 gradients and moments", 20,
      [=, this] { norm_and_fused(span(bf16, Masters::split, bf16)); });
  add("path_moments8", "norm + split masters, bf16 gradients, moments in 8 bits", 16,
      [=, this] { norm_and_fused(span(bf16, Masters::split, DType::u8)); });
  // The work of replicas that exchange momentum, before and after the exchange.
  add("one_bit_pack", "1-bit Adam: bf16 gradients, momentum and error to signs", 14,
      [this] { pack_momentum(); });
  add("one_bit_update", "1-bit Adam: signs to error, momentum and split masters", 24,
      [this] { update_by_momentum(); });
}

BenchReport measure_adam(std::int64_t parameters, int threads, int rounds, const Tell& tell) {
  AdamBench bench(parameters, threads);
  std::vector<Contender> contenders;
  for (const AdamCase& c : bench.cases()) contenders.push_back({c.name, c.run});
  Rounds times(rounds, tell);
  times.run(contenders);

  const auto n = static_cast<double>(parameters);
  BenchReport report{"adam",
                     cat("AdamW step over ", engine::human_count(n), " parameters"),
                     "a loop over the same memory that reads and writes 30 bytes per parameter and computes "
                     "next to nothing; compared by GB/s",
                     {{"processor", "", engine::cpu_model()},
                      {"isa", "instruction set", std::string(name_of(cpu_isa()))},
                      {"parameters", "", parameters},
                      {"threads", "threads", std::int64_t{threads}},
                      {"rounds", "rounds", std::int64_t{rounds}}},
                     {},
                     {}};
  for (const AdamCase& c : bench.cases()) {
    std::vector<ReportField> row{{"case", "", c.name}, {"what", "state", c.what}};
    row.push_back({"bytes_per_parameter", "B/param", std::int64_t{c.bytes}});
    row.push_back({"gparam_per_s", "Gparam/s", n / times.median_seconds(c.name) * 1e-9});
    add_rates(row, times, c.name, c.bytes * n, "limit", streamed_bytes * n, "gb_per_s", "GB/s");
    report.rows.push_back(std::move(row));
  }
  return report;
}

}  // namespace sherd::bench
