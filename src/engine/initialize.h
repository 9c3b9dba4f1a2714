#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "data/dataset.h"
#include "engine/engine.h"
#include "engine/model_source.h"
#include "engine/setup/process_grid.h"
#include "engine/update/parameter_groups.h"

namespace sherd {

/// Where a configuration comes from: a file, several files of which later ones add sections, or one made in
/// code.
class ConfigSource {
 public:
  ConfigSource(const char* path) : ConfigSource(std::vector<std::string>{path}) {}             // NOLINT
  ConfigSource(const std::string& path) : ConfigSource(std::vector<std::string>{path}) {}      // NOLINT
  ConfigSource(const std::vector<std::string>& paths) : value_(config::parse_files(paths)) {}  // NOLINT
  ConfigSource(config::Config config) : value_(std::move(config)) {}                           // NOLINT
  const config::Config& value() const { return value_; }

 private:
  config::Config value_;
};

struct InitializeOptions {
  DistributedPtr dist;
  ModelSource model;
  ConfigSource config;
  /// Samples for the loader; without it, the config's `data` section is read as packed tokens where there is
  /// one.
  std::shared_ptr<const data::Dataset> training_data = nullptr;
  data::SampleLoaderOptions loader_options = {};
  /// Follow `optimizer.groups` of the configuration, and become such: Engine::config() has them by the
  /// parameters' names, and checkpoints with it.
  std::vector<ParameterGroup> parameter_groups = {};
  /// Groups of the caller's own, with which it may have built the model (DeepSpeed's mpu); null: made as
  /// section `parallel` says (make_groups()). Its sizes must not contradict those of a configuration.
  std::shared_ptr<comm::ProcessGroups> grid = nullptr;
};

/// The results of initialize(), in DeepSpeed's order. The loader is null without training data, the scheduler
/// without a `scheduler` section. The engine owns everything that runs; the others must not outlive it.
struct Initialized {
  std::unique_ptr<Engine> engine;
  std::shared_ptr<engine::Optimizer> optimizer;
  std::unique_ptr<data::Loader> loader;
  std::shared_ptr<engine::Scheduler> scheduler;
};

/// Shards the model over the ranks of `dist` as the config says, and makes the engine that trains it.
/// Collective. Throws Error{config} on every rank where one was given another configuration or other training
/// data (by their number) than rank 0; for data whose last batch a pipeline could not take (set drop_last);
/// and for parameter groups that no section `optimizer` could have, or with parameters that are not the
/// model's.
///
///     auto [engine, optimizer, loader, scheduler] =
///         sherd::initialize({.dist = dist, .model = model, .config = "c.json"});
Initialized initialize(const InitializeOptions& options);

}  // namespace sherd
