#include <chrono>
#include <cstdlib>
#include <thread>

#include "base/arena.h"
#include "support/full_suite.h"
#include "tests/comm/conformance.h"

namespace sherd::comm::conformance {
namespace {

using std::chrono::steady_clock;
using ::testing::HasSubstr;

double seconds_since(steady_clock::time_point start) {
  return std::chrono::duration<double>(steady_clock::now() - start).count();
}

/// Every rank calls `mine`; all must get one comm error that has every one of `words`, at this and at the
/// next call.
void expect_mismatch(Tensors& tensors, const std::function<void()>& mine,
                     const std::vector<std::string>& words) {
  Communicator& comm = tensors.comm();
  const auto start = steady_clock::now();
  const std::string text = error_of(ErrorKind::comm, [&] {
    comm.barrier();  // all have left earlier calls, which a failure would end as well
    mine();
    tensors.finish();
    // Ranks hear of calls that are only queued when they meet, of the last when others do not come again.
    comm.barrier();
    comm.barrier();
  });
  EXPECT_LT(seconds_since(start), 30.0);
  for (const std::string& word : words) EXPECT_THAT(text, HasSubstr(word));
  EXPECT_EQ(error_of(ErrorKind::comm, [&] { comm.barrier(); }), text) << "a broken group stays broken";
}

TEST_P(Conformance, DifferentCollectivesAreNamed) {
  if (ranks() == 1) GTEST_SKIP() << "needs a second rank";
  run([&](Communicator& comm) {
    Tensors tensors(comm, device(comm));
    const Tensor x = tensors.make(100, DType::f32, false);
    const auto call = [&] {
      if (comm.rank() == comm.size() - 1)
        comm.broadcast(x, 0, {.label = "weights"});
      else
        comm.all_reduce(x, ReduceOp::sum, 1, {.label = "loss"});
    };
    expect_mismatch(tensors, call,
                    {"mismatched calls", cat("rank ", comm.size() - 1, " called broadcast"),
                     "all_reduce (sum)", "\"weights\"", "\"loss\"", comm.name()});
  });
}

TEST_P(Conformance, DifferentCountsTypesAndOpsAreNamed) {
  if (ranks() == 1) GTEST_SKIP() << "needs a second rank";
  struct Variant {
    std::int64_t n;
    DType dtype;
    ReduceOp op;
    double factor;
    std::vector<std::string> words;
  };
  const std::vector<Variant> variants{{99, DType::f32, ReduceOp::sum, 1, {"of 99 fp32", "of 100 fp32"}},
                                      {100, DType::bf16, ReduceOp::sum, 1, {"bf16", "fp32"}},
                                      {100, DType::f32, ReduceOp::max, 1, {"(max)", "(sum)"}},
                                      {100, DType::f32, ReduceOp::sum, 0.5, {"factors differ"}}};
  for (const Variant& v : variants)
    run([&](Communicator& comm) {
      Tensors tensors(comm, device(comm));
      const bool odd = comm.rank() == 1;
      const Tensor x = tensors.make(odd ? v.n : 100, odd ? v.dtype : DType::f32, false);
      tensors.zero(x);
      expect_mismatch(
          tensors, [&] { comm.all_reduce(x, odd ? v.op : ReduceOp::sum, odd ? v.factor : 1.0); }, v.words);
    });
}

TEST_P(Conformance, DifferentPiecesAreNamed) {
  if (ranks() == 1) GTEST_SKIP() << "needs a second rank";
  run([&](Communicator& comm) {
    Tensors tensors(comm, device(comm));
    const Tensor a = tensors.make(10, DType::f32, false), b = tensors.make(20, DType::f32, false);
    const Tensor fa = tensors.make(10 * comm.size(), DType::f32, false),
                 fb = tensors.make(20 * comm.size(), DType::f32, false);
    std::vector<GatherPiece> pieces{{a, fa}, {b, fb}};
    if (comm.rank() == 0) std::swap(pieces[0], pieces[1]);
    expect_mismatch(tensors, [&] { comm.all_gather(pieces); },
                    {"rank 0 called all_gather", "in 2 pieces", "extents"});
  });
}

/// Ranks never add up different things of one size, also where only the end of a long label tells them apart.
TEST_P(Conformance, LabelsAreComparedWhole) {
  if (ranks() == 1) GTEST_SKIP() << "needs a second rank";
  run([&](Communicator& comm) {
    Tensors tensors(comm, device(comm));
    const Tensor x = tensors.make(100, DType::f32, false);
    tensors.zero(x);
    const std::string label = std::string(200, 'a') + (comm.rank() == 0 ? "block1" : "block2");
    expect_mismatch(tensors, [&] { comm.all_reduce(x, ReduceOp::sum, 1, {.label = label}); },
                    {"mismatched calls", "rank 0 called all_reduce", "the labels' ends"});
  });
}

TEST_P(Conformance, DifferentBlocksOfAllToAllAreNamed) {
  if (ranks() == 1) GTEST_SKIP() << "needs a second rank";
  run([&](Communicator& comm) {
    Tensors tensors(comm, device(comm));
    const Tensor in = tensors.make(4 * comm.size(), DType::f32, false);
    const Tensor out = tensors.make(4 * comm.size() + (comm.rank() == 1), DType::f32, false);
    tensors.zero(in);
    std::vector<std::int64_t> counts(static_cast<std::size_t>(comm.size()), 4), mine = counts;
    if (comm.rank() == 1) mine[0] = 5;
    expect_mismatch(tensors, [&] { comm.all_to_all(in, out, counts, mine); },
                    {"rank 0 has 4 elements for rank 1, which expects 5"});
  });
}

TEST_P(Conformance, DifferentTransfersAreNamed) {
  if (ranks() == 1) GTEST_SKIP() << "needs a second rank";
  run([&](Communicator& comm) {
    Tensors tensors(comm, device(comm));
    const Tensor x = tensors.make(comm.rank() == 0 ? 8 : 9, DType::f32, false);
    tensors.zero(x);
    const auto call = [&] {
      if (comm.rank() == 0) {
        comm.send(x, 1, {.label = "up"});
        comm.barrier();  // where a message is on its way at once, the sender hears of it at its next call
      } else if (comm.rank() == 1) {
        comm.receive(x, 0, {.label = "down"});
      } else {
        comm.barrier();
      }
    };
    expect_mismatch(tensors, call,
                    {"mismatched transfer", "send of 8 fp32", "receive of 9 fp32", "\"up\"", "\"down\""});
  });
}

/// In a part that numbers them from the last on: whatever ranks call, errors say who they are in the world.
TEST_P(Conformance, RanksOfAPartHaveTheWorldsNumbersInErrors) {
  if (ranks() == 1) GTEST_SKIP() << "needs a second rank";
  const int first = ranks() - 1, second = ranks() - 2;  // of the part
  using Calls = std::function<void(Tensors&)>;
  const Calls roots = [](Tensors& tensors) {
    Communicator& part = tensors.comm();
    const Tensor x = tensors.make(20, DType::f32, false);
    tensors.zero(x);
    part.broadcast(x, part.rank() == 0 ? 1 : 0);
  };
  const Calls counts = [](Tensors& tensors) {
    Communicator& part = tensors.comm();
    const Tensor in = tensors.make(4 * part.size(), DType::f32, false);
    const Tensor out = tensors.make(4 * part.size() + (part.rank() == 1), DType::f32, false);
    tensors.zero(in);
    std::vector<std::int64_t> sent(static_cast<std::size_t>(part.size()), 4), taken = sent;
    if (part.rank() == 1) taken[0] = 5;
    part.all_to_all(in, out, sent, taken);
  };
  const Calls transfers = [](Tensors& tensors) {
    Communicator& part = tensors.comm();
    const Tensor x = tensors.make(part.rank() == 0 ? 8 : 9, DType::f32, false);
    tensors.zero(x);
    if (part.rank() == 0) part.send(x, 1);
    if (part.rank() == 1) part.receive(x, 0);
    part.barrier();
  };
  const Calls aborts = [](Tensors& tensors) {
    if (tensors.comm().rank() == 0) tensors.comm().abort("byte 17");
  };
  const auto named = [](int rank, const char* does) { return cat("rank ", rank, ' ', does); };
  const std::vector<std::pair<Calls, std::vector<std::string>>> all{
      {roots, {named(first, "called broadcast from rank "), named(second, "of 20"), named(first, "of 20")}},
      {counts, {named(first, "has 4 elements for rank "), cat("for rank ", second, ", which expects 5")}},
      {transfers,
       {named(first, "called send of 8 fp32 to rank "),
        named(second, "called receive of 9 fp32 from rank ")}},
      {aborts, {named(first, "failed: byte 17")}}};
  for (const auto& [calls, words] : all)
    run([&, &calls = calls, &words = words](Communicator& comm) {
      const auto part = comm.split(0, -comm.rank());
      Tensors tensors(*part, device(*part));
      expect_mismatch(
          tensors, [&] { calls(tensors); }, words);
    });
}

TEST_P(Conformance, AsynchronousErrorsComeAtWait) {
  if (ranks() == 1) GTEST_SKIP() << "needs a second rank";
  run([&](Communicator& comm) {
    Tensors tensors(comm, device(comm));
    const Tensor x = tensors.make(comm.rank() == 0 ? 10 : 11, DType::f32, false);
    tensors.zero(x);
    std::vector<Work> works;
    std::string first;
    // The error may already be there when a later one is queued.
    const auto queue = [&] {
      comm.barrier();  // all have left earlier calls, which a failure would end as well
      for (int k = 0; k < 3; ++k)
        works.push_back(comm.all_reduce(x, ReduceOp::sum, 1, {.label = "bucket", .async = true}));
      works.back().wait();
      tensors.finish();
    };
    first = error_of(ErrorKind::comm, queue);
    if (GetParam().queues) works.clear();  // their waits only order streams
    for (Work& work : works) EXPECT_EQ(error_of(ErrorKind::comm, [&] { work.wait(); }), first);
    EXPECT_THAT(first, HasSubstr("\"bucket\""));
  });
}

/// Also by those who wait for a rank of their machine that itself waits for the late one's message.
TEST_P(Conformance, ALateRankIsNamedAtTheDeadline) {
  // Where ranks poll for messages and take turns on a processor, who is late is a matter of luck.
  if (ranks() > available_cores() && std::getenv("OMPI_COMM_WORLD_RANK"))
    GTEST_SKIP() << "needs a processor for each rank under mpirun";
  if (ranks() != 2 && ranks() != 3) GTEST_SKIP() << "waits, so on two and three ranks only";
  CommOptions options = GetParam().options;
  options.timeout_seconds = 1.5;  // also for all to meet, on a busy machine
  const auto sum_of = [](std::int64_t n) {
    return [n](Tensors& tensors) {
      tensors.comm().all_reduce(tensors.make(n, DType::f32, false), ReduceOp::sum, 1, {.label = "late"});
    };
  };
  std::vector<std::pair<const char*, std::function<void(Tensors&)>>> calls{
      {"all_reduce", sum_of(2000)}, {"all_reduce", sum_of(1)}, {"barrier", [](Tensors& tensors) {
                                                                  tensors.comm().barrier({.label = "late"});
                                                                }}};
  // Each waits for its deadline: one call on each case, each call on several.
  if (!test::full_suite())
    calls = {calls[(GetParam().name.size() + static_cast<std::size_t>(ranks())) % calls.size()]};
  for (const auto& [name, call] : calls)
    run(options, [&](Communicator& world) {
      // Ranks of a part that counts them from the last on still have the world's numbers.
      const auto part = world.split(0, -world.rank());
      Communicator& comm = *part;
      Tensors tensors(comm, device(comm));
      comm.barrier();
      const auto start = steady_clock::now();
      const std::string text = error_of(ErrorKind::comm, [&] {
        if (world.rank() == 1) wait_for_failure(comm);
        call(tensors);
        tensors.finish();
      });
      EXPECT_THAT(text, ::testing::AllOf(HasSubstr("rank 1 did not come within 1.5 s"), HasSubstr(name),
                                         HasSubstr("\"late\"")));
      EXPECT_LT(seconds_since(start), 30.0);
    });
}

TEST_P(Conformance, AReceiveWithoutASendEndsAtTheDeadline) {
  if (ranks() != 2 && ranks() != 3) GTEST_SKIP() << "waits, so on two and three ranks only";
  CommOptions options = GetParam().options;
  options.timeout_seconds = 1.5;  // also for all to meet, on a busy machine
  run(options, [&](Communicator& world) {
    const auto part = world.split(0, -world.rank());
    Communicator& comm = *part;
    Tensors tensors(comm, device(comm));
    const Tensor x = tensors.make(20, DType::f32, false);
    comm.barrier();
    if (world.rank() == 0) {
      const std::string text =
          error_of(ErrorKind::comm, [&] { comm.receive(x, comm.size() - 2, {.label = "never"}); });
      EXPECT_THAT(text,
                  ::testing::AllOf(HasSubstr("rank 1 did not come within 1.5 s"),
                                   HasSubstr("receive of 20 fp32 from rank 1"), HasSubstr("\"never\"")));
    } else {
      // Stays until rank 0's failure has broken the group.
      error_of(ErrorKind::comm, [&] { wait_for_failure(comm); });
    }
  });
}

TEST_P(Conformance, AbortEndsWaitsWithItsReason) {
  if (ranks() == 1) GTEST_SKIP() << "needs a second rank";
  run([&](Communicator& comm) {
    const auto part = comm.split(0, 0);
    const auto start = steady_clock::now();
    if (comm.rank() == comm.size() - 1) {
      comm.barrier();  // all have left the split, which a failure would end as well
      comm.abort("the dataset ends at byte 17");
      EXPECT_THAT(error_of(ErrorKind::comm, [&] { comm.barrier(); }), HasSubstr("byte 17"));
      return;
    }
    // Waits in the group itself and in a part of it.
    Communicator& where = comm.rank() == 0 ? comm : *part;
    const std::string text = error_of(ErrorKind::comm, [&] {
      comm.barrier();
      where.barrier({.label = "epoch"});
    });
    EXPECT_THAT(text, ::testing::AllOf(HasSubstr("the dataset ends at byte 17"),
                                       HasSubstr(cat("rank ", comm.size() - 1))));
    EXPECT_THAT(text, ::testing::Not(HasSubstr(cat("rank ", comm.rank(), " failed"))));
    EXPECT_LT(seconds_since(start), 30.0);
  });
}

TEST_P(Conformance, ARankThatLeavesIsNamed) {
  if (ranks() == 1) GTEST_SKIP() << "needs a second rank";
  run([&](Communicator& comm) {
    const auto start = steady_clock::now();
    auto part = comm.split(0, -comm.rank());
    if (comm.rank() == 1)
      part.reset();
    else
      EXPECT_THAT(error_of(ErrorKind::comm, [&] { part->barrier({.label = "epoch"}); }),
                  HasSubstr("rank 1 has left"));
    EXPECT_LT(seconds_since(start), 30.0);
    comm.barrier();  // what broke the part has not broken the whole
  });
}

TEST_P(Conformance, WrongArgumentsAreRefusedBeforeAnythingIsSent) {
  run([&](Communicator& comm) {
    Tensors tensors(comm, device(comm));
    const Tensor a = tensors.make(10, DType::f32, false),
                 b = tensors.make(10 * comm.size() + 1, DType::f32, false);
    const Tensor c = tensors.make(10 * comm.size(), DType::bf16, false),
                 d = tensors.make(10 * comm.size(), DType::f32, false);
    const auto usage = [&](const std::function<void()>& body) { return error_of(ErrorKind::usage, body); };
    EXPECT_THAT(usage([&] {
                  comm.all_gather({{a, b}}, {.label = "w"});
                }),
                ::testing::AllOf(HasSubstr("all_gather \"w\""), HasSubstr("10")));
    EXPECT_THAT(usage([&] { comm.all_gather({{a, c}}); }), HasSubstr("bf16"));
    EXPECT_THAT(usage([&] {
                  comm.reduce_scatter({{b, a, 0, 10}}, DType::f32);
                }),
                HasSubstr("reduce_scatter"));
    EXPECT_THAT(usage([&] { comm.reduce_scatter({{d, a, 5, 11}}, DType::f32); }), HasSubstr("[5, 11)"));
    EXPECT_THAT(usage([&] { comm.reduce_scatter({{d, a, 0, 10}}, DType::i32); }), HasSubstr("int32"));
    const auto onto = [&](const Tensor& begun) {
      return usage([&] { comm.reduce_scatter({{d, a, 0, 10, begun}}, DType::f32); });
    };
    EXPECT_THAT(onto(a.range(0, 9)), HasSubstr("onto has 9"));
    EXPECT_THAT(onto(c.range(0, 10)), HasSubstr("cannot begin with bf16"));
    const Tensor e = tensors.make(15, DType::f32, false);
    EXPECT_THAT(usage([&] {
                  comm.reduce_scatter({{d, e.range(0, 10), 0, 10, e.range(5, 15)}}, DType::f32);
                }),
                HasSubstr("onto overlaps"));
    EXPECT_THAT(usage([&] { comm.broadcast(a, comm.size()); }), HasSubstr("is not one of"));
    EXPECT_THAT(usage([&] { comm.send(a, comm.rank()); }), HasSubstr("itself"));
    const std::vector<std::int64_t> wrong(static_cast<std::size_t>(comm.size()), 3);
    EXPECT_THAT(usage([&] { comm.all_to_all(d, b, wrong, wrong); }), HasSubstr("counts"));
    if (comm.size() > 1) {
      EXPECT_THAT(
          usage([&] {
            comm.reduce_scatter(
                {{d, d.range((comm.rank() + 1) % comm.size() * 10, (comm.rank() + 1) % comm.size() * 10 + 10),
                  0, 10}},
                DType::f32);
          }),
          HasSubstr("overlaps"));
    }
    comm.barrier();  // the group still works
  });
}

}  // namespace
}  // namespace sherd::comm::conformance
