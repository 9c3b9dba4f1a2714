#pragma once

#include <memory>

#include "device/cuda/target.h"
#include "tensor/cuda/data_errors.h"
#include "tensor/cuda_options.h"
#include "tensor/tensor.h"

namespace sherd::tensor::SHERD_CUDA {

using device::SHERD_CUDA::Target;

/// What cuBLASLt (matmul.cpp) and cuDNN (cudnn/) hold between calls, known to their sources only.
class MatmulLibrary;
class AttentionLibrary;

/// Throws Error{config} where cuBLASLt, which the first product needs, cannot be loaded.
void load_matmul_library();

/// Kernels for a CUDA device, issued on its compute stream; none waits but sum_of_squares and
/// copies that narrow integers. Each family lives in a file of its own in this folder: *.cu for own kernels,
/// which also run on the emulator in tests/simt, *.cpp for what cuBLASLt and cuDNN do.
///
/// Against the CPU's: copies, fills, dropout, fold, sum_of_squares, the fp32 activations and what rounds
/// once give its bits, random fills as far as the double-precision functions of the two agree; the rest the
/// same values within rounding, and the same bits from run to run.
class CudaKernels final : public Kernels {
 public:
  explicit CudaKernels(const Target& target);

  Device& device() override { return target_.device; }
  const Target& target() const { return target_; }
  /// Takes effect with the next call.
  CudaOptions options;
  /// Throws Error{data} for what a kernel that has finished met: an id or a target outside the
  /// vocabulary. Does not wait.
  void check_data() { errors_.check(); }
  AttentionRoutes attention_routes() const override { return routes_; }
  /// Keeps a handle as long as the kernels live: check_data()'s registration with the device.
  void watch(std::shared_ptr<void> handle) { watch_ = std::move(handle); }

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
  using Kernels::sum_of_squares;
  void sum_of_squares(std::span<const Tensor> all, ExactSum& sum) override;
  void fill_normal(const Tensor& x, RandomKey key, std::int64_t first, double mean, double std) override;
  void fill_uniform(const Tensor& x, RandomKey key, std::int64_t first, double low, double high) override;

 private:
  /// Uninitialised memory for the kernels issued until the tensor goes; stream order lets it be reused at
  /// once.
  Tensor scratch(std::int64_t elements, DType dtype, device::Tier tier = device::Tier::device);
  /// Throws Error{data} for a value that To does not have; waits for the kernel.
  template <class To, class From>
  void copy_narrowing(const Tensor& from, const Tensor& to);

  /// Cosines and sines of positions·frequencies: [positions, d/2], kept for what was last asked for.
  struct RotaryAngles {
    std::int64_t seq = 0, half = 0;
    Rotary rotary;
    Tensor cosine, sine;
  };
  const RotaryAngles& rotary_angles(std::int64_t seq, std::int64_t half, const Rotary& rotary, DType compute);

  Target target_;
  DataErrors errors_;
  RotaryAngles angles_;
  std::shared_ptr<MatmulLibrary> matmul_library_;  // made by the first call that needs it
  std::shared_ptr<AttentionLibrary> attention_library_;
  AttentionRoutes routes_;
  std::shared_ptr<void> watch_;
};

/// to[r] = x[r] + table[r mod p], where x and to are [.., n] of one dtype and table [p, n] of any with the
/// same compute type: positions, and a bias where p is 1. `to` may be x.
void add_row(const device::SHERD_CUDA::Target& target, const Tensor& x, const Tensor& table,
             const Tensor& to);

}  // namespace sherd::tensor::SHERD_CUDA
