#pragma once

#include <string_view>

#include "config/config.h"

namespace sherd::config {

/// As `parallel.schedule` has it: "1f1b".
std::string_view name_of(Schedule schedule);

}  // namespace sherd::config
