#include "config/tables.h"

namespace sherd::config {
namespace {

const std::vector<std::string> type_names = {
    "LRRangeTest",    "OneCycle", "WarmupLR", "WarmupDecayLR",
    "WarmupCosineLR", "linear",   "cosine",   "constant_with_warmup"};
constexpr const char* supported =
    "LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR, and transformers' linear, cosine and "
    "constant_with_warmup";
enum class Type {
  range_test,
  one_cycle,
  warmup,
  warmup_decay,
  warmup_cosine,
  linear,
  cosine,
  constant_with_warmup
};

const std::vector<std::string> foreign_types = {"StepLR",
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

std::vector<Text> cycle_texts() {
  return {
      required("cycle_min_lr", "rate at both ends of the cycle"),
      required("cycle_max_lr", "rate at its top"),
      {"decay_lr_rate", "after the cycle: the rate is divided by 1 + this for each `decay_step_size`"},
      {"cycle_first_step_size", "steps of the way up"},
      derived("cycle_second_step_size", "`cycle_first_step_size`", "steps of the way down"),
      {"cycle_first_stair_count", "stairs of the way up; 0: none", "0.16 ignores it"},
      derived("cycle_second_stair_count", "`cycle_first_stair_count`", "stairs of the way down; 0: none",
              "0.16 ignores it"),
      {"decay_step_size", "steps of the decay after the cycle; 0: no decay"},
      {"cycle_momentum", "β1 moves against the rate, and β2 becomes 0.99, where the optimizer has betas"},
      {"cycle_min_mom", "β1 at the top of the cycle"},
      {"cycle_max_mom", "β1 at both ends"},
      {"decay_mom_rate", "after the cycle: β1 is multiplied by 1 + this for each `decay_step_size`"},
  };
}

/// Of any type that has the key.
std::vector<Text> texts() {
  return {
      {"last_batch_iteration", "where the schedule begins"},
      {"lr_range_test_min_lr", "rate at the start", "also takes a list, one for each group"},
      {"lr_range_test_step_size", "steps of a stair"},
      {"lr_range_test_step_rate", "by what share of the start the rate rises in so many steps"},
      {"lr_range_test_staircase", "rise in stairs"},
      required("total_num_steps", "steps until the rate has come down"),
      {"warmup_min_lr", "rate at the start, and of WarmupDecayLR also at the end",
       "also takes a list, one for each group"},
      {"warmup_num_steps", "steps of the warmup; the formulas of DeepSpeed's types take 2 for less",
       "since 0.19.6 refuses 0"},
      {"warmup_type", "how the rate rises", "takes log for any other word"},
      {"warmup_min_ratio", "rate at the start, as a share of the optimizer's"},
      {"cos_min_ratio", "rate at the end, as a share of the optimizer's"},
  };
}

template <class T>
Table<T> finish(std::vector<Key<T>> keys) {
  keys.push_back(refused<T>("last_batch_iteration", "5", "the position comes from the checkpoint on resume",
                            equals_number(-1)));
  for (const Text& text : texts())
    for (Key<T>& key : keys)
      if (key.name == text.name) describe(key, text);
  return {Auto::needs_caller, std::move(keys)};
}

Table<LrRangeTest> table_of(const LrRangeTest&, bool) {
  std::vector<Key<LrRangeTest>> keys;
  keys.push_back(real("lr_range_test_min_lr", &LrRangeTest::min_lr, "0.01", 0));
  keys.push_back(integer("lr_range_test_step_size", &LrRangeTest::step_size, "7", 1));
  keys.push_back(real("lr_range_test_step_rate", &LrRangeTest::step_rate, "2.0"));
  keys.push_back(boolean("lr_range_test_staircase", &LrRangeTest::staircase));
  return finish(std::move(keys));
}

Table<OneCycle> table_of(const OneCycle&, bool) {
  using T = OneCycle;
  std::vector<Key<T>> keys;
  keys.push_back(real("cycle_min_lr", &T::cycle_min_lr, "1e-5", 0));
  keys.push_back(real("cycle_max_lr", &T::cycle_max_lr, "1e-2", 0));
  keys.push_back(real("decay_lr_rate", &T::decay_lr_rate, "0.1", 0));
  keys.push_back(integer("cycle_first_step_size", &T::cycle_first_step_size, "10", 1));
  keys.push_back(integer("cycle_second_step_size", &T::cycle_second_step_size, "20", 0));
  keys.push_back(integer("cycle_first_stair_count", &T::cycle_first_stair_count, "3", 0));
  keys.push_back(integer("cycle_second_stair_count", &T::cycle_second_stair_count, "4", 0));
  keys.push_back(integer("decay_step_size", &T::decay_step_size, "5", 0));
  keys.push_back(boolean("cycle_momentum", &T::cycle_momentum));
  keys.push_back(real("cycle_min_mom", &T::cycle_min_mom, "0.7", 0, 1));
  keys.push_back(real("cycle_max_mom", &T::cycle_max_mom, "0.95", 0, 1));
  keys.push_back(real("decay_mom_rate", &T::decay_mom_rate, "0.1", 0));
  describe(keys, cycle_texts());
  return finish(std::move(keys));
}

// DeepSpeed refuses 0 since 0.19.6; what it makes of it before are 2 steps, as of 1.
template <class T>
Key<T> warmup_steps_key(std::int64_t T::*field) {
  return custom<T>("warmup_num_steps", "10",
                   [field](T& target, const Value& value) {
                     target.*field = value.integer(0);
                     if (target.*field > 0) return;
                     target.*field = 1;
                     value.note("0 means 2, the least that the formulas know, as in DeepSpeed before 0.19.6");
                   })
      .takes(integers(0));
}

// null is a value of its own here: the optimizer's lr.
Key<Warmup> warmup_max_key(bool decays) {
  Key<Warmup> key = custom<Warmup>("warmup_max_lr", "0.01", [](Warmup& target, const Value& value) {
    target.warmup_max_lr = value.node.is(Node::Kind::null) ? std::nullopt : std::optional(value.real(0));
  });
  key.reads_null = true;
  key.values = reals(0) + ", or null: the optimizer's `lr`";
  describe(key, {"warmup_max_lr", "rate after the warmup", "0.16: 0.001 by default, with WarmupLR too"});
  if (!decays) key.derived = "the optimizer's `lr`";
  return key;
}

Table<Warmup> table_of(const Warmup&, bool decays) {
  std::vector<Key<Warmup>> keys;
  if (decays) keys.push_back(integer("total_num_steps", &Warmup::total_num_steps, "5000", 1));
  keys.push_back(real("warmup_min_lr", &Warmup::warmup_min_lr, "1e-6", 0));
  keys.push_back(warmup_max_key(decays));
  keys.push_back(warmup_steps_key(&Warmup::warmup_num_steps));
  keys.push_back(choice("warmup_type", &Warmup::warmup_type, {"log", "linear"}, "\"linear\""));
  return finish(std::move(keys));
}

Table<WarmupCosine> table_of(const WarmupCosine&, bool) {
  using T = WarmupCosine;
  std::vector<Key<T>> keys;
  keys.push_back(integer("total_num_steps", &T::total_num_steps, "5000", 1));
  keys.push_back(real("warmup_min_ratio", &T::warmup_min_ratio, "0.1", 0));
  keys.push_back(warmup_steps_key(&T::warmup_num_steps));
  keys.push_back(real("cos_min_ratio", &T::cos_min_ratio, "0.1", 0));
  keys.push_back(choice("warmup_type", &T::warmup_type, {"log", "linear"}, "\"linear\""));
  return finish(std::move(keys));
}

Table<TrainerSchedule> table_of(const TrainerSchedule&, bool decays) {
  using T = TrainerSchedule;
  std::vector<Key<T>> keys;
  if (decays) keys.push_back(integer("total_num_steps", &T::total_num_steps, "5000", 1));
  keys.push_back(integer("warmup_num_steps", &T::warmup_num_steps, "10", 0));
  return finish(std::move(keys));
}

/// read_scheduler() has read it before.
template <class T>
Key<T> type_key() {
  Key<T> key = custom<T>("type", "\"WarmupLR\"", [](T&, const Value&) {}).one_of(type_names);
  describe(
      key,
      derived("type", "required; without the section the optimizer's rates stay",
              "the schedule of rates; linear, cosine and constant_with_warmup are transformers', but that "
              "behind the last step rates stay where they are, where transformers' cosine rises again",
              "also takes PyTorch's; rates of groups keep their proportion under all types here, there under "
              "WarmupCosineLR alone"));
  return key;
}

void need(const Value& section, const Given& given, std::initializer_list<const char*> names) {
  for (const char* name : names)
    if (!given.contains(name)) section.error("needs \"params.", name, "\"");
}

template <class T>
Given read_params(T& target, const Value& section, bool decays = false) {
  Table<T> table;
  table.keys.push_back(type_key<T>());
  Given given;
  table.keys.push_back(custom<T>("params", "", [&](T& into, const Value& params) {
    given = read_section(table_of(into, decays), into, params);
  }));
  read_section(table, target, section);
  return given;
}

OneCycle read_one_cycle(const Value& section) {
  OneCycle cycle;
  const Given given = read_params(cycle, section);
  need(section, given, {"cycle_min_lr", "cycle_max_lr"});
  if (!given.contains("cycle_second_step_size")) cycle.cycle_second_step_size = cycle.cycle_first_step_size;
  if (!given.contains("cycle_second_stair_count"))
    cycle.cycle_second_stair_count = cycle.cycle_first_stair_count;
  return cycle;
}

Warmup read_warmup(const Value& section, bool decays) {
  Warmup warmup;
  if (decays)
    warmup.warmup_max_lr = 0.001;  // WarmupDecayLR keeps this default; WarmupLR takes the optimizer's lr
  const Given given = read_params(warmup, section, decays);
  if (decays) need(section, given, {"total_num_steps"});
  return warmup;
}

WarmupCosine read_cosine(const Value& section) {
  WarmupCosine cosine;
  need(section, read_params(cosine, section), {"total_num_steps"});
  return cosine;
}

TrainerSchedule read_trainer_schedule(const Value& section, RateShape shape) {
  TrainerSchedule schedule;
  schedule.shape = shape;
  const bool ends = shape != RateShape::constant_with_warmup;
  const Given given = read_params(schedule, section, ends);
  if (ends) need(section, given, {"total_num_steps"});
  return schedule;
}

Type read_type(const Value& section) {
  const Node* type = section.node.find("type");
  if (!type) section.error("needs a \"type\"; this build has ", supported);
  const Value value{*type, join(section.path, "type"), section.context};
  for (const std::string& name : foreign_types)
    if (value.text() == name)
      value.error(type->brief(), " is PyTorch's and not in this build, which has ", supported);
  return static_cast<Type>(value.choice(type_names));
}

void read_scheduler(Config& config, const Value& section) {
  section.expect(Node::Kind::object);
  const Node* type = section.node.find("type");
  if (section.node.members.empty() || (type && type->is(Node::Kind::null))) return;
  switch (read_type(section)) {
    case Type::range_test: {
      LrRangeTest range;
      read_params(range, section);
      config.scheduler = range;
      break;
    }
    case Type::one_cycle:
      config.scheduler = read_one_cycle(section);
      break;
    case Type::warmup:
      config.scheduler = read_warmup(section, false);
      break;
    case Type::warmup_decay:
      config.scheduler = read_warmup(section, true);
      break;
    case Type::warmup_cosine:
      config.scheduler = read_cosine(section);
      break;
    case Type::linear:
      config.scheduler = read_trainer_schedule(section, RateShape::linear);
      break;
    case Type::cosine:
      config.scheduler = read_trainer_schedule(section, RateShape::cosine);
      break;
    case Type::constant_with_warmup:
      config.scheduler = read_trainer_schedule(section, RateShape::constant_with_warmup);
      break;
  }
}

/// Of a schedule that ends: how long it rises, when it ends, and at what rate.
struct Course {
  std::int64_t warmup = 0, total = 0;
  std::string last;
};

struct CourseOf {
  Course operator()(const Warmup& s) const {
    return {s.warmup_num_steps, s.total_num_steps, cat(s.warmup_min_lr)};
  }
  Course operator()(const WarmupCosine& s) const {
    return {s.warmup_num_steps, s.total_num_steps, cat(s.cos_min_ratio, " of the optimizer's")};
  }
  Course operator()(const TrainerSchedule& s) const {
    if (s.shape == RateShape::constant_with_warmup) return {};
    return {s.warmup_num_steps, s.total_num_steps, "0"};
  }
  template <class Other>
  Course operator()(const Other&) const {
    return {};
  }
};

}  // namespace

void note_short_schedule(const Config& config, Context& context) {
  const Course course = std::visit(CourseOf(), config.scheduler);
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
  Key<Config> key = custom<Config>("scheduler", "", read_scheduler);
  key.list = [](const std::string& prefix, std::vector<KeyInfo>& out) {
    list_keys(Table<Warmup>{Auto::is_a_value, {type_key<Warmup>()}}, prefix, out);
    const auto path = [&](Type type) {
      return cat(prefix, "[", type_names[static_cast<std::size_t>(type)], "].params");
    };
    list_keys(table_of(LrRangeTest{}, false), path(Type::range_test), out);
    list_keys(table_of(OneCycle{}, false), path(Type::one_cycle), out);
    list_keys(table_of(Warmup{}, false), path(Type::warmup), out);
    list_keys(table_of(Warmup{}, true), path(Type::warmup_decay), out);
    list_keys(table_of(WarmupCosine{}, false), path(Type::warmup_cosine), out);
    for (const Type type : {Type::linear, Type::cosine, Type::constant_with_warmup})
      list_keys(table_of(TrainerSchedule{}, type != Type::constant_with_warmup), path(type), out);
  };
  return key;
}

}  // namespace sherd::config
