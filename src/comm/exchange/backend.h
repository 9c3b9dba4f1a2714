#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/exchange/call.h"
#include "device/accelerator.h"

namespace sherd::comm {

/// A rank's place in a partition of its group that all ranks know.
struct GroupPart {
  int color = -1;            ///< the part's number; -1 in none
  std::vector<int> members;  ///< the part's ranks in the group, in their new order
  int rank = -1;             ///< this rank's number among them
  bool alone = false;        ///< every part has one rank, so nobody has to meet another
  int key() const { return std::max(rank, 0); }
};
/// Throws Error{usage} for parts that are empty, overlap, or hold ranks that a group of `size` has not.
GroupPart find_part(const std::vector<std::vector<int>>& parts, int rank, int size);

/// How one group moves bytes. One thread at a time calls in, but for fail() and wake(). Everything that
/// waits ends at the deadline, or when a peer has died, left or failed, with Error{comm}.
class Backend {
 public:
  virtual ~Backend() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual const std::string& name() const = 0;
  virtual double timeout_seconds() const = 0;
  /// True when calls take no time: then asynchronous ones run at once too.
  virtual bool immediate() const { return false; }

  /// Runs a checked collective to its end. For Collective::agree, call.words holds this rank's words before
  /// and everybody's, in rank order, after.
  virtual void run(Call& call) = 0;

  /// Begins a transfer (send or receive). Transfers of one pair and direction match in the order of start().
  virtual void start(Call& transfer) = 0;
  /// Moves it on without waiting; true when it is finished.
  virtual bool advance(Call& transfer) = 0;
  /// Sleeps until ready() is true. `active` are the transfers under way, with their deadlines; not empty.
  virtual void await(const std::function<bool()>& ready, const std::vector<Call*>& active) = 0;
  /// After an error has failed the group: cancels a transfer, which may have ended or never been started.
  /// Returns when its memory may go.
  virtual void cancel(Call&) noexcept {}
  /// Makes await() look at ready() again.
  virtual void wake() noexcept = 0;

  virtual device::Storage allocate(device::Device& device, std::size_t bytes, device::Category category,
                                   device::Tier tier) = 0;
  virtual std::unique_ptr<Backend> split(int color, int key) = 0;
  /// Splits as split() does, where all ranks know the members of each part; parts of one rank each are made
  /// without a word.
  virtual std::unique_ptr<Backend> part(const GroupPart& part);
  /// The threads with which each rank copies and sums.
  virtual int threads() const { return 1; }

  /// Ranks are threads of this process.
  virtual bool one_process() const { return false; }
  /// Lets collectives of this group have tensors in memory of this GPU, which all ranks share; only where the
  /// ranks are threads of one process.
  virtual void use_gpu(const std::shared_ptr<device::Accelerator>&) {
    sherd::fail(ErrorKind::usage, name(), " does not reach memory of GPUs");
  }

  /// Fails the group if a peer's process is seen to have ended, or to have announced another call. From any
  /// thread; for work that runs elsewhere.
  virtual void look_after_peers() noexcept {}

  /// Tells the others of a call that ranks make by a way of their own, on which nobody compares them, without
  /// waiting for them. Returns its number among those calls, from 1. Throws Error{comm}, which names who
  /// called what, where another rank is known to have begun another call at that number; who is told later
  /// fails the group then. One thread at a time.
  virtual std::uint64_t announce(const CallSignature&) { return 0; }
  /// The ranks that are not known to have announced so many calls. From any thread.
  virtual std::vector<int> not_announced(std::uint64_t) { return {}; }

  /// The number in the world of a rank of this group, by which errors name it.
  virtual int world_rank(int rank) const = 0;
  /// Group and rank, as errors of this rank begin: "local(2 of 4: ranks 1, 3): rank 3".
  std::string own_name() const { return cat(name(), ": rank ", world_rank(rank())); }
  /// Lets the ranks of this machine know for whose transfer, by its number in the world, this one's thread
  /// waits, in whatever group; -1: for none. Who waits too long for this rank then names that one. From any
  /// thread.
  virtual void tell_wait(int /*world_rank*/) noexcept {}

  /// Payload that this rank has sent to other machines, in bytes.
  virtual std::uint64_t bytes_between_machines() const { return 0; }

  virtual void fail(const std::string& reason) noexcept = 0;
  virtual std::string failure() const = 0;
  void throw_if_failed() const;
  [[noreturn]] void fail_and_throw(const std::string& reason);
};

/// A group of one rank in this process, which errors name so.
std::unique_ptr<Backend> make_alone(const CommOptions& options, int world_rank = 0);

/// The group that a split makes: the members' ranks in the parent, in their new order.
struct SplitPlan {
  std::vector<int> members;
  int rank = -1;  ///< this rank's number among them; -1 for a negative color
};
/// The plan from the (color, key) words of all ranks, in rank order.
SplitPlan plan_split(const std::vector<std::int64_t>& words, int rank);

/// "local(4)", or "local(2 of 4: ranks 1, 3)" for a part of the world, as whose ranks all texts name them.
std::string group_name(const std::string& backend, const std::vector<int>& world_ranks, int world_size);

/// The Communicator over a backend: checks, traffic, the asynchronous thread and the broken state.
std::unique_ptr<Communicator> make_group(std::unique_ptr<Backend> backend);

}  // namespace sherd::comm
