#pragma once

#include <array>
#include <chrono>
#include <string_view>

#include "tensor/kernels.h"

namespace sherd::bench {

/// What kernels are grouped into in a table of times.
enum class Family {
  gemm,
  attention,
  norm,
  activation,
  dropout,
  elementwise,
  embedding,
  loss,
  reduction,
  movement,
  routing
};
inline constexpr std::array<std::string_view, 11> family_names{
    "gemm",      "attention", "norm",      "activation", "dropout", "elementwise",
    "embedding", "loss",      "reduction", "movement",   "routing"};

/// Kernels that add up the seconds spent in each family and pass every call on. The clock is read twice per
/// call, which is nothing next to what kernels take.
class TimedKernels final : public tensor::Kernels {
 public:
  using Tensor = tensor::Tensor;
  explicit TimedKernels(tensor::Kernels& inner) : inner_(inner) {}

  double seconds(Family family) const { return seconds_[static_cast<std::size_t>(family)]; }
  std::int64_t calls(Family family) const { return calls_[static_cast<std::size_t>(family)]; }
  /// Multiply-adds of all products, times two.
  double gemm_flops() const { return gemm_flops_; }
  void reset() { seconds_ = {}, calls_ = {}, gemm_flops_ = 0; }

  tensor::Device& device() override { return inner_.device(); }
  void fill(const Tensor& x, double value) override {
    time(Family::movement, [&] { inner_.fill(x, value); });
  }
  void copy(const Tensor& from, const Tensor& to) override {
    time(Family::movement, [&] { inner_.copy(from, to); });
  }
  void copy_rows(const tensor::StridedRows& from, const tensor::StridedRows& to, std::int64_t rows,
                 std::int64_t columns, bool accumulate) override {
    time(Family::movement, [&] { inner_.copy_rows(from, to, rows, columns, accumulate); });
  }
  void copy_strided(const Tensor& from, const tensor::Strides& strides, const Tensor& to) override {
    time(Family::movement, [&] { inner_.copy_strided(from, strides, to); });
  }
  void sum_axis(const Tensor& x, const tensor::Axis& axis, double factor, const Tensor& out,
                bool accumulate) override {
    time(Family::reduction, [&] { inner_.sum_axis(x, axis, factor, out, accumulate); });
  }
  void max_axis(const Tensor& x, const tensor::Axis& axis, const Tensor& out) override {
    time(Family::reduction, [&] { inner_.max_axis(x, axis, out); });
  }
  void max_axis_backward(const Tensor& x, const Tensor& y, const Tensor& dy, const tensor::Axis& axis,
                         const Tensor& dx) override {
    time(Family::reduction, [&] { inner_.max_axis_backward(x, y, dy, axis, dx); });
  }
  void softmax(const Tensor& x, const tensor::Softmax& args, const Tensor& y) override {
    time(Family::reduction, [&] { inner_.softmax(x, args, y); });
  }
  void softmax_backward(const Tensor& y, const Tensor& dy, const tensor::Softmax& args,
                        const Tensor& dx) override {
    time(Family::reduction, [&] { inner_.softmax_backward(y, dy, args, dx); });
  }
  void binary_cross_entropy(const Tensor& logits, const Tensor& targets, const Tensor& weights,
                            const Tensor& total) override {
    time(Family::loss, [&] { inner_.binary_cross_entropy(logits, targets, weights, total); });
  }
  void binary_cross_entropy_backward(const Tensor& logits, const Tensor& targets, const Tensor& weights,
                                     const Tensor& factor, const Tensor& dx) override {
    time(Family::loss, [&] { inner_.binary_cross_entropy_backward(logits, targets, weights, factor, dx); });
  }
  void subtract(const Tensor& a, const Tensor& b, const Tensor& out) override {
    time(Family::elementwise, [&] { inner_.subtract(a, b, out); });
  }
  void divide(const Tensor& a, const Tensor& b, const Tensor& out) override {
    time(Family::elementwise, [&] { inner_.divide(a, b, out); });
  }
  void add_scaled(const Tensor& from, const Tensor& factor, const Tensor& to, bool accumulate) override {
    time(Family::elementwise, [&] { inner_.add_scaled(from, factor, to, accumulate); });
  }
  void quotient(const Tensor& a, const Tensor& b, double factor, const Tensor& out) override {
    time(Family::loss, [&] { inner_.quotient(a, b, factor, out); });
  }
  void attend_stored(const Tensor& qkv, const tensor::Attention& geometry, const tensor::KeyStore& store,
                     const Tensor& out) override {
    time(Family::attention, [&] { inner_.attend_stored(qkv, geometry, store, out); });
  }
  void merge_attention(const Tensor& part, const Tensor& part_lse, std::int64_t first, bool begin,
                       const Tensor& out, const Tensor& lse) override {
    time(Family::attention, [&] { inner_.merge_attention(part, part_lse, first, begin, out, lse); });
  }
  void matmul(const tensor::Matmul& m) override {
    const std::int64_t depth = m.trans_a ? m.a.shape().rows() : m.a.shape().back();
    gemm_flops_ += 2.0 * static_cast<double>(m.c.numel()) * static_cast<double>(depth);
    time(Family::gemm, [&] { inner_.matmul(m); });
  }
  void sum_rows(const Tensor& x, const Tensor& out, bool accumulate) override {
    time(Family::reduction, [&] { inner_.sum_rows(x, out, accumulate); });
  }
  void add(const Tensor& a, const Tensor& b, const Tensor& out) override {
    time(Family::elementwise, [&] { inner_.add(a, b, out); });
  }
  void multiply(const Tensor& a, const Tensor& b, const Tensor& out) override {
    time(Family::elementwise, [&] { inner_.multiply(a, b, out); });
  }
  void scale(const Tensor& x, double factor, const Tensor& out) override {
    time(Family::elementwise, [&] { inner_.scale(x, factor, out); });
  }
  void activation(tensor::Activation kind, const Tensor& x, const Tensor& out) override {
    time(Family::activation, [&] { inner_.activation(kind, x, out); });
  }
  void activation_backward(tensor::Activation kind, const Tensor& x, const Tensor& dy,
                           const Tensor& dx) override {
    time(Family::activation, [&] { inner_.activation_backward(kind, x, dy, dx); });
  }
  void tanh(const Tensor& x, const Tensor& out) override {
    time(Family::activation, [&] { inner_.tanh(x, out); });
  }
  void tanh_backward(const Tensor& y, const Tensor& dy, const Tensor& dx) override {
    time(Family::activation, [&] { inner_.tanh_backward(y, dy, dx); });
  }
  void relu(const Tensor& x, const Tensor& out) override {
    time(Family::activation, [&] { inner_.relu(x, out); });
  }
  void relu_backward(const Tensor& y, const Tensor& dy, const Tensor& dx) override {
    time(Family::activation, [&] { inner_.relu_backward(y, dy, dx); });
  }
  void swiglu(const Tensor& x, const Tensor& out) override {
    time(Family::activation, [&] { inner_.swiglu(x, out); });
  }
  void swiglu_backward(const Tensor& x, const Tensor& dy, const Tensor& dx) override {
    time(Family::activation, [&] { inner_.swiglu_backward(x, dy, dx); });
  }
  void dropout(const Tensor& x, const Tensor& residual, float p, tensor::RandomElements random,
               const Tensor& out) override {
    time(Family::dropout, [&] { inner_.dropout(x, residual, p, random, out); });
  }
  void dropout_backward(const Tensor& dy, float p, tensor::RandomElements random, const Tensor& dx) override {
    time(Family::dropout, [&] { inner_.dropout_backward(dy, p, random, dx); });
  }
  void layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps, const Tensor& y,
                  const Tensor& mean, const Tensor& rstd) override {
    time(Family::norm, [&] { inner_.layer_norm(x, weight, bias, eps, y, mean, rstd); });
  }
  void layer_norm_backward(const Tensor& x, const Tensor& weight, const Tensor& mean, const Tensor& rstd,
                           const Tensor& dy, const Tensor& dx, const Tensor& dweight, const Tensor& dbias,
                           bool accumulate, bool onto_dx) override {
    time(Family::norm, [&] {
      inner_.layer_norm_backward(x, weight, mean, rstd, dy, dx, dweight, dbias, accumulate, onto_dx);
    });
  }
  void rms_norm(const Tensor& x, const Tensor& weight, double eps, const Tensor& y,
                const Tensor& rstd) override {
    time(Family::norm, [&] { inner_.rms_norm(x, weight, eps, y, rstd); });
  }
  void rms_norm_backward(const Tensor& x, const Tensor& weight, const Tensor& rstd, const Tensor& dy,
                         const Tensor& dx, const Tensor& dweight, bool accumulate, bool onto_dx) override {
    time(Family::norm,
         [&] { inner_.rms_norm_backward(x, weight, rstd, dy, dx, dweight, accumulate, onto_dx); });
  }
  void embedding(const Tensor& ids, const Tensor& table, const Tensor& out,
                 const tensor::VocabSlice& slice) override {
    time(Family::embedding, [&] { inner_.embedding(ids, table, out, slice); });
  }
  void embedding_backward(const Tensor& ids, const Tensor& dy, const Tensor& dtable, bool accumulate,
                          const tensor::VocabSlice& slice, std::optional<DType> fold) override {
    time(Family::embedding, [&] { inner_.embedding_backward(ids, dy, dtable, accumulate, slice, fold); });
  }
  void add_positions(const Tensor& x, const Tensor& table, const Tensor& out,
                     const tensor::Positions& positions) override {
    time(Family::embedding, [&] { inner_.add_positions(x, table, out, positions); });
  }
  void add_positions_backward(const Tensor& dy, const Tensor& dtable, bool accumulate,
                              const tensor::Positions& positions) override {
    time(Family::embedding, [&] { inner_.add_positions_backward(dy, dtable, accumulate, positions); });
  }
  void rotary(const Tensor& qkv, const tensor::Attention& geometry, const tensor::Rotary& rotary,
              bool transposed, const Tensor& out) override {
    time(Family::embedding, [&] { inner_.rotary(qkv, geometry, rotary, transposed, out); });
  }
  void attention(const Tensor& qkv, const tensor::Attention& geometry, const Tensor& out,
                 const Tensor& lse) override {
    time(Family::attention, [&] { inner_.attention(qkv, geometry, out, lse); });
  }
  void attention_backward(const Tensor& qkv, const tensor::Attention& geometry, const Tensor& out,
                          const Tensor& lse, const Tensor& dout, const Tensor& dqkv) override {
    time(Family::attention, [&] { inner_.attention_backward(qkv, geometry, out, lse, dout, dqkv); });
  }
  void route(const Tensor& logits, const Tensor& bias, const tensor::Routing& routing, const Tensor& scores,
             const Tensor& chosen, const Tensor& weights) override {
    time(Family::routing, [&] { inner_.route(logits, bias, routing, scores, chosen, weights); });
  }
  void route_backward(const Tensor& logits, const tensor::Routing& routing, const Tensor& scores,
                      const Tensor& chosen, const Tensor& dweights, const tensor::RouterLossGradients& losses,
                      const Tensor& dlogits) override {
    time(Family::routing,
         [&] { inner_.route_backward(logits, routing, scores, chosen, dweights, losses, dlogits); });
  }
  void combine_rows(const Tensor& rows, const Tensor& places, const Tensor& weights,
                    const Tensor& out) override {
    time(Family::routing, [&] { inner_.combine_rows(rows, places, weights, out); });
  }
  void combine_rows_backward(const Tensor& rows, const Tensor& places, const Tensor& weights,
                             const Tensor& dout, const Tensor& drows, const Tensor& dweights) override {
    time(Family::routing,
         [&] { inner_.combine_rows_backward(rows, places, weights, dout, drows, dweights); });
  }
  void cross_entropy(const Tensor& logits, const Tensor& targets, const tensor::VocabSlice& slice,
                     std::int32_t ignore_index, const Tensor& lse, const Tensor& picked,
                     const Tensor& most) override {
    time(Family::loss,
         [&] { inner_.cross_entropy(logits, targets, slice, ignore_index, lse, picked, most); });
  }
  void cross_entropy_total(const Tensor& lse, const Tensor& picked, const Tensor& targets,
                           std::int32_t ignore_index, const Tensor& lse_all, const Tensor& total,
                           bool accumulate) override {
    time(Family::loss,
         [&] { inner_.cross_entropy_total(lse, picked, targets, ignore_index, lse_all, total, accumulate); });
  }
  void cross_entropy_backward(const Tensor& logits, const Tensor& targets, const Tensor& lse,
                              const tensor::VocabSlice& slice, std::int32_t ignore_index,
                              const Tensor& factor) override {
    time(Family::loss,
         [&] { inner_.cross_entropy_backward(logits, targets, lse, slice, ignore_index, factor); });
  }
  void mean_squared_error(const Tensor& x, const Tensor& y, const Tensor& loss) override {
    time(Family::loss, [&] { inner_.mean_squared_error(x, y, loss); });
  }
  void mean_squared_error_backward(const Tensor& x, const Tensor& y, const Tensor& dloss,
                                   const Tensor& dx) override {
    time(Family::loss, [&] { inner_.mean_squared_error_backward(x, y, dloss, dx); });
  }
  void fold(const Tensor& from, DType rounding, const Tensor& to, bool accumulate) override {
    time(Family::reduction, [&] { inner_.fold(from, rounding, to, accumulate); });
  }
  bool folds_gradients() const override { return inner_.folds_gradients(); }
  using Kernels::sum_of_squares;
  void sum_of_squares(std::span<const Tensor> all, tensor::ExactSum& sum) override {
    time(Family::reduction, [&] { inner_.sum_of_squares(all, sum); });
  }
  void fill_normal(const Tensor& x, RandomKey key, std::int64_t first, double mean, double std) override {
    time(Family::movement, [&] { inner_.fill_normal(x, key, first, mean, std); });
  }
  void dequantize(const Tensor& blocks, const Tensor& out) override {
    time(Family::movement, [&] { inner_.dequantize(blocks, out); });
  }
  void fill_uniform(const Tensor& x, RandomKey key, std::int64_t first, double low, double high) override {
    time(Family::movement, [&] { inner_.fill_uniform(x, key, first, low, high); });
  }

 private:
  template <class Call>
  void time(Family family, Call&& call) {
    const auto start = std::chrono::steady_clock::now();
    call();
    seconds_[static_cast<std::size_t>(family)] +=
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    ++calls_[static_cast<std::size_t>(family)];
  }

  tensor::Kernels& inner_;
  std::array<double, family_names.size()> seconds_{};
  std::array<std::int64_t, family_names.size()> calls_{};
  double gemm_flops_ = 0;
};

}  // namespace sherd::bench
