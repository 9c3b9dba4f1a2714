#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "base/random.h"
#include "tensor/exact_sum.h"
#include "tensor/tensor.h"

namespace sherd::tensor {

enum class Activation : std::uint8_t {
  none,
  gelu_tanh,  ///< 0.5·x·(1 + tanh(√(2/π)(x + 0.044715·x³))); GPT-2's
  gelu_erf    ///< x·Φ(x)
};

/// c[m,n] = act(op(a)·op(b) + bias), or c += op(a)·op(b) when `accumulate`. The activation applies to the sum
/// after it was rounded to c's dtype, so that act(pre_activation) made again later has the same bits.
///
/// a: [m,k] or, with trans_a, [k,m]; b: [k,n] or, with trans_b, [n,k]. Leading extents are folded into rows.
/// a and b share one floating dtype; c may be that dtype or fp32. Sums run in fp32 (fp64 for fp64) and round
/// once.
struct Matmul {
  Tensor a{}, b{}, c{};
  bool trans_a = false, trans_b = false;
  bool accumulate = false;
  Tensor bias{};                             ///< optional [n], dtype of a
  Activation activation = Activation::none;  ///< not with accumulate
  Tensor pre_activation{};  ///< optional [m,n], dtype of c: receives the value before the activation
};

/// Geometry of causal self-attention over packed projections.
///
/// qkv: [batch, seq, (heads + 2·kv_heads)·head_dim], grouped per key-value head: for group g the columns are
/// r = heads/kv_heads query heads, then the key head, then the value head (Megatron's order). out: [batch,
/// seq, heads·head_dim].
struct Attention {
  int heads = 1, kv_heads = 1;
  bool causal = true;
  float scale = 0;    ///< multiplies q·k; 0 means 1/√head_dim
  float dropout = 0;  ///< probability of zeroing a normalised score
  RandomKey key;      ///< stream of the dropout mask: element ((b·heads + h)·seq + i)·seq + j
  std::int64_t head_dim(std::int64_t width) const { return width / (heads + 2 * kv_heads); }
};

/// The compute kernels of one device. Stateless but for caches; one object per rank, called from that rank's
/// thread. All tensors are contiguous. Unless said otherwise floating dtypes fp32, bf16, fp16 and fp64 are
/// taken, sums run in fp32 (fp64 for fp64), and a result rounds once to its tensor's dtype. Shapes are
/// checked; a mismatch throws Error{usage} naming the kernel. `accumulate` adds to the destination instead of
/// overwriting it: the sum is formed in the compute type and rounded once. An elementwise output may be one
/// of its inputs. Gradients of parameters (sum_rows' out, dweight, dbias, dtable) may be fp32 where the
/// inputs are narrower.
class Kernels {
 public:
  virtual ~Kernels() = default;
  virtual Device& device() = 0;

  // ---- data movement ----
  virtual void fill(const Tensor& x, double value) = 0;
  virtual void copy(
      const Tensor& from,
      const Tensor& to) = 0;  ///< equal numel; converts between dtypes (also integers of one width)

  // ---- dense products ----
  virtual void matmul(const Matmul& args) = 0;
  /// out[n] (+)= sum over rows of x[m,n]
  virtual void sum_rows(const Tensor& x, const Tensor& out, bool accumulate) = 0;

  // ---- elementwise ----
  virtual void add(const Tensor& a, const Tensor& b, const Tensor& out) = 0;
  virtual void multiply(const Tensor& a, const Tensor& b, const Tensor& out) = 0;
  /// out = x·factor
  virtual void scale(const Tensor& x, double factor, const Tensor& out) = 0;
  virtual void activation(Activation kind, const Tensor& x, const Tensor& out) = 0;
  /// dx = dy·act'(x); dx may be dy
  virtual void activation_backward(Activation kind, const Tensor& x, const Tensor& dy, const Tensor& dx) = 0;
  virtual void tanh(const Tensor& x, const Tensor& out) = 0;
  virtual void tanh_backward(const Tensor& y, const Tensor& dy, const Tensor& dx) = 0;
  virtual void relu(const Tensor& x, const Tensor& out) = 0;
  virtual void relu_backward(const Tensor& y, const Tensor& dy, const Tensor& dx) = 0;
  /// x: [rows, 2f] = [gate | up]; out[rows, f] = silu(gate)·up
  virtual void swiglu(const Tensor& x, const Tensor& out) = 0;
  virtual void swiglu_backward(const Tensor& x, const Tensor& dy, const Tensor& dx) = 0;
  /// out = residual + keep(x)/(1-p); element i is kept when uniform_at(key, i) >= p. `residual` may be
  /// undefined (0).
  virtual void dropout(const Tensor& x, const Tensor& residual, float p, RandomKey key,
                       const Tensor& out) = 0;
  /// dx = keep(dy)/(1-p) with the same mask
  virtual void dropout_backward(const Tensor& dy, float p, RandomKey key, const Tensor& dx) = 0;

  // ---- normalisation over the last extent ----
  /// mean, rstd: [rows] in the compute type (fp32, or fp64 for fp64)
  virtual void layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps,
                          const Tensor& y, const Tensor& mean, const Tensor& rstd) = 0;
  /// Any of dx, dweight, dbias may be undefined. `accumulate` concerns dweight and dbias.
  virtual void layer_norm_backward(const Tensor& x, const Tensor& weight, const Tensor& mean,
                                   const Tensor& rstd, const Tensor& dy, const Tensor& dx,
                                   const Tensor& dweight, const Tensor& dbias, bool accumulate) = 0;
  virtual void rms_norm(const Tensor& x, const Tensor& weight, double eps, const Tensor& y,
                        const Tensor& rstd) = 0;
  virtual void rms_norm_backward(const Tensor& x, const Tensor& weight, const Tensor& rstd, const Tensor& dy,
                                 const Tensor& dx, const Tensor& dweight, bool accumulate) = 0;

  // ---- embeddings and positions ----
  /// ids: int32 [rows]; table: [vocab, width]; out: [rows, width]. An id outside the table throws
  /// Error{data}.
  virtual void embedding(const Tensor& ids, const Tensor& table, const Tensor& out) = 0;
  /// dtable[ids[i]] += dy[i] in index order, so that the sum has one order. `accumulate` false zeroes dtable
  /// first.
  virtual void embedding_backward(const Tensor& ids, const Tensor& dy, const Tensor& dtable,
                                  bool accumulate) = 0;
  /// out[b,s,:] = x[b,s,:] + table[s,:]
  virtual void add_positions(const Tensor& x, const Tensor& table, const Tensor& out) = 0;
  /// dtable[s,:] (+)= sum over b of dy[b,s,:]; rows past seq are zeroed when not accumulating
  virtual void add_positions_backward(const Tensor& dy, const Tensor& dtable, bool accumulate) = 0;
  /// Rotates the query and key heads of packed qkv (Attention's layout), half-split pairing (i, i + d/2) as
  /// in Llama/NeoX, angle = position·base^(-2i/d). `inverse` rotates back (the gradient). out may be qkv.
  virtual void rotary(const Tensor& qkv, const Attention& geometry, double base, bool inverse,
                      const Tensor& out) = 0;

  // ---- attention ----
  /// lse: [batch, heads, seq] log-sum-exp of the scaled scores, compute type. Never forms a seq×seq matrix
  /// and skips blocks that the causal mask zeroes (FlashAttention, Dao et al. 2022).
  virtual void attention(const Tensor& qkv, const Attention& geometry, const Tensor& out,
                         const Tensor& lse) = 0;
  virtual void attention_backward(const Tensor& qkv, const Attention& geometry, const Tensor& out,
                                  const Tensor& lse, const Tensor& dout, const Tensor& dqkv) = 0;

  // ---- losses ----
  /// Mean over targets != ignore_index of -log softmax(logits)[target]. logits: [rows, vocab]; targets: int32
  /// [rows]; loss: [1] and lse: [rows] in the compute type. Columns from `valid` on are padding and take no
  /// part (0: none). A target outside [0, valid) throws Error{data}.
  virtual void cross_entropy(const Tensor& logits, const Tensor& targets, std::int64_t valid,
                             std::int32_t ignore_index, const Tensor& loss, const Tensor& lse) = 0;
  /// Overwrites logits with their gradient, in place. dloss: [1] in the compute type, the loss's own
  /// gradient.
  virtual void cross_entropy_backward(const Tensor& logits, const Tensor& targets, const Tensor& lse,
                                      std::int64_t valid, std::int32_t ignore_index, const Tensor& dloss) = 0;
  /// loss[1] = mean((x - y)²), in the compute type like dloss
  virtual void mean_squared_error(const Tensor& x, const Tensor& y, const Tensor& loss) = 0;
  virtual void mean_squared_error_backward(const Tensor& x, const Tensor& y, const Tensor& dloss,
                                           const Tensor& dx) = 0;

  // ---- what sharding and optimizers need ----
  /// to (+)= `from` rounded to `rounding`: what one rank gives to a sum of gradients. The value, or the sum
  /// in the compute type, rounds once to to's dtype. `from` may be fp32 where `to` is narrower, and the
  /// reverse.
  virtual void fold(const Tensor& from, DType rounding, const Tensor& to, bool accumulate) = 0;
  /// Adds the squares of all elements to `sum`: blocks of 64 elements, counted from each tensor's start, are
  /// summed in double in a fixed order, the blocks exactly, so the total does not depend on how a tensor was
  /// cut at multiples of
  /// 64. A NaN or infinity sets sum.non_finite. Waits for the device once.
  virtual void sum_of_squares(std::span<const Tensor> all, ExactSum& sum) = 0;
  void sum_of_squares(const Tensor& x, ExactSum& sum) { sum_of_squares(std::span(&x, 1), sum); }
  /// x[i] = mean + std·normal_at(key, first + i): initial values by global index, whatever the sharding.
  virtual void fill_normal(const Tensor& x, RandomKey key, std::int64_t first, double mean, double std) = 0;
  virtual void fill_uniform(const Tensor& x, RandomKey key, std::int64_t first, double low, double high) = 0;
};

/// The kernels for `device`, which must outlive them. Those of a meta device read and write no tensor, find
/// every sum and norm to be zero, and charge the workspace that the CPU's would hold.
std::unique_ptr<Kernels> make_kernels(Device& device);

}  // namespace sherd::tensor
