#pragma once

#include <exception>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "support/gpu/lazy_cuda.h"
#include "tensor/kernel_list.h"

namespace sherd::testing {

/// The CPU's kernels on a LazyCudaDevice: queued on its compute stream, over memory that may have been freed
/// by then and is reused in that order, as on a GPU. What they find wrong with their data is thrown by the
/// device's check().
class LazyKernels final : public tensor::ForwardingKernels<LazyKernels> {
 public:
  using Kernels = tensor::Kernels;
  using Tensor = tensor::Tensor;
  using Attention = tensor::Attention;

  explicit LazyKernels(LazyCudaDevice& device)
      : device_(device), cpu_device_(device::make_cpu_device(1)), cpu_(tensor::make_kernels(*cpu_device_)) {
    watch_ = device_.after_synchronize([found = found_] {
      if (const std::exception_ptr error = std::exchange(*found, nullptr)) std::rethrow_exception(error);
    });
  }
  ~LazyKernels() override {
    try {
      device_.synchronize();  // what is queued uses this object
    } catch (const Error&) {
    }
  }
  device::Device& device() override { return device_; }
  /// Kernels that have run.
  int ran() const { return *ran_; }

  void copy(const Tensor& from, const Tensor& to) override {
    if (from.dtype() == to.dtype()) return device_.copy(to.raw(), from.raw(), from.bytes());
    forward({}, &Kernels::copy, from, to);
  }
  /// A kernel whose result the processor has on return.
  void forward(tensor::KernelFamily, void (Kernels::*kernel)(std::span<const Tensor>, tensor::ExactSum&),
               std::span<const Tensor> all, tensor::ExactSum& sum) {
    device_.synchronize();
    (cpu_.get()->*kernel)(all, sum);
  }
  template <class... Params, class... Args>
  void forward(tensor::KernelFamily, void (Kernels::*kernel)(Params...), Args&... args) {
    Key key;
    note(key, kernel);
    (note(key, args), ...);
    queue((changes(args) || ...) ? nullptr : &key,
          [this, kernel, held = std::tuple<std::decay_t<Params>...>(bare(args)...)] {
            std::apply([&](const auto&... each) { (cpu_.get()->*kernel)(each...); }, held);
          });
  }

 private:
  /// The same elements, without a share of their storage.
  static Tensor bare(const Tensor& x) {
    if (!x.defined()) return x;
    return Tensor::view_of(device::Storage({x.raw(), x.bytes()}, nullptr), 0, x.shape(), x.dtype());
  }
  static tensor::Matmul bare(tensor::Matmul args) {
    for (Tensor* x : {&args.a, &args.b, &args.c, &args.bias, &args.pre_activation}) *x = bare(*x);
    args.fp8_a = bare(args.fp8_a), args.fp8_b = bare(args.fp8_b);
    return args;
  }
  static tensor::Fp8Matrix bare(tensor::Fp8Matrix x) {
    x.codes = bare(x.codes), x.scales = bare(x.scales);
    return x;
  }
  static tensor::StridedRows bare(const tensor::StridedRows& rows) {
    return {bare(rows.tensor), rows.first, rows.stride};
  }
  static tensor::KeyStore bare(const tensor::KeyStore& store) {
    return {bare(store.keys), bare(store.values), bare(store.places)};
  }
  static tensor::StateStore bare(const tensor::StateStore& store) {
    return {bare(store.states), bare(store.places)};
  }
  static tensor::Softmax bare(tensor::Softmax args) {
    args.seen = bare(args.seen), args.distances = bare(args.distances);
    return args;
  }
  static tensor::RouterLossGradients bare(tensor::RouterLossGradients losses) {
    losses.balance = bare(losses.balance);
    return losses;
  }
  template <class T>
  static T bare(const T& value) {
    return value;
  }

  /// All that a kernel's work depends on, as bytes.
  using Key = std::vector<std::byte>;
  template <class T>
  static void note(Key& key, const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    const auto bytes = device::bytes_of(value);
    key.insert(key.end(), bytes.begin(), bytes.end());
  }
  static void note(Key& key, const Tensor& x) {
    note(key, x.defined());
    if (!x.defined()) return;
    note(key, x.raw()), note(key, x.dtype());
    for (const std::int64_t extent : x.shape().dims()) note(key, extent);
  }
  static void note(Key& key, const tensor::StridedRows& rows) {
    note(key, rows.tensor), note(key, rows.first), note(key, rows.stride);
  }
  static void note(Key& key, const tensor::Softmax& args) {
    note(key, args.scale), note(key, args.log), note(key, args.seen), note(key, args.causal_rows);
    note(key, args.distances);
  }
  static void note(Key& key, const Attention& geometry) {
    note(key, geometry.heads), note(key, geometry.kv_heads);
    note(key, geometry.causal), note(key, geometry.window);
    note(key, geometry.scale), note(key, geometry.dropout), note(key, geometry.key);
    note(key, geometry.scores), note(key, geometry.positions), note(key, geometry.lengths_vary);
    note(key, geometry.cap), note(key, geometry.documents);
  }
  static void note(Key& key, const std::shared_ptr<const tensor::Documents>& documents) {
    if (documents)
      for (const std::int64_t bound : *documents) note(key, bound);
  }
  static void note(Key& key, const tensor::DeltaRule& rule) {
    note(key, rule.key_heads), note(key, rule.value_heads), note(key, rule.key_dim);
    note(key, rule.epsilon), note(key, rule.documents);
  }
  static void note(Key& key, const tensor::StateStore& store) {
    note(key, store.states), note(key, store.places);
  }
  static void note(Key& key, const tensor::Rotary& r) {
    note(key, r.base), note(key, r.share), note(key, r.scaling), note(key, r.factor);
    note(key, r.low_freq_factor), note(key, r.high_freq_factor), note(key, r.beta_fast);
    note(key, r.beta_slow), note(key, r.truncate), note(key, r.original_positions);
    note(key, r.query_beta), note(key, r.query_positions), note(key, r.attention_factor);
    if (r.factors.values)
      for (const double factor : *r.factors.values) note(key, factor);
  }
  static void note(Key& key, const tensor::KeyStore& store) {
    note(key, store.keys), note(key, store.values), note(key, store.places);
  }
  static void note(Key& key, const tensor::RouterLossGradients& losses) {
    note(key, losses.balance), note(key, losses.z);
  }
  static void note(Key& key, const tensor::Matmul& args) {
    for (const Tensor* x : {&args.a, &args.b, &args.c, &args.bias, &args.pre_activation}) note(key, *x);
    for (const bool flag : {args.trans_a, args.trans_b, args.accumulate, args.few_rows}) note(key, flag);
    note(key, args.activation), note(key, args.fp8_a), note(key, args.fp8_b);
    note(key, args.stored_b.blocks), note(key, args.stored_b.format);
  }
  static void note(Key& key, const tensor::Fp8Matrix& x) {
    note(key, x.codes), note(key, x.scales), note(key, x.rule), note(key, x.rows), note(key, x.cols);
  }

  /// Random keys are others in every micro-batch.
  template <class T>
  static bool changes(const T&) {
    return std::is_same_v<T, RandomKey> || std::is_same_v<T, tensor::RandomElements>;
  }
  static bool changes(const Attention& geometry) { return geometry.dropout > 0; }

  /// Without a key: work that is another each time.
  void queue(const Key* key, std::function<void()> work) {
    std::function<void()> counted = [work = std::move(work), found = found_, ran = ran_] {
      ++*ran;
      try {
        work();
      } catch (const Error&) {
        if (!*found) *found = std::current_exception();
      }
    };
    if (key)
      device_.submit(device_.compute_stream(), *key, std::move(counted));
    else
      device_.submit_changing(device_.compute_stream(), std::move(counted));
  }

  LazyCudaDevice& device_;
  std::shared_ptr<device::Device> cpu_device_;
  std::unique_ptr<tensor::Kernels> cpu_;
  std::shared_ptr<std::exception_ptr> found_ = std::make_shared<std::exception_ptr>();
  std::shared_ptr<int> ran_ = std::make_shared<int>(0);
  std::shared_ptr<void> watch_;
};

}  // namespace sherd::testing
