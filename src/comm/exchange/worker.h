#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "base/arena.h"
#include "base/dtype.h"
#include "comm/communicator.h"

namespace sherd::comm {

/// How elements of several ranks become one; see Communicator::all_reduce and ReducePiece for the arithmetic.
struct Reduction {
  ReduceOp op = ReduceOp::sum;
  double factor = 1;
  DType in = DType::f32, rounding = DType::f32, out = DType::f32;
  bool accumulate = false;
};

/// The threads with which one rank copies and sums. One call at a time.
class Worker {
 public:
  explicit Worker(int threads);

  /// Says how many bytes the coming call moves through this rank. When they are more than stay in the caches,
  /// large outputs are written past them (a plain store would read each line first).
  void expect(std::size_t bytes);

  /// Copies unless both are the same address. The ranges must not overlap otherwise.
  void copy(std::byte* to, const std::byte* from, std::size_t bytes);

  /// Combines `count` elements of every source, in order, into every out (which may be among the sources).
  void reduce(const Reduction& how, std::span<const std::byte* const> sources,
              std::span<std::byte* const> outs, std::int64_t count);

 private:
  std::unique_ptr<Arena> arena_;  ///< null with one thread
  std::size_t cached_;            ///< bytes that may be found in the caches later
  bool stream_ = false;
};

}  // namespace sherd::comm
