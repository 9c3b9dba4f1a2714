#include "comm/tcp/mesh.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/error.h"

namespace sherd::comm {

std::shared_ptr<Mesh> Mesh::connect(const LaunchEnvironment& launch, const Patience& patience) {
  return std::shared_ptr<Mesh>(new Mesh(launch.rank, rendezvous(launch, patience), patience.seconds));
}

Mesh::Mesh(int rank, std::vector<int> sockets, double seconds) : rank_(rank), seconds_(seconds) {
  for (const int socket : sockets) {
    links_.push_back(std::make_unique<Link>());
    links_.back()->socket = socket;
    links_.back()->closed = socket < 0;
  }
  thread_ = std::thread([this] { read_all(); });
}

Mesh::~Mesh() {
  // What was sent last shall arrive: the others are told that nothing more comes, and heard out for a moment.
  for (const auto& link : links_)
    if (link->socket >= 0) shutdown(link->socket, SHUT_WR);
  leaving_ = true;
  thread_.join();
  for (const auto& link : links_)
    if (link->socket >= 0) close(link->socket);
}

bool Mesh::gone(int rank) const {
  return rank != rank_ && links_[static_cast<std::size_t>(rank)]->closed;
}

void Mesh::write(Link& link, const void* data, std::size_t bytes, const Deadline& deadline) {
  const auto* at = static_cast<const std::byte*>(data);
  while (bytes > 0 && !link.closed) {
    const ssize_t done = ::send(link.socket, at, bytes, MSG_NOSIGNAL);
    if (done > 0) {
      at += done, bytes -= static_cast<std::size_t>(done);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      if (deadline.passed())
        fail(ErrorKind::comm, "a rank takes no messages for ", seconds_, " s: see whether it hangs");
      pollfd one{link.socket, POLLOUT, 0};
      poll(&one, 1, 100);
    } else if (errno != EINTR) {
      link.closed = true;
    }
  }
}

void Mesh::send(int to, std::uint64_t group, int tag, const void* data, std::size_t bytes) {
  Link& link = *links_[static_cast<std::size_t>(to)];
  const Deadline deadline = Deadline::after_seconds(seconds_);
  std::lock_guard lock(link.writing);
  const Header header{group, bytes, tag};
  write(link, &header, sizeof header, deadline);
  write(link, data, bytes, deadline);
}

bool Mesh::take(int from, std::uint64_t group, int tag, std::vector<std::byte>& message) {
  std::lock_guard lock(mutex_);
  const auto found = arrived_.find({group, from, tag});
  if (found == arrived_.end()) return false;
  message = std::move(found->second.front());
  found->second.pop_front();
  if (found->second.empty()) arrived_.erase(found);
  return true;
}

// ---- the thread that reads ----

void Mesh::read_all() {
  const Deadline forever = Deadline::after_seconds(1e9);
  Deadline patience = forever;
  bool left = false;
  while (!patience.passed()) {
    if (leaving_ && !std::exchange(left, true)) patience = Deadline::after_seconds(3);
    std::vector<pollfd> open;
    std::vector<int> ranks;
    for (int r = 0; r < size(); ++r) {
      Link& link = *links_[static_cast<std::size_t>(r)];
      if (link.socket < 0 || link.closed) continue;
      open.push_back({link.socket, POLLIN, 0});
      ranks.push_back(r);
    }
    if (open.empty() && leaving_) return;
    poll(open.data(), open.size(), 50);
    for (std::size_t i = 0; i < open.size(); ++i)
      if (open[i].revents) read_from(ranks[i], *links_[static_cast<std::size_t>(ranks[i])]);
  }
}

void Mesh::read_from(int rank, Link& link) {
  for (;;) {
    const bool head = link.have < sizeof(Header);
    const std::size_t in_message = head ? 0 : link.have - sizeof(Header);
    std::byte* to = head ? reinterpret_cast<std::byte*>(&link.header) + link.have : link.message.data() + in_message;
    const std::size_t wanted = head ? sizeof(Header) - link.have : link.message.size() - in_message;
    if (wanted > 0) {
      const ssize_t done = recv(link.socket, to, wanted, 0);
      if (done < 0 && errno == EINTR) continue;
      if (done < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
      if (done <= 0) {
        link.closed = true;
        return;
      }
      link.have += static_cast<std::size_t>(done);
      if (link.have == sizeof(Header)) link.message.resize(link.header.bytes);
      if (link.have < sizeof(Header) + link.message.size() || link.have < sizeof(Header)) continue;
    }
    {
      std::lock_guard lock(mutex_);
      arrived_[{link.header.group, rank, static_cast<int>(link.header.tag)}].push_back(std::move(link.message));
    }
    link.have = 0, link.message.clear();
  }
}

}  // namespace sherd::comm
