#include "engine/distributed.h"

#include <charconv>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "base/arena.h"
#include "base/log.h"

namespace sherd {
namespace {

int positive_int(std::string_view text, std::string_view what) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 1)
    fail(ErrorKind::usage, what, " needs a whole number of at least 1, not '", text, "'");
  return value;
}

int ranks_asked_for(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    const std::string_view arg = argv[i];
    if (arg == "--ranks") {
      if (i + 1 == argc) fail(ErrorKind::usage, "--ranks needs a number");
      return positive_int(argv[i + 1], "--ranks");
    }
    if (arg.starts_with("--ranks=")) return positive_int(arg.substr(8), "--ranks");
  }
  const char* from_environment = std::getenv("SHERD_RANKS");
  return from_environment && *from_environment ? positive_int(from_environment, "SHERD_RANKS") : 1;
}

/// Ranks of an MPI job on this machine, as its launcher tells; all of them where it does not.
int launcher_local_size(int world) {
  for (const char* name : {"OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"})
    if (const char* value = std::getenv(name)) return positive_int(value, name);
  return world;
}

DistributedPtr join_mpi(const comm::CommOptions& options) {
  std::shared_ptr<comm::Communicator> world = comm::make_mpi_world(options);
  const int size = world->size();
  return std::make_shared<Distributed>(std::move(world), launcher_local_size(size));
}

/// run_local lends its communicator for the length of the body only.
std::shared_ptr<comm::Communicator> borrow(comm::Communicator& communicator) {
  return {std::shared_ptr<void>(), &communicator};
}

}  // namespace

DistributedPtr init_distributed(int, char**, const comm::CommOptions& options) {
  if (comm::launched_by_mpi()) return join_mpi(options);
  return std::make_shared<Distributed>(comm::make_self(options), 1);
}

void launch_ranks(int ranks, const std::function<void(DistributedPtr)>& body, const comm::CommOptions& options) {
  if (!comm::launched_by_mpi())
    return comm::run_local(ranks, options, [&](comm::Communicator& communicator) {
      set_flush_denormals();
      body(std::make_shared<Distributed>(borrow(communicator), ranks));
    });
  const DistributedPtr dist = join_mpi(options);
  ThreadRank named(dist->rank());
  try {
    body(dist);
  } catch (const std::exception& error) {
    dist->world().abort(error.what());
    throw;
  }
}

int launch(int argc, char** argv, const std::function<void(DistributedPtr)>& body, const comm::CommOptions& options) {
  try {
    launch_ranks(comm::launched_by_mpi() ? 1 : ranks_asked_for(argc, argv), body, options);
    return 0;
  } catch (const std::exception& error) {
    log_line(LogLevel::error, error.what());
    return 1;
  }
}

}  // namespace sherd
