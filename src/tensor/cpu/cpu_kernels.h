#pragma once

#include "base/cpu_isa.h"
#include "tensor/cpu/isa/tables.h"
#include "tensor/kernels.h"

namespace sherd::tensor::cpu {

/// Kernels for a CPU arena. Each family lives in a file of its own in this folder; vectorised inner loops are
/// compiled once per instruction set from isa/. Thread-safe in so far as the arena is: the object holds no
/// mutable state but caches.
class CpuKernels final : public Kernels {
 public:
  /// `isa` chooses the vector loops; it must be one that this processor has.
  explicit CpuKernels(Device& device, CpuIsa isa = cpu_isa()) : device_(device), isa_(isa_table(isa)) {}

  Device& device() override { return device_; }
  void fill(const Tensor& x, double value) override;
  void copy(const Tensor& from, const Tensor& to) override;
  void copy_rows(const StridedRows& from, const StridedRows& to, std::int64_t rows, std::int64_t columns,
                 bool accumulate) override;
  void add_scaled(const Tensor& from, const Tensor& factor, const Tensor& to, bool accumulate) override;
  void quotient(const Tensor& a, const Tensor& b, double factor, const Tensor& out) override;
  void copy_strided(const Tensor& from, const Strides& strides, const Tensor& to) override;
  void matmul(const Matmul& args) override;
  void sum_rows(const Tensor& x, const Tensor& out, bool accumulate) override;
  void sum_axis(const Tensor& x, const Axis& axis, double factor, const Tensor& out,
                bool accumulate) override;
  void max_axis(const Tensor& x, const Axis& axis, const Tensor& out) override;
  void max_axis_backward(const Tensor& x, const Tensor& y, const Tensor& dy, const Axis& axis,
                         const Tensor& dx) override;
  void softmax(const Tensor& x, const Softmax& args, const Tensor& y) override;
  void softmax_backward(const Tensor& y, const Tensor& dy, const Softmax& args, const Tensor& dx) override;
  void add(const Tensor& a, const Tensor& b, const Tensor& out) override;
  void subtract(const Tensor& a, const Tensor& b, const Tensor& out) override;
  void multiply(const Tensor& a, const Tensor& b, const Tensor& out) override;
  void divide(const Tensor& a, const Tensor& b, const Tensor& out) override;
  void scale(const Tensor& x, double factor, const Tensor& out) override;
  void activation(Activation kind, const Tensor& x, const Tensor& out) override;
  void activation_backward(Activation kind, const Tensor& x, const Tensor& dy, const Tensor& dx) override;
  void tanh(const Tensor& x, const Tensor& out) override;
  void tanh_backward(const Tensor& y, const Tensor& dy, const Tensor& dx) override;
  void relu(const Tensor& x, const Tensor& out) override;
  void relu_backward(const Tensor& y, const Tensor& dy, const Tensor& dx) override;
  void swiglu(const Tensor& x, const Tensor& out) override;
  void swiglu_backward(const Tensor& x, const Tensor& dy, const Tensor& dx) override;
  void dropout(const Tensor& x, const Tensor& residual, float p, RandomElements random,
               const Tensor& out) override;
  void dropout_backward(const Tensor& dy, float p, RandomElements random, const Tensor& dx) override;
  void layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps, const Tensor& y,
                  const Tensor& mean, const Tensor& rstd) override;
  void layer_norm_backward(const Tensor& x, const Tensor& weight, const Tensor& mean, const Tensor& rstd,
                           const Tensor& dy, const Tensor& dx, const Tensor& dweight, const Tensor& dbias,
                           bool accumulate, bool onto_dx) override;
  void rms_norm(const Tensor& x, const Tensor& weight, double eps, const Tensor& y,
                const Tensor& rstd) override;
  void rms_norm_backward(const Tensor& x, const Tensor& weight, const Tensor& rstd, const Tensor& dy,
                         const Tensor& dx, const Tensor& dweight, bool accumulate, bool onto_dx) override;
  void embedding(const Tensor& ids, const Tensor& table, const Tensor& out, const VocabSlice& slice) override;
  void embedding_backward(const Tensor& ids, const Tensor& dy, const Tensor& dtable, bool accumulate,
                          const VocabSlice& slice, std::optional<DType> fold) override;
  void add_positions(const Tensor& x, const Tensor& table, const Tensor& out,
                     const Positions& positions) override;
  void add_positions_backward(const Tensor& dy, const Tensor& dtable, bool accumulate,
                              const Positions& positions) override;
  void rotary(const Tensor& qkv, const Attention& geometry, const Rotary& rotary, bool transposed,
              const Tensor& out) override;
  void attention(const Tensor& qkv, const Attention& geometry, const Tensor& out, const Tensor& lse) override;
  void attention_backward(const Tensor& qkv, const Attention& geometry, const Tensor& out, const Tensor& lse,
                          const Tensor& dout, const Tensor& dqkv) override;
  void attend_stored(const Tensor& qkv, const Attention& geometry, const KeyStore& store,
                     const Tensor& out) override;
  void merge_attention(const Tensor& part, const Tensor& part_lse, std::int64_t first, bool begin,
                       const Tensor& out, const Tensor& lse) override;
  void route(const Tensor& logits, const Tensor& bias, const Routing& routing, const Tensor& scores,
             const Tensor& chosen, const Tensor& weights) override;
  void route_backward(const Tensor& logits, const Routing& routing, const Tensor& scores,
                      const Tensor& chosen, const Tensor& dweights, const RouterLossGradients& losses,
                      const Tensor& dlogits) override;
  void combine_rows(const Tensor& rows, const Tensor& places, const Tensor& weights,
                    const Tensor& out) override;
  void combine_rows_backward(const Tensor& rows, const Tensor& places, const Tensor& weights,
                             const Tensor& dout, const Tensor& drows, const Tensor& dweights) override;
  void cross_entropy(const Tensor& logits, const Tensor& targets, const VocabSlice& slice,
                     std::int32_t ignore_index, const Tensor& lse, const Tensor& picked,
                     const Tensor& most) override;
  void cross_entropy_total(const Tensor& lse, const Tensor& picked, const Tensor& targets,
                           std::int32_t ignore_index, const Tensor& lse_all, const Tensor& total,
                           bool accumulate) override;
  void cross_entropy_backward(const Tensor& logits, const Tensor& targets, const Tensor& lse,
                              const VocabSlice& slice, std::int32_t ignore_index,
                              const Tensor& factor) override;
  void mean_squared_error(const Tensor& x, const Tensor& y, const Tensor& loss) override;
  void mean_squared_error_backward(const Tensor& x, const Tensor& y, const Tensor& dloss,
                                   const Tensor& dx) override;
  void binary_cross_entropy(const Tensor& logits, const Tensor& targets, const Tensor& weights,
                            const Tensor& total) override;
  void binary_cross_entropy_backward(const Tensor& logits, const Tensor& targets, const Tensor& weights,
                                     const Tensor& factor, const Tensor& dx) override;
  void dequantize(const Tensor& blocks, const Tensor& out) override;
  void fold(const Tensor& from, DType rounding, const Tensor& to, bool accumulate) override;
  bool folds_gradients() const override { return true; }
  using Kernels::sum_of_squares;
  void sum_of_squares(std::span<const Tensor> all, ExactSum& sum) override;
  void fill_normal(const Tensor& x, RandomKey key, std::int64_t first, double mean, double std) override;
  void fill_uniform(const Tensor& x, RandomKey key, std::int64_t first, double low, double high) override;

 private:
  /// Cosines and sines of what was last asked for: [seq, half] in the compute type, seq grown as needed.
  struct RotaryAngles {
    std::int64_t seq = 0, half = 0;
    Rotary rotary;
    Tensor cosine, sine;
  };
  const RotaryAngles& rotary_angles(std::int64_t seq, std::int64_t half, const Rotary& rotary, DType compute);

  Device& device_;
  const IsaTable& isa_;
  RotaryAngles angles_;
};

}  // namespace sherd::tensor::cpu
