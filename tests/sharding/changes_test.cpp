// Parameters on NVMe that change while the next list of gathers has begun: nobody reads or gathers a unit of
// which a part is old.
#include <gtest/gtest.h>

#include "support/expect_error.h"
#include "support/temp_folder.h"
#include "tests/sharding/tower.h"

namespace sherd::test {
namespace {

using sharding::Instruction;
using sharding::Segment;
using sharding::Unit;
using tensor::Tensor;

constexpr float before = 1, after = 2;

/// One rank with a tower whose parameters are all `before`, in a store, but for those of at most `persistent`
/// elements.
class Changes : public ::testing::Test {
 protected:
  explicit Changes(std::int64_t persistent = 0) : store_(options(), cpu_.device->ledger()) {
    comm_ = comm::make_self({});
    sharding::ShardingOptions sharding = options_of(3);
    sharding.placements.parameters.tier = device::Tier::nvme;
    sharding.parameter_buffers = 2, sharding.parameter_buffer_elements = 1000;
    sharding.persistence_threshold = persistent, sharding.model_persistence_threshold = 1000;
    sharding::StateSources sources{*comm_, *cpu_.kernels};
    sources.parameter_store = &store_;
    model_ = std::make_unique<sharding::ShardedModel>(std::make_shared<Tower>(false), sharding, sources);
    for (const auto& unit : model_->units()) write(segment_of(*unit), 0, 1, before);
  }
  offload::StoreOptions options() const {
    offload::StoreOptions out;
    out.folder = folder_.path();
    return out;
  }
  static Segment& segment_of(const Unit& unit) { return segment_of(unit, false); }
  static Segment& segment_of(const Unit& unit, bool persistent) {
    for (const auto& segment : unit.segments())
      if (segment->key().persistent == persistent) return *segment;
    fail(ErrorKind::usage, unit.name(), " has no such segment");
  }
  Tensor filled(std::int64_t elements, float value) {
    return Tensor::of<float>(*cpu_.device, {elements},
                             std::vector<float>(static_cast<std::size_t>(elements), value));
  }
  /// The part of the segment from share `from` of its elements to share `to`.
  struct Part {
    std::int64_t begin, elements;
  };
  static Part part(const Segment& segment, double from, double to) {
    const std::int64_t first = segment.own_begin(), all = segment.own_end() - first;
    const auto at = [&](double share) { return first + static_cast<std::int64_t>(share * double(all)); };
    return {at(from), at(to) - at(from)};
  }
  void write(Segment& segment, double from, double to, float value) {
    const auto [begin, elements] = part(segment, from, to);
    segment.parameters().write(begin, filled(elements, value)).wait();
  }
  /// As an update does that has begun before its parameters were expected; `hands_over`: as one after.
  void change(const Unit& unit, double from, double to, bool hands_over = false) {
    Segment& segment = segment_of(unit);
    const auto [begin, elements] = part(segment, from, to);
    write(segment, from, to, after);
    model_->changed(segment, begin, hands_over ? filled(elements, after) : Tensor(), to == 1);
  }
  /// A list that gathers the first two blocks, one after the other.
  void begin_list() {
    using Op = Instruction::Op;
    const std::vector<Instruction> gathers{{Op::gather, -1, 0}, {Op::gather, -1, 1}};
    model_->begin_list(gathers, std::vector<sharding::Chunk>{{1, 2}, {2, 3}});
  }
  void end_change(Unit& unit) {
    Unit* one = &unit;
    model_->end_changes({&one, 1});
  }
  void expect_new(Unit& unit) {
    const auto lease = unit.gather();
    for (const auto& parameter : segment_of(unit).layout().parameters())
      EXPECT_EQ(cpu_.values(parameter->value),
                std::vector<double>(static_cast<std::size_t>(parameter->numel()), after))
          << parameter->name;
  }

  const testing::TempFolder folder_;
  Cpu cpu_{1};
  offload::Store store_;
  std::unique_ptr<comm::Communicator> comm_;
  std::unique_ptr<sharding::ShardedModel> model_;
};

TEST_F(Changes, AUnitThatIsHalfChangedIsNeitherReadNorGatheredAhead) {
  Unit &half = *model_->units()[1], &untouched = *model_->units()[2];
  model_->begin_changes();
  change(half, 0, 0.5);
  const auto read = store_.bytes_read();
  begin_list();
  testing::expect_error(ErrorKind::usage, "'blocks.0' are gathered before they have changed",
                        [&] { model_->gather_ahead(half); });
  change(half, 0.5, 1);
  end_change(half);
  model_->gather_ahead(half);
  expect_new(half);
  const auto bytes = static_cast<std::uint64_t>(segment_of(half).layout().shard()) * sizeof(float);
  EXPECT_EQ(store_.bytes_read() - read, bytes) << "once, when it was new";
  change(untouched, 0, 1, true);
  end_change(untouched);
  expect_new(untouched);
  model_->abandon_changes();
  model_->end_list();
}

TEST_F(Changes, AUnitThatIsExpectedBeforeItChangesIsHandedOver) {
  model_->begin_changes();
  const auto read = store_.bytes_read();
  begin_list();
  for (const std::size_t i : {1, 2}) {
    Unit& unit = *model_->units()[i];
    EXPECT_TRUE(model_->may_change(segment_of(unit))) << "a buffer waits for it";
    testing::expect_error(ErrorKind::usage, "are gathered before they have changed",
                          [&] { model_->gather_ahead(unit); });
    change(unit, 0, 0.25, true);
    change(unit, 0.25, 1, true);
    end_change(unit);
    model_->gather_ahead(unit);
    expect_new(unit);
  }
  EXPECT_FALSE(model_->may_change(segment_of(*model_->units()[3]))) << "nobody waits for what comes later";
  EXPECT_EQ(store_.bytes_read(), read);
  model_->abandon_changes();
  model_->end_list();
}

class ChangesBesideSmallOnes : public Changes {
 protected:
  ChangesBesideSmallOnes() : Changes(8) {}
};

TEST_F(ChangesBesideSmallOnes, AreHandedOver) {
  model_->begin_changes();
  const auto read = store_.bytes_read();
  Unit& unit = *model_->units()[1];
  Segment& biases = segment_of(unit, true);
  EXPECT_FALSE(biases.parameters().stored());
  write(biases, 0, 1, after);
  model_->changed(biases, biases.own_begin(), {}, true);
  begin_list();
  EXPECT_TRUE(model_->may_change(segment_of(unit))) << "a buffer waits for what is stored";
  testing::expect_error(ErrorKind::usage, "are gathered before they have changed",
                        [&] { model_->gather_ahead(unit); });
  change(unit, 0, 1, true);
  end_change(unit);
  model_->gather_ahead(unit);
  expect_new(unit);
  EXPECT_EQ(store_.bytes_read(), read);
  model_->abandon_changes();
  model_->end_list();
}

}  // namespace
}  // namespace sherd::test
