#pragma once

#include <functional>
#include <memory>

#include "comm/communicator.h"

namespace sherd {

/// One rank's place among the others. Owns nothing that outlives launch() or the process's MPI session.
class Distributed {
 public:
  /// `local_size`: ranks on this machine, which share its cores.
  Distributed(std::shared_ptr<comm::Communicator> world, int local_size)
      : world_(std::move(world)), local_size_(local_size) {}
  int rank() const { return world_->rank(); }
  int world_size() const { return world_->size(); }
  int local_size() const { return local_size_; }
  comm::Communicator& world() const { return *world_; }

 private:
  std::shared_ptr<comm::Communicator> world_;
  int local_size_;
};
using DistributedPtr = std::shared_ptr<Distributed>;

/// Joins the launcher's ranks: MPI's where mpirun or srun started this process, else a world of one.
DistributedPtr init_distributed(int argc, char** argv, const comm::CommOptions& options = {});

/// Runs `body` once per rank and returns when all have ended: under an MPI launcher on its ranks, else on as many threads
/// of this process as `--ranks N` among the arguments, or the environment's SHERD_RANKS, says (1 without either). Returns
/// 0, or prints the first error as one line and returns 1.
int launch(int argc, char** argv, const std::function<void(DistributedPtr)>& body,
           const comm::CommOptions& options = {});

/// The same with the number of local ranks given, which a launcher's ranks overrule; errors are thrown, after peers were
/// told.
void launch_ranks(int ranks, const std::function<void(DistributedPtr)>& body, const comm::CommOptions& options = {});

}  // namespace sherd
