#include "comm/exchange/gpu/gpu_route.h"

#include <algorithm>

#include "base/log.h"
#include "comm/nccl/nccl_route.h"

namespace sherd::comm {

GpuRoute::GpuRoute(Backend& host, std::shared_ptr<device::Accelerator> gpu)
    : host_(&host), gpu_(std::move(gpu)), stream_(gpu_->make_stream(true)) {}

Tensor GpuRoute::staging(Call& call, std::int64_t elements, DType dtype) {
  call.staging.push_back(
      Tensor::empty(*gpu_, {elements}, dtype, device::Category::communication, device::Tier::host));
  return call.staging.back();
}

void GpuRoute::copy(const Tensor& to, const Tensor& from) {
  gpu_->copy_on(stream_, to.raw(), from.raw(), from.bytes());
}

/// The same call on memory of the host, its inputs on their way there. Of pieces to reduce only the part that
/// travels.
Call GpuRoute::to_host(Call& call) {
  Call staged = call;
  staged.gpu = false, staged.host = true, staged.ready = {}, staged.staging.clear();
  for (auto& [shard, full] : staged.gathers) {
    const Tensor from = shard;
    full = staging(call, full.numel(), full.dtype());
    shard = full.range(host_->rank() * from.numel(), (host_->rank() + 1) * from.numel());
    copy(shard, from);
  }
  for (ReducePiece& piece : staged.reduces) {
    const ReducePiece from = piece;
    const std::int64_t n = from.end - from.begin;
    piece.full = staging(call, n * host_->size(), from.full.dtype());
    piece.shard = staging(call, n, from.shard.dtype());
    piece.begin = 0, piece.end = n;
    if (from.onto.defined()) {
      piece.onto = from.onto.raw() == from.shard.raw() ? piece.shard : staging(call, n, from.onto.dtype());
      copy(piece.onto, from.onto.range(from.begin, from.end));
    }
    for (std::int64_t r = 0; r < host_->size(); ++r) {
      const std::int64_t at = r * from.shard.numel() + from.begin;
      copy(piece.full.range(r * n, (r + 1) * n), from.full.range(at, at + n));
    }
  }
  if (call.x) {
    staged.x = staging(call, call.x.numel(), call.x.dtype());
    copy(staged.x, call.x);
  }
  if (call.out) staged.out = staging(call, call.out.numel(), call.out.dtype());
  return staged;
}

void GpuRoute::from_host(Call& call, const Call& staged) {
  for (std::size_t i = 0; i < call.gathers.size(); ++i) copy(call.gathers[i].full, staged.gathers[i].full);
  for (std::size_t i = 0; i < call.reduces.size(); ++i) {
    const ReducePiece& to = call.reduces[i];
    copy(to.shard.range(to.begin, to.end), staged.reduces[i].shard);
  }
  if (call.out)
    copy(call.out, staged.out);
  else if (call.x)
    copy(call.x, staged.x);
}

void GpuRoute::run(Call& call) {
  stream_.wait(call.ready);
  Call staged = to_host(call);
  call.done = stream_.record();
  call.done.wait(gpu_->deadline(), cat("copies to the host for ", describe(call)));
  host_->run(staged);
  from_host(call, staged);
  call.done = stream_.record();
}

void GpuRoute::start(Call& transfer) {
  transfer.travelling = staging(transfer, transfer.x.numel(), transfer.x.dtype());
  if (transfer.kind == Collective::send) {
    stream_.wait(transfer.ready);
    copy(transfer.travelling, transfer.x);
    transfer.done = stream_.record();
    transfer.done.wait(gpu_->deadline(), cat("copies to the host for ", describe(transfer)));
  }
  // The backend sees the copy; so does whoever it travels to, as the call's only tensor.
  std::swap(transfer.x, transfer.travelling);
  transfer.gpu = false;
  host_->start(transfer);
}

bool GpuRoute::advance(Call& transfer) {
  if (!host_->advance(transfer)) return false;
  std::swap(transfer.x, transfer.travelling);
  transfer.gpu = true;
  if (transfer.kind == Collective::receive) {
    stream_.wait(transfer.ready);
    copy(transfer.x, transfer.travelling);
    transfer.done = stream_.record();
  }
  return true;
}

std::unique_ptr<GpuRoute> GpuRoute::split(int, int, Backend* part) {
  return part ? std::make_unique<GpuRoute>(*part, gpu_) : nullptr;
}

namespace {

/// Ranks of one process on one card: the backend's rounds themselves, on the ranks' streams.
class SharedCardRoute final : public GpuRoute {
 public:
  SharedCardRoute(Backend& backend, std::shared_ptr<device::Accelerator> on)
      : GpuRoute(backend, std::move(on)) {
    host().use_gpu(gpu());
  }
  std::string_view name() const override { return "memory of the card that they share"; }
  void run(Call& call) override { host().run(call); }
  std::unique_ptr<GpuRoute> split(int, int, Backend* part) override {
    return part ? std::make_unique<SharedCardRoute>(*part, gpu()) : nullptr;
  }
};

std::vector<GpuCard> exchange_cards(Backend& host, const GpuCard& mine) {
  Call call;
  call.kind = Collective::agree, call.label = "the ranks' GPUs";
  call.words = {mine.present, mine.nccl, static_cast<std::int64_t>(mine.card)};
  host.run(call);
  std::vector<GpuCard> all;
  for (std::size_t i = 0; i + 2 < call.words.size(); i += 3)
    all.push_back({call.words[i] != 0, call.words[i + 1] != 0, static_cast<std::uint64_t>(call.words[i + 2]),
                   host.world_rank(static_cast<int>(i / 3))});
  return all;
}

}  // namespace

GpuPlan plan_gpu_traffic(const std::vector<GpuCard>& by_rank, bool one_process) {
  std::vector<int> without, sharing, lacking;
  for (auto one = by_rank.begin(); one != by_rank.end(); ++one) {
    if (!one->present) without.push_back(one->rank);
    if (!one->nccl) lacking.push_back(one->rank);
    if (std::any_of(by_rank.begin(), one, [&](const GpuCard& before) { return before.card == one->card; }))
      sharing.push_back(one->rank);
  }
  if (without.size() == by_rank.size()) return {};
  if (!without.empty())
    fail(ErrorKind::io, name_ranks(without), without.size() == 1 ? " has" : " have",
         " no GPU while the others have one: all ranks must run on the same kind of device; set device.type");
  const bool one_card = sharing.size() + 1 == by_rank.size() &&
                        std::all_of(by_rank.begin(), by_rank.end(),
                                    [&](const GpuCard& each) { return each.card == by_rank[0].card; });
  if (one_process && one_card) return {GpuTraffic::shared_card, ""};
  if (!lacking.empty())
    return {GpuTraffic::staged, cat("NCCL cannot be used on ", name_ranks(lacking),
                                    " (not built in, or a GPU that it does not know)")};
  if (!sharing.empty())
    return {GpuTraffic::staged, cat(name_ranks(sharing), sharing.size() == 1 ? " shares" : " share",
                                    " a GPU with another rank, which NCCL does not allow")};
  return {GpuTraffic::nccl, ""};
}

std::unique_ptr<GpuRoute> make_gpu_route(Backend& host, const std::shared_ptr<device::Accelerator>& gpu) {
  GpuCard mine;
  if (gpu) {
    const std::uint64_t card = nccl_card(*gpu);
    mine = {true, card != 0, host.one_process() ? static_cast<std::uint64_t>(gpu->ordinal()) : card};
  }
  const GpuPlan plan = plan_gpu_traffic(exchange_cards(host, mine), host.one_process());
  std::unique_ptr<GpuRoute> route;
  switch (plan.traffic) {
    case GpuTraffic::none:
      return nullptr;
    case GpuTraffic::shared_card:
      route = std::make_unique<SharedCardRoute>(host, gpu);
      break;
    case GpuTraffic::nccl:
      route = make_nccl_route(host, gpu);
      break;
    case GpuTraffic::staged:
      route = std::make_unique<GpuRoute>(host, gpu);
      break;
  }
  if (host.rank() == 0 && host.size() > 1)
    log_info(host.name(), ": tensors of GPUs travel through ", route->name(),
             plan.why.empty() ? "" : cat(": ", plan.why));
  return route;
}

}  // namespace sherd::comm
