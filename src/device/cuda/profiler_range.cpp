#include "device/trace_range.h"

#include <algorithm>
#include <array>

// In the CUDA toolkit, though installations cut down to what builds need may lack it.
#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>

namespace sherd::device {

void push_profiler_range(std::string_view what, std::string_view of) {
  std::array<char, 128> text;
  char* const end = text.data() + text.size() - 1;
  const auto put = [end](char* at, std::string_view part) {
    return std::copy_n(part.data(), std::min(part.size(), static_cast<std::size_t>(end - at)), at);
  };
  char* at = put(text.data(), what);
  if (!of.empty()) at = put(put(at, " "), of);
  *at = '\0';
  nvtxRangePushA(text.data());
}

void pop_profiler_range() {
  nvtxRangePop();
}

}  // namespace sherd::device

#else
namespace sherd::device {

void push_profiler_range(std::string_view, std::string_view) {}
void pop_profiler_range() {}

}  // namespace sherd::device
#endif
