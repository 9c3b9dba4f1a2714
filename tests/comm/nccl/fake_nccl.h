#pragma once

namespace sherd::comm::fake_nccl {

/// Since the last look: communicators, and sums that the library made, by rank.
struct Counts {
  int made = 0, destroyed = 0, aborted = 0;
  int sums = 0;
};
Counts take_counts();

/// From now on that rank of every communicator has an asynchronous error; -1: none has.
void break_rank(int rank);
/// From now on nobody's set-up, or nobody's next call, comes to an end.
void hang(bool on);
/// From now on the calling thread finds no library to load.
void remove(bool on);

}  // namespace sherd::comm::fake_nccl
