#include <algorithm>

#include "config/sections/tables.h"

// Section `model.rope_scaling`, and its like for layers with a window.
namespace sherd::config {
namespace {

// In the order of the enum.
const std::vector<std::string> rope_types = {"default", "linear", "llama3", "yarn", "longrope", "dynamic"};

std::string type_of(const RopeScaling& rope) {
  return cat("rope_type \"", name_of(rope.type), "\"");
}

bool is_llama3(const RopeScaling& rope) {
  return rope.type == RotaryScaling::llama3;
}
bool is_yarn(const RopeScaling& rope) {
  return rope.type == RotaryScaling::yarn;
}

bool is_longrope(const RopeScaling& rope) {
  return rope.type == RotaryScaling::longrope;
}

/// A number for each pair of a head.
Key<RopeScaling> pair_factors(std::string_view name, std::vector<double> RopeScaling::*field,
                              const char* which) {
  const auto read = [field](RopeScaling& rope, const Value& value) {
    (rope.*field).clear();
    for (std::size_t i = 0; i < length_of(value, is_number, "numbers"); ++i)
      (rope.*field).push_back(value.item(i).real(0, infinity, true));
  };
  return custom<RopeScaling>(name, "[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]", read,
                             [field](const RopeScaling& rope) { return list_of(rope.*field); })
      .where(is_longrope)
      .takes({"list of numbers", R"({"type": "array", "items": {"type": "number", "exclusiveMinimum": 0}})"})
      .means(cat("longrope: what divides the frequency of each pair of a head that turns, where `seq_length` "
                 "is ",
                 which),
             by("required with longrope"));
}

}  // namespace

bool is_number(const Node& item) {
  return item.is(Node::Kind::integer) || item.is(Node::Kind::number);
}

std::size_t length_of(const Value& value, bool (*fits)(const Node&), const char* what) {
  const std::vector<Node>& items = value.node.items;
  if (!value.node.is(Node::Kind::array) || !std::all_of(items.begin(), items.end(), fits))
    value.error("must be a list of ", what, ", not ", value.node.brief());
  return items.size();
}

const Table<RopeScaling>& rope_table() {
  using T = RopeScaling;
  static const Table<RopeScaling> table{
      Auto::is_a_value,
      {choice("rope_type", &T::type, rope_types, "\"linear\"")
           .means("how positions are scaled; default: not at all; dynamic: not within `max_positions`, as "
                  "transformers does, and no sequence here is longer",
                  also("type"), required),
       real("factor", &T::factor, "8", 1)
           .means("by how much sequences may be longer", required,
                  by("required, but with rope_type default and longrope")),
       integer("original_max_position_embeddings", &T::original_max_positions, "32", 1, most_positions)
           .where([](const T& rope) { return is_llama3(rope) || is_yarn(rope) || is_longrope(rope); })
           .means("llama3, yarn, longrope: the first length, positions that the model was first trained on",
                  by("llama3, longrope: required; yarn: `max_positions`")),
       pair_factors("short_factor", &T::short_factor, "at most the first length"),
       pair_factors("long_factor", &T::long_factor, "more"),
       real("low_freq_factor", &T::low_freq_factor, "2", 0, infinity, true)
           .where(is_llama3)
           .means("llama3: waves longer than the first length over this are scaled in full",
                  by("required with llama3")),
       real("high_freq_factor", &T::high_freq_factor, "8", 0, infinity, true)
           .where(is_llama3)
           .means("llama3: waves shorter than the first length over this are not scaled",
                  by("required with llama3")),
       real("beta_fast", &T::beta_fast, "16", 0, infinity, true)
           .where(is_yarn)
           .means("yarn: dimensions that turn more often than this in the first length are not scaled"),
       real("beta_slow", &T::beta_slow, "2", 0, infinity, true)
           .where(is_yarn)
           .means("yarn: dimensions that turn less often than this in the first length are scaled in full"),
       boolean("truncate", &T::truncate)
           .where(is_yarn)
           .means("yarn: the bounds between both are whole dimensions"),
       real("attention_factor", &T::attention_factor, "1.2", 0, infinity, true)
           .unset(0.0)
           .where([](const T& rope) { return is_yarn(rope) || is_longrope(rope); })
           .means(
               "yarn, longrope: factor of rotated queries and keys",
               by("yarn: 0.1 · ln `factor` + 1; longrope: √(1 + ln s / ln first length), s being `factor` or "
                  "else `max_positions` over the first length"))},
      [](T& rope, const Given& given, const Value& section) { finish_rope(rope, given, section); }};
  return table;
}

void finish_rope(RopeScaling& rope, const Given& given, const Value& section) {
  const Table<RopeScaling>& table = rope_table();
  const auto require_key = [&](const char* name) {
    if (!given.contains(name)) section.error("needs \"", name, "\"");
  };
  require_key("rope_type");
  if (rope.type != RotaryScaling::none && !is_longrope(rope)) require_key("factor");
  note_idle(table, rope, given, section, cat("no effect with ", type_of(rope)));
  if (is_llama3(rope))
    for (const char* name : {"low_freq_factor", "high_freq_factor", "original_max_position_embeddings"})
      require_key(name);
  if (is_longrope(rope))
    for (const char* name : {"short_factor", "long_factor", "original_max_position_embeddings"})
      require_key(name);
  if (is_llama3(rope) && rope.low_freq_factor >= rope.high_freq_factor)
    section.error("low_freq_factor ", rope.low_freq_factor, " must be below high_freq_factor ",
                  rope.high_freq_factor);
  if (is_yarn(rope) && rope.beta_slow >= rope.beta_fast)
    section.error("beta_slow ", rope.beta_slow, " must be below beta_fast ", rope.beta_fast);
  // A value without effect is not kept.
  RopeScaling used;
  used.type = rope.type;
  if (rope.type != RotaryScaling::none) used.factor = rope.factor;
  if (is_llama3(rope))
    used.low_freq_factor = rope.low_freq_factor, used.high_freq_factor = rope.high_freq_factor;
  if (is_yarn(rope)) {
    used.beta_fast = rope.beta_fast, used.beta_slow = rope.beta_slow, used.truncate = rope.truncate;
    used.attention_factor = rope.attention_factor;
  }
  if (is_longrope(rope)) {
    used.short_factor = rope.short_factor, used.long_factor = rope.long_factor;
    used.attention_factor = rope.attention_factor;
  }
  if (is_llama3(rope) || is_yarn(rope) || is_longrope(rope))
    used.original_max_positions = rope.original_max_positions;
  rope = used;
}

void read_rope(RopeScaling& rope, const Value& section) {
  read_section(rope_table(), rope, section);
}

Node written_rope(const RopeScaling& rope) {
  static const Table<RopeScaling> table = rope_table();
  Node out = written(table, rope);
  const bool none = rope.type == RotaryScaling::none;
  std::erase_if(out.members, [&](const auto& member) {
    return ((none || (is_longrope(rope) && rope.factor == 1)) && member.first == "factor") ||
           (rope.truncate && member.first == "truncate");
  });
  return out;
}

std::string_view name_of(RotaryScaling type) {
  return rope_types[static_cast<std::size_t>(type)];
}

}  // namespace sherd::config
