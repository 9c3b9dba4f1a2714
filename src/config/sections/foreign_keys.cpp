#include <algorithm>
#include <sstream>

#include "base/dtype.h"
#include "config/sections/foreign_table.h"
#include "config/sections/tables.h"

namespace sherd::config {
namespace {

using ForeignKey = Key<Nothing>;

/// An accepted key must hold this, so that a wrong type is still an error.
struct Form {
  const char* example;
  Takes takes;
  std::function<void(const Value&)> check;
  std::optional<Auto> auto_rule = {};  ///< at the top; below it the section's
};

const std::map<std::string, Form>& forms() {
  const auto text = [](const Value& value) { value.text(); };
  const auto count = [](const Value& value) { value.integer(0); };
  static const std::vector<std::string> tags = {"Ignore", "Warn", "Fail"};
  const Takes string{"string", R"({"type": "string"})"};
  static const std::map<std::string, Form> all = {
      {"boolean",
       {"true",
        {"true or false", R"({"type": "boolean"})"},
        [](const Value& value) { value.boolean(); },
        Auto::to_default}},
      {"count", {"3", integers(0), count, Auto::to_default}},
      {"count, never auto", {"3", integers(0), count}},
      {"number", {"0.5", reals(), [](const Value& value) { value.real(); }, Auto::to_default}},
      {"string", {"\"x\"", string, text}},
      {"dtype", {"\"fp32\"", string, text}},
      {"tag check", {"\"Fail\"", words(tags), [](const Value& value) { value.choice(tags); }}},
      {"anything", {"{}", {"anything", "{}"}, [](const Value&) {}}},
      {"section", {"{}", {"section", ""}, [](const Value&) {}}}};
  return all;
}

/// `"enabled"` absent, false or "auto".
bool not_enabled(const Value& value) {
  value.expect(Node::Kind::object);
  const Node* enabled = value.node.find("enabled");
  if (!enabled || enabled->is(Node::Kind::null) || enabled->is_text("auto")) return true;
  return !value.at("enabled").boolean();
}

/// Nothing below has an "enabled" that is on.
bool enables_nothing(const Value& value) {
  const Node& node = value.node;
  const Node* enabled = node.find("enabled");
  if (enabled && unquoted(value.at("enabled")).boolean) return false;
  return node.is(Node::Kind::object) &&
         std::all_of(node.members.begin(), node.members.end(), [&](const auto& member) {
           const Value below = value.at(member.first);
           return !below.node.is(Node::Kind::object) || enables_nothing(below);
         });
}

/// A value that says "off", by which a refused key is accepted: as JSON Schema, and whether one is.
struct Off {
  std::string schema;
  std::function<bool(const Value&)> holds;
};

const std::map<std::string, Off>& offs() {
  const auto is_true = [](const Value& value) { return value.boolean(); };
  const auto is_itself = [](const Value& value) {
    return value.node.is(Node::Kind::boolean) && value.node.boolean;
  };
  const auto is_mean = [](const Value& value) { return value.choice({"mean", "sum"}) == 0; };
  const auto is_one_rank = [](const Value& value) {
    return value.integer(1, std::numeric_limits<int>::max()) == 1;
  };
  const auto is_fp16 = [](const Value& value) {
    return parse_dtype(value.text()) == DType::f16 || value.text() == "float16";
  };
  static const std::map<std::string, Off> all = {
      {"false", {R"({"const": false})", is_false}},
      {"true", {R"({"const": true})", is_true}},
      {"true alone", {R"({"const": true})", is_itself}},
      {"empty", {R"({"enum": ["", [], {}]})", is_empty}},
      {"nothing", {R"({"not": {}})", never}},
      {"-1", {R"({"const": -1})", equals_number(-1)}},
      {"0", {R"({"const": 0})", equals_number(0)}},
      {"1", {R"({"const": 1})", equals_number(1)}},
      {"one rank", {R"({"const": 1})", is_one_rank}},
      {"at most 1", {reals(-infinity, 1).schema, [](const Value& value) { return value.real() <= 1; }}},
      {"mean", {R"({"const": "mean"})", is_mean}},
      {"MLP", {R"({"const": "MLP"})", [](const Value& value) { return value.node.is_text("MLP"); }}},
      {"fp16", {R"({"enum": ["fp16", "float16"]})", is_fp16}},
      // Files that were written for PEFT have its own ways to say that a switch is off.
      {"off",
       {R"({"enum": [false, 0, "", "none", [], {}]})",
        [](const Value& value) { return is_off(value.node); }}},
      {"disabled", {"", not_enabled}},
      {"all disabled", {"", enables_nothing}}};
  return all;
}

/// The parts of `text` between separators.
std::vector<std::string> split(const std::string& text, const std::string& separator) {
  std::vector<std::string> out;
  for (std::size_t begin = 0, end = 0; end != std::string::npos; begin = end + separator.size()) {
    end = text.find(separator, begin);
    out.push_back(text.substr(begin, end == std::string::npos ? end : end - begin));
  }
  return out;
}

void accept(ForeignKey& row, const Form& form) {
  std::move(row).takes(form.takes);
  row.effect = Effect::noted, row.example = form.example, row.auto_rule = form.auto_rule;
  row.read = [form, reason = row.reason](Nothing&, const Value& value) {
    form.check(value);
    value.note(reason);
  };
}

/// `rule`: "false: true".
void refuse(ForeignKey& row, const std::string& rule, bool section) {
  const std::size_t colon = rule.find(": ");
  const Off& off = offs().at(rule.substr(0, colon));
  row.effect = Effect::refused, row.example = rule.substr(colon + 2), row.schema = off.schema;
  if (!section) row.auto_rule = Auto::to_default;
  row.read = [off, section, reason = row.reason](Nothing&, const Value& value) {
    if (off.holds(value)) return value.note(section ? "disabled, no effect" : "off, as always here");
    if (section) value.error("Sherd does not support this section: ", reason, "; remove or disable it");
    value.error("Sherd does not support ", value.node.brief(), " here: ", reason);
  };
}

/// A section's keys are checked by name, so that a misspelt "enabled" does not pass for "off".
void add_names(ForeignKey& row, const std::string& names) {
  auto keys = std::make_shared<Table<Nothing>>();
  for (const std::string& name : split(names, " "))
    keys->keys.push_back(custom<Nothing>(name, "", [](Nothing&, const Value&) {}));
  row.below = infos(*keys);
  row.read = [keys, read = row.read](Nothing& nothing, const Value& value) {
    if (value.node.is(Node::Kind::object)) read_section(*keys, nothing, value);
    read(nothing, value);
  };
}

std::string without_spaces(std::string text) {
  std::erase(text, ' ');
  return text;
}

ForeignKey row_of(const std::string& line) {
  const std::vector<std::string> cells = split(line, " | ");
  const std::vector<std::string> names = split(without_spaces(cells.at(0)), "|");
  const std::vector<std::string> kind = split(cells.at(1), "but ");
  ForeignKey row;
  row.name = names[0], row.aliases.assign(names.begin() + 1, names.end());
  row.meaning = cells.at(2), row.reason = cells.at(3);
  kind.size() == 1 ? accept(row, forms().at(kind[0])) : refuse(row, kind[1], cells.size() > 4);
  if (cells.size() > 4) add_names(row, cells[4]);
  return row;
}

struct Group {
  std::string section, types;  ///< `types`: those that have these keys; empty: all of them
  std::vector<ForeignKey> rows = {};
};

std::vector<Group> read_table() {
  std::vector<std::string> lines;
  std::istringstream in(foreign_table);
  for (std::string line; std::getline(in, line);)
    if (line.starts_with("    "))
      lines.back() += line.substr(3);
    else if (!line.empty())
      lines.push_back(line);
  std::vector<Group> out;
  for (const std::string& line : lines) {
    if (line[0] != '[') {
      out.back().rows.push_back(row_of(line));
      continue;
    }
    const auto title = split(line.substr(1, line.size() - 2), " of ");
    out.push_back({title[0] == "top" ? "" : title[0], title.size() > 1 ? title[1] : ""});
  }
  for (Group& group : out)
    for (ForeignKey& row : group.rows)
      if (!group.section.empty()) row.auto_rule.reset();
  return out;
}

}  // namespace

std::vector<Key<Nothing>> foreign_rows(std::string_view section, std::string_view type) {
  const auto has_type = [&](const std::string& types) {
    return type.empty() ? types.empty() : cat(" ", types, " ").find(cat(" ", type, " ")) != std::string::npos;
  };
  static const std::vector<Group> groups = read_table();
  std::vector<ForeignKey> out;
  for (const Group& group : groups)
    if (group.section == section && has_type(group.types)) append(out, group.rows);
  return out;
}

}  // namespace sherd::config
