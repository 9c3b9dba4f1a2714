#include "cli/command_line.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <map>
#include <optional>
#include <sstream>
#include <string_view>
#include <utility>

// The default, a comma, would cut file names and values of --set apart.
#define CXXOPTS_VECTOR_DELIMITER '\x1f'
// std::regex takes a piece of stack for each letter of an argument.
#define CXXOPTS_NO_REGEX
#include <cxxopts.hpp>

#include "base/error.h"
#include "base/text/excerpt.h"

namespace sherd::cli {

namespace {

/// A whole number, then perhaps a letter for a power of `unit`, then perhaps "iB" or "B"; nothing when `text`
/// is something else or too large.
std::optional<std::int64_t> amount_of(std::string_view text, std::int64_t unit) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc()) return std::nullopt;
  std::string_view rest(end, text.data() + text.size());
  if (!rest.empty()) {
    const std::size_t power = std::string_view("kmgt").find(static_cast<char>(std::tolower(rest[0]))) + 1;
    if (power > 0) rest.remove_prefix(1);
    if (!rest.empty() && rest != "iB" && rest != "B") return std::nullopt;
    for (std::size_t i = 0; i < power; ++i)
      if (__builtin_mul_overflow(value, unit, &value)) return std::nullopt;
  }
  return value;
}

/// The first of `arguments` that has one dash and a letter, and is no option's value; empty when there is
/// none.
std::string short_option(const std::vector<std::string>& arguments) {
  for (std::size_t i = 0; i < arguments.size() && arguments[i] != "--"; ++i) {
    const std::string& word = arguments[i];
    const bool perhaps_value =
        i > 0 && arguments[i - 1].starts_with("--") && arguments[i - 1].find('=') == std::string::npos;
    if (word.size() > 1 && word[0] == '-' && std::isalpha(static_cast<unsigned char>(word[1])) &&
        !perhaps_value)
      return word.substr(1, word.find('=') - 1);
  }
  return "";
}

}  // namespace

std::string suggest(const std::string& word, const std::vector<std::string>& known,
                    const std::string& prefix) {
  if (const std::string close = nearest(word, known); !close.empty())
    return cat("did you mean '", prefix, close, "'?");
  std::string all;
  for (const std::string& name : known) all += cat(all.empty() ? "" : ", ", prefix, name);
  return cat("known are ", all, ".");
}

struct CommandLine::State {
  State(std::string name, std::string about, std::string usage)
      : command(std::move(name)),
        summary(std::move(about)),
        synopsis(std::move(usage)),
        parser("sherd " + command, summary) {
    parser.custom_help(synopsis).positional_help("").show_positional_help().set_width(110);
  }

  template <class... Args>
  [[noreturn]] void wrong(const Args&... args) const {
    const std::string message = cat(args...);
    throw UsageError(cat(message, message.ends_with('?') || message.ends_with('.') ? "" : ".", " See 'sherd ",
                         command, " --help'"));
  }
  void add(Option option, std::shared_ptr<cxxopts::Value> value) {
    const std::string letter = option.name == "help" ? "h," : "";
    parser.add_options("")(letter + option.name, option.help, std::move(value), option.shown);
    options.push_back(std::move(option));
  }
  /// Declares what every command has, behind its own options.
  void complete() {
    if (std::exchange(whole, true)) return;
    add({Option::Kind::flag, "quiet", "", "print results, warnings and errors alone", ""},
        cxxopts::value<bool>());
    add({Option::Kind::flag, "help", "", "print this", ""}, cxxopts::value<bool>());
  }

  std::string command, summary, synopsis;
  cxxopts::Options parser;
  std::vector<Option> options;
  bool whole = false;
  std::string rest;
  bool takes_program = false;
  std::vector<std::string> program;
  cxxopts::ParseResult result;
};

CommandLine::CommandLine(std::string command, std::string summary, std::string synopsis)
    : state_(std::make_unique<State>(std::move(command), std::move(summary), std::move(synopsis))) {}
CommandLine::~CommandLine() = default;
CommandLine::CommandLine(CommandLine&&) noexcept = default;

CommandLine& CommandLine::flag(const std::string& name, const std::string& help) {
  state_->add({Option::Kind::flag, name, "", help, ""}, cxxopts::value<bool>());
  return *this;
}

CommandLine& CommandLine::value(const std::string& name, const std::string& shown, const std::string& help,
                                const std::string& fallback) {
  auto value = cxxopts::value<std::string>();
  if (!fallback.empty()) value->default_value(fallback);
  state_->add({Option::Kind::value, name, shown, help, fallback}, std::move(value));
  return *this;
}

CommandLine& CommandLine::list(const std::string& name, const std::string& shown, const std::string& help) {
  state_->add({Option::Kind::list, name, shown, help, ""}, cxxopts::value<std::vector<std::string>>());
  return *this;
}

CommandLine& CommandLine::rest_to(const std::string& name) {
  state_->parser.parse_positional(name);
  state_->rest = name;
  return *this;
}

CommandLine& CommandLine::program_follows() {
  state_->takes_program = true;
  return *this;
}

CommandLine& CommandLine::json() {
  return flag("json", "print the results as one JSON object");
}

const std::string& CommandLine::command() const {
  return state_->command;
}
const std::string& CommandLine::summary() const {
  return state_->summary;
}
const std::string& CommandLine::synopsis() const {
  return state_->synopsis;
}
const std::vector<Option>& CommandLine::options() const {
  state_->complete();
  return state_->options;
}
const std::string& CommandLine::rest() const {
  return state_->rest;
}
bool CommandLine::takes_program() const {
  return state_->takes_program;
}
const std::vector<std::string>& CommandLine::program() const {
  return state_->program;
}

bool CommandLine::parse(std::vector<std::string> arguments) {
  if (state_->takes_program) {
    const auto dashes = std::find(arguments.begin(), arguments.end(), "--");
    if (dashes != arguments.end()) state_->program.assign(dashes + 1, arguments.end());
    arguments.erase(dashes, arguments.end());
  }
  std::vector<std::string> names;
  for (const Option& option : options()) names.push_back(option.name);
  for (const std::string& argument : arguments) {  // cxxopts would not say which name was meant
    if (argument == "--") break;
    if (!argument.starts_with("--")) continue;
    const std::string name = argument.substr(2, argument.find('=') - 2);
    if (std::find(names.begin(), names.end(), name) == names.end())
      state_->wrong("unknown option '--", excerpt(name), "'; ", suggest(name, names, "--"),
                    state_->takes_program && state_->program.empty()
                        ? "; the program and its own options come behind --"
                        : "");
  }
  std::vector<const char*> pointers{"sherd"};
  for (const std::string& argument : arguments) pointers.push_back(argument.c_str());
  try {
    state_->result = state_->parser.parse(static_cast<int>(pointers.size()), pointers.data());
  } catch (const cxxopts::exceptions::no_such_option& error) {
    const std::string name = short_option(arguments);
    if (name.empty()) state_->wrong(excerpt(error.what(), 300));
    state_->wrong("unknown option '-", excerpt(name),
                  "'; options have two dashes: ", suggest(name, names, "--"));
  } catch (const cxxopts::exceptions::exception& error) {
    state_->wrong(excerpt(error.what(), 300));
  }
  if (has("help")) {
    std::fputs(state_->parser.help().c_str(), stdout);
    return false;
  }
  if (!state_->result.unmatched().empty())
    state_->wrong("unexpected argument '", excerpt(state_->result.unmatched()[0]), "'");
  return true;
}

bool CommandLine::has(const std::string& name) const {
  return state_->result.count(name) > 0;
}

std::string CommandLine::text(const std::string& name) const {
  try {
    return state_->result[name].as<std::string>();
  } catch (const cxxopts::exceptions::exception&) {
    return "";  // not given, and without a default
  }
}

std::string CommandLine::required(const std::string& name) const {
  const std::string value = text(name);
  if (value.empty()) state_->wrong("--", name, " is missing");
  return value;
}

std::vector<std::string> CommandLine::all(const std::string& name) const {
  return has(name) ? state_->result[name].as<std::vector<std::string>>() : std::vector<std::string>();
}

void CommandLine::require_apart(const std::string& output, const std::string& input,
                                const std::string& file) const {
  if (std::error_code absent; std::filesystem::equivalent(text(output), file, absent))
    throw UsageError(cat("--", output, " names the file of --", input, ", which would be lost"));
}

std::int64_t CommandLine::integer(const std::string& name, std::int64_t least, std::int64_t most) const {
  const std::string value = required(name);
  std::int64_t out = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), out);
  if (error != std::errc() || end != value.data() + value.size())
    state_->wrong("--", name, " takes a whole number, not '", excerpt(value), "'");
  if (out < least) state_->wrong("--", name, " must be at least ", least, ", not ", out);
  if (out > most) state_->wrong("--", name, " must be at most ", most, ", not ", out);
  return out;
}

double CommandLine::number(const std::string& name) const {
  const std::string value = required(name);
  double out = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), out);
  if (error != std::errc() || end != value.data() + value.size() || !std::isfinite(out))
    state_->wrong("--", name, " takes a number, not '", excerpt(value), "'");
  return out;
}

std::vector<std::int64_t> CommandLine::amounts(const std::string& name, std::int64_t least,
                                               std::int64_t unit) const {
  std::vector<std::int64_t> out;
  std::istringstream parts(required(name) + ',');
  for (std::string part; std::getline(parts, part, ',');) {
    const auto value = amount_of(part, unit);
    if (!value)
      state_->wrong("--", name, " takes whole numbers like 64, 64k or 2M, not '", excerpt(part), "'");
    if (*value < least) state_->wrong("--", name, " must be at least ", least, ", not ", excerpt(part));
    out.push_back(*value);
  }
  return out;
}

std::int64_t CommandLine::amount(const std::string& name, std::int64_t least, std::int64_t unit) const {
  const std::vector<std::int64_t> values = amounts(name, least, unit);
  if (values.size() != 1) state_->wrong("--", name, " takes one number, not '", excerpt(text(name)), "'");
  return values[0];
}

}  // namespace sherd::cli
