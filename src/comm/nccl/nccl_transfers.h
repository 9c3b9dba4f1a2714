#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <utility>

#include "comm/exchange/backend.h"
#include "comm/nccl/nccl_comm.h"

namespace sherd::comm {

/// Point to point over NCCL, as Backend's functions of these names.
///
/// Work that is queued on one communicator of NCCL runs in its order: a receive that waits for its sender
/// would hold up every later call there. So each ordered pair of ranks has a communicator and a stream of its
/// own, made with its first transfer. Before NCCL hears of a transfer its two ends greet each other through
/// the host's memory or messages: then both are there and their calls agree, so that no kernel waits for a
/// rank that does not come, and what differs is an error that names both. Nobody waits for a GPU: a transfer
/// is done once it is queued at both ends, and Call::done tells streams when its tensor may be used.
class NcclTransfers {
 public:
  /// `host` must outlive it.
  NcclTransfers(Backend& host, std::shared_ptr<device::Accelerator> gpu);

  void start(Call& transfer);
  bool advance(Call& transfer);
  void cancel(Call& transfer) noexcept;

 private:
  /// From or to one rank.
  struct PairStream {
    std::unique_ptr<NcclComm> comm;  ///< null before the first transfer's ends have greeted each other
    device::Stream stream;
    std::uint64_t started = 0, queued = 0;
  };
  PairStream& pair_of(const Call& transfer);
  void greet(Call& transfer);
  void compare(const Call& transfer) const;
  void join(Call& transfer, PairStream& pair);
  void queue(Call& transfer, PairStream& pair);

  Backend& host_;
  std::shared_ptr<device::Accelerator> gpu_;
  std::map<std::pair<int, Collective>, PairStream> pairs_;  ///< by peer and direction
};

}  // namespace sherd::comm
