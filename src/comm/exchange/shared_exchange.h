#pragma once

#include <memory>
#include <vector>

#include "comm/exchange/board.h"
#include "comm/exchange/collective_backend.h"
#include "comm/exchange/worker.h"

namespace sherd::comm {

/// Which memory the ranks of a group can read from each other.
class Memory {
 public:
  virtual ~Memory() = default;
  /// Where peers find [data, data + bytes) of this rank; hidden when they cannot.
  virtual Address locate(const std::byte* data, std::size_t bytes) const = 0;
  /// The bytes that `rank` located, seen from here.
  virtual std::byte* resolve(int rank, const Address& address) const = 0;

  /// Around every collective and every copy of a transfer of this rank: between the two it may be reading peers.
  virtual void enter() {}
  virtual void leave() noexcept {}
  /// After a failed collective or transfer, before its tensors may go: returns when no peer can still be reading them.
  /// Nothing to do where resolved memory stays mapped whatever its owner does.
  virtual void outlast_readers() noexcept {}
};

/// Collectives and transfers over a Board: every rank reads what it needs straight from its peers' memory.
///
/// - A round is: publish addresses, barrier, compare signatures, read peers, barrier. Payloads of up to
///   Notice::payload_bytes travel in the notice itself and need the first barrier only: a notice is
///   overwritten two rounds later, and whoever does that has passed the barrier to which all came after they
///   had read it.
/// - With tensors of a GPU (ranks of one process on one card) the same rounds queue work on each rank's stream,
///   and marks go the way of the barriers, so that streams wait for each other as the threads do. Nothing
///   travels in notices then.
/// - Memory that peers cannot see goes through the stage in chunks, halves in turn, with the same argument.
/// - Every rank sums its own part, reading sources in rank order, so results do not depend on any of this.
class SharedExchange : public CollectiveBackend {
 public:
  SharedExchange(std::shared_ptr<Board> board, std::shared_ptr<Memory> memory, int threads);
  ~SharedExchange() override;

  int rank() const override { return board_->rank(); }
  int size() const override { return board_->size(); }
  const std::string& name() const override { return board_->name(); }
  double timeout_seconds() const override { return board_->timeout(); }
  int threads() const override { return threads_; }
  void run(Call& call) override;
  void start(Call& transfer) override;
  bool advance(Call& transfer) override;
  void await(const std::function<bool()>& ready, const std::vector<Call*>& active) override;
  void nudge() noexcept override { Board::ring_bell(board_->bell(rank())); }
  void fail(const std::string& reason) noexcept override { board_->fail(reason); }
  void look_after_peers() noexcept override { board_->look_after_peers(); }
  std::uint64_t announce(const Signature& call) override { return board_->announce(call); }
  std::vector<int> not_announced(std::uint64_t number) override { return board_->not_announced(number); }
  std::string failure() const override { return board_->failure(); }

 protected:
  /// All ranks' words, in rank order. `what` appears in errors.
  std::vector<std::int64_t> agree(std::vector<std::int64_t> words, const std::string& what);
  /// What calls with tensors of a GPU are done with.
  void use_gpu_worker(std::unique_ptr<Worker> worker) { gpu_ = std::move(worker); }
  const std::shared_ptr<Board>& shared_board() const { return board_; }

 private:
  /// Bytes of this rank that peers will read.
  struct Source {
    const std::byte* data = nullptr;
    std::size_t bytes = 0;
  };
  /// A range of one piece inside a staged chunk.
  struct Segment {
    std::size_t piece = 0;
    std::int64_t begin = 0, end = 0;
    std::size_t offset = 0;  ///< in the stage
  };
  using Chunk = std::vector<Segment>;

  /// Publishes, meets the others and compares. Afterwards source() and hidden() tell where everybody's pieces
  /// are.
  void open_round(const Call& call, const std::vector<Source>& sources);
  void compare();
  /// Ends a round in which peers read this rank's tensors themselves.
  void close_round(const Call& call) { meet(call); }
  void meet(const Call& call);
  const std::byte* source(int peer, std::size_t piece) const;
  bool hidden_at(int peer, std::size_t piece) const;
  bool hidden(std::size_t piece) const;  ///< at any rank
  bool all_in_notice() const;

  void barrier(Call& call) override { open_round(call, {}); }
  void all_gather(Call& call) override;
  void reduce_scatter(Call& call) override;
  void all_reduce(Call& call) override;
  void broadcast(Call& call) override;
  void all_to_all(Call& call) override;
  void agree(Call& call) override;

  void staged_gather(const Call& call, const std::vector<std::size_t>& pieces);
  void staged_reduce_scatter(const Call& call, const std::vector<std::size_t>& pieces);
  void staged_all_reduce(const Call& call);
  void staged_broadcast(const Call& call);
  void staged_all_to_all(const Call& call, const std::vector<std::int64_t>& counts);
  /// Cuts pieces, in elements of `elements` each, into chunks whose `copies` copies fit the stage.
  std::vector<Chunk> cut(const std::vector<std::size_t>& pieces, const std::vector<std::int64_t>& elements,
                         const std::vector<std::size_t>& element_bytes, std::size_t copies) const;
  std::byte* stage(int peer) { return board_->stage(peer, chunks_); }
  void reduce_piece(const Call& call, const ReducePiece& piece, std::span<const std::byte* const> sources,
                    std::int64_t begin, std::int64_t end);

  bool advance_send(Call& transfer);
  bool advance_receive(Call& transfer);
  void copy_from_peer(const Call& transfer, const Address& address);
  bool fill_ring(Call& transfer);
  bool drain_ring(Call& transfer);

  std::shared_ptr<Board> board_;
  std::shared_ptr<Memory> memory_;
  int threads_;
  std::unique_ptr<Worker> cpu_, gpu_;  ///< gpu_: null until use_gpu_worker()
  Worker* worker_;                     ///< of the current collective
  std::vector<Source> own_;                      ///< of the current round
  std::uint64_t rounds_ = 0, chunks_ = 0;        ///< notices and stage halves used so far
  std::vector<std::uint64_t> sends_, receives_;  ///< transfers started, by peer
  std::vector<std::uint64_t> filled_letters_;    ///< sends whose bytes are all on their way, by peer
};

}  // namespace sherd::comm
