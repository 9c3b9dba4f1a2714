#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <optional>

#include "base/error.h"
#include "base/text/excerpt.h"
#include "engine/setup/process_grid.h"
#include "planning/changes.h"
#include "planning/usual_machines.h"

namespace sherd::planning {
namespace {

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
        changes_(known_changes(config_, world, machine.knows_devices(config_), prices_)) {}

  /// By the outer stages of a pipeline, and by all where what these find is not enough after all.
  Remedy run() {
    Remedy out = find();
    if (out.keys.empty() || config_.parallel.pipeline == 1) return out;
    all_stages_ = true;
    known_.clear();
    return fits(out) ? out : find();
  }

 private:
  using Taken = std::vector<const Change*>;

  Remedy find() {
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

  /// The cheapest change that is enough by itself. The cost of a graded change is known once its number is.
  std::optional<Change> alone() const {
    std::vector<Change> ladder = changes_.by_price();
    std::vector<const GradedChange*> graded;
    for (const GradedChange& change : changes_.graded) graded.push_back(&change);
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
    for (const Change& change : changes_.all) {
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

  bool fits(const Remedy& remedy) const { return shortage(remedy, true) == 0; }

  /// How many times over what there is too little of is needed, added up; 0 where it fits. `must_fit`: nobody
  /// asks how much where it does not.
  double shortage(const Remedy& remedy, bool must_fit = false) const {
    const auto [known, is_new] = known_.try_emplace({remedy.line(), must_fit});
    if (is_new) known->second = look(remedy, must_fit);
    return known->second;
  }

  double look(const Remedy& remedy, bool must_fit) const {
    try {
      const config::Config config = reparse_(remedy.overrides());
      if (batch_of(config) != batch_of(config_)) return std::numeric_limits<double>::infinity();
      double sum = 0;
      engine::EstimateScope scope{.memory_alone = true};
      if (must_fit) scope.device_room = device_room(config, world_, machine_);
      const StageEstimates stages =
          estimate_stages(config, vocabulary_, world_, {}, std::move(scope), !all_stages_);
      for (const Shortfall& missing : shortfalls(config, stages, world_, machine_))
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
  bool all_stages_ = false;
  mutable std::map<std::pair<std::string, bool>, double> known_;  ///< shortages of what was tried
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
  return joined_text(overrides(), " ", [](const std::string& override) { return "--set " + override; });
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
