#include "device/heap/heap_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <ranges>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace sherd::device {
namespace {

constexpr std::uint64_t huge_page = std::uint64_t{2} << 20;

#if defined(__SANITIZE_ADDRESS__)
constexpr std::size_t gap = 64;  // behind each block, so that accesses beyond its end are seen
void open(std::byte* data, std::size_t bytes) {
  ASAN_UNPOISON_MEMORY_REGION(data, bytes);
}
void close(std::byte* data, std::size_t bytes) {
  ASAN_POISON_MEMORY_REGION(data, bytes);
}
#else
constexpr std::size_t gap = 0;
void open(std::byte*, std::size_t) {}
void close(std::byte*, std::size_t) {}
#endif

std::byte* map(void* at, std::uint64_t bytes, int protection, int flags) {
  void* data = ::mmap(at, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
  return data == MAP_FAILED ? nullptr : static_cast<std::byte*>(data);
}

/// `bytes` bytes of memory on a huge page, with as many unused addresses behind it as there are, up to `room`
/// in all. Null when the system has no more.
std::byte* map_with_room(std::uint64_t bytes, std::uint64_t room) {
  for (room = std::max(room, bytes);; room = std::max(room / 2, bytes)) {
    if (std::byte* all = map(nullptr, room + huge_page, PROT_NONE, MAP_NORESERVE)) {
      const auto address = reinterpret_cast<std::uintptr_t>(all);
      const std::uint64_t before = (huge_page - address % huge_page) % huge_page;
      // Ours until the rest goes, so that no other thread finds the same addresses.
      std::byte* data = map(all + before, bytes, PROT_READ | PROT_WRITE, MAP_FIXED);
      if (before > 0) ::munmap(all, before);
      std::byte* behind = all + before + (data ? bytes : 0);
      ::munmap(behind, static_cast<std::size_t>(all + room + huge_page - behind));
      return data;
    }
    if (room == bytes) return nullptr;
  }
}

/// Memory at these addresses, unless somebody has taken them since.
bool map_at(std::byte* at, std::uint64_t bytes) {
  std::byte* data = map(at, bytes, PROT_READ | PROT_WRITE, MAP_FIXED_NOREPLACE);
  if (data && data != at) ::munmap(data, bytes);  // a kernel that does not know the flag
  return data == at;
}

}  // namespace

HeapMemory::~HeapMemory() {
  for (const HeapRegion& region : regions_) {
    open(region.base, region.heap.size());
    ::munmap(region.base, region.heap.size());
  }
}

void HeapMemory::add(HeapRegion& region, std::uint64_t bytes) {
  std::byte* end = region.base + region.heap.size();
  if (region.kind != HeapOf::small) ::madvise(end, bytes, MADV_HUGEPAGE);
  close(end, bytes);
  region.heap.grow(bytes);
}

bool HeapMemory::extend(HeapRegion& region, std::size_t bytes) {
  const std::uint64_t more = region.heap.missing(bytes);
  if (!map_at(region.base + region.heap.size(), more)) return false;
  add(region, more);
  return true;
}

bool HeapMemory::begin_region(std::size_t bytes, HeapOf kind) {
  HeapRegion region{nullptr, kind, make_heap(kind)};
  const std::uint64_t first = region.heap.missing(bytes);
  region.base = map_with_room(first, room_);
  if (!region.base) return false;
  add(region, first);
  regions_.push_back(std::move(region));
  return true;
}

std::byte* HeapMemory::take_from_holes(std::size_t bytes, HeapOf kind) {
  for (HeapRegion& region : regions_) {
    if (region.kind != kind) continue;
    if (const auto offset = region.heap.take(bytes)) return region.base + *offset;
  }
  return nullptr;
}

std::byte* HeapMemory::take(std::size_t bytes, HeapOf kind) {
  const std::size_t size = bytes + gap;
  std::lock_guard lock(mutex_);
  std::byte* data = take_from_holes(size, kind);
  if (!data) {
    const auto last = std::ranges::find(regions_ | std::views::reverse, kind, &HeapRegion::kind);
    const bool grown = last != regions_.rend() && extend(*last, size);
    if (!grown && !begin_region(size, kind)) return nullptr;
    data = take_from_holes(size, kind);
  }
  open(data, bytes);
  return data;
}

void HeapMemory::give(std::byte* data, std::size_t bytes) noexcept {
  std::lock_guard lock(mutex_);
  const auto holds = [data](const HeapRegion& region) {
    return data >= region.base && data < region.base + region.heap.size();
  };
  const auto region = std::ranges::find_if(regions_, holds);
  close(data, bytes);
  region->heap.give(static_cast<std::uint64_t>(data - region->base), bytes + gap);
}

std::uint64_t HeapMemory::free_bytes() const {
  std::lock_guard lock(mutex_);
  std::uint64_t sum = 0;
  for (const HeapRegion& region : regions_) sum += region.heap.free_bytes();
  return sum;
}

}  // namespace sherd::device
