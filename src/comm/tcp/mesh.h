#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "base/deadline.h"
#include "comm/messages/port.h"
#include "comm/tcp/launch_environment.h"

namespace sherd::comm {

/// A TCP connection between every two processes of a launch, and a thread that takes in what arrives. Rank 0 listens on
/// MASTER_PORT; the others tell it where they listen themselves, and are told where all do. The connections carry no
/// secrets and trust whoever speaks first: for the networks on which NCCL's and MPI's do the same.
class Mesh {
 public:
  /// Collective. Throws Error{comm} naming who did not come or could not be reached, and why.
  static std::shared_ptr<Mesh> connect(const LaunchEnvironment& launch, const Patience& patience);
  ~Mesh();
  Mesh(const Mesh&) = delete;
  Mesh& operator=(const Mesh&) = delete;

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(links_.size()); }

  /// Sends a message; returns when the system has taken it, at the latest when the patience of connect() ends. To a
  /// process that has ended it goes nowhere.
  void send(int to, std::uint64_t group, int tag, const void* data, std::size_t bytes);
  /// Takes the oldest message that has arrived from that rank, if there is one.
  bool take(int from, std::uint64_t group, int tag, std::vector<std::byte>& message);
  /// The other process has closed its connection: it has ended, or is about to.
  bool gone(int rank) const;

 private:
  struct Header {
    std::uint64_t group = 0, bytes = 0;
    std::int64_t tag = 0;
  };
  struct Link {
    int socket = -1;
    std::mutex writing;
    std::atomic<bool> closed{false};
    // Of the thread that reads:
    Header header;
    std::size_t have = 0;  ///< bytes of the header, then of the message after it
    std::vector<std::byte> message;
  };
  using Key = std::tuple<std::uint64_t, int, int>;  // group, from, tag

  Mesh(int rank, std::vector<int> sockets, double seconds);
  void read_all();
  void read_from(int rank, Link& link);
  void write(Link& link, const void* data, std::size_t bytes, const Deadline& deadline);

  int rank_;
  double seconds_;
  std::vector<std::unique_ptr<Link>> links_;  ///< by rank; none of this rank's own
  std::mutex mutex_;
  std::map<Key, std::deque<std::vector<std::byte>>> arrived_;  // guarded by mutex_
  std::atomic<bool> leaving_{false};
  std::thread thread_;
};

/// The sockets of a launch, by rank; -1 for this rank's own. Throws as Mesh::connect().
std::vector<int> rendezvous(const LaunchEnvironment& launch, const Patience& patience);

}  // namespace sherd::comm
