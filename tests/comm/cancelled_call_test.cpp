// Memory that messages used when their calls fail.
#include <utility>

#include "comm/processes/process_group.h"
#include "comm/tcp/rendezvous.h"
#include "comm/tcp/socket_port.h"
#include "tests/comm/conformance.h"
#include "tests/comm/tcp_ranks.h"

namespace sherd::comm {
namespace {

using conformance::error_of;
using ::testing::HasSubstr;

/// A port that, as MPI's with messages that are arriving, cannot take back what it was given.
class Unstoppable final : public Port {
 public:
  explicit Unstoppable(std::shared_ptr<Port> port) : port_(std::move(port)) {}
  std::string kind() const override { return port_->kind(); }
  void on_leave(std::function<void()> tell) override { port_->on_leave(std::move(tell)); }
  int rank() const override { return port_->rank(); }
  int size() const override { return port_->size(); }
  const std::vector<int>& world_ranks() const override { return port_->world_ranks(); }
  int world_size() const override { return port_->world_size(); }
  std::vector<std::uint64_t> machines() const override { return port_->machines(); }
  bool crowded() const override { return port_->crowded(); }
  LocalPlace place() const override { return port_->place(); }
  bool gone(int rank) const override { return port_->gone(rank); }
  std::shared_ptr<Port> split(int color, int key, const Patience& patience) override {
    auto part = port_->split(color, key, patience);
    return part ? std::make_shared<Unstoppable>(std::move(part)) : nullptr;
  }
  std::vector<std::byte*> shared_window(std::size_t bytes, const Patience& patience) override {
    return port_->shared_window(bytes, patience);
  }
  std::uint64_t from_first(std::uint64_t value, const Patience& patience) override {
    return port_->from_first(value, patience);
  }
  void meet(const Patience& patience) override { port_->meet(patience); }
  int send(const void* data, std::size_t bytes, int to, int tag) override {
    return port_->send(data, bytes, to, tag);
  }
  int receive(void* data, std::size_t bytes, int from, int tag) override {
    return port_->receive(data, bytes, from, tag);
  }
  bool test(int request) override { return port_->test(request); }
  bool cancel(int) noexcept override { return false; }
  bool release(int) noexcept override { return false; }
  std::uint64_t news() override { return port_->news(); }
  std::uint64_t pause(std::uint64_t seen, int turn) override { return port_->pause(seen, turn); }
  void broadcast_failure(const std::string& text) noexcept override { port_->broadcast_failure(text); }
  std::string poll_failure() override { return port_->poll_failure(); }

 private:
  std::shared_ptr<Port> port_;
};

/// A call of rank 0 with tensors whose storage it tells of; rank 1 never comes to it.
struct Given {
  const char* name;
  void (*call)(Communicator& comm, const Tensor& small, const Tensor& large);
  bool uses_small;
};

class CancelledCall : public ::testing::TestWithParam<Given> {
 protected:
  static constexpr std::int64_t n = 300'000;

  /// Whether the storages of the call's tensors are there after it failed and all handles to them are gone.
  static std::pair<bool, bool> kept(bool stoppable) {
    const CommOptions options{.timeout_seconds = 30, .shared_memory = false};
    const int address = free_port();
    const auto join = [&](int rank) {
      const Patience patience{30, "joining"};
      auto port = make_socket_port(
          std::make_shared<Mesh>(rank, rendezvous(launch_of(rank, 2, address), patience)), false, patience);
      if (!stoppable) port = std::make_shared<Unstoppable>(std::move(port));
      return make_process_world(std::move(port), options).world;
    };
    std::thread absent([&] {
      const auto world = join(1);
      world->barrier();
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      world->abort("enough");
      error_of(ErrorKind::comm, [&] { world->barrier(); });
    });
    auto world = join(0);
    const auto device = device::make_cpu_device(1);
    Tensor small = Tensor::zeros(*device, {n}, DType::f32),
           large = Tensor::zeros(*device, {2 * n}, DType::f32);
    const device::StorageWatch watched[]{device::StorageWatch(small.storage()),
                                         device::StorageWatch(large.storage())};
    world->barrier();
    EXPECT_THAT(error_of(ErrorKind::comm, [&] { GetParam().call(*world, small, large); }),
                HasSubstr("enough"));
    small = {}, large = {};
    world.reset();  // neither leaves before the other
    absent.join();
    return {static_cast<bool>(watched[0].lock()), static_cast<bool>(watched[1].lock())};
  }
};

TEST_P(CancelledCall, MemoryThatThePortMayStillTouchStays) {
  EXPECT_EQ(kept(false), std::pair(GetParam().uses_small, true));
}
TEST_P(CancelledCall, OtherMemoryGoes) {
  EXPECT_EQ(kept(true), std::pair(false, false));
}

INSTANTIATE_TEST_SUITE_P(
    Messages, CancelledCall,
    ::testing::Values(
        Given{"allGather",
              [](Communicator& c, const Tensor& x, const Tensor& y) {
                c.all_gather({{x, y}});
              },
              true},
        Given{"reduceScatter",
              [](Communicator& c, const Tensor& x, const Tensor& y) {
                c.reduce_scatter({{y, x, 0, x.numel()}}, DType::f32);
              },
              true},
        Given{"allReduce", [](Communicator& c, const Tensor&, const Tensor& y) { c.all_reduce(y); }, false},
        Given{"broadcast", [](Communicator& c, const Tensor&, const Tensor& y) { c.broadcast(y, 1); }, false},
        Given{"receive", [](Communicator& c, const Tensor&, const Tensor& y) { c.receive(y, 1); }, false},
        Given{"send", [](Communicator& c, const Tensor&, const Tensor& y) { c.send(y, 1); }, false},
        Given{
            "receiveAsync",
            [](Communicator& c, const Tensor&, const Tensor& y) { c.receive(y, 1, {.async = true}).wait(); },
            false}),
    [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace sherd::comm
