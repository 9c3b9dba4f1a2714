#include "engine/step/run_ahead.h"

namespace sherd::engine {

void RunAhead::begin(int chunks) {
  for (; under_way_.size() >= 2 * most * static_cast<std::size_t>(chunks); under_way_.pop_front())
    under_way_.front().wait(device_.deadline(), "an earlier micro-batch");
}

void RunAhead::end() {
  if (device::Event queued = device_.record()) under_way_.push_back(std::move(queued));
}

}  // namespace sherd::engine
