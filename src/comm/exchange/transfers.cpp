// Point to point over the board: one channel of letters per ordered pair of ranks. The receiver copies
// straight from the sender's memory, or, where that is hidden, from the pair's ring.
#include <algorithm>
#include <cstring>

#include "comm/exchange/shared_exchange.h"

namespace sherd::comm {
namespace {
enum Phase : int { to_post, filling, posted };
}

void SharedExchange::start(Call& transfer) {
  auto& counter =
      (transfer.kind == Collective::send ? sends_ : receives_)[static_cast<std::size_t>(transfer.peer)];
  transfer.index = counter++;
  transfer.deadline = Deadline::after_seconds(board_->timeout());
}

bool SharedExchange::advance(Call& transfer) {
  return transfer.kind == Collective::send ? advance_send(transfer) : advance_receive(transfer);
}

bool SharedExchange::advance_send(Call& transfer) {
  Channel& channel = board_->channel(rank(), transfer.peer);
  const auto peer = static_cast<std::size_t>(transfer.peer);
  const std::uint64_t taken = channel.taken.load(std::memory_order_acquire);
  if (transfer.phase == to_post) {
    if (channel.posted.load(std::memory_order_relaxed) != transfer.index ||
        transfer.index - taken >= Channel::capacity)
      return false;
    Letter& letter = channel.letters[transfer.index % Channel::capacity];
    letter.signature = sign(transfer);
    letter.address = memory_->locate(transfer.x.raw(), transfer.x.bytes());
    transfer.phase = letter.address.region == Address::hidden ? filling : posted;
    channel.posted.store(transfer.index + 1, std::memory_order_release);
    Board::ring_bell(board_->bell(transfer.peer));
  }
  // The ring takes the bytes of hidden letters in the order of the letters.
  if (filled_letters_[peer] == transfer.index) {
    if (transfer.phase == filling && !fill_ring(transfer)) return false;
    transfer.phase = posted;
    filled_letters_[peer] = transfer.index + 1;
  }
  return transfer.phase == posted && taken > transfer.index;
}

bool SharedExchange::fill_ring(Call& transfer) {
  Channel& channel = board_->channel(rank(), transfer.peer);
  std::byte* ring = board_->ring(rank(), transfer.peer);
  const std::size_t size = board_->ring_bytes();
  while (transfer.moved < transfer.x.bytes()) {
    const std::uint64_t filled = channel.filled.load(std::memory_order_relaxed);
    const std::uint64_t room = size - (filled - channel.drained.load(std::memory_order_acquire));
    if (room == 0) return false;
    const std::size_t at = filled % size;
    const std::size_t bytes =
        std::min({static_cast<std::size_t>(room), size - at, transfer.x.bytes() - transfer.moved});
    std::memcpy(ring + at, transfer.x.raw() + transfer.moved, bytes);
    transfer.moved += bytes;
    channel.filled.store(filled + bytes, std::memory_order_release);
    Board::ring_bell(board_->bell(transfer.peer));
  }
  return true;
}

bool SharedExchange::advance_receive(Call& transfer) {
  Channel& channel = board_->channel(transfer.peer, rank());
  if (channel.taken.load(std::memory_order_relaxed) != transfer.index ||
      channel.posted.load(std::memory_order_acquire) <= transfer.index)
    return false;
  const Letter& letter = channel.letters[transfer.index % Channel::capacity];
  const Signature mine = sign(transfer);
  if (letter.signature.elements != mine.elements || letter.signature.dtype != mine.dtype)
    board_->fail_and_throw(cat(name(), ": mismatched transfer: rank ", transfer.peer, " called ",
                               describe(letter.signature), "; rank ", rank(), " called ", describe(mine)));
  cpu_->begin(transfer, transfer.x.bytes());
  if (letter.address.region != Address::hidden)
    copy_from_peer(transfer, letter.address);
  else if (!drain_ring(transfer))
    return false;
  channel.taken.store(transfer.index + 1, std::memory_order_release);
  Board::ring_bell(board_->bell(transfer.peer));
  return true;
}

void SharedExchange::copy_from_peer(const Call& transfer, const Address& address) {
  memory_->enter();
  // A sender that has failed frees its memory once nobody is inside.
  const bool failed = board_->failed();
  if (!failed) cpu_->copy(transfer.x.raw(), memory_->resolve(transfer.peer, address), transfer.x.bytes());
  memory_->leave();
  if (failed) board_->throw_failure();
}

bool SharedExchange::drain_ring(Call& transfer) {
  Channel& channel = board_->channel(transfer.peer, rank());
  const std::byte* ring = board_->ring(transfer.peer, rank());
  const std::size_t size = board_->ring_bytes();
  while (transfer.moved < transfer.x.bytes()) {
    const std::uint64_t drained = channel.drained.load(std::memory_order_relaxed);
    const std::uint64_t ready = channel.filled.load(std::memory_order_acquire) - drained;
    if (ready == 0) return false;
    const std::size_t at = drained % size;
    const std::size_t bytes =
        std::min({static_cast<std::size_t>(ready), size - at, transfer.x.bytes() - transfer.moved});
    std::memcpy(transfer.x.raw() + transfer.moved, ring + at, bytes);
    transfer.moved += bytes;
    channel.drained.store(drained + bytes, std::memory_order_release);
    Board::ring_bell(board_->bell(transfer.peer));
  }
  return true;
}

void SharedExchange::await(const std::function<bool()>& ready, const std::vector<Call*>& active) {
  const auto missing = [&] {
    std::vector<int> peers;
    for (const Call* transfer : active) peers.push_back(transfer->peer);
    std::sort(peers.begin(), peers.end());
    peers.erase(std::unique(peers.begin(), peers.end()), peers.end());
    return peers;
  };
  try {
    board_->wait(board_->bell(rank()), ready, missing, *active.front(), *active.front()->deadline);
  } catch (const std::exception& error) {
    // As after a failed collective: the receiver may be reading what the caller is about to free.
    board_->fail(cat(name(), ": rank ", rank(), " failed: ", error.what()));
    memory_->outlast_readers();
    throw;
  }
}

}  // namespace sherd::comm
