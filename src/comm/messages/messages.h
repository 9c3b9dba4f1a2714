#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/exchange/board.h"
#include "comm/exchange/topology.h"
#include "comm/messages/message_health.h"
#include "comm/messages/port.h"
#include "comm/messages/signature_ring.h"

namespace sherd::comm {

/// With this byte a receiver tells a sender that there is room for its message.
inline constexpr std::byte go_word{1};

/// Waits between looks at messages.
class Pauses {
 public:
  explicit Pauses(Port& port) : port_(port), seen_(port.news()) {}
  void pause() { seen_ = port_.pause(seen_, turns_++); }
  bool every(int n) const { return turns_ % n == n - 1; }
  void reset() { turns_ = 0; }

 private:
  Port& port_;
  std::uint64_t seen_;
  int turns_ = 0;
};

/// The transport between ranks of different machines: messages, matched by pair and order within a call,
/// polled until the deadline. Knows nothing of collectives.
///
/// - The machines' leaders tell each other round a ring what they call, one message each; other ranks of a
///   machine have compared their calls with its leader's by then. Messages carry tags made from their call,
///   so that those of different calls do not meet.
/// - A payload leaves when the receiver has asked for it, so it never lies at a peer that does not want it;
///   but for the first `eager_bytes` of a call from one rank to another, which leave at once. How many of
///   these wait at a rank is bounded (comm/memory.h), as no machine is further ahead than the ring allows.
class Messages {
 public:
  static constexpr std::size_t longest_message = std::size_t{1} << 28, eager_bytes = std::size_t{4} << 10;
  using Ticket = std::uint64_t;  ///< a message under way; 0: nothing was to be moved

  Messages(std::shared_ptr<Port> port, std::string name, std::shared_ptr<const Topology> topology,
           double timeout_seconds, std::shared_ptr<Health> parent);
  ~Messages();
  Messages(const Messages&) = delete;
  Messages& operator=(const Messages&) = delete;

  /// Sets the board whose failure ends this rank's waits. Called before the first call.
  void use_board(std::shared_ptr<Board> board) { board_ = std::move(board); }
  const std::shared_ptr<MessageHealth>& health() const { return health_; }
  Port& port() { return *port_; }

  /// Begins a call: tells the next machine of it. Whether the previous one makes the same is known at
  /// finish().
  void open(const Call& call);
  /// Without waiting; the memory must stay until the message is done.
  Ticket send(int peer, const std::byte* data, std::size_t bytes);
  Ticket receive(int peer, std::byte* data, std::size_t bytes);
  void wait(const Call& call, Ticket ticket);
  /// Waits for these messages; tickets of 0 are passed over.
  void wait(const Call& call, const std::vector<Ticket>& tickets);
  /// Waits for a request of the port's that all ranks complete.
  void complete(const Call& call, int request);
  /// Waits for all that is under way, and until the previous machine is known to have made the same call.
  void finish(const Call& call);
  /// After an error: cancels all messages under way.
  void cancel() noexcept;
  /// After cancel(): the port may still touch memory of cancelled messages, which must never be freed.
  bool lingers() const { return lingers_; }
  /// Memory that messages use and that does not outlast the call. Where an exception passes by, messages are
  /// cancelled before it goes, and it stays for good where the port may still touch it.
  class Landing {
   public:
    /// `messages`: null where there are none.
    Landing(Messages* messages, std::size_t bytes)
        : messages_(messages),
          memory_(std::make_unique_for_overwrite<std::byte[]>(std::max<std::size_t>(1, bytes))),
          exceptions_(std::uncaught_exceptions()) {}
    Landing(Landing&&) = default;
    Landing& operator=(Landing&&) = delete;
    ~Landing();
    std::byte* data() const { return memory_.get(); }

   private:
    Messages* messages_;
    std::unique_ptr<std::byte[]> memory_;
    int exceptions_;
  };
  /// Moves on the messages under way; false when there are none.
  bool progress();

  /// Used by waits of transfers too: throws when the group has failed, one of `peers` was lost, or they are
  /// `late`. A lost peer's last messages may still be on their way when the news of its end is here:
  /// `grace` runs first.
  void check_peers(const std::vector<int>& peers, const Call& call, bool late,
                   std::optional<Deadline>& grace);
  /// As Backend's.
  void look_after_peers() noexcept;
  std::uint64_t announce(const CallSignature& call);
  std::vector<int> not_announced(std::uint64_t number) { return announced_.absent(number); }
  /// The number in the world of a rank of the group.
  int world_rank(int rank) const { return port_->world_ranks()[static_cast<std::size_t>(rank)]; }

  /// Payload that this rank has sent by messages, in bytes. From any thread. Transfers count theirs here too.
  std::uint64_t sent_bytes() const { return sent_bytes_; }
  void count_sent(std::size_t bytes) { sent_bytes_ += bytes; }

 private:
  struct OpenMessage {
    Ticket ticket = 0;
    int peer = -1;  ///< -1: all
    bool receiving = false;
    bool waits_for_go = false;        ///< a send whose receiver has not asked for it yet
    const std::byte* data = nullptr;  ///< a send's bytes
    std::size_t bytes = 0;
    std::byte go{};
    std::vector<int> requests;
  };

  OpenMessage& add(int peer, bool receiving, std::size_t bytes);
  /// Both ends of a message count alike.
  static bool take_eager(std::size_t& left, std::size_t bytes);
  void send_payload(OpenMessage& message);
  void check_calls();
  [[noreturn]] void fail_and_throw(const std::string& reason);
  template <class Done>
  void wait_until(const Call& call, const Done& done);

  std::shared_ptr<Port> port_;
  std::string name_;
  std::shared_ptr<const Topology> topology_;
  double timeout_seconds_;
  std::shared_ptr<Board> board_;
  std::shared_ptr<MessageHealth> health_;
  SignatureRing calls_, announced_;
  std::uint64_t call_number_ = 0;  ///< the current call's in calls_; 0 for ranks that are no leaders
  int tag_ = 0;                    ///< the current call's
  /// Bytes of the call that may still leave unasked, by peer.
  std::vector<std::size_t> eager_to_, eager_from_;
  std::list<OpenMessage> open_;
  bool lingers_ = false;
  std::vector<bool> blocked_;  ///< by peer, inside progress()
  Ticket tickets_ = 0;
  std::atomic<std::uint64_t> sent_bytes_{0};
};

/// Point to point over messages, on tags of their own: the sender's signature goes ahead, and the payload
/// follows when the receiver has asked for it. So a receive that never comes costs its peer the signature's
/// few bytes, however large the tensor. Its functions are those of Backend.
class MessageTransfers {
 public:
  MessageTransfers(Messages& messages, Board& board)
      : port_(messages.port()),
        board_(board),
        sends_(static_cast<std::size_t>(port_.size())),
        receives_(sends_.size()) {}

  void start(Call& transfer);
  bool advance(Call& transfer);
  /// After an error.
  void cancel(Call& transfer) noexcept;

 private:
  void send_payload(Call& transfer);
  void take_payload(Call& transfer);

  Port& port_;
  Board& board_;
  std::vector<std::uint64_t> sends_, receives_;  ///< transfers started, by peer
};

}  // namespace sherd::comm
