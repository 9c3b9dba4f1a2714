#pragma once

#include <string_view>

namespace sherd::device {

/// Begins an NVTX range of the calling thread, called "what of" and cut off after some hundred characters.
void push_profiler_range(std::string_view what, std::string_view of);
/// Ends the innermost one.
void pop_profiler_range();

}  // namespace sherd::device
