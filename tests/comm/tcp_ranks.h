#pragma once

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <exception>
#include <fstream>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "comm/tcp/socket.h"
#include "comm/tcp/tcp_world.h"

namespace sherd::comm {

/// The ports that the system gives to connections, first and last.
inline std::pair<int, int> ephemeral_ports() {
  std::ifstream file("/proc/sys/net/ipv4/ip_local_port_range");
  std::pair<int, int> out{32768, 60999};
  file >> out.first >> out.second;
  return out;
}

/// A port that nobody listens on, that no connection is given meanwhile, and that no other test of this process takes.
inline int free_port() {
  constexpr int first = 10'000, last = 65'000;
  static std::atomic<int> next{static_cast<int>(getpid() % 1000 * 50)};  // processes begin at different places
  const auto [taken_first, taken_last] = ephemeral_ports();
  const bool others = taken_first > first || taken_last < last;  // are there any outside of that range?
  for (int turn = 0; turn < last - first; ++turn) {
    const int port = first + next++ % (last - first);
    if (others && port >= taken_first && port <= taken_last) continue;
    if (listen_on(port)) return port;
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

/// Runs body on every rank's thread; the first error is rethrown.
inline void on_tcp_ranks(int ranks, const CommOptions& options, const std::function<void(Communicator&)>& body) {
  const int port = free_port();
  std::vector<std::thread> threads;
  std::mutex mutex;
  std::exception_ptr first;
  for (int r = 0; r < ranks; ++r)
    threads.emplace_back([&, r] {
      try {
        const auto joined = join_tcp_world(launch_of(r, ranks, port), options);
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
