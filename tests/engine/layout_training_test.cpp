// Engines over tensor, context and data ranks: a model with every kind of parameter against a plain
// computation in double, the same bits over stages and tiers, and checkpoints from one layout to another.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <set>
#include <utility>

#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/format.h"
#include "engine/estimate/estimate.h"
#include "support/expect_error.h"
#include "support/full_suite.h"
#include "support/temp_folder.h"
#include "support/whole_tensors.h"
#include "tensor/safetensors/safetensors.h"
#include "tests/engine/cut_runs.h"

namespace sherd::test {
namespace {

using sherd::testing::expect_error;
using sherd::testing::TempFolder;

const std::vector<Sizes> trained_layouts{{2, 1, 1}, {2, 1, 2}, {1, 2, 2},       {2, 2, 1},
                                         {4, 1, 1}, {2, 2, 2}, {2, 1, 2, false}};

class Layouts : public ::testing::TestWithParam<Sizes> {};

TEST_P(Layouts, TrainAsOneRankInDouble) {
  const Sizes sizes = GetParam();
  const cut::Weights initial = cut::weights_of(on_all({.sizes = {1, 1, 1}}, [](Engine&) {}));
  for (int stage = 0; stage <= 3; ++stage)
    for (const int accumulation : {1, 2}) {
      const Spec run{
          .sizes = sizes, .stage = stage, .accumulation = accumulation, .clipping = stage % 2 == 0 ? 0.2 : 0};
      SCOPED_TRACE(cat("stage ", stage, ", ", accumulation, " micro-batches"));
      const Outcome outcome = outcome_of(run);
      cut::Weights weights = initial;
      for (std::size_t step = 0; step < outcome.losses.size(); ++step) {
        const cut::Step expected =
            cut::train_step(weights, static_cast<int>(step), sizes.data, accumulation, 0.1, run.clipping);
        EXPECT_NEAR(outcome.losses[step], expected.loss, 1e-6);
        EXPECT_NEAR(outcome.norms[step], expected.norm, 1e-6);
        if (run.clipping > 0) {
          EXPECT_GT(expected.norm, run.clipping) << "nothing was clipped";
        }
      }
      expect_near(outcome.states, weights);
    }
}

/// Every setting that may not change a bit, with and without accumulation.
std::vector<Spec> layout_specs(const Sizes& sizes, int accumulation, const std::string& folder) {
  const Spec run{.sizes = sizes,
                 .accumulation = accumulation,
                 .clipping = 0.2,
                 .optimizer = R"("type": "AdamW", "params": {"lr": 0.01})"};
  std::vector<Spec> out;
  const auto add = [&](int stage, const std::string& zero, int shard = 0,
                       const std::string& recompute = "none") {
    Spec one = run;
    one.stage = stage, one.zero = zero, one.shard = shard, one.recompute = recompute;
    out.push_back(one);
  };
  const std::string nvme = cat(R"({"device": "nvme", "nvme_path": ")", folder, "\"}"),
                    cpu = R"({"device": "cpu"})";
  const std::string optimizer = R"("offload_optimizer": )", parameters = R"("offload_param": )";
  add(2, "");
  add(3, "");
  add(3, R"("reduce_bucket_size": 100, "stage3_prefetch_bucket_size": 1000, "overlap_comm": true)");
  add(3, optimizer + cpu + ", " + parameters + cpu);
  add(3, optimizer + nvme + ", " + parameters + nvme);
  add(2, optimizer + cpu, 0, "full");
  if (accumulation > 1) return out;
  add(0, "");
  add(1, optimizer + nvme);
  if (sizes.data > 1) {
    add(3, "", sizes.context);
    add(1, "", sizes.context);
  }
  return out;
}

TEST_P(Layouts, StagesTiersAndReplicasDoNotChangeABit) {
  const TempFolder folder;
  for (const int accumulation : {1, 2}) {
    std::optional<Outcome> first;
    for (const Spec& run : layout_specs(GetParam(), accumulation, folder.path().string())) {
      Outcome outcome = outcome_of(run);
      // Which tensors hold the weights depends on the stage; masters and moments are the same.
      std::erase_if(outcome.states, [](const auto& state) { return state.first.starts_with("parameters."); });
      if (!first) first = outcome;
      EXPECT_EQ(outcome.losses, first->losses) << run.stage << run.zero << run.shard;
      EXPECT_EQ(outcome.norms, first->norms) << run.stage << run.zero << run.shard;
      EXPECT_EQ(outcome.states, first->states) << run.stage << run.zero << run.shard;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, Layouts, ::testing::ValuesIn(trained_layouts),
                         [](const auto& test) { return test.param.text(); });

std::int64_t elements_in_files(const std::filesystem::path& folder, int ranks) {
  std::int64_t elements = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    const engine::SafetensorsFile file(folder / engine::rank_file(rank));
    for (const auto& entry : file.entries()) elements += entry.numel();
  }
  return elements;
}

constexpr std::int64_t model_elements = cut::in + cut::hidden * (cut::in + 1) + cut::out * (cut::hidden + 1);

/// Saved under each layout, loaded under each other: the same weights and moments, and training goes on as
/// one layout would have it.
TEST(LayoutCheckpoints, GoFromAnyLayoutToAnyOther) {
  const std::string momentum = R"("type": "SGD", "params": {"lr": 0.1, "momentum": 0.9})";
  const std::vector<Spec> runs{{.sizes = {2, 1, 2}, .stage = 3, .optimizer = momentum},
                               {.sizes = {1, 1, 2}, .stage = 1, .optimizer = momentum},
                               {.sizes = {2, 2, 2}, .stage = 2, .shard = 2, .optimizer = momentum},
                               {.sizes = {4, 1, 2}, .stage = 0, .optimizer = momentum},
                               {.sizes = {2, 1, 2, false}, .stage = 0, .optimizer = momentum}};
  const Outcome whole = outcome_of(runs[1], 6);
  for (const Spec& from : runs) {
    const TempFolder folder;
    const LogicalStates saved = on_all(from, [&](Engine& engine) {
      train(engine, 0, 3);
      engine.save_checkpoint(folder.path().string(), "here");
    });
    EXPECT_EQ(elements_in_files(folder / "here", from.sizes.ranks()), 2 * model_elements)
        << from.sizes.text();
    for (const auto& [name, bytes] : testing::whole_tensors(folder / "here"))
      EXPECT_EQ(saved.at(name), bytes) << name;
    for (const Spec& to : runs) {
      SCOPED_TRACE(cat(from.sizes.text(), " to ", to.sizes.text()));
      LogicalStates loaded =
          on_all(to, [&](Engine& engine) { engine.load_checkpoint(folder.path().string()); });
      EXPECT_EQ(loaded, saved);
      Outcome rest;
      rest.states = on_all(to, [&](Engine& engine) {
        engine.load_checkpoint(folder.path().string());
        train(engine, 3, 6, &rest);
      });
      for (std::size_t i = 0; i < rest.losses.size(); ++i) {
        EXPECT_NEAR(rest.losses[i], whole.losses[i + 3], 1e-6);
        EXPECT_NEAR(rest.norms[i], whole.norms[i + 3], 1e-6);
      }
      expect_near(rest.states, cut::weights_of(whole.states));
    }
  }
}

TEST(LayoutCheckpoints, NameTheLayout) {
  const TempFolder folder;
  on_all({.sizes = {2, 2, 2}, .shard = 2},
         [&](Engine& engine) { engine.save_checkpoint(folder.path().string(), "here"); });
  const engine::CheckpointReader reader(folder / "here");
  EXPECT_EQ(reader.manifest().grid, (std::map<std::string, std::int64_t>{{"tensor", 2},
                                                                         {"context", 2},
                                                                         {"data", 2},
                                                                         {"shard", 2},
                                                                         {"replica", 2},
                                                                         {"pipeline", 1},
                                                                         {"expert", 1}}));
  ::testing::internal::CaptureStderr();
  on_all({.sizes = {1, 2, 1}}, [&](Engine& engine) { engine.load_checkpoint(folder.path().string()); });
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              ::testing::HasSubstr("8 ranks (tensor 2 x context 2 x data 2) wrote it, and it goes on with 2 "
                                   "(tensor 1 x context 2 x data 1)"));
}

TEST(LayoutErrors, SizesThatDoNotDivideNameThoseThatDo) {
  const auto error = [](int ranks, const Spec& run, const char* text) {
    launch_ranks(ranks, [&](DistributedPtr dist) {
      expect_error(ErrorKind::config, text, [&] { make_groups(dist, run.config()); });
      expect_error(ErrorKind::config, text,
                   [&] { initialize({.dist = dist, .model = cut_model, .config = run.config()}); });
    });
  };
  error(4, {.sizes = {3, 1, 1}}, "parallel.tensor 3 does not divide the 4 ranks; sizes that do: 1, 2, 4");
  error(4, {.sizes = {2, 4, 1}}, "parallel.context 4 does not divide the 2 ranks");
  error(4, {.sizes = {1, 2, 2}, .shard = 1}, "parallel.shard_size 1 is no multiple of parallel.context 2");
}

TEST(LayoutErrors, ARankWithAnotherLayoutIsToldOnAll) {
  launch_ranks(4, [](DistributedPtr dist) {
    Spec run{.sizes = {2, 1, 2}};
    if (dist->rank() == 3) run.sizes = {1, 2, 2};
    const char* text = "rank 3 was started with another parallel.tensor";
    expect_error(ErrorKind::config, text, [&] { make_groups(dist, run.config()); });
    expect_error(ErrorKind::config, text,
                 [&] { initialize({.dist = dist, .model = cut_model, .config = run.config()}); });
  });
}

TEST(LayoutErrors, ModelsThatAreCutOtherwiseAreRefused) {
  const auto error = [](const char* text, const std::function<ModelSource(int rank)>& source) {
    launch_ranks(2, [&](DistributedPtr dist) {
      expect_error(ErrorKind::config, text, [&] {
        initialize(
            {.dist = dist, .model = source(dist->rank()), .config = Spec{.sizes = {2, 1, 1}}.config()});
      });
    });
  };
  const ModelSource whole = [] { return std::make_shared<cut::Model>(parallel::Layout()); };
  error("no parameter of the model is cut: build it with the layout", [&](int) { return whole; });
  error("no parameter of the model is cut",
        [&](int rank) { return rank == 0 ? whole : ModelSource(cut_model); });
  error("hold the same slices of the model", [](int) -> ModelSource {
    return [](const parallel::Layout& layout) {
      const auto model = std::make_shared<cut::Model>(layout);
      for (const auto& parameter : model->parameters())
        if (parameter->slice)
          parameter->slice =
              cut::part_of(parameter->slice->logical(),
                           parameter->slice->shape()[0] == parameter->slice->logical()[0], 0, 2);
      return model;
    };
  });
}

/// Whose gradients would count each sequence once per context rank.
/// A gain that applies to a part of the tokens, and does not say so (parallel::on_stream()).
TEST(LayoutErrors, CopiesThatFindDifferentGradientsAreToldOnAll) {
  std::atomic<int> told = 0;
  launch_ranks(4, [&](DistributedPtr dist) {
    const auto forgetful = [](const parallel::Layout& layout) {
      auto model = std::make_shared<cut::Model>(layout);
      EXPECT_TRUE(std::exchange(model->parameters()[0]->partial_gradient, false));
      return model;
    };
    const Spec run{.sizes = {2, 1, 2}, .stage = 2};
    const auto made = initialize({.dist = dist, .model = forgetful, .config = run.config()});
    try {
      train(*made.engine, 0, 1);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::usage);
      EXPECT_THAT(error.what(),
                  ::testing::HasSubstr("different gradients for parameters that each of them holds whole"));
      ++told;
    }
    EXPECT_EQ(made.engine->global_steps(), 0);
  });
  EXPECT_EQ(told, 4);
}

TEST(LayoutErrors, ModelsWithoutTheLayoutOfContextRanksAreRefused) {
  const char* text = "parallel.context is 2, and the model was built without the layout";
  const Spec run{.sizes = {1, 2, 1}};
  const auto whole = [] { return std::make_shared<cut::Model>(parallel::Layout()); };
  launch_ranks(2, [&](DistributedPtr dist) {
    expect_error(ErrorKind::config, text,
                 [&] { initialize({.dist = dist, .model = whole, .config = run.config()}); });
    expect_error(ErrorKind::config, text,
                 [&] { initialize({.dist = dist, .model = whole(), .config = run.config()}); });
    expect_error(ErrorKind::config, text, [&] { Engine(dist, whole(), run.config()); });
    const auto groups = make_groups(dist, run.config());
    const auto model = cut_model(layout_of(*groups, run.config()));
    initialize({.dist = dist, .model = model, .config = run.config(), .grid = groups});
  });
  const auto no_batch = [](device::Device&) { return tensor::Batch(); };
  expect_error(ErrorKind::config, text,
               [&] { engine::estimate(run.config(), whole, no_batch, {.ranks = 2, .local_ranks = 2}); });
}

/// A grid of the caller's own, from which the model takes its layout.
TEST(LayoutGroups, MayBeTheCallers) {
  const Spec run{.sizes = {2, 1, 2}, .stage = 2};
  const Outcome expected = outcome_of(run);
  Spec plain = run;
  plain.sizes = {1, 1, 1};
  LogicalStateCollector states;
  launch_ranks(4, [&](DistributedPtr dist) {
    const auto groups = std::make_shared<comm::ProcessGroups>(dist->world(), comm::Grid(4, {.tensor = 2}));
    const auto model = cut_model(layout_of(*groups, plain.config()));
    const auto made = initialize({.dist = dist, .model = model, .config = plain.config(), .grid = groups});
    EXPECT_EQ(made.engine->config().parallel.tensor, 2);
    EXPECT_EQ(made.engine->train_batch_size(), 2);
    train(*made.engine, 0, 4);
    states.add(*made.engine);
  });
  EXPECT_EQ(states.take(), expected.states);
  launch_ranks(4, [&](DistributedPtr dist) {
    const auto groups = std::make_shared<comm::ProcessGroups>(dist->world(), comm::Grid(4, {.tensor = 4}));
    expect_error(
        ErrorKind::config, "parallel.tensor is 2, and the groups that the program brings have 4",
        [&] { initialize({.dist = dist, .model = cut_model, .config = run.config(), .grid = groups}); });
  });
}

/// An estimate's rank among absent ones books and sends what the real one does.
TEST(LayoutEstimates, AreWhatARunBooksAndSends) {
  for (const Spec& spec : {Spec{.sizes = {2, 1, 2}, .stage = 3, .accumulation = 2},
                           Spec{.sizes = {2, 2, 2}, .stage = 1, .shard = 2},
                           Spec{.sizes = {1, 2, 2}, .stage = 2}, Spec{.sizes = {4, 1, 1}, .stage = 0}}) {
    SCOPED_TRACE(spec.sizes.text());
    const int ranks = spec.sizes.ranks();
    std::vector<engine::Estimate> planned;
    const auto batch = [](device::Device& device) {
      return tensor::Batch{{"x", tensor::Tensor::empty(device, {cut::tokens, cut::in}, DType::f32)},
                           {"y", tensor::Tensor::empty(device, {cut::tokens, cut::out}, DType::f32)}};
    };
    for (int rank = 0; rank < ranks; ++rank)
      planned.push_back(engine::estimate(spec.config(), cut_model, batch,
                                         {.ranks = ranks, .local_ranks = ranks, .rank = rank},
                                         {.evaluates = false}));
    launch_ranks(ranks, [&](DistributedPtr dist) {
      const engine::Estimate& mine = planned[static_cast<std::size_t>(dist->rank())];
      const auto made = initialize({.dist = dist, .model = cut_model, .config = spec.config()});
      EXPECT_EQ(engine::MemoryReport::of(made.engine->device()).tiers[0].total_current,
                mine.states.tiers[0].total_current);
      train(*made.engine, 0, 1);
      made.engine->groups().reset_traffic();
      train(*made.engine, 1, 2);
      const auto sent = made.engine->groups().traffic();
      ASSERT_EQ(sent.size(), mine.traffic_by_axis.size());
      for (std::size_t i = 0; i < sent.size(); ++i) {
        EXPECT_EQ(sent[i].axis, mine.traffic_by_axis[i].axis);
        EXPECT_EQ(sent[i].traffic.payload(), mine.traffic_by_axis[i].traffic.payload())
            << comm::name_of(sent[i].axis);
        EXPECT_EQ(sent[i].traffic.scalars, mine.traffic_by_axis[i].traffic.scalars)
            << comm::name_of(sent[i].axis);
      }
    });
  }
}

/// Rounded stochastically by their logical element: those that are 0 but for rounding show the bits.
TEST(LayoutStates, MomentsRoundByTheLogicalElement) {
  const auto moments_of = [](const Sizes& sizes) {
    LogicalStateCollector states;
    const Spec spec{.sizes = sizes,
                    .stage = 1,
                    .moments = "bf16",
                    .optimizer = R"("type": "Adam", "params": {"lr": 0.01})"};
    launch_ranks(sizes.ranks(), [&](DistributedPtr dist) {
      const auto made = initialize({.dist = dist, .model = cut_model, .config = spec.config()});
      Engine& engine = *made.engine;
      for (sharding::Segment* segment : engine.sharded().trainable_segments()) {
        engine::UpdateView view;
        view.segment = segment, view.begin = segment->update_begin();
        const std::int64_t begin = segment->update_begin(), end = segment->update_end();
        view.parameters = segment->parameters().range(begin, end);
        for (const auto& moment : segment->moments()) view.moments.push_back(moment.range(begin, end));
        view.gradients = tensor::Tensor::empty(engine.device(), {end - begin}, DType::f32);
        engine.kernels().fill(view.gradients, 0.3);
        if (segment == engine.sharded().trainable_segments()[0]) engine.optimizer()->begin_step();
        engine.optimizer()->update_of(*segment).pass(optim::Phase::elementwise, view, 1, engine.kernels());
        engine.sharded().publish(*segment);
      }
      engine.sharded().end_step();
      states.add(engine);
    });
    LogicalStates out = states.take();
    std::erase_if(out, [](const auto& state) { return !state.first.starts_with("exp_avg"); });
    return out;
  };
  const LogicalStates expected = moments_of({1, 1, 1});
  const auto* first = reinterpret_cast<const std::uint16_t*>(expected.at("exp_avg.up.weight").data());
  ASSERT_EQ(expected.at("exp_avg.up.weight").size(), 48 * sizeof(std::uint16_t));
  EXPECT_GT(std::set<std::uint16_t>(first, first + 48).size(), 1u) << "nothing was rounded at random";
  EXPECT_EQ(moments_of({2, 1, 1}), expected);
  EXPECT_EQ(moments_of({4, 1, 2}), expected);
}

/// Dropout's stream and the samples go by the data coordinate.
TEST(LayoutGroups, RanksOfOneModelDrawTheSame) {
  std::vector<std::uint64_t> streams(8);
  launch_ranks(8, [&](DistributedPtr dist) {
    const auto made =
        initialize({.dist = dist, .model = cut_model, .config = Spec{.sizes = {2, 2, 2}}.config()});
    made.engine->evaluate(
        [&](autograd::Tape& tape) { streams[static_cast<std::size_t>(dist->rank())] = tape.random.stream; });
  });
  for (std::size_t rank = 0; rank < 8; ++rank) EXPECT_EQ(streams[rank] == streams[0], rank < 4) << rank;
  EXPECT_EQ(streams[4], streams[7]);
}

}  // namespace
}  // namespace sherd::test
