#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "device/stream.h"

namespace sherd::testing {

/// An event of a FakeQueue: reached when the test says so.
struct FakeEvent final : device::StreamEvent {
  explicit FakeEvent(std::string label) : name(std::move(label)) {}
  bool reached() const override { return done; }
  std::string name;
  bool done = false;
};

/// A FakeQueue's waits and events; outlives it.
struct FakeLog {
  std::vector<std::shared_ptr<FakeEvent>> events;
  std::vector<std::string> followed;
};

/// A queue that does nothing but write down what it is told.
class FakeQueue final : public device::StreamQueue {
 public:
  FakeQueue(std::string name, std::shared_ptr<FakeLog> log) : name_(std::move(name)), log_(std::move(log)) {}
  std::shared_ptr<const device::StreamEvent> record() override {
    log_->events.push_back(std::make_shared<FakeEvent>(name_ + std::to_string(log_->events.size() + 1)));
    return log_->events.back();
  }
  void follow(const device::StreamEvent& event) override {
    log_->followed.push_back(dynamic_cast<const FakeEvent&>(event).name);
  }
  void* native() override { return log_.get(); }

 private:
  std::string name_;
  std::shared_ptr<FakeLog> log_;
};

/// A stream on a FakeQueue, and its log.
struct FakeStream {
  explicit FakeStream(const std::string& name)
      : log(std::make_shared<FakeLog>()), stream(std::make_unique<FakeQueue>(name, log)) {}
  std::shared_ptr<FakeLog> log;
  device::Stream stream;
};

}  // namespace sherd::testing
