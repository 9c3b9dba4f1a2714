#include "comm/exchange/call.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>

#include "base/text/excerpt.h"

namespace sherd::comm {
namespace {

std::uint64_t mix(std::uint64_t hash, std::int64_t value) {
  return mix_seed(hash, static_cast<std::uint64_t>(value));
}

bool overlap(const Tensor& a, const Tensor& b) {
  if (a.bytes() == 0 || b.bytes() == 0) return false;
  return a.raw() < b.raw() + b.bytes() && b.raw() < a.raw() + a.bytes();
}

void check_gathers(const Call& call, int rank, int size) {
  for (const auto& [shard, full] : call.gathers) {
    require(shard.dtype() == full.dtype(), "all_gather \"", call.label, "\": shard is ",
            name_of(shard.dtype()), " and full is ", name_of(full.dtype()));
    require(full.numel() == size * shard.numel(), "all_gather \"", call.label, "\": full has ", full.numel(),
            " elements, not ", size, " × ", shard.numel());
    const Tensor own = full.range(rank * shard.numel(), (rank + 1) * shard.numel());
    require(own.raw() == shard.raw() || !overlap(shard, full), "all_gather \"", call.label,
            "\": the shard overlaps full outside its own place");
  }
}

void check_reduces(const Call& call, int rank, int size) {
  for (const auto& piece : call.reduces) {
    const auto& [full, shard, begin, end, onto] = piece;
    require(full.numel() % size == 0 && shard.numel() == full.numel() / size, "reduce_scatter \"", call.label,
            "\": full has ", full.numel(), " elements, shard ", shard.numel(), ", on ",
            counted(size, "rank"));
    require(0 <= begin && begin <= end && end <= shard.numel(), "reduce_scatter \"", call.label,
            "\": range [", begin, ", ", end, ") of a shard of ", shard.numel());
    const bool floats = is_floating(full.dtype());
    require(floats ? is_floating(shard.dtype()) && is_floating(call.rounding)
                   : shard.dtype() == full.dtype() && call.rounding == full.dtype(),
            "reduce_scatter \"", call.label, "\": cannot sum ", name_of(full.dtype()), " rounded to ",
            name_of(call.rounding), " into ", name_of(shard.dtype()));
    const Tensor own = full.range(rank * shard.numel(), (rank + 1) * shard.numel());
    require((own.raw() == shard.raw() && shard.dtype() == full.dtype()) || !overlap(shard, full),
            "reduce_scatter \"", call.label, "\": the shard overlaps full outside its own place");
    if (!onto.defined()) continue;
    require(onto.numel() == shard.numel(), "reduce_scatter \"", call.label, "\": onto has ", onto.numel(),
            " elements and the shard ", shard.numel());
    require(onto.dtype() == shard.dtype() || (floats && onto.dtype() == DType::f32), "reduce_scatter \"",
            call.label, "\": a sum into ", name_of(shard.dtype()), " cannot begin with ",
            name_of(onto.dtype()));
    require((onto.raw() == shard.raw() && onto.dtype() == shard.dtype()) || !overlap(onto, shard),
            "reduce_scatter \"", call.label, "\": onto overlaps the shard without being it");
  }
}

void check_counts(Call& call, int size) {
  const auto fill = [&](std::vector<std::int64_t>& counts, const Tensor& x, const char* which) {
    if (counts.empty()) {
      require(x.numel() % size == 0, "all_to_all \"", call.label, "\": ", which, " of ", x.numel(),
              " elements has no equal blocks on ", counted(size, "rank"), "; give counts");
      counts.assign(static_cast<std::size_t>(size), x.numel() / size);
    }
    require(counts.size() == static_cast<std::size_t>(size), "all_to_all \"", call.label,
            "\": ", counts.size(), " ", which, " counts for ", counted(size, "rank"));
    require(std::all_of(counts.begin(), counts.end(), [](auto c) { return c >= 0; }) &&
                std::accumulate(counts.begin(), counts.end(), std::int64_t{0}) == x.numel(),
            "all_to_all \"", call.label, "\": ", which, " counts do not add up to ", x.numel());
  };
  require(call.x.dtype() == call.out.dtype(), "all_to_all \"", call.label, "\": ", name_of(call.x.dtype()),
          " into ", name_of(call.out.dtype()));
  require(!overlap(call.x, call.out), "all_to_all \"", call.label, "\": in and out overlap");
  fill(call.in_counts, call.x, "in");
  fill(call.out_counts, call.out, "out");
}

}  // namespace

std::string_view name_of(Collective kind) {
  constexpr std::string_view names[] = {"nothing",    "barrier",   "all_gather", "reduce_scatter",
                                        "all_reduce", "broadcast", "all_to_all", "agreement",
                                        "send",       "receive"};
  return names[static_cast<std::size_t>(kind)];
}

std::string_view name_of(ReduceOp op) {
  return op == ReduceOp::sum ? "sum" : op == ReduceOp::max ? "max" : "min";
}

bool wants_native_sum(const Call& call) {
  return call.reduction == Reduction::native && call.op == ReduceOp::sum;
}

CallSignature sign(const Call& call) {
  CallSignature out;
  out.kind = call.kind, out.op = call.op, out.rounding = call.rounding, out.world_peer = call.world_peer;
  out.gpu = call.gpu, out.reduction = call.reduction;
  out.layout =
      mix_seed(std::bit_cast<std::uint64_t>(call.factor), is_transfer(call) ? 0 : stable_hash(call.label));
  std::memcpy(out.label.data(), call.label.data(), std::min(call.label.size(), out.label.size() - 1));
  if (call.x.defined()) {
    out.dtype = call.x.dtype();
    out.pieces = 1;
    if (call.kind != Collective::all_to_all) out.elements = call.x.numel();  // its counts may differ by rank
  }
  for (const auto& [shard, full] : call.gathers) {
    out.dtype = shard.dtype();
    out.elements += full.numel();
    out.layout = mix(mix(out.layout, full.numel()), static_cast<int>(full.dtype()));
    ++out.pieces;
  }
  for (const auto& piece : call.reduces) {
    out.dtype = piece.full.dtype();
    out.elements += piece.end - piece.begin;
    out.layout = mix(mix(out.layout, piece.full.numel()), static_cast<int>(piece.full.dtype()));
    out.layout = mix(mix(out.layout, piece.begin), piece.end);
    out.layout = mix(out.layout, piece.onto.defined() ? static_cast<int>(piece.onto.dtype()) : -1);
    ++out.pieces;
  }
  if (call.kind == Collective::agree) out.elements = static_cast<std::int64_t>(call.words.size());
  return out;
}

std::string describe(const CallSignature& s) {
  std::string out(name_of(s.kind));
  const char* how = s.reduction == Reduction::native ? "native " : "";
  if (s.kind == Collective::all_reduce) out += cat(" (", how, name_of(s.op), ")");
  if (s.kind == Collective::reduce_scatter && *how) out += " (native sum)";
  if (s.kind == Collective::broadcast) out += cat(" from rank ", s.world_peer);
  if (s.kind == Collective::all_to_all) out += cat(" of ", name_of(s.dtype));
  if (s.kind != Collective::barrier && s.kind != Collective::all_to_all && s.kind != Collective::agree)
    out += cat(" of ", s.elements, " ", name_of(s.dtype));
  if (s.kind == Collective::send) out += cat(" to rank ", s.world_peer);
  if (s.kind == Collective::receive) out += cat(" from rank ", s.world_peer);
  if (s.gpu) out += s.gpu > 1 ? " on a GPU, through the host" : " on a GPU";
  if (s.pieces > 1) out += cat(" in ", s.pieces, " pieces");
  if (s.label[0] != 0) out += cat(" \"", s.label.data(), "\"");
  return out;
}

void check_call(Call& call, int rank, int size) {
  const auto in_group = [&](int r) {
    require(0 <= r && r < size, name_of(call.kind), " \"", call.label, "\": rank ", r, " is not one of ",
            size);
  };
  if (call.kind == Collective::all_gather) check_gathers(call, rank, size);
  if (call.kind == Collective::reduce_scatter) check_reduces(call, rank, size);
  if (call.kind == Collective::all_to_all) check_counts(call, size);
  if (call.kind == Collective::broadcast) in_group(call.peer);
  if (is_transfer(call)) {
    in_group(call.peer);
    require(call.peer != rank, name_of(call.kind), " \"", call.label, "\": rank ", rank,
            " cannot message itself");
  }
}

std::uint64_t bytes_sent(const Call& call, int rank, int size) {
  const auto others = static_cast<std::uint64_t>(size - 1);
  std::uint64_t bytes = 0;
  switch (call.kind) {
    case Collective::all_gather:
      for (const auto& piece : call.gathers) bytes += piece.shard.bytes() * others;
      return bytes;
    case Collective::reduce_scatter:
      for (const auto& piece : call.reduces)
        bytes += static_cast<std::uint64_t>(piece.end - piece.begin) * size_of(piece.full.dtype()) * others;
      return bytes;
    case Collective::all_reduce: {
      const std::int64_t n = call.x.numel();
      const std::int64_t own = part_begin(n, size, rank + 1) - part_begin(n, size, rank);
      return (static_cast<std::uint64_t>(n - own) + static_cast<std::uint64_t>(own) * others) *
             size_of(call.x.dtype());
    }
    case Collective::broadcast:
      return rank == call.peer ? call.x.bytes() * others : 0;
    case Collective::all_to_all:
      for (int r = 0; r < size; ++r)
        if (r != rank)
          bytes += static_cast<std::uint64_t>(call.in_counts[static_cast<std::size_t>(r)]) *
                   size_of(call.x.dtype());
      return bytes;
    case Collective::send:
      return call.x.bytes();
    default:
      return 0;
  }
}

std::size_t bytes_moved(const Call& call) {
  std::size_t bytes = call.x.bytes();
  for (const auto& piece : call.gathers) bytes += piece.full.bytes();
  for (const auto& piece : call.reduces) {
    const auto ranks = piece.shard.numel() == 0 ? 0 : piece.full.numel() / piece.shard.numel();
    bytes += static_cast<std::size_t>((piece.end - piece.begin) * ranks) * size_of(piece.full.dtype());
  }
  return bytes;
}

std::string mismatch(const std::vector<CallSignature>& calls, const std::vector<int>& world_ranks) {
  const auto same = [](const CallSignature& a, const CallSignature& b) {
    return std::memcmp(&a, &b, sizeof a) == 0;
  };
  std::vector<std::pair<CallSignature, std::vector<int>>> groups;
  for (std::size_t i = 0; i < calls.size(); ++i) {
    const auto it =
        std::find_if(groups.begin(), groups.end(), [&](auto& g) { return same(g.first, calls[i]); });
    if (it != groups.end())
      it->second.push_back(world_ranks[i]);
    else
      groups.push_back({calls[i], {world_ranks[i]}});
  }
  if (groups.size() <= 1) return "";
  std::string out = "mismatched calls: ";
  for (std::size_t g = 0; g < groups.size(); ++g)
    out += cat(g ? "; " : "", name_ranks(groups[g].second), " called ", describe(groups[g].first));
  // Equal words for different calls: they differ in what the words leave out.
  if (describe(groups[0].first) == describe(groups[1].first))
    out += "; the labels' ends, the pieces' extents or the factors differ";
  return out;
}

std::string transfer_mismatch(const Call& transfer, const CallSignature& theirs, int rank) {
  const CallSignature mine = sign(transfer);
  if (theirs.elements == mine.elements && theirs.dtype == mine.dtype) return "";
  return cat("mismatched transfer: rank ", transfer.world_peer, " called ", describe(theirs), "; rank ", rank,
             " called ", describe(mine));
}

std::string count_mismatch(const std::vector<std::int64_t>& rows, int size,
                           const std::function<int(int)>& world_rank) {
  for (int p = 0; p < size; ++p)
    for (int q = 0; q < size; ++q) {
      const auto sent = rows[static_cast<std::size_t>(2 * p * size + q)],
                 taken = rows[static_cast<std::size_t>((2 * q + 1) * size + p)];
      if (sent != taken)
        return cat("mismatched counts: rank ", world_rank(p), " has ", sent, " elements for rank ",
                   world_rank(q), ", which expects ", taken);
    }
  return "";
}

std::string name_ranks(const std::vector<int>& ranks) {
  return cat(ranks.size() == 1 ? "rank " : "ranks ", joined_text(ranks));
}

}  // namespace sherd::comm
