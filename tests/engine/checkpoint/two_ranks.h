#pragma once

#include <filesystem>
#include <functional>
#include <set>

#include "support/odd_models.h"

/// Saves of the model of support/odd_models.h by two ranks.
namespace sherd::test {

/// Runs `body` in an engine on each of them, with `keys` added to odd_config()'s.
inline void on_two_ranks(const std::function<void(Engine&)>& body, const std::string& keys = "") {
  launch_ranks(2, [&](DistributedPtr dist) {
    Engine engine(dist, std::make_shared<Odd>(), odd_config(3, keys));
    body(engine);
  });
}

inline std::set<std::string> names_in(const std::filesystem::path& folder) {
  std::set<std::string> out;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) out.insert(entry.path().filename());
  return out;
}

}  // namespace sherd::test
