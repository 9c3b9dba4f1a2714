#include "comm/exchange/machine.h"

#include <cstring>

namespace sherd::comm {
namespace {

constexpr std::size_t line = 64;
std::size_t room_of(const Board& board, const Topology& topology) {
  if (topology.machines() == 1) return board.stage_bytes();
  return topology.machines() == topology.size() ? MachineTransport::unstaged_room
                                                : BoardLayout::spanning_stage;
}

}  // namespace

MachineTransport::MachineTransport(std::shared_ptr<Board> board, std::shared_ptr<PeerMemory> memory,
                                   const Topology& topology, int threads)
    : board_(std::move(board)),
      memory_(std::move(memory)),
      topology_(topology),
      room_(room_of(*board_, topology)),
      cpu_(make_cpu_worker(threads)),
      worker_(cpu_.get()) {}

void MachineTransport::choose_worker(const Call& call) {
  require(!call.gpu || gpu_, board_->name(), ": tensors of a GPU, which this group was not bound to");
  worker_ = call.gpu ? gpu_.get() : cpu_.get();
}

// ---- rounds ----

void MachineTransport::open(const Call& call, std::vector<Offer> offers) {
  CallDescriptor& mine = board_->descriptor(board_->rank(), ++rounds_);
  mine.signature = sign(call);
  own_ = std::move(offers);
  read_in_place_ = false;
  std::size_t used = 0;
  for (std::size_t i = 0; i < own_.size(); ++i) {
    const Offer& offer = own_[i];
    const bool readable =
        offer.kind == OfferKind::words || (offer.kind == OfferKind::tensor && worker_->immediate());
    if (!readable || used + offer.bytes > CallDescriptor::payload_bytes) {
      mine.addresses[i] = memory_->locate(offer.data, offer.bytes);
      continue;
    }
    mine.addresses[i] = {Address::in_descriptor, used};
    if (offer.bytes) std::memcpy(mine.payload.data() + used, offer.data, offer.bytes);
    used += (offer.bytes + 15) / 16 * 16;
  }
  meet(call);
  compare();
}

void MachineTransport::meet(const Call& call) {
  worker_->publish();
  board_->barrier(call);
  worker_->follow();
}

void MachineTransport::close(const Call& call) {
  if (read_in_place_) meet(call);
}

void MachineTransport::compare() {
  const CallSignature& mine = board_->descriptor(board_->rank(), rounds_).signature;
  std::vector<CallSignature> all;
  bool same = true;
  for (int r = 0; r < board_->size(); ++r)
    same = same && std::memcmp(&board_->descriptor(r, rounds_).signature, &mine, sizeof mine) == 0;
  if (same) return;
  std::vector<int> ranks;
  for (int r = 0; r < board_->size(); ++r) {
    all.push_back(board_->descriptor(r, rounds_).signature);
    ranks.push_back(board_->world_rank(topology_.locals()[static_cast<std::size_t>(r)]));
  }
  board_->fail_and_throw(cat(board_->name(), ": ", mismatch(all, ranks)));
}

const std::byte* MachineTransport::source(int rank, std::size_t offer) const {
  if (rank == topology_.rank()) return own_[offer].data;
  const int peer = topology_.local_index(rank);
  const CallDescriptor& descriptor = board_->descriptor(peer, rounds_);
  const Address& address = descriptor.addresses[offer];
  if (address.region == Address::in_descriptor) return descriptor.payload.data() + address.offset;
  // A failed peer may have left this round already, and freed what it offered.
  if (board_->failed()) board_->throw_failure();
  return memory_->resolve(peer, address);
}

bool MachineTransport::any_address(const CopyBlocks& blocks,
                                   const std::function<bool(const Address&)>& look) const {
  for (const int r : topology_.locals()) {
    const Address& address = board_->descriptor(topology_.local_index(r), rounds_).addresses[blocks.offer];
    if (!look(address)) continue;
    for (int k = 0; k < blocks.blocks; ++k)
      if (blocks.count(r, k) > 0) return true;
  }
  return false;
}

bool MachineTransport::hidden(const CopyBlocks& blocks) const {
  return board_->size() > 1 &&
         any_address(blocks, [](const Address& address) { return address.region == Address::hidden; });
}

bool MachineTransport::came_inside(const CopyBlocks& blocks) const {
  return !any_address(blocks,
                      [](const Address& address) { return address.region != Address::in_descriptor; });
}

// ---- visits ----

std::byte* MachineTransport::stage(int rank, std::size_t offset) const {
  return board_->stage(topology_.local_index(rank), chunks_) + offset;
}

std::byte* MachineTransport::View::at(int rank, int block) const {
  const std::size_t width = blocks_->width;
  if (staged_)
    return machine_->stage(rank, offset_ + static_cast<std::size_t>(block * (end - begin)) * width);
  return const_cast<std::byte*>(machine_->source(rank, blocks_->offer)) +
         static_cast<std::size_t>(blocks_->first(rank, block) + begin) * width;
}

void MachineTransport::View::copy(std::byte* to, int rank, int block) const {
  const std::size_t bytes = static_cast<std::size_t>(count(rank, block)) * blocks_->width;
  if (bytes == 0) return;
  // Bytes that were just staged are in the caches.
  staged_ ? void(std::memcpy(to, at(rank, block), bytes))
          : machine_->worker().copy(to, at(rank, block), bytes);
}

std::vector<MachineTransport::Chunk> MachineTransport::cut(std::span<const CopyBlocks> all,
                                                           const std::vector<bool>& taken) const {
  std::vector<Chunk> chunks;
  std::size_t used = room_;  // full: the first segment opens a chunk
  for (std::size_t i = 0; i < all.size(); ++i) {
    const std::size_t row = static_cast<std::size_t>(all[i].blocks) * all[i].width;
    for (std::int64_t begin = 0; taken[i] && begin < all[i].longest;) {
      // A small rest of a chunk is not worth a segment of its own.
      if (used + row * 64 > room_) {
        chunks.emplace_back();
        used = 0;
      }
      const auto fits = std::max<std::int64_t>(1, static_cast<std::int64_t>((room_ - used) / row));
      const std::int64_t end = std::min(all[i].longest, begin + fits);
      chunks.back().push_back({i, begin, end, used});
      used = (used + static_cast<std::size_t>(end - begin) * row + line - 1) / line * line;
      begin = end;
    }
  }
  return chunks;
}

void MachineTransport::copy_staged(const CopyBlocks& blocks, const View& view, bool to_stage) {
  const int rank = topology_.rank();
  for (int k = 0; k < blocks.blocks; ++k) {
    const std::size_t bytes = static_cast<std::size_t>(view.count(rank, k)) * blocks.width;
    if (bytes == 0) continue;
    std::byte* const own =
        own_[blocks.offer].data + static_cast<std::size_t>(blocks.first(rank, k) + view.begin) * blocks.width;
    to_stage ? std::memcpy(view.at(rank, k), own, bytes) : std::memcpy(own, view.at(rank, k), bytes);
  }
}

void MachineTransport::visit(const Call& call, std::span<const CopyBlocks> all, Order order,
                             const Visit& visitor, bool write_back) {
  std::vector<bool> staged(all.size()), taken(all.size(), true);
  for (std::size_t i = 0; i < all.size(); ++i) {
    staged[i] = hidden(all[i]);
    if (!staged[i] && !came_inside(all[i]) && board_->size() > 1) read_in_place_ = true;
    if (order == Order::chunked) continue;
    taken[i] = staged[i];
    if (!staged[i] && all[i].longest > 0) visitor(i, View(*this, all[i], 0, all[i].longest, false, 0));
  }
  const auto each = [&](const Chunk& chunk, const std::function<void(std::size_t, const View&)>& body) {
    for (const StagedRun& s : chunk)
      body(s.index, View(*this, all[s.index], s.begin, s.end, staged[s.index], s.offset));
  };
  for (const Chunk& chunk : cut(all, taken)) {
    const bool any =
        std::any_of(chunk.begin(), chunk.end(), [&](const StagedRun& s) { return bool{staged[s.index]}; });
    if (any) {
      ++chunks_;
      each(chunk, [&](std::size_t i, const View& view) {
        if (staged[i]) copy_staged(all[i], view, true);
      });
      board_->barrier(call);
    }
    each(chunk, visitor);
    if (!any || !write_back) continue;
    board_->barrier(call);
    each(chunk, [&](std::size_t i, const View& view) {
      if (staged[i]) copy_staged(all[i], view, false);
    });
  }
}

}  // namespace sherd::comm
