// The instructions of an offloaded optimizer step, played without a machine.
#include "engine/update/update_pipeline.h"

#include <gtest/gtest.h>

#include <map>

#include "base/error.h"
#include "nn/layers.h"
#include "support/expect_error.h"

namespace sherd::engine {
namespace {

using Op = UpdateInstruction::Op;

TEST(CutUpdate, AStoredSegmentFallsIntoEqualChunks) {
  const auto device = device::make_meta_device(1);
  const auto kernels = tensor::make_kernels(*device);
  offload::StoreOptions dry;
  dry.folder = "none", dry.dry = true;
  offload::Store store(dry, device->ledger());
  comm::run_local(1, comm::CommOptions{}, [&](comm::Communicator& group) {
    sharding::ShardingOptions options;
    options.placements = sharding::make_placements(3, DType::bf16, DType::f32, DType::f32);
    options.rules = {{{{"exp_avg"}, {"exp_avg_sq"}}}};
    const auto chunks = [&](device::Tier tier, std::int64_t most) {
      options.placements.masters.tier = options.placements.moments.tier = tier;
      const auto linear = std::make_shared<nn::Linear>(1000, 1000, nn::LinearOptions{.bias = false});
      sharding::ShardedModel model(linear, options, {group, *kernels, nullptr, &store});
      const std::vector<UpdateChunk> cut = cut_update(model.trainable_segments(), most);
      std::vector<std::int64_t> sizes;
      for (const UpdateChunk& chunk : cut) {
        EXPECT_EQ(chunk.begin, &chunk == &cut.front() ? 0 : (&chunk)[-1].end);
        EXPECT_EQ(chunk.stored, tier == device::Tier::nvme);
        EXPECT_EQ(chunk.last, &chunk == &cut.back());
        sizes.push_back(chunk.end - chunk.begin);
      }
      return sizes;
    };
    using Sizes = std::vector<std::int64_t>;
    EXPECT_EQ(chunks(device::Tier::host, 300'000), Sizes{1'000'000});
    EXPECT_EQ(chunks(device::Tier::nvme, 300'000), (Sizes{253'952, 253'952, 253'952, 238'144}));
    Sizes pages(245, 4096);
    pages.back() = 1'000'000 - 244 * 4096;
    EXPECT_EQ(chunks(device::Tier::nvme, 1), pages);
    EXPECT_EQ(chunks(device::Tier::nvme, 1'000'000'000), Sizes{1'000'000});
  });
}

std::vector<UpdateChunk> chunks_of(const std::vector<bool>& stored) {
  std::vector<UpdateChunk> chunks;
  for (const bool on_nvme : stored) chunks.push_back({nullptr, 0, 1, on_nvme, true});
  return chunks;
}

struct Played {
  int most_reads = 0;   ///< reads under way, or done and not used, when an update runs
  int most_writes = 0;  ///< written buffers whose end nobody has waited for, when an update runs
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
      EXPECT_EQ(step.op, Op::pass);
      played.updated.push_back(step.chunk);
      continue;
    }
    Buffer& buffer = stage[step.buffer];
    switch (step.op) {
      case Op::read:  // waits for the buffer's write
        EXPECT_TRUE(buffer.state == State::free || buffer.state == State::writing);
        buffer = {State::read, step.chunk};
        break;
      case Op::pass:
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
      case Op::agree:
      case Op::exchange:
        ADD_FAILURE() << "of no rule here";
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

TEST(PlanUpdate, PhasesOfARuleFollowEachOther) {
  using optim::Phase;
  static constexpr Phase with_norms[] = {Phase::parameter_norms, Phase::elementwise};
  static constexpr Phase exchanging[] = {Phase::compress, Phase::exchange, Phase::elementwise};
  static constexpr Phase refreshing[] = {Phase::compress, Phase::exchange, Phase::refresh,
                                         Phase::elementwise};
  const std::vector<UpdateChunk> chunks{{nullptr, 0, 1, true, false, with_norms},
                                        {nullptr, 1, 2, true, true, with_norms},
                                        {nullptr, 0, 1, false, true},
                                        {nullptr, 0, 1, true, true, exchanging},
                                        {nullptr, 0, 1, false, true, refreshing}};
  std::vector<optim::Description> rules(2);
  rules[0].phases = {with_norms[0], with_norms[1]};
  const std::vector<UpdateInstruction> expected{
      {Op::pass, 4, -1, 0},     {Op::read, 3, 0, 0},      {Op::pass, 3, 0, 0},  {Op::write, 3, 0, 0},
      {Op::exchange, 4, -1, 1}, {Op::read, 0, 0, 0},      {Op::read, 1, 1, 0},  {Op::pass, 0, 0, 0},
      {Op::pass, 1, 1, 0},      {Op::exchange, 3, -1, 1}, {Op::pass, 4, -1, 2}, {Op::agree, 5, -1, 0},
      {Op::read, 0, 0, 1},      {Op::read, 1, 1, 1},      {Op::pass, 0, 0, 1},  {Op::write, 0, 0, 1},
      {Op::read, 3, 0, 2},      {Op::pass, 1, 1, 1},      {Op::write, 1, 1, 1}, {Op::pass, 2, -1, 0},
      {Op::pass, 3, 0, 2},      {Op::write, 3, 0, 2},     {Op::pass, 4, -1, 3}};
  EXPECT_EQ(plan_update(chunks, 2, true, true, rules), expected);
  // A rank without chunks of such a rule adds up, too.
  EXPECT_EQ(plan_update(std::span(chunks).subspan(2, 1), 2, true, true, rules),
            (std::vector<UpdateInstruction>{{Op::agree, 1, -1, 0}, {Op::pass, 0, -1, 0}}));
}

/// Segments 1 and 2 are one batch, segment 3 another; reads go ahead over what stands between passes.
TEST(PlanUpdate, BatchesFollowEachOtherWithAllTheirPhases) {
  using optim::Phase;
  static constexpr Phase muon[] = {Phase::direction, Phase::whole_parameters, Phase::elementwise};
  const std::vector<UpdateChunk> chunks{{nullptr, 0, 1, false, true},
                                        {nullptr, 0, 1, true, true, muon, 1},
                                        {nullptr, 0, 1, false, true, muon, 1},
                                        {nullptr, 0, 1, true, true, muon, 2}};
  const std::vector<UpdateInstruction> expected{
      {Op::pass, 0, -1, 0}, {Op::read, 1, 0, 0},  {Op::read, 1, 1, 2},      {Op::pass, 1, 0, 0},
      {Op::write, 1, 0, 0}, {Op::pass, 2, -1, 0}, {Op::exchange, 2, -1, 1}, {Op::read, 3, 0, 0},
      {Op::pass, 1, 1, 2},  {Op::write, 1, 1, 2}, {Op::pass, 2, -1, 2},     {Op::read, 3, 1, 2},
      {Op::pass, 3, 0, 0},  {Op::write, 3, 0, 0}, {Op::exchange, 3, -1, 1}, {Op::pass, 3, 1, 2},
      {Op::write, 3, 1, 2}};
  EXPECT_EQ(plan_update(chunks, 2, true, true), expected);
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
      EXPECT_EQ(step.op, Op::pass);
      EXPECT_EQ(step.buffer, -1);
    }
}

TEST(PlanUpdate, NeedsABuffer) {
  testing::expect_error(ErrorKind::usage, "buffer_count",
                        [] { plan_update(chunks_of({true}), 0, true, true); });
}

}  // namespace
}  // namespace sherd::engine
