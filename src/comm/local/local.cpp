#include <atomic>
#include <chrono>
#include <exception>
#include <map>
#include <mutex>
#include <thread>
#include <tuple>

#include "base/log.h"
#include "base/threads.h"
#include "comm/exchange/exchange.h"
#include "comm/exchange/gpu/gpu_worker.h"
#include "comm/local/local.h"

namespace sherd::comm {
namespace {

/// The state that the threads of one group share: the board's memory, and the groups being split off.
class LocalGroup {
 public:
  explicit LocalGroup(std::vector<int> world_ranks)
      : world_ranks_(std::move(world_ranks)), events_(static_cast<int>(world_ranks_.size())) {
    layout_.ranks = static_cast<int>(world_ranks_.size());
    memory_ = layout_.allocate(layout_.ranks);
    for (int r = 0; r < layout_.ranks; ++r) {
      segments_.push_back(memory_.get() + static_cast<std::size_t>(r) * layout_.segment_bytes());
      Board::prepare(segments_.back(), layout_);
    }
  }

  const BoardLayout& layout() const { return layout_; }
  const std::vector<std::byte*>& segments() const { return segments_; }
  const std::vector<int>& world_ranks() const { return world_ranks_; }
  EventBoard& events() { return events_; }
  /// Ranks inside a collective.
  std::atomic<int>& inside() { return inside_; }

  /// The group that `members` (ranks here) form in the split numbered `serial`; the same object for each of
  /// them.
  std::shared_ptr<LocalGroup> part(std::uint64_t serial, const std::vector<int>& members) {
    std::lock_guard lock(mutex_);
    auto& [group, takers] = parts_[{serial, members.front()}];
    if (!group) {
      std::vector<int> world;
      for (const int r : members) world.push_back(world_ranks_[static_cast<std::size_t>(r)]);
      group = std::make_shared<LocalGroup>(std::move(world));
    }
    std::shared_ptr<LocalGroup> out = group;
    if (++takers == members.size()) parts_.erase({serial, members.front()});
    return out;
  }

 private:
  std::vector<int> world_ranks_;
  EventBoard events_;
  std::atomic<int> inside_{0};
  BoardLayout layout_;
  std::shared_ptr<std::byte> memory_;
  std::vector<std::byte*> segments_;
  std::mutex mutex_;
  // Guarded by mutex_:
  std::map<std::pair<std::uint64_t, int>, std::pair<std::shared_ptr<LocalGroup>, std::size_t>> parts_;
};

/// One address space: peers see everything, and what its owner frees is gone for them too.
class OneProcess final : public PeerMemory {
 public:
  explicit OneProcess(std::shared_ptr<LocalGroup> group) : group_(std::move(group)) {}
  void enter() override { group_->inside().fetch_add(1); }
  void leave() noexcept override { group_->inside().fetch_sub(1); }
  // Ends: whoever is inside copies memory, which takes no peer, and then meets the failure.
  void outlast_readers() noexcept override {
    while (group_->inside().load() != 0) std::this_thread::yield();
  }
  Address locate(const std::byte* data, std::size_t) const override {
    return {0, reinterpret_cast<std::uintptr_t>(data)};
  }
  std::byte* resolve(int, const Address& address) const override {
    return reinterpret_cast<std::byte*>(static_cast<std::uintptr_t>(address.offset));
  }

 private:
  std::shared_ptr<LocalGroup> group_;
};

class LocalExchange final : public HostExchange {
 public:
  LocalExchange(std::shared_ptr<LocalGroup> group, std::shared_ptr<Board> board, int world_size, bool crowded,
                const LocalOptions& options)
      : HostExchange(std::make_shared<Topology>(Topology::one_machine(board->rank(), board->size())), board,
                     std::make_shared<OneProcess>(group), nullptr, options.comm.threads),
        group_(std::move(group)),
        world_size_(world_size),
        crowded_(crowded),
        options_(options) {}

  device::Storage allocate(device::Device& device, std::size_t bytes, device::Category category,
                           device::Tier tier) override {
    return device.allocate(bytes, category, tier);
  }

  bool one_process() const override { return true; }
  void use_gpu(const std::shared_ptr<device::Accelerator>& gpu) override {
    use_gpu_worker(make_gpu_worker(gpu, options_.gpu_reduce, group_->events(), rank()));
  }

  std::unique_ptr<Backend> split(int color, int key) override {
    const SplitPlan plan = plan_split(agree({color, key}, "split"), rank());
    const std::uint64_t serial = splits_++;
    if (plan.rank < 0) return nullptr;
    return make(group_->part(serial, plan.members), plan.rank, world_size_, crowded_, options_,
                shared_board());
  }

  std::unique_ptr<Backend> part(const GroupPart& part) override {
    if (!part.alone) return split(part.color, part.key());
    if (part.color < 0) return nullptr;
    const int world_rank = group_->world_ranks()[static_cast<std::size_t>(rank())];
    return make(std::make_shared<LocalGroup>(std::vector<int>{world_rank}), 0, world_size_, false, options_,
                shared_board());
  }

  static std::unique_ptr<Backend> make(std::shared_ptr<LocalGroup> group, int rank, int world_size,
                                       bool crowded, const LocalOptions& options,
                                       std::shared_ptr<Health> parent) {
    BoardSettings settings;
    settings.name = group_name("local", group->world_ranks(), world_size);
    settings.timeout_seconds = options.comm.timeout_seconds;
    for (int r = 0; r < group->layout().ranks; ++r) settings.ranks.push_back(r);
    settings.world = group->world_ranks();
    settings.crowded = crowded;
    settings.parent = std::move(parent);
    settings.memory = group;
    auto board = std::make_shared<Board>(rank, group->layout(), group->segments(), std::move(settings));
    return std::make_unique<LocalExchange>(std::move(group), std::move(board), world_size, crowded, options);
  }

 private:
  std::shared_ptr<LocalGroup> group_;
  int world_size_;
  bool crowded_;
  LocalOptions options_;
  std::uint64_t splits_ = 0;
};

/// The errors of a run, of which one is reported: an error of another kind than comm is a cause, a comm error
/// may be the echo of one. Within that, the first by time.
class FirstError {
 public:
  void add(std::exception_ptr error, bool may_be_echo) {
    std::lock_guard lock(mutex_);
    auto& place = may_be_echo ? echo_ : cause_;
    if (!place) place = std::move(error);
  }
  void rethrow() {
    if (cause_) std::rethrow_exception(cause_);
    if (echo_) std::rethrow_exception(echo_);
  }

 private:
  std::mutex mutex_;
  std::exception_ptr cause_, echo_;  // guarded by mutex_ while ranks run
};

void run_rank(Communicator& comm, const std::function<void(Communicator&)>& body, FirstError& errors) {
  ThreadRank scope(comm.rank());
  ensure_signal_stack();
  try {
    body(comm);
  } catch (const Error& error) {
    errors.add(std::current_exception(), error.kind() == ErrorKind::comm);
    comm.abort(error.what());
  } catch (const std::exception& error) {
    errors.add(std::current_exception(), false);
    comm.abort(error.what());
  } catch (...) {
    errors.add(std::current_exception(), false);
    comm.abort("an exception of unknown type");
  }
}

}  // namespace

void run_local(int ranks, const CommOptions& options, const std::function<void(Communicator&)>& body) {
  run_local(ranks, LocalOptions{options, reduce_on_gpu}, body);
}

void run_local(int ranks, const LocalOptions& options, const std::function<void(Communicator&)>& body) {
  require(ranks >= 1, "run_local needs at least 1 rank, not ", ranks);
  std::vector<int> world;
  for (int r = 0; r < ranks; ++r) world.push_back(r);
  auto group = std::make_shared<LocalGroup>(world);
  const bool crowded = ranks > available_cores();
  std::vector<std::unique_ptr<Communicator>> comms;
  for (int r = 0; r < ranks; ++r)
    comms.push_back(make_group(LocalExchange::make(group, r, ranks, crowded, options, nullptr)));

  require_stack();
  FirstError errors;
  const auto run = [&](std::size_t r) {
    const std::unique_ptr<Communicator> comm = std::move(comms[r]);
    run_rank(*comm, body, errors);
  };
  std::vector<std::jthread> threads;
  bool all_started = true;
  try {
    for (std::size_t r = 1; r < comms.size(); ++r) threads.emplace_back([&, r] { run(r); });
  } catch (const std::exception& error) {  // the ranks that were started end
    all_started = false;
    errors.add(std::current_exception(), false);
    comms[0]->abort(error.what());
  }
  if (all_started) run(0);
  threads.clear();  // joins them
  errors.rethrow();
}

std::unique_ptr<Backend> make_alone(const CommOptions& options, int world_rank) {
  return LocalExchange::make(std::make_shared<LocalGroup>(std::vector<int>{world_rank}), 0, 1, false,
                             {options, reduce_on_gpu}, nullptr);
}

std::unique_ptr<Communicator> make_self(const CommOptions& options) {
  return make_group(make_alone(options));
}

}  // namespace sherd::comm
