#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>

#include "base/error.h"
#include "comm/exchange/call.h"
#include "comm/tcp/mesh.h"

namespace sherd::comm {
namespace {

constexpr std::uint64_t magic = 0x6472656873ULL;  // "sherd"

/// Closes what it still holds.
class Socket {
 public:
  explicit Socket(int fd = -1) : fd_(fd) {}
  ~Socket() {
    if (fd_ >= 0) close(fd_);
  }
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_;
};

/// Where a rank listens, and who says so.
struct Hello {
  std::uint64_t magic = 0;
  std::int32_t rank = 0, world_size = 0;
  sockaddr_in6 listens{};  ///< its address is filled in by who sees it
};

std::string reason() {
  return std::strerror(errno);
}

/// True when the socket is ready in time.
bool await(int fd, short events, const Deadline& deadline) {
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline.at() - Deadline::Clock::now());
    if (left.count() <= 0) return false;
    pollfd one{fd, events, 0};
    if (poll(&one, 1, static_cast<int>(std::min<long long>(left.count(), 1000))) > 0) return true;
  }
}

bool move(int fd, void* data, std::size_t bytes, bool sending, const Deadline& deadline) {
  auto* at = static_cast<char*>(data);
  while (bytes > 0) {
    if (!await(fd, sending ? POLLOUT : POLLIN, deadline)) return false;
    const ssize_t done = sending ? ::send(fd, at, bytes, MSG_NOSIGNAL) : recv(fd, at, bytes, 0);
    if (done == 0 || (done < 0 && errno != EAGAIN && errno != EINTR)) return false;
    if (done > 0) at += done, bytes -= static_cast<std::size_t>(done);
  }
  return true;
}
template <class T>
bool receive(int fd, T& value, const Deadline& deadline) {
  return move(fd, &value, sizeof value, false, deadline);
}
template <class T>
bool send(int fd, T value, const Deadline& deadline) {
  return move(fd, &value, sizeof value, true, deadline);
}

void prepare(int fd) {
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
  fcntl(fd, F_SETFD, FD_CLOEXEC);
}

/// Listens on a port of all addresses, of both protocols; 0: any port.
Socket listen_on(int port, const Patience& patience) {
  Socket socket(::socket(AF_INET6, SOCK_STREAM, 0));
  const int on = 1, off = 0;
  setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  setsockopt(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
  sockaddr_in6 address{};
  address.sin6_family = AF_INET6, address.sin6_port = htons(static_cast<std::uint16_t>(port));
  if (!socket || bind(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0 ||
      listen(socket.get(), SOMAXCONN) != 0)
    fail(ErrorKind::comm, patience.what, ": cannot listen on port ", port, ": ", reason(),
         "; end what uses it, or give another MASTER_PORT");
  prepare(socket.get());
  return socket;
}

sockaddr_in6 name_of_socket(int fd, bool peer) {
  sockaddr_in6 address{};
  socklen_t length = sizeof address;
  (peer ? getpeername : getsockname)(fd, reinterpret_cast<sockaddr*>(&address), &length);
  return address;
}

/// One attempt; an empty socket, with errno, where it fails.
Socket try_connect(const sockaddr* address, socklen_t length, const Deadline& deadline) {
  Socket socket(::socket(address->sa_family, SOCK_STREAM, 0));
  if (!socket) return socket;
  prepare(socket.get());
  if (connect(socket.get(), address, length) == 0) return socket;
  if (errno != EINPROGRESS) return Socket();
  const auto attempt = std::min(deadline.at(), Deadline::Clock::now() + std::chrono::seconds(5));
  if (!await(socket.get(), POLLOUT, Deadline(attempt - Deadline::Clock::now()))) {
    errno = ETIMEDOUT;
    return Socket();
  }
  int error = 0;
  socklen_t size = sizeof error;
  getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &size);
  if (error == 0) return socket;
  errno = error;
  return Socket();
}

/// Tries until the deadline, since rank 0 may start later.
Socket connect_to_master(const LaunchEnvironment& launch, const Patience& patience, const Deadline& deadline) {
  std::string why = "it was not tried";
  do {
    addrinfo hints{}, *found = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    const int status = getaddrinfo(launch.master_address.c_str(), std::to_string(launch.master_port).c_str(), &hints, &found);
    if (status != 0) why = gai_strerror(status);
    const std::unique_ptr<addrinfo, void (*)(addrinfo*)> all(found, [](addrinfo* a) { if (a) freeaddrinfo(a); });
    for (const addrinfo* each = found; each; each = each->ai_next) {
      Socket socket = try_connect(each->ai_addr, each->ai_addrlen, deadline);
      if (socket) return socket;
      why = reason();
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  } while (!deadline.passed());
  fail(ErrorKind::comm, patience.what, ": rank ", launch.rank, " could not reach rank 0 at ", launch.master_address, ":",
       launch.master_port, " within ", patience.seconds, " s: ", why,
       "; see whether rank 0 runs, and MASTER_ADDR and MASTER_PORT are the same for all ranks");
}

/// Takes connections until ranks first…size-1 are there; hellos[r] is what each said.
void accept_ranks(const Socket& listener, int first, const LaunchEnvironment& launch, std::vector<Socket>& links,
                  std::vector<Hello>& hellos, const Patience& patience, const Deadline& deadline) {
  const auto missing = [&] {
    std::vector<int> out;
    for (int r = first; r < launch.world_size; ++r)
      if (!links[static_cast<std::size_t>(r)]) out.push_back(r);
    return out;
  };
  while (!missing().empty()) {
    if (!await(listener.get(), POLLIN, deadline))
      fail(ErrorKind::comm, patience.what, ": ", name_ranks(missing()), " did not come to rank ", launch.rank, " within ",
           patience.seconds, " s; see their own output");
    Socket socket(accept(listener.get(), nullptr, nullptr));
    if (!socket) continue;
    prepare(socket.get());
    Hello hello;
    // Others may knock at an open port: who does not speak like a rank soon is none.
    if (!receive(socket.get(), hello, Deadline::after_seconds(5)) || hello.magic != magic) continue;
    if (hello.world_size != launch.world_size || hello.rank < first || hello.rank >= launch.world_size)
      fail(ErrorKind::comm, patience.what, ": a process came as rank ", hello.rank, " of ", hello.world_size,
           ", where this is rank ", launch.rank, " of ", launch.world_size, ": RANK and WORLD_SIZE differ");
    const auto r = static_cast<std::size_t>(hello.rank);
    if (links[r])
      fail(ErrorKind::comm, patience.what, ": two processes came as rank ", hello.rank,
           "; every process needs a RANK of its own");
    const auto port = hello.listens.sin6_port;
    hello.listens = name_of_socket(socket.get(), true);
    hello.listens.sin6_port = port;
    hellos[r] = hello, links[r] = std::move(socket);
  }
}

}  // namespace

std::vector<int> rendezvous(const LaunchEnvironment& launch, const Patience& patience) {
  const auto n = static_cast<std::size_t>(launch.world_size);
  const Deadline deadline = Deadline::after_seconds(patience.seconds);
  std::vector<Socket> links(n);
  std::vector<Hello> hellos(n);
  const Socket listener = listen_on(launch.rank == 0 ? launch.master_port : 0, patience);
  const auto lost = [&](int r) {
    fail(ErrorKind::comm, patience.what, ": rank ", launch.rank, " lost its connection to rank ", r,
         "; see that rank's own output");
  };
  if (launch.rank == 0) {
    accept_ranks(listener, 1, launch, links, hellos, patience, deadline);
    for (std::size_t r = 1; r < n; ++r)
      if (!move(links[r].get(), hellos.data(), n * sizeof(Hello), true, deadline)) lost(static_cast<int>(r));
  } else {
    const Hello mine{magic, launch.rank, launch.world_size, name_of_socket(listener.get(), false)};
    links[0] = connect_to_master(launch, patience, deadline);
    if (!send(links[0].get(), mine, deadline) ||
        !move(links[0].get(), hellos.data(), n * sizeof(Hello), false, deadline))
      lost(0);
    for (int r = 1; r < launch.rank; ++r) {
      const auto& where = hellos[static_cast<std::size_t>(r)].listens;
      Socket& link = links[static_cast<std::size_t>(r)];
      link = try_connect(reinterpret_cast<const sockaddr*>(&where), sizeof where, deadline);
      if (!link || !send(link.get(), mine, deadline)) lost(r);
    }
    accept_ranks(listener, launch.rank + 1, launch, links, hellos, patience, deadline);
  }
  std::vector<int> out;
  for (Socket& link : links) out.push_back(link.release());
  return out;
}

}  // namespace sherd::comm
