// Collectives on memory that peers cannot see: copied through the stage in chunks. The halves of the stage
// take turns, so one barrier per chunk is enough (see SharedExchange).
#include <algorithm>
#include <cstring>

#include "comm/exchange/shared_exchange.h"

namespace sherd::comm {

std::vector<SharedExchange::Chunk> SharedExchange::cut(const std::vector<std::size_t>& pieces,
                                                       const std::vector<std::int64_t>& elements,
                                                       const std::vector<std::size_t>& element_bytes,
                                                       std::size_t copies) const {
  constexpr std::size_t line = 64;
  const std::size_t room = board_->stage_bytes();
  std::vector<Chunk> chunks;
  std::size_t used = room;  // full: the first segment opens a chunk
  for (std::size_t k = 0; k < pieces.size(); ++k) {
    for (std::int64_t begin = 0; begin < elements[k];) {
      // A small rest of a chunk is not worth a segment of its own.
      if (used + copies * element_bytes[k] * 64 > room) {
        chunks.emplace_back();
        used = 0;
      }
      const auto fits = static_cast<std::int64_t>((room - used) / (copies * element_bytes[k]));
      const std::int64_t end = std::min(elements[k], begin + fits);
      chunks.back().push_back({pieces[k], begin, end, used});
      used =
          (used + static_cast<std::size_t>(end - begin) * copies * element_bytes[k] + line - 1) / line * line;
      begin = end;
    }
  }
  return chunks;
}

void SharedExchange::staged_gather(const Call& call, const std::vector<std::size_t>& pieces) {
  std::vector<std::int64_t> elements;
  std::vector<std::size_t> widths;
  for (const std::size_t i : pieces) {
    elements.push_back(call.gathers[i].shard.numel());
    widths.push_back(size_of(call.gathers[i].shard.dtype()));
  }
  for (const Chunk& chunk : cut(pieces, elements, widths, 1)) {
    ++chunks_;
    for (const Segment& s : chunk) {
      const Tensor part = call.gathers[s.piece].shard.range(s.begin, s.end);
      std::memcpy(stage(rank()) + s.offset, part.raw(), part.bytes());
    }
    board_->barrier(call);
    for (int k = 1; k < size(); ++k) {
      const int peer = (rank() + k) % size();
      for (const Segment& s : chunk) {
        const auto& [shard, full] = call.gathers[s.piece];
        const Tensor part = full.range(peer * shard.numel() + s.begin, peer * shard.numel() + s.end);
        std::memcpy(part.raw(), stage(peer) + s.offset, part.bytes());
      }
    }
  }
}

void SharedExchange::staged_reduce_scatter(const Call& call, const std::vector<std::size_t>& pieces) {
  const auto n = static_cast<std::size_t>(size());
  std::vector<std::int64_t> elements;
  std::vector<std::size_t> widths;
  for (const std::size_t i : pieces) {
    elements.push_back(call.reduces[i].end - call.reduces[i].begin);
    widths.push_back(size_of(call.reduces[i].full.dtype()));
  }
  std::vector<const std::byte*> from(n);
  for (const Chunk& chunk : cut(pieces, elements, widths, n)) {
    ++chunks_;
    for (const Segment& s : chunk) {
      const ReducePiece& piece = call.reduces[s.piece];
      for (std::size_t q = 0; q < n; ++q) {
        const std::int64_t base = static_cast<std::int64_t>(q) * piece.shard.numel() + piece.begin;
        const Tensor part = piece.full.range(base + s.begin, base + s.end);
        std::memcpy(stage(rank()) + s.offset + q * part.bytes(), part.raw(), part.bytes());
      }
    }
    board_->barrier(call);
    for (const Segment& s : chunk) {
      const ReducePiece& piece = call.reduces[s.piece];
      const std::size_t bytes = static_cast<std::size_t>(s.end - s.begin) * size_of(piece.full.dtype());
      for (int r = 0; r < size(); ++r)
        from[static_cast<std::size_t>(r)] = stage(r) + s.offset + static_cast<std::size_t>(rank()) * bytes;
      reduce_piece(call, piece, from, piece.begin + s.begin, piece.begin + s.end);
    }
  }
}

void SharedExchange::staged_all_reduce(const Call& call) {
  const auto n = static_cast<std::size_t>(size());
  const std::size_t width = size_of(call.x.dtype());
  const ReduceSpec how{call.op, call.factor, call.x.dtype(), call.x.dtype(), call.x.dtype()};
  std::vector<const std::byte*> from(n);
  std::vector<std::byte*> to(n);
  for (const Chunk& chunk : cut({0}, {call.x.numel()}, {width}, 1)) {
    ++chunks_;
    const Segment& s = chunk.front();
    const Tensor part = call.x.range(s.begin, s.end);
    std::memcpy(stage(rank()), part.raw(), part.bytes());
    board_->barrier(call);
    const std::int64_t begin = part_begin(part.numel(), size(), rank());
    const std::int64_t end = part_begin(part.numel(), size(), rank() + 1);
    for (int r = 0; r < size(); ++r) {
      to[static_cast<std::size_t>(r)] = stage(r) + static_cast<std::size_t>(begin) * width;
      from[static_cast<std::size_t>(r)] = to[static_cast<std::size_t>(r)];
    }
    worker_->reduce(how, from, to, end - begin);
    board_->barrier(call);
    std::memcpy(part.raw(), stage(rank()), part.bytes());
  }
}

void SharedExchange::staged_broadcast(const Call& call) {
  for (const Chunk& chunk : cut({0}, {call.x.numel()}, {size_of(call.x.dtype())}, 1)) {
    ++chunks_;
    const Segment& s = chunk.front();
    const Tensor part = call.x.range(s.begin, s.end);
    if (rank() == call.peer) std::memcpy(stage(rank()), part.raw(), part.bytes());
    board_->barrier(call);
    if (rank() != call.peer) std::memcpy(part.raw(), stage(call.peer), part.bytes());
  }
}

void SharedExchange::staged_all_to_all(const Call& call, const std::vector<std::int64_t>& counts) {
  const auto n = static_cast<std::size_t>(size());
  const auto me = static_cast<std::size_t>(rank());
  const std::size_t width = size_of(call.x.dtype());
  const std::size_t room = board_->stage_bytes() / n / width;  // elements per block and chunk
  const auto longest = static_cast<std::size_t>(*std::max_element(counts.begin(), counts.end()));
  const auto count_of = [&](std::size_t p, std::size_t q, std::size_t done) {
    const auto total = static_cast<std::size_t>(counts[p * n + q]);
    return std::min(room, total - std::min(total, done)) * width;
  };
  for (std::size_t done = 0; done < longest; done += room) {
    ++chunks_;
    const std::byte* from = call.x.raw();
    for (std::size_t q = 0; q < n; ++q) {
      if (const std::size_t bytes = count_of(me, q, done))
        std::memcpy(stage(rank()) + q * room * width, from + done * width, bytes);
      from += static_cast<std::size_t>(counts[me * n + q]) * width;
    }
    board_->barrier(call);
    std::byte* to = call.out.raw();
    for (std::size_t p = 0; p < n; ++p) {
      if (const std::size_t bytes = count_of(p, me, done))
        std::memcpy(to + done * width, stage(static_cast<int>(p)) + me * room * width, bytes);
      to += static_cast<std::size_t>(counts[p * n + me]) * width;
    }
  }
}

}  // namespace sherd::comm
