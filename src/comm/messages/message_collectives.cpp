// The collectives of MessageExchange, once all ranks are known to be in the call.
#include <algorithm>
#include <span>

#include "comm/messages/message_exchange.h"

namespace sherd::comm {

void MessageExchange::all_gather(Call& call) {
  for (const auto& [shard, full] : call.gathers) {
    const std::size_t bytes = shard.bytes();
    for (int k = 1; k < size(); ++k) {
      const int from = (rank() + k) % size(), to = (rank() + size() - k) % size();
      receive_from(from, full.raw() + static_cast<std::size_t>(from) * bytes, bytes);
      send_to(to, shard.raw(), bytes);
    }
    worker_->copy(full.raw() + static_cast<std::size_t>(rank()) * bytes, shard.raw(), bytes);
  }
  finish(call);
}

template <class At, class Count, class Sum>
void MessageExchange::reduce_parts(const Call& call, DType dtype, const At& full_at, const Count& count,
                                   const Sum& sum) {
  const std::size_t width = size_of(dtype);
  const auto chunk = static_cast<std::int64_t>((std::size_t{1} << 20) / width);
  std::int64_t longest = 0;
  for (int r = 0; r < size(); ++r) longest = std::max(longest, count(r));
  const std::size_t room = static_cast<std::size_t>(std::min(chunk, longest)) * width;
  scratch_.resize(room * static_cast<std::size_t>(size()));
  std::vector<const std::byte*> from(static_cast<std::size_t>(size()));
  for (std::int64_t begin = 0; begin < longest; begin += chunk) {
    const auto elements = [&](int r) { return std::clamp<std::int64_t>(count(r) - begin, 0, chunk); };
    for (int r = 0; r < size(); ++r) {
      std::byte* place = scratch_.data() + static_cast<std::size_t>(r) * room;
      from[static_cast<std::size_t>(r)] = r == rank() ? full_at(r, begin) : place;
      if (r != rank()) receive_from(r, place, static_cast<std::size_t>(elements(rank())) * width);
    }
    for (int k = 1; k < size(); ++k) {
      const int to = (rank() + k) % size();
      send_to(to, full_at(to, begin), static_cast<std::size_t>(elements(to)) * width);
    }
    finish(call);
    if (elements(rank()) > 0) sum(std::span<const std::byte* const>(from), begin, elements(rank()));
  }
}

void MessageExchange::reduce_scatter(Call& call) {
  for (const ReducePiece& piece : call.reduces) {
    const DType in = piece.full.dtype(), out = piece.shard.dtype();
    const auto at = [&](int r, std::int64_t begin) -> const std::byte* {
      return piece.full.raw() +
             static_cast<std::size_t>(r * piece.shard.numel() + piece.begin + begin) * size_of(in);
    };
    reduce_parts(
        call, in, at, [&](int) { return piece.end - piece.begin; },
        [&](std::span<const std::byte* const> from, std::int64_t begin, std::int64_t n) {
          std::byte* to = piece.shard.raw() + static_cast<std::size_t>(piece.begin + begin) * size_of(out);
          worker_->reduce(fold_of(piece, call.rounding, piece.begin + begin), from, {&to, 1}, n);
        });
  }
}

void MessageExchange::all_reduce(Call& call) {
  const DType dtype = call.x.dtype();
  const std::int64_t n = call.x.numel();
  const auto begin_of = [&](int r) { return part_begin(n, size(), r); };
  const auto at = [&](int r, std::int64_t begin) {
    return call.x.raw() + static_cast<std::size_t>(begin_of(r) + begin) * size_of(dtype);
  };
  reduce_parts(
      call, dtype, at, [&](int r) { return begin_of(r + 1) - begin_of(r); },
      [&](std::span<const std::byte* const> from, std::int64_t begin, std::int64_t count) {
        std::byte* to = at(rank(), begin);
        worker_->reduce({call.op, call.factor, dtype, dtype, dtype}, from, {&to, 1}, count);
      });
  const auto bytes = [&](int r) {
    return static_cast<std::size_t>(begin_of(r + 1) - begin_of(r)) * size_of(dtype);
  };
  for (int k = 1; k < size(); ++k) {
    const int from = (rank() + k) % size(), to = (rank() + size() - k) % size();
    receive_from(from, at(from, 0), bytes(from));
    send_to(to, at(rank(), 0), bytes(rank()));
  }
  finish(call);
}

void MessageExchange::broadcast(Call& call) {
  if (rank() != call.peer)
    receive_from(call.peer, call.x.raw(), call.x.bytes());
  else
    for (int r = 0; r < size(); ++r)
      if (r != rank()) send_to(r, call.x.raw(), call.x.bytes());
  finish(call);
}

void MessageExchange::all_to_all(Call& call) {
  std::vector<std::int64_t> mine = call.in_counts;
  mine.insert(mine.end(), call.out_counts.begin(), call.out_counts.end());
  if (const std::string wrong = count_mismatch(exchange_words(call, mine), size()); !wrong.empty())
    fail_and_throw(cat(name_, ": ", describe(call), ": ", wrong));
  const std::size_t width = size_of(call.x.dtype());
  const std::byte* from = call.x.raw();
  std::byte* to = call.out.raw();
  const std::byte* own_from = nullptr;
  std::byte* own_to = nullptr;
  for (int r = 0; r < size(); ++r) {
    const std::size_t sent = static_cast<std::size_t>(call.in_counts[static_cast<std::size_t>(r)]) * width;
    const std::size_t taken = static_cast<std::size_t>(call.out_counts[static_cast<std::size_t>(r)]) * width;
    if (r == rank())
      own_from = from, own_to = to;
    else
      receive_from(r, to, taken), send_to(r, from, sent);
    from += sent, to += taken;
  }
  worker_->copy(own_to, own_from,
                static_cast<std::size_t>(call.in_counts[static_cast<std::size_t>(rank())]) * width);
  finish(call);
}

}  // namespace sherd::comm
