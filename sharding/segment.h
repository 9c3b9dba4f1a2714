#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "sharding/layout.h"
#include "sharding/placement.h"

namespace sherd::sharding {

using tensor::Tensor;

/// A lasting tensor of model state whose alignment padding is listed apart on the ledger.
class StateBuffer {
 public:
  StateBuffer() = default;
  /// Takes over `tensor`, of which the ledger holds all bytes under `category`, and books `padding_bytes` of it as
  /// padding.
  StateBuffer(device::Device& device, Tensor tensor, device::Category category, std::uint64_t padding_bytes);
  ~StateBuffer();
  StateBuffer(StateBuffer&& other) noexcept;
  StateBuffer& operator=(StateBuffer&& other) noexcept;

  const Tensor& tensor() const { return tensor_; }
  explicit operator bool() const { return tensor_.defined(); }

 private:
  device::Device* device_ = nullptr;
  Tensor tensor_;
  device::Category category_ = device::Category::parameters;
  std::uint64_t padding_ = 0;
};

/// Exchange buffers for gathered parameters and gradients on their way, kept for reuse by size. Peers can reach them.
/// All ranks take and give back in the same order, since allocating is a collective. Used from the rank's thread.
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

/// What parameters of one flat segment have in common.
struct SegmentKey {
  bool trainable = true;
  bool persistent = false;  ///< stays gathered although parameters are sharded (param_persistence_threshold)
  bool operator==(const SegmentKey&) const = default;
};

/// A flat run of parameters of one unit with all model states that this rank holds of it.
class Segment {
 public:
  /// Collective over `group` where memory is shared with peers. Draws the initial values of what this rank holds.
  Segment(std::string name, SegmentKey key, std::vector<ParameterPtr> parameters, const PlacementTable& table,
          int moments, std::uint64_t seed, comm::Communicator& group, tensor::Kernels& kernels);

  const std::string& name() const { return name_; }
  const SegmentKey& key() const { return key_; }
  const SegmentLayout& layout() const { return layout_; }
  bool parameters_sharded() const { return parameters_sharded_; }
  bool gradients_sharded() const { return gradients_sharded_; }
  /// Every rank updates the whole segment, and so needs the whole sum of gradients.
  bool optimizer_replicated() const { return !optimizer_sharded_; }
  /// Updated shards have to be gathered into the full parameters.
  bool gather_after_update() const { return gather_after_update_; }

  /// This rank's part of the flat segment.
  std::int64_t own_begin() const { return own_begin_; }
  std::int64_t own_end() const { return own_begin_ + layout_.shard(); }
  /// The part that this rank's optimizer updates: its own, or all where optimizer states are replicated.
  std::int64_t update_begin() const { return optimizer_sharded_ ? own_begin_ : 0; }
  std::int64_t update_end() const { return optimizer_sharded_ ? own_end() : layout_.padded(); }

  /// Compute parameters: the whole segment where replicated, else this rank's shard.
  const Tensor& parameters() const { return parameters_.tensor(); }
  /// This rank's shard of the compute parameters, wherever it lies.
  Tensor own_parameters() const;
  /// Compute parameters of [update_begin, update_end).
  Tensor updated_parameters() const;
  /// Lasting gradients: whole or shard; undefined when frozen.
  const Tensor& gradients() const { return gradients_.tensor(); }
  Tensor own_gradients() const;
  /// Gradients of [update_begin, update_end).
  Tensor update_gradients() const;
  /// fp32 weights of [update_begin, update_end); the parameters themselves where those are fp32.
  Tensor masters() const;
  bool separate_masters() const { return static_cast<bool>(masters_); }
  /// Optimizer tensors of [update_begin, update_end), fp32, zero at first.
  const std::vector<StateBuffer>& moments() const { return moments_; }

  /// Points the parameters' values into `full` (a flat tensor of the padded segment), or clears them.
  void attach_values(const Tensor& full);
  void detach_values();
  /// Points the trainable parameters' gradients into `full`.
  void attach_gradients(const Tensor& full);
  /// Zeroes what no operation wrote, and clears the parameters' gradients.
  void close_gradients();
  /// Copies masters into the compute parameters of the update range, rounded as masters are.
  void round_masters(tensor::Kernels& kernels);

 private:
  StateBuffer make(device::Category category, DType dtype, bool sharded, bool shared, comm::Communicator& group);
  void draw_initial_values(std::uint64_t seed, tensor::Kernels& kernels);

  std::string name_;
  SegmentKey key_;
  SegmentLayout layout_;
  bool parameters_sharded_, gradients_sharded_, optimizer_sharded_, gather_after_update_;
  std::int64_t own_begin_;
  device::Device& device_;
  StateBuffer parameters_, gradients_, masters_;
  std::vector<StateBuffer> moments_;
};

/// Rounds fp32 masters to `to`'s dtype: bf16 to nearest with ties away from zero, fp16 to nearest even, fp32 as is.
void round_masters(const Tensor& masters, const Tensor& to, Arena& arena);

}  // namespace sherd::sharding
