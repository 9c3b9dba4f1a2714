#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace sherd::config {

struct Config;

/// Whether a configuration key does anything here.
enum class Effect : std::uint8_t {
  effective,  ///< sets a field of Config
  noted,      ///< accepted without effect; Config::notes says why
  refused     ///< an error, unless its value says "off"; then noted
};

/// Who depends on the value of a key.
enum class Concerns : std::uint8_t {
  training,  ///< the numbers: a run that goes on with another value trains otherwise
  run,       ///< no number, but how a run goes; all ranks need the same
  machine    ///< neither: it may differ from machine to machine
};

/// A key, or a section of keys, as everything but reading and writing knows it: errors, suggestions, the page
/// of keys and the JSON Schema.
struct KeyInfo {
  std::string name;
  /// "zero_optimization.stage"; parameters of one type read "scheduler[OneCycle].params.cycle_min_lr". Set by
  /// known_keys().
  std::string path = {};
  Effect effect = Effect::effective;
  std::string example = {};  ///< a JSON value other than the default; for refused keys one that is refused
  std::string reason = {};   ///< why noted or refused
  std::vector<std::string> aliases = {};  ///< other names that mean the same
  /// The values that it takes, in the words of the error for another value: "integer >= 1", "true or false".
  std::string values = {};
  std::string schema = {};                ///< the same as JSON Schema, without null and "auto"
  std::vector<std::string> choices = {};  ///< the words that it takes, where there are but these
  std::string meaning = {};     ///< one line: what it is, in which unit; of noted keys what it asks for
  std::string difference = {};  ///< where DeepSpeed 0.19 (or transformers, of its arguments) does otherwise
  std::string derived = {};     ///< the default in words, where dump() has no value that always is it
  bool required = false;        ///< its section is refused without it
  std::string instead = {};     ///< another key that may stand in the place of a required one
  bool argument = false;        ///< it is one of transformers' Trainer
  bool takes_auto = false;      ///< "auto" is for the section training to fill, or the default
  /// The runs that the key concerns; none: those that its section does, or else training.
  std::optional<Concerns> concerns = {};
  /// Tells why a key that was given cannot matter beside the rest of the file; empty, where it can.
  std::function<std::string(const Config&)> idle = {};
  bool decides_parameters = false;  ///< it decides which parameters a model has, and their shapes

  std::vector<KeyInfo> below = {};  ///< keys of a section, or of the entries of a list
  bool is_list = false;             ///< its value is a list of sections
  std::string type = {};            ///< the type to which a section `params` belongs

  bool is_section() const { return !below.empty() && !is_list && effect == Effect::effective; }
};

/// The whole file, as a section.
const KeyInfo& all_keys();

/// Every key that the parser knows, section by section. The parser reads by the same table.
const std::vector<KeyInfo>& known_keys();

/// All of them with values, defaults, meanings and differences to DeepSpeed, as Markdown: docs/keys.md.
std::string keys_page();

/// All of them as a JSON Schema (draft 2020-12) of configuration files, by which editors complete and check.
std::string json_schema();

}  // namespace sherd::config
