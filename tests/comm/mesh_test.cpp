// Two ends of a connection between ranks, without the meeting that brings ranks together.
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "comm/tcp/socket_port.h"
#include "tests/comm/conformance.h"

namespace sherd::comm {
namespace {

using conformance::error_of;
using ::testing::HasSubstr;

constexpr std::uint64_t group = 7;
constexpr int tag = 3;

/// Ranks 0 and 1 in this process.
struct Pair {
  explicit Pair(std::vector<RankIdentity> identities = {own_identity(), own_identity()},
                std::size_t most_kept = Mesh::most_kept) {
    int ends[2];
    require(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0, system_reason());
    for (int rank = 0; rank < 2; ++rank) {
      Meeting meeting;
      meeting.links.resize(2);
      meeting.links[static_cast<std::size_t>(1 - rank)] = FileDescriptor(ends[rank]);
      meeting.identities = identities;
      ranks[rank] = std::make_shared<Mesh>(rank, std::move(meeting), most_kept);
    }
  }
  ~Pair() {  // each hears the other out
    std::thread first([this] { ranks[0].reset(); });
    ranks[1].reset();
    first.join();
  }
  std::shared_ptr<Mesh> ranks[2];
};

bool comes_true(const std::function<bool()>& condition) {
  const Deadline deadline = Deadline::after_seconds(20);
  for (; !deadline.passed(); std::this_thread::sleep_for(std::chrono::milliseconds(1)))
    if (condition()) return true;
  return false;
}

TEST(Mesh, LeavingDoesNotWaitForThoseThatStay) {
  const Pair pair;
  const auto start = std::chrono::steady_clock::now();
  pair.ranks[0]->leave();
  EXPECT_TRUE(comes_true([&] { return pair.ranks[0]->has_left(); }));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(2500))
      << "3 s are for peers that hang";
}

TEST(Mesh, ACancelledMessageIsSentFromACopy) {
  const Pair pair;
  std::vector<std::byte> message(16 << 20, std::byte{5}), got(message.size());
  const Mesh::Ticket sent = pair.ranks[0]->send(1, group, tag, message.data(), message.size());
  pair.ranks[0]->cancel(sent);
  std::fill(message.begin(), message.end(), std::byte{6});
  const Mesh::Ticket received = pair.ranks[1]->receive(0, group, tag, got.data(), got.size());
  ASSERT_TRUE(comes_true([&] { return pair.ranks[1]->done(received); }));
  EXPECT_EQ(got, std::vector<std::byte>(got.size(), std::byte{5}));
}

/// A sender whose messages nobody asks for waits when a bound is reached; all arrive in the end, in order.
TEST(Mesh, KeepsWhatNobodyAskedForUpToABound) {
  constexpr std::size_t bound = 8 << 20, size = 1 << 20;
  constexpr int count = 64;
  const Pair pair({own_identity(), own_identity()}, bound);
  std::vector<std::vector<std::byte>> messages;
  std::vector<Mesh::Ticket> sent;
  for (int k = 0; k < count; ++k) {
    messages.emplace_back(size, std::byte(k));
    sent.push_back(pair.ranks[0]->send(1, group, tag, messages.back().data(), size));
  }
  const auto left = [&] {
    return std::count_if(sent.begin(), sent.end(), [&](const auto& one) { return pair.ranks[0]->done(one); });
  };
  ASSERT_TRUE(comes_true([&] { return pair.ranks[1]->kept(0) >= bound; }));
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  const std::size_t kept = pair.ranks[1]->kept(0);
  EXPECT_LT(kept, bound + (17 << 20)) << "with what is read at a time";
  EXPECT_LT(left(), count);
  for (int k = 0; k < count; ++k) {
    std::vector<std::byte> got(size);
    const Mesh::Ticket received = pair.ranks[1]->receive(0, group, tag, got.data(), size);
    ASSERT_TRUE(comes_true([&] { return pair.ranks[1]->done(received); })) << k;
    ASSERT_EQ(got, messages[static_cast<std::size_t>(k)]) << k;
  }
  EXPECT_TRUE(comes_true([&] { return left() == count; }));
  EXPECT_EQ(pair.ranks[1]->kept(0), 0u);
}

#if !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)  // they end a program that asks for so much memory
/// Nothing is read from memory that its owner takes back: the connection ends, and the other side hears of
/// it.
TEST(Mesh, WhatCannotBeCopiedEndsTheConnection) {
  constexpr std::size_t half = std::size_t{1} << 46;  // of the addresses that a process has
  void* const data = mmap(nullptr, half, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) GTEST_SKIP() << "the system gives no address range of " << half << " bytes";
  const Pair pair;
  const Mesh::Ticket lost = pair.ranks[0]->send(1, group, tag, data, half);
  pair.ranks[0]->cancel(lost);
  munmap(data, half);
  EXPECT_TRUE(pair.ranks[0]->done(lost));
  EXPECT_TRUE(comes_true([&] { return pair.ranks[1]->gone(0); }));
  EXPECT_TRUE(pair.ranks[0]->done(pair.ranks[0]->send(1, group, tag, &half, sizeof half)))
      << "it goes nowhere";
}
#endif

/// Who looks at many messages and is told of a wrong one gives up some that are done.
TEST(SocketPort, PassesOverHandlesOfWhatIsDone) {
  const Pair pair;
  std::shared_ptr<Port> ports[2];
  std::thread other([&] { ports[1] = make_socket_port(pair.ranks[1], false, {20, "setting up"}); });
  ports[0] = make_socket_port(pair.ranks[0], false, {20, "setting up"});
  other.join();
  const int word = 11;
  const int sent = ports[0]->send(&word, sizeof word, 1, tag);
  ASSERT_TRUE(comes_true([&] { return ports[0]->test(sent); }));
  EXPECT_TRUE(ports[0]->release(sent));
  EXPECT_TRUE(ports[0]->cancel(sent));
}

/// A rank's memory goes with its process: who then cannot map it says so, and does not ask for memory.
TEST(SocketPort, NamesTheRankWhoseMemoryWentWithIt) {
  const pid_t child = fork();
  if (child == 0) _exit(0);
  const RankIdentity mine = own_identity();
  RankIdentity ended = mine;
  ended.pid = child;
  siginfo_t info{};
  ASSERT_EQ(waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT), 0);
  const Pair pair({mine, ended});
  std::string said[2];
  std::thread other([&] {
    said[1] = error_of(ErrorKind::comm, [&] { make_socket_port(pair.ranks[1], true, {20, "setting up"}); });
  });
  said[0] = error_of(ErrorKind::comm, [&] { make_socket_port(pair.ranks[0], true, {20, "setting up"}); });
  other.join();
  for (const std::string& text : said) EXPECT_THAT(text, HasSubstr("rank 1 is dead"));
  waitpid(child, nullptr, 0);
}

/// Rank 2 dies after its word to rank 0 and before that to rank 1, who leaves for it: rank 0 blames rank 2.
TEST(SocketPort, NamesTheRankThatDiedAndNotWhoLeftForIt) {
  constexpr int size = 3;
  Meeting meetings[size];
  for (Meeting& meeting : meetings)
    meeting.links.resize(size), meeting.identities.assign(size, own_identity());
  for (std::size_t a = 0; a < size; ++a)
    for (std::size_t b = a + 1; b < size; ++b) {
      int ends[2];
      ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends), 0);
      meetings[a].links[b] = FileDescriptor(ends[0]), meetings[b].links[a] = FileDescriptor(ends[1]);
    }
  const auto mesh = [&](int rank) { return std::make_shared<Mesh>(rank, std::move(meetings[rank])); };
  const auto first = mesh(0);
  const std::int64_t word = 0;  // sent as ports of the world's group do
  first->send_copy(1, 1, -2, &word, sizeof word);
  mesh(2)->send_copy(0, 1, -2, &word, sizeof word);
  EXPECT_THAT(error_of(ErrorKind::comm,
                       [&] {
                         make_socket_port(mesh(1), false, {20, "setting up"});
                       }),
              HasSubstr("rank 2 is dead"));
  const auto port = make_socket_port(first, false, {20, "setting up"});
  EXPECT_THAT(error_of(ErrorKind::comm, [&] { port->meet({20, "meeting"}); }), HasSubstr("rank 2 is dead"));
}

}  // namespace
}  // namespace sherd::comm
