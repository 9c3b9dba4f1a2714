#include "cli/program.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <new>
#include <optional>
#include <sstream>
#include <system_error>

#include "base/error.h"
#include "base/log.h"
#include "base/terminal.h"
#include "base/text/excerpt.h"
#include "base/threads.h"
#include "base/version.h"
#include "cli/command_line.h"
#include "cli/memory_reserve.h"
#include "cli/referenced_base.h"
#include "engine/stop_signals.h"

namespace sherd::cli {
namespace {

constexpr Command commands[] = {
    {"init", "write a first configuration that fits this machine", init_line, init_command},
    {"train", "train the model that a configuration describes", train_line, train_command},
    {"launch", "start a program's ranks on one machine or several, and begin again where one fails",
     launch_line, launch_command},
    {"estimate", "what memory a run will take, and what to change when it does not fit", estimate_line,
     estimate_command},
    {"plan", "which layout of ranks trains a model best on a machine, and how fast", plan_line, plan_command},
    {"tune", "try the layouts that plan finds best, and keep the fastest", tune_line, tune_command},
    {"verify", "train a run's steps again, and compare them with what was saved", verify_line,
     verify_command},
    {"generate", "continue a text with a trained model", generate_line, generate_command},
    {"evaluate", "score a trained model: choices, completions, perplexity", evaluate_line, evaluate_command},
    {"import", "make a checkpoint of a model in Hugging Face's files", import_line, import_command},
    {"export", "write a checkpoint's model as Hugging Face's files", export_line, export_command},
    {"checkpoint", "look at a checkpoint, verify it, or write it for other ranks", checkpoint_line,
     checkpoint_command},
    {"prepare", "turn text into a dataset of token ids", prepare_line, prepare_command},
    {"plot", "draw the losses of a --metrics file as SVG", plot_line, plot_command},
    {"watch", "draw a run's losses, rates and memory in the terminal while it goes on", watch_line,
     watch_command},
    {"report", "write one HTML file about a run", report_line, report_command},
    {"bench", "measure this machine and Sherd on it, part by part", bench_group, nullptr, bench_commands},
    {"info", "versions, processor, memory and features", info_line, info_command},
    {"completion", "print a script by which a shell completes commands", completion_line, completion_command},
    {"man", "print a manual page", man_line, man_command},
};

/// Names and summaries, a line each.
std::string list_of(std::span<const Command> commands) {
  std::string text;
  for (const Command& command : commands) {
    std::string name = command.name;
    name.resize(12, ' ');
    text += cat("  ", name, command.summary, "\n");
  }
  return text;
}

std::string overview() {
  return cat("Sherd ", version(), ": trains transformers sharded over ranks.\n\nusage: sherd COMMAND ...\n\n",
             list_of(commands), "\n'sherd COMMAND --help' lists a command's options.\n");
}

std::string overview_of(const Command& group) {
  const CommandLine line = group.line();
  return cat(line.summary(), "\n\nusage: sherd ", group.name, ' ', line.synopsis(), "\n\n",
             list_of(group.commands()), "\n'sherd ", group.name, " NAME --help' lists the options.\n");
}

const Command* find_command(std::span<const Command> commands, const std::string& name) {
  const auto found =
      std::find_if(commands.begin(), commands.end(), [&](const Command& each) { return name == each.name; });
  return found == commands.end() ? nullptr : &*found;
}

std::vector<std::string> command_names(std::span<const Command> commands) {
  std::vector<std::string> out;
  for (const Command& command : commands) out.emplace_back(command.name);
  return out;
}

/// While one lives, warnings and errors alone are told, and no progress.
class Quiet {
 public:
  Quiet() : level_(set_log_level(LogLevel::warning)), progress_(set_shows_progress(false)) {}
  ~Quiet() { set_log_level(level_), set_shows_progress(progress_); }
  Quiet(const Quiet&) = delete;
  Quiet& operator=(const Quiet&) = delete;

 private:
  LogLevel level_;
  bool progress_;
};

void run_command(const Command& command, const Arguments& arguments) {
  CommandLine line = command.line();
  if (!line.parse(arguments)) return;
  std::optional<Quiet> quiet;
  if (line.has("quiet")) quiet.emplace();
  command.run(line);
}

/// Runs the command of a group that the arguments begin with.
void run_of_group(const Command& group, const Arguments& arguments) {
  const std::string help = cat("See 'sherd ", group.name, " --help'");
  const std::vector<std::string> names = command_names(group.commands());
  if (arguments.empty()) throw UsageError(cat(group.name, " what? ", suggest("", names), ' ', help));
  if (arguments[0] == "--help" || arguments[0] == "-h") return print_text(overview_of(group));
  if (const Command* command = find_command(group.commands(), arguments[0]))
    return run_command(*command, {arguments.begin() + 1, arguments.end()});
  throw UsageError(cat("unknown ", group.name, " '", excerpt(arguments[0]), "'; ",
                       suggest(arguments[0], names), ' ', help));
}

void call(const Arguments& arguments) {
  if (arguments.empty()) {
    std::fputs(overview().c_str(), stderr);
    throw Finding{wrong_use};
  }
  const std::string& name = arguments[0];
  if (name == "--help" || name == "-h" || name == "help") return print_text(overview());
  if (name == "--version") return print_text(cat("sherd ", version(), "\n"));
  if (const Command* command = find_command(commands, name)) {
    const Arguments rest(arguments.begin() + 1, arguments.end());
    return command->commands ? run_of_group(*command, rest) : run_command(*command, rest);
  }
  if (name.starts_with("-"))
    throw UsageError(
        cat("'", excerpt(name),
            "' is an option, and a command comes first, as in 'sherd train --config F'. See 'sherd --help'"));
  throw UsageError(cat("unknown command '", excerpt(name), "'; ", suggest(name, command_names(commands)),
                       " See 'sherd --help'"));
}

int dispatch(const Arguments& arguments) {
  try {
    call(arguments);
    return 0;
  } catch (const Finding& finding) {
    return finding.code;
  }
}

/// Prints `message` as one line, whatever it holds and however long a path in it is, and returns `code`.
int failed(std::string message, int code) {
  constexpr std::size_t longest = 4000;
  while (!message.empty() && (message.back() == '\n' || message.back() == ' ')) message.pop_back();
  std::replace(message.begin(), message.end(), '\n', ' ');
  log_line(LogLevel::error, excerpt(message, longest));
  return code;
}

/// A configuration may have several problems, a line each.
int failed(const Error& error) {
  if (error.kind() == ErrorKind::usage) return failed(error.what(), wrong_use);
  if (error.kind() == ErrorKind::interrupted && engine::StopSignals::received() != 0)
    return failed(error.what(), stopped_by(engine::StopSignals::received()));
  if (error.kind() == ErrorKind::comm) return failed(error.what(), lost_others);
  if (error.kind() != ErrorKind::config) return failed(error.what(), 1);
  std::istringstream lines(error.what());
  for (std::string line; std::getline(lines, line);) failed(line, wrong_use);
  return wrong_use;
}

/// Whether nobody is at the other end of a pipe or terminal.
bool reader_gone(int descriptor) {
  pollfd one{descriptor, 0, 0};
  return ::poll(&one, 1, 0) > 0 && (one.revents & (POLLERR | POLLHUP));
}

/// `code`, unless what was printed is lost, as on a full disk.
int with_output_written(int code) {
  errno = 0;
  const bool written = std::fflush(stdout) == 0 && !std::ferror(stdout);
  const int error = errno;
  std::clearerr(stdout);
  if (written || reader_gone(STDOUT_FILENO)) return code;
  return failed(cat("cannot write to standard output", error ? cat(": ", std::strerror(error)) : ""), 1);
}

}  // namespace

std::span<const Command> all_commands() {
  return commands;
}

void print_text(const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
}

void prepare_process() {
  for (int null = 0; null >= 0 && null <= STDERR_FILENO;) {  // the lowest number that is free
    null = ::open("/dev/null", O_RDWR);
    if (null > STDERR_FILENO) ::close(null);
  }
  for (const int signal : {SIGPIPE, SIGXFSZ}) {
    struct sigaction action {};
    ::sigaction(signal, nullptr, &action);
    if (action.sa_handler != SIG_DFL) continue;
    action.sa_handler = [](int) {};  // not SIG_IGN, which programs started from here would inherit
    action.sa_flags = SA_RESTART | SA_ONSTACK;
    ::sigaction(signal, &action, nullptr);
  }
  engine::StopSignals::let_inquiries_pass();
}

int run_program(const Arguments& arguments) {
  engine::set_base_opener(open_base);
  try {
    const MemoryReserve reserve;
    require_stack();
    return with_output_written(dispatch(arguments));
  } catch (const UsageError& error) {
    return failed(error.what(), wrong_use);
  } catch (const Error& error) {
    return failed(error);
  } catch (const std::bad_alloc&) {
    return failed(
        "out of memory: raise this process's limit (ulimit -v) where there is one, use a smaller model or "
        "micro-batch, or more ranks on other machines",
        1);
  } catch (const std::system_error& error) {
    if (error.code() != std::errc::resource_unavailable_try_again) return failed(error.what(), 1);
    return failed(
        "the system starts no further thread: raise the limit on this process's memory (ulimit -v) or on "
        "processes (ulimit -u), or take fewer --ranks or device.threads_per_rank",
        1);
  } catch (const std::exception& error) {
    return failed(error.what(), 1);
  } catch (...) {
    return failed("an unknown exception ended the program; this is a bug in Sherd or in a library it uses",
                  1);
  }
}

}  // namespace sherd::cli
