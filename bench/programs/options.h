#pragma once

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <functional>
#include <iostream>
#include <map>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/error.h"

namespace sherd::bench {

/// The parts of a text between commas.
inline std::vector<std::string> split_at_commas(const std::string& text) {
  std::vector<std::string> out;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, ',');) out.push_back(part);
  return out;
}

/// The options of a benchmark, `--name value` or `--name=value`, bound to the variables that they set. Whole
/// numbers may be written as 100e6.
class Options {
 public:
  /// `synopsis`: what --help prints after the program's name.
  Options(std::string program, std::string synopsis)
      : program_(std::move(program)), synopsis_(std::move(synopsis)) {}

  Options& value(const std::string& name, std::function<void(const std::string&)> set) {
    setters_[name] = std::move(set);
    return *this;
  }
  Options& value(const std::string& name, std::string& variable) {
    return value(name, [&variable](const std::string& text) { variable = text; });
  }
  Options& value(const std::string& name, std::filesystem::path& variable) {
    return value(name, [&variable](const std::string& text) { variable = text; });
  }
  /// May be repeated.
  Options& list(const std::string& name, std::vector<std::string>& variable) {
    return value(name, [&variable](const std::string& text) { variable.push_back(text); });
  }
  template <class Number>
  requires std::is_arithmetic_v<Number> Options& value(const std::string& name, Number& variable) {
    return value(name, [&variable, name](const std::string& text) { variable = number<Number>(name, text); });
  }
  Options& flag(const std::string& name, bool& variable) {
    flags_[name] = &variable;
    return *this;
  }
  /// Takes the words that belong to no option; without it they are mistakes.
  Options& rest(std::vector<std::string>& words) {
    rest_ = &words;
    return *this;
  }

  /// Throws Error{usage} for an unknown option or a bad value. --help prints the synopsis and ends the
  /// program.
  void parse(int argc, char** argv) {
    for (int i = 1; i < argc; ++i) {
      const std::string word = argv[i];
      if (word == "--help") help();
      if (!word.starts_with("--")) {
        if (!rest_) fail(ErrorKind::usage, "'", word, "' belongs to no option", see_help());
        rest_->push_back(word);
        continue;
      }
      const std::size_t equals = word.find('=');
      const std::string name = word.substr(2, equals == std::string::npos ? equals : equals - 2);
      if (const auto flag = flags_.find(name); flag != flags_.end()) {
        *flag->second = true;
        continue;
      }
      const auto setter = setters_.find(name);
      if (setter == setters_.end()) fail(ErrorKind::usage, "unknown option --", name, see_help());
      if (equals == std::string::npos && i + 1 == argc)
        fail(ErrorKind::usage, "--", name, " needs a value", see_help());
      setter->second(equals == std::string::npos ? argv[++i] : word.substr(equals + 1));
    }
  }

 private:
  template <class Number>
  static Number number(const std::string& name, const std::string& text) {
    char* end = nullptr;
    const double value = std::strtod(text.c_str(), &end);
    const bool whole =
        !std::is_integral_v<Number> || value == static_cast<double>(static_cast<Number>(value));
    if (text.empty() || *end != '\0' || !whole)
      fail(ErrorKind::usage, "--", name, " takes a ", std::is_integral_v<Number> ? "whole " : "",
           "number, not '", text, "'");
    return static_cast<Number>(value);
  }
  [[noreturn]] void help() const {
    std::cout << "usage: " << program_ << ' ' << synopsis_ << '\n';
    std::exit(0);
  }
  std::string see_help() const { return cat(". See '", program_, " --help'"); }

  std::string program_, synopsis_;
  std::map<std::string, std::function<void(const std::string&)>> setters_;
  std::map<std::string, bool*> flags_;
  std::vector<std::string>* rest_ = nullptr;
};

/// A folder of this process's own below `parent`, gone with this.
class WorkFolder {
 public:
  WorkFolder(const std::filesystem::path& parent, const char* name)
      : path_(parent / cat(name, ".", ::getpid())) {
    std::filesystem::create_directories(path_);
  }
  ~WorkFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  WorkFolder(const WorkFolder&) = delete;
  WorkFolder& operator=(const WorkFolder&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

/// Runs main()'s body and gives what main() returns: 0, or 1 after an exception of `body` was printed as one
/// line.
template <class Body>
int guarded(const char* program, const Body& body) {
  try {
    body();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", program, error.what());
    return 1;
  }
}

}  // namespace sherd::bench
