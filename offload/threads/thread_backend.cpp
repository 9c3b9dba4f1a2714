#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/log.h"
#include "base/text/excerpt.h"
#include "base/threads.h"
#include "offload/io_backend.h"

namespace sherd::offload {
namespace {

std::int64_t transfer(int descriptor, const IoRequest& request) {
  const auto offset = static_cast<off_t>(request.offset);
  const ssize_t moved = request.write ? ::pwrite(descriptor, request.memory, request.bytes, offset)
                                      : ::pread(descriptor, request.memory, request.bytes, offset);
  return moved < 0 ? -errno : moved;
}

class ThreadBackend final : public IoBackend {
 public:
  ThreadBackend() = default;
  /// Through the other constructor, so that where a thread cannot be started, the destructor ends those that
  /// were.
  explicit ThreadBackend(int threads) : ThreadBackend() {
    for (int i = 0; i < threads; ++i) threads_.emplace_back(own_thread([this] { work(); }));
  }

  ~ThreadBackend() override {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    work_there_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  std::string name() const override { return "threads"; }
  void attach(int descriptor) override { descriptor_ = descriptor; }

  // Positional calls know no registered memory, and lack nothing without.
  int register_memory(std::span<std::byte>, std::string* why) override {
    why->clear();
    return -1;
  }
  void unregister_memory(int) noexcept override {}

  void submit(std::span<const IoRequest> requests) override {
    {
      std::lock_guard lock(mutex_);
      waiting_.insert(waiting_.end(), requests.begin(), requests.end());
    }
    if (requests.size() == 1)
      work_there_.notify_one();
    else
      work_there_.notify_all();
  }

  std::size_t reap(std::span<IoCompletion> completions, std::chrono::nanoseconds patience) override {
    std::unique_lock lock(mutex_);
    ended_there_.wait_until(lock, std::chrono::steady_clock::now() + patience,
                            [&] { return woken_ || !ended_.empty(); });
    woken_ = false;
    const std::size_t count = std::min(completions.size(), ended_.size());
    std::copy_n(ended_.begin(), count, completions.begin());
    ended_.erase(ended_.begin(), ended_.begin() + static_cast<std::ptrdiff_t>(count));
    return count;
  }

  void wake() noexcept override {
    {
      std::lock_guard lock(mutex_);
      woken_ = true;
    }
    ended_there_.notify_one();
  }

 private:
  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      work_there_.wait(lock, [&] { return stopping_ || !waiting_.empty(); });
      if (waiting_.empty()) return;
      const IoRequest request = waiting_.front();
      waiting_.pop_front();
      lock.unlock();
      const std::int64_t result = transfer(descriptor_, request);
      lock.lock();
      ended_.push_back({request.tag, result});
      ended_there_.notify_one();
    }
  }

  int descriptor_ = -1;
  std::mutex mutex_;
  std::condition_variable work_there_, ended_there_;
  std::deque<IoRequest> waiting_;   // guarded by mutex_
  std::deque<IoCompletion> ended_;  // guarded by mutex_
  bool woken_ = false, stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<IoBackend> make_thread_backend(const StoreOptions& options) {
  return std::make_unique<ThreadBackend>(options.thread_count);
}

}  // namespace sherd::offload
