#pragma once

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdio>
#include <exception>
#include <fstream>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "comm/tcp/socket.h"
#include "comm/tcp/socket_port.h"

namespace sherd::comm {

/// The ports that the system gives to connections, first and last.
inline std::pair<int, int> ephemeral_ports() {
  std::ifstream file("/proc/sys/net/ipv4/ip_local_port_range");
  std::pair<int, int> out{32768, 60999};
  file >> out.first >> out.second;
  return out;
}

/// Keeps other test processes off a port until this one ends: a name among sockets belongs to one process.
inline bool reserve(int port) {
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  // The first byte stays 0: a name outside of the file system.
  const int length = std::snprintf(name.sun_path + 1, sizeof name.sun_path - 1, "sherd-test-port-%d", port);
  const int socket = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const auto size =
      static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + static_cast<std::size_t>(length));
  if (::bind(socket, reinterpret_cast<const sockaddr*>(&name), size) == 0) return true;  // stays open
  ::close(socket);
  return false;
}

/// A port that nobody listens on, that no connection is given meanwhile, and that no other test takes
/// (tests/support/launch.sh has the ports from 20000 on).
inline int free_port() {
  constexpr int first = 10'000, count = 10'000;
  static std::atomic<int> next{
      static_cast<int>(getpid() % count * 61 % count)};  // processes begin at different places
  const auto [taken_first, taken_last] = ephemeral_ports();
  const bool others =
      taken_first > first || taken_last < first + count - 1;  // are there any outside of that range?
  for (int turn = 0; turn < count; ++turn) {
    const int port = first + next++ % count;
    if (others && port >= taken_first && port <= taken_last) continue;
    if (reserve(port) && listen_on(port)) return port;
  }
  ADD_FAILURE() << "no free port";
  return 0;
}

inline LaunchEnvironment launch_of(int rank, int size, int port) {
  LaunchEnvironment out;
  out.rank = out.local_rank = rank, out.world_size = out.local_world_size = size;
  out.master_address = "127.0.0.1", out.master_port = port;
  return out;
}

inline FileDescriptor knock(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET, address.sin_port = htons(static_cast<std::uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  FileDescriptor out;
  const Deadline deadline = Deadline::after_seconds(20);
  while (!(out = connect_to(reinterpret_cast<sockaddr*>(&address), sizeof address, deadline)) &&
         !deadline.passed())
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_TRUE(out);
  return out;
}

/// Runs body on every rank's thread; the first error is rethrown. `machines`: the number of the machine that
/// each rank takes itself to be on; empty where all are on this one.
inline void on_tcp_ranks(int ranks, const CommOptions& options,
                         const std::function<void(Communicator&)>& body,
                         const std::vector<int>& machines = {}) {
  const int port = free_port();
  std::vector<std::thread> threads;
  std::mutex mutex;
  std::exception_ptr first;
  for (int r = 0; r < ranks; ++r)
    threads.emplace_back([&, r] {
      try {
        CommOptions mine = options;
        if (!machines.empty()) mine.machine = cat("machine ", machines[static_cast<std::size_t>(r)]);
        const auto joined = join_tcp_world(launch_of(r, ranks, port), mine);
        body(*joined.world);
      } catch (...) {
        std::lock_guard lock(mutex);
        if (!first) first = std::current_exception();
      }
    });
  for (std::thread& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

}  // namespace sherd::comm
