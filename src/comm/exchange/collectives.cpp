// The collectives that move tensors; those that sum are in reductions.cpp.
#include <algorithm>
#include <cstring>

#include "comm/exchange/exchange.h"

namespace sherd::comm {

void HostExchange::barrier(Call& call) {
  open(call, {});
  if (!messages_) return;
  if (topology_->is_leader()) {
    // Rounds of doubling distance, after which every machine knows of all.
    const int machines = topology_->machines(), machine = topology_->machine();
    const Messages::Landing words(messages_.get(), 2);
    std::byte *const out = words.data(), *const in = out + 1;
    *out = std::byte{1};
    for (int distance = 1; distance < machines; distance *= 2) {
      messages_->receive(topology_->ranks_on((machine + machines - distance) % machines).front(), in, 1);
      messages_->send(topology_->ranks_on((machine + distance) % machines).front(), out, 1);
      messages_->finish(call);
    }
  }
  machine_.meet(call);
}

// ---- gathers ----

void HostExchange::gather(const Call& call, std::span<const GatheredPart> works, OfferKind kind) {
  const bool spreads = messages_ && topology_->locals().size() > 1;
  const auto begin = [n = size()](const GatheredPart& w, int r) { return part_begin(w.elements, n, r); };
  const auto bytes = [&](const GatheredPart& w, int r) {
    return static_cast<std::size_t>(begin(w, r + 1) - begin(w, r)) * w.width;
  };
  std::vector<Offer> offers;
  for (const GatheredPart& w : works) offers.push_back({w.own, bytes(w, rank()), kind});
  if (spreads)
    for (const GatheredPart& w : works)
      offers.push_back({w.full, static_cast<std::size_t>(w.elements) * w.width, OfferKind::later});
  open(call, std::move(offers));
  cross_gather(works);
  std::vector<CopyBlocks> all;
  for (std::size_t i = 0; i < works.size(); ++i) {
    const GatheredPart& w = works[i];
    const auto count = [&w, begin](int r, int) { return begin(w, r + 1) - begin(w, r); };
    all.push_back({i, w.width, 1, [](int, int) { return 0; }, count, begin(w, 1)});
  }
  machine_.visit(
      call, all, MachineTransport::Order::whole, [&](std::size_t i, const MachineTransport::View& view) {
        const GatheredPart& w = works[i];
        const auto& here = topology_->locals();
        const auto me = static_cast<std::size_t>(topology_->local_index(rank()));
        // Begin with the own part, then the next rank's, so that not all read from the same one at a time.
        const auto place = [&](int r) {
          return w.full + static_cast<std::size_t>(begin(w, r) + view.begin) * w.width;
        };
        machine_.worker().copy(place(rank()), w.own + static_cast<std::size_t>(view.begin) * w.width,
                               static_cast<std::size_t>(view.count(rank(), 0)) * w.width);
        for (std::size_t k = 1; k < here.size(); ++k) {
          const int r = here[(me + k) % here.size()];
          view.copy(place(r), r, 0);
        }
      });
  if (spreads) spread_gathered(call, works);
  if (messages_ && !spreads) messages_->finish(call);
  machine_.close(call);
}

/// Every rank's part goes to one rank of each other machine.
void HostExchange::cross_gather(std::span<const GatheredPart> works) {
  if (!messages_) return;
  const int here = topology_->machine();
  for (const GatheredPart& w : works) {
    const auto begin = [&](int r) { return part_begin(w.elements, size(), r); };
    const auto bytes = [&](int r) { return static_cast<std::size_t>(begin(r + 1) - begin(r)) * w.width; };
    for (int k = 1; k < size(); ++k) {
      const int from = (rank() + k) % size();
      if (topology_->is_local(from) || topology_->deputy(here, from) != rank()) continue;
      messages_->receive(from, w.full + static_cast<std::size_t>(begin(from)) * w.width, bytes(from));
    }
    for (int k = 1; k < topology_->machines(); ++k)
      messages_->send(topology_->deputy((here + k) % topology_->machines(), rank()), w.own, bytes(rank()));
  }
}

/// Data that came from other machines goes from who received it to the others here.
void HostExchange::spread_gathered(const Call& call, std::span<const GatheredPart> works) {
  std::vector<int> remote;
  for (int r = 0; r < size(); ++r)
    if (!topology_->is_local(r)) remote.push_back(r);
  const auto owner = [&](int block) { return remote[static_cast<std::size_t>(block)]; };
  const auto holder = [&](int block) { return topology_->deputy(topology_->machine(), owner(block)); };
  const auto begin = [&](std::int64_t n, int block) { return part_begin(n, size(), owner(block)); };
  const auto end = [&](std::int64_t n, int block) { return part_begin(n, size(), owner(block) + 1); };
  std::vector<CopyBlocks> all;
  for (std::size_t i = 0; i < works.size(); ++i) {
    const std::int64_t n = works[i].elements;
    all.push_back({works.size() + i, works[i].width, static_cast<int>(remote.size()),
                   [&, n](int, int k) { return begin(n, k); },
                   [&, n](int r, int k) { return holder(k) == r ? end(n, k) - begin(n, k) : 0; },
                   part_begin(n, size(), 1)});
  }
  messages_->finish(call);
  machine_.meet(call);
  machine_.visit(call, all, MachineTransport::Order::whole,
                 [&](std::size_t i, const MachineTransport::View& view) {
                   const GatheredPart& w = works[i];
                   for (int k = 0; k < static_cast<int>(remote.size()); ++k) {
                     const int r = holder(k);
                     if (r == rank()) continue;
                     const std::int64_t at = begin(w.elements, k) + view.begin;
                     view.copy(w.full + static_cast<std::size_t>(at) * w.width, r, k);
                   }
                 });
}

void HostExchange::all_gather(Call& call) {
  const std::size_t most = CallDescriptor::max_addresses / 2;
  std::size_t first = 0;
  do {
    std::vector<GatheredPart> works;
    for (std::size_t i = first; i < std::min(call.gathers.size(), first + most); ++i) {
      const auto& [shard, full] = call.gathers[i];
      works.push_back({shard.raw(), full.raw(), full.numel(), size_of(full.dtype())});
    }
    gather(call, works);
    first += most;
  } while (first < call.gathers.size());
}

/// All ranks' words, in rank order.
std::vector<std::int64_t> HostExchange::gather_words(const Call& call, std::span<const std::int64_t> mine) {
  std::vector<std::int64_t> all(mine.size() * static_cast<std::size_t>(size()));
  const Messages::Landing landing(messages_.get(), mine.size_bytes() + std::span(all).size_bytes());
  const GatheredPart work{landing.data(), landing.data() + mine.size_bytes(), std::ssize(all),
                          sizeof(std::int64_t)};
  std::memcpy(work.own, mine.data(), mine.size_bytes());
  gather(call, {&work, 1}, OfferKind::words);
  std::memcpy(all.data(), work.full, std::span(all).size_bytes());
  return all;
}

void HostExchange::agree(Call& call) {
  call.words = gather_words(call, call.words);
}

// ---- broadcast and all-to-all ----

void HostExchange::broadcast(Call& call) {
  const int root = call.peer, source = topology_->deputy(topology_->machine(), root);
  const bool here = topology_->is_local(root);
  std::byte* data = call.x.raw();
  const std::size_t bytes = call.x.bytes();
  open(call, {rank() == source ? Offer{data, bytes, here ? OfferKind::tensor : OfferKind::later} : Offer{}});
  if (messages_) {
    if (rank() == source && !here) messages_->receive(root, data, bytes);
    for (int m = 0; rank() == root && m < topology_->machines(); ++m)
      if (m != topology_->machine()) messages_->send(topology_->deputy(m, root), data, bytes);
    messages_->finish(call);
    if (!here) machine_.meet(call);
  }
  const std::int64_t n = call.x.numel();
  const CopyBlocks blocks{0,
                          size_of(call.x.dtype()),
                          1,
                          [](int, int) { return 0; },
                          [=](int r, int) { return r == source ? n : 0; },
                          n};
  machine_.visit(call, {&blocks, 1}, MachineTransport::Order::whole,
                 [&](std::size_t, const MachineTransport::View& view) {
                   if (rank() != source)
                     view.copy(data + static_cast<std::size_t>(view.begin) * blocks.width, source, 0);
                 });
  machine_.close(call);
}

/// Opens the round with x as offer 1. Returns the elements that ranks send and take: a row of in and then out
/// counts for each.
std::vector<std::int64_t> HostExchange::open_all_to_all(Call& call) {
  std::vector<std::int64_t> mine = call.in_counts;
  mine.insert(mine.end(), call.out_counts.begin(), call.out_counts.end());
  const std::size_t bytes = std::span(mine).size_bytes();
  std::vector<std::int64_t> rows(mine.size() * static_cast<std::size_t>(size()));
  if (messages_) rows = gather_words(call, mine);
  open(call, {{reinterpret_cast<std::byte*>(mine.data()), bytes, OfferKind::words},
              {call.x.raw(), call.x.bytes()}});
  for (int r = 0; !messages_ && r < size(); ++r)
    std::memcpy(rows.data() + static_cast<std::size_t>(r) * mine.size(), machine_.words(r, 0), bytes);
  if (const std::string wrong = count_mismatch(rows, size(), [&](int r) { return world_rank(r); });
      !wrong.empty())
    board_->fail_and_throw(cat(name(), ": ", describe(call), ": ", wrong));
  return rows;
}

void HostExchange::all_to_all(Call& call) {
  const std::vector<std::int64_t> rows = open_all_to_all(call);
  const std::size_t width = size_of(call.x.dtype());
  const auto count = [&](int from, int to) { return rows[static_cast<std::size_t>(2 * from * size() + to)]; };
  const auto before = [&](int from, int to) {
    std::int64_t sum = 0;
    for (int r = 0; r < to; ++r) sum += count(from, r);
    return sum;
  };
  std::vector<std::byte*> places;  // where each rank's block goes
  std::int64_t taken = 0;
  for (int r = 0; r < size(); taken += count(r++, rank()))
    places.push_back(call.out.raw() + static_cast<std::size_t>(taken) * width);
  for (int k = 1; messages_ && k < size(); ++k) {
    const int from = (rank() + k) % size(), to = (rank() + size() - k) % size();
    if (!topology_->is_local(from))
      messages_->receive(from, places[static_cast<std::size_t>(from)],
                         static_cast<std::size_t>(count(from, rank())) * width);
    if (!topology_->is_local(to))
      messages_->send(to, call.x.raw() + static_cast<std::size_t>(before(rank(), to)) * width,
                      static_cast<std::size_t>(count(rank(), to)) * width);
  }
  const auto& here = topology_->locals();
  const auto at = [&](int block) { return here[static_cast<std::size_t>(block)]; };
  CopyBlocks blocks{1, width, static_cast<int>(here.size()), [&](int r, int k) { return before(r, at(k)); },
                    [&](int r, int k) { return count(r, at(k)); }};
  for (const int from : here)
    for (const int to : here) blocks.longest = std::max(blocks.longest, count(from, to));
  machine_.visit(call, {&blocks, 1}, MachineTransport::Order::whole,
                 [&](std::size_t, const MachineTransport::View& view) {
                   for (const int r : here)
                     view.copy(
                         places[static_cast<std::size_t>(r)] + static_cast<std::size_t>(view.begin) * width,
                         r, topology_->local_index(rank()));
                 });
  machine_.close(call);
}

}  // namespace sherd::comm
