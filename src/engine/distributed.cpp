#include "engine/distributed.h"

#include <charconv>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "base/arena.h"
#include "base/log.h"
#include "base/text/excerpt.h"
#include "engine/report/flight_file.h"

namespace sherd {
namespace {

int positive_int(std::string_view text, std::string_view what) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 1)
    fail(ErrorKind::usage, what, " needs a whole number of at least 1, not '", excerpt(text), "'");
  return value;
}

/// 0: nobody did.
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
  return from_environment && *from_environment ? positive_int(from_environment, "SHERD_RANKS") : 0;
}

bool launched() {
  return comm::launcher() != comm::Launcher::none;
}

void refuse_other(int asked, int started) {
  if (asked == 0 || started == 0 || asked == started) return;
  const bool mpi = comm::launcher() == comm::Launcher::mpi;
  fail(ErrorKind::usage, counted(asked, "rank"), asked == 1 ? " was" : " were",
       " asked for (--ranks or SHERD_RANKS), but ",
       mpi ? "the MPI launcher" : "the launcher (WORLD_SIZE in the environment)", " started ", started,
       ": leave --ranks out to take the launcher's, or ",
       mpi ? "start without mpirun" : "unset RANK and WORLD_SIZE", " for ranks inside this process");
}

DistributedPtr join(const comm::CommOptions& options) {
  comm::LaunchedWorld joined = comm::join_launched_world(options);
  return std::make_shared<Distributed>(std::move(joined.world), joined.local_rank, joined.local_size);
}

/// run_local lends its communicator for the length of the body only.
std::shared_ptr<comm::Communicator> borrow(comm::Communicator& communicator) {
  return {std::shared_ptr<void>(), &communicator};
}

}  // namespace

Distributed::Distributed(std::shared_ptr<comm::Communicator> world, int local_rank, int local_size)
    : world_(std::move(world)), local_rank_(local_rank), local_size_(local_size) {
  engine::write_flight_on_failure(*world_, "");  // where the environment says; an engine knows its save_dir
}

void check_launched_ranks(int ranks) {
  if (launched()) refuse_other(ranks, comm::launched_ranks());
}

DistributedPtr init_distributed(int argc, char** argv, const comm::CommOptions& options) {
  if (!launched()) return std::make_shared<Distributed>(comm::make_self(options), 0, 1);
  const int asked = ranks_asked_for(argc, argv);
  check_launched_ranks(asked);
  DistributedPtr dist = join(options);
  refuse_other(asked, dist->world_size());
  return dist;
}

void launch_ranks(int ranks, const std::function<void(DistributedPtr)>& body,
                  const comm::CommOptions& options) {
  if (!launched()) {
    const int count = ranks == 0 ? 1 : ranks;
    return comm::run_local(count, options, [&](comm::Communicator& communicator) {
      set_flush_denormals();
      body(std::make_shared<Distributed>(borrow(communicator), communicator.rank(), count));
    });
  }
  check_launched_ranks(ranks);
  const DistributedPtr dist = join(options);
  ThreadRank named(dist->rank());
  set_flush_denormals();
  try {
    refuse_other(ranks, dist->world_size());
    body(dist);
  } catch (const std::exception& error) {
    dist->world().abort(error.what());
    throw;
  }
}

int launch(int argc, char** argv, const std::function<void(DistributedPtr)>& body,
           const comm::CommOptions& options) {
  try {
    launch_ranks(ranks_asked_for(argc, argv), body, options);
    return 0;
  } catch (const std::exception& error) {
    log_line(LogLevel::error, error.what());
    return 1;
  }
}

}  // namespace sherd
