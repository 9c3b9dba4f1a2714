#pragma once

#include <cstddef>

namespace sherd::offload {

/// Zeroed memory straight from the system, on page boundaries, on huge pages where it can. Not on any ledger.
class HostMemory {
 public:
  /// Throws Error{memory} when the system has no more.
  explicit HostMemory(std::size_t bytes);
  ~HostMemory();
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;
  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0, mapped_ = 0;
  void* mapping_ = nullptr;
};

}  // namespace sherd::offload
