#pragma once

#include <memory>

#include "comm/process_groups.h"
#include "engine/engine.h"
#include "engine/setup/process_grid.h"

// This folder makes what an engine stands on, on one rank.
//
//   resources.h      all of it: device, kernels, groups, stores on NVMe
//   make_device.h    which device and kernels a configuration describes; which of a machine's GPUs a rank
//                    takes, and which ranks share one
//   process_grid.h   how ranks form groups by axis (data, tensor, pipeline, expert, …); how the parts of a
//                    model lie on pipeline stages and slices on tensor ranks, as all ranks agree;
//                    StateGroups: who shares the states of a parameter, and who sums its gradient;
//                    require_same(): refuses ranks whose configurations differ

namespace sherd::engine {

/// All that an engine computes, exchanges and stores with: device, kernels, the groups of this rank and the
/// stores on NVMe. One per engine.
class Resources {
 public:
  /// Collective. As Engine's constructor; `config` gets its batch sizes resolved, and sizes that a grid of
  /// the caller's own has.
  Resources(Distributed& dist, config::Config& config, std::shared_ptr<device::Device> device,
            std::unique_ptr<tensor::Kernels> kernels, std::shared_ptr<comm::ProcessGroups> groups);
  ~Resources() { set_trace(nullptr); }
  Resources(const Resources&) = delete;
  Resources& operator=(const Resources&) = delete;

  device::Device& device() const { return *device_; }
  const std::shared_ptr<device::Device>& shared_device() const { return device_; }
  tensor::Kernels& kernels() const { return *kernels_; }
  comm::ProcessGroups& groups() const { return *groups_; }
  /// The sources of the states of a model whose parameters lie as `groups_of` says.
  sharding::StateSources sources(const StateGroups& groups_of) const;
  /// The store of activations on NVMe; null where none go there.
  offload::Store* activation_store() const { return activation_store_.get(); }
  IoBytes io_bytes() const;
  /// Is told of all transfers of NVMe, and of this thread's ranges; null: nobody.
  void set_trace(Trace* trace);

 private:
  void open_stores(const config::Config& config, int rank);

  std::shared_ptr<device::Device> device_;
  std::shared_ptr<comm::ProcessGroups> groups_;
  std::unique_ptr<tensor::Kernels> kernels_;
  /// The stores on NVMe: null where nothing lies there, and the same one where several share a folder.
  std::shared_ptr<offload::Store> parameter_store_, optimizer_store_, activation_store_;
  Trace* trace_ = nullptr;
};

}  // namespace sherd::engine
