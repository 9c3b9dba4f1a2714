#pragma once

#include <functional>
#include <memory>

#include "comm/communicator.h"

namespace sherd {

/// One rank's place among the others. Owns nothing that outlives launch() or, under mpirun, the process's MPI
/// session.
class Distributed {
 public:
  /// `local_size`: ranks on this machine, which share its cores and GPUs; `local_rank`: this one's place
  /// among them.
  Distributed(std::shared_ptr<comm::Communicator> world, int local_rank, int local_size);
  int rank() const { return world_->rank(); }
  int world_size() const { return world_->size(); }
  int local_rank() const { return local_rank_; }
  int local_size() const { return local_size_; }
  comm::Communicator& world() const { return *world_; }

 private:
  std::shared_ptr<comm::Communicator> world_;
  int local_rank_, local_size_;
};
using DistributedPtr = std::shared_ptr<Distributed>;

/// Joins the launcher's ranks: MPI's where mpirun or srun started this process, those that meet as RANK,
/// WORLD_SIZE, MASTER_ADDR and MASTER_PORT say where torchrun or the like did (comm::Launcher); else a world
/// of one. Throws Error{usage} where `--ranks N` among the arguments, or the environment's SHERD_RANKS, says
/// another number than the launcher.
DistributedPtr init_distributed(int argc, char** argv, const comm::CommOptions& options = {});

/// Runs `body` once per rank and returns when all have ended: under a launcher on its ranks, else on as many
/// threads of this process as `--ranks N` among the arguments, or the environment's SHERD_RANKS, says (1
/// without either). Returns 0, or prints the first error as one line and returns 1.
int launch(int argc, char** argv, const std::function<void(DistributedPtr)>& body,
           const comm::CommOptions& options = {});

/// The same with the number of ranks given, 0 where nobody asked for one: then it is the launcher's, or 1.
/// Errors are thrown, after peers were told.
void launch_ranks(int ranks, const std::function<void(DistributedPtr)>& body,
                  const comm::CommOptions& options = {});

/// Throws Error{usage} where `ranks` is neither 0 nor the number that the launcher says it started.
void check_launched_ranks(int ranks);

}  // namespace sherd
