#pragma once

#include <string>
#include <vector>

namespace sherd::cli {

/// Compares ranks' flight recorders (engine/report/flight_file.h): by group the last call that all finished,
/// who is behind or has no file, and calls that differ. `paths` are files, or folders that hold them. Throws
/// Error{io} or Error{data} naming a file that is none.
std::string flight_report(const std::vector<std::string>& paths);

}  // namespace sherd::cli
