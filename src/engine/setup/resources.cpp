#include "engine/setup/resources.h"

#include <filesystem>

#include "engine/report/trace.h"
#include "engine/setup/make_device.h"
#include "engine/setup/process_grid.h"

namespace sherd::engine {
namespace {

std::shared_ptr<offload::Store> open_store(const config::Config& config, const std::string& folder, int rank,
                                           device::Device& device) {
  offload::StoreOptions options;
  options.folder = folder;
  options.rank = rank;
  options.block_size = static_cast<std::size_t>(config.aio.block_size);
  options.queue_depth = static_cast<int>(config.aio.queue_depth);
  options.single_submit = config.aio.single_submit;
  options.overlap_events = config.aio.overlap_events;
  options.thread_count = static_cast<int>(config.aio.thread_count);
  options.checksums = config.aio.checksums;
  options.backend = static_cast<offload::StoreOptions::Backend>(config.aio.backend);
  options.timeout_seconds = config.parallel.timeout_seconds;
  options.dry = device.kind() == device::Kind::meta;
  return std::make_shared<offload::Store>(options, device.ledger());
}

bool same_folder(const std::string& a, const std::string& b) {
  return std::filesystem::weakly_canonical(a) == std::filesystem::weakly_canonical(b);
}

}  // namespace

Resources::Resources(Distributed& dist, config::Config& config, std::shared_ptr<device::Device> device,
                     std::unique_ptr<tensor::Kernels> kernels, std::shared_ptr<comm::ProcessGroups> groups)
    : device_(device ? std::move(device) : make_device(config, dist)),
      groups_(std::move(groups)),
      kernels_(std::move(kernels)) {
  if (device_->kind() != device::Kind::meta) require_same_setup(config, dist);  // absent ranks tell nothing
  if (!groups_) {
    groups_ = std::make_shared<comm::ProcessGroups>(dist.world(),
                                                    comm::Grid(dist.world_size(), grid_sizes(config)));
    require_takes_layout(false, *groups_);
  }
  require(&groups_->world() == &dist.world(), "the groups that an engine is given are of its own world");
  adopt_grid(config, groups_->grid());
  config.batch = config::resolve_batch(config, groups_->grid().size(comm::Axis::data));
  device_->ledger().set_limit(device::Tier::device, config.device.device_memory_limit);
  device_->ledger().set_limit(device::Tier::host, config.device.host_memory_limit);
  groups_->bind(device_);
  if (!kernels_) kernels_ = make_kernels(config, *device_);
  open_stores(config, dist.rank());
}

void Resources::open_stores(const config::Config& config, int rank) {
  const config::Offload &parameters = config.zero.offload_param, &optimizer = config.zero.offload_optimizer;
  if (parameters.device == config::OffloadDevice::nvme)
    parameter_store_ = open_store(config, parameters.nvme_path, rank, *device_);
  if (optimizer.device == config::OffloadDevice::nvme)
    optimizer_store_ = parameter_store_ && same_folder(optimizer.nvme_path, parameters.nvme_path)
                           ? parameter_store_
                           : open_store(config, optimizer.nvme_path, rank, *device_);
  if (!config.training.nvme_checkpointing || config.training.recompute != Recompute::full) return;
  activation_store_ = parameter_store_ ? parameter_store_ : optimizer_store_;
  if (!activation_store_)
    activation_store_ = open_store(
        config, parameters.nvme_path.empty() ? optimizer.nvme_path : parameters.nvme_path, rank, *device_);
}

sharding::StateSources Resources::sources(const StateGroups& groups_of) const {
  sharding::StateSources sources{{groups_->group(comm::Axis::shard), &groups_->group(comm::Axis::replica)},
                                 *kernels_,
                                 parameter_store_.get(),
                                 optimizer_store_.get()};
  sources.model_ranks = &groups_->world();
  sources.groups_of = [groups_of](const autograd::Parameter& parameter) { return groups_of.of(parameter); };
  return sources;
}

void Resources::set_trace(Trace* trace) {
  std::function<void(const offload::TransferTime&)> observer;
  if (trace) observer = [trace](const offload::TransferTime& time) { trace->transferred(time); };
  for (const auto& store : {parameter_store_, optimizer_store_, activation_store_})
    if (store) store->set_observer(observer);
  if (trace || trace_) device::observe_ranges(trace);
  trace_ = trace;
}

IoBytes Resources::io_bytes() const {
  IoBytes out;
  const auto add = [&](const offload::Store& store) {
    out.read += store.bytes_read(), out.written += store.bytes_written(),
        out.bounced += store.bytes_bounced();
  };
  if (parameter_store_) add(*parameter_store_);
  if (optimizer_store_ && optimizer_store_ != parameter_store_) add(*optimizer_store_);
  if (activation_store_ && !parameter_store_ && !optimizer_store_) add(*activation_store_);
  return out;
}

}  // namespace sherd::engine
