#include "cli/shell/declared.h"

#include <algorithm>
#include <cctype>
#include <map>

#include "config/key_defaults.h"
#include "config/keys.h"

namespace sherd::cli {
namespace {

std::vector<std::string> split_at(const std::string& text, char mark) {
  std::vector<std::string> out(1);
  for (const char c : text)
    if (c == mark)
      out.emplace_back();
    else
      out.back() += c;
  return out;
}

bool is_upper(const std::string& word) {
  return std::all_of(word.begin(), word.end(), [](unsigned char c) { return std::isupper(c) || c == '_'; });
}

/// FILE, F, PREFIX, or a name with an ending: F.jsonl.
bool names_file(const std::string& shown) {
  const std::size_t dot = shown.find('.');
  const bool ending = dot + 1 < shown.size() && std::islower(static_cast<unsigned char>(shown[dot + 1]));
  return shown == "FILE" || shown == "F" || shown == "PREFIX" ||
         (dot != std::string::npos && ending && is_upper(shown.substr(0, dot)));
}

/// "spm:" of "spm:MODEL" and "a" of "a,...": what is typed as it stands.
std::string typed(std::string word) {
  word = word.substr(0, word.find(','));
  const std::size_t colon = word.find(':');
  return colon == std::string::npos ? word : word.substr(0, colon + 1);
}

}  // namespace

std::vector<Declared> declared_commands() {
  std::vector<Declared> out;
  const auto add = [&](const auto& self, std::span<const Command> commands) -> void {
    for (const Command& command : commands) {
      out.push_back({&command, command.line()});
      if (command.commands) self(self, command.commands());
    }
  };
  add(add, all_commands());
  return out;
}

Expected expected_of(const std::string& shown) {
  using Kind = Expected::Kind;
  if (shown.empty()) return {Kind::nothing};
  if (shown.find('=') != std::string::npos) {
    const std::string section = shown.substr(0, shown.find('.') + 1);
    const std::vector<SettableKey> keys = settable_keys();
    const bool known = std::any_of(keys.begin(), keys.end(),
                                   [&](const SettableKey& key) { return key.path.starts_with(section); });
    return {Kind::key, {known ? section : ""}};
  }
  if (shown.find('|') != std::string::npos) {
    Expected out{Kind::choice};
    for (const std::string& word : split_at(shown, '|'))
      if (is_upper(word) || names_file(word))
        out.or_file = true;
      else
        out.words.push_back(typed(word));
    if (out.words.empty()) out.kind = Kind::file;
    return out;
  }
  if (names_file(shown)) return {Kind::file};
  const bool folder = shown == "D" || shown == "DIR" || shown.ends_with("_DIR") || shown == "CKPT";
  return {folder || shown == "RUN" ? Kind::folder : Kind::text};
}

std::vector<Expected> expected_rest(const CommandLine& line) {
  std::vector<Expected> out;
  for (const Option& option : line.options())
    if (option.name == line.rest())
      for (const std::string& word : split_at(option.shown, ' ')) out.push_back(expected_of(word));
  return out;
}

std::vector<SettableKey> settable_keys() {
  std::map<std::string, std::vector<std::string>> keys;  // types of a section may share a key
  for (const config::KeyInfo& key : config::known_keys()) {
    if (key.effect != config::Effect::effective) continue;
    std::vector<std::string>& choices = keys[config::without_type(key.path)];
    const std::vector<std::string> words =
        key.values == "true or false" ? std::vector<std::string>{"true", "false"} : key.choices;
    for (const std::string& word : words)
      if (std::find(choices.begin(), choices.end(), word) == choices.end()) choices.push_back(word);
  }
  std::vector<SettableKey> out;
  for (auto& [path, choices] : keys) out.push_back({path, std::move(choices)});
  return out;
}

}  // namespace sherd::cli
