#pragma once

#include <exception>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "support/lazy_cuda.h"
#include "tensor/kernels.h"

namespace sherd::testing {

/// The CPU's kernels on a LazyCudaDevice: queued on its compute stream, over memory that may have been freed
/// by then and is reused in that order, as on a GPU. What they find wrong with their data is thrown by the
/// device's check().
class LazyKernels final : public tensor::Kernels {
 public:
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

  void fill(const Tensor& x, double value) override { later(&Kernels::fill, x, value); }
  void copy(const Tensor& from, const Tensor& to) override {
    if (from.dtype() == to.dtype()) return device_.copy(to.raw(), from.raw(), from.bytes());
    later(&Kernels::copy, from, to);
  }
  void copy_rows(const tensor::StridedRows& from, const tensor::StridedRows& to, std::int64_t rows,
                 std::int64_t columns, bool add) override {
    later(&Kernels::copy_rows, from, to, rows, columns, add);
  }
  void copy_strided(const Tensor& from, const tensor::Strides& strides, const Tensor& to) override {
    later(&Kernels::copy_strided, from, strides, to);
  }
  void sum_axis(const Tensor& x, const tensor::Axis& axis, double factor, const Tensor& out,
                bool add) override {
    later(&Kernels::sum_axis, x, axis, factor, out, add);
  }
  void max_axis(const Tensor& x, const tensor::Axis& axis, const Tensor& out) override {
    later(&Kernels::max_axis, x, axis, out);
  }
  void max_axis_backward(const Tensor& x, const Tensor& y, const Tensor& dy, const tensor::Axis& axis,
                         const Tensor& dx) override {
    later(&Kernels::max_axis_backward, x, y, dy, axis, dx);
  }
  void softmax(const Tensor& x, const tensor::Softmax& args, const Tensor& y) override {
    later(&Kernels::softmax, x, args, y);
  }
  void softmax_backward(const Tensor& y, const Tensor& dy, const tensor::Softmax& args,
                        const Tensor& dx) override {
    later(&Kernels::softmax_backward, y, dy, args, dx);
  }
  void binary_cross_entropy(const Tensor& logits, const Tensor& targets, const Tensor& weights,
                            const Tensor& total) override {
    later(&Kernels::binary_cross_entropy, logits, targets, weights, total);
  }
  void binary_cross_entropy_backward(const Tensor& logits, const Tensor& targets, const Tensor& weights,
                                     const Tensor& factor, const Tensor& dx) override {
    later(&Kernels::binary_cross_entropy_backward, logits, targets, weights, factor, dx);
  }
  void subtract(const Tensor& a, const Tensor& b, const Tensor& out) override {
    later(&Kernels::subtract, a, b, out);
  }
  void divide(const Tensor& a, const Tensor& b, const Tensor& out) override {
    later(&Kernels::divide, a, b, out);
  }
  void add_scaled(const Tensor& from, const Tensor& factor, const Tensor& to, bool add) override {
    later(&Kernels::add_scaled, from, factor, to, add);
  }
  void quotient(const Tensor& a, const Tensor& b, double factor, const Tensor& out) override {
    later(&Kernels::quotient, a, b, factor, out);
  }
  void attend_stored(const Tensor& qkv, const Attention& geometry, const tensor::KeyStore& store,
                     const Tensor& out) override {
    later(&Kernels::attend_stored, qkv, geometry, store, out);
  }
  void merge_attention(const Tensor& part, const Tensor& part_lse, std::int64_t first, bool begin,
                       const Tensor& out, const Tensor& lse) override {
    later(&Kernels::merge_attention, part, part_lse, first, begin, out, lse);
  }
  void route(const Tensor& logits, const Tensor& bias, const tensor::Routing& routing, const Tensor& scores,
             const Tensor& chosen, const Tensor& weights) override {
    later(&Kernels::route, logits, bias, routing, scores, chosen, weights);
  }
  void route_backward(const Tensor& logits, const tensor::Routing& routing, const Tensor& scores,
                      const Tensor& chosen, const Tensor& dweights, const tensor::RouterLossGradients& losses,
                      const Tensor& dlogits) override {
    later(&Kernels::route_backward, logits, routing, scores, chosen, dweights, losses, dlogits);
  }
  void combine_rows(const Tensor& rows, const Tensor& places, const Tensor& weights,
                    const Tensor& out) override {
    later(&Kernels::combine_rows, rows, places, weights, out);
  }
  void combine_rows_backward(const Tensor& rows, const Tensor& places, const Tensor& weights,
                             const Tensor& dout, const Tensor& drows, const Tensor& dweights) override {
    later(&Kernels::combine_rows_backward, rows, places, weights, dout, drows, dweights);
  }
  void matmul(const tensor::Matmul& args) override { later(&Kernels::matmul, args); }
  void sum_rows(const Tensor& x, const Tensor& out, bool add) override {
    later(&Kernels::sum_rows, x, out, add);
  }
  void add(const Tensor& a, const Tensor& b, const Tensor& out) override { later(&Kernels::add, a, b, out); }
  void multiply(const Tensor& a, const Tensor& b, const Tensor& out) override {
    later(&Kernels::multiply, a, b, out);
  }
  void scale(const Tensor& x, double factor, const Tensor& out) override {
    later(&Kernels::scale, x, factor, out);
  }
  void activation(tensor::Activation kind, const Tensor& x, const Tensor& out) override {
    later(&Kernels::activation, kind, x, out);
  }
  void activation_backward(tensor::Activation kind, const Tensor& x, const Tensor& dy,
                           const Tensor& dx) override {
    later(&Kernels::activation_backward, kind, x, dy, dx);
  }
  void tanh(const Tensor& x, const Tensor& out) override { later(&Kernels::tanh, x, out); }
  void tanh_backward(const Tensor& y, const Tensor& dy, const Tensor& dx) override {
    later(&Kernels::tanh_backward, y, dy, dx);
  }
  void relu(const Tensor& x, const Tensor& out) override { later(&Kernels::relu, x, out); }
  void relu_backward(const Tensor& y, const Tensor& dy, const Tensor& dx) override {
    later(&Kernels::relu_backward, y, dy, dx);
  }
  void swiglu(const Tensor& x, const Tensor& out) override { later(&Kernels::swiglu, x, out); }
  void swiglu_backward(const Tensor& x, const Tensor& dy, const Tensor& dx) override {
    later(&Kernels::swiglu_backward, x, dy, dx);
  }
  void dropout(const Tensor& x, const Tensor& residual, float p, tensor::RandomElements random,
               const Tensor& out) override {
    later(&Kernels::dropout, x, residual, p, random, out);
  }
  void dropout_backward(const Tensor& dy, float p, tensor::RandomElements random, const Tensor& dx) override {
    later(&Kernels::dropout_backward, dy, p, random, dx);
  }
  void layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps, const Tensor& y,
                  const Tensor& mean, const Tensor& rstd) override {
    later(&Kernels::layer_norm, x, weight, bias, eps, y, mean, rstd);
  }
  void layer_norm_backward(const Tensor& x, const Tensor& weight, const Tensor& mean, const Tensor& rstd,
                           const Tensor& dy, const Tensor& dx, const Tensor& dweight, const Tensor& dbias,
                           bool add, bool onto_dx) override {
    later(&Kernels::layer_norm_backward, x, weight, mean, rstd, dy, dx, dweight, dbias, add, onto_dx);
  }
  void rms_norm(const Tensor& x, const Tensor& weight, double eps, const Tensor& y,
                const Tensor& rstd) override {
    later(&Kernels::rms_norm, x, weight, eps, y, rstd);
  }
  void rms_norm_backward(const Tensor& x, const Tensor& weight, const Tensor& rstd, const Tensor& dy,
                         const Tensor& dx, const Tensor& dweight, bool add, bool onto_dx) override {
    later(&Kernels::rms_norm_backward, x, weight, rstd, dy, dx, dweight, add, onto_dx);
  }
  void embedding(const Tensor& ids, const Tensor& table, const Tensor& out,
                 const tensor::VocabSlice& slice) override {
    later(&Kernels::embedding, ids, table, out, slice);
  }
  void embedding_backward(const Tensor& ids, const Tensor& dy, const Tensor& dtable, bool add,
                          const tensor::VocabSlice& slice, std::optional<DType> fold) override {
    later(&Kernels::embedding_backward, ids, dy, dtable, add, slice, fold);
  }
  void add_positions(const Tensor& x, const Tensor& table, const Tensor& out,
                     const tensor::Positions& positions) override {
    later(&Kernels::add_positions, x, table, out, positions);
  }
  void add_positions_backward(const Tensor& dy, const Tensor& dtable, bool add,
                              const tensor::Positions& positions) override {
    later(&Kernels::add_positions_backward, dy, dtable, add, positions);
  }
  void rotary(const Tensor& qkv, const Attention& geometry, const tensor::Rotary& rotary, bool transposed,
              const Tensor& out) override {
    later(&Kernels::rotary, qkv, geometry, rotary, transposed, out);
  }
  void attention(const Tensor& qkv, const Attention& geometry, const Tensor& out,
                 const Tensor& lse) override {
    later(&Kernels::attention, qkv, geometry, out, lse);
  }
  void attention_backward(const Tensor& qkv, const Attention& geometry, const Tensor& out, const Tensor& lse,
                          const Tensor& dout, const Tensor& dqkv) override {
    later(&Kernels::attention_backward, qkv, geometry, out, lse, dout, dqkv);
  }
  void cross_entropy(const Tensor& logits, const Tensor& targets, const tensor::VocabSlice& slice,
                     std::int32_t ignored, const Tensor& lse, const Tensor& picked,
                     const Tensor& most) override {
    later(&Kernels::cross_entropy, logits, targets, slice, ignored, lse, picked, most);
  }
  void cross_entropy_total(const Tensor& lse, const Tensor& picked, const Tensor& targets,
                           std::int32_t ignored, const Tensor& lse_all, const Tensor& total,
                           bool add) override {
    later(&Kernels::cross_entropy_total, lse, picked, targets, ignored, lse_all, total, add);
  }
  void cross_entropy_backward(const Tensor& logits, const Tensor& targets, const Tensor& lse,
                              const tensor::VocabSlice& slice, std::int32_t ignored,
                              const Tensor& factor) override {
    later(&Kernels::cross_entropy_backward, logits, targets, lse, slice, ignored, factor);
  }
  void mean_squared_error(const Tensor& x, const Tensor& y, const Tensor& loss) override {
    later(&Kernels::mean_squared_error, x, y, loss);
  }
  void mean_squared_error_backward(const Tensor& x, const Tensor& y, const Tensor& dloss,
                                   const Tensor& dx) override {
    later(&Kernels::mean_squared_error_backward, x, y, dloss, dx);
  }
  void fold(const Tensor& from, DType rounding, const Tensor& to, bool accumulate) override {
    later(&Kernels::fold, from, rounding, to, accumulate);
  }
  using Kernels::sum_of_squares;
  void sum_of_squares(std::span<const Tensor> all, tensor::ExactSum& sum) override {
    device_.synchronize();
    cpu_->sum_of_squares(all, sum);
  }
  void fill_normal(const Tensor& x, RandomKey key, std::int64_t first, double mean, double std) override {
    later(&Kernels::fill_normal, x, key, first, mean, std);
  }
  void dequantize(const Tensor& blocks, const Tensor& out) override {
    later(&Kernels::dequantize, blocks, out);
  }
  void fill_uniform(const Tensor& x, RandomKey key, std::int64_t first, double low, double high) override {
    later(&Kernels::fill_uniform, x, key, first, low, high);
  }

 private:
  /// The same elements, without a share of their storage.
  static Tensor bare(const Tensor& x) {
    if (!x.defined()) return x;
    return Tensor::view_of(device::Storage({x.raw(), x.bytes()}, nullptr), 0, x.shape(), x.dtype());
  }
  static tensor::Matmul bare(tensor::Matmul args) {
    for (Tensor* x : {&args.a, &args.b, &args.c, &args.bias, &args.pre_activation}) *x = bare(*x);
    return args;
  }
  static tensor::StridedRows bare(const tensor::StridedRows& rows) {
    return {bare(rows.tensor), rows.first, rows.stride};
  }
  static tensor::KeyStore bare(const tensor::KeyStore& store) {
    return {bare(store.keys), bare(store.values), bare(store.places)};
  }
  static tensor::Softmax bare(tensor::Softmax args) {
    args.seen = bare(args.seen);
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
  }
  static void note(Key& key, const Attention& geometry) {
    note(key, geometry.heads), note(key, geometry.kv_heads);
    note(key, geometry.causal), note(key, geometry.window);
    note(key, geometry.scale), note(key, geometry.dropout), note(key, geometry.key);
    note(key, geometry.scores), note(key, geometry.positions), note(key, geometry.lengths_vary);
    if (geometry.documents)
      for (const std::int64_t bound : *geometry.documents) note(key, bound);
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
    note(key, args.activation);
  }

  /// Random keys are others in every micro-batch.
  template <class T>
  static bool changes(const T&) {
    return std::is_same_v<T, RandomKey> || std::is_same_v<T, tensor::RandomElements>;
  }
  static bool changes(const Attention& geometry) { return geometry.dropout > 0; }

  template <class... Params, class... Args>
  void later(void (Kernels::*kernel)(Params...), const Args&... args) {
    Key key;
    note(key, kernel);
    (note(key, args), ...);
    queue((changes(args) || ...) ? nullptr : &key,
          [this, kernel, held = std::tuple<std::decay_t<Params>...>(bare(args)...)] {
            std::apply([&](const auto&... each) { (cpu_.get()->*kernel)(each...); }, held);
          });
  }
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
