#include "base/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace sherd {
namespace {

using Tables = std::array<std::array<std::uint32_t, 256>, 8>;

/// tables[k][b]: the remainder of byte b followed by k zero bytes ("slicing by eight", Kounavis and Berry
/// 2005).
constexpr Tables make_tables() {
  Tables tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? 0x82f63b78u : 0);
    tables[0][byte] = crc;
  }
  for (std::size_t slice = 1; slice < 8; ++slice)
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t crc = tables[slice - 1][byte];
      tables[slice][byte] = (crc >> 8) ^ tables[0][crc & 0xff];
    }
  return tables;
}

std::uint32_t update_portable(std::uint32_t crc, const unsigned char* data, std::size_t bytes) {
  static constexpr Tables tables = make_tables();
  for (; bytes >= 8; data += 8, bytes -= 8) {
    std::uint32_t low = crc;
    for (int i = 0; i < 4; ++i) low ^= static_cast<std::uint32_t>(data[i]) << (8 * i);
    crc = tables[7][low & 0xff] ^ tables[6][(low >> 8) & 0xff] ^ tables[5][(low >> 16) & 0xff] ^
          tables[4][low >> 24] ^ tables[3][data[4]] ^ tables[2][data[5]] ^ tables[1][data[6]] ^
          tables[0][data[7]];
  }
  for (; bytes > 0; ++data, --bytes) crc = (crc >> 8) ^ tables[0][(crc ^ *data) & 0xff];
  return crc;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) std::uint32_t update_sse42(std::uint32_t crc, const unsigned char* data,
                                                             std::size_t bytes) {
  std::uint64_t wide = crc;
  for (; bytes >= 8; data += 8, bytes -= 8) {
    std::uint64_t word;
    std::memcpy(&word, data, 8);
    wide = _mm_crc32_u64(wide, word);
  }
  crc = static_cast<std::uint32_t>(wide);
  for (; bytes > 0; ++data, --bytes) crc = _mm_crc32_u8(crc, *data);
  return crc;
}
#endif

}  // namespace

std::uint32_t crc32c(const void* data, std::size_t bytes, std::uint32_t crc) {
#if defined(__x86_64__)
  static const bool hardware = (__builtin_cpu_init(), __builtin_cpu_supports("sse4.2"));
  if (hardware) return ~update_sse42(~crc, static_cast<const unsigned char*>(data), bytes);
#endif
  return crc32c_portable(data, bytes, crc);
}

namespace {
/// Product of two polynomials modulo CRC-32C's; the highest bit is the coefficient of x^0.
std::uint32_t product(std::uint32_t a, std::uint32_t b) {
  std::uint32_t out = 0;
  for (; a != 0; a <<= 1, b = (b >> 1) ^ (b & 1 ? 0x82f63b78u : 0))
    if (a & 0x80000000u) out ^= b;
  return out;
}
}  // namespace

std::uint32_t crc32c_joined(std::uint32_t first, std::uint32_t second, std::uint64_t second_bytes) {
  // The rest shifts the first remainder by x^8 for each byte; by squaring.
  std::uint32_t power = 0x00800000u;
  for (; second_bytes != 0; second_bytes >>= 1, power = product(power, power))
    if (second_bytes & 1) first = product(power, first);
  return first ^ second;
}

std::uint32_t crc32c_portable(const void* data, std::size_t bytes, std::uint32_t crc) {
  return ~update_portable(~crc, static_cast<const unsigned char*>(data), bytes);
}

}  // namespace sherd
