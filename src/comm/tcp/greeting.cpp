#include "comm/tcp/greeting.h"

#include <netdb.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/deadline.h"

namespace sherd::comm {

bool answer(const FileDescriptor& socket, GreetingStatus status, const void* data, std::size_t bytes) {
  Answer head;
  head.status = status, head.bytes = static_cast<std::uint32_t>(bytes);
  const Deadline deadline = Deadline::after_seconds(handshake_timeout);
  return send_all(socket, &head, sizeof head, deadline) && send_all(socket, data, bytes, deadline);
}

std::string text_after(const FileDescriptor& socket, const Answer& head) {
  std::string text(std::min<std::size_t>(head.bytes, 4000), ' ');
  return receive_all(socket, text.data(), text.size(), Deadline::after_seconds(handshake_timeout)) ? text
                                                                                                   : "";
}

bool ended(const FileDescriptor& socket) {
  pollfd one{socket.get(), POLLRDHUP, 0};
  return poll(&one, 1, 0) > 0 && (one.revents & (POLLRDHUP | POLLHUP | POLLERR));
}

std::vector<sockaddr_storage> addresses_of(const std::string& host, int port, int flags, std::string& why) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM, hints.ai_flags = flags;
  const int status = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (status != 0) why = gai_strerror(status);
  std::vector<sockaddr_storage> out;
  for (const addrinfo* each = found; each; each = each->ai_next)
    std::memcpy(&out.emplace_back(), each->ai_addr,
                std::min<std::size_t>(each->ai_addrlen, sizeof out.back()));
  if (found) freeaddrinfo(found);
  return out;
}

namespace {

/// Where a master's address means this machine to everybody, so that all ranks are here: its addresses; else
/// none. A machine's name does not say that: it may stand for a loopback address on that machine only.
std::vector<sockaddr_storage> inside_addresses(const std::string& host) {
  std::string why;
  std::vector<sockaddr_storage> out = addresses_of(host, 0, host == "localhost" ? 0 : AI_NUMERICHOST, why);
  std::erase_if(out, [](const sockaddr_storage& address) { return !is_loopback(address); });
  return out;
}

}  // namespace

FileDescriptor listen_for(const std::string& master, int port) {
  const std::vector<sockaddr_storage> addresses = inside_addresses(master);
  if (addresses.empty()) return listen_on(port);
  FileDescriptor out;
  for (const sockaddr_storage& address : addresses)
    if ((out = listen_on(with_port(address, port))) || errno == EADDRINUSE) break;
  return out;
}

}  // namespace sherd::comm
