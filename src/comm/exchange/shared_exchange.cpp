#include "comm/exchange/shared_exchange.h"

#include <algorithm>
#include <cstring>

namespace sherd::comm {

SharedExchange::SharedExchange(std::shared_ptr<Board> board, std::shared_ptr<Memory> memory, int threads)
    : board_(std::move(board)),
      memory_(std::move(memory)),
      threads_(threads),
      cpu_(make_cpu_worker(threads)),
      worker_(cpu_.get()),
      sends_(static_cast<std::size_t>(size())),
      receives_(sends_.size()),
      filled_letters_(sends_.size()) {}

SharedExchange::~SharedExchange() {
  board_->depart();
}

void SharedExchange::run(Call& call) {
  require(!call.gpu || gpu_, name(), ": tensors of a GPU, which this group was not bound to");
  worker_ = call.gpu ? gpu_.get() : cpu_.get();
  memory_->enter();
  try {
    worker_->begin(call, bytes_moved(call));
    dispatch(call);
    worker_->end(call);
  } catch (const std::exception& error) {
    worker_->abandon();
    // The caller will free the tensors; a peer that came to the round before the failure may be reading them still, or wait
    // for this rank, of which it hears here.
    board_->fail(cat(name(), ": rank ", rank(), " failed: ", error.what()));
    memory_->leave();
    memory_->outlast_readers();
    throw;
  }
  memory_->leave();
}

void SharedExchange::open_round(const Call& call, const std::vector<Source>& sources) {
  Notice& mine = board_->notice(rank(), ++rounds_);
  mine.signature = sign(call);
  own_ = sources;
  std::size_t total = 0;
  for (const Source& s : sources) total += (s.bytes + 15) / 16 * 16;
  const bool inside = total <= Notice::payload_bytes && worker_->immediate();
  std::size_t used = 0;
  for (std::size_t i = 0; i < sources.size(); ++i) {
    const Source& s = sources[i];
    if (!inside) {
      mine.addresses[i] = memory_->locate(s.data, s.bytes);
      continue;
    }
    mine.addresses[i] = {Address::in_notice, used};
    if (s.bytes) std::memcpy(mine.payload.data() + used, s.data, s.bytes);
    used += (s.bytes + 15) / 16 * 16;
  }
  if (call.kind == Collective::all_to_all) {
    std::copy(call.in_counts.begin(), call.in_counts.end(), mine.counts.begin());
    std::copy(call.out_counts.begin(), call.out_counts.end(), mine.counts.begin() + Notice::max_ranks);
  }
  meet(call);
  compare();
}

void SharedExchange::meet(const Call& call) {
  worker_->publish();
  board_->barrier(call);
  worker_->follow();
}

void SharedExchange::compare() {
  const Signature& mine = board_->notice(rank(), rounds_).signature;
  bool same = true;
  for (int r = 0; r < size(); ++r)
    same = same && std::memcmp(&board_->notice(r, rounds_).signature, &mine, sizeof mine) == 0;
  if (same) return;
  std::vector<Signature> all;
  for (int r = 0; r < size(); ++r) all.push_back(board_->notice(r, rounds_).signature);
  board_->fail_and_throw(cat(name(), ": ", mismatch(all)));
}

const std::byte* SharedExchange::source(int peer, std::size_t piece) const {
  if (peer == rank()) return own_[piece].data;
  Notice& notice = board_->notice(peer, rounds_);
  const Address& address = notice.addresses[piece];
  if (address.region == Address::in_notice) return notice.payload.data() + address.offset;
  // A failed peer may have left this round already, and freed what it offered.
  if (board_->failed()) board_->throw_failure();
  return memory_->resolve(peer, address);
}

bool SharedExchange::hidden_at(int peer, std::size_t piece) const {
  return board_->notice(peer, rounds_).addresses[piece].region == Address::hidden;
}

bool SharedExchange::hidden(std::size_t piece) const {
  if (size() == 1) return false;
  for (int r = 0; r < size(); ++r)
    if (hidden_at(r, piece)) return true;
  return false;
}

bool SharedExchange::all_in_notice() const {
  for (int r = 0; r < size(); ++r)
    if (board_->notice(r, rounds_).addresses[0].region != Address::in_notice) return false;
  return true;
}

void SharedExchange::all_gather(Call& call) {
  const std::size_t count = call.gathers.size();
  std::size_t first = 0;
  do {
    const std::size_t last = std::min(count, first + Notice::max_addresses);
    std::vector<Source> sources;
    for (std::size_t i = first; i < last; ++i)
      sources.push_back({call.gathers[i].shard.raw(), call.gathers[i].shard.bytes()});
    open_round(call, sources);
    std::vector<std::size_t> staged;
    bool read_peers = false;
    for (std::size_t i = first; i < last; ++i) {
      const auto& [shard, full] = call.gathers[i];
      worker_->copy(full.raw() + static_cast<std::size_t>(rank()) * shard.bytes(), shard.raw(), shard.bytes());
      if (hidden(i - first)) {
        staged.push_back(i);
        continue;
      }
      read_peers = true;
      // Begin with the next rank, so that not all read from the same one at a time.
      for (int k = 1; k < size(); ++k) {
        const int peer = (rank() + k) % size();
        worker_->copy(full.raw() + static_cast<std::size_t>(peer) * shard.bytes(), source(peer, i - first),
                     shard.bytes());
      }
    }
    const bool close = read_peers && !all_in_notice();
    if (!staged.empty()) staged_gather(call, staged);
    if (close) close_round(call);
    first = last;
  } while (first < count);
}

void SharedExchange::reduce_piece(const Call& call, const ReducePiece& piece,
                                  std::span<const std::byte* const> sources, std::int64_t begin,
                                  std::int64_t end) {
  std::byte* out = piece.shard.raw() + static_cast<std::size_t>(begin) * size_of(piece.shard.dtype());
  worker_->reduce(fold_of(piece, call.rounding, begin), sources, {&out, 1}, end - begin);
}

void SharedExchange::reduce_scatter(Call& call) {
  const std::size_t count = call.reduces.size();
  const auto n = static_cast<std::size_t>(size());
  std::vector<const std::byte*> from(n);
  std::size_t first = 0;
  do {
    const std::size_t last = std::min(count, first + Notice::max_addresses);
    std::vector<Source> sources;
    for (std::size_t i = first; i < last; ++i)
      sources.push_back({call.reduces[i].full.raw(), call.reduces[i].full.bytes()});
    open_round(call, sources);
    std::vector<std::size_t> staged;
    bool read_peers = false;
    for (std::size_t i = first; i < last; ++i) {
      const ReducePiece& piece = call.reduces[i];
      if (hidden(i - first)) {
        staged.push_back(i);
        continue;
      }
      read_peers = true;
      const std::size_t offset =
          static_cast<std::size_t>(rank() * piece.shard.numel() + piece.begin) * size_of(piece.full.dtype());
      for (int r = 0; r < size(); ++r) from[static_cast<std::size_t>(r)] = source(r, i - first) + offset;
      reduce_piece(call, piece, from, piece.begin, piece.end);
    }
    const bool close = read_peers && !all_in_notice();
    if (!staged.empty()) staged_reduce_scatter(call, staged);
    if (close) close_round(call);
    first = last;
  } while (first < count);
}

void SharedExchange::all_reduce(Call& call) {
  open_round(call, {{call.x.raw(), call.x.bytes()}});
  if (hidden(0)) return staged_all_reduce(call);
  const auto n = static_cast<std::size_t>(size());
  const std::int64_t count = call.x.numel();
  const ReduceSpec how{call.op, call.factor, call.x.dtype(), call.x.dtype(), call.x.dtype()};
  std::vector<const std::byte*> from(n);
  std::vector<std::byte*> to(n);
  for (int r = 0; r < size(); ++r) from[static_cast<std::size_t>(r)] = source(r, 0);
  if (all_in_notice()) {
    to.assign(1, call.x.raw());
    return worker_->reduce(how, from, to, count);
  }
  // Sum our part and hand it to everybody at once: each element is read and written once per rank.
  const std::int64_t begin = part_begin(count, size(), rank()), end = part_begin(count, size(), rank() + 1);
  const std::size_t offset = static_cast<std::size_t>(begin) * size_of(call.x.dtype());
  for (std::size_t r = 0; r < n; ++r) {
    from[r] += offset;
    to[r] = const_cast<std::byte*>(from[r]);
  }
  worker_->reduce(how, from, to, end - begin);
  close_round(call);
}

void SharedExchange::broadcast(Call& call) {
  const bool root = rank() == call.peer;
  open_round(call, {root ? Source{call.x.raw(), call.x.bytes()} : Source{}});
  if (size() == 1) return;
  if (hidden_at(call.peer, 0)) return staged_broadcast(call);
  const bool small = board_->notice(call.peer, rounds_).addresses[0].region == Address::in_notice;
  if (!root) worker_->copy(call.x.raw(), source(call.peer, 0), call.x.bytes());
  if (!small) close_round(call);
}

void SharedExchange::all_to_all(Call& call) {
  const auto n = static_cast<std::size_t>(size());
  const std::size_t element = size_of(call.x.dtype());
  std::vector<Source> sources;
  std::size_t offset = 0;
  for (std::size_t q = 0; q < n; ++q) {
    const std::size_t bytes = static_cast<std::size_t>(call.in_counts[q]) * element;
    sources.push_back({call.x.raw() + offset, bytes});
    offset += bytes;
  }
  open_round(call, sources);
  std::vector<std::int64_t> in(n * n), out(n * n);
  bool any_hidden = false, all_small = true;
  for (std::size_t p = 0; p < n; ++p) {
    const Notice& notice = board_->notice(static_cast<int>(p), rounds_);
    for (std::size_t q = 0; q < n; ++q) {
      in[p * n + q] = notice.counts[q];
      out[p * n + q] = notice.counts[Notice::max_ranks + q];
      any_hidden = any_hidden || (n > 1 && notice.addresses[q].region == Address::hidden);
      all_small = all_small && notice.addresses[q].region == Address::in_notice;
    }
  }
  if (const std::string wrong = count_mismatch(in, out, size()); !wrong.empty())
    board_->fail_and_throw(cat(name(), ": ", describe(call), ": ", wrong));
  if (any_hidden) return staged_all_to_all(call, in);
  std::byte* to = call.out.raw();
  for (std::size_t p = 0; p < n; ++p) {
    const std::size_t bytes = static_cast<std::size_t>(call.out_counts[p]) * element;
    worker_->copy(to, source(static_cast<int>(p), static_cast<std::size_t>(rank())), bytes);
    to += bytes;
  }
  if (!all_small) close_round(call);
}

void SharedExchange::agree(Call& call) {
  const std::size_t bytes = call.words.size() * sizeof(std::int64_t);
  open_round(call, {{reinterpret_cast<const std::byte*>(call.words.data()), bytes}});
  std::vector<std::int64_t> all(call.words.size() * static_cast<std::size_t>(size()));
  for (int r = 0; r < size(); ++r)
    std::memcpy(reinterpret_cast<std::byte*>(all.data()) + static_cast<std::size_t>(r) * bytes, source(r, 0),
                bytes);
  call.words = std::move(all);
}

std::vector<std::int64_t> SharedExchange::agree(std::vector<std::int64_t> words, const std::string& what) {
  Call call;
  call.kind = Collective::agree;
  call.words = std::move(words);
  call.label = what;
  run(call);  // by the host's worker: the last call may have been a GPU's
  return std::move(call.words);
}

}  // namespace sherd::comm
