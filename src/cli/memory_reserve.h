#pragma once

namespace sherd::cli {

/// While it lives, memory is set aside for the program to end in good order when `new` finds none: for errors
/// to be made, carried and told. Where memory runs out even so, inside what may not fail, the program ends
/// with one line and exit code 1 rather than by abort. Where addresses are limited (ulimit -v), threads share
/// a heap from then on. One at a time.
class MemoryReserve {
 public:
  MemoryReserve();
  ~MemoryReserve();
  MemoryReserve(const MemoryReserve&) = delete;
  MemoryReserve& operator=(const MemoryReserve&) = delete;
};

}  // namespace sherd::cli
