// Work that is deferred and run as graphs: in the order of the calls, and with the arguments of each.
#include "device/graph/graph_queue.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <atomic>
#include <random>
#include <string>
#include <thread>

#include "support/expect_error.h"

namespace sherd::device {
namespace {

using ::testing::ElementsAre;

/// Kernels are told apart by where these lie.
constexpr char entries[8] = {};

/// The driver's record, shared by queue, graphs and test. Runs at once.
struct Driver {
  std::vector<std::string> ran;
  int made = 0, sets = 0, launches = 0, live_graphs = 0;
  bool refuses = false;       ///< to make graphs
  bool marks_reached = true;  ///< answer of events from now on
  std::string fails_at;       ///< a kernel's name
};

struct DriverEvent final : StreamEvent {
  explicit DriverEvent(Driver& d) : driver(d) {}
  bool reached() const override { return driver.marks_reached; }
  Driver& driver;
};

std::string name_of(const KernelLaunch& kernel) {
  std::string out = "k" + std::to_string(static_cast<const char*>(kernel.entry) - entries);
  for (std::size_t i = 0; i < kernel.arguments.size(); ++i) {
    if (kernel.sizes[i] == sizeof(int))
      out += " " + std::to_string(*static_cast<const int*>(kernel.arguments[i]));
    else
      out += " " + std::to_string(*static_cast<const double*>(kernel.arguments[i]));
  }
  return out;
}

class DriverQueue : public StreamQueue {
 public:
  explicit DriverQueue(Driver& driver) : driver_(driver) {}
  std::shared_ptr<const StreamEvent> record() override {
    driver_.ran.push_back("mark");
    return std::make_shared<DriverEvent>(driver_);
  }
  void follow(const StreamEvent&) override { driver_.ran.push_back("wait"); }
  void* native() override { return &driver_; }
  void launch(const KernelLaunch& kernel) override {
    if (name_of(kernel) == driver_.fails_at) fail(ErrorKind::io, "the driver failed at ", driver_.fails_at);
    driver_.ran.push_back(name_of(kernel));
  }
  void call(const LibraryCall& call) override { call.run(&driver_.ran); }

 private:
  Driver& driver_;
};

class DriverGraph final : public Graph {
 public:
  DriverGraph(Driver& driver, std::vector<std::string> works) : driver_(driver), works_(std::move(works)) {
    ++driver_.live_graphs;
  }
  ~DriverGraph() override { --driver_.live_graphs; }
  void set(std::size_t work, const KernelSequence& sequence) override {
    Driver apart;
    DriverQueue queue(apart);
    sequence.run(work, queue);
    works_[work] = apart.ran.at(0);
    ++driver_.sets;
  }
  void launch() override {
    driver_.ran.insert(driver_.ran.end(), works_.begin(), works_.end());
    ++driver_.launches;
  }

 private:
  Driver& driver_;
  std::vector<std::string> works_;
};

class DriverMaker final : public GraphMaker {
 public:
  explicit DriverMaker(Driver& driver) : driver_(driver) {}
  std::unique_ptr<Graph> make(const KernelSequence& sequence) override {
    ++driver_.made;
    if (driver_.refuses) return nullptr;
    Driver captured;
    DriverQueue queue(captured);
    for (std::size_t i = 0; i < sequence.size(); ++i) sequence.run(i, queue);
    return std::make_unique<DriverGraph>(driver_, std::move(captured.ran));
  }

 private:
  Driver& driver_;
};

struct Graphs {
  explicit Graphs(const GraphQueue::Limits& limits = {})
      : queue(std::make_unique<DriverQueue>(driver), std::make_unique<DriverMaker>(driver), limits) {}
  void kernel(int which, int first, double second = 0.5) { queue_kernel(queue, which, first, second); }
  void library(int product, int key) { queue_call(queue, product, key); }

  static void queue_kernel(StreamQueue& on, int which, int first, double second) {
    void* const arguments[] = {&first, &second};
    const std::size_t sizes[] = {sizeof first, sizeof second};
    on.launch({entries + which, {4, 1, 1}, {32, 1, 1}, 0, arguments, sizes});
  }
  static void queue_call(StreamQueue& on, int product, int key) {
    on.call({entries + product, bytes_of(key), [product, key](void* native) {
               static_cast<std::vector<std::string>*>(native)->push_back("c" + std::to_string(product) + " " +
                                                                         std::to_string(key));
             }});
  }
  /// A block's pass with a step's number among the arguments of its kernels, and addresses of its calls.
  void pass(int step, int addresses) {
    kernel(0, step), library(1, addresses), kernel(2, 7), library(3, addresses), kernel(4, step);
    queue.end_sequence();
  }

  Driver driver;
  GraphQueue queue;
};

std::vector<std::string> pass_of(int step, int addresses) {
  const std::string s = std::to_string(step) + " 0.500000", a = std::to_string(addresses);
  return {"k0 " + s, "c1 " + a, "k2 7 0.500000", "c3 " + a, "k4 " + s};
}

TEST(GraphQueue, what_comes_again_runs_as_a_graph_with_the_arguments_of_the_day) {
  Graphs graphs;
  for (int step = 0; step < 5; ++step) {
    graphs.driver.ran.clear();
    graphs.pass(step, 10);
    EXPECT_EQ(graphs.driver.ran, pass_of(step, 10)) << step;
  }
  EXPECT_EQ(graphs.driver.made, 1);
  EXPECT_EQ(graphs.driver.launches, 4) << "all but the first";
  EXPECT_EQ(graphs.driver.sets, 3 * 2) << "of two kernels that differ, where the graph was not just made";
  const GraphCounts counts = graphs.queue.counts();
  EXPECT_EQ(counts.graphs, 1u);
  EXPECT_EQ(counts.launches, 4u);
  EXPECT_EQ(counts.works_in_graphs, 20u);
  EXPECT_EQ(counts.works_apart, 5u);
}

TEST(GraphQueue, calls_with_other_addresses_are_other_sequences) {
  Graphs graphs;
  for (int step = 0; step < 3; ++step)
    for (int block = 0; block < 4; ++block) {
      graphs.driver.ran.clear();
      graphs.pass(step, block);
      EXPECT_EQ(graphs.driver.ran, pass_of(step, block));
    }
  EXPECT_EQ(graphs.driver.made, 4);
  EXPECT_EQ(graphs.driver.launches, 8);
}

TEST(GraphQueue, whoever_looks_at_the_order_finds_it) {
  for (const auto& look : std::vector<std::function<void(Graphs&)>>{
           [](Graphs& g) { g.queue.record(); }, [](Graphs& g) { g.queue.follow(DriverEvent(g.driver)); },
           [](Graphs& g) { g.queue.native(); }, [](Graphs& g) { g.queue.end_sequence(); }}) {
    Graphs graphs;
    graphs.kernel(1, 5);
    graphs.library(2, 6);
    EXPECT_TRUE(graphs.driver.ran.empty());
    look(graphs);
    ASSERT_GE(graphs.driver.ran.size(), 2u);
    EXPECT_EQ(graphs.driver.ran[0], "k1 5 0.500000");
    EXPECT_EQ(graphs.driver.ran[1], "c2 6");
  }
}

TEST(GraphQueue, whoever_ends_it_runs_what_was_deferred) {
  Driver driver;
  {
    GraphQueue queue(std::make_unique<DriverQueue>(driver), std::make_unique<DriverMaker>(driver));
    Graphs::queue_call(queue, 2, 6);
    EXPECT_THAT(driver.ran, ElementsAre());
  }
  EXPECT_THAT(driver.ran, ElementsAre("c2 6"));
}

TEST(GraphQueue, takes_copies_and_keeps_those_that_a_graph_runs) {
  Graphs graphs;
  const auto held = std::make_shared<int>(3);
  int kept = 1;
  for (int time = 0; time < 3; ++time) {
    int value = 41;
    double other = 2;
    void* const arguments[] = {&value, &other};
    const std::size_t sizes[] = {sizeof value, sizeof other};
    graphs.queue.launch({entries, {1, 1, 1}, {1, 1, 1}, 0, arguments, sizes});
    value = 0;
    for (int key = 0; key < 4; ++key) graphs.queue.call({entries, bytes_of(key), [held](void*) {}});
    EXPECT_EQ(held.use_count(), kept + 4);
    graphs.queue.end_sequence();
    EXPECT_EQ(graphs.driver.ran.back(), "k0 41 2.000000");
    if (time == 1) kept += 4;
    EXPECT_EQ(held.use_count(), kept);
    graphs.driver.ran.clear();
  }
  EXPECT_EQ(graphs.driver.launches, 2);
}

/// A library's plan holds the code that a graph runs, and its address tells its work from another's.
TEST(GraphQueue, what_calls_own_outlives_their_graph) {
  Driver driver;
  std::vector<int> graphs_left;  // as plans go
  const auto make_plan = [&] {
    return std::shared_ptr<void>(&driver, [&](void*) { graphs_left.push_back(driver.live_graphs); });
  };
  auto queue = std::make_unique<GraphQueue>(std::make_unique<DriverQueue>(driver),
                                            std::make_unique<DriverMaker>(driver),
                                            GraphQueue::Limits{.most_graphs = 1, .idle = 0});
  const auto pass = [&](int which, const std::shared_ptr<void>& plan) {
    for (int key = 0; key < 4; ++key) queue->call({entries + which, bytes_of(key), [plan](void*) {}});
    queue->end_sequence();
  };
  driver.marks_reached = false;
  for (int which = 0; which < 2; ++which) {
    const std::shared_ptr<void> plan = make_plan();
    for (int time = 0; time < 2; ++time) pass(which, plan);
  }
  EXPECT_EQ(driver.made, 2);
  EXPECT_THAT(graphs_left, ElementsAre()) << "one is kept, and one may still run";
  driver.marks_reached = true;
  pass(2, nullptr);
  EXPECT_THAT(graphs_left, ElementsAre(1));
  queue.reset();
  EXPECT_THAT(graphs_left, ElementsAre(1, 0));
}

TEST(GraphQueue, short_sequences_run_work_by_work_and_long_ones_are_cut) {
  Graphs graphs({.least_works = 3, .most_works = 6});
  for (int time = 0; time < 4; ++time) {
    graphs.kernel(0, 1), graphs.kernel(1, 1);
    graphs.queue.end_sequence();
  }
  EXPECT_EQ(graphs.driver.made, 0);
  graphs.driver.ran.clear();
  for (int i = 0; i < 7; ++i) graphs.kernel(2, i);
  EXPECT_EQ(graphs.driver.ran.size(), 6u);
}

TEST(GraphQueue, a_sequence_that_cannot_be_a_graph_is_tried_once) {
  Graphs graphs;
  graphs.driver.refuses = true;
  for (int step = 0; step < 4; ++step) {
    graphs.driver.ran.clear();
    graphs.pass(step, 0);
    EXPECT_EQ(graphs.driver.ran, pass_of(step, 0));
  }
  EXPECT_EQ(graphs.driver.made, 1);
  EXPECT_EQ(graphs.queue.counts().works_apart, 20u);
}

TEST(GraphQueue, a_failure_is_told_to_everybody_from_then_on) {
  Graphs graphs;
  graphs.driver.fails_at = "k1 1 0.500000";
  graphs.kernel(0, 1), graphs.kernel(1, 1), graphs.kernel(2, 1);
  const auto told = [&](const std::function<void()>& call) {
    sherd::testing::expect_error(ErrorKind::io, "the driver failed at k1", call);
  };
  told([&] { graphs.queue.record(); });
  EXPECT_THAT(graphs.driver.ran, ElementsAre("k0 1 0.500000")) << "nothing after it ran";
  told([&] { graphs.kernel(2, 2); });
  told([&] { graphs.library(2, 2); });
  told([&] { graphs.queue.native(); });
  told([&] { graphs.queue.end_sequence(); });
}

TEST(GraphQueue, graphs_beyond_the_limit_go_when_the_stream_has_passed_them) {
  Graphs graphs({.most_graphs = 2, .idle = 0});
  graphs.driver.marks_reached = false;
  for (int time = 0; time < 2; ++time)
    for (int addresses = 0; addresses < 3; ++addresses) graphs.pass(time, addresses);
  EXPECT_EQ(graphs.driver.made, 3);
  EXPECT_EQ(graphs.driver.live_graphs, 3) << "the first may still run";
  graphs.driver.marks_reached = true;
  graphs.driver.ran.clear();
  graphs.pass(2, 2);
  graphs.pass(2, 0);  // was forgotten, and counts as new
  EXPECT_EQ(graphs.driver.live_graphs, 2);
  EXPECT_EQ(graphs.driver.made, 3);
  std::vector<std::string> expected = pass_of(2, 2);
  for (const std::string& each : pass_of(2, 0)) expected.push_back(each);
  EXPECT_EQ(graphs.driver.ran, expected);
}

TEST(GraphQueue, work_of_more_sequences_than_graphs_keeps_those_it_has) {
  Graphs graphs({.most_graphs = 2, .idle = 8});
  for (int step = 0; step < 6; ++step)
    for (int addresses = 0; addresses < 4; ++addresses) {
      graphs.driver.ran.clear();
      graphs.pass(step, addresses);
      EXPECT_EQ(graphs.driver.ran, pass_of(step, addresses));
    }
  EXPECT_EQ(graphs.driver.made, 2) << "the first two that came again";
  EXPECT_EQ(graphs.driver.launches, 2 * 5);
  // Once they are not used any more, others take their places.
  for (int step = 0; step < 6; ++step)
    for (int addresses = 4; addresses < 6; ++addresses) graphs.pass(step, addresses);
  EXPECT_EQ(graphs.driver.made, 4);
}

TEST(GraphQueue, forgets_sequences_that_never_come_again) {
  Graphs graphs({.most_graphs = 2});
  for (int i = 0; i < 100; ++i) graphs.pass(0, i);
  graphs.pass(1, 0);
  EXPECT_EQ(graphs.driver.made, 0) << "the first was forgotten long ago";
  graphs.pass(1, 99);
  EXPECT_EQ(graphs.driver.made, 1);
}

/// Any work, cut anywhere, comes out as from a plain queue.
TEST(GraphQueue, random_work_is_run_in_order) {
  std::mt19937 random(17);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  int launches = 0;
  for (int round = 0; round < 200; ++round) {
    Driver plain;
    DriverQueue expected(plain);
    Graphs graphs({.least_works = 2, .most_works = 5, .most_graphs = 3, .idle = 4});
    for (int i = 0; i < 300; ++i) {
      const int which = below(2), value = below(2);
      switch (below(8)) {
        case 0:
          expected.record(), graphs.queue.record();
          break;
        case 1:
          graphs.queue.end_sequence();
          break;
        case 2:
        case 3:
          Graphs::queue_call(expected, which, value), graphs.library(which, value);
          break;
        default:
          Graphs::queue_kernel(expected, which, value, 0.5), graphs.kernel(which, value);
      }
    }
    graphs.queue.end_sequence();
    plain.ran.push_back("end"), graphs.driver.ran.push_back("end");
    // Marks that retire graphs are the queue's own.
    std::erase(plain.ran, "mark"), std::erase(graphs.driver.ran, "mark");
    ASSERT_EQ(graphs.driver.ran, plain.ran) << round;
    launches += graphs.driver.launches;
  }
  EXPECT_GT(launches, 300);
}

TEST(GraphQueue, marks_of_other_threads_meet_no_half_of_it) {
  Graphs graphs;
  std::atomic<bool> stop = false;
  std::jthread other([&] {
    while (!stop) graphs.queue.record();
  });
  for (int step = 0; step < 3000; ++step) graphs.pass(step, step % 3);
  stop = true;
  other.join();
  std::erase(graphs.driver.ran, "mark");
  std::vector<std::string> expected;
  for (int step = 0; step < 3000; ++step)
    for (std::string& each : pass_of(step, step % 3)) expected.push_back(std::move(each));
  EXPECT_EQ(graphs.driver.ran, expected);
}

}  // namespace
}  // namespace sherd::device
