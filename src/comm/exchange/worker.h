#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "base/dtype.h"
#include "comm/exchange/call.h"

namespace sherd::comm {

/// How elements of several ranks become one; see Communicator::all_reduce and ReducePiece for the arithmetic.
struct ReduceSpec {
  ReduceOp op = ReduceOp::sum;
  double factor = 1;
  DType in = DType::f32, rounding = DType::f32, out = DType::f32;
  const std::byte* onto = nullptr;  ///< the sum begins with it; may be null
  DType onto_type = DType::f32;
};

/// The reduction of a piece from element `begin` of its shard on.
inline ReduceSpec fold_of(const ReducePiece& piece, DType rounding, std::int64_t begin) {
  ReduceSpec how{ReduceOp::sum, 1, piece.full.dtype(), rounding, piece.shard.dtype()};
  if (!piece.onto.defined()) return how;
  how.onto = piece.onto.raw() + static_cast<std::size_t>(begin) * size_of(piece.onto.dtype());
  how.onto_type = piece.onto.dtype();
  return how;
}

/// The means by which one rank copies and sums: threads of the processor, or a stream of its GPU
/// (gpu_worker.h). One call at a time.
class Worker {
 public:
  virtual ~Worker() = default;

  /// True where work is done when its function returns, so that the calling thread may look at the memory,
  /// and the barriers of threads order it between ranks.
  virtual bool immediate() const = 0;

  /// Before the work for a call: `bytes` tells how much it moves through this rank.
  virtual void begin(const Call& call, std::size_t bytes) = 0;
  /// Called around every barrier of a call: work of peers after their follow() comes after this rank's before
  /// its publish().
  virtual void publish() {}
  virtual void follow() {}
  /// After the work for a call; sets Call::done where it is not immediate.
  virtual void end(Call& call) = 0;
  /// After a failure: returns when nothing that was begun is under way any more.
  virtual void drain() noexcept {}

  /// Copies unless both are the same address. The ranges must not overlap otherwise.
  virtual void copy(std::byte* to, const std::byte* from, std::size_t bytes) = 0;

  /// Combines `count` elements of every source, in order, into every out (which may be among the sources, or
  /// be `onto`).
  virtual void reduce(const ReduceSpec& how, std::span<const std::byte* const> sources,
                      std::span<std::byte* const> outs, std::int64_t count) = 0;
};

/// The processor's threads. When a call moves more bytes than stay in the caches, large outputs are written
/// past them (a plain store would read each line first).
std::unique_ptr<Worker> make_cpu_worker(int threads);

}  // namespace sherd::comm
