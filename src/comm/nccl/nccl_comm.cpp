#include "comm/nccl/nccl_comm.h"

#include <nccl.h>

#include <chrono>
#include <cstring>
#include <vector>

#include "base/log.h"

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
    fail(ErrorKind::comm, host.name(), ": NCCL cannot make a unique id on rank 0: ", words_for(status, nullptr));
  std::memcpy(&id, call.words.data(), sizeof id);
  return id;
}

}  // namespace

NcclComm::NcclComm(Backend& host, std::shared_ptr<device::CudaDevice> gpu)
    : host_(host), gpu_(std::move(gpu)) {}

std::unique_ptr<NcclComm> NcclComm::create(Backend& host, const std::shared_ptr<device::CudaDevice>& gpu) {
  std::unique_ptr<NcclComm> made(new NcclComm(host, gpu));
  const ncclUniqueId id = agree_on_id(host);
  gpu->make_current();
  ncclConfig_t config = configuration();
  const ncclResult_t status =
      ncclCommInitRankConfig(&made->comm_, host.size(), id, host.rank(), &config);
  if (!under_way(status))
    made->give_up(cat(host.name(), ": rank ", host.rank(), " cannot join NCCL's group: ", words_for(status, nullptr)));
  made->settle(made->comm_, cat("joining NCCL's group ", host.name()));
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
    const ncclResult_t status = ncclCommSplit(comm_, color < 0 ? NCCL_SPLIT_NOCOLOR : color, key, &made, &config);
    if (!under_way(status)) give_up(cat(host_.name(), ": ", what, ": ", words_for(status, comm_)));
  }
  settle(comm_, what);
  if (color < 0 || !part) return nullptr;
  std::unique_ptr<NcclComm> out(new NcclComm(*part, gpu_));
  out->comm_ = made;
  out->settle(made, what);
  out->start_watching();
  return out;
}

void NcclComm::start_watching() {
  // synchronize() returns after an abort too: there the caller must hear of it.
  check_ = gpu_->after_synchronize([this] {
    if (const std::string text = host_.failure(); !text.empty()) throw Error(ErrorKind::comm, text);
  });
  thread_ = std::thread([this, rank = ThreadRank::current()] {
    ThreadRank scope(rank);
    watch_over();
  });
}

NcclComm::~NcclComm() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
  try {
    // The thread may have stopped before it saw that the last calls have ended.
    while (!watched_.empty() && watched_.front().done.reached()) watched_.pop_front();
  } catch (const Error&) {
  }
  std::lock_guard lock(nccl_);
  if (!comm_) return;
  // Leaving because of an error, or with calls that never ended: their peers are not waited for.
  if (!host_.failure().empty() || !watched_.empty()) {
    ncclCommAbort(comm_);
    return;
  }
  ncclResult_t status = ncclCommFinalize(comm_);
  for (const Deadline patience = Deadline::after_seconds(10); status == ncclInProgress && !patience.passed();) {
    std::this_thread::sleep_for(1ms);
    if (ncclCommGetAsyncError(comm_, &status) != ncclSuccess) break;
  }
  status == ncclSuccess ? ncclCommDestroy(comm_) : ncclCommAbort(comm_);
}

/// Waits until NCCL has set up what it was asked for.
void NcclComm::settle(ncclComm* comm, const std::string& what) {
  const Deadline deadline = Deadline::after_seconds(host_.timeout_seconds());
  for (int turn = 0;; ++turn) {
    ncclResult_t status = ncclInProgress;
    {
      std::lock_guard lock(nccl_);
      if (!comm_) fail(ErrorKind::comm, host_.failure());
      const ncclResult_t asked = ncclCommGetAsyncError(comm, &status);
      if (asked != ncclSuccess) status = asked;
      if (status == ncclSuccess) return;
    }
    if (!under_way(status)) give_up(cat(host_.name(), ": ", what, ": ", words_for(status, comm)));
    if (const std::string reason = host_.failure(); !reason.empty()) give_up(reason);
    if (deadline.passed())
      give_up(cat(host_.name(), ": rank ", host_.rank(), " waited ", host_.timeout_seconds(), " s for ", what,
                  ": see whether all ranks came to it, or raise parallel.timeout_seconds"));
    if (turn > 100) std::this_thread::sleep_for(turn > 2000 ? 1ms : 20us);
  }
}

void NcclComm::give_up(const std::string& reason) {
  break_off(reason);
  throw Error(ErrorKind::comm, host_.failure());
}

void NcclComm::break_off(const std::string& reason) noexcept {
  host_.fail(reason);
  std::lock_guard lock(nccl_);
  if (comm_) ncclCommAbort(comm_);
  comm_ = nullptr;
}

void NcclComm::submit(const Call& call, const std::function<void(ncclComm*)>& queue) {
  {
    std::lock_guard lock(nccl_);
    if (!comm_) fail(ErrorKind::comm, host_.failure());
    ncclGroupStart();
    queue(comm_);  // what is wrong with a part of it, ncclGroupEnd() says
    const ncclResult_t status = ncclGroupEnd();
    if (!under_way(status))
      give_up(cat(host_.name(), ": rank ", host_.rank(), ": ", describe(call), ": ", words_for(status, comm_)));
    if (status == ncclSuccess) return;
  }
  settle(comm_, describe(call));
}

void NcclComm::watch(const Call& call) {
  {
    std::lock_guard lock(mutex_);
    watched_.push_back({call.ready, call.done, describe(call), std::nullopt});
  }
  wake_.notify_all();
}

void NcclComm::watch_over() {
  try {
    gpu_->make_current();
    std::unique_lock lock(mutex_);
    while (!stopping_) {
      while (!watched_.empty() && watched_.front().done.reached()) watched_.pop_front();
      if (watched_.empty()) {
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
    break_off(cat(host_.name(), ": rank ", host_.rank(), " failed: ", error.what()));
  }
}

/// What has befallen the oldest call under way, or empty.
std::string NcclComm::trouble(Watched& front) {
  if (std::string text = host_.failure(); !text.empty()) return text;
  {
    std::lock_guard lock(nccl_);
    ncclResult_t status = ncclSuccess;
    if (comm_ && ncclCommGetAsyncError(comm_, &status) == ncclSuccess && !under_way(status))
      return cat(host_.name(), ": rank ", host_.rank(), ": ", front.what, ": ", words_for(status, comm_));
  }
  if (!front.deadline && front.ready.reached())
    front.deadline = Deadline::after_seconds(host_.timeout_seconds());
  if (front.deadline && front.deadline->passed() && !front.done.reached())
    return cat(host_.name(), ": rank ", host_.rank(), ": ", front.what, " did not end within ",
               host_.timeout_seconds(),
               " s: a rank is missing or made another call (the mpi and local communicators name which); raise "
               "parallel.timeout_seconds if the work in between takes that long");
  return "";
}

}  // namespace sherd::comm
