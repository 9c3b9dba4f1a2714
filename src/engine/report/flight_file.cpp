#include "engine/report/flight_file.h"

#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <mutex>
#include <nlohmann/json.hpp>

#include "base/files.h"
#include "base/log.h"
#include "base/text/excerpt.h"
#include "base/version.h"

namespace sherd::engine {
namespace {

template <class Clock>
std::int64_t microseconds_of() {
  return std::chrono::duration_cast<std::chrono::microseconds>(Clock::now().time_since_epoch()).count();
}

/// When this program began, by which files are told from those of an earlier start.
const std::int64_t began_us = microseconds_of<std::chrono::system_clock>();

std::string host_name() {
  char name[256] = {};
  ::gethostname(name, sizeof name - 1);
  return name;
}

nlohmann::ordered_json call_json(const comm::RecordedCall& call) {
  nlohmann::ordered_json out{{"number", call.number},
                             {"group", call.group},
                             {"sequence", call.sequence},
                             {"kind", comm::name_of(call.kind)},
                             {"label", call.label},
                             {"bytes", call.bytes},
                             {"state", comm::name_of(call.state)}};
  if (call.peer >= 0) out["peer"] = call.peer;
  out["issued_us"] = call.issued_us;
  if (call.begun_us > 0) out["begun_us"] = call.begun_us;
  if (call.ended_us > 0) out["ended_us"] = call.ended_us;
  if (call.missing_count == 0) return out;
  out["missing"] = call.missing;
  out["missing_count"] = call.missing_count;
  return out;
}

}  // namespace

std::string flight_folder(const std::string& save_dir) {
  const char* asked = std::getenv("SHERD_FLIGHT_RECORDER");
  return asked && *asked ? asked : save_dir;
}

std::string flight_file_name(int rank) {
  return cat("flight_recorder_rank_", rank, ".json");
}

std::string to_json(const comm::FlightRecord& record, const std::string& reason) {
  nlohmann::ordered_json out{{"format", "sherd flight recorder"},
                             {"version", 1},
                             {"sherd", version()},
                             {"rank", record.rank},
                             {"world_size", record.world_size},
                             {"host", host_name()},
                             {"process", ::getpid()},
                             {"reason", reason},
                             {"began_us", began_us},
                             {"wall_us", microseconds_of<std::chrono::system_clock>()},
                             {"steady_us", microseconds_of<std::chrono::steady_clock>()}};
  auto& groups = out["groups"] = nlohmann::ordered_json::array();
  for (const comm::RecordedGroup& group : record.groups)
    groups.push_back({{"id", group.id},
                      {"name", group.name},
                      {"purpose", group.purpose},
                      {"ranks", group.ranks},
                      {"issued", group.issued},
                      {"finished", group.finished}});
  auto& calls = out["calls"] = nlohmann::ordered_json::array();
  for (const comm::RecordedCall& call : record.calls) calls.push_back(call_json(call));
  // A label may be cut in the middle of a character.
  return out.dump(1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + '\n';
}

bool write_flight(const comm::FlightRecorder& recorder, const std::string& folder,
                  const std::string& reason) noexcept {
  static std::mutex one_at_a_time;  // a signal and a failure may ask for the same file
  try {
    const std::lock_guard lock(one_at_a_time);
    const comm::FlightRecord record = recorder.record();
    write_file_atomically(std::filesystem::path(folder) / flight_file_name(record.rank),
                          to_json(record, reason));
    if (record.rank == 0)
      log_info("flight recorder: the last calls of each rank are in ",
               (std::filesystem::path(folder) / "flight_recorder_rank_*.json").string(),
               "; `sherd info --flight-recorder ", folder, "` compares them");
    return true;
  } catch (const std::exception& error) {
    log_warning("the flight recorder was not written: ", error.what());
  }
  return false;
}

void write_flight_on_failure(comm::Communicator& world, const std::string& save_dir) {
  const std::string folder = flight_folder(save_dir);
  if (folder.empty()) return;
  comm::FlightRecorder* recorder = world.flight_recorder().get();  // which calls this
  recorder->on_failure(
      [recorder, folder](const std::string& reason) { write_flight(*recorder, folder, reason); });
}

}  // namespace sherd::engine
