#include "offload/file/host_memory.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

#include "base/error.h"

namespace sherd::offload {
namespace {
constexpr std::size_t huge_page = std::size_t{2} << 20;
}

HostMemory::HostMemory(std::size_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  // mmap aligns to small pages only.
  mapped_ = bytes < huge_page ? bytes : bytes + huge_page;
  mapping_ = ::mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping_ == MAP_FAILED)
    fail(ErrorKind::memory, "the system has no ", bytes,
         " bytes of memory for transfer buffers: ", std::strerror(errno));
  const auto begin = reinterpret_cast<std::uintptr_t>(mapping_);
  const std::uintptr_t start = bytes < huge_page ? begin : (begin + huge_page - 1) / huge_page * huge_page;
  data_ = reinterpret_cast<std::byte*>(start);
  if (bytes >= huge_page) ::madvise(data_, bytes, MADV_HUGEPAGE);
}

HostMemory::~HostMemory() {
  if (mapped_) ::munmap(mapping_, mapped_);
}

}  // namespace sherd::offload
