#pragma once

#include <string>

#include "comm/communicator.h"

namespace sherd::engine {

/// The folder of flight recorders' files: the environment's SHERD_FLIGHT_RECORDER, else `save_dir`
/// (training.save_dir). Empty: neither is set.
std::string flight_folder(const std::string& save_dir);

/// The name of a rank's file: "flight_recorder_rank_3.json".
std::string flight_file_name(int rank);

/// The last calls of a rank as JSON (docs/watching.md, "Flight recorder"). `reason`: why they are told.
std::string to_json(const comm::FlightRecord& record, const std::string& reason);

/// Writes a rank's file into `folder`, whole or not at all, in place of an earlier one. What fails is a
/// warning. Returns whether it is there.
bool write_flight(const comm::FlightRecorder& recorder, const std::string& folder,
                  const std::string& reason) noexcept;

/// From here on this rank's file is written where the rank or one of its groups fails, once; where
/// flight_folder() is empty it is not.
void write_flight_on_failure(comm::Communicator& world, const std::string& save_dir);

}  // namespace sherd::engine
