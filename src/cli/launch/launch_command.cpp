#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <random>

#include "base/error.h"
#include "cli/command_line.h"
#include "cli/launch/supervisor.h"
#include "cli/program.h"
#include "device/cuda.h"

namespace sherd::cli {
namespace {

std::string new_run_id() {
  std::random_device random;
  char text[17];
  std::snprintf(text, sizeof text, "%08x%08x", random(), random());
  return text;
}

/// The places that the command line names.
std::vector<LaunchHost> hosts_of(const CommandLine& line) {
  constexpr int most = 1024;
  if (line.has("hosts") && line.has("host-list"))
    throw UsageError("--hosts and --host-list exclude each other");
  if (line.has("hosts")) return read_hosts(line.text("hosts"));
  if (line.has("host-list")) return parse_hosts(line.text("host-list"));
  if (line.has("ranks")) return {host_with("localhost", static_cast<int>(line.integer("ranks", 1, most)))};
  if (const std::size_t gpus = device::cuda_status().gpus.size(); gpus > 0)
    return {host_with("localhost", static_cast<int>(gpus))};
  throw UsageError("no GPU is here whose number would say how many ranks to start: give --ranks N");
}

/// Throws for a `sherd train` that would not resume when --restarts starts it again.
void require_resumes(const std::vector<std::string>& command) {
  const auto given = [&](const char* word) {
    return std::find(command.begin(), command.end(), word) != command.end();
  };
  const std::string program = std::filesystem::path(command[0]).filename();
  if (program == "sherd" && given("train") && !given("--resume-or-start") && !given("--resume"))
    throw UsageError("--restarts begins again from the last checkpoint: give sherd train --resume-or-start");
}

}  // namespace

CommandLine launch_line() {
  CommandLine line(
      "launch",
      "Starts a program as one process for each rank, on this machine or on those of a file, tells "
      "each its rank as torchrun does, and passes on what they print.",
      "(--ranks N | --hosts FILE) [--restarts N] -- PROGRAM ARGUMENT…");
  line.value("ranks", "N",
             "processes on this machine (one for each GPU); with --hosts as many of their places, and the "
             "others stand by (all)")
      .value("hosts", "FILE", "machines that ssh reaches without a password: a line each, HOST slots=RANKS")
      .value("restarts", "N", "begin again so many times where a rank fails; the program goes on by itself",
             "0")
      .value("min-ranks", "N",
             "with --restarts: go on with no fewer where hosts do not answer or places fail again and again "
             "(as many as --ranks)")
      .value("backoff", "S", "seconds before the first restart; twice as many before each next one, up to 60",
             "2")
      .value("ssh", "WORDS", "the command that starts a program on another machine",
             "ssh -o BatchMode=yes -o ServerAliveInterval=5 -o ConnectTimeout=10")
      .value("address", "HOST", "where rank 0 listens (the first of the hosts)")
      .value("port", "P", "its port (29500; on one machine one that is free)")
      .value("grace", "S", "seconds that ranks have to end by themselves once one has failed", "30")
      .value("host-list", "LIST", "HOST=RANKS,… in place of a file")
      .value("node", "K", "start the ranks of the K-th host alone, counted from 0, on this machine")
      .value("run", "ID", "tells runs apart that meet at one port", "run")
      .value("restarted", "N", "with --node: restarts that were, of which ranks are told", "0")
      .flag("follow-input", "end the ranks with standard input, from where a launcher passes on signals")
      .program_follows();
  return line;
}

void launch_command(const CommandLine& line) {
  Launch launch;
  launch.command = line.program();
  if (launch.command.empty())
    throw UsageError(
        "launch needs a program behind --, as in sherd launch --ranks 4 -- sherd train --config F");
  launch.hosts = hosts_of(line);
  launch.ssh = line.text("ssh"), launch.grace_seconds = line.number("grace");
  const int places = ranks_on(launch.hosts);
  launch.ranks = line.has("ranks") ? static_cast<int>(line.integer("ranks", 1, places)) : places;
  launch.min_ranks =
      line.has("min-ranks") ? static_cast<int>(line.integer("min-ranks", 1, launch.ranks)) : launch.ranks;
  launch.backoff_seconds = line.number("backoff");
  launch.restarts = static_cast<int>(line.integer("restarts", 0, 1'000'000));
  if (line.has("restarted") && !line.has("node"))
    throw UsageError("--restarted is for --node, which starts once");
  launch.restarted = static_cast<int>(line.integer("restarted", 0, 1'000'000));
  const bool alone = launch.hosts.size() == 1 && is_here(launch.hosts[0].name);
  launch.address = line.text("address");
  const std::string& first = launch.address.empty() ? launch.hosts[0].name : launch.address;
  if (!alone && launch.address.empty() && (first == "localhost" || first == "127.0.0.1"))
    throw UsageError(
        "the first host is 'localhost', which the others cannot reach: name it as they know it, or give "
        "--address");
  launch.port = line.has("port") ? static_cast<int>(line.integer("port", 1, 65535)) : 0;
  launch.run = line.has("run") || line.has("node") ? line.text("run") : new_run_id();
  if (line.has("min-ranks") && launch.restarts == 0)
    throw UsageError("--min-ranks is for runs that begin again: give --restarts, too");
  if (launch.restarts > 0 && line.has("node"))
    throw UsageError("--restarts needs all hosts, and --node starts one: leave it to whoever starts all");
  if (launch.restarts > 0) require_resumes(launch.command);
  int code = 0;
  if (line.has("node")) {
    if (launch.address.empty()) launch.address = alone ? "127.0.0.1" : first.substr(first.find('@') + 1);
    if (launch.port == 0) launch.port = usual_port;
    const auto node = static_cast<std::size_t>(line.integer("node", 0, std::ssize(launch.hosts) - 1));
    code = run_node(launch, node, line.has("follow-input"));
  } else {
    code = supervise(launch);
  }
  if (code != 0) throw Finding{code};
}

}  // namespace sherd::cli
