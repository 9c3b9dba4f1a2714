#pragma once

#include <string>
#include <vector>

#include "cli/program.h"

// This folder writes what a shell and `man` know of the commands, all from their declarations:
//
//   declared.h     the commands one by one, and what the values of their options may be
//   shell_files.h  scripts for bash, zsh and fish, and manual pages

namespace sherd::cli {

/// A command as it is declared; a group comes before its commands.
struct Declared {
  const Command* command;
  CommandLine line;

  /// "bench adam"
  const std::string& path() const { return line.command(); }
  bool is_group() const { return command->commands != nullptr; }
  bool is_first() const { return path() == command->name; }  ///< of no group
};
std::vector<Declared> declared_commands();

/// The values that an option or an argument may have.
struct Expected {
  enum class Kind : std::uint8_t {
    nothing,  ///< it is a flag
    text,
    file,
    folder,
    choice,  ///< one of `words`
    key      ///< KEY=VALUE of the configuration; `words` is the section of the keys, or empty
  };
  Kind kind = Kind::text;
  std::vector<std::string> words = {};
  bool or_file = false;  ///< beside the choices
};

/// The values that `shown`, the help's word for a value, stands for: a file for FILE, F, NAME.ending or
/// PREFIX; a folder for D, DIR, X_DIR, CKPT or RUN; one of a|b|c, among which FILE and other names may be;
/// and a key for a.b.c=V, or section.K=V. A choice with a colon, as in spm:MODEL, ends with that.
Expected expected_of(const std::string& shown);
/// The same of values that no option takes, one by one; the last is what all further ones may be.
std::vector<Expected> expected_rest(const CommandLine& line);

/// A key that --set takes, and the words that its value may be; none: it may have any value.
struct SettableKey {
  std::string path;
  std::vector<std::string> choices;
};
std::vector<SettableKey> settable_keys();

}  // namespace sherd::cli
