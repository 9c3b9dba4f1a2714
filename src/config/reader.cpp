#include "config/reader.h"

#include <algorithm>
#include <cctype>
#include <cmath>

#include "base/text/excerpt.h"
#include "config/config.h"
#include "config/key_defaults.h"

namespace sherd::config {
namespace {

bool same_word(std::string_view a, std::string_view b) {
  return edit_distance(a, b) == 0;
}

/// A known key, or a section above it, as a file has it: "optimizer.params.lr" for what is listed as
/// "optimizer[Adam].params.lr".
struct Home {
  std::string path;
  const KeyInfo& key;
};

/// Where the part `name` of a dotted path ends; npos where it has none.
std::size_t end_of_part(const std::string& path, const std::string& name) {
  const auto found = ("." + path + ".").find("." + name + ".");
  return found == std::string::npos ? found : found + name.size();
}

/// Whether `path` is "….last" and one of its parts begins with `first`.
bool is_about(const std::string& path, const std::string& first, const std::string& last) {
  return path.ends_with("." + last) && ("." + path).find("." + first) != std::string::npos;
}

/// The first home of which `matches(home)` holds, those that are not refused first. It may change the home.
template <class Matches>
std::optional<Home> find_home(const Matches& matches) {
  for (const bool refused : {false, true})
    for (const KeyInfo& key : known_keys())
      if (Home home{without_type(key.path), key}; (key.effect == Effect::refused) == refused && matches(home))
        return home;
  return std::nullopt;
}

/// The key that `name` is meant for elsewhere: a key or a section of the same name, since one in the wrong
/// place is as common as a misspelt one; or for zero_stage, zero_optimization.stage.
std::optional<Home> home_of(const std::string& name) {
  const auto has_name = [&](Home& home) {
    const auto end = end_of_part(home.path, name);
    if (end == std::string::npos) return false;
    home.path.resize(end);
    return true;
  };
  if (const auto same = find_home(has_name)) return same;
  constexpr std::size_t shortest = 2;
  for (auto cut = name.rfind('_'); cut != std::string::npos && cut >= shortest;
       cut = name.rfind('_', cut - 1)) {
    const std::string first = name.substr(0, cut), last = name.substr(cut + 1);
    const auto about = find_home([&](const Home& home) { return is_about(home.path, first, last); });
    if (about && !last.empty()) return about;
  }
  return std::nullopt;
}

/// Keys of other programs, with the key that means the same here, or with what to do about them.
using Advice = std::map<std::string, std::string>;

/// Sizes of a layout by the words of Megatron-LM and other trainers.
const Advice words_of_others = {{"pp", "parallel.pipeline"},
                                {"pp_size", "parallel.pipeline"},
                                {"num_stages", "parallel.pipeline"},
                                {"pipeline_parallel_size", "parallel.pipeline"},
                                {"pipeline_model_parallel_size", "parallel.pipeline"},
                                {"virtual_pipeline_model_parallel_size", "parallel.virtual_stages"},
                                {"tp", "parallel.tensor"},
                                {"tp_size", "parallel.tensor"},
                                {"tensor_parallel_size", "parallel.tensor"},
                                {"tensor_model_parallel_size", "parallel.tensor"},
                                {"cp", "parallel.context"},
                                {"cp_size", "parallel.context"},
                                {"context_parallel_size", "parallel.context"},
                                {"max_grad_norm", "gradient_clipping"},
                                {"fp32_allreduce", "communication_data_type"},
                                {"gradient_accumulation_dtype", "data_types.grad_accum_dtype"}};

/// Arguments of DeepSpeed's MoE layer, and keys of other trainers, in the section model.
const Advice words_of_experts = {
    {"num_experts", "model.moe.experts"},
    {"num_local_experts", "model.moe.experts"},
    {"n_routed_experts", "model.moe.experts"},
    {"num_moe_experts", "model.moe.experts"},
    {"k", "model.moe.top_k"},
    {"num_experts_per_tok", "model.moe.top_k"},
    {"moe_intermediate_size", "model.moe.ffn_hidden_size"},
    {"n_shared_experts", "model.moe.shared_experts"},
    {"router_aux_loss_coef", "model.moe.aux_loss"},
    {"router_jitter_noise", "model.moe.jitter"},
    {"ep_size", "parallel.expert"},
    {"min_capacity", "\"model.moe.capacity_factor\" alone says how many choices an expert takes"},
    {"eval_capacity_factor", "\"model.moe.capacity_factor\" holds in evaluations too"},
    {"drop_tokens", "without \"model.moe.capacity_factor\" nothing is dropped"},
    {"noisy_gate_policy",
     "\"model.moe.jitter\" 0.01 is DeepSpeed's \"Jitter\"; its \"RSample\" is not offered"}};

/// Other arguments of transformers' Trainer, in the section training.
const Advice words_of_trainer = {{"bf16", "did you mean \"training.precision\" \"bf16\"?"},
                                 {"fp16", "did you mean \"training.precision\" \"fp16\"?"},
                                 {"output_dir", "training.save_dir"},
                                 {"save_steps", "training.save_interval"},
                                 {"save_total_limit", "training.keep_last"},
                                 {"logging_steps", "training.log_interval"},
                                 {"max_steps", "training.steps"},
                                 {"gradient_checkpointing", "training.recompute"},
                                 {"lr", "training.learning_rate"},
                                 {"load_best_model_at_end", "training.keep_best"},
                                 {"early_stopping_patience", "training.patience"},
                                 {"report_to", "tensorboard.enabled"},
                                 {"data_seed", "data.seed"},
                                 {"num_train_epochs", "\"training.steps\" says how long to train"}};

/// The advice on a key; empty: none.
std::string advice_of(const Advice& all, const std::string& name) {
  const auto found = all.find(name);
  if (found == all.end()) return "";
  const bool is_key = found->second.find(' ') == std::string::npos;
  return is_key ? cat("did you mean \"", found->second, "\"?") : found->second;
}

/// Says what to do about a key that a section does not know.
std::string advice(const Value& section, const std::string& name, const std::vector<std::string>& known) {
  constexpr std::size_t longest = 100, most_listed = 24;
  if (known.empty()) return "this section takes no keys";
  if (section.path.starts_with("optimizer") && name == "learning_rate") return "did you mean \"lr\"?";
  for (const auto& [holds, words] :
       {std::pair(section.path == "training", &words_of_trainer),
        std::pair(section.path.starts_with("model"), &words_of_experts), std::pair(true, &words_of_others)})
    if (std::string about = holds ? advice_of(*words, name) : ""; !about.empty()) return about;
  if (const std::string close = nearest(name, known); !close.empty())
    return cat("did you mean \"", close, "\"?");
  if (name.size() <= longest)
    if (const auto home = home_of(name)) {
      if (home->path == join(section.path, name))
        return cat("it belongs to the type ", type_in(home->key.path));
      if (home->key.effect == Effect::refused)
        return cat("it is refused also as \"", home->path, "\": ", home->key.reason);
      const bool top = home->path.find('.') == std::string::npos;
      return cat("did you mean \"", home->path, top ? "\" at the top level?" : "\"?");
    }
  if (known.size() <= most_listed) return cat("this section knows ", joined_text(known));
  return "no key of this section is like it; remove it, or put \"_\" in front if it is a note";
}

}  // namespace

Row::Row() = default;
Row::Row(const Row&) = default;
Row::Row(Row&&) noexcept = default;
Row::~Row() = default;

void Row::apply(std::string_view deepspeed) {
  difference = deepspeed;
}
void Row::apply(Default rule) {
  derived = std::move(rule.words);
}
void Row::apply(Alias other) {
  aliases.push_back(std::move(other.name));
}
void Row::apply(Instead other) {
  required = true, instead = std::move(other.name);
}
void Row::apply(Idle because) {
  idle = std::move(because.why);
}
void Row::apply(Concerns who) {
  concerns = who;
}
void Row::apply(Auto rule) {
  auto_rule = rule;
}
void Row::apply(Flag flag) {
  if (flag == Flag::required) required = true;
  if (flag == Flag::decides_parameters) decides_parameters = true;
  if (flag == Flag::reads_null) reads_null = true;
  if (flag == Flag::writes_null) writes_null = true;
}
void Row::take(Takes what) {
  values = std::move(what.words), schema = std::move(what.schema);
}
void Row::take_one_of(std::vector<std::string> those) {
  schema = words(those).schema, choices = std::move(those);
}

Takes integers(std::int64_t min, std::int64_t max) {
  const bool above = min > std::numeric_limits<std::int64_t>::min();
  const bool below = max < int64_max && max != std::numeric_limits<int>::max();
  return {above && below ? cat("integer from ", min, " to ", max)
          : above        ? cat("integer >= ", min)
                         : "integer",
          cat(R"({"type": "integer")", above ? cat(R"(, "minimum": )", min) : "",
              max < int64_max ? cat(R"(, "maximum": )", max) : "", "}")};
}

Takes byte_sizes() {
  return {bytes_form, R"({"type": ["integer", "string"], "minimum": 0})"};
}

Takes reals(double min, double max, bool open_min) {
  std::string schema = R"({"type": "number")";
  if (min > -infinity) schema += cat(open_min ? R"(, "exclusiveMinimum": )" : R"(, "minimum": )", min);
  if (max < infinity) schema += cat(R"(, "maximum": )", max);
  schema += "}";
  if (min == -infinity && max == infinity) return {"finite number", schema};
  if (max == infinity) return {cat("number ", open_min ? "> " : ">= ", min), schema};
  if (min == -infinity) return {cat("number <= ", max), schema};
  return {cat("number from ", min, " to ", max), schema};
}

Takes words(const std::vector<std::string>& words) {
  return {joined_text(words), cat(R"({"enum": )", list_of(words).json(), "}")};
}

Takes numbers(std::string words, std::size_t count, double min, double max) {
  return {std::move(words), cat(R"({"type": "array", "items": )", reals(min, max).schema, R"(, "minItems": )",
                                count, R"(, "maxItems": )", count, "}")};
}

std::vector<double> read_numbers(const Value& value, std::size_t count, const char* form, double min,
                                 double max) {
  const std::vector<Node>& items = value.node.items;
  if (!value.node.is(Node::Kind::array) || items.size() != count)
    value.error("must be a list of ", form, ", not ", value.node.brief());
  std::vector<double> out;
  for (std::size_t i = 0; i < count; ++i) out.push_back(value.item(i).real(min, max));
  return out;
}

void Context::attempt(const std::function<void()>& read) {
  try {
    problems.attempt(read);
  } catch (const Reported&) {
  }
}

void Context::raise() {
  problems.for_each([this](std::string& message) { message = in_given_keys(std::move(message), given_as); });
  problems.raise();
}

std::string in_given_keys(std::string text, const std::map<std::string, std::string>& given_as) {
  const auto in_key = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; };
  for (const auto& [own, given] : given_as)
    for (std::size_t at = text.find(own); at != std::string::npos; at = text.find(own, at + 1)) {
      const std::size_t end = at + own.size();
      const bool inside = (at > 0 && (in_key(text[at - 1]) || text[at - 1] == '.')) ||
                          (end < text.size() && in_key(text[end]));
      if (!inside) text.replace(at, own.size(), given);
    }
  return text;
}

void Value::expect(Node::Kind kind) const {
  if (!node.is(kind)) {
    const std::string subject = path.empty() ? cat("the file must hold ") : cat(path, ": must be ");
    fail(ErrorKind::config, node.place.str(), ": ", subject, name_of(kind), ", not ", node.brief());
  }
}

Node unquoted(const Value& value) {
  Node plain;
  constexpr std::size_t longest = 30;
  const Node& node = value.node;
  // As Python's str() writes them, too.
  const std::string text = node.text == "True" ? "true" : node.text == "False" ? "false" : node.text;
  if (!node.is(Node::Kind::string) || text.size() > longest || !parse_value(text, plain)) return node;
  if (!plain.is(Node::Kind::boolean) && !plain.is(Node::Kind::integer) && !plain.is(Node::Kind::number))
    return node;
  value.note(cat(node.brief(), " is taken for ", node.text, ", without quotes"));
  return plain;
}

bool Value::boolean() const {
  const Node plain = unquoted(*this);
  if (!plain.is(Node::Kind::boolean)) error("must be true or false, not ", node.brief());
  return plain.boolean;
}

std::int64_t Value::integer(std::int64_t min, std::int64_t max) const {
  const Node plain = unquoted(*this);
  std::int64_t value = plain.integer;
  bool good = plain.is(Node::Kind::integer);
  if (plain.is(Node::Kind::number) && std::abs(plain.number) < 0x1p63 &&
      plain.number == std::floor(plain.number))
    value = static_cast<std::int64_t>(plain.number), good = true;
  if (good && value >= min && value <= max) return value;
  error("must be an ", integers(min, max).words, ", not ", node.brief());
}

double Value::real(double min, double max, bool open_min) const {
  const Node plain = unquoted(*this);
  const bool number = plain.is(Node::Kind::integer) || plain.is(Node::Kind::number);
  const double value = plain.number;
  if (number && std::isfinite(value) && value <= max && (open_min ? value > min : value >= min)) return value;
  const bool list = node.is(Node::Kind::array);
  error("must be a ", reals(min, max, open_min).words, ", not ", node.brief(),
        list ? "; one value serves all parameters here" : "");
}

std::uint64_t Value::bytes() const {
  if (node.is(Node::Kind::integer) || node.is(Node::Kind::number))
    return static_cast<std::uint64_t>(integer(0));
  if (const auto bytes = bytes_of(node.text)) return *bytes;
  error("must be ", bytes_form, ", not ", node.brief());
}

const std::string& Value::text() const {
  constexpr std::size_t longest = 4096;  // as the system's paths
  if (!node.is(Node::Kind::string)) error("must be a string, not ", node.brief());
  if (node.text.size() > longest)
    error("must be a string of at most ", longest, " bytes, not ", node.brief());
  return node.text;
}

std::size_t Value::choice(const std::vector<std::string>& names, const Synonyms& meant) const {
  const std::string& word = text();
  for (std::size_t i = 0; i < names.size(); ++i)
    if (same_word(word, names[i])) return i;
  const auto known = std::find_if(meant.begin(), meant.end(),
                                  [&](const auto& entry) { return same_word(word, entry.first); });
  const std::string close = known != meant.end() ? known->second : nearest(word, names);
  error(node.brief(), " is none of ", joined_text(names),
        close.empty() ? std::string() : cat("; did you mean \"", close, "\"?"));
}

void unknown_key(const Value& section, const std::string& name, const Node& value,
                 const std::vector<std::string>& known) {
  const bool told = section.context.problems.size() < Problems::most;
  fail(ErrorKind::config, value.place.str(), ": unknown key \"", join(section.path, excerpt(name)), "\"; ",
       !told                            ? ""
       : section.context.advice.empty() ? advice(section, name, known)
                                        : section.context.advice);
}

void given_twice(const Value& value, const std::string& other) {
  value.error("means the same as \"", other, "\", which is given too; remove one of the two");
}

bool handle_auto(Auto rule, const Value& value) {
  if (rule == Auto::is_a_value || !value.node.is_text("auto")) return false;
  if (rule == Auto::needs_caller)
    value.error(
        "transformers' Trainer has no argument that would fill in \"auto\" here; give a value, or one with "
        "--set ",
        value.path, "=VALUE");
  value.note("\"auto\" takes the default");
  return true;
}

bool is_false(const Value& value) {
  return !value.boolean();
}

bool is_empty(const Value& value) {
  const Node& node = value.node;
  return node.is_text("") || (node.is(Node::Kind::array) && node.items.empty()) ||
         (node.is(Node::Kind::object) && node.members.empty());
}

std::function<bool(const Value&)> equals_number(double number) {
  return [number](const Value& value) { return value.real() == number; };
}

bool never(const Value&) {
  return false;
}

}  // namespace sherd::config
