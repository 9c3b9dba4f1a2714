#pragma once

#include "comm/communicator.h"

namespace sherd::sharding {

/// The ranks that share one kind of parameters. The states of a parameter are sharded over `shard`; every
/// rank of `replica` holds the same shard as this one (hybrid sharding: Zhang et al. 2022, MiCS). Replicas
/// agree by exchanging sums of gradients once per step. Refers to communicators that somebody else owns.
struct ParameterGroups {
  comm::Communicator* shard = nullptr;
  comm::Communicator* replica = nullptr;  ///< null: nobody else holds this rank's shard

  ParameterGroups() = default;
  ParameterGroups(comm::Communicator& shard_group, comm::Communicator* replica_group = nullptr)
      : shard(&shard_group), replica(replica_group && replica_group->size() > 1 ? replica_group : nullptr) {}

  int shards() const { return shard->size(); }
  int replicas() const { return replica ? replica->size() : 1; }
  /// Which of the replicas this rank belongs to.
  int replica_index() const { return replica ? replica->rank() : 0; }
  bool operator==(const ParameterGroups&) const = default;
};

}  // namespace sherd::sharding
