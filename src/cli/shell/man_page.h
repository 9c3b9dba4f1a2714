#pragma once

#include <map>
#include <string>

namespace sherd::cli {

/// Manual pages as roff, by the names of their files: "sherd.1", "sherd-bench-adam.1".
std::map<std::string, std::string> man_pages();

}  // namespace sherd::cli
