#pragma once

#include <string>

#include "base/error.h"

namespace sherd::testing {

/// For the environment of programs that start MPI: AddressSanitizer, where it is in, walks whole stacks, so
/// that tests/lsan.supp can tell OpenMPI's leaks from ours.
inline const std::string of_mpi = "ASAN_OPTIONS=\"$ASAN_OPTIONS:fast_unwind_on_malloc=0\" ";

/// The start of a shell command line that runs a program on `ranks` MPI ranks of this machine; `options` go
/// to mpirun. Containers run tests as root, on fewer cores than ranks.
inline std::string mpirun(int ranks, const std::string& options = "") {
  return cat("env OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 ", of_mpi,
             "mpirun --oversubscribe --bind-to none ", options, " -n ", ranks, ' ');
}

}  // namespace sherd::testing
