#include "base/error.h"
#include "base/text/excerpt.h"
#include "cli/shell/declared.h"
#include "cli/shell/shell_files.h"

namespace sherd::cli {
namespace {

/// As one word of fish.
std::string fish_quoted(const std::string& text) {
  std::string out = "'";
  for (const char c : text) {
    if (c == '\'' || c == '\\') out += '\\';
    out += c;
  }
  return out + "'";
}

/// The options of `complete` by which fish offers a value.
std::string fish_offers(const Expected& expected) {
  switch (expected.kind) {
    case Expected::Kind::file:
      return " -F";
    case Expected::Kind::folder:
      return " -a '(__fish_complete_directories)'";
    case Expected::Kind::choice:
      return cat(expected.or_file ? " -F -a " : " -a ", fish_quoted(joined_text(expected.words, " ")));
    case Expected::Kind::key:
      return cat(" -a '(__sherd_keys ", joined_text(expected.words, " "), ")'");
    default:
      return "";
  }
}

/// The same for an option, which takes a value unless it is a flag.
std::string fish_value(const Expected& expected) {
  if (expected.kind == Expected::Kind::nothing) return "";
  return (expected.kind == Expected::Kind::file || expected.or_file ? " -r" : " -x") + fish_offers(expected);
}

constexpr const char* fish_begin =
    R"sh(# Completes commands of sherd in fish. Made by `sherd completion fish`.
function __sherd_words  # those in front of the one that is typed, without the program
    set -l words (commandline -opc)
    set -e words[1]
    string join \n -- $words
end
function __sherd_behind  # exactly these
    set -l words (__sherd_words)
    test "$words" = "$argv"
end
function __sherd_in  # these, and perhaps more
    set -l words (__sherd_words)
    set -l n (count $argv)
    test (count $words) -ge $n; and test "$words[1..$n]" = "$argv"
end
function __sherd_keys  # of a section
    string match -- "$argv*" \
)sh";

}  // namespace

std::string fish_completion() {
  std::string keys, out;
  for (const SettableKey& key : settable_keys()) {
    keys += cat("        ", key.path, "=");
    for (const std::string& choice : key.choices) keys += cat(' ', key.path, '=', choice);
    keys += " \\\n";
  }
  const auto complete = [&](const std::string& condition, const std::string& what) {
    out += cat("complete -c sherd -n ", fish_quoted(condition), what, "\n");
  };
  for (const Declared& each : declared_commands()) {
    const std::string group = each.is_first() ? "" : each.path().substr(0, each.path().rfind(' '));
    complete("__sherd_behind " + group,
             cat(" -a ", each.command->name, " -d ", fish_quoted(each.command->summary)));
    if (each.is_group()) continue;
    const std::string within = "__sherd_in " + each.path();
    for (const Option& option : each.line.options())
      complete(within, cat(" -l ", option.name, fish_value(expected_of(option.shown)), " -d ",
                           fish_quoted(option.help)));
    const std::vector<Expected> rest = expected_rest(each.line);
    for (std::size_t i = 0; i < rest.size(); ++i)
      complete(i + 1 < rest.size() ? "__sherd_behind " + each.path() : within, fish_offers(rest[i]));
  }
  return cat(fish_begin, keys, "\nend\ncomplete -c sherd -f\n", out);
}

}  // namespace sherd::cli
