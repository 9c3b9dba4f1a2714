#pragma once

#include <atomic>
#include <condition_variable>
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
#include "comm/exchange/waiting.h"
#include "comm/tcp/rendezvous.h"

namespace sherd::comm {

/// Messages between the processes of a launch, over a TCP connection between every two, and a thread that
/// takes in what arrives. Messages match receives by group, sender and tag, in the order in which they were
/// sent. Thread-safe.
///
/// Messages that nobody has asked for yet are kept, up to a bound per sender: beyond it nothing is read from
/// that connection until some of them are taken, so that the sender waits. Whoever sends large messages must
/// know that they will be asked for without anything that comes after them on the same connection
/// (messages/messages.h).
class Mesh {
 public:
  /// A send or receive under way.
  struct Header;
  struct OpenTransfer;
  using Ticket = std::shared_ptr<OpenTransfer>;

  static constexpr std::size_t most_kept = std::size_t{256} << 20;

  /// `most`: the bound, in bytes.
  Mesh(int rank, Meeting meeting, std::size_t most = most_kept);
  /// Leaves, and waits until it has left.
  ~Mesh();
  Mesh(const Mesh&) = delete;
  Mesh& operator=(const Mesh&) = delete;

  /// Begins to leave, without waiting: the mesh's thread sends what is under way, tells the others that
  /// nothing more comes, and reads what they send until they end too, all of it for three seconds at most.
  /// Nothing may be sent or received from here on.
  void leave() noexcept;
  bool has_left() const { return left_; }

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(links_.size()); }
  const std::vector<RankIdentity>& identities() const { return identities_; }

  /// Without waiting; the memory must stay until done() or cancel(). To a process that has ended it goes
  /// nowhere.
  Ticket send(int to, std::uint64_t group, int tag, const void* data, std::size_t bytes);
  /// The same with a copy of the memory.
  void send_copy(int to, std::uint64_t group, int tag, const void* data, std::size_t bytes);
  /// Without waiting; the message goes straight to `data`.
  Ticket receive(int from, std::uint64_t group, int tag, void* data, std::size_t bytes);
  /// True once the memory is free for other uses. Throws Error{comm} where a message of another size came.
  bool done(const Ticket& ticket);
  /// Lets the memory go: a receive's is not written any more, and the part of a message that has not left is
  /// sent from a copy. Without memory for that the connection ends.
  void cancel(const Ticket& ticket) noexcept;
  /// Takes the oldest message that has arrived from that rank and that nobody asked for, if there is one.
  bool take(int from, std::uint64_t group, int tag, std::vector<std::byte>& message);

  /// Counts what the mesh's thread has moved; pause() sleeps until that is no longer `seen`, at most for a
  /// moment, and returns it. The first of several turns only give other threads the processor.
  std::uint64_t news() const { return news_; }
  std::uint64_t pause(std::uint64_t seen, int turn);

  /// The other process has closed its connection (it has ended, or is about to), and all that it sent is
  /// here.
  bool gone(int rank) const;

  /// Bytes that messages of that rank take here which nobody has asked for.
  std::size_t kept(int rank) const;

 private:
  using Key = std::tuple<std::uint64_t, int, int>;  // group, from, tag
  struct Link;
  struct Arrived {
    std::unique_ptr<std::byte[]> data;
    std::size_t bytes = 0;
  };

  Link& link(int rank) const { return *links_[static_cast<std::size_t>(rank)]; }
  void submit(int to, std::uint64_t group, int tag, Ticket ticket);
  void flush(Link& link);
  void wake() noexcept;
  void tell();
  void serve();
  void read_from(int rank, Link& link);
  void open_message(int rank, Link& link);
  void close_message(int rank, Link& link);
  void finish(OpenTransfer& receive, const Arrived& message);
  void keep(int rank, const Key& key, Arrived message);
  bool take_kept(const Key& key, Arrived& message);

  int rank_;
  std::size_t most_kept_;
  std::vector<RankIdentity> identities_;
  std::vector<std::unique_ptr<Link>> links_;  ///< by rank; this rank's own is closed
  FileDescriptor bell_;                       ///< wakes the thread
  std::mutex mutex_;
  std::map<Key, std::deque<Ticket>> asked_;     // guarded by mutex_; a key has receives or messages, not both
  std::map<Key, std::deque<Arrived>> arrived_;  // guarded by mutex_
  std::atomic<std::uint64_t> news_{0};          // changed under news_mutex_
  std::mutex news_mutex_;
  Backoff backoff_;
  std::condition_variable told_;
  std::atomic<bool> leaving_{false}, left_{false};
  std::thread thread_;
};

}  // namespace sherd::comm
