#pragma once

#include <cstdint>
#include <memory>

#include "base/cpu_isa.h"
#include "tensor/cpu/isa/gemm.h"
#include "tensor/cpu/isa/tables.h"
#include "tensor/extents.h"
#include "tensor/kernels.h"

namespace sherd::tensor::cpu {

/// One block of a blocked product: c[rows, cols] (+)= a[rows, depth]·b[depth, cols].
struct GemmBlock {
  std::int64_t rows = 0, cols = 0, depth = 0;
  std::int64_t full_rows = 0;  ///< rows of the blocks that are not at the edge
  /// Elements from row to row of a: BlockProduct::a_stride(); 0 for pack_left()'s.
  std::int64_t a_stride = 0;
  /// The part of the depth that a holds, and whether it adds to what c holds; see BlockProduct::depth_step().
  std::int64_t first = 0, count = 0;
  bool add = false;
};

/// The part of a block's b that one call of pack() brings over: whole slivers, or the whole width of some
/// even depths.
struct GemmPackPart {
  std::int64_t col = 0, cols = 0;
  std::int64_t first = 0, count = 0;  ///< along the depth
};

/// The single-threaded product of blocks that a machine runs fastest. Stateless but for caches; any thread
/// may call.
class BlockProduct {
 public:
  virtual ~BlockProduct() = default;

  /// The dtype of a and b: fp32, or bf16 where the processor multiplies it.
  virtual DType dtype() const = 0;
  /// Rows of c that a block should have.
  virtual std::int64_t rows() const = 0;
  /// The stride that rows of a must have when they lie `stride` elements apart: another than `stride` asks
  /// for a copy, zeros between depth and its stride. A `stride` of 0 asks for the best one of a copy.
  virtual std::int64_t a_stride(std::int64_t depth, std::int64_t stride) const = 0;
  /// The same for the columns of b where these are contiguous along the depth.
  virtual std::int64_t b_stride(std::int64_t depth, std::int64_t stride) const = 0;
  /// Floats from row to row of c; columns from cols on receive anything.
  virtual std::int64_t c_stride(std::int64_t cols) const = 0;

  /// The depth that multiply() should take at a time, so that its operands stay in the second-level cache; 0
  /// for a product that takes all at once and neither adds nor finishes.
  virtual std::int64_t depth_step() const = 0;

  /// Bytes that pack() writes for blocks of these cols, depth and full_rows.
  virtual std::int64_t packed_bytes(const GemmBlock& block) const = 0;
  /// Columns (where b is contiguous along the depth) or depths (where along the columns) that pack() should
  /// take at a time, so that threads share the work; 0 for a product that packs a panel at once.
  virtual std::int64_t pack_step(bool along_depth) const = 0;
  /// Brings a part of b, whose element (p, j) lies at b[p·depth_stride + j·col_stride] (one of the strides is
  /// 1) from the part's first, into the layout that multiply() reads.
  virtual void pack(const GemmBlock& block, const GemmPackPart& part, const void* b,
                    std::int64_t depth_stride, std::int64_t col_stride, void* packed) const = 0;
  /// Bytes that pack_left() writes for block.rows and block.count; 0 for a product that takes rows alone.
  virtual std::int64_t packed_left_bytes(const GemmBlock& block) const = 0;
  /// Brings a, whose element (i, p) lies at a[p·stride + i], into a layout that multiply() reads.
  virtual void pack_left(const GemmBlock& block, const void* a, std::int64_t stride, void* packed) const = 0;
  /// Multiplies a block. With `finish` the sums go there, and c, which may then be null unless block.add, is
  /// only read.
  virtual void multiply(const GemmBlock& block, const void* a, const void* packed, float* c,
                        const GemmFinish* finish) const = 0;
};

/// The products for operands stored as fp32, bf16 or fp16 on this processor; dtype() says what they must be
/// converted to.
const BlockProduct& block_product(DType stored);

/// oneDNN's products of bf16, with its OpenMP runtime held to one thread for each call so that it never
/// competes with the arena for cores. Primitives are made once per thread and shape. Not its fp32 ones:
/// without AVX-512 a row's product depends on how many rows there are, and the kernel keeps its stack pointer
/// in memory of the heap, where a signal's frame then goes (oneDNN 2.6).
std::unique_ptr<BlockProduct> make_dnnl_blocks();
/// True when oneDNN multiplies bf16 on AMX, far beyond what vector registers can.
bool dnnl_has_amx();

/// Register tiles of AVX512-BF16: 5 to 15 % faster there than oneDNN 2.6 (`sherd bench gemm`).
std::unique_ptr<BlockProduct> make_bf16_tiles();
/// Register tiles of an instruction set's fp32 multiply-adds.
std::unique_ptr<BlockProduct> make_f32_tiles(CpuIsa isa);

/// The values of a matrix in FP8, in bf16, which holds them all.
Tensor decode_fp8(Device& device, const IsaTable& isa, const Fp8Matrix& m);

/// Kernels::matmul for fp32, bf16 and fp16 operands that were checked; m and n are positive.
void multiply_blocked(Device& device, const IsaTable& isa, const Matmul& args, const MatmulExtents& extents);
/// The most that multiply_blocked() takes of the workspace.
std::size_t blocked_workspace(Device& device, const IsaTable& isa, const Matmul& args,
                              const MatmulExtents& extents);

}  // namespace sherd::tensor::cpu
