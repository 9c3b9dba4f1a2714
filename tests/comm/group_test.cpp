// Transfers of a group that come to no good end, and those that do.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>

#include "comm/exchange/backend.h"
#include "tests/comm/conformance.h"
#include "tests/comm/tcp_ranks.h"

namespace sherd::comm {
namespace {

using conformance::error_of;
using std::chrono::steady_clock;
using ::testing::HasSubstr;

// ---- starts that fail ----

/// The transfers of a backend by their fate.
struct Fates {
  std::mutex mutex;
  int starts_left = 0;  ///< before one fails
  std::vector<const Call*> started, cancelled;
};

/// The first of two ranks, of which the other never moves.
class Unmoved final : public Backend {
 public:
  explicit Unmoved(Fates& fates) : fates_(fates) {}
  int rank() const override { return 0; }
  int size() const override { return 2; }
  int world_rank(int rank) const override { return rank; }
  const std::string& name() const override { return name_; }
  double timeout_seconds() const override { return 20; }
  void run(Call&) override {}
  void start(Call& transfer) override {
    std::lock_guard lock(fates_.mutex);
    fates_.started.push_back(&transfer);
    if (fates_.starts_left-- == 0) sherd::fail(ErrorKind::memory, "no room for a copy");
  }
  bool advance(Call&) override { return false; }
  void await(const std::function<bool()>& ready, const std::vector<Call*>&) override {
    const Deadline deadline = Deadline::after_seconds(timeout_seconds());
    for (; !ready(); std::this_thread::sleep_for(std::chrono::milliseconds(1)))
      if (deadline.passed()) sherd::fail(ErrorKind::comm, "too late");
  }
  void cancel(Call& transfer) noexcept override {
    EXPECT_FALSE(failure().empty()) << "peers go on";
    std::lock_guard lock(fates_.mutex);
    fates_.cancelled.push_back(&transfer);
  }
  void wake() noexcept override {}
  device::Storage allocate(device::Device& device, std::size_t bytes, device::Category category,
                           device::Tier tier) override {
    return device.allocate(bytes, category, tier);
  }
  std::unique_ptr<Backend> split(int, int) override { return nullptr; }
  void fail(const std::string& reason) noexcept override {
    std::lock_guard lock(fates_.mutex);
    if (failure_.empty()) failure_ = reason;
  }
  std::string failure() const override {
    std::lock_guard lock(fates_.mutex);
    return failure_;
  }

 private:
  Fates& fates_;
  std::string name_ = "unmoved", failure_;
};

/// Else messages would arrive in memory of calls that are gone.
TEST(Group, GivesUpWhatItStartedWhereALaterStartFails) {
  const auto device = device::make_cpu_device(1);
  const Tensor x = Tensor::zeros(*device, {4}, DType::f32);
  Fates fates;
  fates.starts_left = 2;
  const auto group = make_group(std::make_unique<Unmoved>(fates));
  std::vector<Work> works;
  for (int k = 0; k < 3; ++k) works.push_back(group->receive(x, 1, {.async = true}));
  for (Work& work : works)
    EXPECT_THAT(error_of(ErrorKind::memory, [&] { work.wait(); }), HasSubstr("no room for a copy"));
  EXPECT_EQ(fates.started.size(), 3u);
  EXPECT_EQ(fates.cancelled, fates.started);
}

TEST(Group, GivesUpATransferThatFailsToStart) {
  const auto device = device::make_cpu_device(1);
  const Tensor x = Tensor::zeros(*device, {4}, DType::f32);
  Fates fates;
  const auto group = make_group(std::make_unique<Unmoved>(fates));
  error_of(ErrorKind::memory, [&] { group->send(x, 1); });
  EXPECT_EQ(fates.cancelled, fates.started);
}

// ---- leaving ----

struct GroupCase {
  const char* name;
  void (*run)(int ranks, const CommOptions& options, const std::function<void(Communicator&)>& body);
};
class Leaving : public ::testing::TestWithParam<GroupCase> {};

void on_sockets(int ranks, CommOptions options, const std::function<void(Communicator&)>& body) {
  options.shared_memory = false;
  on_tcp_ranks(ranks, options, body);
}

INSTANTIATE_TEST_SUITE_P(
    Group, Leaving,
    ::testing::Values(
        GroupCase{"local", [](int n, const CommOptions& o, const auto& body) { run_local(n, o, body); }},
        GroupCase{"shared", [](int n, const CommOptions& o, const auto& body) { on_tcp_ranks(n, o, body); }},
        GroupCase{"sockets", [](int n, const CommOptions& o, const auto& body) { on_sockets(n, o, body); }}),
    [](const auto& test) { return std::string(test.param.name); });

/// Each waits for another that has left as well, nobody because of an error.
TEST_P(Leaving, EndsTransfersThatAreUnderWay) {
  constexpr int ranks = 3;
  std::vector<Work> open(ranks);
  const auto start = steady_clock::now();
  GetParam().run(ranks, {.timeout_seconds = 20}, [&](Communicator& comm) {
    const auto device = device::make_cpu_device(1);
    const auto part = comm.split(0, comm.rank());
    const Tensor x = Tensor::zeros(*device, {1000}, DType::f32);
    const auto me = static_cast<std::size_t>(comm.rank());
    open[me] = part->receive(x, (comm.rank() + 1) % ranks, {.label = "never", .async = true});
    comm.barrier();
  });
  EXPECT_LT(steady_clock::now() - start, std::chrono::seconds(10));
  for (Work& work : open)
    EXPECT_THAT(error_of(ErrorKind::comm, [&] { work.wait(); }),
                HasSubstr("left the group with 1 transfer under way"));
}

/// A transfer that was waited for is not under way any more, however soon its rank leaves.
TEST_P(Leaving, BreaksNothingWhereTransfersHaveEnded) {
  GetParam().run(2, {.timeout_seconds = 60}, [&](Communicator& comm) {
    const auto device = device::make_cpu_device(1);
    const Tensor x = Tensor::zeros(*device, {1000}, DType::f32),
                 y = Tensor::zeros(*device, {1000}, DType::f32);
    for (int round = 0; round < 30; ++round) {
      auto part = comm.split(0, comm.rank());
      Work sent = part->send(x, 1 - comm.rank(), {.async = true});
      Work received = part->receive(y, 1 - comm.rank(), {.async = true});
      sent.wait();
      received.wait();
      if (comm.rank() == round % 2) part.reset();
      comm.barrier();
      if (part) part->part({});  // asks nobody, and throws what the group has failed with
    }
  });
}

}  // namespace
}  // namespace sherd::comm
