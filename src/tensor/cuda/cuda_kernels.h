#pragma once

#include <cstdint>
#include <memory>

#include "device/cuda/target.h"
#include "tensor/extents.h"
#include "tensor/kernel_list.h"
#include "tensor/kernels.h"
#include "tensor/tensor.h"

namespace sherd::tensor::SHERD_CUDA {

using device::SHERD_CUDA::Target;

/// The state of cuBLASLt (matmul.cpp) and cuDNN (cudnn/) between calls, known to their sources only.
class MatmulLibrary;
class AttentionLibrary;

/// Throws Error{io} where cuBLASLt, which the first product needs, cannot be loaded.
void load_matmul_library();

/// The errors that a kernel can find in the data that it was given.
enum class DataError : std::uint8_t { embedding_id, loss_target };
inline constexpr int data_error_kinds = 2;

/// Where kernels leave word of one kind of error: the position (upper half) and the value (lower half) of the
/// first element that was wrong, and the limit that it broke. Written by raise() of tensor/cuda/families.cuh.
struct DataErrorSlot {
  unsigned long long first;  ///< none_wrong until something is
  unsigned long long limit;
};
inline constexpr unsigned long long none_wrong = ~0ull;

/// The slots of one device, in memory of the host that kernels write to only when something is wrong, so that
/// looking costs nothing.
class DataErrors {
 public:
  explicit DataErrors(device::Device& device);
  /// For kernels.
  DataErrorSlot* slot(DataError kind) const { return slots_ + static_cast<int>(kind); }
  /// Throws Error{data} for an error left by work that has finished, and forgets it.
  void check();

 private:
  device::Storage memory_;
  DataErrorSlot* slots_;
};

/// Kernels for a CUDA device, issued on its compute stream; none waits but sums_of_squares and
/// copies that narrow integers. Each family lives in a file of its own in this folder (attention, rotary
/// positions and linear attention in attention/ and cudnn/): *.cu for own kernels, which also run on the
/// emulator in tests/simt, *.cpp for what cuBLASLt and cuDNN do.
///
/// Against the CPU's: copies, fills, FP8's codes and scales, dropout, fold, sums_of_squares, the fp32
/// activations and what rounds once give its bits, random fills as far as the double-precision functions of
/// the two agree; the rest the same values within rounding, and the same bits from run to run.
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
  void require_fp8(const Fp8Recipe& recipe) const override;
  /// Keeps a handle as long as the kernels live: check_data()'s registration with the device.
  void watch(std::shared_ptr<void> handle) { watch_ = std::move(handle); }

  SHERD_KERNELS(SHERD_DECLARE_KERNEL)

 private:
  /// Uninitialised memory for the kernels issued until the tensor goes; stream order lets it be reused at
  /// once.
  Tensor scratch(std::int64_t elements, DType dtype, device::Tier tier = device::Tier::device);
  /// A number for each row of all sequences, 1 where a document begins; undefined without documents.
  Tensor row_starts(const Documents* documents, std::int64_t rows);
  /// Throws Error{config} where no product takes operands of these blocks; `what` wants one.
  void require_fp8_scaling(std::string_view what, Fp8Scaling scaling) const;
  /// Throws Error{data} for a value that To does not have; waits for the kernel.
  template <class To, class From>
  void copy_narrowing(const Tensor& from, const Tensor& to);

  Target target_;
  DataErrors errors_;
  RotaryTables angles_;
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
