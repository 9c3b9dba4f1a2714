#include "comm/messages/announcer.h"

namespace sherd::comm {
namespace {

constexpr int announce_tag = 3;

}  // namespace

Announcer::~Announcer() {
  for (const auto& one : open_) {
    if (one->receive >= 0) port_->cancel(one->receive);
    if (one->send >= 0) port_->release(one->send);
  }
}

std::uint64_t Announcer::add(const Signature& call) {
  std::lock_guard lock(mutex_);
  ++count_;
  if (port_->size() == 1) return count_;
  open_.push_back(std::make_unique<Announced>());
  Announced& one = *open_.back();
  one.mine = call;
  one.receive = port_->receive(&one.theirs, sizeof one.theirs, previous(), announce_tag);
  one.send = port_->send(&one.mine, sizeof one.mine, (port_->rank() + 1) % port_->size(), announce_tag);
  return count_;
}

std::string Announcer::check() {
  std::lock_guard lock(mutex_);
  return look();
}

/// The caller holds mutex_. Messages of one pair come in their order.
std::string Announcer::look() {
  std::string wrong;
  for (const auto& one : open_) {
    if (one->send >= 0 && port_->test(one->send)) one->send = -1;
    if (one->receive < 0) continue;
    if (!port_->test(one->receive)) break;
    one->receive = -1;
    ++heard_;
    if (wrong.empty()) wrong = mismatch({one->theirs, one->mine}, {previous(), port_->rank()});
  }
  while (!open_.empty() && open_.front()->send < 0 && open_.front()->receive < 0) open_.pop_front();
  return wrong;
}

std::vector<int> Announcer::absent(std::uint64_t number) {
  std::lock_guard lock(mutex_);
  if (port_->size() == 1 || heard_ >= number) return {};
  return {previous()};
}

}  // namespace sherd::comm
