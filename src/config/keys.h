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

/// What is known of a key beside how it is read.
struct KeyFacts {
  Effect effect = Effect::effective;
  std::string example;  ///< a JSON value other than the default; for refused keys one that is refused
  std::string reason;   ///< why noted or refused
  std::vector<std::string> aliases;  ///< other names that mean the same
  /// What it takes, in the words of the error for another value: "integer >= 1", "true or false".
  std::string values;
  std::vector<std::string> choices;  ///< the words that it takes, where there are but these
  const char* meaning = "";          ///< one line: what it is, in which unit; of noted keys what it asks for
  const char* difference = "";  ///< where DeepSpeed 0.19 (or transformers, of its arguments) does otherwise
  std::string derived;          ///< the default in words, where dump() has no value that always is it
  bool required = false;        ///< its section is refused without it
};

/// One row of the table of known keys.
struct KeyInfo : KeyFacts {
  /// "zero_optimization.stage"; parameters of one type read "scheduler[OneCycle].params.cycle_min_lr"
  std::string path;
};

/// Every key that the parser knows, section by section. The parser reads by the same table.
std::vector<KeyInfo> known_keys();

/// All of them with values, defaults, meanings and differences to DeepSpeed, as Markdown: docs/keys.md.
std::string keys_page();

}  // namespace sherd::config
