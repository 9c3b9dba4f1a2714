#include "comm/exchange/exchange.h"

#include <algorithm>
#include <utility>

#include "base/waits.h"
#include "comm/messages/port.h"

namespace sherd::comm {
namespace {

/// The transfers that are waited for: once some are late, those alone.
Board::Waited waited_for(const std::vector<Call*>& transfers) {
  const auto at = [](const Call* transfer) { return transfer->deadline->get().at(); };
  const auto first = *std::min_element(transfers.begin(), transfers.end(),
                                       [&](const Call* a, const Call* b) { return at(a) < at(b); });
  const Deadline deadline = first->deadline->get();
  const bool late = deadline.passed();
  std::vector<int> peers;
  for (const Call* transfer : transfers)
    if (!late || transfer->deadline->get().passed()) peers.push_back(transfer->peer);
  std::sort(peers.begin(), peers.end());
  peers.erase(std::unique(peers.begin(), peers.end()), peers.end());
  return {*first, std::move(peers), deadline, late};
}

}  // namespace

HostExchange::HostExchange(std::shared_ptr<const Topology> topology, std::shared_ptr<Board> board,
                           std::shared_ptr<PeerMemory> memory, std::unique_ptr<Messages> messages,
                           int threads)
    : topology_(std::move(topology)),
      threads_(threads),
      board_(std::move(board)),
      messages_(std::move(messages)),
      machine_(board_, std::move(memory), *topology_, threads),
      memory_transfers_(machine_, *topology_) {
  if (!messages_) return;
  messages_->use_board(board_);
  message_transfers_ = std::make_unique<MessageTransfers>(*messages_, *board_);
}

void HostExchange::run(Call& call) {
  machine_.choose_worker(call);
  machine_.memory().enter();
  opened_ = false;
  try {
    machine_.worker().begin(call, bytes_moved(call));
    if (sums_natively(call))
      sum_natively(call);
    else
      dispatch(call);
    if (messages_) messages_->finish(call);
    machine_.worker().end(call);
  } catch (const std::exception& error) {
    machine_.worker().drain();
    // The caller will free the tensors; a peer that came to the round before the failure may be reading them
    // still, or wait for this rank, of which it hears here.
    board_->fail(cat(own_name(), " failed: ", error.what()));
    if (messages_) cancel_messages(call);
    machine_.memory().leave();
    machine_.memory().outlast_readers();
    throw;
  }
  machine_.memory().leave();
}

void HostExchange::dispatch(Call& call) {
  switch (call.kind) {
    case Collective::barrier:
      return barrier(call);
    case Collective::all_gather:
      return all_gather(call);
    case Collective::reduce_scatter:
      return reduce_scatter(call);
    case Collective::all_reduce:
      return all_reduce(call);
    case Collective::broadcast:
      return broadcast(call);
    case Collective::all_to_all:
      return all_to_all(call);
    case Collective::agree:
      return agree(call);
    default:
      sherd::fail(ErrorKind::usage, name_of(call.kind), " is not a collective");
  }
}

void HostExchange::cancel_messages(const Call& call) noexcept {
  messages_->cancel();
  if (!messages_->lingers()) return;
  for_each_tensor(call, [](const Tensor& x) { keep_for_good(x.storage()); });
  keep_for_good(std::exchange(scratch_, {}));
}

void HostExchange::open(const Call& call, std::vector<Offer> offers) {
  machine_.open(call, std::move(offers));
  if (messages_ && !std::exchange(opened_, true)) messages_->open(call);
}

std::vector<std::int64_t> HostExchange::agree(std::vector<std::int64_t> words, const std::string& what) {
  Call call;
  call.kind = Collective::agree;
  call.words = std::move(words);
  call.label = what;
  run(call);  // by the host's worker: the last call may have been a GPU's
  return std::move(call.words);
}

// ---- transfers ----

void HostExchange::start(Call& transfer) {
  if (topology_->is_local(transfer.peer)) return memory_transfers_.start(transfer);
  if (transfer.kind == Collective::send) messages_->count_sent(transfer.x.bytes());
  message_transfers_->start(transfer);
}

bool HostExchange::advance(Call& transfer) {
  return topology_->is_local(transfer.peer) ? memory_transfers_.advance(transfer)
                                            : message_transfers_->advance(transfer);
}

void HostExchange::await(const std::function<bool()>& ready, const std::vector<Call*>& active) {
  if (messages_) return await_messages(ready, active);
  board_->wait(board_->moved(board_->rank()), ready, [&] { return waited_for(active); });
}

void HostExchange::cancel(Call& transfer) noexcept {
  if (!topology_->is_local(transfer.peer)) message_transfers_->cancel(transfer);
  machine_.memory().outlast_readers();  // as after a failed collective: a receiver may be reading
}

void HostExchange::await_messages(const std::function<bool()>& ready, const std::vector<Call*>& active) {
  const Board::WaitElsewhere elsewhere(*board_);
  const WaitScope waits(WaitFor::ranks);
  std::optional<Deadline> grace;
  for (Pauses pauses(messages_->port());; pauses.pause()) {
    if (ready()) return;
    if (!pauses.every(64)) continue;
    const auto waited = waited_for(active);
    messages_->check_peers(waited.missing, waited.call, waited.late, grace);
  }
}

// ---- peers ----

void HostExchange::look_after_peers() noexcept {
  board_->look_after_peers();
  if (messages_) messages_->look_after_peers();
}

std::uint64_t HostExchange::announce(const CallSignature& call) {
  return messages_ ? messages_->announce(call) : board_->announce(call);
}

std::vector<int> HostExchange::not_announced(std::uint64_t number) {
  return messages_ ? messages_->not_announced(number) : board_->not_announced(number);
}

}  // namespace sherd::comm
