#pragma once

// This room lets ranks exchange: which ranks form which groups, and collectives over them.
//
// To change, look at:
// - the ranks' arithmetic: grid.h; a rank's groups: process_groups.h; who started the ranks: launcher.cpp
// - collectives, written once over two transports: exchange/collectives.cpp, exchange/reductions.cpp; sums
//   per instruction set: isa/
// - how a collective times out: Board::diagnose(), exchange/board.cpp; between machines
//   Messages::check_peers(), messages/messages.cpp; NCCL: NcclComm::overdue(); all waits:
//   docs/communication.md, "Waits"
// - the record of the last calls: flight_recorder.h
// - add a communicator: for a network Port, messages/port.h; else Backend, exchange/backend.h
// - memory that exchanging takes beside tensors: memory.h

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/choices.h"
#include "comm/flight_recorder.h"
#include "tensor/kernels.h"
#include "tensor/tensor.h"

namespace sherd::comm {

using tensor::Tensor;

enum class ReduceOp : std::uint8_t { sum, max, min };

/// Payload that left this rank for another, by collective. Scalars (loss, norms, flags, barriers) are counted
/// apart.
struct Traffic {
  std::uint64_t all_reduce = 0, all_gather = 0, reduce_scatter = 0, all_to_all = 0, broadcast = 0, p2p = 0;
  std::uint64_t scalars = 0;
  /// The part of all these that left this rank's machine as messages, as it was sent: one copy may serve
  /// several ranks, and partial sums may be wider than what they add up.
  std::uint64_t between_machines = 0;

  /// Without scalars.
  std::uint64_t payload() const {
    return all_reduce + all_gather + reduce_scatter + all_to_all + broadcast + p2p;
  }
  void add(const Traffic& other, std::uint64_t times = 1) {
    all_reduce += times * other.all_reduce, all_gather += times * other.all_gather;
    reduce_scatter += times * other.reduce_scatter, all_to_all += times * other.all_to_all;
    broadcast += times * other.broadcast, p2p += times * other.p2p, scalars += times * other.scalars;
    between_machines += times * other.between_machines;
  }
};

/// A collective under way. Copies share it. Dropping a Work does not cancel it; buffers must live until
/// wait() returned or threw.
class Work {
 public:
  /// The end of a collective, for which one waits; backends derive from this. Thread-safe.
  class Completion {
   public:
    virtual ~Completion() = default;
    virtual bool done() = 0;
    /// Returns when done; throws the collective's Error, also on every later call.
    virtual void wait() = 0;
  };
  Work() = default;  ///< already done
  explicit Work(std::shared_ptr<Completion> completion) : completion_(std::move(completion)) {}
  bool done() const { return !completion_ || completion_->done(); }
  /// Waits until the collective is done here (buffers may be reused), at most the communicator's deadline.
  /// Throws Error{comm} naming the rank, the collective and its label.
  void wait() {
    if (completion_) completion_->wait();
  }

 private:
  std::shared_ptr<Completion> completion_;
};

/// Gathers every rank's `shard` into `full` at rank·shard.numel(). full.numel() == size·shard.numel(); the
/// shard may already lie in its place in `full`.
struct GatherPiece {
  Tensor shard, full;
};

/// Elements [begin, end) of this rank's shard of a sum: shard[i] = onto[i] + Σ_r round(full_r[rank·S + i])
/// with S = full.numel()/size, `shard` and `onto` of S elements. [0, S) reduces the whole; parts let one
/// large tensor travel in buckets. What each rank gives is rounded alone to the call's `rounding`; sums run
/// over ranks in rank order in fp32 (fp64 where full is, integers in their own type) and are rounded once, to
/// shard's dtype. Thus a sum may be folded: what one call leaves in an fp32 shard, the next goes on from, as
/// if the ranks of both had been one group's. Without `onto` the sum begins with the first rank's part.
/// `onto` is fp32 or of shard's dtype, and may be the shard itself. `shard` may be this rank's own part of
/// `full` (in place).
struct ReducePiece {
  Tensor full, shard;
  std::int64_t begin = 0, end = 0;
  Tensor onto{};
};

/// The purpose of a collective; appears in errors and traces, and decides how its bytes are counted.
///
/// The whole `label` takes part in the check that all ranks make the same call (but for send and receive): it
/// names all that the call's pieces are of, so that ranks never mix different things of one size. Errors show
/// 79 characters of it.
struct CallOptions {
  std::string label{};                       ///< unit or quantity, e.g. "blocks.3 gradients"
  bool scalar = false;                       ///< count as scalars
  Reduction reduction = Reduction::ordered;  ///< how reduce_scatter and all_reduce sum; the same on all ranks
  bool async = false;                        ///< run on the communicator's own thread and return at once
};

/// A group of ranks that exchange tensors. Every rank of the group must call the same collectives in the same
/// order; different calls, a dead rank, or a rank that does not come before the deadline throw Error{comm} on
/// all ranks. After an error the communicator stays broken and every further call throws the same error; so
/// do groups split from it, while the group it was split from works on. Wrong arguments (Error{usage}) are
/// found before anything is sent and break nothing. Dropping a communicator tells the others that this rank
/// has left; where it still had transfers under way, it breaks the group, so that nobody waits for them.
///
/// On GPUs (bind()) calls are ordered with the rank's compute stream as kernels are: a call begins after what
/// that stream was given before it, and what the stream is given after wait(), or after a synchronous call,
/// begins after the call. The thread does not wait for the GPU, but where tensors in the host's memory take
/// part: these it may touch after wait(). What a GPU meets later than that is thrown by the device's
/// synchronize() and by every further call.
///
/// Results do not depend on the backend: reductions sum in rank order, over NCCL too, which then only moves
/// bytes (but see CallOptions::reduction). On NCCL calls that differ between ranks may be told by a later
/// one. One thread at a time calls in. Async calls run in order on one thread that the communicator owns; a
/// synchronous call first waits for those before it.
class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual std::string name() const = 0;  ///< backend and group, e.g. "local(4)"

  /// Collective, before the first call with tensors of a GPU, and again for another device: this rank's
  /// tensors lie on `device`, which is kept alive. Groups split off later are bound as this one is. Throws
  /// Error{io} when some ranks have a GPU and others none.
  virtual void bind(const std::shared_ptr<device::Device>& device) = 0;

  /// Memory that peers of this group can reach without a copy. Collective: all ranks ask for the same sizes
  /// in the same order. Charged to `tier` of `device`'s ledger. Freeing is local.
  virtual device::Storage allocate(device::Device& device, std::size_t bytes, device::Category category,
                                   device::Tier tier = device::Tier::device) = 0;

  virtual Work all_gather(std::vector<GatherPiece> pieces, const CallOptions& options = {}) = 0;
  virtual Work reduce_scatter(std::vector<ReducePiece> pieces, DType rounding,
                              const CallOptions& options = {}) = 0;
  /// In place. Sums in rank order in fp32 (fp64, and integers, in their own type), factor applied, rounded
  /// once. Integers wrap around; a factor is applied to them in fp64 and rounded to the nearest. max and min
  /// keep a NaN.
  virtual Work all_reduce(const Tensor& x, ReduceOp op = ReduceOp::sum, double factor = 1,
                          const CallOptions& options = {}) = 0;
  virtual Work broadcast(const Tensor& x, int root, const CallOptions& options = {}) = 0;
  /// Block r of `in` goes to rank r; block r of `out` comes from rank r. Counts in elements, by rank; empty
  /// means equal blocks.
  virtual Work all_to_all(const Tensor& in, const Tensor& out, std::span<const std::int64_t> in_counts = {},
                          std::span<const std::int64_t> out_counts = {}, const CallOptions& options = {}) = 0;
  /// Point to point: matched by order between a pair of ranks. A send is done when its buffer may be reused,
  /// which may be only when the receiver has come: ranks that both send first must send with `async`.
  /// Transfers that follow each other are under way together. Sizes or dtypes that differ break the group.
  virtual Work send(const Tensor& x, int to, const CallOptions& options = {}) = 0;
  virtual Work receive(const Tensor& x, int from, const CallOptions& options = {}) = 0;
  virtual void barrier(const CallOptions& options = {}) = 0;

  /// Collective: a communicator of the ranks that gave the same color, ordered by key then rank; null for a
  /// negative color.
  virtual std::unique_ptr<Communicator> split(int color, int key) = 0;
  /// Collective: as split(), where every rank knows who goes where: a communicator of the ranks of this group
  /// that stand with this one in `parts`, in the order in which they stand there; null for a rank in none of
  /// them. All ranks give the same parts. Throws Error{usage} for parts that are empty, overlap, or hold
  /// ranks that the group has not.
  virtual std::unique_ptr<Communicator> part(const std::vector<std::vector<int>>& parts) = 0;

  /// Tells peers that this rank has failed, so that their waits end now with `reason` rather than at the
  /// deadline, in this group and in those split from it. From any thread.
  virtual void abort(const std::string& reason) noexcept = 0;

  /// This rank's last calls of this group and all others of its world.
  virtual const std::shared_ptr<FlightRecorder>& flight_recorder() const = 0;
  /// Says what the group is for, "shard" or "shard, data", where its calls are told.
  virtual void set_purpose(const std::string& purpose) = 0;

  virtual Traffic traffic() const = 0;
  virtual void reset_traffic() = 0;
};

/// Settings of every backend.
struct CommOptions {
  double timeout_seconds = 1800;
  /// Processes only: false exchanges messages even between ranks of one machine (for tests and odd clusters).
  bool shared_memory = true;
  /// Processes only: the name of this rank's machine, where it shall not be the system's. Ranks share memory
  /// with those of the same name only (for tests, and for containers of one host that do not see each other).
  std::string machine{};
  /// Threads with which each rank copies and sums. The communicator owns them.
  int threads = 1;
};

/// Runs body(communicator) on `ranks` threads of this process (rank 0 on the calling thread) and returns when
/// all have ended. When a rank throws, the others are aborted, and the first error (by time) is rethrown;
/// errors of other kinds than comm come first, as a comm error may be the echo of one.
void run_local(int ranks, const CommOptions& options, const std::function<void(Communicator&)>& body);

/// A world of one rank.
std::unique_ptr<Communicator> make_self(const CommOptions& options);

/// The launcher that started this process as one rank of several: an MPI launcher (mpirun, srun --mpi=pmix),
/// or one that says RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the environment, as torchrun does.
/// `separate`: one whose processes this build cannot join, so that each would train by itself.
enum class Launcher : std::uint8_t { none, mpi, environment, separate };

/// The launcher that the environment tells of; starts nothing. Under both, torchrun's own word counts, then
/// MPI's where this build has it.
Launcher launcher();
/// How many ranks the launcher says that it started, 0 where it does not say before they have joined; 1
/// without one. Throws Error{usage} for variables that are missing or make no sense, and for processes that
/// cannot be joined: it names what was seen, and which launchers do.
int launched_ranks();

/// How often the launcher has begun this run again, as it says itself: torchrun and `sherd launch` count
/// restarts, Slurm counts how often it has requeued the job. 0 where it says nothing.
int restarts();

/// The ranks that a launcher started, and this one's place among those of its machine, which share its cores
/// and GPUs.
struct LaunchedWorld {
  std::unique_ptr<Communicator> world;
  int local_rank = 0, local_size = 1;
};
/// Collective: joins the launcher's ranks, over MPI or over TCP connections that rank 0 arranges on
/// MASTER_PORT. On one machine they exchange through shared memory either way. Throws Error{usage} without a
/// launcher, as launched_ranks() does, and where MPI finds fewer ranks than the launcher started, Error{comm}
/// naming ranks that do not come.
LaunchedWorld join_launched_world(const CommOptions& options);

/// True when this build has the mpi backend.
bool mpi_available();
/// The NCCL that this build was compiled for, e.g. "2.28.3", and the one that the process has loaded where
/// that is another: "2.28.3 (2.29.1 loaded)". Empty in builds without NCCL.
std::string nccl_version();
/// The world communicator over MPI; initialises MPI with threads at the first call and finalises it at exit,
/// unless a rank has died or does not come to its exit, when finalising would hang. Collective. Ranks of one
/// machine exchange through shared windows. Throws Error{usage} when the build has no MPI.
std::unique_ptr<Communicator> make_mpi_world(const CommOptions& options);

}  // namespace sherd::comm
