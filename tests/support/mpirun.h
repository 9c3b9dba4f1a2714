#pragma once

#include <string>

#include "base/error.h"

namespace sherd::testing {

/// The start of a shell command line that runs a program on `ranks` MPI ranks of this machine; `options` go
/// to mpirun. Containers run tests as root, on fewer cores than ranks. AddressSanitizer, where it is in,
/// walks whole stacks, so that tests/lsan.supp can tell OpenMPI's leaks from ours.
inline std::string mpirun(int ranks, const std::string& options = "") {
  return cat("env OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 ",
             "ASAN_OPTIONS=\"$ASAN_OPTIONS:fast_unwind_on_malloc=0\" mpirun --oversubscribe --bind-to none ",
             options, " -n ", ranks, ' ');
}

}  // namespace sherd::testing
