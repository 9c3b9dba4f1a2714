// A rank of a tensor or context group that fails or dies while others are in collectives of other groups: all
// ranks of the world end at once, each with an error that tells which rank it was, or of which group.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>

#include "support/equality_processes.h"
#include "tests/comm/tcp_ranks.h"

namespace sherd::test {
namespace {

using sherd::testing::TempFolder;
using ::testing::HasSubstr;
using Clock = std::chrono::steady_clock;

/// Four ranks: tensor groups {0, 1} and {2, 3}, context groups {0, 2} and {1, 3}.
RunSpec square() {
  RunSpec spec;
  spec.ranks = 4, spec.tensor = 2, spec.context = 2;
  spec.stage = 3, spec.layers = 2, spec.steps = 1000;
  return spec;
}

auto names_rank_3() {
  return HasSubstr("rank 3 ");
}

struct RankStart {
  const char* name;
  StartRanks start;
};
void PrintTo(const RankStart& variant, std::ostream* out) {
  *out << variant.name;
}

StartRanks over_tcp(bool shared_memory, std::vector<int> machines = {}) {
  return [=](int ranks, comm::CommOptions options, const auto& body) {
    options.shared_memory = shared_memory;
    comm::on_tcp_ranks(ranks, options, body, machines);
  };
}

class FailingRank : public ::testing::TestWithParam<RankStart> {};

TEST_P(FailingRank, EndsAllWithOneError) {
  RunSpec spec = square();
  spec.before_batch = [](int rank, int step) {
    if (rank == 3 && step == 2) fail(ErrorKind::data, "shard 17 is cut short");
  };
  std::vector<std::string> errors(4);
  const auto start = Clock::now();
  const auto tells = [&](int ranks, const comm::CommOptions& options, const auto& body) {
    GetParam().start(ranks, options, [&](comm::Communicator& world) {
      try {
        body(world);
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), world.rank() == 3 ? ErrorKind::data : ErrorKind::comm);
        errors[static_cast<std::size_t>(world.rank())] = error.what();
        world.abort(error.what());  // as launch_ranks() does
        throw;
      }
    });
  };
  EXPECT_THROW(train_on(tells, spec), Error);
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(30));
  EXPECT_EQ(errors[3], "shard 17 is cut short");
  for (int rank = 0; rank < 3; ++rank)
    EXPECT_THAT(errors[static_cast<std::size_t>(rank)], names_rank_3()) << "on rank " << rank;
}

INSTANTIATE_TEST_SUITE_P(
    Over, FailingRank,
    ::testing::Values(RankStart{"local", [](int ranks, const comm::CommOptions& options,
                                            const auto& body) { comm::run_local(ranks, options, body); }},
                      RankStart{"tcp", over_tcp(true)}, RankStart{"tcp_messages", over_tcp(false)},
                      RankStart{"tcp_pairs", over_tcp(true, {0, 0, 1, 1})},
                      RankStart{"tcp_interleaved", over_tcp(true, {0, 1, 0, 1})}),
    [](const auto& test) { return std::string(test.param.name); });

struct Killed {
  const char* name;
  bool shared_memory;
  const char* machines;
};
void PrintTo(const Killed& killed, std::ostream* out) {
  *out << killed.name;
}

class KilledRank : public ::testing::TestWithParam<Killed> {};

TEST_P(KilledRank, EndsAllWithOneError) {
  const TempFolder folder;
  const RunSpec spec = square();
  const Processes how{.launcher = tcp_launcher(spec.ranks),
                      .shared_memory = GetParam().shared_memory,
                      .machines = GetParam().machines};
  const std::string told = (folder / "told").string();
  const auto start = Clock::now();
  const std::string command =
      cat(processes_command(how, spec, (folder / "bits").string(), folder), " killed=3 2>", told);
  EXPECT_NE(std::system(command.c_str()), 0);
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(30));
  std::ifstream in(told);
  int errors = 0;
  for (std::string line; std::getline(in, line);) {
    if (line.find("error: ") == std::string::npos) continue;
    ++errors;
    EXPECT_THAT(line, names_rank_3());
    EXPECT_THAT(line, HasSubstr("is dead"));
  }
  EXPECT_EQ(errors, 3) << "one from each rank that lives\n" << sherd::testing::read_text(told);
}

INSTANTIATE_TEST_SUITE_P(Over, KilledRank,
                         ::testing::Values(Killed{"tcp", true, ""}, Killed{"tcp_messages", false, ""},
                                           Killed{"tcp_interleaved", true, "0101"}),
                         [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace sherd::test
