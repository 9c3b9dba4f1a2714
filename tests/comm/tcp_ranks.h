#pragma once

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "comm/tcp/tcp_world.h"

namespace sherd::comm {

/// A port that was free a moment ago.
inline int free_port() {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  socklen_t length = sizeof address;
  EXPECT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length);
  close(fd);
  return ntohs(address.sin_port);
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
