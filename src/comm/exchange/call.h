#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/deadline.h"
#include "comm/collective.h"
#include "comm/communicator.h"
#include "comm/flight_recorder.h"
#include "device/stream.h"

namespace sherd::comm {

struct Envelope;

/// The time at which a transfer is late: some time after somebody has begun to wait for it. So a rank that
/// computes for long, or hangs, while its transfers are under way blames nobody for them. Thread-safe.
class TransferDeadline {
 public:
  /// Only the first time counts.
  void begin(double seconds) {
    auto none = never;
    at_.compare_exchange_strong(none, Deadline::after_seconds(seconds).at().time_since_epoch().count());
  }
  Deadline get() const {
    using Clock = Deadline::Clock;
    return Deadline(Clock::time_point(Clock::duration(at_.load())) - Clock::now());
  }

 private:
  static constexpr auto never = (Deadline::Clock::time_point::max)().time_since_epoch().count() / 2;
  std::atomic<Deadline::Clock::rep> at_{never};
};

/// One call of one rank, checked and ready to run. Tensor handles keep the buffers alive.
struct Call {
  Collective kind = Collective::none;
  ReduceOp op = ReduceOp::sum;
  double factor = 1;            ///< all_reduce
  DType rounding = DType::f32;  ///< reduce_scatter
  Reduction reduction = Reduction::ordered;
  int peer = -1;        ///< broadcast: the root; send and receive: the other rank
  int world_peer = -1;  ///< the same rank by its number in the world, by which errors name it
  std::vector<GatherPiece> gathers;
  std::vector<ReducePiece> reduces;
  Tensor x;    ///< all_reduce, broadcast, send, receive; all_to_all: the input
  Tensor out;  ///< all_to_all
  std::vector<std::int64_t> in_counts, out_counts;  ///< all_to_all, one per rank
  std::vector<std::int64_t> words;  ///< agree: in, this rank's; out, everybody's in rank order
  std::string label;
  bool async = false;  ///< the caller goes on before it is done
  FlightRecorder::Ticket record;
  bool watched = false;  ///< who queued it on a GPU records its end

  // Order with this rank's GPU (exchange/gpu/gpu_order.h); nothing of it without one.
  bool gpu = false;             ///< some tensor lies in memory of a GPU
  bool host = false;            ///< some tensor lies in the host's
  device::Event ready;          ///< the compute stream's: before it no tensor may be touched
  device::Event done;           ///< set by who runs the call: before it the tensors may be in use on a stream
  std::vector<Tensor> staging;  ///< memory beside the call's tensors that is in use as long as they are
  Tensor travelling;            ///< a staged transfer: the copy in the host's memory
  /// For a transfer that a GpuRoute moves itself: the words that the two ends exchange on the host.
  std::shared_ptr<Call> greeting;

  // Progress of a transfer (send, receive); owned by the backend between start() and the end.
  std::uint64_t index = 0;  ///< position among the transfers of this pair and direction
  std::size_t moved = 0;    ///< bytes through the staging ring
  int phase = 0;
  std::vector<int> sends, receives;    ///< message path: open messages
  std::shared_ptr<Envelope> envelope;  ///< message path: what goes ahead of the payload
  std::shared_ptr<TransferDeadline> deadline;
  bool polled = false;  ///< nobody is woken when it can move on: look again soon
};

inline bool is_transfer(const Call& call) {
  return call.kind == Collective::send || call.kind == Collective::receive;
}

/// Records that a call runs while it lives, and how it ended, unless it goes on on a GPU.
class RecordedRun {
 public:
  explicit RecordedRun(const Call& call) : call_(call), exceptions_(std::uncaught_exceptions()) {
    call.record.begin();
  }
  ~RecordedRun() {
    const bool well = std::uncaught_exceptions() == exceptions_;
    if (!well || !call_.watched) call_.record.end(well);
  }
  RecordedRun(const RecordedRun&) = delete;
  RecordedRun& operator=(const RecordedRun&) = delete;

 private:
  const Call& call_;
  int exceptions_;
};

/// The part of a rank's call that it publishes, for the others to compare. Plain bytes: it lives in shared
/// memory and travels in messages.
struct CallSignature {
  Collective kind = Collective::none;
  ReduceOp op = ReduceOp::sum;
  DType dtype = DType::f32, rounding = DType::f32;
  std::int32_t world_peer = -1;
  std::uint32_t pieces = 0;
  Reduction reduction = Reduction::ordered;
  std::array<std::uint8_t, 2> unused{};  ///< no byte may be left to chance: they are compared
  std::uint8_t gpu = 0;  ///< some tensor lies in memory of a GPU; 2: and its ranks meet on the host for it
  std::int64_t elements = 0;
  std::uint64_t layout = 0;  ///< hash of the factor, the whole label and every piece's extents
  std::array<char, 80> label{};
};
static_assert(std::is_trivially_copyable_v<CallSignature>);

/// The message that the ranks of a transfer send each other before its payload comes.
struct Envelope {
  CallSignature call;  ///< the sender's
  std::byte go{};      ///< the receiver's word
};

/// Whether the ranks want this sum made by the library that carries it, where that knows the type.
bool wants_native_sum(const Call& call);

std::string_view name_of(ReduceOp op);

CallSignature sign(const Call& call);
/// The call in words: `all_reduce (sum) of 1024 fp32 "loss"`. As in all texts, ranks have their numbers in
/// the world.
std::string describe(const CallSignature& signature);
inline std::string describe(const Call& call) {
  return describe(sign(call));
}

/// Throws Error{usage} when the call's own arguments do not fit together. Fills in default counts of
/// all_to_all.
void check_call(Call& call, int rank, int size);

/// Calls visit(tensor) for every tensor of the call.
template <class Visit>
void for_each_tensor(const Call& call, const Visit& visit) {
  for (const auto& piece : call.gathers) visit(piece.shard), visit(piece.full);
  for (const auto& piece : call.reduces) {
    visit(piece.full), visit(piece.shard);
    if (piece.onto.defined()) visit(piece.onto);
  }
  for (const Tensor* x : {&call.x, &call.out})
    if (x->defined()) visit(*x);
}

/// The payload that this call sends from `rank` to others, in bytes.
std::uint64_t bytes_sent(const Call& call, int rank, int size);

/// The size of the call's full tensors, in bytes: about as much passes through a rank's caches.
std::size_t bytes_moved(const Call& call);

/// The error message where the calls of these ranks of the world differ, or empty: `mismatched calls: rank 0
/// called …; ranks 1, 2 called …`.
std::string mismatch(const std::vector<CallSignature>& calls, const std::vector<int>& world_ranks);

/// The error message of rank `rank` of the world where its own end of a transfer differs from the other end's
/// call, or empty.
std::string transfer_mismatch(const Call& transfer, const CallSignature& theirs, int rank);

/// The error message for an all_to_all whose counts differ, or empty. `rows`, as ranks tell each other: in
/// rank order, every rank's counts of elements for the others, then those that it expects of them.
/// `world_rank`: the number in the world of one of the `size` ranks.
std::string count_mismatch(const std::vector<std::int64_t>& rows, int size,
                           const std::function<int(int)>& world_rank);

/// "rank 1" or "ranks 1, 2"
std::string name_ranks(const std::vector<int>& ranks);

/// First element of part r when n elements are cut into `size` parts.
inline std::int64_t part_begin(std::int64_t n, int size, int r) {
  return n / size * r + std::min<std::int64_t>(n % size, r);
}

}  // namespace sherd::comm
