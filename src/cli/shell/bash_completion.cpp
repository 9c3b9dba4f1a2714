#include <map>

#include "base/error.h"
#include "base/text/excerpt.h"
#include "cli/shell/declared.h"
#include "cli/shell/shell_files.h"

namespace sherd::cli {
namespace {

/// The statements by which bash completes a value: they set `kind`, and variables that go with it.
std::string bash_action(const Expected& expected) {
  switch (expected.kind) {
    case Expected::Kind::file:
      return "kind=file";
    case Expected::Kind::folder:
      return "kind=folder";
    case Expected::Kind::choice:
      return cat("kind=choice", expected.or_file ? " or_file=1" : "", " choices='",
                 joined_text(expected.words, " "), "'");
    case Expected::Kind::key:
      return cat("kind=key section='", joined_text(expected.words, " "), "'");
    default:
      return "kind=text";
  }
}

/// Arms of a case: patterns with the same action in one.
class Arms {
 public:
  /// The end of a pattern may be `any`thing.
  void add(const std::string& pattern, const std::string& action, bool any = false) {
    std::string& patterns = of_[action];
    patterns += cat(patterns.empty() ? "" : "|", "'", pattern, any ? "'*" : "'");
  }
  std::string text() const {
    std::string out;
    for (const auto& [action, patterns] : of_) out += cat("    ", patterns, ") ", action, " ;;\n");
    return out;
  }

 private:
  std::map<std::string, std::string> of_;
};

constexpr const char* bash_begin =
    R"sh(# Completes commands of sherd in bash. Made by `sherd completion bash`.
_sherd_reply() {  # words that begin as what is typed
  mapfile -t COMPREPLY < <(compgen "$@" -- "$cur")
}
_sherd() {
  local word words=() cur path depth=1 option= kind= or_file= choices= section= prefix
  for word in "${COMP_WORDS[@]:1:COMP_CWORD}"; do  # bash cuts words at = and :
    if ((${#words[@]})) && [[ $word == [=:]* || ${words[-1]} == *[=:] ]]; then
      words[-1]+=$word
    else
      words+=("$word")
    fi
  done
  COMPREPLY=() cur=${words[-1]} path=${words[0]}
)sh";

constexpr const char* bash_options = R"sh(  for word in "${words[@]:depth:${#words[@]}-depth-1}"; do
    [[ $word == -- ]] && { compopt -o default 2>/dev/null; return; }
  done
  if [[ $cur == --*=* ]]; then
    option=${cur%%=*} cur=${cur#*=}
  elif ((${#words[@]} > depth + 1)); then
    option=${words[-2]}
  fi
  case "$path $option" in
)sh";

constexpr const char* bash_names = R"sh(  esac
  if [[ ! $kind && $cur == -* ]]; then
    case $path in
)sh";

constexpr const char* bash_rest = R"sh(    esac
    return
  fi
  [[ $kind ]] || case "$path $((${#words[@]} - depth))" in
)sh";

constexpr const char* bash_end = R"sh(  esac
  prefix=${cur%"${cur##*[=:]}"}
  case $kind in
    file) _sherd_reply -f; compopt -o filenames 2>/dev/null ;;
    folder) _sherd_reply -d; compopt -o filenames 2>/dev/null ;;
    choice) _sherd_reply ${or_file:+-f} -W "$choices" ;;
    key)
      if [[ $cur == *=* ]]; then
        cur=${cur#"$prefix"}
        _sherd_reply -W "$(_sherd_choices "${prefix%=}")"
        return
      fi
      _sherd_reply -S = -W "$(_sherd_keys "$section")" ;;
  esac
  [[ ${COMPREPLY[*]} == *[=:] ]] && compopt -o nospace 2>/dev/null
  [[ $prefix ]] && COMPREPLY=("${COMPREPLY[@]#"$prefix"}")
  return 0
}
complete -F _sherd sherd
)sh";

std::string reply_of(const std::vector<std::string>& words) {
  return cat("_sherd_reply -W '", joined_text(words, " "), "'");
}

std::string bash_keys() {
  std::string keys;
  Arms choices;
  for (const SettableKey& key : settable_keys()) {
    keys += cat('\n', key.path);
    if (!key.choices.empty()) choices.add(key.path, cat("echo '", joined_text(key.choices, " "), "'"));
  }
  return cat("_sherd_keys() {  # of a section\n  compgen -W '", keys, "' -- \"$1\"\n}\n",
             "_sherd_choices() {  # of a key\n  case $1 in\n", choices.text(), "  esac\n}\n");
}

/// The words of a group's commands, which are the path's second part.
std::string bash_group(const Declared& group) {
  std::vector<std::string> names;
  for (const Command& command : group.command->commands()) names.emplace_back(command.name);
  return cat("  if [[ $path == ", group.path(), " ]]; then\n    ((${#words[@]} == 2)) && { ", reply_of(names),
             "; return; }\n    path+=\" ${words[1]}\" depth=2\n  fi\n");
}

}  // namespace

std::string bash_completion() {
  std::vector<std::string> first{"--help", "--version"};
  std::string groups;
  Arms values, names, places, rest;
  for (const Declared& each : declared_commands()) {
    if (each.is_first()) first.emplace_back(each.command->name);
    if (each.is_group()) groups += bash_group(each);
    std::vector<std::string> options;
    for (const Option& option : each.line.options()) {
      options.push_back("--" + option.name);
      const Expected expected = expected_of(option.shown);
      if (expected.kind != Expected::Kind::nothing)
        values.add(cat(each.path(), " --", option.name), bash_action(expected));
    }
    names.add(each.path(), reply_of(options));
    const std::vector<Expected> expected = expected_rest(each.line);
    for (std::size_t i = 0; i + 1 < expected.size(); ++i)
      places.add(cat(each.path(), ' ', i + 1), bash_action(expected[i]));
    if (!expected.empty()) rest.add(each.path() + ' ', bash_action(expected.back()), true);
  }
  return cat(bash_keys(), bash_begin, "  ((${#words[@]} == 1)) && { ", reply_of(first), "; return; }\n",
             groups, bash_options, values.text(), bash_names, names.text(), bash_rest, places.text(),
             rest.text(), bash_end);
}

}  // namespace sherd::cli
