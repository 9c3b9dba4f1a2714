#include "comm/tcp/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "base/error.h"

namespace sherd::comm {
namespace {

std::byte* map(int file, std::size_t bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  return data == MAP_FAILED ? nullptr : static_cast<std::byte*>(data);
}

}  // namespace

SharedMemory make_shared_memory(std::size_t bytes) {
  SharedMemory out;
  out.file = FileDescriptor(memfd_create("sherd", MFD_CLOEXEC));
  if (out.file && ftruncate(out.file.get(), static_cast<off_t>(bytes)) == 0)
    out.data = map(out.file.get(), bytes);
  if (!out.data) {
    const int why = errno;
    out.file = FileDescriptor();
    errno = why;
  }
  return out;
}

std::byte* map_memory_of(long long pid, int descriptor, std::size_t bytes) {
  const FileDescriptor file(open(cat("/proc/", pid, "/fd/", descriptor).c_str(), O_RDWR | O_CLOEXEC));
  if (!file) return nullptr;
  struct stat found {};
  if (fstat(file.get(), &found) != 0) return nullptr;
  if (!S_ISREG(found.st_mode) || found.st_size != static_cast<off_t>(bytes)) {
    errno = ESTALE;  // not the process that was meant
    return nullptr;
  }
  return map(file.get(), bytes);
}

void unmap(std::byte* data, std::size_t bytes) {
  munmap(data, bytes);
}

}  // namespace sherd::comm
