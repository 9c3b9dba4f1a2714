#include "sharding/units/publisher.h"

#include <utility>

namespace sherd::sharding {

void Publisher::publish(Segment& segment) {
  if (!segment.gather_after_update()) return;
  pieces_.push_back({segment.own_parameters(), segment.parameters().tensor()});
  elements_ += segment.layout().padded();
  if (elements_ >= bucket_elements_) flush();
}

void Publisher::flush() {
  if (pieces_.empty()) return;
  under_way_.push_back(
      group_->all_gather(std::exchange(pieces_, {}), {.label = "updated parameters", .async = overlap_}));
  elements_ = 0;
}

void Publisher::finish() {
  flush();
  for (comm::Work& work : under_way_) work.wait();
  under_way_.clear();
}

void Publisher::abandon() {
  pieces_.clear();
  elements_ = 0;
  under_way_.clear();
}

}  // namespace sherd::sharding
