// Point to point as pipelines use it: receives posted before their data is made, two communicators of the
// same ranks, several peers at a time; and who is named when one of a chain of ranks does not come.
#include <time.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "support/full_suite.h"
#include "tests/comm/conformance.h"

namespace sherd::comm::conformance {
namespace {

using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::HasSubstr;

CallOptions later(const char* label) {
  CallOptions out;
  out.label = label, out.async = true;
  return out;
}

/// Each rank has receives of all others posted, in the order opposite to that in which they come: rank r
/// sends when it has what rank r − 1 sent.
TEST_P(Conformance, AReceivePostedEarlyHoldsNothingUp) {
  run([&](Communicator& comm) {
    Tensors tensors(comm, device(comm));
    const int me = comm.rank(), n = comm.size();
    for (const std::int64_t elements : {std::int64_t{7}, std::int64_t{40'000}}) {
      std::vector<Tensor> in;
      std::vector<Work> received(static_cast<std::size_t>(n)), sent;
      for (int r = 0; r < n; ++r) in.push_back(tensors.make(elements, DType::f32, false));
      const Tensor out = tensors.make(elements, DType::f32, false);
      tensors.fill<float>(out, me);
      for (int r = n; r-- > 0;)
        if (r != me)
          received[static_cast<std::size_t>(r)] =
              comm.receive(in[static_cast<std::size_t>(r)], r, later("early"));
      if (me > 0) received[static_cast<std::size_t>(me) - 1].wait();
      for (int r = 0; r < n; ++r)
        if (r != me) sent.push_back(comm.send(out, r, later("late")));
      for (int r = 0; r < n; ++r) {
        if (r == me) continue;
        received[static_cast<std::size_t>(r)].wait();
        tensors.expect_bits<float>(
            in[static_cast<std::size_t>(r)], [&](std::int64_t i) { return element<float>(r, i); },
            cat("from ", r));
      }
      for (Work& work : sent) work.wait();
    }
  });
}

/// A pair makes its messages from those that it received, while the next receive is posted: activations one
/// way on one communicator, gradients the other way on another, tiny and large ones among each other.
TEST_P(Conformance, TwoCommunicatorsCarryBothDirectionsOfAPipeline) {
  run([&](Communicator& comm) {
    Tensors tensors(comm, device(comm));
    const auto down = comm.split(0, comm.rank()), up = comm.split(0, comm.rank());
    const int me = comm.rank(), last = comm.size() - 1;
    const bool large = comm.size() == 2;  // tens of megabytes, once
    constexpr int rounds = 6;
    const auto elements = [&](int k) {
      return k == 3 && large ? std::int64_t{5'000'011} : std::int64_t{1} + 900 * k;
    };
    std::vector<Tensor> x, dx;
    std::vector<Work> posted(rounds), posted_back(rounds), sends;
    for (int k = 0; k < rounds; ++k) {
      x.push_back(tensors.make(elements(k), DType::i32, false));
      dx.push_back(tensors.make(elements(k), DType::i32, false));
    }
    const auto at = [](auto& all, int k) -> auto& {
      return all[static_cast<std::size_t>(k)];
    };
    const auto post = [&](int k) {
      if (k < rounds && me > 0) at(posted, k) = down->receive(at(x, k), me - 1, later("activation"));
    };
    const auto post_back = [&](int k) {
      if (k < rounds && me < last) at(posted_back, k) = up->receive(at(dx, k), me + 1, later("gradient"));
    };
    const auto value = [](int k, std::int64_t i) { return static_cast<std::int32_t>(1000 * k + i % 97); };
    const auto forward = [&](int k) {
      post(k + 1);
      at(posted, k).wait();
      if (me == 0) tensors.set<std::int32_t>(at(x, k), [&](std::int64_t i) { return value(k, i); });
      tensors.expect_bits<std::int32_t>(
          at(x, k), [&](std::int64_t i) { return value(k, i); }, cat("activation ", k));
      if (me < last) sends.push_back(down->send(at(x, k), me + 1, later("activation")));
    };
    const auto backward = [&](int k) {
      post_back(k + 1);
      at(posted_back, k).wait();
      if (me == last) tensors.set<std::int32_t>(at(dx, k), [&](std::int64_t i) { return -value(k, i); });
      tensors.expect_bits<std::int32_t>(
          at(dx, k), [&](std::int64_t i) { return -value(k, i); }, cat("gradient ", k));
      if (me > 0) sends.push_back(up->send(at(dx, k), me - 1, later("gradient")));
    };
    const int ahead = std::min(rounds, last - me);  // as 1F1B
    post(0), post_back(0);
    for (int k = 0; k < ahead; ++k) forward(k);
    for (int k = 0; k < rounds; ++k) {
      if (k + ahead < rounds) forward(k + ahead);
      backward(k);
    }
    for (Work& work : sends) work.wait();
  });
}

double processor_seconds() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

/// Ranks may share cores with those for which they wait.
TEST_P(Conformance, WhoWaitsForATransferLeavesItsCoreToOthers) {
  if (ranks() != 2 && ranks() != 3) GTEST_SKIP() << "waits, so on two and three ranks only";
  run([&](Communicator& comm) {
    Tensors tensors(comm, device(comm));
    const Tensor x = tensors.make(100, DType::f32, false), y = tensors.make(100, DType::f32, false);
    tensors.zero(x);
    comm.barrier();
    const double before = processor_seconds();
    constexpr milliseconds nap{250};
    if (comm.rank() == 1) {
      std::this_thread::sleep_for(nap);
      comm.send(x, 0).wait();
    } else if (comm.rank() == 0) {
      Work early = comm.receive(y, 1, later("early"));
      early.wait();
    }
    tensors.finish();
    comm.barrier();
    // In a process with all ranks these are the waits of all of them.
    EXPECT_LT(processor_seconds() - before, 0.4 * 1e-3 * static_cast<double>(nap.count()) * ranks());
  });
}

/// Rank 0 waits for rank 1 and loses patience first; rank 1 waits for rank 2 in another group, and rank 2 for
/// nobody, though it has a receive posted. All name rank 2.
TEST_P(Conformance, WhoHoldsUpAChainOfRanksIsNamed) {
  if (ranks() != 3 && !(ranks() == 4 && test::full_suite())) GTEST_SKIP() << "waits, so on three ranks only";
  if (!GetParam().one_machine) GTEST_SKIP() << "of ranks of other machines nobody knows for whom they wait";
  CommOptions options = GetParam().options;
  options.timeout_seconds = 1.5;  // also for all to meet, on a busy machine
  run(options, [&](Communicator& comm) {
    Tensors tensors(comm, device(comm));
    const auto down = comm.split(0, comm.rank()), up = comm.split(0, comm.rank());
    const Tensor x = tensors.make(20, DType::f32, false), y = tensors.make(20, DType::f32, false);
    comm.barrier();
    const std::string text = error_of(ErrorKind::comm, [&] {
      if (comm.rank() == 0) up->receive(x, 1, later("gradient")).wait();
      if (comm.rank() == 1) {
        std::this_thread::sleep_for(milliseconds(300));
        down->receive(x, 2, later("activation")).wait();
      }
      Work posted = down->receive(y, 0, later("unused"));
      wait_for_failure(*up);
    });
    down->abort(text);  // as who leaves because of an error
    EXPECT_THAT(text, HasSubstr("rank 2 did not come within 1.5 s"));
    if (comm.rank() != 1) {
      EXPECT_THAT(text, HasSubstr("rank 0 waited for rank 1, that for rank 2"));
    }
  });
}

/// Errors of transfers with several peers name only the late ones.
TEST_P(Conformance, OnlyThePeerOfALateTransferIsNamed) {
  if (ranks() != 3) GTEST_SKIP() << "waits, so on three ranks only";
  CommOptions options = GetParam().options;
  options.timeout_seconds = 1.5;
  run(options, [&](Communicator& comm) {
    Tensors tensors(comm, device(comm));
    const Tensor x = tensors.make(20, DType::f32, false), y = tensors.make(20, DType::f32, false);
    comm.barrier();
    const std::string text = error_of(ErrorKind::comm, [&] {
      if (comm.rank() != 0) wait_for_failure(comm);
      Work late = comm.receive(x, 2, later("late"));
      std::this_thread::sleep_for(milliseconds(700));
      Work posted = comm.receive(y, 1, later("in time"));
      late.wait();
    });
    EXPECT_THAT(text, AllOf(HasSubstr("rank 2 did not come within 1.5 s"), HasSubstr("\"late\"")));
  });
}

}  // namespace
}  // namespace sherd::comm::conformance
