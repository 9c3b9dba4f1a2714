#include "comm/messages/signature_ring.h"

namespace sherd::comm {

SignatureRing::~SignatureRing() {
  for (auto& one : open_) {
    const bool heard = one->receive < 0 || port_->cancel(one->receive);
    const bool said = one->send < 0 || port_->release(one->send);
    if (!heard || !said) keep_for_good(std::move(one));
  }
}

std::uint64_t SignatureRing::add(const CallSignature& call) {
  std::lock_guard lock(mutex_);
  ++count_;
  if (previous_ == port_->rank()) return count_;
  open_.push_back(std::make_unique<ToldCalls>());
  ToldCalls& one = *open_.back();
  one.mine = call;
  one.receive = port_->receive(&one.theirs, sizeof one.theirs, previous_, tag_);
  one.send = port_->send(&one.mine, sizeof one.mine, next_, tag_);
  return count_;
}

std::string SignatureRing::check() {
  std::lock_guard lock(mutex_);
  std::string wrong;
  for (const auto& one : open_) {  // messages of one pair come in their order
    if (one->send >= 0 && port_->test(one->send)) one->send = -1;
    if (one->receive < 0) continue;
    if (!port_->test(one->receive)) break;
    one->receive = -1;
    ++heard_;
    const auto in_world = [&](int rank) { return port_->world_ranks()[static_cast<std::size_t>(rank)]; };
    if (wrong.empty())
      wrong = mismatch({one->theirs, one->mine}, {in_world(previous_), in_world(port_->rank())});
  }
  while (!open_.empty() && open_.front()->send < 0 && open_.front()->receive < 0) open_.pop_front();
  return wrong;
}

std::vector<int> SignatureRing::absent(std::uint64_t number) {
  std::lock_guard lock(mutex_);
  if (previous_ == port_->rank() || heard_ >= number) return {};
  return {previous_};
}

}  // namespace sherd::comm
