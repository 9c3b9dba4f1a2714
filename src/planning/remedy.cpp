#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "base/error.h"
#include "engine/estimate/step_time.h"
#include "engine/pipeline/train_schedule.h"
#include "engine/setup/process_grid.h"
#include "planning/fit.h"
#include "planning/model_work.h"
#include "planning/usual_machines.h"

namespace sherd::planning {
namespace {

using Keys = std::vector<std::pair<std::string, std::string>>;

/// With its batch sizes as they are.
config::Config resolved(config::Config config, int ranks) {
  config.batch = config::resolve_batch(config, engine::data_ranks(config, ranks));
  return config;
}

/// One step down a ladder.
struct Change {
  double slow_down = 0;  ///< by Prices
  std::string reason;
  Keys keys;
  bool back = false;    ///< moves states into a tier that is faster than theirs
  bool shares = false;  ///< more ranks share a model
};

/// A change of which there may be less: `key` takes a number from `least` to `most`, each of which slows a
/// step down by the change's.
struct GradedChange {
  Change each;
  std::string key;
  std::int64_t least = 1, most = 0;

  Change by(std::int64_t number) const {
    Change change = each;
    change.slow_down *= static_cast<double>(number - least + 1);
    change.keys.emplace_back(key, std::to_string(number));
    return change;
  }
};

/// How much longer a step takes by a machine's rates when keys are changed.
class Prices {
 public:
  Prices(const Reparse& reparse, std::int64_t vocabulary, const World& world, const config::Machine& machine)
      : reparse_(reparse),
        machine_(machine.with_devices(world.local_ranks)),
        ranks_(world.ranks),
        work_(vocabulary) {
    before_ = seconds({});
  }

  /// As a share of the step; 0 where it takes no longer, as of what no price knows: sizes of buckets, and
  /// checkpoints. Infinite where a run would not accept the keys, and 0 for all where it does not accept the
  /// configuration.
  double slow_down(const Keys& keys) {
    if (!known()) return 0;
    return std::max(0.0, seconds(keys) / before_ - 1);
  }

  /// Whether the machine's rates tell the configuration's time.
  bool known() const { return before_ != never; }

 private:
  static constexpr double never = std::numeric_limits<double>::infinity();

  double seconds(const Keys& keys) {
    try {
      config::Config config = resolved(reparse_(Remedy{keys, {}}.overrides()), ranks_);
      if (machine_.accelerator() && config.device.type == config::DeviceType::automatic)
        config.device.type = config::DeviceType::cuda;
      return engine::step_time(config, work_.of(config), machine_, ranks_).seconds;
    } catch (const Error&) {
      return never;
    }
  }

  const Reparse& reparse_;
  config::Machine machine_;
  int ranks_;
  GptWork work_;
  double before_ = 0;
};

class Changes {
 public:
  /// `room_is_known`: of the device tier, into which nothing is moved else.
  Changes(const config::Config& config, const World& world, bool room_is_known, Prices& prices)
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
  /// In the order of their reach, in which several follow each other.
  const std::vector<Change>& all() const { return all_; }
  /// The cheapest first; of those that cost the same in the order of their reach.
  std::vector<Change> by_price() const {
    std::vector<Change> out = all_;
    std::stable_sort(out.begin(), out.end(),
                     [](const Change& a, const Change& b) { return a.slow_down < b.slow_down; });
    return out;
  }
  const std::vector<GradedChange>& graded() const { return graded_; }

 private:
  static std::string zero(const char* key) { return cat("zero_optimization.", key); }
  std::pair<std::string, std::string> stage(int least) const {
    return {zero("stage"), std::to_string(std::max(config_.zero.stage, least))};
  }
  void add(std::string reason, Keys keys) {
    const double slow_down = prices_.slow_down(keys);
    all_.push_back({slow_down, std::move(reason), std::move(keys)});
  }
  /// A change that makes a step faster if anything, where there is room.
  void back(std::string reason, std::pair<std::string, std::string> key) {
    all_.push_back({0, std::move(reason), {std::move(key)}, true});
  }

  void checkpoints() {
    if (config_.training.save_async && !config_.training.save_dir.empty())
      add("checkpoints are written while training waits", {{"training.save_async", "false"}});
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
    const auto part = [&](const char* key, std::int64_t now, std::int64_t all, double share,
                          const char* reason) {
      if (full && now < 0) return;  // all of them do
      Keys keys = of_all("full");
      std::erase_if(keys, [&](const auto& each) { return each.first == key; });
      graded_.push_back({{whole_blocks * share, reason, std::move(keys)}, key, full ? now + 1 : 1, all - 1});
    };
    const std::int64_t most = in_flight();
    part(flights, training.recompute_micro_batches, most, 1 / static_cast<double>(most),
         "some micro-batches are computed again in backward");
    part(blocks, training.recompute_blocks, layers(),
         static_cast<double>(config_.parallel.pipeline) / static_cast<double>(layers()),
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
    return engine::most_in_flight(schedule, resolved(config_, ranks_));
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
          all_.push_back({slow_down, reason, std::move(keys), false, true});
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
  std::vector<Change> all_;
  std::vector<GradedChange> graded_;
};

/// All keys of some changes; of a key that several set, the last value: changes come in the order of their
/// reach.
Remedy merged(const std::vector<const Change*>& changes, const config::Config& config) {
  Remedy out;
  for (const Change* change : changes) {
    out.reasons.push_back(change->reason);
    for (const auto& [key, value] : change->keys) {
      const auto same = std::find_if(out.keys.begin(), out.keys.end(),
                                     [&](const auto& known) { return known.first == key; });
      if (same == out.keys.end())
        out.keys.emplace_back(key, value);
      else if (key != "zero_optimization.stage")
        same->second = value;
      else
        same->second = std::max(same->second, value);
    }
  }
  std::erase(out.keys, std::pair(std::string("zero_optimization.stage"), std::to_string(config.zero.stage)));
  return out;
}

class Search {
 public:
  Search(const Reparse& reparse, std::int64_t vocabulary, const World& world, const MachineCapacity& machine,
         const config::Machine& rates)
      : reparse_(reparse),
        vocabulary_(vocabulary),
        world_(world),
        machine_(machine),
        config_(reparse({})),
        prices_(reparse, vocabulary, world, rates),
        changes_(config_, world, machine.knows_devices(config_), prices_) {}

  Remedy run() {
    Remedy out;
    double slow_down = 0;
    if (const std::optional<Change> one = alone()) {
      out = merged({&*one}, config_);
      slow_down = one->slow_down;  // of a part of recompute, which Prices takes for all
    } else {
      for (const bool choosy : {true, false})
        if (out.keys.empty()) out = merged(pruned(together(choosy)), config_);
      slow_down = prices_.slow_down(out.keys);
    }
    if (prices_.known() && std::isfinite(slow_down) && !out.keys.empty()) out.slow_down = slow_down;
    return out;
  }

 private:
  using Taken = std::vector<const Change*>;

  /// The cheapest change that is enough by itself. The cost of a graded change is known once its number is.
  std::optional<Change> alone() const {
    std::vector<Change> ladder = changes_.by_price();
    std::vector<const GradedChange*> graded;
    for (const GradedChange& change : changes_.graded()) graded.push_back(&change);
    for (std::size_t i = 0; i < ladder.size(); ++i) {
      std::erase_if(graded, [&](const GradedChange* change) {
        if (change->by(change->least).slow_down > ladder[i].slow_down) return false;
        if (const std::int64_t number = least(*change)) put(change->by(number), ladder);
        return true;
      });
      if (fits(merged({&ladder[i]}, config_))) return ladder[i];
    }
    return {};
  }

  static void put(Change change, std::vector<Change>& ladder) {
    const auto behind = std::find_if(ladder.begin(), ladder.end(),
                                     [&](const Change& each) { return each.slow_down > change.slow_down; });
    ladder.insert(behind, std::move(change));
  }

  /// The least number of the change that is enough by itself; 0: none is.
  std::int64_t least(const GradedChange& graded) const {
    const auto enough = [&](std::int64_t number) {
      const Change change = graded.by(number);
      return fits(merged({&change}, config_));
    };
    std::int64_t low = graded.least, high = graded.most;
    if (low > high || !enough(high)) return 0;
    while (low < high) {
      const std::int64_t middle = low + (high - low) / 2;
      if (enough(middle))
        high = middle;
      else
        low = middle + 1;
    }
    return high;
  }

  /// As many changes as it takes, in the order of their reach; none when all are too few. A choosy search
  /// leaves out what makes the shortage worse, as moving states into a host that is full already. That may be
  /// what a later change needs: the other takes all but those that move states back, and those of ranks that
  /// share a model, which not every model and batch allows.
  Taken together(bool choosy) const {
    Taken taken;
    double best = shortage({});
    for (const Change& change : changes_.all()) {
      if (!choosy && (change.back || change.shares)) continue;
      taken.push_back(&change);
      const double now = shortage(merged(taken, config_));
      if (now == 0) return taken;
      if (choosy && now > best)
        taken.pop_back();
      else
        best = now;
    }
    return {};
  }

  bool fits(const Remedy& remedy) const { return shortage(remedy) == 0; }

  /// How many times over what there is too little of is needed, added up; 0 where it fits.
  double shortage(const Remedy& remedy) const {
    try {
      const config::Config config = reparse_(remedy.overrides());
      if (batch_of(config) != batch_of(config_)) return std::numeric_limits<double>::infinity();
      double sum = 0;
      for (const Shortfall& missing :
           shortfalls(config, estimate_stages(config, vocabulary_, world_), world_, machine_))
        sum += static_cast<double>(missing.needed) / static_cast<double>(missing.available);
      return sum;
    } catch (const Error&) {
      return std::numeric_limits<double>::infinity();  // not a combination that a run would accept
    }
  }

  std::int64_t batch_of(const config::Config& config) const {
    return config::resolve_batch(config, engine::data_ranks(config, world_.ranks)).train_batch_size;
  }

  /// Without the changes that it takes not, the most expensive first.
  Taken pruned(const Taken& taken) const {
    Taken by_price = taken;
    std::stable_sort(by_price.begin(), by_price.end(),
                     [](const Change* a, const Change* b) { return a->slow_down > b->slow_down; });
    Taken out = taken;
    for (const Change* change : by_price) {
      Taken fewer = out;
      std::erase(fewer, change);
      if (fits(merged(fewer, config_))) out = std::move(fewer);
    }
    return out;
  }

  const Reparse& reparse_;
  std::int64_t vocabulary_;
  const World& world_;
  const MachineCapacity& machine_;
  config::Config config_;
  Prices prices_;
  Changes changes_;
};

}  // namespace

std::vector<std::string> Remedy::overrides() const {
  std::vector<std::string> out;
  for (const auto& [key, value] : keys) out.push_back(key + "=" + value);
  return out;
}

std::string Remedy::line() const {
  std::string out;
  for (const std::string& override : overrides()) out += cat(out.empty() ? "" : " ", "--set ", override);
  return out;
}

config::Machine usual_machine(bool gpus) {
  return gpus ? config::parse_machine(usual_gpus, "configs/machines/dgx_a100_80gb.json")
              : config::parse_machine(usual_processors, "configs/machines/cpu_server.json");
}

Remedy cheapest_remedy(const Reparse& reparse, std::int64_t vocabulary, const World& world,
                       const MachineCapacity& machine, const config::Machine* rates) {
  return Search(reparse, vocabulary, world, machine, rates ? *rates : usual_machine(machine.on_gpus)).run();
}

}  // namespace sherd::planning
