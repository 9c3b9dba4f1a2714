#include "device/stream.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <mutex>
#include <thread>

#include "base/error.h"
#include "base/log.h"

namespace sherd::device {
namespace {

/// Tells streams apart for as long as anybody knows of them, so that no later one is taken for an earlier
/// one.
struct Identity {};
using StreamId = std::shared_ptr<const Identity>;
/// How many marks of each stream are known to lie in the past of a moment (a vector clock: Fidge 1988,
/// Mattern 1988).
using Clock = std::map<StreamId, std::uint64_t>;

void merge(Clock& into, const Clock& from) {
  for (const auto& [id, count] : from) {
    std::uint64_t& known = into[id];
    known = std::max(known, count);
  }
}

}  // namespace

void StreamQueue::launch(const KernelLaunch&) {
  fail(ErrorKind::usage, "this stream runs no kernels");
}

struct Mark::Point {
  StreamId stream;
  std::uint64_t number;  ///< of the stream's marks, from 1
  Clock past;            ///< of this moment, itself included
  std::shared_ptr<const StreamEvent> event;
};

bool Mark::reached() const {
  return !point_ || point_->event->reached();
}

void Mark::wait(const Deadline& deadline, std::string_view what) const {
  using namespace std::chrono_literals;
  // Most waits are for work about to end: the processor turns for a while before it sleeps.
  const auto turning = Deadline::Clock::now() + 100us;
  while (!reached()) {
    if (deadline.passed())
      fail(ErrorKind::comm, "the device did not finish ", what,
           " within the deadline (parallel.timeout_seconds): see whether it hangs (nvidia-smi), or allow "
           "more time");
    if (Deadline::Clock::now() < turning)
      std::this_thread::yield();
    else
      std::this_thread::sleep_for(20us);
  }
}

struct Stream::State {
  std::unique_ptr<StreamQueue> queue;
  StreamId id = std::make_shared<const Identity>();
  std::mutex mutex;
  std::uint64_t marks = 0;  // guarded by mutex
  Clock past;               // guarded by mutex: of what is queued next
};

Stream::Stream(std::unique_ptr<StreamQueue> queue) : state_(std::make_shared<State>()) {
  require(queue != nullptr, "a stream needs a queue");
  state_->queue = std::move(queue);
}

Mark Stream::mark() {
  require(state_ != nullptr, "an empty stream has no marks");
  std::lock_guard lock(state_->mutex);
  auto point = std::make_shared<Mark::Point>();
  point->event = state_->queue->record();
  point->stream = state_->id;
  point->number = ++state_->marks;
  state_->past[state_->id] = point->number;
  point->past = state_->past;
  return Mark(std::move(point));
}

void Stream::wait(const Mark& mark) {
  require(state_ != nullptr, "an empty stream waits for nothing");
  if (!mark || mark.point_->stream == state_->id) return;
  std::lock_guard lock(state_->mutex);
  const auto known = state_->past.find(mark.point_->stream);
  if (known != state_->past.end() && known->second >= mark.point_->number) return;
  state_->queue->follow(*mark.point_->event);
  merge(state_->past, mark.point_->past);
}

void* Stream::native() const {
  return state_ ? state_->queue->native() : nullptr;
}

StreamQueue& Stream::queue() const {
  require(state_ != nullptr, "an empty stream has no queue");
  return *state_->queue;
}

SideUse& SideUse::operator=(SideUse&& other) noexcept {
  std::swap(done_, other.done_);
  std::swap(memory_, other.memory_);
  return *this;
}

void SideUse::join(Stream& stream) {
  stream.wait(done_);
  done_ = {};
  memory_.clear();
}

SideUse::~SideUse() {
  if (memory_.empty()) return;
  try {
    done_.wait(Deadline::after_seconds(60), "work on memory that is to be freed");
  } catch (const std::exception& error) {
    log_warning("memory is never freed, for a stream may still use it: ", error.what());
    new std::vector<Storage>(std::move(memory_));
  }
}

}  // namespace sherd::device
