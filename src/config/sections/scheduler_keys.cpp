#include <algorithm>

#include "config/sections/tables.h"

namespace sherd::config {
namespace {

const std::vector<std::string> foreign_schedulers = {"StepLR",
                                                     "MultiStepLR",
                                                     "ConstantLR",
                                                     "LinearLR",
                                                     "ExponentialLR",
                                                     "PolynomialLR",
                                                     "CosineAnnealingLR",
                                                     "CosineAnnealingWarmRestarts",
                                                     "CyclicLR",
                                                     "OneCycleLR",
                                                     "LambdaLR",
                                                     "MultiplicativeLR",
                                                     "ReduceLROnPlateau",
                                                     "SequentialLR",
                                                     "ChainedScheduler"};

/// A type that a section can name: the schedule that it is at first, and its `params`.
struct Type {
  const char* name;
  Scheduler defaults;
  Table<Scheduler> params;
};

/// Keys of one of the structs that a Scheduler may be.
template <class T>
Table<Scheduler> params_of(std::vector<Key<T>> keys, std::function<void(T&, const Given&)> finish = {}) {
  Table<Scheduler> out{Auto::needs_caller};
  for (const Key<T>& key : keys)
    out.keys.push_back(lifted<Scheduler>(
        key, [](auto& any) -> auto& { return std::get<T>(any); }));
  append(out.keys, foreign_keys<Scheduler>("scheduler.params"));
  if (finish)
    out.finish = [finish = std::move(finish)](Scheduler& schedule, const Given& given, const Value&) {
      finish(std::get<T>(schedule), given);
    };
  return out;
}

std::vector<Key<LrRangeTest>> range_test_keys() {
  using T = LrRangeTest;
  return {real("lr_range_test_min_lr", &T::min_lr, "0.01", 0)
              .means("rate at the start", "also takes a list, one for each group"),
          integer("lr_range_test_step_size", &T::step_size, "7", 1).means("steps of a stair"),
          real("lr_range_test_step_rate", &T::step_rate, "2.0")
              .means("by what share of the start the rate rises in so many steps"),
          boolean("lr_range_test_staircase", &T::staircase).means("rise in stairs")};
}

std::vector<Key<OneCycle>> one_cycle_keys() {
  using T = OneCycle;
  return {real("cycle_min_lr", &T::cycle_min_lr, "1e-5", 0).means("rate at both ends of the cycle", required),
          real("cycle_max_lr", &T::cycle_max_lr, "1e-2", 0).means("rate at its top", required),
          real("decay_lr_rate", &T::decay_lr_rate, "0.1", 0)
              .means("after the cycle: the rate is divided by 1 + this for each `decay_step_size`"),
          integer("cycle_first_step_size", &T::cycle_first_step_size, "10", 1).means("steps of the way up"),
          integer("cycle_second_step_size", &T::cycle_second_step_size, "20", 0)
              .means("steps of the way down", by("`cycle_first_step_size`")),
          integer("cycle_first_stair_count", &T::cycle_first_stair_count, "3", 0)
              .means("stairs of the way up; 0: none", "0.16 ignores it"),
          integer("cycle_second_stair_count", &T::cycle_second_stair_count, "4", 0)
              .means("stairs of the way down; 0: none", "0.16 ignores it", by("`cycle_first_stair_count`")),
          integer("decay_step_size", &T::decay_step_size, "5", 0)
              .means("steps of the decay after the cycle; 0: no decay"),
          boolean("cycle_momentum", &T::cycle_momentum)
              .means("β1 moves against the rate, and β2 becomes 0.99, where the optimizer has betas"),
          real("cycle_min_mom", &T::cycle_min_mom, "0.7", 0, 1).means("β1 at the top of the cycle"),
          real("cycle_max_mom", &T::cycle_max_mom, "0.95", 0, 1).means("β1 at both ends"),
          real("decay_mom_rate", &T::decay_mom_rate, "0.1", 0)
              .means("after the cycle: β1 is multiplied by 1 + this for each `decay_step_size`")};
}

void finish_one_cycle(OneCycle& cycle, const Given& given) {
  if (!given.contains("cycle_second_step_size")) cycle.cycle_second_step_size = cycle.cycle_first_step_size;
  if (!given.contains("cycle_second_stair_count"))
    cycle.cycle_second_stair_count = cycle.cycle_first_stair_count;
}

// ---- rows that several types have ----

template <class T>
Key<T> total_key() {
  return integer("total_num_steps", &T::total_num_steps, "5000", 1)
      .means("steps until the rate has come down", required);
}

/// DeepSpeed refuses 0 since 0.19.6; what it makes of it before are 2 steps, as of 1.
template <class T>
Key<T> warmup_steps_key() {
  Key<T> key = integer("warmup_num_steps", &T::warmup_num_steps, "10", 0)
                   .means("steps of the warmup; the formulas of DeepSpeed's types take 2 for less",
                          "since 0.19.6 refuses 0");
  if constexpr (std::is_same_v<T, TrainerSchedule>) return key;
  return std::move(key).then([](T& target, const Value& value) {
    if (target.warmup_num_steps > 0) return;
    target.warmup_num_steps = 1;
    value.note("0 means 2, the least that the formulas know, as in DeepSpeed before 0.19.6");
  });
}

template <class T>
Key<T> warmup_type_key() {
  return choice("warmup_type", &T::warmup_type, {"log", "linear"}, "\"linear\"")
      .means("how the rate rises", "takes log for any other word");
}

// null is a value of its own here: the optimizer's lr.
Key<Warmup> warmup_max_key(bool decays) {
  Key<Warmup> key = custom<Warmup>(
      "warmup_max_lr", "0.01",
      [](Warmup& target, const Value& value) {
        target.warmup_max_lr = value.node.is(Node::Kind::null) ? std::nullopt : std::optional(value.real(0));
      },
      [](const Warmup& warmup) { return warmup.warmup_max_lr ? node_of(*warmup.warmup_max_lr) : Node(); });
  if (!decays) key.derived = "the optimizer's `lr`";
  return std::move(key)
      .takes({reals(0).words + ", or null: the optimizer's `lr`", reals(0).schema})
      .means("rate after the warmup", "0.16: 0.001 by default, with WarmupLR too", null_too, or_null);
}

std::vector<Key<Warmup>> warmup_keys(bool decays) {
  std::vector<Key<Warmup>> keys;
  if (decays) keys.push_back(total_key<Warmup>());
  append(keys, {real("warmup_min_lr", &Warmup::warmup_min_lr, "1e-6", 0)
                    .means("rate at the start, and of WarmupDecayLR also at the end",
                           "also takes a list, one for each group"),
                warmup_max_key(decays), warmup_steps_key<Warmup>(), warmup_type_key<Warmup>()});
  return keys;
}

std::vector<Key<WarmupCosine>> warmup_cosine_keys() {
  using T = WarmupCosine;
  return {total_key<T>(),
          real("warmup_min_ratio", &T::warmup_min_ratio, "0.1", 0)
              .means("rate at the start, as a share of the optimizer's"),
          warmup_steps_key<T>(),
          real("cos_min_ratio", &T::cos_min_ratio, "0.1", 0)
              .means("rate at the end, as a share of the optimizer's"),
          warmup_type_key<T>()};
}

Type trainer_type(const char* name, RateShape shape) {
  using T = TrainerSchedule;
  std::vector<Key<T>> keys = {warmup_steps_key<T>()};
  if (shape != RateShape::constant_with_warmup) keys.push_back(total_key<T>());
  return {name, T{.shape = shape}, params_of(std::move(keys))};
}

// ---- the types ----

const std::vector<Type>& types() {
  static const std::vector<Type> all = {
      {"LRRangeTest", LrRangeTest(), params_of(range_test_keys())},
      {"OneCycle", OneCycle(), params_of<OneCycle>(one_cycle_keys(), finish_one_cycle)},
      {"WarmupLR", Warmup(), params_of(warmup_keys(false))},
      // WarmupDecayLR keeps this default; WarmupLR takes the optimizer's lr.
      {"WarmupDecayLR", Warmup{.warmup_max_lr = 0.001}, params_of(warmup_keys(true))},
      {"WarmupCosineLR", WarmupCosine(), params_of(warmup_cosine_keys())},
      trainer_type("linear", RateShape::linear),
      trainer_type("cosine", RateShape::cosine),
      trainer_type("constant_with_warmup", RateShape::constant_with_warmup)};
  return all;
}

std::vector<std::string> type_names() {
  std::vector<std::string> out;
  for (const Type& type : types()) out.push_back(type.name);
  return out;
}

constexpr const char* supported =
    "LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR, and transformers' linear, cosine and "
    "constant_with_warmup";

/// The type of a schedule that is one.
const Type& type_of(const Scheduler& schedule) {
  const auto* warmup = std::get_if<Warmup>(&schedule);
  const auto* trainer = std::get_if<TrainerSchedule>(&schedule);
  return *std::find_if(types().begin(), types().end(), [&](const Type& type) {
    if (type.defaults.index() != schedule.index()) return false;
    if (warmup)
      return type.name == std::string_view(warmup->total_num_steps > 0 ? "WarmupDecayLR" : "WarmupLR");
    return !trainer || std::get<TrainerSchedule>(type.defaults).shape == trainer->shape;
  });
}

const Type& read_scheduler_type(const Value& section) {
  const Node* type = section.node.find("type");
  if (!type) section.error("needs a \"type\"; this build has ", supported);
  const Value value = section.at("type");
  for (const std::string& name : foreign_schedulers)
    if (value.text() == name)
      value.error(type->brief(), " is PyTorch's and not in this build, which has ", supported);
  return types()[value.choice(type_names())];
}

/// read_scheduler() has read it before.
Key<Scheduler> scheduler_type_key() {
  return custom<Scheduler>("type", "\"WarmupLR\"", [](Scheduler&, const Value&) {})
      .one_of(type_names())
      .means(
          "the schedule of rates; linear, cosine and constant_with_warmup are transformers', but that behind "
          "the last step rates stay where they are, where transformers' cosine rises again",
          "also takes PyTorch's; rates of groups keep their proportion under all types here, there under "
          "WarmupCosineLR alone",
          by("required; without the section the optimizer's rates stay"));
}

void read_scheduler(Config& config, const Value& section) {
  section.expect(Node::Kind::object);
  const Node* named = section.node.find("type");
  if (section.node.members.empty() || (named && named->is(Node::Kind::null))) return;
  const Type& type = read_scheduler_type(section);
  config.scheduler = type.defaults;
  Given given;
  Table<Scheduler> table{Auto::is_a_value, {scheduler_type_key()}};
  table.keys.push_back(custom<Scheduler>("params", "", [&](Scheduler& schedule, const Value& params) {
    given = read_section(type.params, schedule, params);
  }));
  read_section(table, config.scheduler, section);
  for (const Key<Scheduler>& key : type.params.keys)
    if (key.required && !given.contains(key.name)) section.error("needs \"params.", key.name, "\"");
}

Node write_scheduler(const Config& config) {
  if (std::holds_alternative<std::monostate>(config.scheduler)) return {};
  const Type& type = type_of(config.scheduler);
  return node_of({{"type", node_of(type.name)}, {"params", written(type.params, config.scheduler)}});
}

/// How long a schedule that ends rises, when it ends, and at what rate.
struct ScheduleEnd {
  std::int64_t warmup = 0, total = 0;
  std::string last;
};

struct ScheduleEndOf {
  ScheduleEnd operator()(const Warmup& s) const {
    return {s.warmup_num_steps, s.total_num_steps, cat(s.warmup_min_lr)};
  }
  ScheduleEnd operator()(const WarmupCosine& s) const {
    return {s.warmup_num_steps, s.total_num_steps, cat(s.cos_min_ratio, " of the optimizer's")};
  }
  ScheduleEnd operator()(const TrainerSchedule& s) const {
    if (s.shape == RateShape::constant_with_warmup) return {};
    return {s.warmup_num_steps, s.total_num_steps, "0"};
  }
  template <class Other>
  ScheduleEnd operator()(const Other&) const {
    return {};
  }
};

}  // namespace

void note_short_schedule(const Config& config, Context& context) {
  const ScheduleEnd course = std::visit(ScheduleEndOf(), config.scheduler);
  if (course.total == 0) return;
  if (course.total < course.warmup)
    context.note("scheduler",
                 cat("total_num_steps ", course.total, " is less than warmup_num_steps ", course.warmup,
                     ": behind the warmup the rate is ", course.last, " at once"));
  else if (course.total < config.training.steps)
    context.note("scheduler", cat("total_num_steps ", course.total, " is less than training.steps ",
                                  config.training.steps, ": for the last ",
                                  config.training.steps - course.total, " steps the rate is ", course.last));
}

Key<Config> scheduler_key() {
  Key<Config> key = custom<Config>("scheduler", "", read_scheduler, write_scheduler);
  key.below = {scheduler_type_key()};
  for (const Type& type : types())
    key.below.push_back({.name = "params", .below = infos(type.params), .type = type.name});
  return key;
}

}  // namespace sherd::config
