#pragma once

#include "base/error.h"
#include "config/config.h"

namespace sherd::engine {

/// A configuration with these keys of its section "device".
inline config::Config device_config(const std::string& device,
                                    const std::string& precision = R"("bf16": {"enabled": true},)") {
  return config::parse_text(cat("{", precision, R"("device": {)", device, "}}"));
}

}  // namespace sherd::engine
