#include <algorithm>

#include "comm/exchange/exchange.h"

namespace sherd::comm {

/// `spread`: every rank gets every block, in its own tensor. The owners' blocks of the tensors are then where
/// their sums go.
void HostExchange::reduce(const Call& call, std::span<const Summed> works, bool spread) {
  std::vector<Offer> offers;
  std::vector<CopyBlocks> all;
  for (std::size_t i = 0; i < works.size(); ++i) {
    const Summed& w = works[i];
    const bool whole =
        static_cast<std::size_t>(w.longest) * static_cast<std::size_t>(size()) * size_of(w.how.in) >= w.bytes;
    offers.push_back({w.full, w.bytes, whole ? OfferKind::tensor : OfferKind::part});
    all.push_back({i, size_of(w.how.in), size(), [&w](int, int owner) { return w.first(owner); },
                   [&w](int, int owner) { return w.count(owner); }, w.longest});
  }
  open(call, std::move(offers));
  if (!messages_) {
    machine_.visit(
        call, all, MachineTransport::Order::whole,
        [&](std::size_t i, const MachineTransport::View& view) { reduce_here(works, i, view, spread); },
        spread);
    return machine_.close(call);
  }
  SumAcross sums(call, *topology_, machine_, *messages_, scratch_, works);
  machine_.visit(call, all, MachineTransport::Order::chunked,
                 [&](std::size_t i, const MachineTransport::View& view) { sums.step(i, view); });
  sums.finish();
  machine_.close(call);
  if (!spread) return;
  std::vector<GatheredPart> parts;
  for (const Summed& w : works)
    parts.push_back(
        {w.out, w.full, static_cast<std::int64_t>(w.bytes / size_of(w.how.in)), size_of(w.how.in)});
  gather(call, parts);
}

/// This rank's block, read from all ranks where it lies.
void HostExchange::reduce_here(std::span<const Summed> works, std::size_t index,
                               const MachineTransport::View& view, bool spread) {
  const Summed& w = works[index];
  std::vector<const std::byte*> from;
  std::vector<std::byte*> to;
  for (int r = 0; r < size(); ++r) from.push_back(view.at(r, rank()));
  // Handing the sum to everybody at once reads and writes each element once per rank.
  if (spread)
    for (const std::byte* each : from) to.push_back(const_cast<std::byte*>(each));
  else
    to.push_back(w.out + static_cast<std::size_t>(view.begin) * size_of(w.how.out));
  ReduceSpec how = w.how;
  if (how.onto) how.onto += static_cast<std::size_t>(view.begin) * size_of(how.onto_type);
  if (const std::int64_t count = view.count(rank(), rank())) machine_.worker().reduce(how, from, to, count);
}

void HostExchange::reduce_scatter(Call& call) {
  const std::size_t most = CallDescriptor::max_addresses;
  std::size_t first = 0;
  do {
    std::vector<Summed> works;
    for (std::size_t i = first; i < std::min(call.reduces.size(), first + most); ++i) {
      const ReducePiece& piece = call.reduces[i];
      const std::int64_t stride = piece.shard.numel(), begin = piece.begin, n = piece.end - piece.begin;
      works.push_back({piece.full.raw(), piece.full.bytes(),
                       [=](int owner) { return owner * stride + begin; }, [=](int) { return n; }, n,
                       fold_of(piece, call.rounding, begin),
                       piece.shard.raw() + static_cast<std::size_t>(begin) * size_of(piece.shard.dtype())});
    }
    reduce(call, works, false);
    first += most;
  } while (first < call.reduces.size());
}

void HostExchange::all_reduce(Call& call) {
  if (call.x.bytes() <= CallDescriptor::payload_bytes && machine_.worker().immediate())
    return reduce_small(call);
  const std::int64_t n = call.x.numel();
  const DType dtype = call.x.dtype();
  const auto first = [n, ranks = size()](int owner) { return part_begin(n, ranks, owner); };
  const Summed work{call.x.raw(),
                    call.x.bytes(),
                    first,
                    [first](int owner) { return first(owner + 1) - first(owner); },
                    first(1),
                    {call.op, call.factor, dtype, dtype, dtype},
                    call.x.raw() + static_cast<std::size_t>(first(rank())) * size_of(dtype)};
  reduce(call, {&work, 1}, true);
}

/// Every rank gets what all have, and sums it.
void HostExchange::reduce_small(const Call& call) {
  const std::size_t bytes = call.x.bytes();
  const DType dtype = call.x.dtype();
  scratch_.reset();
  std::byte* all = scratch_.take(bytes * static_cast<std::size_t>(size()));
  const GatheredPart work{call.x.raw(), all, call.x.numel() * size(), size_of(dtype)};
  gather(call, {&work, 1});
  std::vector<const std::byte*> from;
  for (int r = 0; r < size(); ++r) from.push_back(all + static_cast<std::size_t>(r) * bytes);
  std::byte* out = call.x.raw();
  machine_.worker().reduce({call.op, call.factor, dtype, dtype, dtype}, from, {&out, 1}, call.x.numel());
}

}  // namespace sherd::comm
