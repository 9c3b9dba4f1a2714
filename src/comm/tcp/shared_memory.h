#pragma once

#include <cstddef>

#include "comm/tcp/socket.h"

namespace sherd::comm {

/// Memory of this process that other processes of the machine can map while `file` is open. It has no name,
/// so that nothing is left behind however a process ends, and does not count against /dev/shm.
struct SharedMemory {
  FileDescriptor file;  ///< empty, with errno, where the system does not give any
  std::byte* data = nullptr;
};
SharedMemory make_shared_memory(std::size_t bytes);

/// Maps what another process of this machine and user holds open as `descriptor`. Null, with errno, where
/// that cannot be. The mapping stays until unmap() or the process ends.
std::byte* map_memory_of(long long pid, int descriptor, std::size_t bytes);
void unmap(std::byte* data, std::size_t bytes);

}  // namespace sherd::comm
