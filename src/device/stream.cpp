#include "device/stream.h"

#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <mutex>
#include <thread>

#include "base/error.h"

namespace sherd::device {
namespace {

/// Tells streams apart for as long as anybody knows of them, so that no later one is taken for an earlier
/// one.
struct StreamTag {};
using StreamId = std::shared_ptr<const StreamTag>;
/// How many events of each stream are known to lie in the past of a moment (a vector clock: Fidge 1988,
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

struct Event::Point {
  StreamId stream;
  std::uint64_t number;  ///< its number among the stream's events, from 1
  Clock past;            ///< the clock of this moment, itself included
  std::shared_ptr<const StreamEvent> event;
};

bool Event::reached() const {
  return !point_ || point_->event->reached();
}

void Event::wait(const Deadline& deadline, std::string_view what) const {
  using namespace std::chrono_literals;
  if (!point_) return;
  // Most waits are for work about to end: the processor turns for a while before it sleeps. Sleeps then end
  // when they should: the system's slack of 50 us for a thread's timers would be an idle device's at each
  // step.
  [[maybe_unused]] thread_local const int slack = ::prctl(PR_SET_TIMERSLACK, 1000UL, 0, 0, 0);
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
  StreamId id = std::make_shared<const StreamTag>();
  std::mutex mutex;
  std::uint64_t events = 0;  // guarded by mutex
  Clock past;                // guarded by mutex: of what is queued next
};

Stream::Stream(std::unique_ptr<StreamQueue> queue) : state_(std::make_shared<State>()) {
  require(queue != nullptr, "a stream needs a queue");
  state_->queue = std::move(queue);
}

Event Stream::record() {
  require(state_ != nullptr, "an empty stream has no events");
  std::lock_guard lock(state_->mutex);
  auto point = std::make_shared<Event::Point>();
  point->event = state_->queue->record();
  point->stream = state_->id;
  point->number = ++state_->events;
  state_->past[state_->id] = point->number;
  point->past = state_->past;
  return Event(std::move(point));
}

void Stream::wait(const Event& event) {
  require(state_ != nullptr, "an empty stream waits for nothing");
  if (!event || event.point_->stream == state_->id) return;
  std::lock_guard lock(state_->mutex);
  const auto known = state_->past.find(event.point_->stream);
  if (known != state_->past.end() && known->second >= event.point_->number) return;
  state_->queue->follow(*event.point_->event);
  merge(state_->past, event.point_->past);
}

void* Stream::native() const {
  return state_ ? state_->queue->native() : nullptr;
}

StreamQueue& Stream::queue() const {
  require(state_ != nullptr, "an empty stream has no queue");
  return *state_->queue;
}

}  // namespace sherd::device
