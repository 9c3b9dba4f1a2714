#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "autograd/parameter.h"
#include "comm/communicator.h"
#include "offload/store.h"
#include "tensor/kernels.h"

namespace sherd::sharding {

using tensor::Tensor;

/// The ranks that share one kind of parameters. The states of a parameter are sharded over `shard`; every
/// rank of `replica` holds the same shard as this one (hybrid sharding: Zhang et al. 2022, MiCS). Replicas
/// agree by exchanging sums of gradients once per step. Refers to communicators that somebody else owns.
struct RankGroups {
  comm::Communicator* shard = nullptr;
  comm::Communicator* replica = nullptr;  ///< null: nobody else holds this rank's shard
  /// Ranks that hold the same shard too, and find the same gradients by themselves: tensor-parallel ranks, of
  /// a parameter that is not cut. They exchange nothing. Null: there are none.
  comm::Communicator* copies = nullptr;
  /// Ranks that together hold all of a parameter that tensor ranks cut: the tensor ranks of each shard, one
  /// shard after the other. Null: the shard group does.
  comm::Communicator* whole = nullptr;
  /// Each rank of the shard group finds the gradients of so many ranks' micro-batches, its own among them;
  /// for experts these are the ranks with which it exchanges tokens. They are summed apart, in their order,
  /// where sums have the order of micro-batches.
  int sources = 1;
  /// Replicas are of different stages of a pipeline, too, each of which finds a part of every micro-batch's
  /// gradient: they add their own sums, and never go on from each other's.
  bool over_stages = false;

  RankGroups() = default;
  RankGroups(comm::Communicator& shard_group, comm::Communicator* replica_group = nullptr,
             comm::Communicator* copy_group = nullptr)
      : shard(&shard_group), replica(several(replica_group)), copies(several(copy_group)) {}

  int shards() const { return shard->size(); }
  /// The ranks that together hold whole parameters.
  comm::Communicator& holders_of_all() const { return whole ? *whole : *shard; }
  /// One rank finds the whole gradient, of however many sources.
  bool alone() const { return shards() == 1 && !replica; }
  int replicas() const { return replica ? replica->size() : 1; }
  /// Which of the replicas this rank belongs to.
  int replica_index() const { return replica ? replica->rank() : 0; }
  /// How many ranks hold the same shard, replicas and copies, and which of them this one is: what is to be
  /// counted or written once is the first one's, or divided among them.
  int holders() const { return replicas() * (copies ? copies->size() : 1); }
  int holder() const { return copies ? replica_index() * copies->size() + copies->rank() : replica_index(); }
  bool operator==(const RankGroups&) const = default;

 private:
  static comm::Communicator* several(comm::Communicator* group) {
    return group && group->size() > 1 ? group : nullptr;
  }
};

/// The groups, kernels and stores that lasting states are made from. Everything must outlive them.
struct StateSources {
  RankGroups groups;  ///< for each parameter about which `groups_of` says nothing else
  tensor::Kernels& kernels;
  offload::Store* parameter_store = nullptr;  ///< for parameters on NVMe
  offload::Store* optimizer_store = nullptr;  ///< for masters and moments on NVMe
  /// All ranks that hold parts of the model, over which norms are summed. Null: those of groups.shard.
  comm::Communicator* model_ranks = nullptr;
  /// The groups of each parameter, for models whose parameters lie on different ranks (those that tensor
  /// ranks cut, those that all hold, experts'); null: `groups` for all.
  std::function<RankGroups(const autograd::Parameter&)> groups_of = nullptr;
};

/// One kind of model state of a segment, in whatever tier it lives: elements [begin, end) of the segment's
/// flat layout. All positions are flat indices of the segment. The alignment padding among them is listed
/// apart on the ledger.
class StateBuffer {
 public:
  StateBuffer() = default;
  /// Takes over memory of the device or host tier, of which the ledger holds all bytes under `category`, and
  /// charges `padding_bytes` of it as padding.
  StateBuffer(device::Device& device, Tensor tensor, std::int64_t begin, device::Tier tier,
              device::Category category, std::uint64_t padding_bytes);
  /// Reserves a span of zeros for `numel` elements on NVMe.
  StateBuffer(device::Device& device, offload::Store& store, std::string name, std::int64_t begin,
              std::int64_t numel, DType dtype, device::Category category, std::uint64_t padding_bytes);
  StateBuffer(StateBuffer&&) noexcept = default;
  /// Only an empty buffer may be assigned to: memory that it held would be freed before its padding.
  StateBuffer& operator=(StateBuffer&&) noexcept = default;

  explicit operator bool() const { return device_ != nullptr; }
  device::Tier tier() const { return tier_; }
  bool stored() const { return tier_ == device::Tier::nvme; }
  /// The store that holds it; null for a state in memory.
  const offload::Store* store() const { return store_; }
  DType dtype() const { return dtype_; }
  std::int64_t begin() const { return begin_; }
  std::int64_t end() const { return begin_ + numel_; }

  /// The whole state, or elements [begin, end) of it, in memory. Throws Error{usage} when it is stored on
  /// NVMe.
  const Tensor& tensor() const;
  Tensor range(std::int64_t begin, std::int64_t end) const;

  /// Starts to copy elements from `begin` on into `to`, which has this state's dtype, or from `from`; in
  /// memory it is done on return. The tensors must live until the Io is done, and lie where the processor
  /// reads and writes (Device::processor_tier).
  offload::Io read(std::int64_t begin, const Tensor& to) const;
  offload::Io write(std::int64_t begin, const Tensor& from);
  /// `count` elements of a stored state as they are now, to be read later (Store::defer_read()).
  offload::DeferredRead defer_read(std::int64_t begin, std::int64_t count) const;

 private:
  void check(std::int64_t begin, const Tensor& other) const;
  void check(std::int64_t begin, std::int64_t count, DType dtype) const;
  void move(std::byte* to, const std::byte* from, std::size_t bytes) const;

  device::Device* device_ = nullptr;
  device::Tier tier_ = device::Tier::device;
  DType dtype_ = DType::f32;
  std::int64_t begin_ = 0, numel_ = 0;
  Tensor tensor_;
  offload::Store* store_ = nullptr;
  offload::Span span_;
  std::shared_ptr<void> padding_;  ///< its bytes on the ledger; last, so that they go back first
};

/// Exchange buffers for gathered parameters and gradients on their way, kept for reuse by size. Peers can
/// reach them. All ranks take and give back in the same order, since allocating is a collective. Used from
/// the rank's thread.
class ExchangePool {
 public:
  ExchangePool(comm::Communicator& group, device::Device& device) : group_(group), device_(device) {}
  /// A flat tensor of `numel` elements, back in the pool when the last holder lets go of the pointer.
  std::shared_ptr<const Tensor> take(std::int64_t numel, DType dtype);

 private:
  struct Shelf {
    std::vector<std::pair<std::size_t, device::Storage>> free;
  };
  comm::Communicator& group_;
  device::Device& device_;
  std::shared_ptr<Shelf> shelf_ = std::make_shared<Shelf>();
};

}  // namespace sherd::sharding
