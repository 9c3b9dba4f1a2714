#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace sherd::sharding {

/// A reducer's place in what it exchanges.
struct TurnShape {
  /// Replicas form a chain, and this one is number `replica` of it. Without a chain: 1 and 0.
  int replicas = 1, replica = 0;
  bool chained = false;
  bool overlap = false;  ///< calls go on beside the thread that begins them
};

/// One thing that a reducer does with one of its buckets.
struct Turn {
  enum class Op : std::uint8_t {
    issue,      ///< waits for the sums of the replica before; the fold over the shard group begins
    pass_on,    ///< waits for that fold; the sums go to the replica behind
    pass_back,  ///< waits for the last replica's sums, which go to the replica before
    settle      ///< waits for all that has gone out; the bucket is done
  };
  Op op;
  std::size_t bucket;  ///< counts all that were launched, from 0
  bool operator==(const Turn&) const = default;
};

/// Decides when a reducer deals with a bucket: by how many others were launched behind it, and by nothing
/// that depends on timing. All ranks of a shard group, and all replicas, launch the same buckets at the same
/// points of their programs. Then no two of them wait for each other, whatever else the ranks of one replica
/// exchange meanwhile, and in however many reducers:
/// - replica r takes up a bucket r launches later, and passes it on one launch behind that (with `overlap`;
///   else at once), which is when the next one takes it up: it waits for a call that the replica before
///   makes at the same point, or has made;
/// - the result comes back through replica r + 1 one launch before replica r waits for it.
/// So what (point, replica) waits for is before it in the order of points, in which the ranks of one replica
/// run without the others, and then of replicas. Replica r keeps what it has to fold of r + 2 buckets, and
/// the sums of 2 · replicas − r.
class Turns {
 public:
  explicit Turns(const TurnShape& shape);
  /// Counts one more launched bucket; returns the turns that come before anything else.
  std::vector<Turn> launch();
  /// All that is left to do.
  std::vector<Turn> drain();

 private:
  std::vector<Turn> until(std::size_t issued, std::size_t passed, std::size_t settled);

  std::size_t issue_lag_, pass_lag_, settle_lag_;  ///< so many buckets are launched behind it
  std::size_t launched_ = 0, issued_ = 0, passed_ = 0, settled_ = 0;
};

}  // namespace sherd::sharding
