#include "device/stream.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "device/fake_queue.h"
#include "support/expect_error.h"

namespace sherd::device {
namespace {

using sherd::testing::FakeStream;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(Stream, waits_for_another_stream_and_never_for_itself) {
  FakeStream compute("k"), copies("c");
  copies.stream.wait(compute.stream.record());
  compute.stream.wait(compute.stream.record());
  EXPECT_THAT(copies.log->followed, ElementsAre("k1"));
  EXPECT_THAT(compute.log->followed, IsEmpty());
  EXPECT_EQ(compute.stream.native(), compute.log.get());
}

TEST(Stream, leaves_out_waits_that_earlier_ones_imply) {
  FakeStream compute("k"), copies("c"), comm("n");
  const Event first = compute.stream.record(), second = compute.stream.record();
  copies.stream.wait(second);
  copies.stream.wait(first);
  copies.stream.wait(second);
  EXPECT_THAT(copies.log->followed, ElementsAre("k2"));
  // Through a third stream: after copies' mark, everything that copies waited for has ended as well.
  comm.stream.wait(copies.stream.record());
  comm.stream.wait(second);
  EXPECT_THAT(comm.log->followed, ElementsAre("c1"));
  // Later work of compute is not implied.
  comm.stream.wait(compute.stream.record());
  EXPECT_THAT(comm.log->followed, ElementsAre("c1", "k3"));
}

TEST(Stream, a_mark_knows_only_what_its_stream_had_waited_for_by_then) {
  FakeStream compute("k"), copies("c"), comm("n");
  const Event early = copies.stream.record();
  const Event work = compute.stream.record();
  copies.stream.wait(work);
  comm.stream.wait(early);
  comm.stream.wait(work);
  EXPECT_THAT(comm.log->followed, ElementsAre("c1", "k1"));
}

TEST(Stream, a_new_stream_is_not_taken_for_one_that_is_gone) {
  FakeStream compute("k");
  for (int i = 0; i < 50; ++i) {
    FakeStream passing("p");
    compute.stream.wait(passing.stream.record());
  }
  EXPECT_EQ(compute.log->followed.size(), 50u);
}

TEST(Event, waits_on_the_host_until_its_work_has_ended) {
  FakeStream compute("k");
  const Event mark = compute.stream.record();
  EXPECT_FALSE(mark.reached());
  compute.log->events[0]->done = true;
  EXPECT_TRUE(mark.reached());
  mark.wait(Deadline::after_seconds(60), "nothing");
  EXPECT_TRUE(Event().reached());
  compute.stream.wait(Event());
  EXPECT_THAT(compute.log->followed, IsEmpty());
}

TEST(Event, names_the_work_that_missed_the_deadline) {
  FakeStream compute("k");
  sherd::testing::expect_error(ErrorKind::comm, "did not finish the forward pass within the deadline", [&] {
    compute.stream.record().wait(Deadline::after_seconds(0.01), "the forward pass");
  });
}

}  // namespace
}  // namespace sherd::device
