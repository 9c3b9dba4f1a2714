#include "emulated_gpu/card.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <utility>

namespace sherd::emulated_gpu {

std::recursive_mutex& mutex() {
  static auto& all = *new std::recursive_mutex;  // work may be freed after statics are gone
  return all;
}

void stop(const std::string& why) {
  std::fprintf(stderr, "emulated GPU: %s\n", why.c_str());
  std::abort();
}

namespace {
struct Failure {
  std::size_t ran = 0, at = SIZE_MAX;  ///< works; with mutex() locked
};
Failure& failure() {
  static Failure held;
  return held;
}
}  // namespace

std::size_t works_run() {
  const std::lock_guard lock(mutex());
  return failure().ran;
}
void break_after(std::size_t works) {
  const std::lock_guard lock(mutex());
  failure().at = failure().ran + works;
}
bool broken() {
  return failure().ran >= failure().at;
}

Memory& memory() {
  static auto& all = *new Memory;
  return all;
}

std::size_t capacity() {
  return std::size_t{6} << 30;
}

int capability() {
  const char* said = std::getenv("SHERD_EMULATED_GPU_CAPABILITY");
  return said ? std::atoi(said) : 90;
}

void* Memory::allocate(std::size_t bytes, Place place, int card) {
  if (place == Place::device && bytes > capacity() - used_[card]) return nullptr;
  constexpr std::size_t alignment = 256, filled = std::size_t{16} << 20;
  void* data = std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  if (!data) return nullptr;
  std::memset(data, 0xff, std::min(bytes, filled));
  blocks_[static_cast<std::byte*>(data)] = {bytes, place, card};
  if (place == Place::device) used_[card] += bytes;
  return data;
}

void Memory::free(void* data) {
  const auto at = blocks_.find(static_cast<std::byte*>(data));
  if (at == blocks_.end()) stop("memory is freed that was not allocated");
  if (at->second.place == Place::device) used_[at->second.card] -= at->second.bytes;
  blocks_.erase(at);
  std::free(data);
}

bool Memory::enlist(void* data, std::size_t bytes, int card) {
  const auto* begin = static_cast<std::byte*>(data);
  const auto next = blocks_.lower_bound(begin);
  if (find(data) || (next != blocks_.end() && next->first < begin + bytes)) return false;
  blocks_[begin] = {bytes, Place::host, card, true};
  return true;
}

bool Memory::strike(void* data) {
  return blocks_.erase(static_cast<std::byte*>(data)) > 0;
}

void Memory::strike_all() {
  std::erase_if(blocks_, [](const auto& each) { return each.second.enlisted; });
}

const Block* Memory::find(const void* data) const {
  const auto* at = static_cast<const std::byte*>(data);
  const auto next = blocks_.upper_bound(at);
  if (next == blocks_.begin()) return nullptr;
  const auto& [begin, block] = *std::prev(next);
  return at < begin + block.bytes ? &block : nullptr;
}

void Memory::require_known(const void* data, std::size_t bytes, const char* what) const {
  const auto* at = static_cast<const std::byte*>(data);
  const auto next = blocks_.upper_bound(at);
  if (next != blocks_.begin()) {
    const auto& [begin, block] = *std::prev(next);
    if (at + bytes <= begin + block.bytes) return;
  }
  stop(std::string(what) + " finds memory gone, or too short, when its turn in the stream has come");
}

std::size_t Memory::used(int card) const {
  const auto at = used_.find(card);
  return at == used_.end() ? 0 : at->second;
}

Kernel Kernel::of(const void* entry, simt::Dim3 grid, simt::Dim3 block, std::size_t shared_bytes,
                  void* const* arguments) {
  Kernel out{entry, grid, block, shared_bytes, {}};
  const simt::KernelEntry known = simt::enrolled(entry);
  for (std::size_t i = 0; i < known.sizes.size(); ++i) {
    const auto* from = static_cast<const std::byte*>(arguments[i]);
    out.arguments.emplace_back(from, from + known.sizes[i]);
  }
  return out;
}

void Kernel::run() {
  std::vector<void*> pointers;
  for (std::vector<std::byte>& argument : arguments) pointers.push_back(argument.data());
  simt::enrolled(entry).call(entry, grid, block, shared_bytes, pointers.data());
}

void Queue::add(Work work) {
  works_.push_back(std::move(work));
}

void Queue::run_to(std::size_t position) {
  try {
    while (done_ < position && !broken()) {
      std::exchange(works_[done_++], nullptr)();
      ++failure().ran;
    }
  } catch (const std::exception& error) {
    stop(std::string("work failed: ") + error.what());
  }
}

}  // namespace sherd::emulated_gpu
