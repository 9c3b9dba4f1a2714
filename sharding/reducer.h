#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "sharding/segment.h"

namespace sherd::sharding {

/// Counts for tests and reports.
struct ReducerStats {
  std::int64_t buckets = 0;         ///< reduce-scatters issued
  std::int64_t largest_bucket = 0;  ///< elements of the largest one, over all ranks' parts
  std::int64_t overlapped = 0;      ///< of them, issued on the communicator's own thread
};

/// Sends finished gradients off in buckets while backward goes on: reduce-scatters each segment onto its shard layout, and
/// gathers the sum again where every rank updates everything. Sums are elementwise in rank order, so no bucket size changes a
/// bit. Used from the rank's thread; all ranks submit the same segments in the same order.
class Reducer {
 public:
  /// `bucket_elements` bounds one reduce-scatter; 0 sends each segment by itself. With `overlap` they run on the
  /// communicator's thread, at most two at a time.
  Reducer(comm::Communicator& group, DType rounding, std::int64_t bucket_elements, bool overlap)
      : group_(group), rounding_(rounding), bucket_elements_(bucket_elements), overlap_(overlap) {}

  /// `landed` is told of each segment whose submitted gradients have arrived, from submit() or finish(): at the same points
  /// of the program on all ranks.
  void listen(std::function<void(Segment&)> landed) { landed_ = std::move(landed); }

  /// Sums `full` (this rank's gradients of the padded segment) over ranks into the segment's lasting
  /// gradients, adding to them when `accumulate`. Keeps `full` until it was read; null means the lasting
  /// gradients themselves.
  void submit(Segment& segment, std::shared_ptr<const Tensor> full, bool accumulate);
  /// Sends what is left and waits for everything.
  void finish();
  /// Forgets what was submitted and not sent, after a pass that an exception ended on all ranks alike; waits for what is
  /// under way.
  void abandon();

  ReducerStats& stats() { return stats_; }

 private:
  struct Item {
    Segment* segment;
    std::shared_ptr<const Tensor> full;
    bool accumulate;
    std::int64_t sent = 0;  ///< elements of the shard already in a bucket
  };
  struct Flight {
    comm::Work work;
    std::vector<std::shared_ptr<const Tensor>> held;
    std::vector<Segment*> complete;  ///< whose last part this is
  };

  void send_bucket();
  void land(std::size_t most_under_way, bool tell = true);
  std::int64_t bucket_limit() const;

  comm::Communicator& group_;
  DType rounding_;
  std::int64_t bucket_elements_;
  bool overlap_;
  std::deque<Item> queue_;
  std::int64_t queued_ = 0;  ///< elements in queue_ not yet sent
  std::deque<Flight> flights_;
  std::function<void(Segment&)> landed_;
  ReducerStats stats_;
};

}  // namespace sherd::sharding
