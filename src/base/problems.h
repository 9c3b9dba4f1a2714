#pragma once

#include <functional>
#include <string>
#include <vector>

namespace sherd {

/// What is wrong with a configuration, gathered so that a person hears of all of it at once.
class Problems {
 public:
  /// Calls `check`; an Error{config} of it becomes a problem, and what comes next is checked too.
  void attempt(const std::function<void()>& check);
  void add(std::string message) { messages_.push_back(std::move(message)); }
  /// Calls `change(message)` for each of them.
  void for_each(const std::function<void(std::string&)>& change);
  std::size_t size() const { return messages_.size(); }
  /// Throws Error{config} with all problems, if there are any; of more than `most`, how many there are.
  void raise() const;
  static constexpr std::size_t most = 30;

 private:
  std::vector<std::string> messages_;
};

}  // namespace sherd
