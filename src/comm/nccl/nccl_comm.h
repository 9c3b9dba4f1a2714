#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "comm/exchange/backend.h"
#include "device/accelerator.h"

struct ncclComm;  // NCCL's, whose header is for sources only

namespace sherd::comm {

/// One group's communicator of NCCL, and a thread that watches over what was queued on it: when a call fails,
/// misses its deadline or the group has failed otherwise, it aborts the communicator, so that the GPU's
/// streams go on, and fails the group with the reason. Non-blocking: whatever NCCL has to set up first is
/// waited for with the deadline too.
class NcclComm {
 public:
  /// Collective. `host` must outlive it. Throws Error{comm}.
  static std::unique_ptr<NcclComm> create(Backend& host, const std::shared_ptr<device::Accelerator>& gpu);
  /// This rank's end of a pair's communicator, which comes to be while settled() is asked. `id`: an
  /// ncclUniqueId; `rank`: of the two.
  static std::unique_ptr<NcclComm> join_pair(Backend& host, const std::shared_ptr<device::Accelerator>& gpu,
                                             const void* id, int rank);
  /// Collective over this group; null for a negative color. `part` is the new group's backend.
  std::unique_ptr<NcclComm> split(int color, int key, Backend* part);
  ~NcclComm();

  /// Queues the calls of `queue` as one group of NCCL's. Throws Error{comm} naming `call`, whose number among
  /// those that were announced to the other ranks is `number`.
  void submit(const Call& call, std::uint64_t number, const std::function<void(ncclComm*)>& queue);
  /// Queues as submit() does, without waiting for what NCCL has to set up first: the work is on the stream
  /// once settled(). Returns whether it is by now.
  bool begin(const Call& call, const std::function<void(ncclComm*)>& queue);
  /// Whether NCCL has done all that it was asked for. Throws Error{comm} naming `call`, at `deadline` too. To
  /// be asked again and again: waits for nothing.
  bool settled(const Call& call, const Deadline& deadline);
  /// The call's work is all queued: watch over it until call.done, and record its end.
  void watch(Call& call, std::uint64_t number);

 private:
  struct Watched {
    device::Event ready, done;
    std::string what;
    std::uint64_t number;
    FlightRecorder::Ticket record;
    std::optional<Deadline> deadline;  ///< runs once the call could begin
  };
  NcclComm(Backend& host, std::shared_ptr<device::Accelerator> gpu);
  void load();
  void start_watching();
  void settle(const std::string& what, double seconds, std::uint64_t number = 0);
  bool settled(const std::string& what, const Deadline& deadline, double seconds, std::uint64_t number);
  std::string overdue(const std::string& what, const Deadline& deadline, double seconds,
                      std::uint64_t number);
  [[noreturn]] void abort(const std::string& reason);
  void break_off(const std::string& reason) noexcept;
  void run_watcher();
  void watch_calls();
  std::string trouble(Watched& front);

  Backend& host_;
  std::shared_ptr<device::Accelerator> gpu_;
  std::shared_ptr<void> check_;  ///< registration with the device
  std::recursive_mutex nccl_;    ///< one thread at a time talks to NCCL about comm_
  ncclComm* comm_ = nullptr;     // guarded by nccl_; null once aborted
  int turns_ = 0;                // times that settled() was asked in vain
  std::mutex mutex_;
  std::condition_variable wake_, idle_;
  std::deque<Watched> watched_;  // guarded by mutex_
  bool stopping_ = false;        // guarded by mutex_
  bool watches_ = true;          // guarded by mutex_: until the thread ends
  std::thread thread_;
};

}  // namespace sherd::comm
