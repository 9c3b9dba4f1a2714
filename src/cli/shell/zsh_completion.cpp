#include "base/error.h"
#include "base/text/excerpt.h"
#include "cli/shell/declared.h"
#include "cli/shell/shell_files.h"

namespace sherd::cli {
namespace {

/// `text` with a backslash before each of `marks`.
std::string escaped(const std::string& text, std::string_view marks) {
  std::string out;
  for (const char c : text) {
    if (marks.find(c) != std::string_view::npos) out += '\\';
    out += c;
  }
  return out;
}

/// As one word of zsh.
std::string zsh_quoted(const std::string& text) {
  std::string out = "'";
  for (const char c : text) out += c == '\'' ? "'\\''" : std::string(1, c);
  return out + "'";
}

/// ":F:_files", of an option's specification. A blank in front of a function keeps compadd's options from it.
std::string zsh_action(const std::string& shown, const Expected& expected) {
  const std::string message = cat(":", escaped(shown, ":\\"), ":");
  switch (expected.kind) {
    case Expected::Kind::nothing:
      return "";
    case Expected::Kind::file:
      return message + "_files";
    case Expected::Kind::folder:
      return message + "_files -/";
    case Expected::Kind::choice:
      return cat(message, expected.or_file ? " _sherd_choice " : "(",
                 escaped(joined_text(expected.words, " "), ":"), expected.or_file ? "" : ")");
    case Expected::Kind::key:
      return cat(message, " _sherd_key ", escaped(joined_text(expected.words, " "), ":"));
    default:
      return message + " ";
  }
}

/// The specifications of a command's options and other values.
std::string zsh_arguments(const CommandLine& line) {
  std::string out = "_arguments -S";
  const auto add = [&](const std::string& specification) {
    out += " \\\n        " + zsh_quoted(specification);
  };
  for (const Option& option : line.options()) {
    const Expected expected = expected_of(option.shown);
    add(cat(option.kind == Option::Kind::list ? "*" : "", "--", option.name,
            expected.kind == Expected::Kind::nothing ? "" : "=", "[", escaped(option.help, "[]\\"), "]",
            zsh_action(option.shown, expected)));
  }
  const std::vector<Expected> rest = expected_rest(line);
  for (std::size_t i = 0; i < rest.size(); ++i)
    add(cat(i + 1 < rest.size() ? cat(i + 1) : "*", zsh_action(line.rest(), rest[i])));
  if (line.takes_program()) add("*::program:_normal");
  return out;
}

constexpr const char* zsh_key = R"sh(#compdef sherd
# Completes commands of sherd in zsh. Made by `sherd completion zsh`.
_sherd_choice() {  # one of these words, or a file
  compadd -- "$@"
  _files
}
_sherd_key() {  # a key of a section, or its value
  local -a keys
  if compset -P '*='; then
    case ${${IPREFIX%=}##*=} in
)sh";

constexpr const char* zsh_keys = R"sh(    esac
    return
  fi
  keys=(
)sh";

constexpr const char* zsh_begin = R"sh(  )
  compadd -S = -- ${(M)keys:#${1-}*}
}
_sherd() {
  local command
  local -a commands
)sh";

constexpr const char* zsh_shift = R"sh(  command+="${command:+ }$words[2]"
  shift words
  (( CURRENT-- ))
)sh";

/// Completes the names of commands.
std::string zsh_names(std::span<const Command> commands) {
  std::string out = "  if (( CURRENT == 2 )); then\n    commands=(\n";
  for (const Command& command : commands)
    out += cat("      ", zsh_quoted(cat(command.name, ":", command.summary)), "\n");
  return out + "    )\n    _describe -t commands command commands\n    return\n  fi\n";
}

}  // namespace

std::string zsh_completion() {
  std::string keys, choices, groups, arms;
  for (const SettableKey& key : settable_keys()) {
    keys += cat("    ", key.path, "\n");
    if (!key.choices.empty())
      choices += cat("      ", key.path, ") compadd -- ", joined_text(key.choices, " "), " ;;\n");
  }
  for (const Declared& each : declared_commands())
    if (each.is_group())
      groups += cat("  if [[ $command == ", each.path(), " ]]; then\n", zsh_names(each.command->commands()),
                    zsh_shift, "  fi\n");
    else
      arms += cat("    ", zsh_quoted(each.path()), ")\n      ", zsh_arguments(each.line), " ;;\n");
  return cat(zsh_key, choices, zsh_keys, keys, zsh_begin, zsh_names(all_commands()), zsh_shift, groups,
             "  case $command in\n", arms, "  esac\n}\n",
             "if [[ $funcstack[1] == _sherd ]]; then\n  _sherd \"$@\"\n",
             "else\n  compdef _sherd sherd\nfi\n");
}

}  // namespace sherd::cli
