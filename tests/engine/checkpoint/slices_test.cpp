// Parameters of which model-parallel ranks hold slices: drawn, saved and loaded by logical index, whichever
// way they are cut.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/format.h"
#include "engine/checkpoint/sample_manifest.h"
#include "engine/checkpoint/writer.h"
#include "engine/initialize.h"
#include "support/expect_error.h"
#include "support/logical_states.h"
#include "support/odd_models.h"
#include "support/temp_folder.h"
#include "support/whole_tensors.h"

namespace sherd::test {
namespace {

namespace fs = std::filesystem;
using engine::CheckpointReader;
using engine::PieceRecord;
using sherd::testing::expect_error;
using sherd::testing::TempFolder;
using sherd::testing::write_text;
using tensor::Range;
using tensor::Slice;

const std::map<std::string, std::pair<tensor::Shape, nn::Init>> logical_parameters{
    {"qkv", {{24, 10}, nn::Init::normal(0, 1)}},
    {"down", {{10, 24}, nn::Init::uniform(-1, 1)}},
    {"cube", {{4, 6, 10}, nn::Init::normal(1, 2)}},
    {"bias", {{36}, nn::Init::uniform(2, 3)}},
    {"norm", {{10}, nn::Init::ones()}}};

/// Which slice of each parameter a model-parallel rank holds; what is not named is whole.
using SliceLayout = std::map<std::string, Slice>;

/// Declares the parameters, and computes nothing.
class Sliced : public nn::Model {
 public:
  explicit Sliced(const SliceLayout& layout) {
    for (const auto& [name, what] : logical_parameters) {
      const auto slice = layout.find(name);
      const bool whole = slice == layout.end();
      declare(name, whole ? what.first : slice->second.shape(), what.second);
      if (!whole) own_parameters().back().second->slice = slice->second;
    }
  }

 protected:
  nn::Var forward(nn::Tape&, const tensor::Batch&) override { fail(ErrorKind::usage, "not for running"); }
};

/// The layouts of `ranks` model-parallel ranks: rows in three blocks, columns, the middle of a cube, and a
/// bias in two.
std::vector<SliceLayout> by_blocks(std::int64_t ranks) {
  std::vector<SliceLayout> out;
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    const auto part = [&](std::int64_t begin, std::int64_t extent) {
      return Range{begin + extent * rank / ranks, begin + extent * (rank + 1) / ranks};
    };
    out.push_back({{"qkv", Slice({24, 10}, {{part(0, 12), part(12, 6), part(18, 6)}, {{0, 10}}})},
                   {"down", Slice({10, 24}, {{{0, 10}}, {part(0, 24)}})},
                   {"cube", Slice({4, 6, 10}, {{{0, 4}}, {part(0, 3), part(3, 3)}, {{0, 10}}})},
                   {"bias", Slice({36}, {{part(0, 18), part(18, 18)}})}});
  }
  return out;
}
/// Plain rows, where the others have columns too.
std::vector<SliceLayout> by_rows(std::int64_t ranks) {
  std::vector<SliceLayout> out(static_cast<std::size_t>(ranks));
  for (std::int64_t rank = 0; rank < ranks; ++rank)
    for (const auto& [name, what] : logical_parameters) {
      Slice::Blocks blocks;
      for (const std::int64_t extent : what.first.dims()) blocks.push_back({{0, extent}});
      const std::int64_t rows = what.first[0];
      blocks[0] = {{rows * rank / ranks, rows * (rank + 1) / ranks}};
      out[static_cast<std::size_t>(rank)].emplace(name, Slice(what.first, blocks));
    }
  return out;
}
std::vector<SliceLayout> whole() {
  return {{}};
}

/// Runs `body` in an engine on each of `ranks` for each model-parallel rank of `layouts`.
void on_all_slices(const std::vector<SliceLayout>& layouts, int ranks, int stage,
                   const std::function<void(Engine&, std::size_t)>& body) {
  for (std::size_t i = 0; i < layouts.size(); ++i)
    launch_ranks(ranks, [&](DistributedPtr dist) {
      Engine engine(dist, std::make_shared<Sliced>(layouts[i]),
                    odd_config(stage, R"(, "training": {"seed": 11})"));
      body(engine, i);
    });
}

LogicalStates states_of(const std::vector<SliceLayout>& layouts, int ranks, int stage,
                        const std::function<void(Engine&)>& before = {}) {
  LogicalStateCollector states;
  on_all_slices(layouts, ranks, stage, [&](Engine& engine, std::size_t) {
    if (before) before(engine);
    states.add(engine);
  });
  return states.take();
}

TEST(LogicalSlices, AreDrawnAsTheSameElementsOfTheWholeAre) {
  const LogicalStates expected = states_of(whole(), 1, 0);
  const auto first = reinterpret_cast<const float*>(expected.at("fp32.qkv").data());
  EXPECT_GT(*std::max_element(first, first + 240), *std::min_element(first, first + 240));
  for (const auto& [layouts, what] : {std::pair(by_blocks(2), "blocks of 2"),
                                      {by_blocks(3), "blocks of 3"},
                                      {by_rows(3), "rows of 3"},
                                      {whole(), "whole"}})
    for (const auto& [ranks, stage] : {std::pair(1, 0), {2, 3}, {3, 1}, {4, 3}})
      EXPECT_EQ(states_of(layouts, ranks, stage), expected)
          << what << ", " << ranks << " ranks, stage " << stage;
}

TEST(LogicalSlices, ASliceOfAnotherShapeIsRefused) {
  launch_ranks(1, [&](DistributedPtr dist) {
    const auto model = std::make_shared<Sliced>(SliceLayout{});
    model->own_parameters().back().second->slice = by_blocks(2)[0].at("qkv");
    expect_error(ErrorKind::usage, "its slice is [0:6+12:15+18:21, 0:10] of [24, 10]",
                 [&] { Engine(dist, model, odd_config(0)); });
  });
}

/// Moments as a function of name, kind and logical element: what masters hold, times two and three.
void fill_moments(const sharding::ShardedModel& model, device::Device& device) {
  for (const auto& unit : model.units())
    for (const auto& segment : unit->segments())
      for (sharding::StateBuffer& moments : segment->moments())
        for (const sharding::Piece& piece : segment->layout().pieces(moments.begin(), moments.end())) {
          const auto values = tensor::Tensor::zeros(device, {piece.count}, DType::f32);
          segment->read_masters(piece.flat_begin, values);
          for (std::int64_t k = 0; k < piece.count; ++k)
            values.data<float>()[k] *= &moments == &segment->moments()[0] ? 2 : 3;
          moments.write(piece.flat_begin, values).wait();
        }
}

/// Saves what `layouts` hold, each over `ranks`, as a layout of both would: every rank its file.
LogicalStates save(const fs::path& folder, const std::vector<SliceLayout>& layouts, int ranks, int stage) {
  fs::create_directories(folder);
  engine::Manifest manifest = engine::sample_manifest();
  manifest.scheduler.clear(), manifest.loss_scaler.clear(), manifest.files.clear(), manifest.shapes.clear();
  manifest.world_size = static_cast<int>(layouts.size()) * ranks;
  for (const auto& [name, what] : logical_parameters)
    manifest.shapes[name] = {what.first.dims().begin(), what.first.dims().end()};
  LogicalStateCollector states;
  on_all_slices(layouts, ranks, stage, [&](Engine& engine, std::size_t i) {
    fill_moments(engine.sharded(), engine.device());
    const auto file = folder / engine::rank_file(static_cast<int>(i) * ranks + engine.dist().rank());
    engine::write_rank_file(
        file, {engine::live_tensors(engine.sharded(), engine.device(), engine::FilePart::trained), {}},
        manifest.save_id);
    states.add(engine);
  });
  for (int rank = 0; rank < manifest.world_size; ++rank)
    manifest.files[engine::rank_file(rank)] = engine::checksum_file(folder / engine::rank_file(rank));
  write_text(folder / "manifest.json", manifest.to_json());
  return states.take();
}

TEST(LogicalSlices, AreLoadedHoweverTheyWereCut) {
  for (const auto& [written, ranks] :
       {std::pair(by_blocks(2), 2), {by_blocks(3), 1}, {by_rows(2), 3}, {whole(), 2}}) {
    TempFolder folder;
    const LogicalStates saved = save(folder.path(), written, ranks, 2);
    for (const auto& [name, bytes] : testing::whole_tensors(folder.path()))
      EXPECT_EQ(saved.at(name), bytes) << name;
    for (const auto& [read, by, stage] : {std::tuple(whole(), 1, 0),
                                          {whole(), 3, 3},
                                          {by_rows(3), 2, 1},
                                          {by_blocks(2), 2, 3},
                                          {by_blocks(3), 1, 2}}) {
      const LogicalStates loaded = states_of(read, by, stage, [&](Engine& engine) {
        // Nothing that it drew itself may remain.
        for (const auto& unit : engine.sharded().units())
          for (const auto& segment : unit->segments())
            segment->write_values(
                segment->update_begin(),
                tensor::Tensor::zeros(engine.device(), {segment->update_end() - segment->update_begin()},
                                      DType::f32));
        engine.load_checkpoint(folder.path().string());
      });
      EXPECT_EQ(loaded, saved) << written.size() << "x" << ranks << " to " << read.size() << "x" << by;
    }
  }
}

/// Two replicas over three ranks each: six files, in which every element is once, and as one rank has it.
TEST(LogicalSlices, ReplicasWriteEachElementOnce) {
  TempFolder folder;
  launch_ranks(6, [&](DistributedPtr dist) {
    const auto device = device::make_cpu_device(1);
    dist->world().bind(device);
    const auto kernels = tensor::make_kernels(*device);
    const auto shard = dist->world().split(dist->rank() / 3, dist->rank());
    const auto replica = dist->world().split(dist->rank() % 3, dist->rank());
    const config::Config config = odd_config(2, R"(, "training": {"seed": 11})");
    const sharding::ShardedModel model(std::make_shared<Sliced>(SliceLayout{}),
                                       engine::Optimizer(config.optimizer, 11).sharding_options(config),
                                       {{*shard, replica.get()}, *kernels});
    fill_moments(model, *device);
    engine::write_rank_file(folder / engine::rank_file(dist->rank()),
                            {engine::live_tensors(model, *device, engine::FilePart::trained), {}}, "x");
  });
  engine::Manifest manifest = engine::sample_manifest();
  manifest.shapes.clear(), manifest.files.clear();
  std::int64_t written = 0, elements = 0;
  manifest.world_size = 6;
  for (int rank = 0; rank < 6; ++rank) {
    const auto path = folder / engine::rank_file(rank);
    manifest.files[engine::rank_file(rank)] = engine::checksum_file(path);
    const engine::SafetensorsFile file(path);
    for (const engine::SafetensorsEntry& entry : file.entries()) written += entry.numel();
  }
  for (const auto& [name, what] : logical_parameters) {
    manifest.shapes[name] = {what.first.dims().begin(), what.first.dims().end()};
    elements += what.first.numel();
  }
  EXPECT_EQ(written, 3 * elements);
  write_text(folder / "manifest.json", manifest.to_json());
  const LogicalStates expected =
      states_of(whole(), 1, 0, [](Engine& engine) { fill_moments(engine.sharded(), engine.device()); });
  const auto found = testing::whole_tensors(folder.path());
  EXPECT_EQ(found.size(), 3 * logical_parameters.size());
  for (const auto& [name, bytes] : found) EXPECT_EQ(bytes, expected.at(name)) << name;
}

TEST(LogicalSlices, OfOneRankAloneAreToldToBeIncomplete) {
  TempFolder folder;
  save(folder.path(), by_blocks(2), 1, 0);
  engine::Manifest manifest = CheckpointReader(folder.path()).manifest();
  fs::rename(folder / engine::rank_file(1), folder / engine::rank_file(0));
  manifest.world_size = 1;
  manifest.files = {{engine::rank_file(0), engine::checksum_file(folder / engine::rank_file(0))}};
  write_text(folder / "manifest.json", manifest.to_json());
  expect_error(ErrorKind::data, "lacks elements from 0 on of 'fp32.", [&] {
    states_of(whole(), 1, 0, [&](Engine& engine) { engine.load_checkpoint(folder.path().string()); });
  });
  // Its pieces suffice for a rank that wants no more.
  on_all_slices({by_blocks(2)[1]}, 2, 3,
                [&](Engine& engine, std::size_t) { engine.load_checkpoint(folder.path().string()); });
}

}  // namespace
}  // namespace sherd::test
