#include "device/graph/kernel_sequence.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "base/error.h"
#include "base/random.h"

namespace sherd::device {
namespace {

constexpr std::size_t argument_alignment = 16;
constexpr std::size_t most_arguments = 64;

std::size_t padded(std::size_t bytes) {
  return (bytes + argument_alignment - 1) / argument_alignment * argument_alignment;
}

std::uint64_t mix(std::uint64_t hash, const Extent3& extent) {
  return mix_seed(mix_seed(mix_seed(hash, extent.x), extent.y), extent.z);
}

}  // namespace

void KernelSequence::keep(const void* value, std::size_t size) {
  const std::size_t at = bytes_.size();
  bytes_.resize(at + padded(size));
  if (size) std::memcpy(bytes_.data() + at, value, size);
  sizes_.push_back(size);
}

void KernelSequence::note(SequenceWork work) {
  work.count = sizes_.size() - work.first, work.bytes = bytes_.size() - work.begin;
  std::uint64_t hash = mix_seed(fingerprint_, reinterpret_cast<std::uintptr_t>(work.what));
  hash = mix_seed(mix(mix(hash, work.grid), work.block), work.shared_bytes);
  hash = mix_seed(hash, work.bytes);
  if (work.call != none) {
    const std::span<const std::byte> key = bytes_of(work);
    hash = mix_seed(hash, stable_hash({reinterpret_cast<const char*>(key.data()), key.size()}));
  }
  fingerprint_ = hash;
  works_.push_back(work);
}

void KernelSequence::add(const KernelLaunch& kernel) {
  require(kernel.arguments.size() == kernel.sizes.size() && kernel.sizes.size() <= most_arguments,
          "a kernel has ", kernel.arguments.size(), " arguments of ", kernel.sizes.size(), " sizes; at most ",
          most_arguments, " are taken");
  const SequenceWork work{
      kernel.entry, kernel.grid, kernel.block, kernel.shared_bytes, none, sizes_.size(), 0, bytes_.size(), 0};
  for (std::size_t i = 0; i < kernel.sizes.size(); ++i) keep(kernel.arguments[i], kernel.sizes[i]);
  note(work);
}

void KernelSequence::add(const LibraryCall& call) {
  const SequenceWork work{call.what, {}, {}, 0, calls_.size(), sizes_.size(), 0, bytes_.size(), 0};
  keep(call.key.data(), call.key.size());
  calls_.push_back(call.run);
  note(work);
}

void KernelSequence::clear() {
  works_.clear(), bytes_.clear(), sizes_.clear(), calls_.clear();
  fingerprint_ = 0;
}

std::span<const std::byte> KernelSequence::bytes_of(const SequenceWork& work) const {
  return {bytes_.data() + work.begin, work.bytes};
}

void KernelSequence::run(std::size_t index, StreamQueue& on) const {
  const SequenceWork& work = works_[index];
  const std::span<const std::size_t> sizes(sizes_.data() + work.first, work.count);
  if (work.call != none) return on.call({work.what, bytes_of(work).first(sizes.front()), calls_[work.call]});
  std::array<void*, most_arguments> arguments;
  const std::byte* at = bytes_.data() + work.begin;
  for (std::size_t i = 0; i < sizes.size(); at += padded(sizes[i]), ++i)
    arguments[i] = const_cast<std::byte*>(at);
  on.launch({work.what, work.grid, work.block, work.shared_bytes, {arguments.data(), sizes.size()}, sizes});
}

bool KernelSequence::same_works(const KernelSequence& other) const {
  if (fingerprint_ != other.fingerprint_ || sizes_ != other.sizes_) return false;
  return std::equal(
      works_.begin(), works_.end(), other.works_.begin(), other.works_.end(),
      [&](const SequenceWork& mine, const SequenceWork& theirs) {
        return mine.what == theirs.what && mine.grid == theirs.grid && mine.block == theirs.block &&
               mine.shared_bytes == theirs.shared_bytes && mine.call == theirs.call &&
               mine.first == theirs.first &&
               (mine.call == none || std::ranges::equal(bytes_of(mine), other.bytes_of(theirs)));
      });
}

bool KernelSequence::same_arguments(std::size_t work, const KernelSequence& other) const {
  return std::ranges::equal(bytes_of(works_[work]), other.bytes_of(other.works_[work]));
}

void KernelSequence::take_arguments(std::size_t work, const KernelSequence& other) {
  std::ranges::copy(other.bytes_of(other.works_[work]),
                    bytes_.begin() + static_cast<std::ptrdiff_t>(works_[work].begin));
}

}  // namespace sherd::device
