#pragma once

#include <algorithm>
#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "offload/io_backend.h"

namespace sherd::testing {

/// The fate of one request.
struct Fate {
  int error = 0;            ///< ends at once with this errno, and moves nothing
  std::int64_t moves = -1;  ///< moves only that many bytes (0: none), and says so; -1: all
  bool lies = false;        ///< …but says that it moved all
  int flips = -1;           ///< this byte of what a read brought is changed
  bool held = false;        ///< does not reach the device before Faults::release()
};

/// Decides what becomes of requests; shared with the test, which may outlive the store.
class Faults {
 public:
  /// Called for every request, in order, on the store's thread, with how many came before.
  using Rule = std::function<Fate(const offload::IoRequest&, int before)>;
  explicit Faults(Rule rule) : rule_(std::move(rule)) {}

  Fate next(const offload::IoRequest& request) {
    std::lock_guard lock(mutex_);
    return rule_ ? rule_(request, count_++) : Fate{};
  }
  void set_rule(Rule rule) {
    std::lock_guard lock(mutex_);
    rule_ = std::move(rule);
    count_ = 0;
  }
  /// The device answers again: held requests are done now, none is held any more.
  void release() {
    std::lock_guard lock(mutex_);
    open_ = true;
    if (wake_) wake_();
  }
  bool open() {
    std::lock_guard lock(mutex_);
    return open_;
  }
  void on_wake(std::function<void()> wake) {
    std::lock_guard lock(mutex_);
    wake_ = std::move(wake);
  }

 private:
  std::mutex mutex_;
  Rule rule_;
  std::function<void()> wake_;
  int count_ = 0;
  bool open_ = false;
};

/// A backend over a device that fails as `faults` say.
class FaultyBackend final : public offload::IoBackend {
 public:
  FaultyBackend(std::unique_ptr<IoBackend> device, std::shared_ptr<Faults> faults)
      : device_(std::move(device)), faults_(std::move(faults)) {
    faults_->on_wake([this] { device_->wake(); });
  }
  ~FaultyBackend() override { faults_->on_wake(nullptr); }

  std::string name() const override { return device_->name(); }
  void attach(int descriptor) override { device_->attach(descriptor); }
  int register_memory(std::span<std::byte> memory, std::string* why) override {
    return device_->register_memory(memory, why);
  }
  void unregister_memory(int handle) noexcept override { device_->unregister_memory(handle); }
  void wake() noexcept override { device_->wake(); }

  void submit(std::span<const offload::IoRequest> requests) override {
    for (const offload::IoRequest& request : requests) {
      const Fate fate = faults_->next(request);
      if (fate.held && !faults_->open())
        held_.push_back({request, fate});
      else
        pass_on(request, fate);
    }
  }

  std::size_t reap(std::span<offload::IoCompletion> completions, std::chrono::nanoseconds patience) override {
    if (faults_->open())
      for (; !held_.empty(); held_.pop_front()) pass_on(held_.front().request, held_.front().fate);
    std::size_t count = 0;
    for (; count < completions.size() && !made_up_.empty(); made_up_.pop_front())
      completions[count++] = made_up_.front();
    if (count > 0) return count;
    count = device_->reap(completions, patience);
    for (std::size_t i = 0; i < count; ++i) falsify(completions[i]);
    return count;
  }

 private:
  struct Passed {
    offload::IoRequest request;
    Fate fate;
  };

  void pass_on(offload::IoRequest request, const Fate& fate) {
    if (fate.error != 0) return made_up_.push_back({request.tag, -fate.error});
    if (fate.moves == 0)
      return made_up_.push_back({request.tag, fate.lies ? std::int64_t{request.bytes} : 0});
    passed_.push_back({request, fate});
    // Direct I/O moves whole pages; of an odd count the rest is only told.
    if (fate.moves > 0) request.bytes = static_cast<std::uint32_t>((fate.moves + 4095) / 4096 * 4096);
    device_->submit({&request, 1});
  }

  void falsify(offload::IoCompletion& completion) {
    const auto it = std::find_if(passed_.begin(), passed_.end(),
                                 [&](const Passed& p) { return p.request.tag == completion.tag; });
    const Passed passed = *it;
    passed_.erase(it);
    if (completion.result < 0) return;
    if (passed.fate.moves > 0)
      completion.result = passed.fate.lies ? std::int64_t{passed.request.bytes}
                                           : std::min(completion.result, passed.fate.moves);
    if (passed.fate.flips >= 0) passed.request.memory[passed.fate.flips] ^= std::byte{0x10};
  }

  std::unique_ptr<IoBackend> device_;
  std::shared_ptr<Faults> faults_;
  std::deque<Passed> held_;
  std::deque<offload::IoCompletion> made_up_;
  std::vector<Passed> passed_;  // with the device
};

}  // namespace sherd::testing
