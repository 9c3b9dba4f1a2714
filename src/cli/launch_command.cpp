#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <random>
#include <sstream>
#include <thread>

#include "base/error.h"
#include "base/excerpt.h"
#include "cli/children.h"
#include "cli/command_line.h"
#include "cli/program.h"
#include "comm/tcp/socket.h"
#include "device/cuda.h"

namespace sherd::cli {
namespace {

/// A machine, and the ranks that it has place for.
struct Host {
  std::string name;
  int slots = 1;
};

/// Whether all of a text is a number of ranks.
bool is_number(const char* begin, const char* end, int& number) {
  const auto [past, error] = std::from_chars(begin, end, number);
  return error == std::errc() && past == end && number >= 1;
}

/// "worker-1 slots=4", a line each, as DeepSpeed's files have them; # begins a comment.
std::vector<Host> read_hosts(const std::string& path) {
  std::ifstream in(path);
  if (!in) fail(ErrorKind::io, "cannot read the hosts' file ", excerpt(path, 300));
  std::vector<Host> out;
  int number = 0;
  for (std::string line; std::getline(in, line);) {
    ++number;
    std::istringstream words(line.substr(0, line.find('#')));
    Host host;
    if (!(words >> host.name)) continue;
    for (std::string word; words >> word;) {
      constexpr std::string_view slots = "slots=";
      const char* end = word.data() + word.size();
      if (!word.starts_with(slots) || !is_number(word.data() + slots.size(), end, host.slots))
        fail(ErrorKind::config, path, ":", number, ": '", excerpt(word),
             "' is not understood: a line is a host and slots=N, its ranks");
    }
    const auto same = [&](const Host& other) { return other.name == host.name; };
    if (std::any_of(out.begin(), out.end(), same))
      fail(ErrorKind::config, path, ":", number, ": ", host.name,
           " stands there twice: give all its slots in one line");
    out.push_back(host);
  }
  if (out.empty()) fail(ErrorKind::config, path, " names no host");
  return out;
}

/// "a=4,b=4", as the launcher gives them to those that it starts.
std::vector<Host> parse_hosts(const std::string& text) {
  std::vector<Host> out;
  std::istringstream in(text);
  for (std::string word; std::getline(in, word, ',');) {
    const std::size_t at = word.find('=');
    Host host{word.substr(0, at)};
    const char* end = word.data() + word.size();
    if (at == std::string::npos || host.name.empty() || !is_number(word.data() + at + 1, end, host.slots))
      throw UsageError(cat("--host-list takes HOST=RANKS,…, not '", excerpt(word), "'"));
    out.push_back(host);
  }
  return out;
}
std::string host_list(const std::vector<Host>& hosts) {
  std::string out;
  for (const Host& host : hosts) out += cat(out.empty() ? "" : ",", host.name, '=', host.slots);
  return out;
}

std::string own_name() {
  char name[256] = {};
  ::gethostname(name, sizeof name - 1);
  return name;
}
bool is_here(const std::string& host) {
  const std::string own = own_name();
  return host == "localhost" || host == "127.0.0.1" || host == own || host == own.substr(0, own.find('.'));
}

constexpr int usual_port = 29500;  // torchrun's

/// A port of this machine that nobody has now.
int free_port() {
  const auto listener = comm::listen_on(0);
  return listener ? comm::port_of(listener) : usual_port;
}

/// As a shell reads it back.
std::string quoted(const std::string& word) {
  std::string out = "'";
  for (const char c : word) out += c == '\'' ? "'\\''" : std::string(1, c);
  return out + "'";
}

struct Launch {
  std::vector<Host> hosts;
  std::vector<std::string> command;
  std::string ssh = "ssh";
  std::string address, run;
  int port = 0;
  bool free_port = false;  ///< the port is one that was found free
  double grace_seconds = 30;

  int ranks() const {
    return std::accumulate(hosts.begin(), hosts.end(), 0,
                           [](int sum, const Host& host) { return sum + host.slots; });
  }
};

/// The ranks of one of the hosts, on this machine.
ChildrenEnd run_ranks(const Launch& launch, std::size_t node, bool follow_input) {
  int first = 0;
  for (std::size_t i = 0; i < node; ++i) first += launch.hosts[i].slots;
  const int ranks = launch.hosts[node].slots;
  std::vector<ChildProgram> programs;
  for (int i = 0; i < ranks; ++i) {
    const int rank = first + i;
    programs.push_back(
        {cat("rank ", rank, launch.hosts.size() > 1 ? cat(" on ", launch.hosts[node].name) : ""),
         launch.command,
         {{"RANK", std::to_string(rank)},
          {"WORLD_SIZE", std::to_string(launch.ranks())},
          {"LOCAL_RANK", std::to_string(i)},
          {"LOCAL_WORLD_SIZE", std::to_string(ranks)},
          {"MASTER_ADDR", launch.address},
          {"MASTER_PORT", std::to_string(launch.port)},
          // By which launchers that torchrun started are told from those around it.
          {"TORCHELASTIC_RUN_ID", launch.run}},
         launch.ranks() > 1 ? cat("[", rank, "] ") : ""});
  }
  return run_children(programs, {launch.grace_seconds, follow_input});
}

/// All hosts, each with a launcher of its ranks, over ssh where it is another machine.
ChildrenEnd run_hosts(const Launch& launch) {
  if (launch.hosts.size() == 1 && is_here(launch.hosts[0].name)) return run_ranks(launch, 0, false);
  const std::string program = std::filesystem::read_symlink("/proc/self/exe");
  std::vector<ChildProgram> programs;
  for (std::size_t node = 0; node < launch.hosts.size(); ++node) {
    const Host& host = launch.hosts[node];
    std::vector<std::string> words{program,          "launch",
                                   "--host-list",    host_list(launch.hosts),
                                   "--node",         cat(node),
                                   "--address",      launch.address,
                                   "--port",         cat(launch.port),
                                   "--run",          launch.run,
                                   "--grace",        cat(launch.grace_seconds),
                                   "--follow-input", "--"};
    words.insert(words.end(), launch.command.begin(), launch.command.end());
    if (!is_here(host.name)) {
      std::string line = cat("cd ", quoted(std::filesystem::current_path().string()), " && exec");
      for (const std::string& word : words) line += cat(' ', quoted(word));
      words.clear();
      std::istringstream ssh(launch.ssh);
      for (std::string word; ssh >> word;) words.push_back(word);
      words.insert(words.end(), {host.name, line});
    }
    programs.push_back({host.name, std::move(words), {}, "", true});
  }
  return run_children(programs, {launch.grace_seconds, false});
}

std::string new_run_id() {
  std::random_device random;
  char text[17];
  std::snprintf(text, sizeof text, "%08x%08x", random(), random());
  return text;
}

/// Runs, and begins again where a rank failed.
int supervise(Launch launch, int restarts) {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::minutes a_good_while{10};
  const std::string run = launch.run;
  for (int tries = 0, quick = 0;; ++tries) {
    launch.run = cat(run, ".", tries);
    const auto begin = Clock::now();
    const ChildrenEnd end = run_hosts(launch);
    if (end.asked != 0) return end.code != 0 ? end.code : 0;
    // A wrong command line, a run that does not fit, and a program that cannot be started would come again.
    constexpr int not_executable = 126, not_found = 127;
    if (end.code == 0 || end.code == 2 || end.code == does_not_fit || end.code == not_executable ||
        end.code == not_found)
      return end.code;
    if (tries == restarts) {
      if (restarts > 0)
        std::fprintf(stderr, "sherd launch: %s failed (exit code %d), and %s been used\n", end.failed.c_str(),
                     end.code, restarts == 1 ? "the restart has" : "all restarts have");
      return end.code;
    }
    quick = Clock::now() - begin > a_good_while ? 0 : quick + 1;
    const int seconds = std::min(60, 1 << std::min(quick, 6));
    std::fprintf(stderr, "sherd launch: %s failed (exit code %d): restart %d of %d in %d s\n",
                 end.failed.c_str(), end.code, tries + 1, restarts, seconds);
    std::this_thread::sleep_for(std::chrono::seconds(seconds));
    if (launch.free_port) launch.port = free_port();
  }
}

}  // namespace

void launch_command(const Arguments& arguments) {
  const auto split = std::find(arguments.begin(), arguments.end(), "--");
  CommandLine line(
      "launch",
      "Starts a program as one process for each rank, on this machine or on those of a file, tells "
      "each its rank as torchrun does, and passes on what they print.",
      "(--ranks N | --hosts FILE) [--restarts N] -- PROGRAM ARGUMENT…");
  line.value("ranks", "N", "processes on this machine (one for each GPU)")
      .value("hosts", "FILE", "machines that ssh reaches without a password: a line each, HOST slots=RANKS")
      .value("restarts", "N", "begin again so many times where a rank fails; the program goes on by itself",
             "0")
      .value("ssh", "WORDS", "the command that starts a program on another machine",
             "ssh -o BatchMode=yes -o ServerAliveInterval=15")
      .value("address", "HOST", "where rank 0 listens (the first of the hosts)")
      .value("port", "P", "its port (29500; on one machine one that is free)")
      .value("grace", "S", "seconds that ranks have to end by themselves once one has failed", "30")
      .value("host-list", "LIST", "HOST=RANKS,… in place of a file")
      .value("node", "K", "start the ranks of the K-th host alone, counted from 0, on this machine")
      .value("run", "ID", "tells runs apart that meet at one port", "run")
      .flag("follow-input", "end the ranks with standard input, from where a launcher passes on signals");
  if (!line.parse({arguments.begin(), split})) return;
  Launch launch;
  if (split != arguments.end()) launch.command.assign(split + 1, arguments.end());
  if (launch.command.empty())
    throw UsageError(
        "launch needs a program behind --, as in sherd launch --ranks 4 -- sherd train --config F");
  if (line.has("ranks") + line.has("hosts") + line.has("host-list") > 1)
    throw UsageError("--ranks, --hosts and --host-list exclude each other");
  if (line.has("hosts"))
    launch.hosts = read_hosts(line.text("hosts"));
  else if (line.has("host-list"))
    launch.hosts = parse_hosts(line.text("host-list"));
  else if (line.has("ranks"))
    launch.hosts = {{"localhost", static_cast<int>(line.integer("ranks", 1, 1024))}};
  else if (const std::size_t gpus = device::cuda_status().gpus.size(); gpus > 0)
    launch.hosts = {{"localhost", static_cast<int>(gpus)}};
  else
    throw UsageError("no GPU is here whose number would say how many ranks to start: give --ranks N");
  const bool alone = launch.hosts.size() == 1 && is_here(launch.hosts[0].name);
  launch.ssh = line.text("ssh"), launch.grace_seconds = line.number("grace");
  launch.address = line.has("address") ? line.text("address") : alone ? "127.0.0.1" : launch.hosts[0].name;
  launch.address.erase(0, launch.address.find('@') + 1);  // user@host
  if (!alone && !line.has("address") && (launch.address == "localhost" || launch.address == "127.0.0.1"))
    throw UsageError(
        "the first host is 'localhost', which the others cannot reach: name it as they know it, or give "
        "--address");
  launch.free_port = alone && !line.has("port");
  launch.port = line.has("port")   ? static_cast<int>(line.integer("port", 1, 65535))
                : launch.free_port ? free_port()
                                   : usual_port;
  launch.run = line.has("run") || line.has("node") ? line.text("run") : new_run_id();
  const auto restarts = static_cast<int>(line.integer("restarts", 0, 1'000'000));
  if (restarts > 0 && line.has("node"))
    throw UsageError("--restarts needs all hosts, and --node starts one: leave it to whoever starts all");
  const std::string program = std::filesystem::path(launch.command[0]).filename();
  const auto given = [&](const char* word) {
    return std::find(launch.command.begin(), launch.command.end(), word) != launch.command.end();
  };
  if (restarts > 0 && program == "sherd" && given("train") && !given("--resume-or-start") &&
      !given("--resume"))
    throw UsageError("--restarts begins again from the last checkpoint: give sherd train --resume-or-start");
  int code = 0;
  if (line.has("node")) {
    const auto node = static_cast<std::size_t>(line.integer("node", 0, std::ssize(launch.hosts) - 1));
    code = run_ranks(launch, node, line.has("follow-input")).code;
  } else {
    code = supervise(launch, restarts);
  }
  if (code != 0) throw Finding{code};
}

}  // namespace sherd::cli
