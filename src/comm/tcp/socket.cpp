#include "comm/tcp/socket.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/error.h"

namespace sherd::comm {
namespace {

/// True when the socket is ready in time; what came while this process was kept from running counts.
bool await(int fd, short events, const Deadline& deadline) {
  for (;;) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline.at() - Deadline::Clock::now());
    pollfd one{fd, events, 0};
    if (poll(&one, 1, static_cast<int>(std::clamp<long long>(left.count(), 0, 1000))) > 0) return true;
    if (left.count() <= 0) return false;
  }
}

void set(int fd, int level, int option, int value) {
  setsockopt(fd, level, option, &value, sizeof value);
}

void prepare(int fd) {
  set(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  // A machine that has lost its power or its network says nothing: its connections end after two minutes, or,
  // with data under way, when the system stops to repeat them. No TCP_USER_TIMEOUT: it would also end
  // connections to processes that only take nothing for long, for which calls have deadlines.
  set(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set(fd, IPPROTO_TCP, TCP_KEEPIDLE, 30);
  set(fd, IPPROTO_TCP, TCP_KEEPINTVL, 10);
  set(fd, IPPROTO_TCP, TCP_KEEPCNT, 9);
}

constexpr int kind = SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC;

sockaddr_storage any_address(int family, int port) {
  sockaddr_storage address{};
  address.ss_family = static_cast<sa_family_t>(family);
  return with_port(address, port);
}

template <class Address>
Address as(const sockaddr_storage& address) {
  Address out;
  std::memcpy(&out, &address, sizeof out);
  return out;
}
template <class Address>
sockaddr_storage stored(const Address& address) {
  sockaddr_storage out{};
  std::memcpy(&out, &address, sizeof address);
  return out;
}

template <class Move>
bool move_all(int fd, short events, std::size_t bytes, const Deadline& deadline, const Move& move) {
  for (std::size_t done = 0; done < bytes;) {
    if (!await(fd, events, deadline)) return false;
    const ssize_t count = move(done);
    if (count == 0 || (count < 0 && errno != EAGAIN && errno != EINTR)) return false;
    if (count > 0) done += static_cast<std::size_t>(count);
  }
  return true;
}

}  // namespace

std::string system_reason() {
  return std::strerror(errno);
}

FileDescriptor listen_on(const sockaddr_storage& address) {
  FileDescriptor socket(::socket(address.ss_family, kind, 0));
  if (!socket) return socket;
  set(socket.get(), SOL_SOCKET, SO_REUSEADDR, 1);
  if (address.ss_family == AF_INET6) set(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, 0);
  if (bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), length_of(address)) != 0 ||
      listen(socket.get(), SOMAXCONN) != 0)
    return FileDescriptor();
  return socket;
}

FileDescriptor listen_on(int port) {
  FileDescriptor socket = listen_on(any_address(AF_INET6, port));
  return socket || errno == EADDRINUSE || errno == EACCES ? std::move(socket)
                                                          : listen_on(any_address(AF_INET, port));
}

int port_of(const FileDescriptor& listener) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &length);
  return ntohs(address.ss_family == AF_INET6 ? as<sockaddr_in6>(address).sin6_port
                                             : as<sockaddr_in>(address).sin_port);
}

namespace {

/// Where nobody listens on a port of this machine, the system may give a connection that very port: it then
/// meets itself.
bool meets_itself(const FileDescriptor& socket) {
  sockaddr_storage own{};
  socklen_t length = sizeof own;
  getsockname(socket.get(), reinterpret_cast<sockaddr*>(&own), &length);
  return text_of(plain(own)) == text_of(peer_of(socket));
}

}  // namespace

FileDescriptor connect_to(const sockaddr* address, socklen_t length, const Deadline& deadline) {
  FileDescriptor socket(::socket(address->sa_family, kind, 0));
  if (!socket) return socket;
  prepare(socket.get());
  const auto met = [&] {
    if (!meets_itself(socket)) return std::move(socket);
    errno = ECONNREFUSED;
    return FileDescriptor();
  };
  if (connect(socket.get(), address, length) == 0) return met();
  if (errno != EINPROGRESS) return FileDescriptor();
  const auto attempt = std::min(deadline.at(), Deadline::Clock::now() + std::chrono::seconds(5));
  if (!await(socket.get(), POLLOUT, Deadline(attempt - Deadline::Clock::now()))) {
    errno = ETIMEDOUT;
    return FileDescriptor();
  }
  int error = 0;
  socklen_t size = sizeof error;
  getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &size);
  if (error == 0) return met();
  errno = error;
  return FileDescriptor();
}

FileDescriptor accept_from(const FileDescriptor& listener) {
  FileDescriptor socket(accept4(listener.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (socket) prepare(socket.get());
  return socket;
}

bool receive_all(const FileDescriptor& socket, void* data, std::size_t bytes, const Deadline& deadline) {
  return move_all(socket.get(), POLLIN, bytes, deadline, [&](std::size_t done) {
    return recv(socket.get(), static_cast<std::byte*>(data) + done, bytes - done, 0);
  });
}

bool send_all(const FileDescriptor& socket, const void* data, std::size_t bytes, const Deadline& deadline) {
  return move_all(socket.get(), POLLOUT, bytes, deadline, [&](std::size_t done) {
    return send(socket.get(), static_cast<const std::byte*>(data) + done, bytes - done, MSG_NOSIGNAL);
  });
}

sockaddr_storage peer_of(const FileDescriptor& socket) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  getpeername(socket.get(), reinterpret_cast<sockaddr*>(&address), &length);
  return plain(address);
}

sockaddr_storage plain(const sockaddr_storage& address) {
  if (address.ss_family != AF_INET6) return address;
  const auto wide = as<sockaddr_in6>(address);
  if (!IN6_IS_ADDR_V4MAPPED(&wide.sin6_addr)) return address;
  sockaddr_in out{};
  out.sin_family = AF_INET, out.sin_port = wide.sin6_port;
  std::memcpy(&out.sin_addr, wide.sin6_addr.s6_addr + 12, 4);
  return stored(out);
}

bool is_loopback(const sockaddr_storage& address) {
  if (address.ss_family == AF_INET) return ntohl(as<sockaddr_in>(address).sin_addr.s_addr) >> 24 == 127;
  const auto wide = as<sockaddr_in6>(address);
  return IN6_IS_ADDR_LOOPBACK(&wide.sin6_addr);
}

sockaddr_storage with_port(sockaddr_storage address, int port) {
  if (address.ss_family == AF_INET6) {
    auto out = as<sockaddr_in6>(address);
    out.sin6_port = htons(static_cast<std::uint16_t>(port));
    return stored(out);
  }
  auto out = as<sockaddr_in>(address);
  out.sin_port = htons(static_cast<std::uint16_t>(port));
  return stored(out);
}

socklen_t length_of(const sockaddr_storage& address) {
  return address.ss_family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
}

std::string text_of(const sockaddr_storage& address) {
  char text[INET6_ADDRSTRLEN] = "?";
  if (address.ss_family == AF_INET6) {
    const auto wide = as<sockaddr_in6>(address);
    inet_ntop(AF_INET6, &wide.sin6_addr, text, sizeof text);
    return cat('[', text, "]:", ntohs(wide.sin6_port));
  }
  const auto narrow = as<sockaddr_in>(address);
  inet_ntop(AF_INET, &narrow.sin_addr, text, sizeof text);
  return cat(text, ':', ntohs(narrow.sin_port));
}

}  // namespace sherd::comm
