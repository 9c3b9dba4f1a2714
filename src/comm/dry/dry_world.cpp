#include "comm/dry/dry_world.h"

#include <mutex>

#include "base/error.h"
#include "comm/exchange/backend.h"

namespace sherd::comm {
namespace {

class DryWorld final : public Backend {
 public:
  /// `members` are the group's ranks in a world of `world_size`; none: all, of which nobody keeps a list.
  DryWorld(int rank, std::vector<int> members, int world_size, TellCommWork tell)
      : rank_(rank),
        members_(std::move(members)),
        world_size_(world_size),
        tell_(std::move(tell)),
        name_(members_.empty() ? cat("dry(", world_size, ")") : group_name("dry", members_, world_size)) {}

  int rank() const override { return rank_; }
  int size() const override { return members_.empty() ? world_size_ : static_cast<int>(members_.size()); }
  const std::string& name() const override { return name_; }
  double timeout_seconds() const override { return 1; }
  bool immediate() const override { return true; }
  int world_rank(int rank) const override {
    return members_.empty() ? rank : members_[static_cast<std::size_t>(rank)];
  }

  void run(Call& call) override { tell(call); }
  void start(Call& transfer) override { tell(transfer); }
  bool advance(Call&) override { return true; }
  void await(const std::function<bool()>& ready, const std::vector<Call*>&) override {
    require(ready(), name_, ": a transfer is not done although none moves");
  }
  void wake() noexcept override {}

  device::Storage allocate(device::Device& device, std::size_t bytes, device::Category category,
                           device::Tier tier) override {
    return device.allocate(bytes, category, tier);
  }
  std::unique_ptr<Backend> split(int, int) override {
    sherd::fail(ErrorKind::usage, name_,
                ": the other ranks are not there to say how they split; part() says it for all");
  }
  std::unique_ptr<Backend> part(const GroupPart& part) override {
    if (part.color < 0) return nullptr;
    std::vector<int> members;
    for (const int member : part.members)
      members.push_back(members_.empty() ? member : members_[static_cast<std::size_t>(member)]);
    return std::make_unique<DryWorld>(part.rank, std::move(members), world_size_, tell_);
  }

  void fail(const std::string& reason) noexcept override {
    std::lock_guard lock(mutex_);
    if (failure_.empty()) failure_ = reason;
  }
  std::string failure() const override {
    std::lock_guard lock(mutex_);
    return failure_;
  }

 private:
  void tell(const Call& call) const {
    if (!tell_) return;
    tell_({.kind = call.kind,
           .bytes = bytes_sent(call, rank_, size()),
           .ranks = size(),
           .stride = size() > 1 ? world_rank(1) - world_rank(0) : 1,
           .async = call.async});
  }

  int rank_;
  std::vector<int> members_;
  int world_size_;
  TellCommWork tell_;
  std::string name_;
  mutable std::mutex mutex_;
  std::string failure_;  // guarded by mutex_
};

}  // namespace

std::unique_ptr<Communicator> make_dry_world(int rank, int size, TellCommWork tell) {
  require(0 <= rank && rank < size, "rank ", rank, " is not one of ", size);
  return make_group(std::make_unique<DryWorld>(rank, std::vector<int>(), size, std::move(tell)));
}

}  // namespace sherd::comm
