#include <algorithm>
#include <array>
#include <cmath>

#include "config/sections/tables.h"

// This file does what transformers' Trainer does to a DeepSpeed file: HfTrainerDeepSpeedConfig fills every
// "auto" from its arguments, and the Trainer makes an optimizer and a schedule where the file has none. Here
// its arguments are keys of section training. They become values of DeepSpeed's keys before those are read,
// so that nothing behind the parser knows of them.
namespace sherd::config {
namespace {

bool is_absent(const Node* node) {
  return !node || node->is(Node::Kind::null);
}

bool is_override(const SourcePlace& place) {
  return place.line == 0;
}

/// Whole numbers are integers.
Node at_place(double value, const SourcePlace& place) {
  const bool whole = value == std::floor(value) && std::abs(value) < 0x1p53;
  Node node = whole ? node_of(static_cast<std::int64_t>(value)) : node_of(value);
  node.place = place;
  return node;
}

Node at_place(Node node, const SourcePlace& place) {
  node.place = place;
  return node;
}

/// The value without its quotes, as numbers and booleans are read.
Node plain(const Node& node) {
  Node out = node;
  if (Node inner;
      node.is(Node::Kind::string) && parse_value(node.text, inner) &&
      (inner.is(Node::Kind::integer) || inner.is(Node::Kind::number) || inner.is(Node::Kind::boolean))) {
    inner.place = node.place;
    return inner;
  }
  for (Node& item : out.items) item = plain(item);
  return out;
}

std::string shown(const Node& node) {
  if (!node.is(Node::Kind::array)) return node.brief();
  std::string out;
  for (const Node& item : node.items) out += (out.empty() ? "[" : ", ") + item.brief();
  return out + "]";
}

/// A value of the Trainer's: what an argument says, or its default.
struct Argument {
  std::string name;  ///< key of section training; empty: none, a constant of the Trainer's
  Node value;
  bool given = false;
  std::string said = {};  ///< the argument's own value, where it is another
};

class Filler {
 public:
  Filler(Node& file, Context& context) : file_(file), context_(context) {}
  void fill();

 private:
  void read_arguments();
  void fill_batch();
  void fill_precision();
  void fill_optimizer();
  void fill_total();
  void fill_scheduler();
  void fill_sizes();
  void make_scheduler();

  template <class T>
  Argument argument(const char* name, std::optional<T> TrainerArguments::*field) const;
  Argument warmup() const;
  std::int64_t steps() const;
  bool is_auto(const std::string& path) const;
  void match(const std::string& path, const Argument& argument);
  void fill_only(const std::string& path, const Argument& argument);
  void replace(Node& node, const std::string& path, const Argument& argument);
  void leave_out(const std::string& path, const std::string& why);
  const SourcePlace& place_of(const char* name) const;
  void note(const char* key, const std::string& why) { context_.note(join("training", key), why); }

  Node& file_;
  Context& context_;
  TrainerArguments arguments_;
  Node own_;           ///< the Trainer's keys, taken out of section training
  bool used_ = false;  ///< an argument was given, or an "auto" filled
  /// The Trainer's optimizer and schedule are meant where the file has none: an "auto" was filled, or an
  /// argument given that they are made of.
  bool trains_ = false;
};

/// Takes the Trainer's arguments out of section training.
void Filler::read_arguments() {
  own_.kind = Node::Kind::object;
  own_.place = file_.place;
  Node* training = file_.find("training");
  if (!training || !training->is(Node::Kind::object)) return;
  own_.place = training->place;
  const Table<TrainerArguments> table = trainer_table();
  const auto is_own = [&](const auto& member) {
    return std::any_of(table.keys.begin(), table.keys.end(), [&](const Key<TrainerArguments>& key) {
      return key.name == member.first ||
             std::find(key.aliases.begin(), key.aliases.end(), member.first) != key.aliases.end();
    });
  };
  std::copy_if(training->members.begin(), training->members.end(), std::back_inserter(own_.members), is_own);
  std::erase_if(training->members, is_own);
  Given given;
  context_.attempt([&] { given = read_section(table, arguments_, Value{own_, "training", context_}); });
  used_ = !given.empty();
  for (const char* name : {"learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon",
                           "warmup_steps", "warmup_ratio", "lr_scheduler_type"})
    trains_ = trains_ || given.contains(name);
}

const SourcePlace& Filler::place_of(const char* name) const {
  const Node* node = own_.find(name);
  return node ? node->place : own_.place;
}

template <class T>
Argument Filler::argument(const char* name, std::optional<T> TrainerArguments::*field) const {
  const std::optional<T>& given = arguments_.*field;
  const auto value = static_cast<double>(given.value_or(*(trainer_defaults().*field)));
  return {name, at_place(value, place_of(name)), given.has_value()};
}

/// training.steps; 0 where the files do not say.
std::int64_t Filler::steps() const {
  constexpr double most = 1e18;  // a value that is no number of steps is refused where the key is read
  const Node* node = find_path(file_, "training.steps");
  const double number = node ? plain(*node).number : 0;
  return number >= 1 ? static_cast<std::int64_t>(std::min(number, most)) : 0;
}

/// As TrainingArguments.get_warmup_steps().
Argument Filler::warmup() const {
  const double asked = arguments_.warmup_steps.value_or(0);
  if (asked >= 1) return {"warmup_steps", at_place(std::floor(asked), place_of("warmup_steps")), true};
  const char* name = arguments_.warmup_steps ? "warmup_steps" : "warmup_ratio";
  const double share = asked > 0 ? asked : arguments_.warmup_ratio.value_or(0);
  if (share > 0 && steps() == 0)
    fail(ErrorKind::config, place_of(name).str(), ": training.", name, ": ", share,
         " is a share of training.steps, which is not given; give it, or a number of steps as ",
         "training.warmup_steps");
  return {arguments_.warmup_ratio || asked > 0 ? name : "warmup_steps",
          at_place(std::ceil(static_cast<double>(steps()) * share), place_of(name)),
          arguments_.warmup_steps || arguments_.warmup_ratio};
}

bool Filler::is_auto(const std::string& path) const {
  const Node* node = find_path(file_, path);
  return node && node->is_text("auto");
}

void Filler::replace(Node& node, const std::string& path, const Argument& argument) {
  const SourcePlace place = node.place;
  node = argument.value;
  node.place = place;
  used_ = trains_ = true;
  const std::string of = argument.name.empty() ? "" : cat("training.", argument.name);
  context_.note(path, cat("\"auto\" takes ", shown(node),
                          argument.given ? cat(", ", of)
                          : of.empty()   ? ", as Trainer has it"
                                         : cat(", the default of ", of)));
}

void Filler::fill_only(const std::string& path, const Argument& argument) {
  if (is_auto(path)) replace(*find_path(file_, path), path, argument);
}

/// Fills an "auto", or a key that is not there and whose argument is given. A value that contradicts a given
/// argument is an error, as in transformers; but --set goes before what files hold.
void Filler::match(const std::string& path, const Argument& argument) {
  const Node* section = file_.find(path.substr(0, path.find('.')));
  if (section != find_path(file_, path) && !is_absent(section) && !section->is(Node::Kind::object)) return;
  fill_only(path, argument);
  Node* node = find_path(file_, path);
  if (is_absent(node)) {
    if (argument.given) put_path(file_, path, argument.value);
  } else if (argument.given && plain(*node) != argument.value) {
    const SourcePlace& place = argument.value.place;
    if (is_override(node->place) && !is_override(place)) {
      note(argument.name.c_str(), cat("no effect: --set ", path, " goes before it"));
      return;
    }
    context_.attempt([&] {
      fail(ErrorKind::config, node->place.str(), ": ", path, ": ", shown(*node), " contradicts training.",
           argument.name, ", ", argument.said.empty() ? shown(argument.value) : argument.said, " (",
           place.str(), "): they say the same, so keep one of them, or give \"auto\" here");
    });
    *node = argument.value;  // so that the error has no consequences
  }
}

/// Removes an "auto" that follows from other keys.
void Filler::leave_out(const std::string& path, const std::string& why) {
  if (!is_auto(path)) return;
  std::erase_if(file_.members, [&](const auto& member) { return member.first == path; });
  used_ = trains_ = true;
  context_.note(path, cat("\"auto\": ", why));
}

void Filler::fill_batch() {
  const std::string all = "train_batch_size", micro = "train_micro_batch_size_per_gpu",
                    accumulate = "gradient_accumulation_steps";
  const Argument size = argument("per_device_train_batch_size", &TrainerArguments::micro_batch_size);
  const Argument steps_per_update =
      argument("gradient_accumulation_steps", &TrainerArguments::gradient_accumulation_steps);
  const bool left_open = is_auto(all) || is_auto(micro) || is_auto(accumulate);
  leave_out(all, "the size per device x accumulation x data-parallel ranks");
  // The whole batch, given as a number, decides about what no argument says.
  const bool total = !is_absent(file_.find(all));
  if (total && !size.given) leave_out(micro, cat("what ", all, " leaves for each rank"));
  if (total && !steps_per_update.given) leave_out(accumulate, cat("what ", all, " leaves"));
  for (const auto& [path, argument] : {std::pair{micro, &size}, std::pair{accumulate, &steps_per_update}}) {
    if (argument->given && (is_auto(path) || is_absent(file_.find(path))))
      context_.given_as[path] = "training." + argument->name;
    match(path, *argument);
  }
  if ((left_open || used_) && !total && is_absent(file_.find(micro))) {
    put_path(file_, micro, size.value);
    context_.note(micro, cat("not given; ", shown(size.value), ", the default of training.", size.name));
  }
}

void Filler::fill_precision() {
  const std::string asked = arguments_.precision.value_or(*trainer_defaults().precision);
  const bool given = arguments_.precision.has_value();
  const auto section = [&](const char* name, const char* other) {
    return std::string(is_absent(file_.find(name)) && !is_absent(file_.find(other)) ? other : name);
  };
  for (const auto& [name, path] : {std::pair{"fp16", section("fp16", "fp16") + ".enabled"},
                                   std::pair{"bf16", section("bf16", "bfloat16") + ".enabled"}}) {
    const bool on = asked == name;
    // A type that is off needs no section to say so.
    const bool says = given && (on || !is_absent(find_path(file_, path)));
    match(path, {"precision", at_place(node_of(on), place_of("precision")), says, cat('"', asked, '"')});
  }
}

/// Where the file has no optimizer, the Trainer makes an AdamW.
void Filler::fill_optimizer() {
  const bool makes = is_absent(file_.find("optimizer"));
  const auto fill = [&](const char* key, const Argument& argument) {
    const std::string path = cat("optimizer.params.", key);
    if (makes)
      put_path(file_, path, argument.value);
    else
      match(path, argument);
  };
  const Argument beta1 = argument("adam_beta1", &TrainerArguments::adam_beta1);
  const Argument beta2 = argument("adam_beta2", &TrainerArguments::adam_beta2);
  const char* both = beta1.given == beta2.given ? "adam_beta1 and adam_beta2"
                     : beta1.given              ? "adam_beta1"
                                                : "adam_beta2";
  const Argument rate = argument("learning_rate", &TrainerArguments::learning_rate);
  if (makes) {
    put_path(file_, "optimizer.type", at_place(node_of("AdamW"), own_.place));
    context_.note("optimizer", cat("not given; AdamW with lr ", shown(rate.value),
                                   ", as Trainer makes it of its arguments in section training"));
  }
  fill("lr", rate);
  fill("betas", {both,
                 at_place(list_of(std::array{beta1.value.number, beta2.value.number}),
                          (beta1.given ? beta1 : beta2).value.place),
                 beta1.given || beta2.given});
  fill("eps", argument("adam_epsilon", &TrainerArguments::adam_epsilon));
  fill("weight_decay", argument("weight_decay", &TrainerArguments::weight_decay));
}

void Filler::fill_total() {
  const std::string path = "scheduler.params.total_num_steps";
  if (!is_auto(path)) return;
  Node& node = *find_path(file_, path);
  if (steps() > 0)
    return replace(node, path, {"steps", at_place(static_cast<double>(steps()), own_.place), true});
  context_.attempt([&] {
    fail(ErrorKind::config, node.place.str(), ": ", path,
         ": \"auto\" is training.steps, which is not given; give it, or a number here");
  });
  node = at_place(1.0, node.place);
}

void Filler::fill_scheduler() {
  const Node* type = find_path(file_, "scheduler.type");
  if (arguments_.schedule) note("lr_scheduler_type", "no effect: the file has a section scheduler");
  const bool decays = type->is_text("WarmupDecayLR"), warms_up = decays || type->is_text("WarmupLR");
  const auto rate = argument("learning_rate", &TrainerArguments::learning_rate);
  fill_only("scheduler.params.warmup_min_lr", {"", at_place(0.0, own_.place), false});
  if (warms_up)
    match("scheduler.params.warmup_max_lr", rate);
  else
    fill_only("scheduler.params.warmup_max_lr", rate);
  fill_total();
  Argument steps_up = warmup();
  // DeepSpeed refuses 0, and its formulas take 2 for less.
  if (steps_up.value.number < 1) steps_up.value = at_place(1.0, steps_up.value.place);
  if (warms_up || type->is_text("WarmupCosineLR"))
    match("scheduler.params.warmup_num_steps", steps_up);
  else if (steps_up.given)
    note(steps_up.name.c_str(), "no effect: the file's scheduler does not warm up");
}

/// Where the file has no scheduler, the Trainer makes one for any optimizer.
void Filler::make_scheduler() {
  const std::string shape = arguments_.schedule.value_or(*trainer_defaults().schedule);
  const Argument steps_up = warmup();
  if (shape == "constant") {
    if (steps_up.given) note(steps_up.name.c_str(), "no effect: training.lr_scheduler_type is \"constant\"");
    return;
  }
  const bool ends = shape != "constant_with_warmup";
  if (ends && steps() == 0)
    return context_.note("scheduler",
                         "not given; Trainer's needs training.steps, so that the rate stays as it is");
  const SourcePlace& place = place_of("lr_scheduler_type");
  put_path(file_, "scheduler.type", at_place(node_of(shape), place));
  put_path(file_, "scheduler.params.warmup_num_steps", steps_up.value);
  if (ends)
    put_path(file_, "scheduler.params.total_num_steps", at_place(static_cast<double>(steps()), place));
  context_.note("scheduler",
                cat("not given; \"", shape, "\", as Trainer makes it: ", steps_up.value.integer,
                    " steps of warmup", ends ? cat(", and down to 0 at step ", steps()) : std::string(),
                    "; training.lr_scheduler_type \"constant\" keeps the rate"));
}

/// Sizes that go by the model's width.
void Filler::fill_sizes() {
  const Node* width = find_path(file_, "model.hidden_size");
  const double hidden = width ? plain(*width).number : 0;
  if (hidden < 1) return;  // a model of the caller's: DeepSpeed's defaults
  const Node* stage = find_path(file_, "zero_optimization.stage");
  const auto fill = [&](const char* key, double size) {
    const std::string path = cat("zero_optimization.", key);
    if (!is_auto(path)) return;
    Node& node = *find_path(file_, path);
    const SourcePlace place = node.place;
    node = at_place(std::floor(size), place);
    used_ = trains_ = true;
    context_.note(path, cat("\"auto\" takes ", node.integer, ", by model.hidden_size"));
  };
  fill("reduce_bucket_size", hidden * hidden);
  if (!stage || plain(*stage).number != 3) return;
  for (const char* prefix : {"stage3_", ""}) {
    fill(cat(prefix, "prefetch_bucket_size").c_str(), 0.9 * hidden * hidden);
    fill(cat(prefix, "param_persistence_threshold").c_str(), 10 * hidden);
  }
}

void Filler::fill() {
  read_arguments();
  fill_sizes();
  fill_precision();
  match("gradient_clipping", argument("max_grad_norm", &TrainerArguments::max_grad_norm));
  const bool has_scheduler = !is_absent(file_.find("scheduler"));
  if (!is_absent(file_.find("optimizer"))) fill_optimizer();
  if (!is_absent(find_path(file_, "scheduler.type"))) fill_scheduler();
  fill_batch();
  if (!trains_) return;
  if (is_absent(file_.find("optimizer"))) fill_optimizer();
  if (!has_scheduler) make_scheduler();
}

}  // namespace

void fill_from_trainer(Node& file, Context& context) {
  if (file.is(Node::Kind::object)) context.attempt([&] { Filler(file, context).fill(); });
}

}  // namespace sherd::config
