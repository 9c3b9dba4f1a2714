#include "cli/inference/entities.h"

#include <algorithm>

namespace sherd::cli {

bool are_of_entities(std::span<const std::string> labels) {
  const auto begins_or_goes_on = [](const std::string& label) {
    return label.size() > 2 && (label.starts_with("B-") || label.starts_with("I-"));
  };
  return std::all_of(labels.begin(), labels.end(),
                     [&](const std::string& l) { return l == "O" || begins_or_goes_on(l); }) &&
         std::any_of(labels.begin(), labels.end(), begins_or_goes_on);
}

std::vector<Entity> entities_in(std::span<const std::string> labels) {
  std::vector<Entity> out;
  bool open = false;
  for (std::size_t i = 0; i < labels.size(); ++i) {
    const std::string& label = labels[i];
    if (label == "O") {
      open = false;
      continue;
    }
    const std::string type = label.substr(2);
    if (open && label.front() == 'I' && out.back().type == type)
      out.back().end = i + 1;
    else
      out.push_back({type, i, i + 1});
    open = true;
  }
  return out;
}

void EntityScores::add(std::span<const std::string> are, std::span<const std::string> given) {
  std::vector<Entity> there = entities_in(are), found = entities_in(given), both;
  std::sort(there.begin(), there.end());
  std::sort(found.begin(), found.end());
  std::set_intersection(there.begin(), there.end(), found.begin(), found.end(), std::back_inserter(both));
  for (const Entity& entity : there) ++by_type_[entity.type].there;
  for (const Entity& entity : found) ++by_type_[entity.type].given;
  for (const Entity& entity : both) ++by_type_[entity.type].right;
}

FoundCounts EntityScores::all() const {
  FoundCounts out;
  for (const auto& [type, counts] : by_type_)
    out.right += counts.right, out.there += counts.there, out.given += counts.given;
  return out;
}

}  // namespace sherd::cli
