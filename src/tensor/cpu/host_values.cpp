#include "tensor/host_values.h"

#include <algorithm>
#include <cstring>

#include "tensor/cpu/loops.h"

namespace sherd::tensor {
namespace {

constexpr std::int64_t block = 1024;

void widen(const std::byte* from, DType dtype, float* to, std::int64_t n) {
  if (dtype != DType::f64)
    return cpu::isa_table(cpu_isa()).convert[cpu::storage_index(dtype)].load(from, to, n);
  double values[block];
  std::memcpy(values, from, static_cast<std::size_t>(n) * sizeof(double));
  for (std::int64_t i = 0; i < n; ++i) to[i] = static_cast<float>(values[i]);
}

void narrow(const float* from, std::byte* to, DType dtype, std::int64_t n) {
  if (dtype != DType::f64)
    return cpu::isa_table(cpu_isa()).convert[cpu::storage_index(dtype)].store(from, to, n);
  double values[block];
  for (std::int64_t i = 0; i < n; ++i) values[i] = static_cast<double>(from[i]);
  std::memcpy(to, values, static_cast<std::size_t>(n) * sizeof(double));
}

template <class T>
void transpose_as(const std::byte* from, std::int64_t rows, std::int64_t columns, std::byte* to) {
  constexpr std::int64_t side = 32;  // a tile of either matrix stays in the first cache
  for (std::int64_t r0 = 0; r0 < rows; r0 += side)
    for (std::int64_t c0 = 0; c0 < columns; c0 += side)
      for (std::int64_t c = c0; c < std::min(c0 + side, columns); ++c)
        for (std::int64_t r = r0; r < std::min(r0 + side, rows); ++r)
          std::memcpy(to + (c * rows + r) * static_cast<std::int64_t>(sizeof(T)),
                      from + (r * columns + c) * static_cast<std::int64_t>(sizeof(T)), sizeof(T));
}

}  // namespace

void convert_values(std::span<const std::byte> from, DType from_dtype, std::span<std::byte> to,
                    DType to_dtype) {
  require(is_floating(from_dtype) && is_floating(to_dtype), "convert_values: ", name_of(from_dtype), " to ",
          name_of(to_dtype), " is not between floating types");
  const std::size_t from_size = size_of(from_dtype), to_size = size_of(to_dtype);
  const std::size_t count = to.size() / to_size;
  require(from.size() == count * from_size && to.size() == count * to_size, "convert_values: ", from.size(),
          " bytes of ", name_of(from_dtype), " do not match ", to.size(), " of ", name_of(to_dtype));
  if (from_dtype == to_dtype) {
    std::memcpy(to.data(), from.data(), to.size());
    return;
  }
  float values[block];
  for (std::size_t at = 0; at < count; at += block) {
    const auto n = static_cast<std::int64_t>(std::min<std::size_t>(block, count - at));
    widen(from.data() + at * from_size, from_dtype, values, n);
    narrow(values, to.data() + at * to_size, to_dtype, n);
  }
}

void transpose_values(const std::byte* from, std::int64_t rows, std::int64_t columns, std::size_t size,
                      std::byte* to) {
  switch (size) {
    case 1:
      return transpose_as<std::uint8_t>(from, rows, columns, to);
    case 2:
      return transpose_as<std::uint16_t>(from, rows, columns, to);
    case 4:
      return transpose_as<std::uint32_t>(from, rows, columns, to);
    case 8:
      return transpose_as<std::uint64_t>(from, rows, columns, to);
    default:
      fail(ErrorKind::usage, "transpose_values: elements of ", size, " bytes");
  }
}

}  // namespace sherd::tensor
