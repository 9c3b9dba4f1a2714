#include "planning/search.h"

#include <algorithm>
#include <array>
#include <bit>
#include <map>
#include <numeric>
#include <queue>
#include <tuple>

#include "base/error.h"
#include "engine/report/report.h"
#include "engine/setup/process_grid.h"

namespace sherd::planning {

using config::Schedule;

std::string PlanLayout::text(int data) const {
  std::string out = engine::describe(tensor, context, data, pipeline, expert);
  if (virtual_stages > 1) out += cat(" (", virtual_stages, " chunks each)");
  if (schedule == Schedule::zero_bubble) out += " (zero bubble)";
  return out;
}

std::vector<std::pair<std::string, std::string>> PlanLayout::keys() const {
  constexpr const char* recomputes[] = {"none", "selective", "full"};
  std::vector<std::pair<std::string, std::string>> out{
      {"parallel.tensor", std::to_string(tensor)},
      {"parallel.context", std::to_string(context)},
      {"parallel.pipeline", std::to_string(pipeline)},
      {"train_micro_batch_size_per_gpu", std::to_string(micro_batch)},
      {"zero_optimization.stage", std::to_string(stage)},
      {"training.recompute", recomputes[static_cast<int>(recompute)]}};
  if (virtual_stages > 1) out.emplace_back("parallel.virtual_stages", std::to_string(virtual_stages));
  if (schedule != Schedule::automatic) out.emplace_back("parallel.schedule", config::name_of(schedule));
  if (expert > 1) out.emplace_back("parallel.expert", std::to_string(expert));
  if (overlap_comm) out.emplace_back("zero_optimization.overlap_comm", "true");
  if (optimizer_on_host) out.emplace_back("zero_optimization.offload_optimizer.device", "cpu");
  return out;
}

double Plan::tokens_per_second() const {
  return static_cast<double>(config.batch.train_batch_size) * static_cast<double>(config.model->seq_length) /
         time.seconds;
}

std::vector<std::pair<std::string, std::string>> Plan::keys() const {
  auto out = layout.keys();
  out.emplace_back("train_batch_size", std::to_string(config.batch.train_batch_size));
  out.emplace_back("gradient_accumulation_steps", std::to_string(config.batch.gradient_accumulation_steps));
  return out;
}

MachineCapacity capacity_of(const config::Machine& machine) {
  MachineCapacity out;
  out.memory = machine.host.memory;
  out.free_space = [size = machine.drive.size](const std::string&) { return size; };
  out.on_gpus = machine.accelerator();
  out.gpus = machine.accelerator() ? static_cast<int>(machine.devices) : 0;
  out.gpu_memory = machine.memory;
  return out;
}

namespace {

PlanLayout layout_of(const config::Config& config, int ranks) {
  const config::Parallel& parallel = config.parallel;
  return {.tensor = parallel.tensor,
          .context = parallel.context,
          .pipeline = parallel.pipeline,
          .virtual_stages = parallel.virtual_stages,
          .expert = parallel.expert,
          .micro_batch = config.batch.micro_batch_size,
          .stage = config.zero.stage,
          .schedule = parallel.schedule,
          .recompute = config.training.recompute,
          .overlap_comm = config.zero.overlap_comm,
          .optimizer_on_host = config.zero.offload_optimizer.device == config::OffloadDevice::cpu,
          .ranks = ranks};
}

World world_of(const config::Machine& machine, int ranks) {
  return {ranks, static_cast<int>(std::min<std::int64_t>(machine.devices, ranks))};
}

/// Finds the exact memory of a plan's outer stages, and what it lacks. Where it `must_fit`, throws
/// Error{memory} as soon as a rank holds more than a device has.
void look_at(Plan& plan, const config::Machine& machine, std::int64_t vocabulary, bool must_fit) {
  const World world = world_of(machine, plan.layout.ranks);
  engine::EstimateScope scope{.memory_alone = true};
  if (must_fit) scope.device_room = device_room(plan.config, world, capacity_of(machine));
  const StageEstimates estimates = estimate_stages(plan.config, vocabulary, world, 0, std::move(scope), true);
  for (const engine::Estimate& estimate : estimates) {
    plan.memory = std::max(plan.memory, estimate.peaks.tiers[0].total_peak);
    plan.host_memory = std::max(
        plan.host_memory, estimate.peaks.tiers[1].total_peak * static_cast<std::uint64_t>(world.local_ranks));
  }
  const auto missing = shortfalls(plan.config, estimates, world, capacity_of(machine));
  plan.lacks = missing.empty() ? "" : missing.front().text();
}

Plan plan_as_is(const config::Config& config, const config::Machine& machine, std::int64_t vocabulary,
                int ranks, GptWork& work, bool must_fit) {
  Plan plan{layout_of(config, ranks), as_run_on(machine, config, ranks), {}};
  plan.layout.micro_batch = plan.config.batch.micro_batch_size;
  plan.time = engine::step_time(plan.config, work.of(plan.config), machine, ranks);
  look_at(plan, machine, vocabulary, must_fit);
  return plan;
}

/// Sequences of a step, as the caller or the configuration says; 0: neither does.
std::int64_t batch_of(const config::Config& config, const SearchOptions& options) {
  return options.global_batch > 0 ? options.global_batch : config.batch.train_batch_size;
}

/// Tries every layout of one number of ranks.
class LayoutSearch {
 public:
  using IsGiven = std::function<bool(const std::string&)>;

  LayoutSearch(const Reparse& reparse, const IsGiven& is_given, const config::Machine& machine,
               std::int64_t vocabulary, const SearchOptions& options)
      : reparse_(reparse),
        base_(placed_on(machine, reparse({}))),
        is_given_(is_given),
        machine_(machine),
        vocabulary_(vocabulary),
        options_(options),
        shape_(models::gpt_config(base_, vocabulary)),
        work_(vocabulary),
        batch_(batch_of(base_, options)) {}

  SearchResult in(int ranks) {
    ranks_ = ranks;
    result_ = {}, least_ = 0, passes_.clear();
    closest_.reset();
    for (const bool on_host : offloads()) {
      plans_.clear();
      for_each_layout(on_host);
      confirm();
      // Layouts that wait for the host are slower than others.
      if (!result_.best.empty() && options_.goal != Goal::memory) break;
    }
    const auto exact = [&](const Plan& plan) {
      return options_.goal == Goal::memory ? static_cast<double>(plan.memory) : cost(plan);
    };
    std::sort(result_.best.begin(), result_.best.end(),
              [&](const Plan& a, const Plan& b) { return exact(a) < exact(b); });
    if (result_.best.size() > options_.top)
      result_.best.erase(result_.best.begin() + static_cast<std::ptrdiff_t>(options_.top),
                         result_.best.end());
    return std::move(result_);
  }

 private:
  static constexpr const char* accumulation = "gradient_accumulation_steps";

  /// 1, 2, 3, … or what is given alone.
  std::vector<int> sizes(const char* key, int given, int most) const {
    if (is_given_(key)) return {given};
    std::vector<int> out;
    for (int i = 1; i <= most; ++i) out.push_back(i);
    return out;
  }

  std::vector<bool> offloads() const {
    const bool given = base_.zero.offload_optimizer.device != config::OffloadDevice::none;
    if (given || is_given_("zero_optimization.offload_optimizer") || machine_.host.update == 0)
      return {given};
    return {false, true};
  }

  void for_each_layout(bool on_host) {
    const config::Parallel& p = base_.parallel;
    const auto blocks = static_cast<int>(shape_.num_layers);
    const auto heads = static_cast<int>(shape_.num_heads);
    for (const int tensor : sizes("parallel.tensor", p.tensor, static_cast<int>(machine_.devices)))
      for (const int context : sizes("parallel.context", p.context, most_context()))
        for (const int pipeline : sizes("parallel.pipeline", p.pipeline, blocks))
          for (const int expert : sizes("parallel.expert", p.expert,
                                        static_cast<int>(std::max<std::int64_t>(1, shape_.moe.experts)))) {
            const int model_ranks = tensor * context * pipeline;
            if (ranks_ % model_ranks != 0 || heads % tensor != 0) continue;
            if (!is_given_("parallel.context") && !std::has_single_bit(static_cast<unsigned>(context)))
              continue;
            if (expert > 1 && (shape_.moe.experts % expert != 0 || ranks_ / tensor / pipeline % expert != 0))
              continue;
            PlanLayout layout{.tensor = tensor, .context = context, .pipeline = pipeline, .expert = expert};
            layout.optimizer_on_host = on_host, layout.ranks = ranks_;
            cut_batches(layout, ranks_ / model_ranks);
          }
  }
  /// A rank's part of a sequence below a thousand tokens gains nothing.
  int most_context() const {
    return static_cast<int>(std::clamp<std::int64_t>(shape_.seq_length / 1024, 1, 64));
  }

  void cut_batches(PlanLayout layout, int data) {
    constexpr std::int64_t most = 64;
    has_room_ = recomputes();
    for (std::int64_t micro = 1; micro <= most; micro *= 2) {
      const bool given = is_given_("train_micro_batch_size_per_gpu");
      layout.micro_batch = given ? base_.batch.micro_batch_size : micro;
      const std::int64_t rows = layout.micro_batch * data;
      const std::int64_t accumulated = is_given_(accumulation) ? base_.batch.gradient_accumulation_steps : 0;
      // An open batch: enough micro-batches for a pipeline to be busy.
      const std::int64_t all =
          batch_ > 0 ? batch_ : rows * (accumulated > 0 ? accumulated : 8 * layout.pipeline);
      if (all % rows == 0 && (accumulated == 0 || all / rows == accumulated))
        choose_schedules(layout, all, all / rows);
      if (given) return;
    }
  }

  void choose_schedules(PlanLayout layout, std::int64_t batch, std::int64_t micro_batches) {
    const auto parts = static_cast<std::size_t>(shape_.num_layers) + 2;
    std::vector<Recompute> fitted;
    for (const int chunks : sizes("parallel.virtual_stages", base_.parallel.virtual_stages, 8)) {
      if (chunks > 1 && (layout.pipeline == 1 || micro_batches % layout.pipeline != 0 ||
                         static_cast<std::size_t>(chunks * layout.pipeline) > parts))
        continue;
      layout.virtual_stages = chunks;
      for (const Schedule schedule : schedules(layout))
        for (const int stage : stages(layout))
          for (const Recompute recompute : has_room_) {
            layout.schedule = schedule, layout.stage = stage, layout.recompute = recompute;
            layout.overlap_comm =
                base_.zero.overlap_comm || (stage > 0 && !is_given_("zero_optimization.overlap_comm"));
            const bool fits = price(layout, batch, micro_batches);
            if (fits && std::find(fitted.begin(), fitted.end(), recompute) == fitted.end())
              fitted.push_back(recompute);
          }
    }
    has_room_ = std::move(fitted);
  }
  /// gpipe has the bubble of 1f1b and holds more, so it is not tried.
  std::vector<Schedule> schedules(const PlanLayout& layout) const {
    if (is_given_("parallel.schedule")) return {base_.parallel.schedule};
    if (layout.pipeline == 1 || layout.virtual_stages > 1) return {Schedule::automatic};
    return {Schedule::automatic, Schedule::zero_bubble};
  }
  std::vector<int> stages(const PlanLayout& layout) const {
    if (is_given_("zero_optimization.stage")) return {base_.zero.stage};
    const int data = ranks_ / layout.tensor / layout.pipeline;
    if (data == 1) return {layout.optimizer_on_host ? 1 : 0};
    return {1, 2, 3};
  }
  std::vector<Recompute> recomputes() const {
    if (is_given_("training.recompute")) return {base_.training.recompute};
    return {Recompute::none, Recompute::selective, Recompute::full};
  }

  config::Config configured(const PlanLayout& layout, std::int64_t batch, std::int64_t micro_batches) const {
    config::Config config = base_;
    config.parallel.tensor = layout.tensor, config.parallel.context = layout.context;
    config.parallel.pipeline = layout.pipeline, config.parallel.virtual_stages = layout.virtual_stages;
    config.parallel.expert = layout.expert;
    config.parallel.schedule = layout.schedule;
    config.batch.micro_batch_size = layout.micro_batch;
    config.batch.gradient_accumulation_steps = micro_batches, config.batch.train_batch_size = batch;
    config.zero.stage = layout.stage;
    config.zero.overlap_comm = layout.overlap_comm;
    config.training.recompute = layout.recompute;
    if (layout.optimizer_on_host) config.zero.offload_optimizer.device = config::OffloadDevice::cpu;
    return config;
  }

  /// Keeps the layout with a bound of its time: what it takes is found where that decides
  /// (in_order_of_time()). False where rough memory tells that it cannot fit.
  bool price(const PlanLayout& layout, std::int64_t batch, std::int64_t micro_batches) {
    Plan plan{layout, configured(layout, batch, micro_batches), {}};
    bool has_room = true;
    attempt([&] {
      const engine::ModelWork& work = work_.of(plan.config);
      ++result_.tried;
      const double room = static_cast<double>(machine_.memory > 0 ? machine_.memory : machine_.host.memory);
      const double least = engine::rough_memory(plan.config, work, ranks_).device;
      if (room > 0 && least > room) {
        ++result_.too_large;
        has_room = false;
        if (result_.closest.empty() || least < least_) {
          least_ = least;
          result_.closest = cat("the smallest layout holds at least ",
                                engine::human_bytes(static_cast<std::uint64_t>(least)), " per rank of ",
                                engine::human_bytes(static_cast<std::uint64_t>(room)));
        }
        return;
      }
      const auto [passes, added] = passes_.try_emplace(&work, 0);
      if (added) passes->second = engine::pass_seconds(work, machine_, ranks_);
      plan.time.seconds = 0.999 * passes->second * static_cast<double>(micro_batches) / layout.pipeline;
      plans_.push_back(std::move(plan));
    });
    return has_room;
  }

  /// Visits plans from the best on, until it is told that it is enough. A plan is priced once its bound is
  /// the least of what is left, so that most never are.
  void in_order_of_time(const std::function<bool(std::size_t)>& visit) {
    using Next = std::tuple<double, bool, std::size_t>;  // cost or its bound, whether it is the cost, plan
    std::priority_queue<Next, std::vector<Next>, std::greater<>> queue;
    for (std::size_t i = 0; i < plans_.size(); ++i) queue.emplace(cost(plans_[i]), false, i);
    while (!queue.empty()) {
      const auto [value, priced, index] = queue.top();
      queue.pop();
      Plan& plan = plans_[index];
      if (priced) {
        if (!visit(index)) return;
      } else if (attempt([&] {
                   plan.time = engine::step_time(plan.config, work_.of(plan.config), machine_, ranks_);
                 })) {
        queue.emplace(cost(plan), true, index);
      }
    }
  }
  /// Likewise by memory.
  void in_order_of_memory(const std::function<bool(std::size_t)>& visit) {
    std::vector<std::pair<double, std::size_t>> order;
    for (std::size_t i = 0; i < plans_.size(); ++i) order.emplace_back(rough(plans_[i]), i);
    std::sort(order.begin(), order.end());
    for (const auto& [value, index] : order)
      if (!visit(index)) return;
  }

  /// False where the layout is none that a run would accept.
  bool attempt(const std::function<void()>& look) {
    try {
      look();
      return true;
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::config && error.kind() != ErrorKind::usage) throw;
      if (result_.refused.empty()) result_.refused = error.what();
      return false;
    }
  }

  /// The value of which the least is best.
  double cost(const Plan& plan) {
    if (options_.goal == Goal::memory) return rough(plan);
    if (options_.goal == Goal::tokens_per_day) return 1 / plan.tokens_per_second();
    return plan.time.seconds;
  }

  /// By what layouts are told apart where one of each is shown.
  static std::array<int, 5> grid_of(const PlanLayout& layout) {
    return {layout.tensor, layout.context, layout.pipeline, layout.expert, layout.optimizer_on_host ? 1 : 0};
  }
  bool is_shown(const PlanLayout& layout) const {
    return options_.one_of_each_grid &&
           std::any_of(result_.best.begin(), result_.best.end(),
                       [&](const Plan& plan) { return grid_of(plan.layout) == grid_of(layout); });
  }

  /// Moves the best plans that fit, exactly, to the result: from the best on, and where none of many fits,
  /// from the smallest on.
  void confirm() {
    const std::size_t most_looks = std::max<std::size_t>(96, 4 * options_.top);
    constexpr int most_looks_at_a_grid = 16;  // so that one of which nothing fits does not take them all
    std::vector<bool> looked_at(plans_.size());
    std::size_t looks = 0;
    std::map<std::array<int, 5>, int> looks_at;
    const std::size_t before = result_.best.size();
    const auto look = [&](std::size_t index) {
      if (result_.best.size() - before == options_.top || looks == most_looks) return false;
      const PlanLayout& layout = plans_[index].layout;
      if (looked_at[index] || is_shown(layout)) return true;
      int& here = looks_at[grid_of(layout)];
      if (options_.one_of_each_grid && here == most_looks_at_a_grid) return true;
      looked_at[index] = true, ++here;
      looks += confirm(plans_[index]) ? 1 : 0;
      return true;
    };
    if (options_.goal == Goal::memory)
      in_order_of_memory(look);
    else
      in_order_of_time(look);
    if (result_.best.empty()) {
      looks = 0, looks_at.clear();
      in_order_of_memory(look);
    }
    if (result_.best.empty() && closest_) attempt([&] { result_.closest = exactly(*closest_, false).lacks; });
  }

  /// A plan as its keys make it, beside all that the configuration says.
  Plan exactly(const Plan& plan, bool must_fit) {
    std::vector<std::string> overrides;
    for (const auto& [key, value] : plan.keys()) overrides.push_back(cat(key, "=", value));
    Plan out = plan_as_is(reparse_(overrides), machine_, vocabulary_, ranks_, work_, must_fit);
    out.layout = plan.layout;
    return out;
  }

  /// Prices and estimates a plan. False where it is none that a run would accept.
  bool confirm(const Plan& plan) {
    return attempt([&] {
      if (std::optional<Plan> exact = fitting(plan)) {
        result_.best.push_back(*std::move(exact));
        return;
      }
      ++result_.too_large;
      if (!closest_ || rough(plan) < rough(*closest_)) closest_ = plan;
    });
  }

  /// Nothing where it does not fit.
  std::optional<Plan> fitting(const Plan& plan) {
    try {
      Plan exact = exactly(plan, true);
      if (exact.lacks.empty()) return exact;
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::memory) throw;
    }
    return {};
  }

  double rough(const Plan& plan) {
    return engine::rough_memory(plan.config, work_.of(plan.config), ranks_).device;
  }

  const Reparse& reparse_;
  config::Config base_;
  const IsGiven& is_given_;
  const config::Machine& machine_;
  std::int64_t vocabulary_;
  SearchOptions options_;
  models::GptConfig shape_;
  GptWork work_;
  std::int64_t batch_;  ///< sequences of a step; 0: open
  int ranks_ = 1;
  std::vector<Plan> plans_;
  std::map<const engine::ModelWork*, double> passes_;  ///< engine::pass_seconds() of what is recorded
  /// The kinds of recompute with which a layout of the grid under way may fit: what is too large stays so
  /// with larger micro-batches.
  std::vector<Recompute> has_room_;
  SearchResult result_;
  std::optional<Plan> closest_;  ///< the smallest of those looked at that do not fit
  double least_ = 0;             ///< bytes of those that were left out before, at least
};

/// Parts of one machine, then machines, doubled each time, up to all.
std::vector<int> worlds(const config::Machine& machine, int most) {
  std::vector<int> out;
  for (int ranks = 1; ranks < most; ranks = ranks < machine.devices && 2 * ranks > machine.devices
                                                ? static_cast<int>(machine.devices)
                                                : 2 * ranks)
    out.push_back(ranks);
  out.push_back(most);
  return out;
}

}  // namespace

SearchResult search(const Reparse& reparse, const std::function<bool(const std::string& key)>& is_given,
                    const config::Machine& machine, std::int64_t vocabulary, const SearchOptions& options) {
  const config::Config base = reparse({});
  engine::require_rates(base, machine, options.ranks);
  const bool determined = batch_of(base, options) > 0 || is_given("gradient_accumulation_steps");
  if (!determined && options.goal != Goal::tokens_per_day)
    fail(ErrorKind::config,
         "the batch of a step is open: say train_batch_size, or --global-batch N sequences (with --goal "
         "tokens_per_day it may stay open)");
  LayoutSearch search(reparse, is_given, machine, vocabulary, options);
  if (options.goal != Goal::fewest_gpus) return search.in(options.ranks);
  SearchResult last;
  for (const int ranks : worlds(machine, options.ranks)) {
    last = search.in(ranks);
    if (!last.best.empty()) break;
  }
  return last;
}

Plan plan_as_is(const config::Config& config, const config::Machine& machine, std::int64_t vocabulary,
                int ranks) {
  GptWork work(vocabulary);
  return plan_as_is(config, machine, vocabulary, ranks, work, false);
}

}  // namespace sherd::planning
