#include "comm/exchange/sum_across.h"

#include <algorithm>

namespace sherd::comm {
namespace {

/// Own sums under way, so that the first machines of a chain may go on while the last ones add.
constexpr std::size_t most_finals = 4;

}  // namespace

DType wide_type(const ReduceSpec& how) {
  const bool narrow = how.in == DType::bf16 || how.in == DType::f16;
  return narrow && how.op == ReduceOp::sum ? DType::f32 : how.in;
}

std::size_t crossing_bytes(const Topology& topology, const ReduceSpec& how, int owner, bool chain) {
  const auto& segments = topology.segments();
  const int machine = topology.machine_of(owner);
  if (!chain)
    return (static_cast<std::size_t>(topology.size()) - topology.ranks_on(machine).size()) * size_of(how.in);
  const std::size_t crossings = segments.size() - 1 + (how.onto && segments.front().machine != machine) +
                                (segments.back().machine != machine);
  return crossings * size_of(wide_type(how));
}

std::vector<bool> plan_chains(const Topology& topology, const ReduceSpec& how) {
  std::vector<bool> out;
  for (int r = 0; r < topology.size(); ++r)
    out.push_back(how.in != DType::f64 &&
                  crossing_bytes(topology, how, r, true) < crossing_bytes(topology, how, r, false));
  return out;
}

std::byte* ReduceScratch::take(std::size_t bytes) {
  if (used_ == blocks_.size()) blocks_.emplace_back();
  auto& [data, size] = blocks_[used_++];
  if (size < bytes) data = std::make_unique_for_overwrite<std::byte[]>(bytes), size = bytes;
  return data.get();
}

SumAcross::SumAcross(const Call& call, const Topology& topology, MachineTransport& machine,
                     Messages& messages, ReduceScratch& scratch, std::span<const Summed> works)
    : call_(call),
      topology_(topology),
      machine_(machine),
      messages_(messages),
      scratch_(scratch),
      works_(works) {
  for (const Summed& work : works) chains_.push_back(plan_chains(topology, work.how));
}

void SumAcross::step(std::size_t index, const MachineTransport::View& view) {
  const Summed& work = works_[index];
  scratch_.reset();
  links_.clear(), tickets_.clear(), part_tickets_.clear();
  receive(work, index, view);
  send_own(work, view);
  for (const Link& link : links_) add_link(work, view, link);
  if (!chains_[index][static_cast<std::size_t>(topology_.rank())]) add_direct(work, view);
  messages_.wait(call_, tickets_);
  while (finals_.size() > most_finals) {
    complete(std::move(finals_.front()));
    finals_.pop_front();
  }
}

void SumAcross::finish() {
  for (; !finals_.empty(); finals_.pop_front()) complete(std::move(finals_.front()));
}

void SumAcross::receive(const Summed& work, std::size_t index, const MachineTransport::View& view) {
  const int me = topology_.rank(), n = topology_.size();
  const auto& chains = chains_[index];
  const std::size_t wide = size_of(wide_type(work.how));
  const auto is_chain = [&](int owner) { return chains[static_cast<std::size_t>(owner)]; };
  const auto count = [&](int owner) { return static_cast<std::size_t>(view.count(me, owner)); };
  // The sums' beginnings, then parts, then partial sums, then ends: so they are sent as well.
  for (std::size_t j = 0; j < segments().size(); ++j)
    for (int o = 0; o < n && segments()[j].machine == topology_.machine(); ++o) {
      if (!is_chain(o) || worker_of(j, o) != me) continue;
      links_.push_back({j, o});
      if (j > 0 || !work.how.onto || o == me) continue;
      links_.back().partial = scratch_.take(count(o) * wide);
      links_.back().ticket = messages_.receive(o, links_.back().partial, count(o) * wide);
    }
  parts_.assign(static_cast<std::size_t>(n), nullptr);
  for (int r = 0; r < n && !is_chain(me); ++r) {
    if (topology_.is_local(r)) continue;
    const std::size_t bytes = count(me) * size_of(work.how.in);
    parts_[static_cast<std::size_t>(r)] = scratch_.take(bytes);
    part_tickets_.push_back(messages_.receive(r, parts_[static_cast<std::size_t>(r)], bytes));
  }
  for (Link& link : links_) {
    if (link.segment == 0) continue;
    const std::size_t bytes = count(link.owner) * wide;
    link.partial = scratch_.take(bytes);
    link.ticket = messages_.receive(worker_of(link.segment - 1, link.owner), link.partial, bytes);
  }
  if (!is_chain(me) || ends_here(me)) return;
  finals_.push_back(
      {Messages::Landing(&messages_, count(me) * wide), 0, index, view.begin, view.count(me, me)});
  Final& final = finals_.back();
  final.ticket = messages_.receive(worker_of(segments().size() - 1, me), final.sum.data(), count(me) * wide);
}

void SumAcross::send_own(const Summed& work, const MachineTransport::View& view) {
  const int me = topology_.rank();
  const auto& chains = chains_[static_cast<std::size_t>(&work - works_.data())];
  const DType wide = wide_type(work.how);
  const std::int64_t mine = view.count(me, me);
  if (chains[static_cast<std::size_t>(me)] && work.how.onto && worker_of(0, me) != me) {
    const std::byte* onto = onto_at(work, view.begin);
    if (work.how.onto_type != wide) {
      std::byte* widened = scratch_.take(static_cast<std::size_t>(mine) * size_of(wide));
      combine({ReduceOp::sum, 1, work.how.onto_type, work.how.onto_type, wide}, nullptr, wide, {onto},
              widened, mine);
      onto = widened;
    }
    tickets_.push_back(
        messages_.send(worker_of(0, me), onto, static_cast<std::size_t>(mine) * size_of(wide)));
  }
  for (int k = 1; k < topology_.size(); ++k) {
    const int o = (me + k) % topology_.size();
    if (topology_.is_local(o) || chains[static_cast<std::size_t>(o)]) continue;
    tickets_.push_back(messages_.send(o, view.at(me, o),
                                      static_cast<std::size_t>(view.count(me, o)) * size_of(work.how.in)));
  }
}

void SumAcross::combine(ReduceSpec how, const std::byte* partial, DType partial_type,
                        std::vector<const std::byte*> sources, std::byte* out, std::int64_t count) {
  how.onto = nullptr;
  if (partial && how.op == ReduceOp::sum)
    how.onto = partial, how.onto_type = partial_type;
  else if (partial)
    sources.insert(sources.begin(), partial);  // an extreme, of the sources' type
  if (count > 0) machine_.worker().reduce(how, sources, {&out, 1}, count);
}

/// Adds a segment's ranks to what came from the one before, and hands the sum on.
void SumAcross::add_link(const Summed& work, const MachineTransport::View& view, const Link& link) {
  const int me = topology_.rank(), owner = link.owner;
  const std::int64_t count = view.count(me, owner);
  const Topology::LocalRanks& segment = segments()[link.segment];
  const bool last = link.segment + 1 == segments().size();
  messages_.wait(call_, link.ticket);
  std::vector<const std::byte*> sources;
  for (int r = segment.begin; r < segment.end; ++r) sources.push_back(view.at(r, owner));
  const DType wide = wide_type(work.how);
  const bool own_onto = !link.partial && work.how.onto;
  const std::byte* partial = own_onto ? onto_at(work, view.begin) : link.partial;
  const DType partial_type = own_onto ? work.how.onto_type : wide;
  if (last && owner == me)
    return combine(work.how, partial, partial_type, sources, out_at(work, view.begin), count);
  ReduceSpec how = work.how;
  how.factor = 1, how.out = wide;
  const std::size_t bytes = static_cast<std::size_t>(count) * size_of(wide);
  std::byte* sum = scratch_.take(bytes);
  if (own_onto && partial_type != wide) {  // kernels go on from fp32 or their own type
    combine({ReduceOp::sum, 1, partial_type, partial_type, wide}, nullptr, wide, {partial}, sum, count);
    combine(how, sum, wide, sources, sum, count);
  } else {
    combine(how, partial, partial_type, sources, sum, count);
  }
  tickets_.push_back(messages_.send(last ? owner : worker_of(link.segment + 1, owner), sum, bytes));
}

void SumAcross::add_direct(const Summed& work, const MachineTransport::View& view) {
  const int me = topology_.rank();
  messages_.wait(call_, part_tickets_);
  std::vector<const std::byte*> sources;
  for (int r = 0; r < topology_.size(); ++r)
    sources.push_back(topology_.is_local(r) ? view.at(r, me) : parts_[static_cast<std::size_t>(r)]);
  ReduceSpec how = work.how;
  if (how.onto) how.onto = onto_at(work, view.begin);
  std::byte* out = out_at(work, view.begin);
  if (const std::int64_t count = view.count(me, me)) machine_.worker().reduce(how, sources, {&out, 1}, count);
}

void SumAcross::complete(Final final) {
  messages_.wait(call_, final.ticket);
  const Summed& work = works_[final.index];
  const DType wide = wide_type(work.how);
  combine({work.how.op, work.how.factor, wide, wide, work.how.out}, nullptr, wide, {final.sum.data()},
          out_at(work, final.begin), final.count);
}

}  // namespace sherd::comm
