#include "comm/nccl/nccl_transfers.h"

#include <nccl.h>

#include <cstring>

#include "comm/nccl/nccl_functions.h"

namespace sherd::comm {
namespace {

enum NcclPhase : int { greeting, joining, queueing };

/// The sender's message to the receiver.
struct Greeting {
  CallSignature call;
  ncclUniqueId id{};  ///< the pair's communicator's; with the first transfer
};
static_assert(std::is_trivially_copyable_v<Greeting>);

Greeting read(const Call& transfer) {
  Greeting out;
  std::memcpy(&out, transfer.greeting->x.raw(), sizeof out);
  return out;
}

}  // namespace

NcclTransfers::NcclTransfers(Backend& host, std::shared_ptr<device::Accelerator> gpu)
    : host_(host), gpu_(std::move(gpu)) {}

NcclTransfers::PairStream& NcclTransfers::pair_of(const Call& transfer) {
  return pairs_[{transfer.peer, transfer.kind}];
}

void NcclTransfers::start(Call& transfer) {
  transfer.phase = greeting;
  transfer.index = pair_of(transfer).started++;
  auto greets = std::make_shared<Call>();
  greets->kind = transfer.kind, greets->peer = transfer.peer, greets->world_peer = transfer.world_peer,
  greets->label = transfer.label, greets->record = transfer.record;
  greets->x = Tensor::empty(*gpu_, {sizeof(Greeting)}, DType::u8, device::Category::communication,
                            device::Tier::host);
  transfer.greeting = std::move(greets);
  if (transfer.kind == Collective::send) greet(transfer);
  host_.start(*transfer.greeting);
}

void NcclTransfers::greet(Call& transfer) {
  Greeting words{sign(transfer)};
  if (transfer.index == 0)
    if (const ncclResult_t status = ncclGetUniqueId(&words.id); status != ncclSuccess)
      fail(ErrorKind::comm, host_.own_name(), ": ", describe(transfer),
           ": NCCL cannot make a unique id: ", ncclGetErrorString(status));
  std::memcpy(transfer.greeting->x.raw(), &words, sizeof words);
}

bool NcclTransfers::advance(Call& transfer) {
  PairStream& pair = pair_of(transfer);
  if (transfer.phase == greeting) {
    if (!host_.advance(*transfer.greeting)) return false;
    compare(transfer);
    if (transfer.index == 0) join(transfer, pair);
    transfer.phase = joining;
    transfer.polled = true;  // NCCL wakes nobody
  }
  if (transfer.phase == joining) {
    if (pair.queued != transfer.index || !pair.comm->settled(transfer, transfer.deadline->get()))
      return false;
    if (transfer.x.bytes() > 0) queue(transfer, pair);
    transfer.phase = queueing;
  }
  if (!pair.comm->settled(transfer, transfer.deadline->get())) return false;
  transfer.done = pair.stream.record();
  pair.comm->watch(transfer, 0);
  transfer.polled = false;
  ++pair.queued;
  return true;
}

void NcclTransfers::compare(const Call& transfer) const {
  if (transfer.kind == Collective::send) return;
  const std::string wrong = transfer_mismatch(transfer, read(transfer).call, host_.world_rank(host_.rank()));
  if (!wrong.empty()) host_.fail_and_throw(cat(host_.name(), ": ", wrong));
}

void NcclTransfers::join(Call& transfer, PairStream& pair) {
  pair.stream = gpu_->make_stream(true);
  const ncclUniqueId id = read(transfer).id;
  pair.comm = NcclComm::join_pair(host_, gpu_, &id, transfer.kind == Collective::send ? 0 : 1);
}

void NcclTransfers::cancel(Call& transfer) noexcept {
  host_.cancel(*transfer.greeting);
}

void NcclTransfers::queue(Call& transfer, PairStream& pair) {
  gpu_->make_current();
  pair.stream.wait(transfer.ready);
  const auto on = static_cast<cudaStream_t>(pair.stream.native());
  pair.comm->begin(transfer, [&](ncclComm_t comm) {
    if (transfer.kind == Collective::send)
      ncclSend(transfer.x.raw(), transfer.x.bytes(), ncclInt8, 1, comm, on);
    else
      ncclRecv(transfer.x.raw(), transfer.x.bytes(), ncclInt8, 0, comm, on);
  });
}

}  // namespace sherd::comm
