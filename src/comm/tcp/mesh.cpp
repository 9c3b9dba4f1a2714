#include "comm/tcp/mesh.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <new>

#include "base/error.h"
#include "base/threads.h"

namespace sherd::comm {
namespace {

constexpr std::size_t scratch_bytes = 64 << 10;
/// A message that is kept takes this much more than its bytes, about.
constexpr std::size_t cost_of_keeping = 128;

}  // namespace

/// The header of every message.
struct Mesh::Header {
  std::uint64_t group = 0, bytes = 0;
  std::int64_t tag = 0;
};

struct Mesh::OpenTransfer {
  int peer = 0;
  bool sending = false;
  Key key;
  std::byte* data = nullptr;
  std::size_t bytes = 0;
  std::size_t came = 0;         ///< a receive: the size of the message that came for it; written before done
  std::vector<std::byte> copy;  ///< a message that owns its memory
  std::atomic<bool> done{false};
};

/// A connection. Where two locks are taken: `reading` before Mesh::mutex_.
struct Mesh::Link {
  struct Outgoing {
    Header header;
    Ticket message;
    std::size_t sent = 0;  ///< bytes of header and message
  };

  FileDescriptor socket;
  std::atomic<bool> closed{true};    ///< nothing more arrives
  std::atomic<bool> pending{false};  ///< `out` is not empty
  std::atomic<std::size_t> kept{0};  ///< bytes in arrived_ from there, with what keeping them takes
  bool shut = false;                 ///< nothing more is sent; the mesh's thread only
  std::mutex writing;
  std::deque<Outgoing> out;  // guarded by writing
  /// The other side takes nothing more, though what it sent may still arrive; guarded by writing.
  bool mute = false;

  std::mutex reading;
  // Guarded by reading: the message that is arriving.
  Header header;
  std::size_t have = 0;  ///< bytes of the header, then of the message after it
  Ticket into;           ///< the receive that it goes to
  Arrived message;       ///< else, unless it is thrown away, where it is kept
  std::array<std::byte, scratch_bytes> scratch;
};

Mesh::Mesh(int rank, Meeting meeting, std::size_t most)
    : rank_(rank),
      most_kept_(most),
      identities_(std::move(meeting.identities)),
      bell_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  require(static_cast<bool>(bell_), "the system gives out no more file descriptors: ", system_reason());
  for (FileDescriptor& socket : meeting.links) {
    links_.push_back(std::make_unique<Link>());
    links_.back()->closed = !socket;
    links_.back()->socket = std::move(socket);
  }
  thread_ = std::thread(own_thread([this] {
    serve();
    left_ = true;
  }));
}

Mesh::~Mesh() {
  leave();
  thread_.join();
}

void Mesh::leave() noexcept {
  leaving_ = true;
  wake();
}

bool Mesh::gone(int rank) const {
  return rank != rank_ && link(rank).closed;
}

void Mesh::wake() noexcept {
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(bell_.get(), &one, sizeof one);
}

void Mesh::tell() {
  {
    std::lock_guard lock(news_mutex_);
    ++news_;
  }
  told_.notify_all();
}

std::uint64_t Mesh::pause(std::uint64_t seen, int turn) {
  if (turn < 20 && backoff_.yield()) return news_;
  std::unique_lock lock(news_mutex_);
  told_.wait_for(lock, std::chrono::milliseconds(1), [&] { return news_ != seen; });
  return news_;
}

// ---- sending ----

Mesh::Ticket Mesh::send(int to, std::uint64_t group, int tag, const void* data, std::size_t bytes) {
  auto ticket = std::make_shared<OpenTransfer>();
  ticket->data = const_cast<std::byte*>(static_cast<const std::byte*>(data)), ticket->bytes = bytes;
  submit(to, group, tag, ticket);
  return ticket;
}

void Mesh::send_copy(int to, std::uint64_t group, int tag, const void* data, std::size_t bytes) {
  auto ticket = std::make_shared<OpenTransfer>();
  const auto* begin = static_cast<const std::byte*>(data);
  ticket->copy.assign(begin, begin + bytes);
  ticket->data = ticket->copy.data(), ticket->bytes = bytes;
  submit(to, group, tag, std::move(ticket));
}

void Mesh::submit(int to, std::uint64_t group, int tag, Ticket ticket) {
  Link& peer = link(to);
  ticket->peer = to, ticket->sending = true;
  bool rest = false;
  {
    std::lock_guard lock(peer.writing);
    peer.out.push_back({{group, ticket->bytes, tag}, std::move(ticket), 0});
    flush(peer);
    rest = !peer.out.empty();
  }
  if (rest) wake();
}

/// Sends what the system takes without waiting. The caller holds `writing`.
void Mesh::flush(Link& peer) {
  peer.mute = peer.mute || peer.closed;
  while (!peer.out.empty() && !peer.mute) {
    Link::Outgoing& front = peer.out.front();
    OpenTransfer& message = *front.message;
    std::size_t sent = front.sent;
    std::array<iovec, 2> parts;
    int count = 0;
    if (sent < sizeof(Header)) {
      parts[0] = {reinterpret_cast<std::byte*>(&front.header) + sent, sizeof(Header) - sent};
      count = 1, sent = 0;
    } else {
      sent -= sizeof(Header);
    }
    if (message.bytes > sent)
      parts[static_cast<std::size_t>(count++)] = {message.data + sent, message.bytes - sent};
    msghdr all{};
    all.msg_iov = parts.data(), all.msg_iovlen = static_cast<std::size_t>(count);
    const ssize_t done = sendmsg(peer.socket.get(), &all, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (done < 0 && errno == EINTR) continue;
    if (done < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
    if (done < 0) {
      peer.mute = true;
      break;
    }
    front.sent += static_cast<std::size_t>(done);
    if (front.sent < sizeof(Header) + message.bytes) continue;
    message.done = true;
    peer.out.pop_front();
  }
  if (peer.mute) {
    for (Link::Outgoing& lost : peer.out) lost.message->done = true;
    peer.out.clear();
  }
  peer.pending = !peer.out.empty();
}

// ---- receiving ----

Mesh::Ticket Mesh::receive(int from, std::uint64_t group, int tag, void* data, std::size_t bytes) {
  auto ticket = std::make_shared<OpenTransfer>();
  ticket->peer = from, ticket->key = {group, from, tag};
  ticket->data = static_cast<std::byte*>(data), ticket->bytes = bytes;
  Arrived message;
  {
    std::lock_guard lock(mutex_);
    if (!take_kept(ticket->key, message)) {
      asked_[ticket->key].push_back(ticket);
      return ticket;
    }
  }
  finish(*ticket, message);
  return ticket;
}

/// The caller holds mutex_.
void Mesh::keep(int rank, const Key& key, Arrived message) {
  link(rank).kept += message.bytes + cost_of_keeping;
  arrived_[key].push_back(std::move(message));
}

/// The oldest of them, if there is one. The caller holds mutex_.
bool Mesh::take_kept(const Key& key, Arrived& message) {
  const auto found = arrived_.find(key);
  if (found == arrived_.end()) return false;
  message = std::move(found->second.front());
  found->second.pop_front();
  if (found->second.empty()) arrived_.erase(found);
  const std::size_t bytes = message.bytes + cost_of_keeping;
  const std::size_t before = link(std::get<1>(key)).kept.fetch_sub(bytes);
  if (before >= most_kept_ && before - bytes < most_kept_) wake();  // it reads on
  return true;
}

std::size_t Mesh::kept(int rank) const {
  return link(rank).kept;
}

void Mesh::finish(OpenTransfer& receive, const Arrived& message) {
  receive.came = message.bytes;
  if (message.bytes == receive.bytes && message.bytes > 0)
    std::memcpy(receive.data, message.data.get(), message.bytes);
  receive.done = true;
}

bool Mesh::take(int from, std::uint64_t group, int tag, std::vector<std::byte>& message) {
  Arrived oldest;
  {
    std::lock_guard lock(mutex_);
    if (!take_kept({group, from, tag}, oldest)) return false;
  }
  message.assign(oldest.data.get(), oldest.data.get() + oldest.bytes);
  return true;
}

bool Mesh::done(const Ticket& ticket) {
  if (!ticket->done && ticket->sending) {
    // Whoever waits may as well do the work.
    Link& peer = link(ticket->peer);
    if (std::unique_lock lock(peer.writing, std::try_to_lock); lock) flush(peer);
  }
  if (!ticket->done) return false;
  if (!ticket->sending && ticket->came != ticket->bytes)
    fail(ErrorKind::comm, "a message of ", ticket->came, " bytes came where ", ticket->bytes,
         " were expected");
  return true;
}

void Mesh::cancel(const Ticket& ticket) noexcept {
  Link& peer = link(ticket->peer);
  if (ticket->sending) {
    std::lock_guard lock(peer.writing);
    if (ticket->done || !ticket->copy.empty()) return;
    try {
      ticket->copy.assign(ticket->data, ticket->data + ticket->bytes);
      ticket->data = ticket->copy.data();
    } catch (const std::bad_alloc&) {
      // A part of it may have left, so nothing can follow it; the other side hears of it as of an end.
      peer.mute = true;
      shutdown(peer.socket.get(), SHUT_WR);
      flush(peer);
    }
    return;
  }
  {
    std::lock_guard lock(mutex_);
    if (const auto found = asked_.find(ticket->key); found != asked_.end()) {
      std::erase(found->second, ticket);
      if (found->second.empty()) asked_.erase(found);
    }
  }
  std::lock_guard lock(peer.reading);
  if (peer.into == ticket) peer.into = nullptr, peer.message = {};
}

// ---- the mesh's thread ----

void Mesh::serve() {
  bool told = false;
  Deadline patience = Deadline::after_seconds(1e9);
  std::vector<pollfd> open;
  std::vector<int> ranks;
  while (!patience.passed()) {
    if (leaving_ && !std::exchange(told, true)) patience = Deadline::after_seconds(3);
    open.assign(1, {bell_.get(), POLLIN, 0});
    ranks.assign(1, rank_);
    for (int r = 0; r < size(); ++r) {
      Link& peer = link(r);
      // Who has left waits to hear that nothing more comes, also from those that stay.
      if ((peer.closed || (told && !peer.pending)) && !std::exchange(peer.shut, true))
        shutdown(peer.socket.get(), SHUT_WR);
      if (peer.closed) continue;
      // Who leaves keeps nothing any more, and hears the others out.
      const bool full = !told && peer.kept >= most_kept_;
      open.push_back(
          {peer.socket.get(), static_cast<short>((full ? 0 : POLLIN) | (peer.pending ? POLLOUT : 0)), 0});
      ranks.push_back(r);
    }
    if (told && open.size() == 1) return;
    poll(open.data(), open.size(), told ? 20 : 1000);
    std::uint64_t rung = 0;
    if (open[0].revents) [[maybe_unused]]
      const ssize_t count = read(bell_.get(), &rung, sizeof rung);
    bool moved = false;
    for (std::size_t i = 1; i < open.size(); ++i) {
      Link& peer = link(ranks[i]);
      moved = moved || open[i].revents;
      if (open[i].revents & ~POLLOUT) read_from(ranks[i], peer);
      if (!(open[i].revents & POLLOUT) && !peer.closed) continue;
      std::lock_guard lock(peer.writing);
      flush(peer);
    }
    if (moved) tell();
  }
}

void Mesh::read_from(int rank, Link& peer) try {
  std::lock_guard reading(peer.reading);
  for (std::size_t budget = std::size_t{16} << 20; budget > 0;) {
    const bool head = peer.have < sizeof(Header);
    const std::size_t at = head ? peer.have : peer.have - sizeof(Header);
    std::byte* to = head                ? reinterpret_cast<std::byte*>(&peer.header) + at
                    : peer.into         ? peer.into->data + at
                    : peer.message.data ? peer.message.data.get() + at
                                        : peer.scratch.data();
    std::size_t wanted = (head ? sizeof(Header) : peer.header.bytes) - at;
    if (to == peer.scratch.data()) wanted = std::min(wanted, peer.scratch.size());
    const ssize_t done = recv(peer.socket.get(), to, wanted, MSG_DONTWAIT);
    if (done < 0 && errno == EINTR) continue;
    if (done < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (done <= 0) {
      peer.closed = true;
      return;
    }
    peer.have += static_cast<std::size_t>(done);
    budget -= std::min(budget, static_cast<std::size_t>(done));
    if (head && peer.have == sizeof(Header)) open_message(rank, peer);
    if (peer.have >= sizeof(Header) && peer.have == sizeof(Header) + peer.header.bytes)
      close_message(rank, peer);
  }
} catch (const std::exception&) {  // no memory for what comes: what this connection carries is lost
  peer.closed = true;
}

/// Finds out where the message goes. The caller holds `reading`.
void Mesh::open_message(int rank, Link& peer) {
  const std::size_t bytes = peer.header.bytes;
  peer.message = {};
  {
    std::lock_guard lock(mutex_);
    const auto found = asked_.find({peer.header.group, rank, static_cast<int>(peer.header.tag)});
    if (found != asked_.end() && found->second.front()->bytes == bytes) {
      peer.into = std::move(found->second.front());
      found->second.pop_front();
      if (found->second.empty()) asked_.erase(found);
      return;
    }
  }
  if (leaving_) return;  // thrown away
  peer.message = {std::make_unique_for_overwrite<std::byte[]>(std::max<std::size_t>(bytes, 1)), bytes};
}

/// The caller holds `reading`.
void Mesh::close_message(int rank, Link& peer) {
  peer.have = 0;
  if (peer.into) {
    peer.into->came = peer.header.bytes;
    peer.into->done = true;
    peer.into = nullptr;
    return;
  }
  if (!peer.message.data) return;  // aborted
  const Key key{peer.header.group, rank, static_cast<int>(peer.header.tag)};
  Ticket asked;
  {
    std::lock_guard lock(mutex_);
    const auto found = asked_.find(key);
    if (found == asked_.end()) {
      keep(rank, key, std::move(peer.message));
    } else {
      asked = std::move(found->second.front());
      found->second.pop_front();
      if (found->second.empty()) asked_.erase(found);
    }
  }
  if (asked) finish(*asked, peer.message);
  peer.message = {};
}

}  // namespace sherd::comm
