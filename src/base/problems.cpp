#include "base/problems.h"

#include <algorithm>

#include "base/error.h"

namespace sherd {

void Problems::attempt(const std::function<void()>& check) {
  try {
    check();
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::config) throw;
    add(error.what());
  }
}

void Problems::for_each(const std::function<void(std::string&)>& change) {
  for (std::string& message : messages_) change(message);
}

void Problems::raise() const {
  if (messages_.empty()) return;
  if (size() == 1) fail(ErrorKind::config, messages_.front());
  std::string all;
  for (std::size_t i = 0; i < std::min(most, size()); ++i) all += "\n" + messages_[i];
  if (size() > most) all += cat("\nand ", size() - most, " more");
  fail(ErrorKind::config, "the configuration has ", size(), " problems:", all);
}

}  // namespace sherd
