#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <numeric>
#include <thread>

#include "base/arena.h"
#include "base/random.h"
#include "comm/messages/message_exchange.h"
#include "comm/tcp/mesh.h"
#include "comm/tcp/tcp_world.h"

namespace sherd::comm {
namespace {

constexpr int shout_tag = -1, setup_tag = -2;

class SocketPort final : public Port {
 public:
  SocketPort(std::shared_ptr<Mesh> mesh, std::uint64_t group, std::vector<int> world_ranks)
      : mesh_(std::move(mesh)), group_(group), world_ranks_(std::move(world_ranks)) {
    rank_ = static_cast<int>(std::find(world_ranks_.begin(), world_ranks_.end(), mesh_->rank()) - world_ranks_.begin());
  }

  std::string kind() const override { return "tcp"; }
  // The system closes the connections of a process that exits, which tells the others as much.
  void on_leave(std::function<void()>) override {}
  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(world_ranks_.size()); }
  const std::vector<int>& world_ranks() const override { return world_ranks_; }
  int world_size() const override { return mesh_->size(); }
  bool one_machine() const override { return false; }
  bool crowded() const override { return false; }
  bool gone(int rank) const override { return mesh_->gone(world(rank)); }

  std::shared_ptr<Port> split(int color, int key, const Patience& patience) override {
    const SplitPlan plan = plan_split(from_all({color, key}, patience), rank_);
    const std::uint64_t id = mix_seed(mix_seed(group_, ++splits_), static_cast<std::uint64_t>(color) + 1);
    if (plan.rank < 0) return nullptr;
    std::vector<int> members;
    for (const int r : plan.members) members.push_back(world(r));
    return std::make_shared<SocketPort>(mesh_, id, std::move(members));
  }
  std::vector<std::byte*> shared_window(std::size_t, const Patience& patience) override {
    fail(ErrorKind::usage, patience.what, ": sockets share no memory");
  }
  std::uint64_t from_first(std::uint64_t value, const Patience& patience) override {
    return static_cast<std::uint64_t>(from_all({static_cast<std::int64_t>(value)}, patience).front());
  }
  void meet(const Patience& patience) override { from_all({0}, patience); }

  int send(const void* data, std::size_t bytes, int to, int tag) override {
    mesh_->send(world(to), group_, tag, data, bytes);
    return sent;
  }
  int receive(void* data, std::size_t bytes, int from, int tag) override {
    std::lock_guard lock(mutex_);
    std::size_t place = 0;
    while (place < open_.size() && open_[place].used) ++place;
    if (place == open_.size()) open_.emplace_back();
    open_[place] = {data, bytes, from, tag, true, false};
    waiting_[{from, tag}].push_back(place);
    return static_cast<int>(place);
  }
  bool test(int request) override {
    if (request == sent) return true;
    std::lock_guard lock(mutex_);
    Receive& mine = open_[static_cast<std::size_t>(request)];
    if (!mine.done) deliver(mine.from, mine.tag);
    if (mine.done) mine.used = false;
    return mine.done;
  }
  void cancel(int request) noexcept override {
    if (request == sent) return;
    std::lock_guard lock(mutex_);
    Receive& given_up = open_[static_cast<std::size_t>(request)];
    std::erase(waiting_[{given_up.from, given_up.tag}], static_cast<std::size_t>(request));
    given_up.used = false;
  }

  void shout(const std::string& text) noexcept override {
    for (int r = 0; r < size(); ++r) try {
        if (r != rank_) mesh_->send(world(r), group_, shout_tag, text.data(), text.size());
      } catch (const std::exception&) {  // who takes no messages hears nothing
      }
  }
  std::string overheard() override {
    std::vector<std::byte> text;
    for (int r = 0; r < size(); ++r)
      if (r != rank_ && mesh_->take(world(r), group_, shout_tag, text))
        return {reinterpret_cast<const char*>(text.data()), text.size()};
    return "";
  }

 private:
  static constexpr int sent = -1;
  struct Receive {
    void* data = nullptr;
    std::size_t bytes = 0;
    int from = 0, tag = 0;
    bool used = false, done = false;
  };

  /// Gives what has come with this tag from this rank to those who asked for it, in the order in which they did.
  void deliver(int from, int tag) {
    std::deque<std::size_t>& places = waiting_[{from, tag}];
    std::vector<std::byte> message;
    while (!places.empty() && mesh_->take(world(from), group_, tag, message)) {
      Receive& next = open_[places.front()];
      require(message.size() == next.bytes, "a message of ", message.size(), " bytes came where ", next.bytes,
              " were expected");
      if (next.bytes) std::memcpy(next.data, message.data(), next.bytes);
      next.done = true;
      places.pop_front();
    }
    if (places.empty()) waiting_.erase({from, tag});
  }

  int world(int rank) const { return world_ranks_[static_cast<std::size_t>(rank)]; }

  /// Every rank's words, in rank order.
  std::vector<std::int64_t> from_all(const std::vector<std::int64_t>& mine, const Patience& patience) {
    const std::size_t bytes = mine.size() * sizeof(std::int64_t);
    for (int r = 0; r < size(); ++r)
      if (r != rank_) mesh_->send(world(r), group_, setup_tag, mine.data(), bytes);
    const Deadline deadline = Deadline::after_seconds(patience.seconds);
    std::vector<std::int64_t> all;
    for (int r = 0; r < size(); ++r) {
      std::vector<std::byte> message(bytes);
      if (r == rank_)
        std::memcpy(message.data(), mine.data(), bytes);
      else
        await(r, message, patience, deadline);
      require(message.size() == bytes, patience.what, ": rank ", r, " sent ", message.size(), " bytes, not ", bytes);
      all.resize(all.size() + mine.size());
      std::memcpy(all.data() + all.size() - mine.size(), message.data(), bytes);
    }
    return all;
  }

  void await(int from, std::vector<std::byte>& message, const Patience& patience, const Deadline& deadline) {
    while (!mesh_->take(world(from), group_, setup_tag, message)) {
      const bool gone = mesh_->gone(world(from));
      if (gone && mesh_->take(world(from), group_, setup_tag, message)) return;
      if (gone) fail(ErrorKind::comm, patience.what, ": rank ", from, " is dead: its process has ended");
      if (deadline.passed())
        fail(ErrorKind::comm, patience.what, ": rank ", from, " did not come within ", patience.seconds, " s");
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }

  std::shared_ptr<Mesh> mesh_;
  std::uint64_t group_;
  std::vector<int> world_ranks_;
  int rank_ = 0;
  std::uint64_t splits_ = 0;
  std::mutex mutex_;
  std::vector<Receive> open_;  // guarded by mutex_
  std::map<std::pair<int, int>, std::deque<std::size_t>> waiting_;  // guarded by mutex_; by peer and tag
};

}  // namespace

std::unique_ptr<Communicator> make_tcp_world(const LaunchEnvironment& launch, const CommOptions& options) {
  std::vector<int> all(static_cast<std::size_t>(launch.world_size));
  std::iota(all.begin(), all.end(), 0);
  const Patience patience{std::max(60.0, options.timeout_seconds), "setting up the launcher's ranks"};
  auto port = std::make_shared<SocketPort>(Mesh::connect(launch, patience), 1, all);
  return make_group(make_message_exchange(std::move(port), group_name("tcp", all, launch.world_size), options, nullptr));
}

}  // namespace sherd::comm
