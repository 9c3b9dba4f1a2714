#include "cli/launch/supervisor.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <set>
#include <sstream>
#include <thread>

#include "base/error.h"
#include "base/text/excerpt.h"
#include "cli/launch/children.h"
#include "cli/program.h"
#include "comm/tcp/socket.h"

namespace sherd::cli {
namespace {

using Clock = std::chrono::steady_clock;

/// A place for a rank: the name of a host, and the number of a slot there.
using Place = std::pair<std::string, int>;

/// A rank that failed.
struct RankFailure {
  int rank = 0;
  int code = 0;
  bool ended_by_us = false;  ///< it was still there when the grace was over
  bool by_signal = false;    ///< as of a ChildFailure

  /// Whether it failed by itself, as far as its code tells: Sherd has one for ranks that miss another.
  bool is_own() const { return !ended_by_us && code != lost_others; }
};

/// How a try ended.
struct TryEnd {
  int code = 0;
  std::string failed;  ///< what failed first, and how it ended
  int asked = 0;       ///< the signal that this process was asked to end with
  std::vector<RankFailure> failures;
  std::vector<std::string> lost;  ///< hosts that ended without a word on any rank
};

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

/// Runs a line of the shell on a host.
std::vector<std::string> words_of_ssh(const Launch& launch, const LaunchHost& host, const std::string& line) {
  std::vector<std::string> out;
  std::istringstream in(launch.ssh);
  for (std::string word; in >> word;) out.push_back(word);
  out.insert(out.end(), {host.name, line});
  return out;
}

/// The GPUs that ranks of a host see, whose places do not begin at 0 or leave some out: each finds the one of
/// its place by its LOCAL_RANK.
std::string visible_gpus(const std::vector<int>& slots) {
  const char* seen = std::getenv("CUDA_VISIBLE_DEVICES");
  std::vector<std::string> names;
  std::istringstream in(seen ? seen : "");
  for (std::string name; std::getline(in, name, ',');) names.push_back(name);
  std::string out;
  for (const int slot : slots) {
    const auto place = static_cast<std::size_t>(slot);
    if (seen && place >= names.size()) continue;  // what is hidden stays so
    out += cat(out.empty() ? "" : ",", seen ? names[place] : cat(slot));
  }
  return out;
}

/// Tells which processes are ranks `first` and on; of hosts where there are several.
void say_processes(const Launch& launch, const LaunchHost& host, int first,
                   const std::vector<int>& processes) {
  const bool one = processes.size() == 1;
  std::string line = one ? cat("rank ", first) : cat("ranks ", first, "-", first + std::ssize(processes) - 1);
  if (launch.hosts.size() > 1) line += " on " + host.name;
  line += one ? " has pid" : " have pids";
  for (const int process : processes) line += cat(' ', process);
  std::fprintf(stderr, "sherd launch: %s\n", line.c_str());
}

/// The ranks of a host, on this machine.
ChildrenEnd start_ranks(const Launch& launch, std::size_t node, bool follow_input) {
  const std::vector<LaunchHost>& hosts = launch.hosts;
  const int first = ranks_on({hosts.begin(), hosts.begin() + static_cast<std::ptrdiff_t>(node)});
  const LaunchHost& host = hosts[node];
  std::vector<ChildProgram> programs;
  for (int i = 0; i < host.ranks(); ++i) {
    const int rank = first + i;
    programs.push_back({cat("rank ", rank, hosts.size() > 1 ? cat(" on ", host.name) : ""),
                        launch.command,
                        {{"RANK", std::to_string(rank)},
                         {"WORLD_SIZE", std::to_string(ranks_on(hosts))},
                         {"LOCAL_RANK", std::to_string(i)},
                         {"LOCAL_WORLD_SIZE", std::to_string(host.ranks())},
                         {"MASTER_ADDR", launch.address},
                         {"MASTER_PORT", std::to_string(launch.port)},
                         // By which launchers that torchrun started are told from those around it.
                         {"TORCHELASTIC_RUN_ID", launch.run},
                         {"TORCHELASTIC_RESTART_COUNT", std::to_string(launch.restarted)}},
                        ranks_on(hosts) > 1 ? cat("[", rank, "] ") : ""});
    if (!host.is_whole())
      programs.back().environment.emplace_back("CUDA_VISIBLE_DEVICES", visible_gpus(host.slots));
  }
  return run_children(programs, {.grace_seconds = launch.grace_seconds,
                                 .follow_input = follow_input,
                                 .started = [&](const std::vector<int>& processes) {
                                   say_processes(launch, host, first, processes);
                                 }});
}

/// Begins the lines by which run_node() tells of a rank.
constexpr std::string_view report_word = "failed ";

std::vector<RankFailure> failures_here(const ChildrenEnd& end, int first_rank) {
  std::vector<RankFailure> out;
  for (const ChildFailure& failure : end.failures)
    out.push_back({first_rank + static_cast<int>(failure.program), failure.code, failure.ended_by_us,
                   failure.by_signal});
  return out;
}

TryEnd try_end_of(const ChildrenEnd& end) {
  TryEnd out;
  out.code = end.code, out.asked = end.asked;
  if (!end.failures.empty())
    out.failed = cat(end.failed, ' ', ending_of(end.code, end.failures.front().by_signal));
  return out;
}

/// Starts a launcher of its ranks for each host, over ssh where it is another machine.
TryEnd run_hosts(const Launch& launch) {
  const std::string program = std::filesystem::read_symlink("/proc/self/exe");
  std::vector<ChildProgram> programs;
  for (std::size_t node = 0; node < launch.hosts.size(); ++node) {
    const LaunchHost& host = launch.hosts[node];
    std::vector<std::string> words{program,          "launch",
                                   "--host-list",    host_list(launch.hosts),
                                   "--node",         cat(node),
                                   "--address",      launch.address,
                                   "--port",         cat(launch.port),
                                   "--run",          launch.run,
                                   "--restarted",    cat(launch.restarted),
                                   "--grace",        cat(launch.grace_seconds),
                                   "--follow-input", "--"};
    words.insert(words.end(), launch.command.begin(), launch.command.end());
    if (!is_here(host.name)) {
      std::string line = cat("cd ", quoted(std::filesystem::current_path().string()), " && exec");
      for (const std::string& word : words) line += cat(' ', quoted(word));
      words = words_of_ssh(launch, host, line);
    }
    programs.push_back({host.name, std::move(words), {}, "", true});
  }
  const ChildrenEnd end = run_children(programs, {.grace_seconds = launch.grace_seconds});
  TryEnd out = try_end_of(end);
  std::set<std::size_t> told;
  for (const auto& [node, line] : end.reports) {
    RankFailure failure;
    std::istringstream in(line.substr(std::min(line.size(), report_word.size())));
    if (!line.starts_with(report_word) ||
        !(in >> failure.rank >> failure.code >> failure.ended_by_us >> failure.by_signal))
      continue;
    out.failures.push_back(failure);
    told.insert(node);
  }
  for (const ChildFailure& failure : end.failures)
    if (!told.contains(failure.program)) out.lost.push_back(launch.hosts[failure.program].name);
  return out;
}

TryEnd run_once(const Launch& launch) {
  TryEnd out;
  if (launch.hosts.size() > 1 || !is_here(launch.hosts[0].name)) {
    out = run_hosts(launch);
  } else {
    const ChildrenEnd end = start_ranks(launch, 0, false);
    out = try_end_of(end);
    out.failures = failures_here(end, 0);
  }
  // A rank's own failure tells more than that of a rank which others missed.
  const auto own = std::find_if(out.failures.begin(), out.failures.end(),
                                [](const RankFailure& failure) { return failure.is_own(); });
  const auto hung = std::find_if(out.failures.begin(), out.failures.end(),
                                 [](const RankFailure& failure) { return failure.ended_by_us; });
  if (own != out.failures.end())
    out.code = own->code, out.failed = cat("rank ", own->rank, ' ', ending_of(own->code, own->by_signal));
  else if (hung != out.failures.end() && out.lost.empty())
    out.failed = cat("rank ", hung->rank, ", which others missed and which had to be ended, ",
                     ending_of(hung->code, hung->by_signal));
  return out;
}

/// The places that take part, and why others do not.
class Places {
 public:
  explicit Places(const Launch& launch) : launch_(launch) {}

  /// The places for the next try: the first that are neither left out nor on a host that does not answer.
  /// Fewer than launch.min_ranks where there are no more.
  std::vector<LaunchHost> choose() const {
    std::vector<LaunchHost> out;
    for (const LaunchHost& host : launch_.hosts) {
      LaunchHost taken{host.name, {}};
      for (const int slot : host.slots)
        if (!silent_.contains(host.name) && !left_out_.contains({host.name, slot}))
          taken.slots.push_back(slot);
      if (taken.ranks() > 0) out.push_back(std::move(taken));
    }
    int wanted = std::min(launch_.ranks, ranks_on(out));
    while (refused_.contains(wanted) && wanted > launch_.min_ranks) --wanted;
    while (ranks_on(out) > wanted) {
      out.back().slots.pop_back();
      if (out.back().slots.empty()) out.pop_back();
    }
    return out;
  }
  /// The program does not take so many ranks: later tries have fewer. False where that is too few.
  bool refuse(int ranks) {
    refused_.insert(ranks);
    return ranks > launch_.min_ranks;
  }

  /// Counts failures of a try with `hosts` against the places whose they are, and leaves those out that have
  /// failed too often where others are left.
  void count(const TryEnd& end, const std::vector<LaunchHost>& hosts) {
    for (const RankFailure& failure : culprits(end, ranks_on(hosts))) {
      int rank = failure.rank;
      for (const LaunchHost& host : hosts) {
        if (rank < host.ranks()) {
          note({host.name, host.slots[static_cast<std::size_t>(rank)]},
               cat("rank ", failure.rank, " on ", host.name));
          break;
        }
        rank -= host.ranks();
      }
    }
    for (const std::string& name : end.lost)
      for (const LaunchHost& host : hosts)
        if (host.name == name)
          for (const int slot : host.slots) note({name, slot}, cat("slot ", slot, " of ", name));
  }
  /// Asks the hosts of other machines whether they answer. Returns the signal with which this process was
  /// asked to end meanwhile; 0: none.
  int ask_hosts() {
    std::vector<ChildProgram> programs;
    for (const LaunchHost& host : launch_.hosts) {
      if (is_here(host.name)) continue;
      programs.push_back({host.name, words_of_ssh(launch_, host, "true"), {}, "", false});
    }
    std::set<std::string> silent;
    if (!programs.empty()) {
      constexpr double patience = 15;  // for all
      const ChildrenEnd end =
          run_children(programs, {.grace_seconds = patience, .quiet = true, .most_seconds = patience});
      if (end.asked != 0) return end.asked;
      for (const ChildFailure& failure : end.failures) silent.insert(programs[failure.program].name);
    }
    for (const std::string& name : silent)
      if (!silent_.contains(name))
        std::fprintf(stderr, "sherd launch: %s does not answer, and is left out until it does\n",
                     name.c_str());
    for (const std::string& name : silent_)
      if (!silent.contains(name)) std::fprintf(stderr, "sherd launch: %s answers again\n", name.c_str());
    silent_ = std::move(silent);
    return 0;
  }

 private:
  /// Ranks that failed by themselves; where all only miss others, those that had to be ended: they hung.
  /// Where all failed alike it is nobody's fault.
  static std::vector<RankFailure> culprits(const TryEnd& end, int ranks) {
    std::vector<RankFailure> own, hung;
    for (const RankFailure& failure : end.failures) {
      if (failure.is_own()) own.push_back(failure);
      if (failure.ended_by_us) hung.push_back(failure);
    }
    std::vector<RankFailure> out = own.empty() && end.lost.empty() ? hung : own;
    if (std::ssize(out) == ranks && ranks > 1) out.clear();
    return out;
  }
  void note(const Place& place, const std::string& name) {
    constexpr int most_failures = 3;
    if (++failures_[place] < most_failures || left_out_.contains(place)) return;
    int others = 0;
    for (const LaunchHost& host : launch_.hosts)
      for (const int slot : host.slots) others += !left_out_.contains({host.name, slot});
    if (others - 1 < launch_.min_ranks) return;
    left_out_.insert(place);
    std::fprintf(stderr, "sherd launch: %s has failed %d times: slot %d of %s is left out from here on\n",
                 name.c_str(), most_failures, place.second, place.first.c_str());
  }

  const Launch& launch_;
  std::set<int> refused_;  ///< numbers of ranks
  std::map<Place, int> failures_;
  std::set<Place> left_out_;
  std::set<std::string> silent_;  ///< hosts that did not answer when they were asked last
};

/// A wrong command line or configuration, a run that does not fit, and a program that cannot be started would
/// come again.
bool would_come_again(int code) {
  constexpr int not_executable = 126, not_found = 127;
  return code == wrong_use || code == does_not_fit || code == not_executable || code == not_found;
}

/// Whether the configuration is wrong for so many ranks, as where a batch cannot be shared out so: all of
/// them say it, but for some that may have missed one which has ended so already.
bool all_refuse(const TryEnd& end, int ranks) {
  const auto refuses = [](const RankFailure& f) { return !f.ended_by_us && f.code == wrong_use; };
  const auto misses = [](const RankFailure& f) { return !f.ended_by_us && f.code == lost_others; };
  return std::ssize(end.failures) == ranks && std::ranges::any_of(end.failures, refuses) &&
         std::ranges::all_of(end.failures, [&](const RankFailure& f) { return refuses(f) || misses(f); });
}

/// A try's own launch: the hosts that take part, where rank 0 listens and under which name they meet.
Launch try_of(const Launch& launch, std::vector<LaunchHost> hosts, int tries, int restarted) {
  Launch out = launch;
  out.restarted = restarted;
  out.hosts = std::move(hosts);
  out.run = cat(launch.run, ".", tries);
  const bool alone = out.hosts.size() == 1 && is_here(out.hosts[0].name);
  // An address that was given is the first host's.
  if (out.address.empty() || out.hosts[0].name != launch.hosts[0].name)
    out.address = alone ? "127.0.0.1" : out.hosts[0].name;
  out.address.erase(0, out.address.find('@') + 1);  // user@host
  if (launch.port == 0) out.port = alone ? free_port() : usual_port;
  return out;
}

void say_who_is_there(const Launch& launch, const Launch& now) {
  const int ranks = ranks_on(now.hosts);
  std::string names;
  for (const LaunchHost& host : now.hosts) names += cat(names.empty() ? "" : ", ", host.name);
  if (ranks < launch.ranks || launch.hosts.size() > 1)
    std::fprintf(stderr, "sherd launch: it goes on with %s on %s\n", counted(ranks, "rank").c_str(),
                 names.c_str());
}

/// Explains the errors that ranks have printed, which look like a failure.
void say_what_is_refused(int ranks, int next) {
  std::fprintf(stderr,
               "sherd launch: the program does not take %s: that is what the errors above say, and no "
               "failure; it is tried with %d next\n",
               counted(ranks, "rank").c_str(), next);
}

void say_it_would_come_again(const Launch& launch, const TryEnd& end) {
  if (launch.restarts > 0)
    std::fprintf(stderr, "sherd launch: %s, and would end so again: it is not started again\n",
                 end.failed.c_str());
}

}  // namespace

int run_node(const Launch& launch, std::size_t node, bool follow_input) {
  const ChildrenEnd end = start_ranks(launch, node, follow_input);
  const int first =
      ranks_on({launch.hosts.begin(), launch.hosts.begin() + static_cast<std::ptrdiff_t>(node)});
  if (follow_input)
    for (const RankFailure& failure : failures_here(end, first))
      std::printf("%c%s%d %d %d %d\n", report_mark, report_word.data(), failure.rank, failure.code,
                  failure.ended_by_us, failure.by_signal);
  return end.code;
}

int supervise(const Launch& launch) {
  constexpr std::chrono::minutes a_good_while{10};
  Places places(launch);
  int code = 0;
  for (int tries = 0, used = 0, quick = 0;; ++tries) {
    const std::vector<LaunchHost> hosts = places.choose();
    const int ranks = ranks_on(hosts);
    const auto begin = Clock::now();
    std::string failed =
        cat("only ", counted(ranks, "place"), " left, and --min-ranks is ", launch.min_ranks);
    if (ranks >= launch.min_ranks) {
      const Launch now = try_of(launch, hosts, tries, used);
      if (used > 0) say_who_is_there(launch, now);
      const TryEnd end = run_once(now);
      if (end.asked != 0 || end.code == 0) return end.code;
      if (ranks < launch.ranks && all_refuse(end, ranks) && places.refuse(ranks)) {
        say_what_is_refused(ranks, ranks_on(places.choose()));
        continue;
      }
      // Options that are wrong for fewer ranks may be right once the others are there again.
      if (would_come_again(end.code) && !(end.code == wrong_use && ranks < launch.ranks)) {
        say_it_would_come_again(launch, end);
        return end.code;
      }
      places.count(end, hosts);
      code = end.code, failed = end.failed;
    }
    if (used == launch.restarts) {
      if (launch.restarts > 0)
        std::fprintf(stderr, "sherd launch: %s, and %s been used\n", failed.c_str(),
                     launch.restarts == 1 ? "the restart has" : "all restarts have");
      return code;
    }
    quick = Clock::now() - begin > a_good_while ? 1 : quick + 1;
    const double seconds = std::min(60.0, launch.backoff_seconds * (1 << std::min(quick - 1, 16)));
    std::fprintf(stderr, "sherd launch: %s: restart %d of %d in %g s\n", failed.c_str(), ++used,
                 launch.restarts, seconds);
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    if (const int signal = places.ask_hosts(); signal != 0) return stopped_by(signal);
  }
}

}  // namespace sherd::cli
