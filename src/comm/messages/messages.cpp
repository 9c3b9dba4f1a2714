#include "comm/messages/messages.h"

#include <algorithm>

#include "base/random.h"

namespace sherd::comm {
namespace {

// MPI promises tags up to 32767; those from 16 on are of transfers (message_transfers.cpp).
constexpr int call_tag = 1, announce_tag = 3;
constexpr int calls_apart = 8192, eager_tag = 8192, payload_tag = eager_tag + calls_apart,
              go_tag = payload_tag + calls_apart;
static_assert(go_tag + calls_apart <= 32768);

int tag_of(const CallSignature& call) {
  const std::string_view bytes(reinterpret_cast<const char*>(&call), sizeof call);
  return static_cast<int>(stable_hash(bytes) % calls_apart);
}

}  // namespace

int Port::reduce_scatter(const void*, void*, std::size_t, DType) {
  fail(ErrorKind::usage, kind(), " adds nothing up itself");
}

int Port::all_reduce(const void*, void*, std::size_t, DType) {
  fail(ErrorKind::usage, kind(), " adds nothing up itself");
}

Messages::Messages(std::shared_ptr<Port> port, std::string name, std::shared_ptr<const Topology> topology,
                   double timeout_seconds, std::shared_ptr<Health> parent)
    : port_(std::move(port)),
      name_(std::move(name)),
      topology_(std::move(topology)),
      timeout_seconds_(timeout_seconds),
      health_(std::make_shared<MessageHealth>(port_, name_, std::move(parent))),
      calls_(port_, topology_->previous_leader(), topology_->next_leader(), call_tag),
      announced_(port_, (port_->rank() + port_->size() - 1) % port_->size(),
                 (port_->rank() + 1) % port_->size(), announce_tag),
      blocked_(static_cast<std::size_t>(port_->size())) {}

void Messages::fail_and_throw(const std::string& reason) {
  board_->fail_and_throw(cat(name_, ": ", reason));
}

// ---- messages under way ----

void Messages::open(const Call& call) {
  const CallSignature mine = sign(call);
  tag_ = tag_of(mine);
  if (topology_->is_leader()) call_number_ = calls_.add(mine);
  eager_to_.assign(static_cast<std::size_t>(port_->size()), eager_bytes);
  eager_from_ = eager_to_;
}

bool Messages::take_eager(std::size_t& left, std::size_t bytes) {
  if (bytes > left) return false;
  left -= bytes;
  return true;
}

Messages::OpenMessage& Messages::add(int peer, bool receiving, std::size_t bytes) {
  OpenMessage& message = open_.emplace_back();
  message.ticket = ++tickets_, message.peer = peer, message.receiving = receiving, message.bytes = bytes;
  return message;
}

Messages::Ticket Messages::send(int peer, const std::byte* data, std::size_t bytes) {
  if (bytes == 0) return 0;
  sent_bytes_ += bytes;
  OpenMessage& message = add(peer, false, bytes);
  message.data = data;
  message.waits_for_go = !take_eager(eager_to_[static_cast<std::size_t>(peer)], bytes);
  message.requests.push_back(message.waits_for_go
                                 ? port_->receive(&message.go, sizeof message.go, peer, go_tag + tag_)
                                 : port_->send(data, bytes, peer, eager_tag + tag_));
  return message.ticket;
}

void Messages::send_payload(OpenMessage& message) {
  message.waits_for_go = false;
  for (std::size_t done = 0; done < message.bytes; done += longest_message)
    message.requests.push_back(port_->send(message.data + done,
                                           std::min(longest_message, message.bytes - done), message.peer,
                                           payload_tag + tag_));
}

Messages::Ticket Messages::receive(int peer, std::byte* data, std::size_t bytes) {
  if (bytes == 0) return 0;
  OpenMessage& message = add(peer, true, bytes);
  if (take_eager(eager_from_[static_cast<std::size_t>(peer)], bytes)) {
    message.requests.push_back(port_->receive(data, bytes, peer, eager_tag + tag_));
    return message.ticket;
  }
  for (std::size_t done = 0; done < bytes; done += longest_message)
    message.requests.push_back(
        port_->receive(data + done, std::min(longest_message, bytes - done), peer, payload_tag + tag_));
  message.requests.push_back(port_->send(&go_word, sizeof go_word, peer, go_tag + tag_));
  return message.ticket;
}

bool Messages::progress() {
  std::fill(blocked_.begin(), blocked_.end(), false);
  for (auto it = open_.begin(); it != open_.end();) {
    OpenMessage& message = *it;
    const auto peer = static_cast<std::size_t>(std::max(message.peer, 0));
    if (!message.waits_for_go || !blocked_[peer])
      std::erase_if(message.requests, [&](int request) { return port_->test(request); });
    // Payloads leave in the order in which they were asked for.
    if (message.waits_for_go && message.requests.empty() && !blocked_[peer]) send_payload(message);
    blocked_[peer] = blocked_[peer] || message.waits_for_go;
    it = message.requests.empty() ? open_.erase(it) : std::next(it);
  }
  return !open_.empty();
}

Messages::~Messages() {
  health_->depart(board_ && board_->failed() ? board_->failure() : health_->failure());
}

void Messages::cancel() noexcept {
  std::list<OpenMessage> touched;
  for (auto next = open_.begin(); next != open_.end();) {
    const auto message = next++;
    bool over = true;
    for (const int request : message->requests)
      over =
          (message->receiving || message->waits_for_go ? port_->cancel(request) : port_->release(request)) &&
          over;
    if (!over) touched.splice(touched.end(), open_, message);
  }
  open_.clear();
  if (touched.empty()) return;
  lingers_ = true;
  keep_for_good(std::move(touched));  // a receiver's go arrives in the message itself
}

Messages::Landing::~Landing() {
  if (!messages_ || !memory_ || std::uncaught_exceptions() <= exceptions_) return;
  messages_->cancel();
  if (messages_->lingers()) keep_for_good(std::move(memory_));
}

// ---- waiting ----

template <class Done>
void Messages::wait_until(const Call& call, const Done& done) {
  const Board::WaitElsewhere elsewhere(*board_);
  const WaitScope waits(WaitFor::ranks);
  const Deadline deadline = Deadline::after_seconds(timeout_seconds_);
  std::optional<Deadline> grace;
  std::size_t before = open_.size();
  for (Pauses pauses(*port_);; pauses.pause()) {
    progress();
    if (done()) return;
    if (open_.size() != before) pauses.reset();
    before = open_.size();
    if (!pauses.every(64) && !deadline.passed()) continue;
    check_calls();
    const bool late = deadline.passed();
    std::vector<int> peers = calls_.absent(call_number_);
    for (const OpenMessage& message : open_)
      for (int r = 0; r < topology_->size(); ++r)
        if (r == message.peer || (message.peer < 0 && r != topology_->rank())) peers.push_back(r);
    std::sort(peers.begin(), peers.end());
    peers.erase(std::unique(peers.begin(), peers.end()), peers.end());
    check_peers(peers, call, late, grace);
  }
}

void Messages::wait(const Call& call, const std::vector<Ticket>& tickets) {
  const auto open = [&](Ticket ticket) {
    return std::any_of(open_.begin(), open_.end(), [&](const OpenMessage& m) { return m.ticket == ticket; });
  };
  wait_until(call, [&] { return std::none_of(tickets.begin(), tickets.end(), open); });
}

void Messages::wait(const Call& call, Ticket ticket) {
  wait(call, std::vector<Ticket>{ticket});
}

void Messages::complete(const Call& call, int request) {
  OpenMessage& message = add(-1, false, 0);
  message.requests.push_back(request);
  wait(call, message.ticket);
}

void Messages::finish(const Call& call) {
  wait_until(call, [&] {
    if (!open_.empty()) return false;
    check_calls();
    return calls_.absent(call_number_).empty();
  });
}

void Messages::check_calls() {
  for (SignatureRing* ring : {&calls_, &announced_})
    if (const std::string wrong = ring->check(); !wrong.empty()) fail_and_throw(wrong);
}

void Messages::check_peers(const std::vector<int>& peers, const Call& call, bool late,
                           std::optional<Deadline>& grace) {
  if (board_->failed()) board_->throw_failure();
  if (call.record && !is_transfer(call)) {
    std::vector<int> awaited;
    for (const int peer : peers) awaited.push_back(world_rank(peer));
    call.record.wait_for(awaited);
  }
  std::string why;
  for (const int peer : peers) {
    if (!health_->lost(peer, why)) continue;
    if (!grace) grace = Deadline::after_seconds(0.5);
    if (!grace->passed()) return;
    fail_and_throw(cat("rank ", world_rank(peer), " ", why, " while rank ", world_rank(topology_->rank()),
                       " waited for it in ", describe(call), "; see that rank's own output"));
  }
  if (!late) return;
  std::vector<int> absent;
  for (const int peer : peers) absent.push_back(world_rank(peer));
  fail_and_throw(cat(describe(call), ": ", name_ranks(absent), " did not come within ", timeout_seconds_,
                     " s, while rank ", world_rank(topology_->rank()),
                     " waited; raise parallel.timeout_seconds if the work in between takes that long"));
}

void Messages::look_after_peers() noexcept {
  if (board_->failed()) return;
  try {
    if (const std::string wrong = announced_.check(); !wrong.empty())
      return board_->fail(cat(name_, ": ", wrong));
  } catch (const std::exception& error) {
    return board_->fail(cat(name_, ": rank ", world_rank(topology_->rank()), " failed: ", error.what()));
  }
  for (int r = 0; r < topology_->size(); ++r)
    if (r != topology_->rank() && health_->dead(r))
      return board_->fail(
          cat(name_, ": rank ", world_rank(r),
              " is dead: its process or the connection to it ended; see that rank's own output"));
}

std::uint64_t Messages::announce(const CallSignature& call) {
  const std::uint64_t number = announced_.add(call);
  if (const std::string wrong = announced_.check(); !wrong.empty()) fail_and_throw(wrong);
  return number;
}

}  // namespace sherd::comm
