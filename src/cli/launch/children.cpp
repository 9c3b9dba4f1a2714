#include "cli/launch/children.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <optional>

#include "base/error.h"
#include "base/files.h"
#include "base/text/excerpt.h"
#include "cli/launch/watchdog.h"

namespace sherd::cli {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::array passed_on{SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2};
constexpr std::size_t longest_line = 1 << 16;  // longer ones go on in parts
constexpr std::chrono::seconds patience{10};   // from SIGTERM to SIGKILL, at most

/// One of a child's streams, on its way to the same stream of this process.
struct ChildStream {
  int from = -1, to = -1;
  std::string rest;  ///< of a line whose end has not come
};

struct Child {
  const ChildProgram* program = nullptr;
  pid_t process = 0;
  int input = -1;
  std::array<ChildStream, 2> streams{};
  std::optional<Watchdog> watchdog{};       ///< for where this process is killed
  std::optional<Clock::time_point> left{};  ///< when the program ended; others of its group may go on
  bool ended = false;                       ///< as all of its group have
};

void write_all(int file, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(file, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0 && errno == EAGAIN) {
      pollfd ready{file, POLLOUT, 0};
      ::poll(&ready, 1, -1);
      continue;
    }
    if (written <= 0) return;  // nobody reads: the programs run on
    text.remove_prefix(static_cast<std::size_t>(written));
  }
}

void close_file(int& file) {
  if (file >= 0) ::close(file);
  file = -1;
}

/// The signals that are passed on, and SIGCHLD, wait in a queue while one lives.
class SignalQueue {
 public:
  SignalQueue() {
    ::sigemptyset(&taken_);
    for (const int signal : passed_on) {
      struct sigaction now {};
      ::sigaction(signal, nullptr, &now);
      if (now.sa_handler != SIG_IGN) ::sigaddset(&taken_, signal);  // nohup's stay ignored
    }
    ::sigaddset(&taken_, SIGCHLD);
    ::signal(SIGCHLD, SIG_DFL);  // ignored, it would leave nothing to wait for
    ::sigprocmask(SIG_BLOCK, &taken_, &before_);
    file_ = ::signalfd(-1, &taken_, SFD_CLOEXEC | SFD_NONBLOCK);
    if (file_ < 0) fail(ErrorKind::io, "cannot wait for signals: ", std::strerror(errno));
  }
  ~SignalQueue() {
    ::close(file_);
    ::sigprocmask(SIG_SETMASK, &before_, nullptr);
  }
  SignalQueue(const SignalQueue&) = delete;
  SignalQueue& operator=(const SignalQueue&) = delete;

  int file() const { return file_; }
  const sigset_t& before() const { return before_; }
  /// The next one; 0: there is none.
  int next() {
    signalfd_siginfo info{};
    return ::read(file_, &info, sizeof info) == sizeof info ? static_cast<int>(info.ssi_signo) : 0;
  }

 private:
  sigset_t taken_{}, before_{};
  int file_ = -1;
};

class Children {
 public:
  Children(const std::vector<ChildProgram>& programs, const ChildrenOptions& options) : options_(options) {
    ::fcntl(STDIN_FILENO, F_SETFD, FD_CLOEXEC);
    try {
      for (const ChildProgram& program : programs) start(program);
    } catch (...) {
      kill_all();
      throw;
    }
  }
  ~Children() { kill_all(); }
  Children(const Children&) = delete;
  Children& operator=(const Children&) = delete;

  ChildrenEnd run() {
    if (options_.started) {
      std::vector<int> processes;
      for (const Child& child : children_) processes.push_back(child.process);
      options_.started(processes);
    }
    if (options_.most_seconds > 0) begin_to_press(options_.most_seconds);
    while (living() > 0) {
      wait();
      while (const int signal = signals_.next())
        if (signal != SIGCHLD) ask(signal);
      reap();
      press();
    }
    for (Child& child : children_)
      for (ChildStream& stream : child.streams) {
        while (pass_on(child, stream)) {
        }
        if (!stream.rest.empty()) write_all(stream.to, cat(child.program->prefix, stream.rest, '\n'));
      }
    return end_;
  }

 private:
  void start(const ChildProgram& program) {
    Child& child = children_.emplace_back();
    child.program = &program;
    int out[2] = {-1, -1}, err[2] = {-1, -1}, in[2] = {-1, -1}, go[2] = {-1, -1};
    const bool piped = ::pipe2(out, O_CLOEXEC) == 0 && ::pipe2(err, O_CLOEXEC) == 0 &&
                       ::pipe2(go, O_CLOEXEC) == 0 &&
                       (!program.signals_by_input || ::pipe2(in, O_CLOEXEC) == 0);
    if (!program.signals_by_input) in[0] = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
    std::vector<char*> words, environment;
    for (const std::string& word : program.words) words.push_back(const_cast<char*>(word.c_str()));
    words.push_back(nullptr);
    std::vector<std::string> own;
    for (const auto& [name, value] : program.environment) own.push_back(cat(name, "=", value));
    for (char** each = environ; *each; ++each) {
      const std::string_view entry(*each);
      const bool replaced = std::any_of(own.begin(), own.end(), [&](const std::string& mine) {
        return entry.substr(0, entry.find('=') + 1) == std::string_view(mine).substr(0, mine.find('=') + 1);
      });
      if (!replaced) environment.push_back(*each);
    }
    for (std::string& each : own) environment.push_back(each.data());
    environment.push_back(nullptr);

    child.process = piped ? ::fork() : -1;
    const int error = errno;
    if (child.process == 0) {
      ::setpgid(0, 0);
      ::close(go[1]);
      char byte;  // comes once the watchdog is there; nothing where this one's parent was killed before
      ssize_t got;
      while ((got = ::read(go[0], &byte, 1)) < 0 && errno == EINTR) {
      }
      if (got != 1) ::_exit(1);
      ::dup2(in[0], STDIN_FILENO), ::dup2(out[1], STDOUT_FILENO), ::dup2(err[1], STDERR_FILENO);
      ::sigprocmask(SIG_SETMASK, &signals_.before(), nullptr);
      ::execvpe(words[0], words.data(), environment.data());
      write_all(STDERR_FILENO, "cannot start the program: ");
      write_all(STDERR_FILENO, std::strerror(errno));
      write_all(STDERR_FILENO, "\n");
      ::_exit(127);
    }
    for (int* mine : {&in[0], &out[1], &err[1], &go[0]}) close_file(*mine);
    FileDescriptor begin(go[1]);
    child.input = in[1];
    child.streams = {ChildStream{out[0], STDOUT_FILENO, {}}, ChildStream{err[0], STDERR_FILENO, {}}};
    if (child.process < 0) {
      child.process = 0, child.ended = true;
      fail(ErrorKind::io, "cannot start ", program.name, ": ", std::strerror(error));
    }
    ::setpgid(child.process, child.process);  // whichever of both is first
    child.watchdog.emplace(child.process);
    write_all(begin.get(), "x");
    for (ChildStream& stream : child.streams) ::fcntl(stream.from, F_SETFL, O_NONBLOCK);
  }

  std::size_t number_of(const Child& child) const {
    return static_cast<std::size_t>(
        std::find_if(children_.begin(), children_.end(), [&](const Child& c) { return &c == &child; }) -
        children_.begin());
  }

  std::ptrdiff_t living() const {
    return std::count_if(children_.begin(), children_.end(), [](const Child& c) { return !c.ended; });
  }

  /// Until something comes, or a moment is over.
  void wait() {
    std::vector<pollfd> files{{signals_.file(), POLLIN, 0}};
    if (options_.follow_input && !input_ended_) files.push_back({STDIN_FILENO, POLLIN, 0});
    for (const Child& child : children_)
      for (const ChildStream& stream : child.streams)
        if (stream.from >= 0) files.push_back({stream.from, POLLIN, 0});
    ::poll(files.data(), files.size(), 200);
    for (Child& child : children_)
      for (ChildStream& stream : child.streams) pass_on(child, stream);
    if (options_.follow_input && !input_ended_ && files[1].revents != 0) read_input();
  }

  /// Passes on the lines of what has come, or a part of it: others have their turn. False: nothing was there.
  bool pass_on(const Child& child, ChildStream& stream) {
    if (stream.from < 0) return false;
    std::array<char, 1 << 14> buffer;
    const ssize_t got = ::read(stream.from, buffer.data(), buffer.size());
    if (got == 0) close_file(stream.from);
    if (got <= 0) return got < 0 && errno == EINTR;
    stream.rest.append(buffer.data(), static_cast<std::size_t>(got));
    std::string lines;
    for (;;) {
      const std::size_t end = stream.rest.find('\n');
      if (end == std::string::npos && stream.rest.size() < longest_line) break;
      const std::string line = stream.rest.substr(0, std::min(end, longest_line));
      if (child.program->signals_by_input && line.starts_with(report_mark))
        end_.reports.emplace_back(number_of(child), line.substr(1));
      else
        lines += cat(child.program->prefix, line, '\n');
      stream.rest.erase(0, end < longest_line ? end + 1 : longest_line);
    }
    write_all(stream.to, lines);
    return true;
  }

  /// Lines such as "signal 15", and "end" where programs elsewhere have failed.
  void read_input() {
    std::array<char, 256> buffer;
    const ssize_t got = ::read(STDIN_FILENO, buffer.data(), buffer.size());
    if (got < 0 && (errno == EINTR || errno == EAGAIN)) return;
    if (got <= 0) {
      input_ended_ = true;
      if (end_.asked == 0) end_.asked = SIGHUP;
      return begin_to_press(0);
    }
    input_.append(buffer.data(), static_cast<std::size_t>(got));
    for (std::size_t end; (end = input_.find('\n')) != std::string::npos; input_.erase(0, end + 1)) {
      constexpr std::string_view word = "signal ";
      int signal = 0;
      if (input_.starts_with("end\n")) begin_to_press(0);
      if (input_.starts_with(word)) std::from_chars(input_.data() + word.size(), input_.data() + end, signal);
      if (std::find(passed_on.begin(), passed_on.end(), signal) != passed_on.end()) ask(signal);
    }
  }

  void ask(int signal) {
    if (signal != SIGUSR2) end_.asked = signal;
    for (const Child& child : children_) {
      if (child.ended) continue;
      if (child.input >= 0)
        write_all(child.input, cat("signal ", signal, '\n'));
      else
        ::kill(-child.process, signal);
    }
  }

  void reap() {
    for (Child& child : children_) {
      if (child.ended || (!child.left && !has_ended(child))) continue;
      if (::kill(-child.process, 0) == 0) {
        // Processes that the program has started may have more to do: after a signal to save, however long
        // that takes.
        if (end_.asked != 0 || Clock::now() - *child.left < patience) continue;
        ::kill(-child.process, SIGKILL);
      }
      child.watchdog.reset();
      child.ended = true;
    }
  }
  /// Whether the program has ended; remembers how.
  bool has_ended(Child& child) {
    int status = 0;
    const pid_t found = ::waitpid(child.process, &status, WNOHANG);
    if (found == 0 || (found < 0 && errno == EINTR)) return false;
    child.left = Clock::now();
    close_file(child.input);
    const bool by_signal = found >= 0 && WIFSIGNALED(status);
    const int code = found < 0 ? 1 : by_signal ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
    if (code != 0) end_.failures.push_back({number_of(child), code, asked_to_end_.has_value(), by_signal});
    if (code != 0 && end_.code == 0) {
      end_.code = code, end_.failed = child.program->name;
      if (!child.program->signals_by_input && !options_.quiet)  // else it has said so itself
        std::fprintf(stderr, "sherd launch: %s %s\n", end_.failed.c_str(),
                     ending_of(code, by_signal).c_str());
      begin_to_press(options_.grace_seconds);
    }
    return true;
  }

  void begin_to_press(double grace) {
    const auto from =
        Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(grace));
    if (!pressed_from_ || from < *pressed_from_) pressed_from_ = from;
  }
  /// Ends those that are left, once it is time.
  void press() {
    if (!pressed_from_ || Clock::now() < *pressed_from_) return;
    if (!asked_to_end_) {
      asked_to_end_ = Clock::now();
      for (Child& child : children_) {
        if (child.ended) continue;
        if (child.input >= 0)
          write_all(child.input, "end\n");
        else
          ::kill(-child.process, SIGTERM);
      }
    }
    // Where one has failed the others have nothing to save together. One that ends others itself has the same
    // patience with them first.
    std::chrono::duration<double> patient = patience;
    if (end_.asked == 0) patient = std::min(patient, std::chrono::duration<double>(options_.grace_seconds));
    for (const Child& child : children_)
      if (!child.ended && Clock::now() - *asked_to_end_ > (child.program->signals_by_input ? 2 : 1) * patient)
        ::kill(-child.process, SIGKILL);
  }

  void kill_all() {
    for (Child& child : children_) {
      if (!child.ended && child.process > 0) {
        ::kill(-child.process, SIGKILL);
        while (!child.left && ::waitpid(child.process, nullptr, 0) < 0 && errno == EINTR) {
        }
      }
      child.watchdog.reset();
      child.ended = true;
      close_file(child.input);
      for (ChildStream& stream : child.streams) close_file(stream.from);
    }
  }

  ChildrenOptions options_;
  SignalQueue signals_;
  std::deque<Child> children_;
  ChildrenEnd end_;
  std::string input_;
  bool input_ended_ = false;
  std::optional<Clock::time_point> pressed_from_, asked_to_end_;
};

}  // namespace

std::string ending_of(int code, bool by_signal) {
  if (!by_signal) return cat("ended with exit code ", code);
  const int signal = code - 128;
  const char* name = ::sigabbrev_np(signal);
  return cat("was killed by signal ", signal, name ? cat(" (SIG", name, ")") : "");
}

ChildrenEnd run_children(const std::vector<ChildProgram>& programs, const ChildrenOptions& options) {
  return Children(programs, options).run();
}

}  // namespace sherd::cli
