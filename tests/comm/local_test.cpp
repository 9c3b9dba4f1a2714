#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <thread>

#include "base/log.h"
#include "tests/comm/conformance.h"

namespace sherd::comm {
namespace conformance {
namespace {

Case local_case(int ranks) {
  Case out;
  out.name = cat("local", ranks);
  out.ranks = ranks;
  out.options.timeout_seconds = 60;
  out.run = [ranks](const CommOptions& options, const std::function<void(Communicator&)>& body) {
    run_local(ranks, options, body);
  };
  return out;
}

INSTANTIATE_TEST_SUITE_P(Local, Conformance,
                         ::testing::Values(local_case(1), local_case(2), local_case(3), local_case(4),
                                           local_case(8)),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace conformance

namespace {

using ::testing::HasSubstr;

TEST(Local, NamesGroupsAndRanks) {
  run_local(4, CommOptions{}, [](Communicator& comm) {
    EXPECT_EQ(comm.name(), "local(4)");
    EXPECT_EQ(ThreadRank::current(), comm.rank());
    const auto part = comm.split(comm.rank() % 2, 0);
    EXPECT_EQ(part->name(), comm.rank() % 2 ? "local(2 of 4: ranks 1, 3)" : "local(2 of 4: ranks 0, 2)");
  });
  EXPECT_EQ(ThreadRank::current(), -1);
}

/// A rank that throws ends everybody's waits, in the world and in its parts, and its error is the one
/// reported.
TEST(Local, AThrowingRankEndsTheRun) {
  for (const int thrower : {0, 1, 3}) {
    const auto start = std::chrono::steady_clock::now();
    try {
      run_local(4, CommOptions{}, [&](Communicator& comm) {
        const auto part = comm.split(0, comm.rank());
        comm.barrier();
        if (comm.rank() == thrower) throw std::runtime_error("no more disk");
        (comm.rank() == 2 ? comm : *part).barrier({.label = "step"});
        ADD_FAILURE() << "the barrier let rank " << comm.rank() << " through";
      });
      ADD_FAILURE() << "nothing was thrown";
    } catch (const std::runtime_error& error) {
      EXPECT_STREQ(error.what(), "no more disk");
    }
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30));
  }
}

TEST(Local, PeersHearWhyARankFailed) {
  std::string heard;
  EXPECT_THROW(run_local(2, CommOptions{},
                         [&](Communicator& comm) {
                           if (comm.rank() == 1)
                             fail(ErrorKind::data, "token 70000 is beyond the vocabulary");
                           try {
                             comm.barrier();
                           } catch (const Error& error) {
                             heard = error.what();
                             throw;
                           }
                         }),
               Error);
  EXPECT_THAT(heard, ::testing::AllOf(HasSubstr("rank 1"), HasSubstr("token 70000")));
}

TEST(Local, ARankThatReturnsEarlyIsNamed) {
  try {
    run_local(3, CommOptions{}, [](Communicator& comm) {
      if (comm.rank() != 2) comm.barrier({.label = "last"});
    });
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::comm);
    EXPECT_THAT(error.what(), ::testing::AllOf(HasSubstr("rank 2 has left"), HasSubstr("\"last\"")));
  }
}

/// Queued calls whose peers never come must not hold the destructor of a rank that is leaving with an error.
TEST(Local, LeavingWithAnErrorDropsWhatIsQueued) {
  const auto start = std::chrono::steady_clock::now();
  EXPECT_THROW(run_local(2, {.timeout_seconds = 60},
                         [](Communicator& comm) {
                           const auto part = comm.split(0, comm.rank());
                           auto device = device::make_cpu_device(1);
                           const Tensor x = Tensor::zeros(*device, {4}, DType::f32);
                           if (comm.rank() == 0) {
                             part->all_reduce(x, ReduceOp::sum, 1, {.async = true});
                             throw std::runtime_error("gone");
                           }
                           std::this_thread::sleep_for(std::chrono::milliseconds(300));
                         }),
               std::runtime_error);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30));
}

// Under AddressSanitizer: the failing rank's tensors stay until the peer that reads them has stopped.
TEST(Local, AFailingRankDoesNotPullMemoryFromUnderItsPeers) {
  for (int round = 0; round < 5; ++round) {
    try {
      run_local(2, CommOptions{}, [](Communicator& comm) {
        const auto device = device::make_cpu_device(1);
        const std::int64_t shard = std::int64_t{4} << 20;
        const Tensor mine = Tensor::zeros(*device, {shard}, DType::f32),
                     all = Tensor::zeros(*device, {2 * shard}, DType::f32);
        CallOptions options;
        options.async = true;
        Work work = comm.all_gather({{mine, all}}, options);
        if (comm.rank() == 0) fail(ErrorKind::data, "a bad token");
        work.wait();
        comm.barrier();
      });
      ADD_FAILURE() << "rank 0's error got lost";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("a bad token"));
    }
  }
}

// A sender that fails may free its memory; a receiver that goes on gets all as it was sent, or nothing.
TEST(Local, AFailingSenderKeepsItsMemoryWhileTheReceiverCopies) {
  for (int round = 0; round < 20; ++round) {
    try {
      run_local(2, CommOptions{}, [round](Communicator& comm) {
        const auto device = device::make_cpu_device(1);
        const std::int64_t n = std::int64_t{8} << 20;
        Tensor x = Tensor::zeros(*device, {n}, DType::i32);
        comm.barrier();
        if (comm.rank() == 1) {
          comm.receive(x, 0);
          const std::int32_t* values = x.data<std::int32_t>();
          EXPECT_EQ(std::count(values, values + n, 0), n);
          return;
        }
        Work sent = comm.send(x, 1, {.async = true});
        std::this_thread::sleep_for(std::chrono::microseconds(200 * round));  // some of them in mid-copy
        comm.abort("a bad token");
        try {
          sent.wait();
        } catch (const Error&) {
        }
        std::fill_n(x.data<std::int32_t>(), n, -1);  // the memory's next user
        fail(ErrorKind::data, "a bad token");
      });
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("a bad token"));
    }
  }
}

TEST(Local, RefusesNoRanks) {
  EXPECT_THROW(run_local(0, CommOptions{}, [](Communicator&) {}), Error);
}

#ifdef SHERD_TEST_WITHOUT_MPI
TEST(Mpi, AnAbsentBackendSaysSo) {
  EXPECT_FALSE(mpi_available());
  try {
    make_mpi_world({});
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::usage);
    EXPECT_THAT(error.what(), HasSubstr("libopenmpi-dev"));
  }
}
#endif

}  // namespace
}  // namespace sherd::comm
