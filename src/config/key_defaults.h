#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "config/keys.h"

namespace sherd::config {

/// "optimizer[Lion].params.lr" → "optimizer.params.lr"
std::string without_type(std::string path);
/// "Lion" of "optimizer[Lion].params.lr"; else empty.
std::string type_in(const std::string& path);

/// Defaults of all keys: those of a configuration with what is required alone, and of each type of model,
/// optimizer and scheduler. Internal to this room.
class KeyDefaults {
 public:
  KeyDefaults();
  /// The one default of a key of known_keys(), as JSON; empty where there is none, or it goes by other keys.
  std::string of(const KeyInfo& key) const;
  /// Types of models with the default that each has for a key of section model.
  std::vector<std::pair<std::string, std::string>> by_model_type(const std::string& path) const;

 private:
  using Values = std::map<std::string, std::string>;

  Values plain_;
  std::vector<std::pair<std::string, Values>> models_;  ///< by `model.type`
  std::map<std::string, Values> sections_;              ///< by "optimizer[Lion]", "scheduler[OneCycle]"
};

}  // namespace sherd::config
