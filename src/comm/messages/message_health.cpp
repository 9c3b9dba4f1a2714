#include "comm/messages/message_health.h"

#include "base/error.h"

namespace sherd::comm {

MessageHealth::MessageHealth(std::shared_ptr<Port> port, std::string name, std::shared_ptr<Health> parent)
    : port_(std::move(port)),
      name_(std::move(name)),
      parent_(std::move(parent)),
      departed_(static_cast<std::size_t>(port_->size())) {}

/// Such a text begins with F (failure: its text follows) or D (departure: the rank follows).
void MessageHealth::listen() const {
  for (std::string heard; !(heard = port_->poll_failure()).empty();) {
    std::lock_guard lock(mutex_);
    if (heard[0] == 'D')
      departed_[static_cast<std::size_t>(std::stoi(heard.substr(1)))] = true;
    else if (!failed_)
      text_ = heard.substr(1), failed_ = true;
  }
}

bool MessageHealth::failed() const noexcept {
  if (failed_) return true;
  try {
    listen();
  } catch (const std::exception& error) {
    std::lock_guard lock(mutex_);
    if (!failed_) text_ = cat(name_, ": ", error.what()), failed_ = true;
  }
  return failed_ || (parent_ && parent_->failed());
}

std::string MessageHealth::failure() const {
  if (!failed()) return "";
  if (failed_) {
    std::lock_guard lock(mutex_);
    return text_;
  }
  return parent_->failure();
}

void MessageHealth::fail(const std::string& reason) noexcept {
  {
    std::lock_guard lock(mutex_);
    if (failed_) return;
    text_ = reason, failed_ = true;
  }
  port_->broadcast_failure("F" + reason);
}

void MessageHealth::depart(const std::string& failure) noexcept {
  if (!failure.empty()) port_->broadcast_failure("F" + failure);
  port_->broadcast_failure(cat("D", port_->rank()));
}

bool MessageHealth::lost(int rank, std::string& why) const {
  if (dead(rank)) {
    why = "is dead: its process or the connection to it ended";
    return true;
  }
  std::lock_guard lock(mutex_);
  if (!departed_[static_cast<std::size_t>(rank)]) return false;
  why = "has left the group";
  return true;
}

bool MessageHealth::dead(int rank) const {
  if (!port_->gone(rank)) return false;
  failed();  // hears what it said last
  std::lock_guard lock(mutex_);
  return !departed_[static_cast<std::size_t>(rank)];
}

}  // namespace sherd::comm
