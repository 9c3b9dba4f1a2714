#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "device/stream.h"

namespace sherd::device {

/// A list of work described rather than done: kernels with copies of their arguments, and libraries' calls.
class KernelSequence {
 public:
  void add(const KernelLaunch& kernel);
  void add(const LibraryCall& call);
  void clear();

  std::size_t size() const { return works_.size(); }
  bool empty() const { return works_.empty(); }
  bool is_kernel(std::size_t work) const { return works_[work].call == none; }
  /// Queues one of its works.
  void run(std::size_t work, StreamQueue& on) const;

  /// A hash of everything but the arguments of kernels.
  std::uint64_t fingerprint() const { return fingerprint_; }
  /// The same works as another's in everything but the arguments of kernels.
  bool same_works(const KernelSequence& other) const;
  /// The same arguments as another's of the same works have there.
  bool same_arguments(std::size_t work, const KernelSequence& other) const;
  /// Takes one work's arguments over from another of the same works.
  void take_arguments(std::size_t work, const KernelSequence& other);

 private:
  static constexpr auto none = static_cast<std::size_t>(-1);
  struct SequenceWork {
    const void* what;
    Extent3 grid, block;
    std::size_t shared_bytes;
    std::size_t call;          ///< its place in calls_; none for a kernel
    std::size_t first, count;  ///< its values' place in sizes_
    std::size_t begin, bytes;  ///< its values' place in bytes_
  };
  /// Appends a value at the next multiple of 16.
  void keep(const void* value, std::size_t size);
  void note(SequenceWork work);
  std::span<const std::byte> bytes_of(const SequenceWork& work) const;

  std::vector<SequenceWork> works_;
  std::vector<std::byte> bytes_;  ///< arguments and keys
  std::vector<std::size_t> sizes_;
  std::vector<std::function<void(void*)>> calls_;
  std::uint64_t fingerprint_ = 0;
};

}  // namespace sherd::device
