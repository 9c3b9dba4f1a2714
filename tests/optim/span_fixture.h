#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/random.h"
#include "optim/split_master.h"
#include "optim/update_rule.h"

namespace sherd::optim {

// Storage of n elements of one dtype.
struct Stored {
  DType dtype = DType::f32;
  std::vector<std::byte> bytes;

  Stored(std::size_t n, DType d) : dtype(d), bytes(n * size_of(d)) {}
  std::size_t size() const { return bytes.size() / size_of(dtype); }
  std::byte* at(std::int64_t i) { return bytes.data() + i * static_cast<std::int64_t>(size_of(dtype)); }
  void set(std::size_t i, float value) {
    std::byte* to = at(static_cast<std::int64_t>(i));
    if (dtype == DType::f32) std::memcpy(to, &value, 4);
    if (dtype == DType::bf16) *reinterpret_cast<bf16*>(to) = bf16(value);
    if (dtype == DType::f16) *reinterpret_cast<f16*>(to) = f16(value);
  }
  float get(std::size_t i) const {
    const std::byte* from = bytes.data() + i * size_of(dtype);
    if (dtype == DType::bf16) return static_cast<float>(*reinterpret_cast<const bf16*>(from));
    if (dtype == DType::f16) return static_cast<float>(*reinterpret_cast<const f16*>(from));
    return *reinterpret_cast<const float*>(from);
  }
  bool operator==(const Stored&) const = default;  // to the bit
};

// All memory of one span. Split masters keep their fp32 form only between steps, in `master`, see join().
struct Span {
  std::vector<float> master;
  std::vector<std::uint16_t> low;
  Stored first, second, grad, param;
  bool split = false;

  Span(std::size_t n, DType grads, DType params, DType moments = DType::f32)
      : master(n), first(n, moments), second(n, moments), grad(n, grads), param(n, params) {}

  void set_grad(std::size_t i, float value) { grad.set(i, value); }

  SpanUpdate update(std::int64_t begin, std::int64_t end) {
    SpanUpdate u;
    if (split)
      u.low = low.data() + begin;
    else
      u.master = master.data() + begin;
    u.grad = grad.at(begin), u.grad_dtype = grad.dtype;
    u.moments[0] = first.at(begin), u.moments[1] = second.at(begin), u.moment_dtype = first.dtype;
    u.rounding = {17, stable_hash("block.0.weight")}, u.first_element = begin;
    u.param = param.dtype == DType::f32 ? nullptr : param.at(begin), u.param_dtype = param.dtype;
    u.n = end - begin;
    return u;
  }
  SpanUpdate all() { return update(0, static_cast<std::int64_t>(master.size())); }

  // The same span with its masters split; and the masters of a split span as floats.
  Span as_split(Arena& arena) const {
    Span out = *this;
    out.split = true, out.low.resize(master.size());
    split_master(master.data(), out.param.bytes.data(), out.low.data(),
                 static_cast<std::int64_t>(master.size()), arena);
    std::fill(out.master.begin(), out.master.end(), -123.0f);
    return out;
  }
  Span joined(Arena& arena) const {
    Span out = *this;
    out.split = false, out.low.clear();
    join_master(param.bytes.data(), low.data(), out.master.data(), static_cast<std::int64_t>(master.size()),
                arena);
    return out;
  }

  bool operator==(const Span& other) const {
    const auto same = [](const auto& a, const auto& b) {
      return a.size() == b.size() && (a.empty() || !std::memcmp(a.data(), b.data(), a.size() * sizeof(a[0])));
    };
    const bool copies = param.dtype == DType::f32 || param == other.param;
    return same(master, other.master) && same(low, other.low) && first == other.first &&
           second == other.second && copies;
  }
};

inline Span random_span(std::size_t n, DType grads, DType params, DType moments = DType::f32,
                        std::uint64_t seed = 3) {
  Span span(n, grads, params, moments);
  for (std::size_t i = 0; i < n; ++i) {
    span.master[i] = normal_at({seed, 1}, i) * 0.5f;
    span.set_grad(i, normal_at({seed, 2}, i) * 0.1f);
    span.first.set(i, std::abs(normal_at({seed, 3}, i)) * 0.01f);  // may be a sum of squares
    span.second.set(i, std::abs(normal_at({seed, 4}, i)) * 1e-4f);
  }
  return span;
}

// Every optimizer, and the variants that take another way through a formula or another rule.
inline std::vector<Hyper> every_rule() {
  using config::OptimizerType;
  std::vector<Hyper> out;
  for (const OptimizerType type : config::optimizer_types()) {
    Hyper hyper = config::default_rule(type);
    hyper.lr *= 10, hyper.weight_decay = 0.05;
    out.push_back(hyper);
  }
  Hyper l2 = config::default_rule(OptimizerType::adam), momentum = config::default_rule(OptimizerType::sgd);
  l2.weight_decay = 0.1, l2.as<config::AdamOptions>().adam_w_mode = false;
  momentum.lr = 0.1, momentum.weight_decay = 0.05, momentum.as<config::SgdOptions>().momentum = 0.9;
  Hyper nesterov = momentum, uneven = config::default_rule(OptimizerType::adagrad);
  nesterov.as<config::SgdOptions>().nesterov = true;
  uneven.as<config::AdagradOptions>().lr_decay = 0.1, uneven.weight_decay = 0.05;
  out.insert(out.end(), {l2, momentum, nesterov, uneven});
  return out;
}

inline std::vector<CpuIsa> every_isa() {
  std::vector<CpuIsa> out;
  for (const CpuIsa isa : {CpuIsa::portable, CpuIsa::avx2, CpuIsa::avx512})
    if (isa <= cpu_isa()) out.push_back(isa);
  return out;
}

}  // namespace sherd::optim
