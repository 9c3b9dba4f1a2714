#include "engine/step/flights.h"

#include <algorithm>
#include <utility>

#include "sharding/sharded_model.h"

namespace sherd::engine {

std::unique_ptr<sharding::Pass> Flights::take_pass() {
  if (idle_.empty()) return std::make_unique<sharding::Pass>(model_);
  std::unique_ptr<sharding::Pass> pass = std::move(idle_.front());
  idle_.pop_front();
  return pass;
}

Flight& Flights::begin(std::int64_t micro_batch, int chunk, const sharding::Chunk& parts, bool last) {
  recover();
  Flight flight{micro_batch, chunk, take_pass(), {}, {}};
  prepare_(flight.pass->tape());
  under_way_.push_back(std::move(flight));
  under_way_.back().pass->begin(parts, last);
  return under_way_.back();
}

Flight& Flights::at(std::int64_t micro_batch, int chunk) {
  for (Flight& flight : under_way_)
    if (flight.micro_batch == micro_batch && flight.chunk == chunk) return flight;
  fail(ErrorKind::usage, "micro-batch ", micro_batch, " is not under way in chunk ", chunk,
       ": its forward comes before all else");
}

void Flights::end(const Flight& flight) {
  const auto at = std::find_if(under_way_.begin(), under_way_.end(),
                               [&](const Flight& each) { return &each == &flight; });
  at->pass->end();
  at->pass->tape().clear();
  idle_.push_front(std::move(at->pass));
  under_way_.erase(at);
}

void Flights::drop() {
  dropped_ = true;
  for (Flight& flight : under_way_) {
    flight.pass->tape().clear();
    idle_.push_back(std::move(flight.pass));
  }
  under_way_.clear();
}

void Flights::recover() {
  if (std::exchange(dropped_, false)) model_.abandon_passes();
}

void RunAhead::begin(int chunks) {
  for (; under_way_.size() >= 2 * most * static_cast<std::size_t>(chunks); under_way_.pop_front())
    under_way_.front().wait(device_.deadline(), "an earlier micro-batch");
}

void RunAhead::end() {
  if (device::Event queued = device_.record()) under_way_.push_back(std::move(queued));
}

}  // namespace sherd::engine
