// Messages that leave a rank, their order and their tags, over a port that moves nothing: the test says when
// one is done.
#include "comm/messages/messages.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <set>

#include "support/expect_error.h"

namespace sherd::comm {
namespace {

using ::testing::ElementsAre;

class ManualPort final : public Port {
 public:
  struct Message {
    bool sending = false;
    const std::byte* data = nullptr;
    std::size_t bytes = 0;
    int tag = 0;
    bool done = false;
  };
  std::vector<Message> messages;

  std::string kind() const override { return "manual"; }
  void on_leave(std::function<void()>) override {}
  int rank() const override { return 0; }
  int size() const override { return 2; }
  const std::vector<int>& world_ranks() const override { return ranks_; }
  int world_size() const override { return 2; }
  std::vector<std::uint64_t> machines() const override { return {0, 1}; }
  bool crowded() const override { return false; }
  LocalPlace place() const override { return {}; }
  bool gone(int) const override { return false; }
  std::shared_ptr<Port> split(int, int, const Patience&) override { return nullptr; }
  std::vector<std::byte*> shared_window(std::size_t, const Patience&) override { return {}; }
  std::uint64_t from_first(std::uint64_t value, const Patience&) override { return value; }
  void meet(const Patience&) override {}
  int send(const void* data, std::size_t bytes, int, int tag) override { return add(true, data, bytes, tag); }
  int receive(void* data, std::size_t bytes, int, int tag) override { return add(false, data, bytes, tag); }
  bool test(int request) override { return messages[static_cast<std::size_t>(request)].done; }
  bool cancel(int) noexcept override { return true; }
  bool release(int) noexcept override { return true; }
  std::uint64_t news() override { return 0; }
  std::uint64_t pause(std::uint64_t, int) override { return 0; }
  void broadcast_failure(const std::string&) noexcept override {}
  std::string poll_failure() override { return ""; }

 private:
  int add(bool sending, const void* data, std::size_t bytes, int tag) {
    messages.push_back({sending, static_cast<const std::byte*>(data), bytes, tag});
    return static_cast<int>(messages.size()) - 1;
  }
  std::vector<int> ranks_{0, 1};
};

/// Rank 0 of two ranks on two machines.
class MessagesTest : public ::testing::Test {
 protected:
  static Call call(const std::string& label) {
    Call out;
    out.kind = Collective::barrier, out.label = label;
    return out;
  }
  /// Where the messages from `first` on begin, in a tensor at `base`, and their sizes.
  std::vector<std::pair<std::ptrdiff_t, std::size_t>> places(std::size_t first, const std::byte* base) const {
    std::vector<std::pair<std::ptrdiff_t, std::size_t>> out;
    for (std::size_t i = first; i < port->messages.size(); ++i)
      if (port->messages[i].bytes > 1)
        out.emplace_back(port->messages[i].data - base, port->messages[i].bytes);
    return out;
  }

  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  std::shared_ptr<Board> make_board() {
    Board::prepare(memory_.get(), layout_);
    BoardSettings settings;
    settings.name = "manual", settings.ranks = settings.world = {0};
    return std::make_shared<Board>(0, layout_, std::vector{memory_.get()}, std::move(settings));
  }

  BoardLayout layout_;  // of one rank
  std::unique_ptr<std::byte, Free> memory_{
      static_cast<std::byte*>(std::aligned_alloc(4096, layout_.segment_bytes()))};
  std::shared_ptr<Board> board = make_board();
  std::shared_ptr<ManualPort> port = std::make_shared<ManualPort>();
  Messages messages{port, "manual", std::make_shared<Topology>(Topology::apart(0, 2)), 60, nullptr};
  std::shared_ptr<device::Device> device = device::make_cpu_device(1);
};

TEST_F(MessagesTest, OfDifferentCallsDoNotMeet) {
  std::vector<int> tags;
  const std::byte x{};
  for (const char* label : {"one", "other"}) {
    messages.open(call(label));
    messages.send(1, &x, 1);
    tags.push_back(port->messages.back().tag);
  }
  EXPECT_NE(tags[0], tags[1]);
}

TEST_F(MessagesTest, PayloadsLeaveInTheOrderInWhichTheyWereAskedFor) {
  messages.open(call("sums"));
  const std::vector<std::byte> first(3 * Messages::eager_bytes), second(first.size());
  messages.send(1, first.data(), first.size());
  messages.send(1, second.data(), second.size());
  const std::size_t before = port->messages.size();
  // Word that the second may come is here before the first's was looked at again.
  port->messages[before - 1].done = true;
  messages.progress();
  EXPECT_EQ(port->messages.size(), before);
  port->messages[before - 2].done = true;
  messages.progress();
  ASSERT_EQ(port->messages.size(), before + 2);
  EXPECT_EQ(port->messages[before].data, first.data());
  EXPECT_EQ(port->messages[before + 1].data, second.data());
}

TEST_F(MessagesTest, OnlyTheFirstBytesOfACallLeaveUnasked) {
  messages.open(call("sums"));
  const std::vector<std::byte> x(Messages::eager_bytes);
  messages.send(1, x.data(), x.size());
  EXPECT_TRUE(port->messages.back().sending);
  messages.send(1, x.data(), 1);
  EXPECT_FALSE(port->messages.back().sending) << "waits for the receiver's word";
}

/// Nor may what this rank has sent for its next calls pile up at others.
TEST_F(MessagesTest, ACallEndsOnceThePreviousMachineIsKnownToMakeIt) {
  Messages hasty(port, "manual", std::make_shared<Topology>(Topology::apart(0, 2)), 0.1, nullptr);
  hasty.use_board(board);
  const Call sums = call("sums");
  hasty.open(sums);
  for (ManualPort::Message& message : port->messages) message.done = message.sending;
  sherd::testing::expect_error(ErrorKind::comm, "rank 1 did not come within 0.1 s",
                               [&] { hasty.finish(sums); });
}

constexpr auto most = static_cast<std::ptrdiff_t>(Messages::longest_message);

TEST_F(MessagesTest, LongOnesGoInParts) {
  // Nobody touches these bytes.
  const Tensor x = Tensor::empty(*device, {2 * most + 5}, DType::u8);
  const auto parts =
      ElementsAre(std::pair(std::ptrdiff_t{0}, Messages::longest_message),
                  std::pair(most, Messages::longest_message), std::pair(2 * most, std::size_t{5}));
  messages.open(call("weights"));
  messages.send(1, x.raw(), x.bytes());
  std::size_t before = port->messages.size();
  port->messages.back().done = true;
  messages.progress();
  EXPECT_THAT(places(before, x.raw()), parts);
  before = port->messages.size();
  messages.receive(1, x.raw(), x.bytes());
  EXPECT_THAT(places(before, x.raw()), parts);
}

TEST_F(MessagesTest, LongTransfersGoInParts) {
  MessageTransfers transfers(messages, *board);
  Call transfer;
  transfer.x = Tensor::empty(*device, {most + 5}, DType::u8);
  transfer.peer = 1;
  const auto parts =
      ElementsAre(std::pair(std::ptrdiff_t{0}, Messages::longest_message), std::pair(most, std::size_t{5}));
  for (const Collective kind : {Collective::send, Collective::receive}) {
    transfer.kind = kind;
    transfers.start(transfer);
    for (auto& message : port->messages) message.done = true;
    if (kind == Collective::receive) transfer.envelope->call = sign(transfer);
    const std::size_t before = port->messages.size();
    EXPECT_FALSE(transfers.advance(transfer));
    EXPECT_THAT(places(before, transfer.x.raw()), parts);
    EXPECT_FALSE(transfers.advance(transfer)) << "its payload is under way";
    for (auto& message : port->messages) message.done = true;
    EXPECT_TRUE(transfers.advance(transfer));
  }
}

/// Whichever transfer of a pair is looked at first gets its own bytes.
TEST_F(MessagesTest, TransfersHaveTagsOfTheirOwn) {
  MessageTransfers transfers(messages, *board);
  std::vector<std::set<int>> tags(2);
  for (std::set<int>& mine : tags) {
    Call transfer;
    transfer.kind = Collective::receive, transfer.peer = 1;
    transfer.x = Tensor::empty(*device, {10}, DType::u8);
    const std::size_t before = port->messages.size();
    transfers.start(transfer);
    port->messages.back().done = true;
    transfer.envelope->call = sign(transfer);
    transfers.advance(transfer);
    for (std::size_t i = before; i < port->messages.size(); ++i) mine.insert(port->messages[i].tag);
    EXPECT_EQ(mine.size(), 3u) << "the signature's, the payload's and that of the word that it may come";
  }
  for (const int tag : tags[0]) EXPECT_EQ(tags[1].count(tag), 0u);
}

}  // namespace
}  // namespace sherd::comm
