#include <algorithm>
#include <cstring>

#include "comm/exchange/machine.h"

namespace sherd::comm {
namespace {
enum MemoryPhase : int { to_post, filling, posted };
}

void MemoryTransfers::start(Call& transfer) {
  auto& counters = transfer.kind == Collective::send ? sends_ : receives_;
  transfer.index = counters[static_cast<std::size_t>(peer_of(transfer))]++;
}

bool MemoryTransfers::advance(Call& transfer) {
  return transfer.kind == Collective::send ? advance_send(transfer) : advance_receive(transfer);
}

bool MemoryTransfers::advance_send(Call& transfer) {
  Board& board = machine_.board();
  PairChannel& channel = board.channel(board.rank(), peer_of(transfer));
  const auto peer = static_cast<std::size_t>(peer_of(transfer));
  const std::uint64_t taken = channel.taken.load(std::memory_order_acquire);
  if (transfer.phase == to_post) {
    if (channel.posted.load(std::memory_order_relaxed) != transfer.index ||
        transfer.index - taken >= PairChannel::capacity)
      return false;
    MessageSlot& slot = channel.slots[transfer.index % PairChannel::capacity];
    slot.signature = sign(transfer);
    slot.address = machine_.memory().locate(transfer.x.raw(), transfer.x.bytes());
    transfer.phase = slot.address.region == Address::hidden ? filling : posted;
    channel.posted.store(transfer.index + 1, std::memory_order_release);
    board.moved(peer_of(transfer)).wake_all();
  }
  // The ring takes the bytes of hidden slots in the order of the slots.
  if (filled_slots_[peer] == transfer.index) {
    if (transfer.phase == filling && !fill_ring(transfer)) return false;
    transfer.phase = posted;
    filled_slots_[peer] = transfer.index + 1;
  }
  return transfer.phase == posted && taken > transfer.index;
}

bool MemoryTransfers::fill_ring(Call& transfer) {
  Board& board = machine_.board();
  PairChannel& channel = board.channel(board.rank(), peer_of(transfer));
  std::byte* ring = board.ring(board.rank(), peer_of(transfer));
  const std::size_t size = board.ring_bytes();
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
    board.moved(peer_of(transfer)).wake_all();
  }
  return true;
}

bool MemoryTransfers::advance_receive(Call& transfer) {
  Board& board = machine_.board();
  PairChannel& channel = board.channel(peer_of(transfer), board.rank());
  if (channel.taken.load(std::memory_order_relaxed) != transfer.index ||
      channel.posted.load(std::memory_order_acquire) <= transfer.index)
    return false;
  const MessageSlot& slot = channel.slots[transfer.index % PairChannel::capacity];
  board.fail_if(transfer_mismatch(transfer, slot.signature, board.world_rank(topology_.rank())));
  machine_.cpu().begin(transfer, transfer.x.bytes());
  if (slot.address.region != Address::hidden)
    copy_from_peer(transfer, slot.address);
  else if (!drain_ring(transfer))
    return false;
  channel.taken.store(transfer.index + 1, std::memory_order_release);
  board.moved(peer_of(transfer)).wake_all();
  return true;
}

void MemoryTransfers::copy_from_peer(const Call& transfer, const Address& address) {
  Board& board = machine_.board();
  machine_.memory().enter();
  // A sender that has failed frees its memory once nobody is inside.
  const bool failed = board.failed();
  if (!failed)
    machine_.cpu().copy(transfer.x.raw(), machine_.memory().resolve(peer_of(transfer), address),
                        transfer.x.bytes());
  machine_.memory().leave();
  if (failed) board.throw_failure();
}

bool MemoryTransfers::drain_ring(Call& transfer) {
  Board& board = machine_.board();
  PairChannel& channel = board.channel(peer_of(transfer), board.rank());
  const std::byte* ring = board.ring(peer_of(transfer), board.rank());
  const std::size_t size = board.ring_bytes();
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
    board.moved(peer_of(transfer)).wake_all();
  }
  return true;
}

}  // namespace sherd::comm
