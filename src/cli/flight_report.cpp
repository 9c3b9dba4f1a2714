#include "cli/flight_report.h"

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>

#include "base/error.h"
#include "base/files.h"
#include "base/text/check_json.h"
#include "base/text/excerpt.h"
#include "engine/report/report.h"

namespace sherd::cli {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;
using Ranks = std::vector<int>;

/// "rank 1", "ranks 0-3, 5".
std::string named(const Ranks& ranks) {
  std::string out;
  for (std::size_t i = 0, end = 0; i < ranks.size(); i = end) {
    for (end = i + 1; end < ranks.size() && ranks[end] == ranks[end - 1] + 1;) ++end;
    out += cat(out.empty() ? "" : ", ", ranks[i]);
    if (end - i > 1) out += cat(end - i == 2 ? ", " : "-", ranks[end - 1]);
  }
  return cat(ranks.size() == 1 ? "rank " : "ranks ", out);
}

struct FlightCall {
  std::uint64_t sequence = 0, bytes = 0;
  std::string kind, label, state;
  int peer = -1;
  double seconds = 0;  ///< that it has been under way
  Ranks missing;
  std::size_t missing_count = 0;

  bool ended() const { return state == "done"; }
  bool is_transfer() const { return kind == "send" || kind == "receive"; }
  std::string shown() const {
    std::string text = cat(sequence, ' ', kind);
    if (kind != "agreement" && kind != "barrier") text += cat(" of ", engine::human_bytes(bytes));
    if (peer >= 0) text += cat(kind == "send" ? " to rank " : " from rank ", peer);
    return label.empty() ? text : cat(text, " \"", label, '"');
  }
};

/// One rank's account of a group.
struct RankInGroup {
  std::uint64_t issued = 0, finished = 0;
  std::map<std::uint64_t, FlightCall> collectives;  ///< by sequence
  std::vector<FlightCall> transfers;
};

struct FlightGroup {
  std::string id, name, purpose;
  Ranks ranks;
  std::map<int, RankInGroup> said;  ///< by rank of the world
};

struct FlightFiles {
  int world_size = 0;
  std::map<int, std::pair<std::string, double>> files;  ///< by rank: its path, and when it was written
  std::map<int, std::string> reasons;
  std::map<std::string, Ranks> left_out;  ///< ranks of files that are not looked at, by why
  std::map<std::pair<std::string, Ranks>, FlightGroup> groups;
};

FlightCall read_call(const Json& json, std::int64_t now_us) {
  FlightCall call;
  call.sequence = json.at("sequence"), call.bytes = json.at("bytes");
  call.kind = json.at("kind"), call.label = json.at("label"), call.state = json.at("state");
  call.peer = json.value("peer", -1);
  const std::int64_t begun = json.value("begun_us", std::int64_t{0});
  const std::int64_t until = json.value("ended_us", now_us);
  if (begun > 0) call.seconds = static_cast<double>(until - begun) * 1e-6;
  call.missing = json.value("missing", Ranks());
  std::sort(call.missing.begin(), call.missing.end());
  call.missing_count = json.value("missing_count", std::size_t{0});
  return call;
}

/// "wall_us", when a file was written, or "began_us", when its program began.
double seconds_of(const Json& json, const char* moment) {
  return json.at(moment).get<double>() * 1e-6;
}

void add_flight(FlightFiles& flights, const std::string& path, const Json& json) {
  if (json.at("format") != "sherd flight recorder" || json.at("version") != 1)
    fail(ErrorKind::data, "it is no flight recorder of this version");
  const int rank = json.at("rank");
  flights.world_size = json.at("world_size");
  const double written = seconds_of(json, "wall_us");
  if (!flights.files.emplace(rank, std::pair(path, written)).second)
    fail(ErrorKind::data, "it is of rank ", rank, ", as is ", flights.files[rank].first);
  flights.reasons[rank] = json.at("reason");
  std::vector<RankInGroup*> said;
  for (const Json& one : json.at("groups")) {
    const Ranks ranks = one.at("ranks");
    FlightGroup& group = flights.groups[{one.at("id").get<std::string>(), ranks}];
    group.id = one.at("id"), group.name = one.at("name"), group.purpose = one.at("purpose");
    group.ranks = ranks;
    RankInGroup& mine = group.said[rank];
    mine.issued = one.at("issued"), mine.finished = one.at("finished");
    said.push_back(&mine);
  }
  for (const Json& one : json.at("calls")) {
    FlightCall call = read_call(one, json.at("steady_us"));
    RankInGroup& mine = *said.at(one.at("group").get<std::size_t>());
    if (call.is_transfer())
      mine.transfers.push_back(std::move(call));
    else
      mine.collectives.emplace(call.sequence, std::move(call));
  }
}

/// The newest start of the program, and the newest file of it.
struct Newest {
  double began = 0, written = 0;  ///< in seconds
  int world_size = 0;
};

/// Why a file is not of what the newest one tells of; empty: it is.
std::string of_another_time(const Json& json, const Newest& newest) {
  constexpr double answered_within = 2;  // all ranks that still answer a signal
  if (json.at("world_size") != newest.world_size)
    return cat("of a start with ", json.at("world_size").get<int>(), " ranks");
  if (seconds_of(json, "wall_us") < newest.began)
    return "of an earlier start: nothing has come from there since the newest one";
  const double before = newest.written - seconds_of(json, "wall_us");
  if (json.at("reason") != "SIGUSR2" || before <= answered_within) return "";
  return cat("of an earlier signal, ", engine::human_seconds(before),
             " before the newest file: nothing newer has come from there");
}

FlightFiles read_flights(const std::vector<std::string>& paths) {
  std::vector<std::string> files;
  for (const std::string& path : paths) {
    std::error_code absent;
    if (!fs::exists(path, absent)) fail(ErrorKind::io, "there is no '", excerpt(path, 300), "'");
    if (!fs::is_directory(path, absent)) {
      files.push_back(path);
      continue;
    }
    for (const auto& entry : fs::directory_iterator(path))
      if (const std::string name = entry.path().filename();
          name.starts_with("flight_recorder_rank_") && name.ends_with(".json"))
        files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  if (files.empty())
    fail(ErrorKind::io, "there is no flight_recorder_rank_*.json in ", excerpt(paths[0], 300));
  FlightFiles flights;
  std::vector<std::pair<std::string, Json>> all;
  const auto reading = [](const std::string& file, const auto& read) {
    try {
      read();
    } catch (const std::exception& error) {
      fail(ErrorKind::data, "'", excerpt(file, 300), "' cannot be read as a flight recorder: ", error.what());
    }
  };
  Newest newest;
  for (const std::string& file : files)
    reading(file, [&] {
      const std::string text = read_file(file);
      check_json(text);
      all.emplace_back(file, Json::parse(text));
      const Json& json = all.back().second;
      newest.began = std::max(newest.began, seconds_of(json, "began_us"));
      if (const double written = seconds_of(json, "wall_us"); written > newest.written)
        newest.written = written, newest.world_size = json.at("world_size").get<int>();
    });
  for (const auto& [file, json] : all)
    reading(file, [&, &file = file, &json = json] {
      if (const std::string why = of_another_time(json, newest); !why.empty())
        flights.left_out[why].push_back(json.at("rank"));
      else
        add_flight(flights, file, json);
    });
  return flights;
}

/// The call that a rank is in, of those behind which it has finished; null where it is in none.
const FlightCall* call_under_way(const RankInGroup& rank) {
  for (const auto& [sequence, call] : rank.collectives)
    if (!call.ended() && sequence > rank.finished) return &call;
  return nullptr;
}

/// Ranks that say the same share a line.
using Lines = std::map<std::string, Ranks>;

std::string where_ranks_are(const FlightGroup& group) {
  std::uint64_t front = 0;
  for (const auto& [rank, said] : group.said) front = std::max(front, said.issued);
  Lines lines;
  Ranks silent;
  double longest = 0;
  for (const int rank : group.ranks) {
    const auto known = group.said.find(rank);
    if (known == group.said.end()) {
      silent.push_back(rank);
      continue;
    }
    const RankInGroup& said = known->second;
    const FlightCall* call = call_under_way(said);
    if (call == nullptr && said.issued < front) {
      lines[cat("behind: has finished ", said.finished, " and not yet called ", said.issued + 1)].push_back(
          rank);
    } else if (call != nullptr) {
      longest = std::max(longest, call->seconds);
      std::string text = cat(call->state == "under way" ? "in" : call->state, ' ', call->shown());
      if (call->missing_count > 0)
        text += cat(", waits for ", named(call->missing),
                    call->missing_count > call->missing.size()
                        ? cat(" and ", call->missing_count - call->missing.size(), " more")
                        : "");
      lines[text].push_back(rank);
    }
  }
  if (lines.empty()) return "";
  std::string out;
  for (const auto& [text, ranks] : lines) out += cat("  ", named(ranks), ": ", text, '\n');
  if (!silent.empty()) out += cat("  ", named(silent), ": no file\n");
  if (longest > 0) out += cat("  the longest wait is ", engine::human_seconds(longest), '\n');
  return out;
}

/// The first call that ranks have made differently.
std::string first_mismatch(const FlightGroup& group) {
  std::set<std::uint64_t> sequences;
  for (const auto& [rank, said] : group.said)
    for (const auto& [sequence, call] : said.collectives) sequences.insert(sequence);
  for (const std::uint64_t sequence : sequences) {
    std::map<std::tuple<std::string, std::uint64_t, std::string>, std::pair<std::string, Ranks>> kinds;
    for (const auto& [rank, said] : group.said) {
      const auto found = said.collectives.find(sequence);
      if (found == said.collectives.end()) continue;
      const FlightCall& call = found->second;
      // Ranks may give each other different numbers of elements.
      auto& kind = kinds[{call.kind, call.kind == "all_to_all" ? 0 : call.bytes, call.label}];
      kind.first = call.shown();
      kind.second.push_back(rank);
    }
    if (kinds.size() < 2) continue;
    std::string out = "  mismatch: ";
    for (const auto& [key, kind] : kinds)
      out += cat(out.size() > 12 ? "; " : "", named(kind.second), " called ", kind.first);
    return out + '\n';
  }
  return "";
}

/// Sends and receives under way, and what the other end says.
std::string open_transfers(const FlightGroup& group) {
  std::string out;
  for (const auto& [rank, said] : group.said)
    for (const FlightCall& call : said.transfers) {
      if (call.ended() || call.state == "issued") continue;
      out += cat("  rank ", rank, ": ", call.state == "failed" ? "failed " : "", call.shown(), ", ",
                 engine::human_seconds(call.seconds), ": ");
      const auto peer = group.said.find(call.peer);
      if (peer == group.said.end()) {
        out += cat("rank ", call.peer, " has no file\n");
        continue;
      }
      const std::string other = call.kind == "send" ? "receive" : "send";
      const auto end = std::find_if(
          peer->second.transfers.begin(), peer->second.transfers.end(),
          [&](auto& t) { return t.kind == other && t.peer == rank && t.sequence == call.sequence; });
      if (end == peer->second.transfers.end())
        out += cat("rank ", call.peer, " has not called ", other, '\n');
      else if (end->bytes != call.bytes)
        out += cat("mismatch: rank ", call.peer, " called ", end->shown(), '\n');
      else
        out += cat("rank ", call.peer, " has called it (", end->state, ")\n");
    }
  return out;
}

std::string group_report(const FlightGroup& group) {
  std::uint64_t all = UINT64_MAX;
  for (const auto& [rank, said] : group.said) all = std::min(all, said.finished);
  std::string finished = cat(all);
  for (const auto& [rank, said] : group.said)
    if (const auto call = said.collectives.find(all); call != said.collectives.end())
      finished = call->second.shown();
  const std::string trouble = where_ranks_are(group) + first_mismatch(group) + open_transfers(group);
  return cat(group.id, group.purpose.empty() ? "" : cat(" (", group.purpose, ")"), ", ", group.name, '\n',
             all == 0 ? "  no call has ended on all" : cat("  the last call that all finished: ", finished),
             group.said.size() < group.ranks.size() ? " (of those with files)" : "",
             trouble.empty() ? "; none is under way\n" : cat('\n', trouble));
}

}  // namespace

std::string flight_report(const std::vector<std::string>& paths) {
  const FlightFiles flights = read_flights(paths);
  Ranks here, silent;
  for (int rank = 0; rank < flights.world_size; ++rank)
    (flights.files.contains(rank) ? here : silent).push_back(rank);
  std::string out = cat("flight recorders of ", named(here), " of ", flights.world_size, '\n');
  if (!silent.empty()) out += cat("no file of ", named(silent), ": dead, or not asked\n");
  for (const auto& [why, ranks] : flights.left_out)
    out += cat("left out: ", ranks.size() == 1 ? "the file of " : "the files of ", named(ranks), ", ", why,
               '\n');
  double first = 1e300, last = 0;
  for (const auto& [rank, file] : flights.files)
    first = std::min(first, file.second), last = std::max(last, file.second);
  if (last - first > 60)
    out += cat("they were written up to ", engine::human_seconds(last - first),
               " apart: some may be of an earlier time\n");
  Lines reasons;
  for (const auto& [rank, reason] : flights.reasons) reasons[reason].push_back(rank);
  for (const auto& [reason, ranks] : reasons) out += cat(named(ranks), ": ", excerpt(reason, 500), '\n');
  for (const auto& [key, group] : flights.groups) out += '\n' + group_report(group);
  return out;
}

}  // namespace sherd::cli
