#include "device/trace_range.h"

namespace sherd::device {

TraceRange::TraceRange(std::string_view, std::string_view) {}
TraceRange::~TraceRange() = default;

}  // namespace sherd::device
