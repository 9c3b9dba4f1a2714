#pragma once

#include <vector>

#include "sharding/segment.h"

namespace sherd::sharding {

/// Gathers updated shards into the full parameters where these are replicated, in buckets, for the segments
/// of one shard group. Used from the rank's thread; all ranks publish the same segments in the same order.
class Publisher {
 public:
  /// `bucket_elements`: of one all-gather at most, but for a larger segment. With `overlap` they run on the
  /// communicator's thread.
  Publisher(comm::Communicator& group, std::int64_t bucket_elements, bool overlap)
      : group_(&group), bucket_elements_(bucket_elements), overlap_(overlap) {}

  /// The segment's update range has new parameters.
  void publish(Segment& segment);
  /// Returns when everything published is there.
  void finish();
  /// Forgets what was not sent, after a step that an exception ended.
  void abandon();

  const comm::Communicator& group() const { return *group_; }

 private:
  void flush();

  comm::Communicator* group_;
  std::int64_t bucket_elements_;
  bool overlap_;
  std::vector<comm::GatherPiece> pieces_;
  std::int64_t elements_ = 0;
  std::vector<comm::Work> under_way_;
};

}  // namespace sherd::sharding
