#include "base/arena.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <mutex>
#include <new>
#include <numeric>
#include <set>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <vector>

#include "support/expect_error.h"

namespace sherd {
namespace {

TEST(ArenaCores, ItsThreadsStayOnThemAndTheCallerIsFreeAfterwards) {
  const std::vector<int> before = available_core_ids();
  ASSERT_FALSE(before.empty());
  const int core = before.back();
  {
    Arena arena(3, {core});
    std::atomic<int> elsewhere = 0;
    for (int round = 0; round < 50; ++round)
      arena.parallel_for(64, 1, [&](std::int64_t, std::int64_t) {
        if (available_core_ids() != std::vector<int>{core}) ++elsewhere;
      });
    EXPECT_EQ(elsewhere, 0);
    EXPECT_EQ(available_core_ids(), std::vector<int>{core});
  }
  EXPECT_EQ(available_core_ids(), before);
  Arena free(3);
  std::atomic<int> bound = 0;
  free.parallel_for(64, 1, [&](std::int64_t, std::int64_t) { bound += available_core_ids() != before; });
  EXPECT_EQ(bound, 0);
  sherd::testing::expect_error(ErrorKind::usage, "may not run on core", [] { Arena arena(1, {100000}); });
}

TEST(ArenaCores, WorkersOfAnotherArenaAreFree) {
  const std::vector<int> before = available_core_ids();
  const std::thread::id self = std::this_thread::get_id();
  const auto pause = [] {
    std::this_thread::sleep_for(std::chrono::microseconds(300));
  };  // so that workers come
  Arena free(4);
  std::atomic<int> bound = 0, helped = 0;
  for (int round = 0; round < 200; ++round) {
    // Goes while workers may still be in it, which nobody lets out then.
    Arena(4, {before.back()}).parallel_for(8, 1, [&](std::int64_t, std::int64_t) { pause(); });
    free.parallel_for(16, 1, [&](std::int64_t, std::int64_t) {
      pause();
      if (std::this_thread::get_id() == self) return;
      ++helped;
      bound += available_core_ids() != before;
    });
  }
  EXPECT_GT(helped, 0);
  EXPECT_EQ(bound, 0);
}

class ArenaThreads : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Threads, ArenaThreads, ::testing::Values(1, 2, 3, 7));

TEST_P(ArenaThreads, covers_every_item_once_in_chunks_of_the_grain) {
  Arena arena(GetParam());
  EXPECT_EQ(arena.threads(), GetParam());
  for (const auto& [count, grain] :
       {std::pair{0, 5}, {1, 5}, {5, 5}, {6, 5}, {1000, 7}, {10, 1000}, {9, 0}, {-3, 2}}) {
    std::mutex mutex;
    std::set<std::pair<std::int64_t, std::int64_t>> chunks;
    arena.parallel_for(count, grain, [&](std::int64_t begin, std::int64_t end) {
      const std::lock_guard lock(mutex);
      EXPECT_TRUE(chunks.emplace(begin, end).second);
    });
    std::set<std::pair<std::int64_t, std::int64_t>> want;
    const std::int64_t step = std::max(1, grain);
    for (std::int64_t begin = 0; begin < count; begin += step)
      want.emplace(begin, std::min<std::int64_t>(count, begin + step));
    EXPECT_EQ(chunks, want) << count << " by " << grain;
  }
}

TEST_P(ArenaThreads, rethrows_a_chunks_exception_and_stays_usable) {
  Arena arena(GetParam());
  for (int round = 0; round < 20; ++round) {
    EXPECT_THROW(arena.parallel_for(100, 1,
                                    [&](std::int64_t begin, std::int64_t) {
                                      if (begin == 37) throw std::runtime_error("chunk 37");
                                    }),
                 std::runtime_error);
    std::atomic<int> ran{0};
    arena.parallel_for(50, 1, [&](std::int64_t, std::int64_t) { ++ran; });
    EXPECT_EQ(ran, 50);
  }
}

TEST_P(ArenaThreads, nested_loops_run_serially_on_the_chunks_thread) {
  Arena arena(GetParam());
  std::atomic<int> items{0};
  arena.parallel_for(40, 1, [&](std::int64_t, std::int64_t) {
    const auto self = std::this_thread::get_id();
    std::int64_t last = -1;
    arena.parallel_for(10, 3, [&](std::int64_t begin, std::int64_t end) {
      EXPECT_EQ(std::this_thread::get_id(), self);
      EXPECT_GT(begin, last);
      last = begin;
      items += static_cast<int>(end - begin);
    });
  });
  EXPECT_EQ(items, 400);
}

TEST_P(ArenaThreads, flushes_denormals_on_every_thread) {
  Arena arena(GetParam());
  std::vector<float> results(2000, 1.0f);
  arena.parallel_for(2000, 1, [&](std::int64_t begin, std::int64_t) {
    volatile float tiny = 1e-38f;
    results[static_cast<std::size_t>(begin)] = tiny * 0.01f;
  });
  EXPECT_EQ(std::accumulate(results.begin(), results.end(), 0.0f), 0.0f);
}

TEST(Arena, runs_on_as_many_threads_as_it_was_asked_for_beside_other_arenas) {
  Arena small(1), large(4);
  std::mutex mutex;
  std::set<std::thread::id> threads;
  // Each chunk waits, within reason, for a fourth thread to take part.
  for (int round = 0; round < 1000 && threads.size() < 4; ++round)
    large.parallel_for(16, 1, [&](std::int64_t, std::int64_t) {
      {
        const std::lock_guard lock(mutex);
        threads.insert(std::this_thread::get_id());
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    });
  EXPECT_EQ(threads.size(), 4u);
}

TEST(Arena, arenas_of_several_ranks_work_at_the_same_time) {
  std::atomic<std::int64_t> total{0};
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 4; ++rank)
    ranks.emplace_back([&] {
      Arena arena(2);
      for (int i = 0; i < 50; ++i)
        arena.parallel_for(100, 3, [&](std::int64_t begin, std::int64_t end) { total += end - begin; });
    });
  for (auto& rank : ranks) rank.join();
  EXPECT_EQ(total, 4 * 50 * 100);
}

/// Ends this process: with 0 when an arena can be made where the system gives nothing any more and `left`
/// blocks of a kilobyte are free, with 1 when that is told.
[[noreturn]] void make_an_arena_with_little_memory(std::size_t left) {
  std::vector<void*> spare(left);
  for (void*& block : spare) block = std::malloc(1024);
  const rlimit none{0, 0};
  ::setrlimit(RLIMIT_AS, &none);
  for (const std::size_t bytes : {65536, 4096, 1024, 64})
    while (void* volatile block = std::malloc(bytes)) static_cast<void>(block);
  for (void* block : spare) std::free(block);
  int code = 0;
  try {
    Arena arena(2);
  } catch (const std::bad_alloc&) {
    code = 1;
  } catch (const std::system_error&) {  // of std::thread
    code = 1;
  }
  ::_exit(code);
}

TEST(ArenaDeathTest, too_little_memory_is_an_error_and_no_crash) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers need more than any limit leaves";
#endif
  const auto made_or_refused = [](int status) {
    return WIFEXITED(status) && (WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == 1);
  };
  for (std::size_t left = 0; left < 64; ++left)
    EXPECT_EXIT(make_an_arena_with_little_memory(left), made_or_refused, "") << left;
}

TEST(Arena, refuses_no_threads) {
  testing::expect_error(ErrorKind::usage, "at least 1 thread, not 0", [] { Arena arena(0); });
}

}  // namespace
}  // namespace sherd
