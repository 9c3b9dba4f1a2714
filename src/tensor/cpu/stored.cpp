// Values of weights in few bits.
#include "tensor/argument_checks.h"
#include "tensor/cpu/cpu_kernels.h"
#include "tensor/cpu/loops.h"
#include "tensor/formats/stored_format.h"

namespace sherd::tensor::cpu {
namespace {

/// More than caches hold, and stay of use for: values of so many bytes are written past them.
constexpr std::size_t streamed_bytes = std::size_t{16} << 20;

/// The values of `count` blocks into `to`, of the type that `out` is the table of.
void from_blocks(const IsaTable& isa, StoredFormat format, const std::byte* blocks, std::byte* to,
                 StorageIndex out, bool stream, Count count) {
  const ConvertOps& ops = isa.convert[out];
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(blocks);
  const Count width = out == storage_f32 ? 4 : 2;
  switch (format) {
    case StoredFormat::int8:
      return ops.from_int8[stream](blocks, to, count);
    case StoredFormat::fp8:
      return ops.from_stored_fp8[stream](blocks, to, count);
    case StoredFormat::mxfp4:
      return ops.from_mxfp4[stream](blocks, to, count);
    case StoredFormat::nf4:
    case StoredFormat::fp4:
      return ops.from_four_bits[stream](format == StoredFormat::nf4 ? nf4_values : fp4_values, bytes,
                                        four_bit_block_bytes, bytes + four_bit_codes, four_bit_block_bytes,
                                        to, count);
    case StoredFormat::nf4_double:
    case StoredFormat::fp4_double:
      for (Count i = 0; i < count; ++i) {
        std::array<float, double_scales> scales;
        double_scales_of(blocks + i * double_block_bytes, scales);
        ops.from_four_bits[stream](format == StoredFormat::nf4_double ? nf4_values : fp4_values,
                                   bytes + i * double_block_bytes, four_bit_codes, scales.data(),
                                   sizeof(float), to + i * double_block * width, double_scales);
      }
      return;
    case StoredFormat::bf16:
      for (Count i = 0; i < count; ++i) {
        float values[bf16_block];
        isa.convert[storage_bf16].load(blocks + i * bf16_block_bytes, values, bf16_block);
        ops.store(values, to + i * bf16_block * width, bf16_block);
      }
      return;
    case StoredFormat::compute:
      break;  // which require_blocks() refuses
  }
}

}  // namespace

void CpuKernels::dequantize(StoredFormat format, const Tensor& blocks, const Tensor& out) {
  const Count count = require_blocks(format, blocks, out);
  const BlockSize size = block_size(format);
  constexpr std::uintptr_t register_bytes = 64;
  const bool stream =
      out.bytes() > streamed_bytes && reinterpret_cast<std::uintptr_t>(out.raw()) % register_bytes == 0;
  in_chunks(device_, count, std::max<Count>(1, element_grain / size.elements), [&](Count begin, Count n) {
    from_blocks(isa_, format, at(blocks, begin * size.bytes), at(out, begin * size.elements),
                storage_index(out), stream, n);
  });
}

}  // namespace sherd::tensor::cpu
