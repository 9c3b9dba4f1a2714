#include "config/key_defaults.h"

#include <algorithm>

#include "config/sections/tables.h"

namespace sherd::config {
namespace {

/// "optimizer[Lion]" of "optimizer[Lion].params.lr".
std::string typed_section(const std::string& path) {
  return path.substr(0, path.find(']') + 1);
}

}  // namespace

std::string without_type(std::string path) {
  if (const auto open = path.find('['); open != std::string::npos)
    path.erase(open, path.find(']') - open + 1);
  return path;
}

std::string type_in(const std::string& path) {
  const auto open = path.find('[');
  return open == std::string::npos ? "" : path.substr(open + 1, path.find(']') - open - 1);
}

KeyDefaults::KeyDefaults() {
  const auto values = [](const std::vector<std::string>& assignments) {
    return every_value(parse_text("{}", "defaults", assignments));
  };
  // Yarn is the type of rope scaling that has most keys.
  std::vector<std::string> needed, types;
  std::map<std::string, std::vector<std::string>> of_section;
  for (const KeyInfo& key : known_keys()) {
    if (key.path == "model.type") types = key.choices;
    const std::string type = type_in(key.path);
    std::vector<std::string>& assignments = type.empty() ? needed : of_section[typed_section(key.path)];
    if (key.required) assignments.push_back(cat(without_type(key.path), "=", key.example));
  }
  for (const char* rope : {"model.rope_scaling", "model.sliding_rope.rope_scaling"})
    needed.push_back(cat(rope, ".rope_type=\"yarn\""));
  plain_ = values(needed);
  for (const std::string& type : types) {
    std::vector<std::string> assignments = needed;
    if (defaults_of(family_named(type)).position == PositionType::relative)  // which knows no experts
      std::erase_if(assignments, [](const std::string& each) { return each.starts_with("model.moe"); });
    assignments.push_back(cat("model.type=\"", type, "\""));
    models_.emplace_back(type, values(assignments));
  }
  for (auto& [section, assignments] : of_section) {
    assignments.push_back(cat(section.substr(0, section.find('[')), ".type=\"", type_in(section), "\""));
    sections_[section] = values(assignments);
  }
}

std::vector<std::pair<std::string, std::string>> KeyDefaults::by_model_type(const std::string& path) const {
  std::vector<std::pair<std::string, std::string>> out;
  for (const auto& [type, all] : models_)
    if (const auto found = all.find(path); found != all.end() && found->second != "null")
      out.emplace_back(type, found->second);
  return out;
}

std::string KeyDefaults::of(const KeyInfo& key) const {
  if (!key.derived.empty() || key.required) return "";
  if (key.path.starts_with("model.") && key.path != "model.type") {
    const auto all = by_model_type(key.path);
    const bool one = !all.empty() && std::all_of(all.begin(), all.end(), [&](const auto& other) {
      return other.second == all[0].second;
    });
    return one ? all[0].second : "";
  }
  const Values& values = type_in(key.path).empty() ? plain_ : sections_.at(typed_section(key.path));
  const auto found = values.find(without_type(key.path));
  return found == values.end() ? "" : found->second;
}

}  // namespace sherd::config
