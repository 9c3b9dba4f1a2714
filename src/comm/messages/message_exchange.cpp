#include "comm/messages/message_exchange.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include "comm/exchange/board.h"
#include "comm/exchange/worker.h"
#include "comm/messages/announcer.h"
#include "comm/messages/message_health.h"

namespace sherd::comm {
namespace {

constexpr int signature_tag = 1, data_tag = 2, transfer_tag = 16, transfer_tags = 8192;
constexpr std::size_t longest_message = std::size_t{1} << 28;

/// Messages under way.
struct Open {
  int request;
  int peer;
  bool receiving;
};

/// Waits between looks at messages.
class Backoff {
 public:
  explicit Backoff(Port& port) : port_(port), seen_(port.news()) {}
  void pause() { seen_ = port_.pause(seen_, turns_++); }
  bool every(int n) const { return turns_ % n == n - 1; }
  void reset() { turns_ = 0; }

 private:
  Port& port_;
  std::uint64_t seen_;
  int turns_ = 0;
};

class MessageExchange final : public Backend {
 public:
  MessageExchange(std::shared_ptr<Port> port, std::string name, const CommOptions& options,
                  std::shared_ptr<Health> parent)
      : port_(std::move(port)),
        name_(std::move(name)),
        options_(options),
        worker_(make_cpu_worker(options.threads)),
        health_(std::make_shared<MessageHealth>(port_, name_, std::move(parent))),
        announcer_(port_),
        sends_(static_cast<std::size_t>(size())),
        receives_(sends_.size()) {
    port_->on_leave([weak = std::weak_ptr<MessageHealth>(health_)] {
      if (const auto alive = weak.lock()) alive->depart();
    });
  }
  ~MessageExchange() override { health_->depart(); }

  int rank() const override { return port_->rank(); }
  int size() const override { return port_->size(); }
  const std::string& name() const override { return name_; }
  double timeout_seconds() const override { return options_.timeout_seconds; }
  void fail(const std::string& reason) noexcept override { health_->fail(reason); }
  std::string failure() const override { return health_->failure(); }
  void nudge() noexcept override {}  // await() polls
  void look_after_peers() noexcept override;
  std::uint64_t announce(const Signature& call) override {
    const std::uint64_t number = announcer_.add(call);
    check_announced();
    return number;
  }
  std::vector<int> not_announced(std::uint64_t number) override { return announcer_.absent(number); }

  void run(Call& call) override;
  void start(Call& transfer) override;
  bool advance(Call& transfer) override;
  void await(const std::function<bool()>& ready, const std::vector<Call*>& active) override;

  device::Storage allocate(device::Device& device, std::size_t bytes, device::Category category,
                           device::Tier tier) override {
    return device.allocate(bytes, category, tier);
  }

  std::unique_ptr<Backend> split(int color, int key) override {
    Call call;
    call.kind = Collective::agree, call.words = {color, key}, call.label = "split";
    run(call);
    auto part =
        port_->split(color, key, {timeout_seconds(), cat("splitting ", name_), [this] { return failure(); }});
    if (!part) return nullptr;
    std::string part_name = group_name(part->kind(), part->world_ranks(), part->world_size());
    return make_message_exchange(std::move(part), std::move(part_name), options_, health_);
  }

 private:
  void open_round(const Call& call);
  void check_announced() {
    if (const std::string wrong = announcer_.check(); !wrong.empty()) fail_and_throw(cat(name_, ": ", wrong));
  }
  void all_gather(Call& call);
  void reduce_scatter(Call& call);
  void all_reduce(Call& call);
  void broadcast(Call& call);
  void all_to_all(Call& call);

  /// Every rank's `bytes` at `mine`, in rank order.
  std::vector<std::byte> exchange(const Call& call, const void* mine, std::size_t bytes, int tag);
  std::vector<std::int64_t> exchange_words(const Call& call, const std::vector<std::int64_t>& mine);
  void send_to(int peer, const std::byte* data, std::size_t bytes, int tag = data_tag);
  void receive_from(int peer, std::byte* data, std::size_t bytes, int tag = data_tag);
  /// Waits for all of open_.
  void finish(const Call& call);
  /// Sums what each rank holds of part `rank` of its tensor, in pieces; full_at(r, begin) is where this
  /// rank's own elements for rank r begin, and count(r) how many there are.
  template <class At, class Count, class Sum>
  void reduce_parts(const Call& call, DType dtype, const At& full_at, const Count& count, const Sum& sum);
  [[noreturn]] void fail_and_throw(const std::string& reason);
  void check_peers(const std::vector<int>& peers, const Call& call, const Deadline& deadline,
                   std::optional<Deadline>& grace);

  std::shared_ptr<Port> port_;
  std::string name_;
  CommOptions options_;
  std::unique_ptr<Worker> worker_;
  std::shared_ptr<MessageHealth> health_;
  Announcer announcer_;
  std::vector<Open> open_;
  std::vector<std::byte> scratch_;
  std::vector<std::uint64_t> sends_, receives_;  ///< transfers started, by peer
};

void MessageExchange::fail_and_throw(const std::string& reason) {
  health_->fail(reason);
  throw Error(ErrorKind::comm, health_->failure());
}

void MessageExchange::send_to(int peer, const std::byte* data, std::size_t bytes, int tag) {
  for (std::size_t done = 0; done < bytes; done += longest_message)
    open_.push_back(
        {port_->send(data + done, std::min(longest_message, bytes - done), peer, tag), peer, false});
}

void MessageExchange::receive_from(int peer, std::byte* data, std::size_t bytes, int tag) {
  for (std::size_t done = 0; done < bytes; done += longest_message)
    open_.push_back(
        {port_->receive(data + done, std::min(longest_message, bytes - done), peer, tag), peer, true});
}

void MessageExchange::look_after_peers() noexcept {
  if (health_->failed()) return;
  try {
    if (const std::string wrong = announcer_.check(); !wrong.empty()) return health_->fail(cat(name_, ": ", wrong));
  } catch (const std::exception& error) {
    return health_->fail(cat(name_, ": rank ", rank(), " failed: ", error.what()));
  }
  for (int r = 0; r < size(); ++r)
    if (r != rank() && health_->dead(r))
      return health_->fail(
          cat(name_, ": rank ", r,
              " is dead: its process or the connection to it ended; see that rank's own output"));
}

/// A lost peer's last messages may still be on their way when the news of its end is here: `grace` runs
/// first.
void MessageExchange::check_peers(const std::vector<int>& peers, const Call& call, const Deadline& deadline,
                                  std::optional<Deadline>& grace) {
  if (health_->failed()) throw Error(ErrorKind::comm, health_->failure());
  std::string why;
  for (const int peer : peers) {
    if (!health_->lost(peer, why)) continue;
    if (!grace) grace = Deadline::after_seconds(0.5);
    if (!grace->passed()) return;
    fail_and_throw(cat(name_, ": rank ", peer, " ", why, " while rank ", rank(), " waited for it in ",
                       describe(call), "; see that rank's own output"));
  }
  if (deadline.passed())
    fail_and_throw(cat(name_, ": ", describe(call), ": ", name_ranks(peers), " did not come within ",
                       options_.timeout_seconds, " s, while rank ", rank(),
                       " waited; raise parallel.timeout_seconds if the work in between takes that long"));
}

void MessageExchange::finish(const Call& call) {
  const Deadline deadline = Deadline::after_seconds(options_.timeout_seconds);
  std::optional<Deadline> grace;
  try {
    for (Backoff backoff(*port_);; backoff.pause()) {
      const std::size_t before = open_.size();
      std::erase_if(open_, [&](const Open& message) { return port_->test(message.request); });
      if (open_.empty()) return;
      if (open_.size() != before) backoff.reset();
      if (!backoff.every(64) && !deadline.passed()) continue;
      std::vector<int> peers;
      for (const Open& message : open_) peers.push_back(message.peer);
      std::sort(peers.begin(), peers.end());
      peers.erase(std::unique(peers.begin(), peers.end()), peers.end());
      check_peers(peers, call, deadline, grace);
    }
  } catch (...) {
    for (const Open& message : open_)
      message.receiving ? port_->cancel(message.request) : port_->release(message.request);
    open_.clear();
    throw;
  }
}

std::vector<std::byte> MessageExchange::exchange(const Call& call, const void* mine, std::size_t bytes,
                                                 int tag) {
  std::vector<std::byte> all(bytes * static_cast<std::size_t>(size()));
  std::memcpy(all.data() + static_cast<std::size_t>(rank()) * bytes, mine, bytes);
  for (int r = 0; r < size(); ++r)
    if (r != rank()) receive_from(r, all.data() + static_cast<std::size_t>(r) * bytes, bytes, tag);
  for (int r = 0; r < size(); ++r)
    if (r != rank()) send_to(r, all.data() + static_cast<std::size_t>(rank()) * bytes, bytes, tag);
  finish(call);
  return all;
}

std::vector<std::int64_t> MessageExchange::exchange_words(const Call& call,
                                                          const std::vector<std::int64_t>& mine) {
  const std::vector<std::byte> bytes =
      exchange(call, mine.data(), mine.size() * sizeof(std::int64_t), data_tag);
  std::vector<std::int64_t> all(bytes.size() / sizeof(std::int64_t));
  if (!all.empty()) std::memcpy(all.data(), bytes.data(), bytes.size());
  return all;
}

void MessageExchange::open_round(const Call& call) {
  const Signature mine = sign(call);
  const std::vector<std::byte> bytes = exchange(call, &mine, sizeof mine, signature_tag);
  std::vector<Signature> all(static_cast<std::size_t>(size()));
  std::memcpy(all.data(), bytes.data(), bytes.size());
  if (const std::string wrong = mismatch(all); !wrong.empty()) fail_and_throw(cat(name_, ": ", wrong));
  check_announced();  // all that the previous rank announced before is here
}

void MessageExchange::run(Call& call) {
  worker_->begin(call, bytes_moved(call));
  open_round(call);
  switch (call.kind) {
    case Collective::barrier:
      return;
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
      call.words = exchange_words(call, call.words);
      return;
    default:
      sherd::fail(ErrorKind::usage, name_of(call.kind), " is not a collective");
  }
}

void MessageExchange::all_gather(Call& call) {
  for (const auto& [shard, full] : call.gathers) {
    const std::size_t bytes = shard.bytes();
    for (int k = 1; k < size(); ++k) {
      const int from = (rank() + k) % size(), to = (rank() + size() - k) % size();
      receive_from(from, full.raw() + static_cast<std::size_t>(from) * bytes, bytes);
      send_to(to, shard.raw(), bytes);
    }
    worker_->copy(full.raw() + static_cast<std::size_t>(rank()) * bytes, shard.raw(), bytes);
  }
  finish(call);
}

template <class At, class Count, class Sum>
void MessageExchange::reduce_parts(const Call& call, DType dtype, const At& full_at, const Count& count,
                                   const Sum& sum) {
  const std::size_t width = size_of(dtype);
  const auto chunk = static_cast<std::int64_t>((std::size_t{1} << 20) / width);
  std::int64_t longest = 0;
  for (int r = 0; r < size(); ++r) longest = std::max(longest, count(r));
  const std::size_t room = static_cast<std::size_t>(std::min(chunk, longest)) * width;
  scratch_.resize(room * static_cast<std::size_t>(size()));
  std::vector<const std::byte*> from(static_cast<std::size_t>(size()));
  for (std::int64_t begin = 0; begin < longest; begin += chunk) {
    const auto elements = [&](int r) { return std::clamp<std::int64_t>(count(r) - begin, 0, chunk); };
    for (int r = 0; r < size(); ++r) {
      std::byte* place = scratch_.data() + static_cast<std::size_t>(r) * room;
      from[static_cast<std::size_t>(r)] = r == rank() ? full_at(r, begin) : place;
      if (r != rank()) receive_from(r, place, static_cast<std::size_t>(elements(rank())) * width);
    }
    for (int k = 1; k < size(); ++k) {
      const int to = (rank() + k) % size();
      send_to(to, full_at(to, begin), static_cast<std::size_t>(elements(to)) * width);
    }
    finish(call);
    if (elements(rank()) > 0) sum(std::span<const std::byte* const>(from), begin, elements(rank()));
  }
}

void MessageExchange::reduce_scatter(Call& call) {
  for (const ReducePiece& piece : call.reduces) {
    const DType in = piece.full.dtype(), out = piece.shard.dtype();
    const auto at = [&](int r, std::int64_t begin) -> const std::byte* {
      return piece.full.raw() +
             static_cast<std::size_t>(r * piece.shard.numel() + piece.begin + begin) * size_of(in);
    };
    reduce_parts(
        call, in, at, [&](int) { return piece.end - piece.begin; },
        [&](std::span<const std::byte* const> from, std::int64_t begin, std::int64_t n) {
          std::byte* to = piece.shard.raw() + static_cast<std::size_t>(piece.begin + begin) * size_of(out);
          worker_->reduce({ReduceOp::sum, call.factor, in, call.rounding, out, piece.accumulate}, from,
                          {&to, 1}, n);
        });
  }
}

void MessageExchange::all_reduce(Call& call) {
  const DType dtype = call.x.dtype();
  const std::int64_t n = call.x.numel();
  const auto begin_of = [&](int r) { return part_begin(n, size(), r); };
  const auto at = [&](int r, std::int64_t begin) {
    return call.x.raw() + static_cast<std::size_t>(begin_of(r) + begin) * size_of(dtype);
  };
  reduce_parts(
      call, dtype, at, [&](int r) { return begin_of(r + 1) - begin_of(r); },
      [&](std::span<const std::byte* const> from, std::int64_t begin, std::int64_t count) {
        std::byte* to = at(rank(), begin);
        worker_->reduce({call.op, call.factor, dtype, dtype, dtype, false}, from, {&to, 1}, count);
      });
  const auto bytes = [&](int r) {
    return static_cast<std::size_t>(begin_of(r + 1) - begin_of(r)) * size_of(dtype);
  };
  for (int k = 1; k < size(); ++k) {
    const int from = (rank() + k) % size(), to = (rank() + size() - k) % size();
    receive_from(from, at(from, 0), bytes(from));
    send_to(to, at(rank(), 0), bytes(rank()));
  }
  finish(call);
}

void MessageExchange::broadcast(Call& call) {
  if (rank() != call.peer)
    receive_from(call.peer, call.x.raw(), call.x.bytes());
  else
    for (int r = 0; r < size(); ++r)
      if (r != rank()) send_to(r, call.x.raw(), call.x.bytes());
  finish(call);
}

void MessageExchange::all_to_all(Call& call) {
  const auto n = static_cast<std::size_t>(size());
  std::vector<std::int64_t> mine = call.in_counts;
  mine.insert(mine.end(), call.out_counts.begin(), call.out_counts.end());
  const std::vector<std::int64_t> all = exchange_words(call, mine);
  std::vector<std::int64_t> in, out;
  for (std::size_t p = 0; p < n; ++p) {
    const auto row = all.begin() + static_cast<std::ptrdiff_t>(2 * n * p);
    in.insert(in.end(), row, row + static_cast<std::ptrdiff_t>(n));
    out.insert(out.end(), row + static_cast<std::ptrdiff_t>(n), row + static_cast<std::ptrdiff_t>(2 * n));
  }
  if (const std::string wrong = count_mismatch(in, out, size()); !wrong.empty())
    fail_and_throw(cat(name_, ": ", describe(call), ": ", wrong));
  const std::size_t width = size_of(call.x.dtype());
  const std::byte* from = call.x.raw();
  std::byte* to = call.out.raw();
  const std::byte* own_from = nullptr;
  std::byte* own_to = nullptr;
  for (int r = 0; r < size(); ++r) {
    const std::size_t sent = static_cast<std::size_t>(call.in_counts[static_cast<std::size_t>(r)]) * width;
    const std::size_t taken = static_cast<std::size_t>(call.out_counts[static_cast<std::size_t>(r)]) * width;
    if (r == rank())
      own_from = from, own_to = to;
    else
      receive_from(r, to, taken), send_to(r, from, sent);
    from += sent, to += taken;
  }
  worker_->copy(own_to, own_from,
                static_cast<std::size_t>(call.in_counts[static_cast<std::size_t>(rank())]) * width);
  finish(call);
}

// ---- transfers: a signature, then the payload, on tags of their own ----

enum Phase : int { fresh, signature_open, payload_open };

void MessageExchange::start(Call& transfer) {
  auto& counter =
      (transfer.kind == Collective::send ? sends_ : receives_)[static_cast<std::size_t>(transfer.peer)];
  transfer.index = counter++;
  transfer.deadline = Deadline::after_seconds(options_.timeout_seconds);
  const int tag = transfer_tag + 2 * static_cast<int>(transfer.index % transfer_tags);
  transfer.envelope = std::make_shared<Signature>(sign(transfer));
  Signature* envelope = transfer.envelope.get();
  if (transfer.kind == Collective::send) {
    transfer.requests.push_back(port_->send(envelope, sizeof *envelope, transfer.peer, tag));
    for (std::size_t done = 0; done < transfer.x.bytes(); done += longest_message)
      transfer.requests.push_back(port_->send(transfer.x.raw() + done,
                                              std::min(longest_message, transfer.x.bytes() - done),
                                              transfer.peer, tag + 1));
    transfer.phase = payload_open;
    return;
  }
  transfer.requests.push_back(port_->receive(envelope, sizeof *envelope, transfer.peer, tag));
  transfer.phase = signature_open;
}

bool MessageExchange::advance(Call& transfer) {
  std::erase_if(transfer.requests, [&](int request) { return port_->test(request); });
  if (!transfer.requests.empty()) return false;
  if (transfer.phase == payload_open) return true;
  const Signature mine = sign(transfer), theirs = *transfer.envelope;
  if (theirs.elements != mine.elements || theirs.dtype != mine.dtype)
    fail_and_throw(cat(name_, ": mismatched transfer: rank ", transfer.peer, " called ", describe(theirs),
                       "; rank ", rank(), " called ", describe(mine)));
  const int tag = transfer_tag + 2 * static_cast<int>(transfer.index % transfer_tags);
  for (std::size_t done = 0; done < transfer.x.bytes(); done += longest_message)
    transfer.requests.push_back(port_->receive(transfer.x.raw() + done,
                                               std::min(longest_message, transfer.x.bytes() - done),
                                               transfer.peer, tag + 1));
  transfer.phase = payload_open;
  return transfer.requests.empty();
}

void MessageExchange::await(const std::function<bool()>& ready, const std::vector<Call*>& active) {
  std::optional<Deadline> grace;
  try {
    for (Backoff backoff(*port_);; backoff.pause()) {
      if (ready()) return;
      if (!backoff.every(64) && !active.front()->deadline->passed()) continue;
      std::vector<int> peers;
      for (const Call* transfer : active) peers.push_back(transfer->peer);
      std::sort(peers.begin(), peers.end());
      peers.erase(std::unique(peers.begin(), peers.end()), peers.end());
      check_peers(peers, *active.front(), *active.front()->deadline, grace);
    }
  } catch (...) {
    for (const Call* transfer : active)
      for (const int request : transfer->requests)
        transfer->kind == Collective::receive ? port_->cancel(request) : port_->release(request);
    throw;
  }
}

}  // namespace

std::unique_ptr<Backend> make_message_exchange(std::shared_ptr<Port> port, std::string name,
                                               const CommOptions& options, std::shared_ptr<Health> parent) {
  return std::make_unique<MessageExchange>(std::move(port), std::move(name), options, std::move(parent));
}

}  // namespace sherd::comm
