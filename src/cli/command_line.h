#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace sherd::cli {

/// The command line is wrong; the program prints one line and exits with 2.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Advice for a word that is none of `known`: "did you mean 'X'?" where one is like it, else "known are
/// X, Y, Z.". `prefix` goes before each.
std::string suggest(const std::string& word, const std::vector<std::string>& known,
                    const std::string& prefix = "");

/// An option as a command declares it. `shown` names its value in the help, and says what completion offers
/// (expected_of(), shell/declared.h).
struct Option {
  enum class Kind : std::uint8_t { flag, value, list };
  Kind kind;
  std::string name, shown, help, fallback;
};

/// The options of one command: declared, parsed, read. Values may follow as `--name value` or `--name=value`.
/// Every mistake throws UsageError naming the option, its value and where help is.
class CommandLine {
 public:
  /// `synopsis` is what follows the command's name in its usage line.
  CommandLine(std::string command, std::string summary, std::string synopsis);
  ~CommandLine();
  CommandLine(CommandLine&&) noexcept;

  /// Present or not.
  CommandLine& flag(const std::string& name, const std::string& help);
  /// One value. `shown` names it in the help; an empty `fallback` means none.
  CommandLine& value(const std::string& name, const std::string& shown, const std::string& help,
                     const std::string& fallback = "");
  /// Any number of values: the option may be repeated.
  CommandLine& list(const std::string& name, const std::string& shown, const std::string& help);
  /// Values that no option takes belong to the list `name`, so that `--name a b` and a shell's `--name *.txt`
  /// work.
  CommandLine& rest_to(const std::string& name);
  /// The words behind "--" are a program with its arguments.
  CommandLine& program_follows();
  /// --json: the command prints its results as one JSON object, and nothing else on stdout. (--quiet and
  /// --help every command has.)
  CommandLine& json();

  /// Parses what follows the command's name. False when help was asked for (and printed to stdout).
  bool parse(std::vector<std::string> arguments);

  const std::string& command() const;          ///< "bench adam"
  const std::string& summary() const;          ///< what it does, in sentences
  const std::string& synopsis() const;         ///< what follows its name
  const std::vector<Option>& options() const;  ///< in the order of the help, --help too
  const std::string& rest() const;             ///< the option of rest_to(); empty: none
  bool takes_program() const;
  const std::vector<std::string>& program() const;  ///< behind "--"

  bool has(const std::string& name) const;  ///< given on the command line
  std::string text(const std::string& name) const;
  /// The value of an option that must be given.
  std::string required(const std::string& name) const;
  std::vector<std::string> all(const std::string& name) const;
  /// Throws where the option `output` names `file`, which is read, as `input` says.
  void require_apart(const std::string& output, const std::string& input, const std::string& file) const;
  /// A whole number of at least `least` and at most `most`.
  std::int64_t integer(const std::string& name, std::int64_t least,
                       std::int64_t most = std::numeric_limits<std::int64_t>::max()) const;
  double number(const std::string& name) const;
  /// Whole numbers of at least `least`, separated by commas, which k, M and G (also KiB, MiB, GiB) multiply
  /// by powers of `unit`: 1000 for counts, 1024 for bytes.
  std::vector<std::int64_t> amounts(const std::string& name, std::int64_t least, std::int64_t unit) const;
  /// A single one.
  std::int64_t amount(const std::string& name, std::int64_t least, std::int64_t unit) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace sherd::cli
