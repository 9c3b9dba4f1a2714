#include "planning/changes.h"

#include <algorithm>

#include "base/error.h"
#include "engine/estimate/step_time.h"
#include "engine/pipeline/train_schedule.h"
#include "engine/setup/process_grid.h"

namespace sherd::planning {

Change GradedChange::by(std::int64_t number) const {
  Change change = each;
  change.slow_down *= static_cast<double>(number - least + 1);
  change.keys.emplace_back(key, std::to_string(number));
  return change;
}

Prices::Prices(const Reparse& reparse, std::int64_t vocabulary, const World& world,
               const config::Machine& machine)
    : reparse_(reparse),
      machine_(machine.with_devices(world.local_ranks)),
      ranks_(world.ranks),
      work_(vocabulary) {
  before_ = seconds({});
}

double Prices::slow_down(const Keys& keys) {
  if (!known()) return 0;
  return std::max(0.0, seconds(keys) / before_ - 1);
}

double Prices::seconds(const Keys& keys) {
  try {
    const config::Config config = as_run_on(machine_, reparse_(Remedy{keys, {}}.overrides()), ranks_);
    return engine::step_time(config, work_.of(config), machine_, ranks_).seconds;
  } catch (const Error&) {
    return never;
  }
}

std::vector<Change> Changes::by_price() const {
  std::vector<Change> out = all;
  std::stable_sort(out.begin(), out.end(),
                   [](const Change& a, const Change& b) { return a.slow_down < b.slow_down; });
  return out;
}

namespace {

/// Lists the changes, in the order of their reach.
class ChangeList {
 public:
  ChangeList(const config::Config& config, const World& world, bool room_is_known, Prices& prices)
      : config_(config),
        ranks_(world.ranks),
        local_ranks_(world.local_ranks),
        room_is_known_(room_is_known),
        prices_(prices),
        optimizer_(config.zero.offload_optimizer.device),
        parameters_(config.zero.offload_param.device) {
    states_back();
    checkpoints();
    stage_to(1, "optimizer states are sharded");
    buckets();
    stage_to(2, "gradients are sharded too");
    recompute_activations();
    optimizer_to_host();
    micro_batches();
    model_ranks();
    stage_to(3, "parameters are sharded too");
    parameters_to_host();
    recompute_blocks();
    part_of_recompute();
    states_to_nvme();
  }
  Changes take() { return std::move(changes_); }

 private:
  static std::string zero(const char* key) { return cat("zero_optimization.", key); }
  std::pair<std::string, std::string> stage(int least) const {
    return {zero("stage"), std::to_string(std::max(config_.zero.stage, least))};
  }
  void add(std::string reason, Keys keys) {
    const double slow_down = prices_.slow_down(keys);
    changes_.all.push_back({slow_down, std::move(reason), std::move(keys)});
  }
  /// A change that makes a step faster if anything, where there is room.
  void back(std::string reason, std::pair<std::string, std::string> key) {
    changes_.all.push_back({0, std::move(reason), {std::move(key)}, true});
  }

  void checkpoints() {
    if (config_.training.save_async && !config_.training.save_dir.empty())
      add("checkpoints are written while training waits", {{"training.save_async", "false"}});
    if (config_.training.local_save_interval > 0 && !config_.training.save_dir.empty())
      add("no local checkpoints are kept", {{"training.local_save_interval", "0"}});
  }

  /// Lowers what waits to be reduced, and what is gathered ahead; at lower stages they matter once others of
  /// the changes are made.
  void buckets() {
    if (ranks_ > 1)
      for (const std::int64_t bucket : {50'000'000, 5'000'000, 500'000})
        if (config_.zero.reduce_bucket_size > bucket)
          add("gradients leave in smaller buckets", {{zero("reduce_bucket_size"), std::to_string(bucket)}});
    if (config_.zero.max_reuse_distance > 0)
      add("parameters are gathered anew rather than kept", {{zero("stage3_max_reuse_distance"), "0"}});
    for (const std::int64_t bucket : {5'000'000, 0})
      if (config_.zero.prefetch_bucket_size > bucket)
        add("less is gathered ahead", {{zero("stage3_prefetch_bucket_size"), std::to_string(bucket)},
                                       {zero("stage3_max_reuse_distance"), "0"}});
    for (const std::int64_t threshold : {10'000, 0})
      if (config_.zero.param_persistence_threshold > threshold)
        add("fewer small parameters stay gathered",
            {{zero("stage3_param_persistence_threshold"), std::to_string(threshold)}});
  }

  void stage_to(int to, const char* reason) {
    if (ranks_ > 1 && config_.zero.stage < to) add(reason, {stage(to)});
  }

  void recompute_activations() {
    if (config_.training.recompute == Recompute::none)
      add("norms and activations are computed again in backward", of_all("selective"));
  }

  void recompute_blocks() {
    const Keys full = of_all("full");
    if (config_.training.recompute != Recompute::full || full.size() > 1)
      add("whole blocks are computed again in backward", full);
    Keys in_host = full;
    in_host.emplace_back("activation_checkpointing.cpu_checkpointing", "true");
    if (!config_.training.cpu_checkpointing)
      add("whole blocks are computed again in backward, from inputs that wait in host memory", in_host);
  }

  /// That recompute, of all blocks and micro-batches: what names a part now names the whole.
  Keys of_all(const char* recompute) const {
    Keys keys{{"training.recompute", recompute}};
    if (config_.training.recompute_blocks >= 0) keys.emplace_back(blocks, std::to_string(layers()));
    if (config_.training.recompute_micro_batches >= 0)
      keys.emplace_back(flights, std::to_string(in_flight()));
    return keys;
  }

  /// Full recompute of as little as is enough: of micro-batches, where several are in flight (later stages
  /// have fewer, and spare more), or of blocks.
  void part_of_recompute() {
    const config::Training& training = config_.training;
    const double whole_blocks = prices_.slow_down(of_all("full"));
    const bool full = training.recompute == Recompute::full;
    // Blocks or micro-batches that recompute already add nothing to what recomputing all of them costs.
    const auto part = [&](const char* key, std::int64_t now, std::int64_t most, double of_a_stage,
                          const char* reason) {
      if (full && now < 0) return;  // all of them do
      const std::int64_t before = full ? now : 0;
      Keys keys = of_all("full");
      std::erase_if(keys, [&](const auto& each) { return each.first == key; });
      const double each = whole_blocks / std::max(1.0, of_a_stage - static_cast<double>(before));
      changes_.graded.push_back({{each, reason, std::move(keys)}, key, before + 1, most - 1});
    };
    const std::int64_t most = in_flight();
    part(flights, training.recompute_micro_batches, most, static_cast<double>(most),
         "some micro-batches are computed again in backward");
    part(blocks, training.recompute_blocks, layers(),
         static_cast<double>(layers()) / static_cast<double>(config_.parallel.pipeline),
         "some blocks are computed again in backward");
  }

  std::int64_t layers() const { return config_.model ? config_.model->num_layers : 1; }
  /// Micro-batches on the fullest stage.
  std::int64_t in_flight() const {
    const config::Parallel& parallel = config_.parallel;
    engine::TrainSchedule schedule;
    schedule.schedule = engine::schedule_of(config_, false, 1);
    schedule.layout.stages = parallel.pipeline;
    schedule.layout.chunks.resize(static_cast<std::size_t>(parallel.pipeline * parallel.virtual_stages));
    config::Config resolved = config_;
    resolved.batch = config::resolve_batch(config_, engine::data_ranks(config_, ranks_));
    return engine::most_in_flight(schedule, resolved);
  }

  void micro_batches() {
    const config::Batch batch = config::resolve_batch(config_, engine::data_ranks(config_, ranks_));
    for (std::int64_t part = 2; part <= 8 && batch.micro_batch_size % part == 0; part *= 2)
      add("more and smaller micro-batches",
          {{"train_micro_batch_size_per_gpu", std::to_string(batch.micro_batch_size / part)},
           {"gradient_accumulation_steps", std::to_string(batch.gradient_accumulation_steps * part)}});
  }

  /// More ranks share a model, of which there are then fewer: of the same batch, each takes more
  /// micro-batches.
  void model_ranks() {
    if (ranks_ > 100'000) return;  // whose groups take seconds to list, in each try
    const auto share = [&](const char* key, int now, int most, const char* reason) {
      for (int more = 2; now * more <= most && more <= 8; more *= 2)
        if (auto keys = with_batch(key, now * more, more); !keys.empty()) {
          const double slow_down = prices_.slow_down(keys);
          changes_.all.push_back({slow_down, reason, std::move(keys), false, true});
        }
    };
    share("parallel.tensor", config_.parallel.tensor, local_ranks_, "layers are cut over more ranks");
    share("parallel.context", config_.parallel.context, ranks_, "sequences are cut over more ranks");
    share("parallel.pipeline", config_.parallel.pipeline, ranks_, "layers lie on more ranks, in stages");
  }

  /// The key, with those that keep the batch and its micro-batches where they do not follow by themselves;
  /// none where so many ranks cannot share a model.
  Keys with_batch(const char* key, int size, int times_fewer) const {
    const int data = engine::data_ranks(config_, ranks_);
    if (data % times_fewer != 0) return {};
    Keys keys{{key, std::to_string(size)}};
    const config::Batch batch = config::resolve_batch(config_, data);
    if (config_.batch.gradient_accumulation_steps == 0 && config_.batch.train_batch_size > 0 &&
        config_.batch.micro_batch_size > 0)
      return keys;
    keys.emplace_back("train_micro_batch_size_per_gpu", std::to_string(batch.micro_batch_size));
    keys.emplace_back("gradient_accumulation_steps",
                      std::to_string(batch.gradient_accumulation_steps * times_fewer));
    return keys;
  }

  /// A folder that the configuration already writes to, or this one.
  std::string folder() const {
    for (const std::string* known : {&config_.zero.offload_optimizer.nvme_path,
                                     &config_.zero.offload_param.nvme_path, &config_.training.save_dir})
      if (!known->empty()) return *known;
    return ".";
  }

  std::pair<std::string, std::string> to(const char* section, const char* device) const {
    return {cat("zero_optimization.", section, ".device"), device};
  }
  std::pair<std::string, std::string> path(const char* section) const {
    return {cat("zero_optimization.", section, ".nvme_path"), folder()};
  }

  void states_back() {
    using enum config::OffloadDevice;
    if (optimizer_ == nvme) back("optimizer states live in host memory", to("offload_optimizer", "cpu"));
    if (parameters_ == nvme) back("parameters live in host memory", to("offload_param", "cpu"));
    if (!room_is_known_) return;
    if (optimizer_ != none) back("optimizer states live on the device", to("offload_optimizer", "none"));
    if (parameters_ != none) back("parameters live on the device", to("offload_param", "none"));
    if (config_.training.cpu_checkpointing)
      back("the inputs of blocks that are computed again wait on the device",
           {"activation_checkpointing.cpu_checkpointing", "false"});
  }

  void optimizer_to_host() {
    if (optimizer_ == config::OffloadDevice::none)
      add("optimizer states live in host memory", {stage(1), to("offload_optimizer", "cpu")});
  }

  void parameters_to_host() {
    if (parameters_ == config::OffloadDevice::none)
      add("parameters live in host memory", {stage(3), to("offload_param", "cpu")});
  }

  void states_to_nvme() {
    using enum config::OffloadDevice;
    if (config_.zero.sub_group_size > 1'000'000)  // matters once something is on NVMe
      add("what passes between NVMe and the optimizer does so in smaller parts",
          {{zero("sub_group_size"), "1000000"}});
    if (optimizer_ != nvme)
      add("optimizer states live on NVMe",
          {stage(1), to("offload_optimizer", "nvme"), path("offload_optimizer")});
    if (parameters_ != nvme || config_.zero.offload_param.max_in_cpu > 0)
      add("parameters live on NVMe", {stage(3),
                                      to("offload_param", "nvme"),
                                      path("offload_param"),
                                      {zero("offload_param.max_in_cpu"), "0"}});
  }

  static constexpr const char *blocks = "training.recompute_blocks",
                              *flights = "training.recompute_micro_batches";

  const config::Config& config_;
  int ranks_, local_ranks_;
  bool room_is_known_;
  Prices& prices_;
  config::OffloadDevice optimizer_, parameters_;  ///< where they live
  Changes changes_;
};

}  // namespace

Changes known_changes(const config::Config& config, const World& world, bool room_is_known, Prices& prices) {
  return ChangeList(config, world, room_is_known, prices).take();
}

}  // namespace sherd::planning
