// What is left of a world of processes that its owner has dropped.
#include <chrono>
#include <future>

#include "tests/comm/tcp_ranks.h"

namespace sherd::comm {
namespace {

/// Else an error that made a rank drop its world would be told only when peers that do not answer have been
/// waited for.
TEST(Tcp, WhoDropsAWorldWaitsForNobody) {
  using Clock = std::chrono::steady_clock;
  for (const bool shared_memory : {true, false}) {
    CommOptions options;
    options.shared_memory = shared_memory;
    const int port = free_port();
    std::promise<void> dropped;
    std::thread slow([&] {
      const auto joined = join_tcp_world(launch_of(1, 2, port), options);
      dropped.get_future().wait();
      EXPECT_THROW(joined.world->barrier(), Error) << "rank 0 has left";
    });
    auto joined = join_tcp_world(launch_of(0, 2, port), options);
    const auto begin = Clock::now();
    joined.world.reset();
    EXPECT_LT(Clock::now() - begin, std::chrono::seconds(2));
    dropped.set_value();
    slow.join();
  }
}

}  // namespace
}  // namespace sherd::comm
