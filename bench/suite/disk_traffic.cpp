#include "bench/suite/disk_traffic.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <span>
#include <utility>

#include "base/error.h"

namespace sherd::bench {
namespace {

/// Where the i-th of `count` equal pieces lies and which way it goes.
struct FilePlace {
  bool write;
  std::uint64_t index;
};
FilePlace place_of(DiskTraffic traffic, std::uint64_t i, std::uint64_t count) {
  if (traffic != DiskTraffic::mixed) return {traffic == DiskTraffic::write, i % count};
  const std::uint64_t half = count / 2, at = i / 2 % half;
  return i % 2 == 0 ? FilePlace{false, at} : FilePlace{true, half + at};
}

/// Bytes that no disk compresses or recognises as zeros. A multiple of eight.
void fill(std::byte* memory, std::size_t bytes) {
  std::uint64_t state = 1;
  for (std::size_t i = 0; i < bytes; i += sizeof state) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    std::memcpy(memory + i, &state, sizeof state);
  }
}

}  // namespace

std::string_view name_of(DiskTraffic traffic) {
  constexpr std::array<std::string_view, 3> names{"read", "write", "mixed"};
  return names[static_cast<std::size_t>(traffic)];
}

StoreTraffic::StoreTraffic(const offload::StoreOptions& options, std::uint64_t bytes, int buffers,
                           std::size_t buffer_bytes)
    : store_(options, ledger_),
      buffers_(static_cast<std::size_t>(buffers)),
      buffer_bytes_(buffer_bytes),
      pages_(store_.pages(buffers_ * buffer_bytes, device::Category::workspace)) {
  const std::uint64_t pair = std::uint64_t{2} * buffer_bytes;
  require(buffers > 0 && buffer_bytes > 0 && bytes >= pair,
          "the bytes must be at least twice those of a buffer");
  span_ = store_.reserve("traffic", bytes / pair * pair, device::Category::optimizer);
  fill(pages_.data(), memory_bytes() / 8 * 8);
  run(DiskTraffic::write, [&](std::uint64_t moved) { return moved < span_.bytes(); });
}

void StoreTraffic::finish_first() {
  under_way_.front().wait();
  under_way_.pop_front();
}

std::uint64_t StoreTraffic::run(DiskTraffic traffic, const std::function<bool(std::uint64_t)>& more) {
  std::uint64_t moved = 0;
  const std::uint64_t pieces = span_.bytes() / buffer_bytes_;
  for (std::uint64_t i = 0; more(moved); ++i, moved += buffer_bytes_) {
    if (under_way_.size() == buffers_) finish_first();
    const FilePlace place = place_of(traffic, i, pieces);
    const std::uint64_t offset = place.index * buffer_bytes_;
    std::byte* data = pages_.data() + i % buffers_ * buffer_bytes_;
    under_way_.push_back(place.write ? store_.write(span_, offset, data, buffer_bytes_)
                                     : store_.read(span_, offset, data, buffer_bytes_));
  }
  while (!under_way_.empty()) finish_first();
  return moved;
}

RawTraffic::RawTraffic(std::unique_ptr<offload::IoBackend> backend, const std::string& path,
                       std::uint64_t bytes, std::size_t memory_bytes, const offload::StoreOptions& options)
    : path_(path),
      bytes_(bytes),
      block_(options.block_size),
      depth_(static_cast<std::size_t>(options.queue_depth)),
      timeout_seconds_(options.timeout_seconds),
      backend_(std::move(backend)) {
  require(memory_bytes >= depth_ * block_, "the memory must hold all requests under way");
  require(bytes_ > 0 && bytes_ % (2 * block_) == 0, "the bytes must be a multiple of two blocks");
  descriptor_ = ::open(path.c_str(), O_RDWR | O_CLOEXEC | (options.direct ? O_DIRECT : 0));
  if (descriptor_ < 0) fail(ErrorKind::io, "cannot open '", path, "': ", std::strerror(errno));
  constexpr std::size_t huge_page = std::size_t{2} << 20;
  const std::size_t allocated = (memory_bytes + huge_page - 1) / huge_page * huge_page;
  memory_ = static_cast<std::byte*>(std::aligned_alloc(huge_page, allocated));  // as the store's buffers lie
  if (!memory_) {
    ::close(descriptor_);
    fail(ErrorKind::memory, "the system has no ", memory_bytes, " bytes of memory left");
  }
  ::madvise(memory_, allocated, MADV_HUGEPAGE);
  fill(memory_, allocated);
  for (std::size_t i = 0; i < memory_bytes / block_; ++i) free_.push_back(i);
  backend_->attach(descriptor_);
  std::string why;
  registered_ = backend_->register_memory({memory_, memory_bytes / block_ * block_}, &why);
}

RawTraffic::~RawTraffic() {
  if (registered_ >= 0) backend_->unregister_memory(registered_);
  backend_.reset();  // ends what is under way before its memory goes
  std::free(memory_);
  ::close(descriptor_);
}

void RawTraffic::reap(std::size_t* under_way) {
  std::array<offload::IoCompletion, 64> ended;
  const auto deadline =
      std::chrono::steady_clock::now() +
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(timeout_seconds_));
  for (;;) {
    const std::size_t count = backend_->reap(ended, std::chrono::seconds(1));
    for (const offload::IoCompletion& one : std::span(ended).first(count)) {
      if (one.result < 0)
        fail(ErrorKind::io, "'", path_, "': ", std::strerror(static_cast<int>(-one.result)));
      if (one.result != static_cast<std::int64_t>(block_))
        fail(ErrorKind::io, "'", path_, "': only ", one.result, " of ", block_, " bytes were moved");
      free_.push_back(one.tag);
    }
    *under_way -= count;
    if (count > 0) return;
    if (std::chrono::steady_clock::now() > deadline)
      fail(ErrorKind::io, "'", path_, "': no request ended within ", timeout_seconds_, " s");
  }
}

void RawTraffic::run(DiskTraffic traffic) {
  const std::uint64_t blocks = bytes_ / block_;
  std::size_t under_way = 0;
  std::vector<offload::IoRequest> batch;
  for (std::uint64_t next = 0; next < blocks || under_way > 0;) {
    batch.clear();
    for (; next < blocks && under_way + batch.size() < depth_; ++next) {
      const std::uint64_t slot = free_.front();
      free_.pop_front();
      const FilePlace place = place_of(traffic, next, blocks);
      batch.push_back({.write = place.write,
                       .offset = place.index * block_,
                       .memory = memory_ + slot * block_,
                       .bytes = static_cast<std::uint32_t>(block_),
                       .registered = registered_,
                       .tag = slot});
    }
    if (!batch.empty()) backend_->submit(batch);
    under_way += batch.size();
    reap(&under_way);
  }
}

}  // namespace sherd::bench
