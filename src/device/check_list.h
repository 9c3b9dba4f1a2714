#pragma once

#include <functional>
#include <list>
#include <memory>
#include <mutex>

namespace sherd::device {

/// The functions that a device's synchronize() and check() call, to throw what was found wrong with its work.
/// Threads may add and remove while another one calls.
class CheckList {
 public:
  /// Until the handle goes, which waits for a call of it that is under way.
  std::shared_ptr<void> add(std::function<void()> check);
  void call() const;

 private:
  struct CheckRegistration {
    std::mutex mutex;  // held while it is called, and to empty it
    std::function<void()> check;
  };
  struct CheckRegistrations {
    std::mutex mutex;  // guards the list, and is not held while one is called
    std::list<std::shared_ptr<CheckRegistration>> all;
  };
  std::shared_ptr<CheckRegistrations> entries_ =
      std::make_shared<CheckRegistrations>();  // handles may outlive the device
};

}  // namespace sherd::device
