#pragma once

#include <string>

namespace sherd::comm {

/// Whether a group still works. A failed group stays failed; its sub-groups fail with it. Thread-safe.
class Health {
 public:
  virtual ~Health() = default;
  virtual bool failed() const noexcept = 0;
  /// The first failure's text, the same on all ranks; empty while all is well.
  virtual std::string failure() const = 0;
};

}  // namespace sherd::comm
