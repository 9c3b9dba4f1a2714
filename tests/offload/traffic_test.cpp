#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <tuple>
#include <vector>

#include "offload/store_fixture.h"

namespace sherd::offload {
namespace {

using device::Category;

struct Settings {
  StoreOptions::Backend backend;
  std::size_t block_size;
  int queue_depth;
  bool single_submit = false, overlap_events = true, checksums = false, direct = true;
};

void PrintTo(const Settings& s, std::ostream* out) {
  *out << backend_text(s.backend) << " block " << s.block_size << " depth " << s.queue_depth
       << (s.single_submit ? " single_submit" : "") << (s.overlap_events ? "" : " in batches")
       << (s.checksums ? " checksums" : "") << (s.direct ? "" : " buffered");
}

class TrafficTest : public StoreFixture, public ::testing::WithParamInterface<Settings> {};

using B = StoreOptions::Backend;
INSTANTIATE_TEST_SUITE_P(Settings, TrafficTest,
                         ::testing::Values(Settings{B::io_uring, 1 << 20, 8}, Settings{B::io_uring, 4096, 1},
                                           Settings{B::io_uring, 65536, 3, true},
                                           Settings{B::io_uring, 16384, 32, false, false},
                                           Settings{B::io_uring, 20480, 5, false, true, true},
                                           Settings{B::io_uring, 32768, 4, false, true, false, false},
                                           Settings{B::threads, 1 << 20, 8}, Settings{B::threads, 4096, 1},
                                           Settings{B::threads, 20480, 5, true, false, true},
                                           Settings{B::threads, 65536, 16, false, true, true, false}));

/// A read under way and what it must bring.
struct PendingRead {
  Io io;
  std::vector<unsigned char> memory, expected;
  std::byte* direct = nullptr;  // in the place of `memory`
};

/// Random transfers of two spans, up to 24 at once, beside vectors that hold what the spans must.
class Traffic {
 public:
  Traffic(Store& store, std::uint32_t seed)
      : store_(store), pages_(store.pages(buffers * buffer_bytes, Category::workspace)), random_(seed) {
    for (const std::uint64_t bytes : {700'001ull, 262'144ull}) {
      spans_.push_back(store.reserve("span", bytes, Category::optimizer));
      models_.emplace_back(bytes);
    }
  }

  void step() {
    const std::size_t which = below(2);
    const std::size_t size = models_[which].size();
    std::size_t offset = below(size), bytes = 1 + below(below(3) ? 20'000 : size);
    if (below(2)) offset = offset / 4096 * 4096;
    if (below(2)) bytes = std::min(size, (bytes + 4095) / 4096 * 4096);
    bytes = std::min(bytes, size - offset);
    if (below(2))
      write(which, offset, bytes);
    else
      read(which, offset, bytes);
    if (pending_.size() > 12 || below(16) == 0) settle();
  }

  void settle() {
    for (PendingRead& read : pending_) {
      read.io.wait();
      const void* found = read.direct ? static_cast<void*>(read.direct) : read.memory.data();
      ASSERT_EQ(std::memcmp(found, read.expected.data(), read.expected.size()), 0);
    }
    pending_.clear();
    writes_.clear();
    sources_.clear();
    used_ = 0;
  }

  void check_everything() {
    settle();
    for (std::size_t i = 0; i < spans_.size(); ++i) EXPECT_EQ(read_all(store_, spans_[i]), models_[i]);
  }

 private:
  std::size_t below(std::size_t limit) {
    return std::uniform_int_distribution<std::size_t>(0, limit - 1)(random_);
  }

  /// A place in the pages for every second transfer, while some are left: on a page, so that it goes
  /// directly, or anywhere.
  std::byte* place(std::size_t bytes) {
    if (below(2) == 0 || used_ == buffers) return nullptr;
    const std::size_t at = below(buffer_bytes - bytes);
    return pages_.data() + used_++ * buffer_bytes + (below(2) ? at / 4096 * 4096 : at);
  }

  void write(std::size_t which, std::size_t offset, std::size_t bytes) {
    auto data = pattern(bytes, random_());
    std::memcpy(models_[which].data() + offset, data.data(), bytes);
    if (std::byte* direct = place(bytes)) {
      std::memcpy(direct, data.data(), bytes);
      writes_.push_back(store_.write(spans_[which], offset, direct, bytes));
      return;
    }
    sources_.push_back(std::move(data));
    writes_.push_back(store_.write(spans_[which], offset, sources_.back().data(), bytes));
  }

  void read(std::size_t which, std::size_t offset, std::size_t bytes) {
    PendingRead read;
    const auto* model = models_[which].data() + offset;
    read.expected.assign(model, model + bytes);
    read.direct = place(bytes);
    if (read.direct) {
      read.io = store_.read(spans_[which], offset, read.direct, bytes);
    } else {
      read.memory.resize(bytes);
      read.io = store_.read(spans_[which], offset, read.memory.data(), bytes);
    }
    pending_.push_back(std::move(read));
  }

  static constexpr std::size_t buffers = 6, buffer_bytes = 200 * 4096;

  Store& store_;
  Pages pages_;
  std::size_t used_ = 0;  // buffers of them that transfers have
  std::mt19937 random_;
  std::vector<Span> spans_;
  std::vector<std::vector<unsigned char>> models_;
  std::vector<std::vector<unsigned char>> sources_;  // outlive writes_
  std::vector<Io> writes_;
  std::vector<PendingRead> pending_;
};

TEST_P(TrafficTest, mixed_traffic_agrees_with_memory) {
  const Settings& settings = GetParam();
  if (settings.backend == B::io_uring && !uring_works()) GTEST_SKIP() << "no io_uring here";
  options.backend = settings.backend;
  options.block_size = settings.block_size;
  options.queue_depth = settings.queue_depth;
  options.single_submit = settings.single_submit;
  options.overlap_events = settings.overlap_events;
  options.checksums = settings.checksums;
  options.direct = settings.direct;
  Store store(options, ledger);
  Traffic traffic(store, 17);
  for (int i = 0; i < 300; ++i) {
    traffic.step();
    if (HasFatalFailure()) return;
  }
  traffic.check_everything();
}

}  // namespace
}  // namespace sherd::offload
