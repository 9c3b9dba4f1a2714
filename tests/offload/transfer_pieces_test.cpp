#include "offload/queue/transfer.h"

#include <gtest/gtest.h>

#include <vector>

#include "offload/file/swap_file.h"

namespace sherd::offload {
namespace {

constexpr std::uint64_t begin = 40 * page, size = 1'000'001;

std::vector<TransferPiece> pieces_of(std::uint64_t offset, std::size_t bytes, std::uintptr_t address,
                                     bool leased, bool write) {
  auto extent = std::make_shared<Extent>();
  extent->begin = begin;
  extent->bytes = size;
  Transfer transfer(nullptr, std::move(extent), write, offset, bytes);
  transfer.memory = reinterpret_cast<std::byte*>(address);  // never followed
  if (leased) transfer.lease = std::make_shared<int>();
  std::vector<TransferPiece> pieces;
  while (transfer.cut < bytes) {
    pieces.push_back(next_piece(transfer, {16 * page, 4 * page}));
    transfer.cut += pieces.back().bytes;
    EXPECT_GT(pieces.back().bytes, 0u);
  }
  return pieces;
}

std::size_t direct_bytes(const std::vector<TransferPiece>& pieces) {
  std::size_t sum = 0;
  for (const TransferPiece& piece : pieces) sum += piece.direct ? piece.bytes : 0;
  return sum;
}

TEST(NextPiece, pieces_follow_each_other_and_cover_the_transfer) {
  for (const std::uint64_t offset : {0, 1, 4095, 4096, 70'000, 999'424})
    for (const std::size_t bytes : {1, 4095, 4096, 4097, 65'536, 65'537, 300'000, 930'001})
      for (const std::uintptr_t address : {0x100000, 0x100001, 0x100fff})
        for (const bool leased : {false, true})
          for (const bool write : {false, true}) {
            if (offset + bytes > size) continue;
            std::uint64_t at = offset;
            for (const TransferPiece& piece : pieces_of(offset, bytes, address, leased, write)) {
              EXPECT_EQ(piece.file_begin + piece.skip, begin + at);
              EXPECT_EQ(reinterpret_cast<std::uintptr_t>(piece.memory), address + (at - offset));
              EXPECT_EQ(piece.file_begin % page, 0u);
              EXPECT_EQ(piece.file_bytes % page, 0u);
              EXPECT_GE(piece.file_bytes, piece.skip + piece.bytes);
              EXPECT_LE(piece.file_bytes, (piece.direct ? 16 : 4) * page);
              EXPECT_LE(piece.file_begin + piece.file_bytes, begin + round_up(size, page));
              if (piece.direct) {
                EXPECT_TRUE(leased);
                EXPECT_EQ(piece.skip, 0u);
                EXPECT_EQ(piece.bytes, piece.file_bytes) << "the kernel would touch what is not the caller's";
                EXPECT_EQ(reinterpret_cast<std::uintptr_t>(piece.memory) % page, 0u);
              }
              const std::uint64_t end = at + piece.bytes;
              EXPECT_EQ(piece.merge, write && (at % page != 0 || (end % page != 0 && end != size)));
              at = end;
            }
            EXPECT_EQ(at, offset + bytes);
          }
}

TEST(NextPiece, leased_memory_goes_directly_but_for_ragged_ends) {
  EXPECT_EQ(direct_bytes(pieces_of(0, 300'000, 0x100000, true, true)), 299'008u);
  EXPECT_EQ(direct_bytes(pieces_of(100, 300'000, 0x100064, true, false)), 294'912u);
  EXPECT_EQ(direct_bytes(pieces_of(0, 300'000, 0x100000, false, false)), 0u);
  EXPECT_EQ(direct_bytes(pieces_of(0, 300'000, 0x100001, true, false)), 0u);
  EXPECT_EQ(direct_bytes(pieces_of(4096, 8192, 0x100000, true, false)), 8192u);
  EXPECT_EQ(direct_bytes(pieces_of(4096, 8193, 0x100000, true, false)), 0u) << "one copied request, not two";
}

}  // namespace
}  // namespace sherd::offload
