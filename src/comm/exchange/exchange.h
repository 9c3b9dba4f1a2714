#pragma once

#include <memory>
#include <span>
#include <vector>

#include "comm/exchange/backend.h"
#include "comm/exchange/machine.h"
#include "comm/exchange/sum_across.h"
#include "comm/messages/messages.h"

namespace sherd::comm {

/// The collectives of tensors that the processor reaches, and of GPUs that ranks of one process share, each
/// written once over two transports: MachineTransport between ranks that share memory, Messages between
/// machines. A group on one machine has no messages; one without shared memory is of machines with a rank
/// each.
///
/// Between machines one copy goes to each machine that needs it, and its ranks take it from there through
/// their memory. Sums run in rank order whatever the layout, so results do not depend on it. (NCCL has its
/// own route, nccl/nccl_route.cpp: its calls are queued on a stream and meet on the GPU, where neither
/// barriers nor looks at peers' memory have a place.)
class HostExchange : public Backend {
 public:
  /// `messages`: null where all ranks are on this machine.
  HostExchange(std::shared_ptr<const Topology> topology, std::shared_ptr<Board> board,
               std::shared_ptr<PeerMemory> memory, std::unique_ptr<Messages> messages, int threads);

  int rank() const override { return topology_->rank(); }
  int size() const override { return topology_->size(); }
  const std::string& name() const override { return board_->name(); }
  double timeout_seconds() const override { return board_->timeout(); }
  int threads() const override { return threads_; }
  void run(Call& call) override;
  void start(Call& transfer) override;
  bool advance(Call& transfer) override;
  void await(const std::function<bool()>& ready, const std::vector<Call*>& active) override;
  void cancel(Call& transfer) noexcept override;
  void wake() noexcept override { board_->moved(board_->rank()).wake_all(); }
  void fail(const std::string& reason) noexcept override { board_->fail(reason); }
  std::string failure() const override { return board_->failure(); }
  void look_after_peers() noexcept override;
  int world_rank(int rank) const override { return board_->world_rank(rank); }
  void tell_wait(int world_rank) noexcept override { board_->tell_wait(world_rank); }
  std::uint64_t announce(const CallSignature& call) override;
  std::vector<int> not_announced(std::uint64_t number) override;
  std::uint64_t bytes_between_machines() const override { return messages_ ? messages_->sent_bytes() : 0; }

 protected:
  /// All ranks' words, in rank order. `what` names them in errors.
  std::vector<std::int64_t> agree(std::vector<std::int64_t> words, const std::string& what);
  /// Sets the worker of calls with tensors of a GPU.
  void use_gpu_worker(std::unique_ptr<Worker> worker) { machine_.use_gpu_worker(std::move(worker)); }
  const std::shared_ptr<Board>& shared_board() const { return board_; }
  const Topology& topology() const { return *topology_; }

 private:
  /// Data of which every rank has a part, and which every rank gets: part r is elements [part_begin(r),
  /// part_begin(r + 1)) of `full`.
  struct GatheredPart {
    std::byte *own, *full;
    std::int64_t elements = 0;
    std::size_t width = 1;
  };

  /// Opens a round on this machine, and with a call's first round the call on the others.
  void open(const Call& call, std::vector<Offer> offers);
  void gather(const Call& call, std::span<const GatheredPart> works, OfferKind kind = OfferKind::tensor);
  std::vector<std::int64_t> gather_words(const Call& call, std::span<const std::int64_t> mine);
  void cross_gather(std::span<const GatheredPart> works);
  void spread_gathered(const Call& call, std::span<const GatheredPart> works);
  void reduce(const Call& call, std::span<const Summed> works, bool spread);
  void reduce_here(std::span<const Summed> works, std::size_t index, const MachineTransport::View& view,
                   bool spread);
  void reduce_small(const Call& call);
  bool sums_natively(const Call& call);
  void sum_natively(const Call& call);

  /// Calls the function of the call's kind. Throws Error{usage} for a transfer.
  void dispatch(Call& call);
  void barrier(Call& call);
  void all_gather(Call& call);
  void reduce_scatter(Call& call);
  void all_reduce(Call& call);
  void broadcast(Call& call);
  void all_to_all(Call& call);
  void agree(Call& call);
  std::vector<std::int64_t> open_all_to_all(Call& call);

  void cancel_messages(const Call& call) noexcept;
  void await_messages(const std::function<bool()>& ready, const std::vector<Call*>& active);

  std::shared_ptr<const Topology> topology_;
  int threads_;
  std::shared_ptr<Board> board_;
  std::unique_ptr<Messages> messages_;
  MachineTransport machine_;
  MemoryTransfers memory_transfers_;
  std::unique_ptr<MessageTransfers> message_transfers_;
  ReduceScratch scratch_;
  bool opened_ = false;  ///< the current call, on other machines
};

}  // namespace sherd::comm
