// The instructions of an offloaded optimizer step, played without a machine.
#include "engine/update_pipeline.h"

#include <gtest/gtest.h>

#include <map>

#include "base/error.h"
#include "support/expect_error.h"

namespace sherd::engine {
namespace {

using Op = UpdateInstruction::Op;

std::vector<UpdateChunk> chunks_of(const std::vector<bool>& stored) {
  std::vector<UpdateChunk> chunks;
  for (const bool on_nvme : stored) chunks.push_back({nullptr, 0, 1, on_nvme, true});
  return chunks;
}

struct Played {
  int most_reads = 0;       ///< reads under way, or done and not used, when an update runs
  int most_writes = 0;      ///< written buffers whose end nobody has waited for, when an update runs
  std::vector<std::size_t> updated;
};

/// Plays a plan as the executor does, and checks that no buffer is overwritten or used before its time.
Played play(const std::vector<UpdateChunk>& chunks, int buffers, bool pipeline_read, bool pipeline_write) {
  enum class State { free, read, updated, writing };
  struct Buffer {
    State state = State::free;
    std::size_t chunk = 0;
  };
  std::map<int, Buffer> stage;
  Played played;
  std::vector<bool> written(chunks.size());
  const auto count = [&](State state) {
    int n = 0;
    for (const auto& [index, buffer] : stage) n += buffer.state == state;
    return n;
  };
  for (const UpdateInstruction& step : plan_update(chunks, buffers, pipeline_read, pipeline_write)) {
    EXPECT_EQ(step.buffer < 0, !chunks[step.chunk].stored);
    EXPECT_LT(step.buffer, buffers);
    if (step.buffer < 0) {
      EXPECT_EQ(step.op, Op::update);
      played.updated.push_back(step.chunk);
      continue;
    }
    Buffer& buffer = stage[step.buffer];
    switch (step.op) {
      case Op::read:  // waits for the buffer's write
        EXPECT_TRUE(buffer.state == State::free || buffer.state == State::writing);
        buffer = {State::read, step.chunk};
        break;
      case Op::update:
        EXPECT_EQ(buffer.state, State::read);
        EXPECT_EQ(buffer.chunk, step.chunk);
        played.most_reads = std::max(played.most_reads, count(State::read) - 1);
        played.most_writes = std::max(played.most_writes, count(State::writing));
        buffer.state = State::updated;
        played.updated.push_back(step.chunk);
        break;
      case Op::write:
        EXPECT_EQ(buffer.state, State::updated);
        EXPECT_EQ(buffer.chunk, step.chunk);
        EXPECT_FALSE(written[step.chunk]);
        written[step.chunk] = true;
        buffer.state = State::writing;
        break;
      case Op::wait_written:
        EXPECT_EQ(buffer.state, State::writing);
        buffer.state = State::free;
        break;
    }
  }
  for (std::size_t i = 0; i < chunks.size(); ++i) EXPECT_EQ(written[i], chunks[i].stored) << i;
  return played;
}

TEST(PlanUpdate, UpdatesEveryChunkOnceInOrder) {
  const auto chunks = chunks_of({true, false, true, true, false, true, true, true, true});
  for (int buffers = 1; buffers <= 6; ++buffers)
    for (const bool read : {false, true})
      for (const bool write : {false, true}) {
        const Played played = play(chunks, buffers, read, write);
        ASSERT_EQ(played.updated.size(), chunks.size());
        for (std::size_t i = 0; i < chunks.size(); ++i) EXPECT_EQ(played.updated[i], i);
      }
}

TEST(PlanUpdate, ReadsAheadAndWritesBehindOnlyWhenAsked) {
  const auto chunks = chunks_of(std::vector<bool>(12, true));
  EXPECT_EQ(play(chunks, 4, false, false).most_reads, 0);
  EXPECT_EQ(play(chunks, 4, false, false).most_writes, 0);
  EXPECT_EQ(play(chunks, 4, true, false).most_reads, 3);
  EXPECT_EQ(play(chunks, 4, true, false).most_writes, 0);
  EXPECT_EQ(play(chunks, 4, false, true).most_reads, 0);
  EXPECT_GE(play(chunks, 4, false, true).most_writes, 1);
  EXPECT_EQ(play(chunks, 4, true, true).most_reads, 2);  // one is updated, one is written
  EXPECT_GE(play(chunks, 4, true, true).most_writes, 1);
  EXPECT_EQ(play(chunks, 1, true, true).most_reads, 0);
}

TEST(PlanUpdate, NothingStoredNeedsNoBuffer) {
  for (const int buffers : {0, 1})
    for (const UpdateInstruction& step : plan_update(chunks_of({false, false}), buffers, true, true)) {
      EXPECT_EQ(step.op, Op::update);
      EXPECT_EQ(step.buffer, -1);
    }
}

TEST(PlanUpdate, NeedsABuffer) {
  testing::expect_error(ErrorKind::usage, "buffer_count", [] { plan_update(chunks_of({true}), 0, true, true); });
}

}  // namespace
}  // namespace sherd::engine
