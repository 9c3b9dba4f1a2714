#include <algorithm>
#include <map>
#include <set>

#include "base/text/excerpt.h"
#include "config/key_defaults.h"
#include "config/sections/tables.h"

// The page of keys: what the tables of keys know, as Markdown, with defaults from a configuration that gives
// none.
namespace sherd::config {
namespace {

/// "model.moe" of "model.moe.experts".
std::string section_of(const std::string& path) {
  const auto dot = path.rfind('.');
  return dot == std::string::npos ? "" : path.substr(0, dot);
}

std::string name_in(const std::string& path) {
  return path.substr(path.rfind('.') + 1);
}

/// A number as people write it: 5e8 for 500000000, 1e-5 for 1e-05, 1 for 1.0.
std::string tidy_number(std::string text) {
  if (const auto exponent = text.find("e-0"); exponent != std::string::npos) text.erase(exponent + 2, 1);
  if (text.ends_with(".0")) text.resize(text.size() - 2);
  constexpr std::size_t most_zeros = 4;
  const auto last = text.find_last_not_of('0');
  const std::size_t zeros = last == std::string::npos ? 0 : text.size() - last - 1;
  const bool digits = std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
  return digits && zeros > most_zeros ? cat(text.substr(0, last + 1), "e", zeros) : text;
}

/// A JSON value of dump(), in Markdown.
std::string tidy(const std::string& value) {
  if (value == std::to_string(int64_max)) return "no limit";
  if (value[0] != '[') return cat("`", value[0] == '"' ? value : tidy_number(value), "`");
  std::string list;
  for (std::size_t at = 1; at < value.size();) {
    const std::size_t end = value.find_first_of(",]", at);
    list += cat(list.empty() ? "" : ", ", tidy_number(value.substr(at, end - at)));
    at = end + 1;
  }
  return cat("`[", list, "]`");
}

/// "gpt2 `true`; others `false`", where types of models differ in it.
std::string by_type(const std::vector<std::pair<std::string, std::string>>& values) {
  std::map<std::string, std::size_t> count;
  for (const auto& [type, value] : values) ++count[value];
  if (count.empty()) return "";
  const auto most =
      std::max_element(count.begin(), count.end(), [](auto& a, auto& b) { return a.second < b.second; });
  std::string out;
  for (const auto& [type, value] : values)
    if (value != most->first) out += cat(type, " ", tidy(value), "; ");
  return cat(out, "others ", tidy(most->first));
}

/// In Markdown: "`2`", "gpt2 `true`; others `false`", "required", or the key's own words.
std::string default_of(const KeyInfo& key, const KeyDefaults& defaults) {
  if (!key.derived.empty()) return tidy_number(key.derived);  // words, or a number of the Trainer's
  if (key.required) return "required";
  if (const std::string value = defaults.of(key); !value.empty()) return tidy(value);
  return key.path.starts_with("model.") ? by_type(defaults.by_model_type(key.path)) : "";
}

// ---- rows ----

/// A line of a table, in which `|` and line ends have other meanings.
std::string row(const std::vector<std::string>& cells) {
  std::string out = "|";
  for (const std::string& cell : cells) {
    out += " ";
    for (const char c : cell) out += c == '|' ? std::string("\\|") : std::string(1, c);
    out += cell.empty() ? "|" : " |";
  }
  return out + "\n";
}

std::string head(const std::vector<std::string>& titles) {
  std::string line = "|";
  for (std::size_t i = 0; i < titles.size(); ++i) line += "---|";
  return row(titles) + line + "\n";
}

std::string listed(const std::vector<std::string>& words, const char* quote) {
  return joined_text(words, ", ", [&](const std::string& word) { return quote + word + quote; });
}

std::string values_of(const KeyInfo& key) {
  return key.choices.empty() ? key.values : listed(key.choices, "`");
}

/// The key as `name`, with its other names.
std::string named(const KeyInfo& key, const std::string& name) {
  return cat("`", name, "`", key.aliases.empty() ? "" : ", also ", listed(key.aliases, "`"));
}

/// A key's line in a table, but for the types that it belongs to.
struct KeyRow {
  std::vector<std::string> cells;
  std::vector<std::string> types;
};

/// Keys of several types that say the same become one row; those that do not stand below each other.
void add(std::vector<KeyRow>& rows, std::vector<std::string> cells, const std::string& type) {
  auto place = rows.end();
  for (auto at = rows.begin(); at != rows.end(); ++at) {
    if (at->cells == cells) return at->types.push_back(type);
    if (at->cells[0] == cells[0]) place = at + 1;
  }
  rows.insert(place, {std::move(cells), {type}});
}

/// Writes rows under titles; columns without any content, but the first, are left out.
std::string table(std::vector<std::string> titles, std::vector<std::vector<std::string>> rows) {
  for (std::size_t column = titles.size(); column-- > 1;)
    if (std::all_of(rows.begin(), rows.end(), [&](const auto& cells) { return cells[column].empty(); })) {
      const auto at = static_cast<std::ptrdiff_t>(column);
      titles.erase(titles.begin() + at);
      for (auto& cells : rows) cells.erase(cells.begin() + at);
    }
  std::string out = head(titles);
  for (const auto& cells : rows) out += row(cells);
  return out;
}

// ---- sections ----

constexpr const char* introduction = R"(# Keys of the configuration

Every key that a configuration may have. `sherd info --keys` prints this page from the tables by which files
are read; [Configuration](config.md) tells how files are read and laid over each other, and shows sections.

- **Values**: what is taken; other values are errors. Words are taken in any case. Elements, tokens and
  steps are numbers, also as `5e8`; bytes have units where that is said.
- **Default**: what holds where the key is not given, or null. Where it goes by the type of the model, each
  is told. Without the section `model` or `data` the program brings these itself.
- **DeepSpeed**: where DeepSpeed 0.19 does otherwise ([all differences](deepspeed.md)). The sections
  `model`, `data`, `training`, `parallel` and `device` are Sherd's own: there the column speaks of
  DeepSpeed's nearest.
- **`"auto"`** in DeepSpeed's keys takes what the section `training` says, or the default ([which takes
  what](deepspeed.md#files-made-for-transformers-trainer)).
- Keys that are [accepted without effect](#accepted-without-effect), and those that are [refused](#refused),
  stand at the end.

)";

constexpr const char* about_noted = R"(## Accepted without effect

The log says in one line why each cannot matter. Sections pass with all their keys.

)";

constexpr const char* about_refused = R"(## Refused

An error, unless the value means "off", as in DeepSpeed's defaults: false, 0, nothing, or a section that is
not enabled. Every other key, in every section, is an error too, with the key that was meant where one is
near.

)";

constexpr const char* about_arguments = R"(They fill DeepSpeed's keys, as Trainer does it
([more](deepspeed.md#files-made-for-transformers-trainer)): set either, or both alike. Defaults hold where a
file says `"auto"`, or gives another of them. Where Trainer counts epochs (`num_train_epochs`), here are
`steps`.

)";

class Page {
 public:
  std::string text();

 private:
  std::string plain_section(const std::string& section, const std::vector<KeyInfo>& keys) const;
  std::string typed_params(const std::string& section) const;
  std::string types_of(const std::string& section, const std::vector<std::string>& types) const;
  std::string without_effect(Effect effect) const;

  const std::vector<KeyInfo>& keys_ = known_keys();
  KeyDefaults defaults_;
};

std::string Page::plain_section(const std::string& section, const std::vector<KeyInfo>& keys) const {
  const bool arguments = keys.front().argument;
  std::vector<std::vector<std::string>> rows;
  for (const KeyInfo& key : keys)
    rows.push_back({named(key, name_in(key.path)), values_of(key), default_of(key, defaults_), key.meaning,
                    key.difference});
  const std::string level = section.find('.') == std::string::npos ? "##" : "###";
  const std::string title = section.empty() ? "Keys at the top"
                            : arguments     ? "`training`: arguments of transformers' Trainer"
                                            : cat("`", section, "`");
  const char* meaning = arguments ? "sets" : "meaning";
  const char* other = arguments ? "transformers" : "DeepSpeed";
  return cat(level, " ", title, "\n\n", arguments ? about_arguments : "",
             table({"key", "values", "default", meaning, other}, std::move(rows)), "\n");
}

/// Names of the types of which a row speaks; "all".
std::string Page::types_of(const std::string& section, const std::vector<std::string>& types) const {
  std::set<std::string> all;
  for (const KeyInfo& key : keys_)
    if (key.path.starts_with(section + "[")) all.insert(type_in(key.path));
  return types.size() == all.size() ? "all" : listed(types, "");
}

/// `params` of optimizers and schedulers: what each type has, and what the keys are.
std::string Page::typed_params(const std::string& section) const {
  std::vector<std::vector<std::string>> types;
  std::vector<KeyRow> rows;
  for (const KeyInfo& key : keys_) {
    if (!key.path.starts_with(section + "[") || key.effect != Effect::effective) continue;
    const std::string type = type_in(key.path), quoted = cat("`", type, "`"), name = name_in(key.path);
    if (types.empty() || types.back()[0] != quoted) types.push_back({quoted, ""});
    std::string& all = types.back()[1];
    all += cat(all.empty() ? "" : ", ", "`", name, "` = ", default_of(key, defaults_));
    add(rows, {named(key, name), values_of(key), key.meaning, key.difference}, type);
  }
  std::vector<std::vector<std::string>> cells;
  for (const KeyRow& one : rows) {
    cells.push_back(one.cells);
    cells.back().insert(cells.back().begin() + 1, types_of(section, one.types));
  }
  return cat("### `", section, ".params`\n\n", table({"type", "keys, and their defaults"}, std::move(types)),
             "\n", table({"key", "types", "values", "meaning", "DeepSpeed"}, std::move(cells)), "\n");
}

/// Keys that are accepted for nothing, or refused, of all sections.
std::string Page::without_effect(Effect effect) const {
  std::vector<KeyRow> rows;
  for (const KeyInfo& key : keys_) {
    if (key.effect != effect) continue;
    std::vector<std::string> names;
    for (const KeyInfo& below : key.below) names.push_back(below.name);
    const std::string asks = cat(key.meaning, names.empty() ? "" : ". Its keys: ", listed(names, "`"));
    add(rows, {named(key, without_type(key.path)), cat("`", key.example, "`"), asks, key.reason},
        type_in(key.path));
  }
  std::vector<std::vector<std::string>> cells;
  for (const KeyRow& one : rows) {
    cells.push_back(one.cells);
    if (one.types[0].empty()) continue;
    const std::string& name = one.cells[0];
    const std::string types = types_of(name.substr(1, name.find('.') - 1), one.types);
    if (types != "all") cells.back()[0] += cat(" (", types, ")");
  }
  if (effect == Effect::refused)
    return table({"key", "refused, as", "what it asks for", "why, and what to do"}, std::move(cells));
  for (auto& row_of : cells) row_of.erase(row_of.begin() + 1);
  return table({"key", "what it asks for", "why it has no effect"}, std::move(cells));
}

std::string Page::text() {
  std::vector<std::string> order;
  std::map<std::string, std::vector<KeyInfo>> sections;
  for (const KeyInfo& key : keys_) {
    if (!type_in(key.path).empty()) continue;
    const std::string section = cat(section_of(key.path), key.argument ? " " : "");
    if (key.effect != Effect::effective) continue;
    if (sections[section].empty()) order.push_back(section);
    sections[section].push_back(key);
  }
  std::string out = introduction;
  for (const std::string& section : order) {
    out += plain_section(section, sections[section]);
    if (section == "optimizer" || section == "scheduler") out += typed_params(section);
  }
  return cat(out, about_noted, without_effect(Effect::noted), "\n", about_refused,
             without_effect(Effect::refused));
}

}  // namespace

std::string keys_page() {
  return Page().text();
}

}  // namespace sherd::config
