#include <algorithm>

#include "tensor/cuda/fp8.cuh"
#include "tensor/formats/stored_format.h"

// Values of weights in few bits.

namespace sherd::tensor::SHERD_CUDA {
namespace {

/// Elements that a thread makes at once.
constexpr int at_once = 8;

struct Table {
  float at[16];
  explicit Table(const float* from) { std::copy_n(from, 16, at); }
};

/// The values of eight codes of four bits, from the lowest bits of a word on.
__device__ inline void from_halves(const Table& table, std::uint32_t codes, bool upper_first, float scale,
                                   float* to) {
  for (int k = 0; k < at_once; ++k) to[k] = table.at[codes >> (4 * (upper_first ? k ^ 1 : k)) & 15u] * scale;
}

// Each of these has the blocks of one format: read() gives elements [first, first + 8) of a block.

struct Int8Blocks {
  static constexpr Count elements = int8_block, bytes = int8_block_bytes;
  __device__ void read(const std::uint8_t* block, Count first, float* to) const {
    const auto* words = reinterpret_cast<const std::uint32_t*>(block);
    const auto scale = bits_as<float>(words[int8_block / 4]);
    for (int k = 0; k < at_once; ++k) {
      const std::uint32_t word = words[first / 4 + k / 4];
      to[k] = static_cast<float>(static_cast<std::int8_t>(word >> (k % 4 * 8) & 0xffu)) * scale;
    }
  }
};

struct FourBitBlocks {
  static constexpr Count elements = four_bit_block, bytes = four_bit_block_bytes;
  Table table;
  __device__ void read(const std::uint8_t* block, Count first, float* to) const {
    const auto* words = reinterpret_cast<const std::uint32_t*>(block);
    from_halves(table, words[first / 8], true, bits_as<float>(words[four_bit_codes / 4]), to);
  }
};

struct DoubleBlocks {
  static constexpr Count elements = double_block, bytes = double_block_bytes;
  Table table;
  float scales[double_scales];
  explicit DoubleBlocks(const float* from) : table(from) {
    std::copy_n(scale_values().begin(), double_scales, scales);
  }
  __device__ void read(const std::uint8_t* block, Count first, float* to) const {
    const auto* words = reinterpret_cast<const std::uint32_t*>(block);
    constexpr Count behind = (double_codes + double_scales) / 4;
    const float product =
        scales[block[double_codes + first / four_bit_block]] * bits_as<float>(words[behind]);
    from_halves(table, words[first / 8], true, product + bits_as<float>(words[behind + 1]), to);
  }
};

struct Mxfp4Blocks {
  static constexpr Count elements = mxfp4_block, bytes = mxfp4_block_bytes;
  Table table;
  __device__ void read(const std::uint8_t* block, Count first, float* to) const {
    std::uint32_t codes = 0;  // blocks of 17 bytes do not begin with a word
    for (int k = 0; k < 4; ++k) codes |= static_cast<std::uint32_t>(block[first / 2 + k]) << (8 * k);
    from_halves(table, codes, false, bits_as<float>(static_cast<std::uint32_t>(block[mxfp4_codes]) << 23),
                to);
  }
};

struct Fp8Blocks {
  static constexpr Count elements = stored_fp8_block, bytes = stored_fp8_block_bytes;
  __device__ void read(const std::uint8_t* block, Count first, float* to) const {
    const auto* words = reinterpret_cast<const std::uint32_t*>(block);
    const auto scale = bits_as<float>(words[stored_fp8_block / 4]);
    for (int k = 0; k < at_once; ++k) {
      const std::uint32_t code = words[first / 4 + k / 4] >> (k % 4 * 8) & 0xffu;
      to[k] = fp8_decode<Fp8Format::e4m3, Fp8Numbers>(code) * scale;
    }
  }
};

struct Bf16Blocks {
  static constexpr Count elements = bf16_block, bytes = bf16_block_bytes;
  __device__ void read(const std::uint8_t* block, Count first, float* to) const {
    const auto* values = reinterpret_cast<const bf16*>(block);
    for (int k = 0; k < at_once; ++k) to[k] = widen(values[first + k]);
  }
};

template <class Blocks, class Out>
__global__ void dequantize_kernel(Blocks format, const std::uint8_t* blocks, Count parts, Out* to) {
  constexpr Count per_block = Blocks::elements / at_once;
  for (Count i = grid_thread(); i < parts; i += grid_threads()) {
    float values[at_once];
    format.read(blocks + i / per_block * Blocks::bytes, i % per_block * at_once, values);
    constexpr int width = sizeof(Out) == 4 ? 4 : at_once;  // 16 bytes
    for (int part = 0; part < at_once; part += width) {
      Pack<Out, width> pack;
      for (int k = 0; k < width; ++k) pack.at[k] = narrow<Out>(values[part + k]);
      store_pack(to + i * at_once + part, pack);
    }
  }
}

/// Calls visit(blocks) for those of the format.
template <class Visit>
void with_blocks(StoredFormat format, const Visit& visit) {
  switch (format) {
    case StoredFormat::bf16:
      return visit(Bf16Blocks());
    case StoredFormat::int8:
      return visit(Int8Blocks());
    case StoredFormat::nf4:
      return visit(FourBitBlocks{Table(nf4_values)});
    case StoredFormat::fp4:
      return visit(FourBitBlocks{Table(fp4_values)});
    case StoredFormat::nf4_double:
      return visit(DoubleBlocks(nf4_values));
    case StoredFormat::fp4_double:
      return visit(DoubleBlocks(fp4_values));
    case StoredFormat::mxfp4:
      return visit(Mxfp4Blocks{Table(mxfp4_values)});
    case StoredFormat::fp8:
      return visit(Fp8Blocks());
    case StoredFormat::compute:
      break;  // which require_blocks() refuses
  }
}

}  // namespace

void CudaKernels::dequantize(StoredFormat format, const Tensor& blocks, const Tensor& out) {
  require_blocks(format, blocks, out);
  const Count parts = out.numel() / at_once;
  if (parts == 0) return;
  with_floating(out.dtype(), [&](auto type) {
    using Out = decltype(type);
    if constexpr (!std::is_same_v<Out, double>)
      with_blocks(format, [&](const auto& of) {
        launch(dequantize_kernel<std::remove_cvref_t<decltype(of)>, Out>,
               blocks_for(parts, element_threads, target_.processors, 32), element_threads, 0, target_.stream,
               of, in<std::uint8_t>(blocks), parts, SHERD_CUDA::out<Out>(out));
      });
  });
}

}  // namespace sherd::tensor::SHERD_CUDA
