#include "comm/nccl/nccl_comm.h"

#include <nccl.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <vector>

#include "base/log.h"
#include "base/threads.h"
#include "comm/messages/port.h"
#include "comm/nccl/nccl_functions.h"

namespace sherd::comm {
namespace {

using namespace std::chrono_literals;

std::string words_for(ncclResult_t status, ncclComm_t comm) {
  const char* last = ncclGetLastError(comm);
  return cat(ncclGetErrorString(status), last && *last ? cat(" (", last, ")") : "",
             "; NCCL_DEBUG=INFO in the environment makes NCCL say more");
}

bool under_way(ncclResult_t status) {
  return status == ncclSuccess || status == ncclInProgress;
}

ncclConfig_t configuration() {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  return config;
}

/// Rank 0's, known to all.
ncclUniqueId agree_on_id(Backend& host) {
  constexpr std::size_t count = sizeof(ncclUniqueId) / sizeof(std::int64_t);
  ncclUniqueId id{};
  Call call;
  call.kind = Collective::agree, call.label = "NCCL's unique id", call.words.resize(count + 1);
  if (host.rank() == 0) {
    const ncclResult_t status = ncclGetUniqueId(&id);
    call.words[count] = status;  // so that all ranks hear of it
    std::memcpy(call.words.data(), &id, sizeof id);
  }
  host.run(call);
  const auto status = static_cast<ncclResult_t>(call.words[count]);
  if (status != ncclSuccess)
    fail(ErrorKind::comm, host.name(), ": NCCL cannot make a unique id on rank ", host.world_rank(0), ": ",
         words_for(status, nullptr));
  std::memcpy(&id, call.words.data(), sizeof id);
  return id;
}

}  // namespace

NcclComm::NcclComm(Backend& host, std::shared_ptr<device::Accelerator> gpu)
    : host_(host), gpu_(std::move(gpu)) {}

std::unique_ptr<NcclComm> NcclComm::create(Backend& host, const std::shared_ptr<device::Accelerator>& gpu) {
  std::unique_ptr<NcclComm> made(new NcclComm(host, gpu));
  made->load();
  const ncclUniqueId id = agree_on_id(host);
  gpu->make_current();
  ncclConfig_t config = configuration();
  const ncclResult_t status = ncclCommInitRankConfig(&made->comm_, host.size(), id, host.rank(), &config);
  if (!under_way(status))
    made->abort(cat(host.own_name(), " cannot join NCCL's group: ", words_for(status, nullptr)));
  made->settle(cat("joining NCCL's group ", host.name()), setup_seconds(host.timeout_seconds()));
  made->start_watching();
  return made;
}

std::unique_ptr<NcclComm> NcclComm::join_pair(Backend& host, const std::shared_ptr<device::Accelerator>& gpu,
                                              const void* id, int rank) {
  std::unique_ptr<NcclComm> made(new NcclComm(host, gpu));
  gpu->make_current();
  ncclConfig_t config = configuration();
  ncclUniqueId words;
  std::memcpy(&words, id, sizeof words);
  const ncclResult_t status = ncclCommInitRankConfig(&made->comm_, 2, words, rank, &config);
  if (!under_way(status))
    made->abort(cat(host.own_name(), " cannot join another rank over NCCL: ", words_for(status, nullptr)));
  made->start_watching();
  return made;
}

std::unique_ptr<NcclComm> NcclComm::split(int color, int key, Backend* part) {
  gpu_->make_current();
  ncclConfig_t config = configuration();
  ncclComm_t made = nullptr;
  const std::string what = cat("splitting NCCL's group ", host_.name());
  {
    std::lock_guard lock(nccl_);
    if (!comm_) fail(ErrorKind::comm, host_.failure());
    const ncclResult_t status =
        ncclCommSplit(comm_, color < 0 ? NCCL_SPLIT_NOCOLOR : color, key, &made, &config);
    if (!under_way(status)) abort(cat(host_.name(), ": ", what, ": ", words_for(status, comm_)));
  }
  settle(what, setup_seconds(host_.timeout_seconds()));
  if (color < 0 || !part) return nullptr;
  std::unique_ptr<NcclComm> out(new NcclComm(*part, gpu_));
  out->comm_ = made;
  out->settle(what, setup_seconds(host_.timeout_seconds()));
  out->start_watching();
  return out;
}

/// Loads NCCL, and tells the other ranks where it cannot be.
void NcclComm::load() {
  try {
    int version = 0;
    ncclGetVersion(&version);
  } catch (const Error& error) {
    abort(cat(host_.own_name(), ": ", error.what()));
  }
}

void NcclComm::start_watching() {
  // synchronize() returns after an abort too: there the caller must hear of it.
  check_ = gpu_->after_synchronize([this] { host_.throw_if_failed(); });
  thread_ = std::thread(own_thread([this, rank = ThreadRank::current()] {
    ThreadRank scope(rank);
    run_watcher();
  }));
}

NcclComm::~NcclComm() {
  {
    // Calls that the GPU is still in the middle of are other ranks' too; the thread ends them at their
    // deadlines.
    std::unique_lock lock(mutex_);
    idle_.wait(lock, [&] { return watched_.empty(); });
    stopping_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
  std::lock_guard lock(nccl_);
  if (!comm_) return;
  // Leaving because of an error: peers are not waited for.
  if (!host_.failure().empty()) {
    ncclCommAbort(comm_);
    return;
  }
  ncclResult_t status = ncclCommFinalize(comm_);
  for (const Deadline patience = Deadline::after_seconds(10);
       status == ncclInProgress && !patience.passed();) {
    std::this_thread::sleep_for(1ms);
    if (ncclCommGetAsyncError(comm_, &status) != ncclSuccess) break;
  }
  status == ncclSuccess ? ncclCommDestroy(comm_) : ncclCommAbort(comm_);
}

/// Waits until NCCL has set up what it was asked for.
void NcclComm::settle(const std::string& what, double seconds, std::uint64_t number) {
  const Deadline deadline = Deadline::after_seconds(seconds);
  while (!settled(what, deadline, seconds, number))
    if (turns_ > 100) std::this_thread::sleep_for(turns_ > 2000 ? 1ms : 20us);
}

bool NcclComm::settled(const std::string& what, const Deadline& deadline, double seconds,
                       std::uint64_t number) {
  ncclResult_t status = ncclInProgress;
  {
    std::lock_guard lock(nccl_);
    if (!comm_) fail(ErrorKind::comm, host_.failure());
    const ncclResult_t asked = ncclCommGetAsyncError(comm_, &status);
    if (asked != ncclSuccess) status = asked;
    if (status == ncclSuccess) {
      turns_ = 0;
      return true;
    }
    if (!under_way(status)) abort(cat(host_.own_name(), ": ", what, ": ", words_for(status, comm_)));
  }
  if (const std::string reason = host_.failure(); !reason.empty()) abort(reason);
  if (++turns_ % 64 == 0) host_.look_after_peers();
  if (deadline.passed())
    if (const std::string late = overdue(what, deadline, seconds, number); !late.empty()) abort(late);
  return false;
}

bool NcclComm::settled(const Call& call, const Deadline& deadline) {
  return settled(describe(call), deadline, host_.timeout_seconds(), 0);
}

void NcclComm::abort(const std::string& reason) {
  break_off(reason);
  throw Error(ErrorKind::comm, host_.failure());
}

void NcclComm::break_off(const std::string& reason) noexcept {
  host_.fail(reason);
  std::lock_guard lock(nccl_);
  if (comm_) ncclCommAbort(comm_);
  comm_ = nullptr;
}

/// The error message for a call, or a set-up, that has taken too long; empty where somebody else may still
/// know more.
std::string NcclComm::overdue(const std::string& what, const Deadline& deadline, double seconds,
                              std::uint64_t number) {
  const std::string begin = cat(host_.name(), ": ", what, ": ");
  const int own = host_.world_rank(host_.rank());
  if (number == 0)
    return cat(begin, "rank ", own, " waited ", seconds,
               " s for it: see whether all ranks came to it, or raise parallel.timeout_seconds");
  if (std::vector<int> absent = host_.not_announced(number); !absent.empty()) {
    for (int& rank : absent) rank = host_.world_rank(rank);
    return cat(begin, name_ranks(absent), " did not come within ", seconds, " s, while rank ", own,
               " waited; raise parallel.timeout_seconds if the work in between takes that long");
  }
  if (Deadline::Clock::now() < deadline.at() + 1s) return "";  // a rank may know only of its neighbour
  return cat(begin, "did not end within ", seconds, " s on rank ", own,
             ", though all ranks that it knows of have come to it: a rank's GPU, or a link between two, "
             "takes longer or hangs (NCCL_DEBUG=INFO says more); raise parallel.timeout_seconds if the work "
             "before it "
             "takes that long");
}

bool NcclComm::begin(const Call& call, const std::function<void(ncclComm*)>& queue) {
  std::lock_guard lock(nccl_);
  if (!comm_) fail(ErrorKind::comm, host_.failure());
  ncclGroupStart();
  queue(comm_);  // ncclGroupEnd() says what is wrong with a part of it
  const ncclResult_t status = ncclGroupEnd();
  if (!under_way(status)) abort(cat(host_.own_name(), ": ", describe(call), ": ", words_for(status, comm_)));
  return status == ncclSuccess;
}

void NcclComm::submit(const Call& call, std::uint64_t number, const std::function<void(ncclComm*)>& queue) {
  if (!begin(call, queue)) settle(describe(call), host_.timeout_seconds(), number);
}

void NcclComm::watch(Call& call, std::uint64_t number) {
  {
    std::lock_guard lock(mutex_);
    if (!watches_) return;
    call.watched = true;
    watched_.push_back({call.ready, call.done, describe(call), number, call.record, std::nullopt});
  }
  wake_.notify_all();
}

void NcclComm::run_watcher() {
  watch_calls();
  std::lock_guard lock(mutex_);
  watched_.clear();
  watches_ = false;
  idle_.notify_all();
}

void NcclComm::watch_calls() {
  try {
    gpu_->make_current();
    std::unique_lock lock(mutex_);
    while (!stopping_) {
      while (!watched_.empty() && watched_.front().done.reached()) {
        watched_.front().record.end(true);
        watched_.pop_front();
      }
      if (watched_.empty()) {
        idle_.notify_all();
        wake_.wait(lock, [&] { return stopping_ || !watched_.empty(); });
        continue;
      }
      Watched front = watched_.front();
      lock.unlock();
      host_.look_after_peers();
      const std::string reason = trouble(front);
      if (!reason.empty()) return break_off(reason);
      lock.lock();
      watched_.front() = front;
      wake_.wait_for(lock, 20ms, [&] { return stopping_; });
    }
  } catch (const std::exception& error) {
    break_off(cat(host_.own_name(), " failed: ", error.what()));
  }
}

/// The trouble of the oldest call under way, or empty.
std::string NcclComm::trouble(Watched& front) {
  if (std::string text = host_.failure(); !text.empty()) return text;
  {
    std::lock_guard lock(nccl_);
    ncclResult_t status = ncclSuccess;
    if (comm_ && ncclCommGetAsyncError(comm_, &status) == ncclSuccess && !under_way(status))
      return cat(host_.own_name(), ": ", front.what, ": ", words_for(status, comm_));
  }
  if (front.number > 0 && front.record) {
    std::vector<int> absent = host_.not_announced(front.number);
    for (int& rank : absent) rank = host_.world_rank(rank);
    front.record.wait_for(absent);
  }
  if (!front.deadline && front.ready.reached())
    front.deadline = Deadline::after_seconds(host_.timeout_seconds());
  if (front.deadline && front.deadline->passed() && !front.done.reached())
    return overdue(front.what, *front.deadline, host_.timeout_seconds(), front.number);
  return "";
}

}  // namespace sherd::comm
