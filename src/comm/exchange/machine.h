#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "comm/exchange/board.h"
#include "comm/exchange/descriptor.h"
#include "comm/exchange/topology.h"
#include "comm/exchange/worker.h"

namespace sherd::comm {

/// Which memory the ranks of a machine can read from each other; ranks as on the board.
class PeerMemory {
 public:
  virtual ~PeerMemory() = default;
  /// Where peers find [data, data + bytes) of this rank; hidden when they cannot.
  virtual Address locate(const std::byte* data, std::size_t bytes) const = 0;
  /// The bytes that `rank` located, seen from here.
  virtual std::byte* resolve(int rank, const Address& address) const = 0;

  /// Around every collective and every copy of a transfer of this rank: between the two it may be reading
  /// peers.
  virtual void enter() {}
  virtual void leave() noexcept {}
  /// After a failed collective or transfer, before its tensors may go: returns when no peer can still be
  /// reading them. Nothing to do where resolved memory stays mapped whatever its owner does.
  virtual void outlast_readers() noexcept {}
};

enum class OfferKind : std::uint8_t {
  tensor,  ///< holds its bytes when the round opens
  part,    ///< likewise, but for elements that no rank reads: those may be changing
  later,   ///< is filled during the round
  words,   ///< a few words of the host, which travel in the descriptor whatever the worker
};
/// Memory of this rank that ranks of its machine will read.
struct Offer {
  std::byte* data = nullptr;
  std::size_t bytes = 0;
  OfferKind kind = OfferKind::tensor;
};

/// A cut of an offer into blocks, the same on all ranks of the machine: block k of rank r is count(r, k)
/// elements of `width` bytes from element first(r, k) of r's offer on. Ranks by their numbers in the group.
struct CopyBlocks {
  std::size_t offer = 0;  ///< index among those of the round
  std::size_t width = 1;
  int blocks = 1;
  std::function<std::int64_t(int rank, int block)> first, count;
  std::int64_t longest = 0;  ///< the longest block of any rank; the same on all ranks of the group
};

/// The transport between ranks that share a machine's memory: they read each other's tensors where they lie.
/// Knows nothing of collectives.
///
/// - A round is: publish where the offers lie, barrier, compare calls, read peers, barrier. Offers of up to
///   CallDescriptor::payload_bytes travel in the descriptor itself and need the first barrier only: a
///   descriptor is overwritten two rounds later, and whoever does that has passed the barrier to which all
///   came after they had read it.
/// - With tensors of a GPU (ranks of one process on one card) the same rounds queue work on each rank's
///   stream, and events go the way of the barriers, so that streams wait for each other as the threads do.
///   Nothing but words travels in descriptors then.
/// - Memory that peers cannot see goes through the stage in chunks, halves in turn, with the same argument.
class MachineTransport {
 public:
  /// Elements [begin, end) of every rank's blocks, while they can be read.
  class View {
   public:
    std::int64_t begin, end;
    /// Where element `begin` of block `block` of `rank` is seen here.
    std::byte* at(int rank, int block) const;
    /// Copies the view's part of a block.
    void copy(std::byte* to, int rank, int block) const;
    /// How many of the block's elements are in the view.
    std::int64_t count(int rank, int block) const {
      return std::clamp<std::int64_t>(blocks_->count(rank, block) - begin, 0, end - begin);
    }

   private:
    friend class MachineTransport;
    View(MachineTransport& machine, const CopyBlocks& blocks, std::int64_t from, std::int64_t to, bool staged,
         std::size_t offset)
        : begin(from), end(to), machine_(&machine), blocks_(&blocks), staged_(staged), offset_(offset) {}
    MachineTransport* machine_;
    const CopyBlocks* blocks_;
    bool staged_;
    std::size_t offset_;  ///< in the stage
  };
  /// How a visit proceeds.
  enum class Order : std::uint8_t {
    whole,    ///< blocks that can be read in place are visited at once
    chunked,  ///< all in the same chunks on all machines, whatever can be read in place
  };
  /// The size of a chunk where every rank has its machine to itself, and hides nothing.
  static constexpr std::size_t unstaged_room = std::size_t{8} << 20;
  using Visit = std::function<void(std::size_t index, const View& view)>;

  MachineTransport(std::shared_ptr<Board> board, std::shared_ptr<PeerMemory> memory, const Topology& topology,
                   int threads);
  ~MachineTransport() { board_->depart(); }
  MachineTransport(const MachineTransport&) = delete;
  MachineTransport& operator=(const MachineTransport&) = delete;

  Board& board() { return *board_; }
  PeerMemory& memory() { return *memory_; }
  Worker& worker() { return *worker_; }
  Worker& cpu() { return *cpu_; }
  void use_gpu_worker(std::unique_ptr<Worker> worker) { gpu_ = std::move(worker); }
  /// Before a call: by whom its bytes are copied and summed. Throws Error{usage} for a GPU that the group is
  /// not bound to.
  void choose_worker(const Call& call);

  /// Opens a round: all ranks of the machine come, and have made the same call.
  void open(const Call& call, std::vector<Offer> offers);
  /// Visits blocks of the open round's offers. `write_back`: visitors write to peers' blocks, and the bytes
  /// lie there once the round is closed.
  void visit(const Call& call, std::span<const CopyBlocks> all, Order order, const Visit& visitor,
             bool write_back = false);
  /// Ends a round: where peers may have been reading this rank's memory itself, all come again.
  void close(const Call& call);
  /// A barrier inside a round.
  void meet(const Call& call);
  /// True when all ranks' bytes of these blocks came in descriptors, where nobody can write to them.
  bool came_inside(const CopyBlocks& blocks) const;
  /// The words that a rank offered.
  const std::byte* words(int rank, std::size_t offer) const { return source(rank, offer); }

 private:
  /// A range of one offer's blocks inside a chunk.
  struct StagedRun {
    std::size_t index = 0;
    std::int64_t begin = 0, end = 0;
    std::size_t offset = 0;  ///< in the stage
  };
  using Chunk = std::vector<StagedRun>;

  void compare();
  /// Calls look(region of the address) for every rank that has a part of these blocks, until one is true.
  bool any_address(const CopyBlocks& blocks, const std::function<bool(const Address&)>& look) const;
  bool hidden(const CopyBlocks& blocks) const;
  /// Cuts the offers that `taken` names into chunks that fit the stage.
  std::vector<Chunk> cut(std::span<const CopyBlocks> all, const std::vector<bool>& taken) const;
  /// Copies the view's part of this rank's own blocks to the stage, or from there.
  void copy_staged(const CopyBlocks& blocks, const View& view, bool to_stage);
  const std::byte* source(int rank, std::size_t offer) const;
  std::byte* stage(int rank, std::size_t offset) const;

  std::shared_ptr<Board> board_;
  std::shared_ptr<PeerMemory> memory_;
  const Topology& topology_;
  std::size_t room_;                       ///< bytes of a chunk; the same on all ranks of the group
  std::unique_ptr<Worker> cpu_, gpu_;      ///< gpu_: null until use_gpu_worker()
  Worker* worker_;                         ///< the current call's
  std::vector<Offer> own_;                 ///< the current round's
  bool read_in_place_ = false;             ///< in this round, by any rank
  std::uint64_t rounds_ = 0, chunks_ = 0;  ///< descriptors and stage halves used so far
};

/// Point to point between ranks of one machine: one channel of message slots per ordered pair. The receiver
/// copies straight from the sender's memory, or, where that is hidden, from the pair's ring. Its functions
/// are those of Backend.
class MemoryTransfers {
 public:
  MemoryTransfers(MachineTransport& machine, const Topology& topology)
      : machine_(machine),
        topology_(topology),
        sends_(topology.locals().size()),
        receives_(sends_.size()),
        filled_slots_(sends_.size()) {}

  void start(Call& transfer);
  bool advance(Call& transfer);

 private:
  bool advance_send(Call& transfer);
  bool advance_receive(Call& transfer);
  void copy_from_peer(const Call& transfer, const Address& address);
  bool fill_ring(Call& transfer);
  bool drain_ring(Call& transfer);
  int peer_of(const Call& transfer) const { return topology_.local_index(transfer.peer); }

  MachineTransport& machine_;
  const Topology& topology_;
  std::vector<std::uint64_t> sends_, receives_;  ///< transfers started, by peer on the board
  std::vector<std::uint64_t> filled_slots_;      ///< sends whose bytes are all on their way, by peer
};

}  // namespace sherd::comm
