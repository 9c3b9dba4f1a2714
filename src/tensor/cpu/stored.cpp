// Values of weights in few bits.
#include "tensor/cpu/stored.h"

#include "tensor/argument_checks.h"
#include "tensor/cpu/cpu_kernels.h"
#include "tensor/cpu/loops.h"

namespace sherd::tensor::cpu {
namespace {

/// More than caches hold, and stay of use for: values of so many bytes are written past them.
constexpr std::size_t streamed_bytes = std::size_t{16} << 20;

bool is_double(StoredFormat format) {
  return format == StoredFormat::nf4_double || format == StoredFormat::fp4_double;
}

/// Parts of double blocks, each of which is passed with the scales of those of its parts that are asked for.
void read_double(const ConvertOps& ops, const float* table, const std::byte* blocks, Count first, Count count,
                 Count part_bytes, bool stream, std::byte* to) {
  for (Count skipped = first % double_scales; count > 0; skipped = 0) {
    const std::byte* block = blocks + first / double_scales * double_block_bytes;
    const Count n = std::min(count, double_scales - skipped);
    std::array<float, double_scales> scales;
    double_scales_of(block, skipped, std::span(scales).first(static_cast<std::size_t>(n)));
    ops.from_four_bits[stream](table, reinterpret_cast<const std::uint8_t*>(block) + skipped * four_bit_codes,
                               four_bit_codes, scales.data(), sizeof(float), to, n);
    first += n, count -= n, to += n * part_bytes;
  }
}

}  // namespace

Count stored_part(StoredFormat format) {
  return is_double(format) ? four_bit_block : block_size(format).elements;
}

void read_stored(const IsaTable& isa, StoredFormat format, const std::byte* blocks, Count first, Count count,
                 StorageIndex out, bool stream, std::byte* to) {
  const ConvertOps& ops = isa.convert[out];
  const Count width = out == storage_f32 ? 4 : 2;
  const std::byte* from = is_double(format) ? blocks : blocks + first * block_size(format).bytes;
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(from);
  switch (format) {
    case StoredFormat::int8:
      return ops.from_int8[stream](from, to, count);
    case StoredFormat::fp8:
      return ops.from_stored_fp8[stream](from, to, count);
    case StoredFormat::mxfp4:
      return ops.from_mxfp4[stream](from, to, count);
    case StoredFormat::nf4:
    case StoredFormat::fp4:
      return ops.from_four_bits[stream](format == StoredFormat::nf4 ? nf4_values : fp4_values, bytes,
                                        four_bit_block_bytes, bytes + four_bit_codes, four_bit_block_bytes,
                                        to, count);
    case StoredFormat::nf4_double:
    case StoredFormat::fp4_double:
      return read_double(ops, format == StoredFormat::nf4_double ? nf4_values : fp4_values, blocks, first,
                         count, four_bit_block * width, stream, to);
    case StoredFormat::bf16:
      for (Count i = 0; i < count; ++i) {
        float values[bf16_block];
        isa.convert[storage_bf16].load(from + i * bf16_block_bytes, values, bf16_block);
        ops.store(values, to + i * bf16_block * width, bf16_block);
      }
      return;
    case StoredFormat::compute:
      break;  // which whoever has blocks was refused
  }
}

void CpuKernels::dequantize(StoredFormat format, const Tensor& blocks, const Tensor& out) {
  require_blocks(format, blocks, out);
  const Count part = stored_part(format);
  constexpr std::uintptr_t register_bytes = 64;
  const bool stream =
      out.bytes() > streamed_bytes && reinterpret_cast<std::uintptr_t>(out.raw()) % register_bytes == 0;
  in_chunks(device_, out.numel() / part, element_grain / part, [&](Count begin, Count n) {
    read_stored(isa_, format, blocks.raw(), begin, n, storage_index(out), stream, at(out, begin * part));
  });
}

}  // namespace sherd::tensor::cpu
