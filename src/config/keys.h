#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace sherd::config {

/// What a configuration key does here.
enum class Effect : std::uint8_t {
  effective,  ///< sets a field of Config
  noted,      ///< accepted without effect; Config::notes says why
  refused     ///< an error, unless its value says "off"; then noted
};

/// One row of the table of known keys.
struct KeyInfo {
  std::string path;  ///< "zero_optimization.stage"; parameters of one type read
                     ///< "scheduler[OneCycle].params.cycle_min_lr"
  Effect effect = Effect::effective;
  std::string example;  ///< a JSON value other than the default; for refused keys one that is refused
  std::string reason;   ///< why noted or refused
};

/// Every key that the parser knows, section by section. The parser reads by the same table.
std::vector<KeyInfo> known_keys();

}  // namespace sherd::config
