#include "engine/update/parameter_groups.h"

#include <gmock/gmock.h>

#include "engine/checkpoint/manifest.h"
#include "engine/initialize.h"
#include "support/expect_error.h"
#include "support/odd_models.h"
#include "support/temp_folder.h"

namespace sherd::test {
namespace {

using engine::assign_groups;
using sherd::testing::expect_error;
using sherd::testing::read_text;
using sherd::testing::TempFolder;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

using Patterns = std::vector<std::string>;

config::Optimizer optimizer_with(const std::vector<Patterns>& groups) {
  config::Optimizer out;
  for (const Patterns& patterns : groups) out.groups.emplace_back().match = patterns;
  return out;
}

/// Group of every parameter, by name.
std::map<std::string, int> groups_of(nn::Module& model, const config::Optimizer& optimizer) {
  Patterns notes;
  const engine::GroupOf groups = assign_groups(model, optimizer, notes);
  model.assign_names();
  std::map<std::string, int> out;
  for (const nn::ParameterPtr& parameter : model.parameters()) {
    const auto found = groups.find(parameter.get());
    out[parameter->name] = found == groups.end() ? 0 : found->second;
  }
  return out;
}

TEST(AssignGroups, TheFirstThatMatchesHasTheParameter) {
  Odd model;
  const auto got = groups_of(model, optimizer_with({{"layer?.bias", "out.*"}, {"*.bias", "layer[!0]*"}}));
  // The weight of layer1 is layer2's too.
  EXPECT_EQ(got, (std::map<std::string, int>{{"layer0.weight", 0},
                                             {"layer0.bias", 1},
                                             {"layer1.weight", 2},
                                             {"layer1.bias", 1},
                                             {"layer2.bias", 1},
                                             {"out.weight", 1},
                                             {"out.bias", 1}}))
      << "`*` matches dots, and the second group's own pattern *.bias comes too late";
}

void expect_refused(const std::vector<Patterns>& groups, const std::string& message) {
  Odd model;
  Patterns notes;
  expect_error(ErrorKind::config, message, [&] { assign_groups(model, optimizer_with(groups), notes); });
}

TEST(AssignGroups, WhatMatchesNothingIsNamedWithWhatIsNear) {
  expect_refused({{"*.bias"}, {"out.weights"}},
                 "optimizer.groups[1]: no parameter of the model matches 'out.weights'; is 'out.weight' or");
  expect_refused(
      {{"*.bias", "*.biass"}},
      "optimizer.groups[0]: no parameter of the model matches '*.biass'; is 'layer0.bias' or 'layer1.bias' "
      "meant?");
  expect_refused({{"layer2.weight"}}, "is 'layer0.weight' or 'layer1.weight' meant?");  // tied
  expect_refused({{"lauer1*"}}, "is 'layer1.weight' or 'layer1.bias' meant?");
  expect_refused({{"LAYER0.*"}}, "matches 'LAYER0.*'");
}

TEST(AssignGroups, AGroupThatComesTooLateIsNamed) {
  expect_refused(
      {{"layer*"}, {"layer1.*", "*2.bias"}},
      "optimizer.groups[1]: earlier groups have all parameters that match 'layer1.*' and its other patterns");
  expect_refused({{"*"}, {"out.bias"}}, "match 'out.bias': put it before them, or drop it");
}

TEST(AssignGroups, DecayThatTheModelRulesOutIsNoted) {
  Odd model;
  config::Optimizer optimizer = optimizer_with({{"*.bias"}, {"layer0.*"}});
  for (auto& group : optimizer.groups) group.weight_decay = 0.1;
  Patterns notes;
  assign_groups(model, optimizer, notes);
  EXPECT_THAT(notes, ElementsAre(HasSubstr("optimizer.groups[0].weight_decay: no effect")));
}

/// Three groups of two rules: layer0 by SGD with momentum, biases at another rate.
constexpr const char* three_groups =
    R"([{"match": "layer0.*", "type": "SGD", "momentum": 0.9, "lr": 0.04}, {"match": "*.bias", "lr": 0.005}])";

config::Config with_groups(const std::string& groups, const std::string& more = "", int stage = 3) {
  return config::parse_text(cat(
      R"({"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}, "groups": )",
      groups, R"(}, "zero_optimization": {"stage": )", stage, R"(, "stage3_param_persistence_threshold": 0})",
      more, "}"));
}

void on_one_rank(const config::Config& config, const std::function<void(Engine&)>& body) {
  launch_ranks(1, [&](DistributedPtr dist) {
    Engine engine(dist, std::make_shared<Odd>(), config);
    body(engine);
  });
}

TEST(ParameterGroups, ShareSegmentsUnlessTheirRulesDiffer) {
  on_one_rank(
      with_groups(R"([{"match": "*.bias", "lr": 1, "weight_decay": 2, "betas": [0.1, 0.2], "eps": 3}])"),
      [](Engine& engine) {
        for (const auto& unit : engine.sharded().units()) EXPECT_EQ(unit->segments().size(), 1u);
      });
  on_one_rank(
      with_groups(R"([{"match": "layer1.bias", "type": "SGD"}, {"match": "out.bias", "type": "Adam"},)"
                  R"({"match": "out.*", "lr": 1}])"),
      [](Engine& engine) {
        std::map<std::string, std::vector<std::size_t>> states;
        for (const auto& unit : engine.sharded().units())
          for (const auto& segment : unit->segments())
            states[unit->name()].push_back(segment->states().size());
        EXPECT_EQ(states, (std::map<std::string, std::vector<std::size_t>>{
                              {"layer0", {2}}, {"layer1", {2, 0}}, {"layer2", {2}}, {"root", {2, 2}}}));
      });
}

TEST(ParameterGroups, DoNotSplitWhatDoesNotTrain) {
  launch_ranks(1, [](DistributedPtr dist) {
    Engine engine(dist, std::make_shared<Odd>(true),
                  with_groups(R"([{"match": "layer0.bias", "type": "SGD"}])"));
    for (const auto& unit : engine.sharded().units()) EXPECT_EQ(unit->segments().size(), 1u) << unit->name();
  });
}

TEST(ParameterGroups, HaveARateEach) {
  on_one_rank(with_groups(three_groups), [](Engine& engine) {
    EXPECT_THAT(engine.get_lr(), ElementsAre(0.01, 0.04, 0.005));
    engine.optimizer()->set_lr(1, 0.5);
    EXPECT_THAT(engine.get_lr(), ElementsAre(0.01, 0.5, 0.005));
    engine.train_batch([&] { return odd_batch(engine, 0); });
    engine.optimizer()->set_lr(0.25);
    EXPECT_THAT(engine.last_step().lr, ElementsAre(0.01, 0.5, 0.005)) << "that the step used";
    EXPECT_THAT(engine.get_lr(), ElementsAre(0.25, 0.25, 0.25));
    for (const int group : {-1, 3})
      expect_error(ErrorKind::usage, cat("set_lr: group ", group, " of 3"),
                   [&] { engine.optimizer()->set_lr(group, 1); });
  });
}

TEST(ParameterGroups, KeepTheirProportionsUnderASchedule) {
  const std::string schedule =
      R"(, "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0.003, "warmup_max_lr": 0.007,)"
      R"( "warmup_num_steps": 4, "warmup_type": "linear"}})";
  on_one_rank(
      with_groups(R"([{"match": "layer0.*", "lr": 0.04}, {"match": "*.bias", "weight_decay": 1}])", schedule),
      [](Engine& engine) {
        for (int step = 0; step < 6; ++step) {
          const std::vector<double> lr = engine.get_lr();
          EXPECT_EQ(lr, engine.scheduler()->get_lr());
          EXPECT_EQ(lr[1], lr[0] * (0.04 / 0.01));
          EXPECT_EQ(lr[2], lr[0]);
          engine.train_batch([&] { return odd_batch(engine, step); });
          EXPECT_EQ(engine.last_step().lr, lr);
        }
        EXPECT_EQ(engine.get_lr()[0], 0.007);
      });
  config::Config config = with_groups(R"([{"match": "layer0.*"}])", schedule);
  config.optimizer.lr = 0;  // as the parser would not let it
  launch_ranks(1, [&](DistributedPtr dist) {
    expect_error(ErrorKind::config, "keeps its proportion to optimizer.params.lr",
                 [&] { Engine engine(dist, std::make_shared<Odd>(), config); });
  });
}

TEST(ParameterGroups, ComeFromCodeToo) {
  launch_ranks(2, [](DistributedPtr dist) {
    const auto model = std::make_shared<Odd>();
    const auto made = initialize(
        {.dist = dist,
         .model = model,
         .config = with_groups(R"([{"match": "out.bias", "lr": 1}])"),
         .parameter_groups = {
             {.parameters = model->layer(0).parameters(), .lr = 0.5, .weight_decay = 0.25},
             {.parameters = {model->layer(1).weight()},
              .type = config::OptimizerType::sgd,
              .with = [](config::OptimizerRule& rule) { rule.as<config::SgdOptions>().momentum = 0.75; }}}});
    EXPECT_THAT(made.engine->get_lr(), ElementsAre(0.01, 1, 0.5, 0.01));
    const auto& groups = made.engine->config().optimizer.groups;
    ASSERT_EQ(groups.size(), 3u);
    EXPECT_THAT(groups[1].match, ElementsAre("layer0.weight", "layer0.bias"));
    EXPECT_EQ(groups[1].weight_decay, 0.25);
    EXPECT_THAT(groups[2].match, ElementsAre("layer1.weight"));
    EXPECT_EQ(groups[2].as<config::SgdOptions>().momentum, 0.75);
    EXPECT_TRUE(config::parse_text(config::dump(made.engine->config())).optimizer ==
                made.engine->config().optimizer);
  });
}

config::Config with_one(config::Config config, const nn::Module& model, const ParameterGroup& group) {
  config = engine::with_rules(std::move(config), {group});
  engine::name_parameters(config, model, {group});
  return config;
}

TEST(ParameterGroups, FromCodeAreCheckedAsThoseOfFiles) {
  const auto model = std::make_shared<Odd>();
  const auto expect_bad = [&](const ParameterGroup& group, const std::string& message) {
    expect_error(ErrorKind::config, message, [&] { with_one({}, *model, group); });
  };
  expect_bad({}, "parameter_groups[0] has no parameters");
  expect_bad({.parameters = {nullptr}}, "a null pointer");
  expect_bad({.parameters = Odd().parameters()}, "a parameter that the model does not have");
  expect_bad({.parameters = model->parameters(), .lr = -1},
             "optimizer.groups[0].lr: must be a number >= 0, not -1");
  expect_bad({.parameters = model->parameters(), .lr = std::nan("")}, "must be finite");
  expect_bad({.parameters = model->parameters(),
              .type = config::OptimizerType::sgd,
              .with = [](config::OptimizerRule& rule) { rule.as<config::SgdOptions>().nesterov = true; }},
             "nesterov needs a momentum");
  expect_bad({.parameters = model->parameters(),
              .type = config::OptimizerType::adamw,
              .with = [](config::OptimizerRule& rule) { rule.as<config::SgdOptions>().momentum = 0.5; }},
             "a rule of the type AdamW was asked for options of another");
}

/// With a section of one type, and a group of another made in code: of which replicas exchange momentum, the
/// checks are those of the whole configuration.
config::Config with_code_group(const std::string& section, config::OptimizerType group,
                               const std::string& more) {
  const Odd model;
  return with_one(config::parse_text(cat(R"({"optimizer": {"type": ")", section, "\"}", more, "}")), model,
                  {.parameters = {model.layer(0).weight()}, .type = group});
}

TEST(ParameterGroups, FromCodeMayExchangeMomentumAndStandBesideWhatDoes) {
  using enum config::OptimizerType;
  const std::string of_two = R"(, "zero_optimization": {"stage": 2}, "parallel": {"shard_size": 2})";
  for (const auto& [section, group] : {std::pair("AdamW", onebitadam), std::pair("AdamW", onebitlamb),
                                       std::pair("OneBitAdam", adamw), std::pair("OneBitLamb", onebitadam)}) {
    EXPECT_EQ(with_code_group(section, group, of_two).parallel.shard_size, 2);
    const config::Config each_a_replica = with_code_group(section, group, R"(, "parallel": {"context": 2})");
    EXPECT_EQ(each_a_replica.parallel.shard_size, 2) << "context ranks share states";
    EXPECT_THAT(each_a_replica.notes, Contains(HasSubstr("parallel.shard_size: 2, as OneBit")));
    EXPECT_EQ(std::count_if(each_a_replica.notes.begin(), each_a_replica.notes.end(),
                            [](const std::string& note) { return note.starts_with("parallel."); }),
              1);
  }
  for (const auto group : {onebitadam, onebitlamb}) {
    const auto refused = [&](const std::string& more, const std::string& message) {
      expect_error(ErrorKind::config, message, [&] { with_code_group("AdamW", group, more); });
    };
    refused(cat(of_two, R"(, "training": {"moments_dtype": "bf16"})"),
            cat("optimizer: what ", config::name_of(group), " has not sent yet is kept in fp32"));
    for (const int stage : {1, 2, 3})
      refused(cat(R"(, "zero_optimization": {"stage": )", stage, "}"),
              cat("compresses what replicas exchange, and at zero_optimization.stage ", stage,
                  " all ranks share one replica's states: give parallel.shard_size"));
  }
}

TEST(ParameterGroups, FromCodeMakeEachRankAReplicaAtStage0) {
  launch_ranks(2, [](DistributedPtr dist) {
    const auto model = std::make_shared<Odd>();
    const auto made = initialize({.dist = dist,
                                  .model = model,
                                  .config = with_groups("[]", "", 0),
                                  .parameter_groups = {{.parameters = model->layer(0).parameters(),
                                                        .type = config::OptimizerType::onebitadam,
                                                        .with = [](config::OptimizerRule& rule) {
                                                          rule.as<config::OneBitAdamOptions>().freeze_step =
                                                              1;
                                                        }}}});
    EXPECT_EQ(made.engine->config().parallel.shard_size, 1);
    EXPECT_EQ(made.engine->groups().group(comm::Axis::replica).size(), 2);
    for (int step = 0; step < 3; ++step)
      made.engine->train_batch([&] { return odd_batch(*made.engine, step); });
    EXPECT_EQ(made.engine->global_steps(), 3);
  });
}

/// A model whose parameter is called as patterns are.
class Starred : public nn::Model {
 public:
  Starred() {
    for (const char* name : {"a*", "ab", "a[b]", "a\\b"}) declare(name, {4}, nn::Init::ones());
  }

 protected:
  nn::Var forward(nn::Tape&, const tensor::Batch&) override { return {}; }
};

TEST(ParameterGroups, FromCodeMeanTheirParametersAlone) {
  Starred model;
  for (const nn::ParameterPtr& parameter : model.parameters()) {
    const config::Config config = with_one({}, model, {.parameters = {parameter}});
    Patterns notes;
    const engine::GroupOf groups = assign_groups(model, config.optimizer, notes);
    ASSERT_EQ(groups.size(), 1u);
    EXPECT_EQ(groups.begin()->first, parameter.get());
  }
}

// ---- checkpoints ----

/// The error that `loading` what `saving` has saved ends with; empty where it loads. Then `look` at it.
std::string resumed(const config::Config& saving, const config::Config& loading,
                    const std::function<void(Engine&)>& before = {},
                    const std::function<void(Engine&)>& look = {}) {
  const TempFolder folder;
  std::string error;
  on_one_rank(saving, [&](Engine& engine) {
    engine.train_batch([&] { return odd_batch(engine, 0); });
    if (before) before(engine);
    engine.save_checkpoint(folder.path().string());
  });
  on_one_rank(loading, [&](Engine& engine) {
    try {
      engine.load_checkpoint(folder.path().string());
      if (look) look(engine);
    } catch (const Error& e) {
      error = e.what();
    }
  });
  return error;
}

TEST(GroupCheckpoints, KeepTheRatesSetByTheCallerByGroup) {
  const config::Config
      config = with_groups(three_groups),
      other = with_groups(
          R"([{"match": "out.bias", "lr": 0.125}, {"match": "layer0.*", "type": "SGD", "momentum": 0.9, "lr": 0.04}])");
  const auto set_one = [](Engine& engine) { engine.optimizer()->set_lr(1, 0.5); };
  const auto set_last = [](Engine& engine) { engine.optimizer()->set_lr(2, 0.25); };
  EXPECT_EQ(resumed(config, config, set_last,
                    [](Engine& engine) { EXPECT_THAT(engine.get_lr(), ElementsAre(0.01, 0.04, 0.25)); }),
            "");
  EXPECT_EQ(resumed(config, config, set_one,
                    [](Engine& engine) { EXPECT_THAT(engine.get_lr(), ElementsAre(0.01, 0.5, 0.005)); }),
            "");
  // Whatever its number, the group that has the patterns gets the rate; without one it is dropped.
  EXPECT_EQ(resumed(config, other, set_one,
                    [](Engine& engine) { EXPECT_THAT(engine.get_lr(), ElementsAre(0.01, 0.125, 0.5)); }),
            "");
  EXPECT_EQ(resumed(config, other, set_last,
                    [](Engine& engine) { EXPECT_THAT(engine.get_lr(), ElementsAre(0.01, 0.125, 0.04)); }),
            "");
  const auto set_all = [](Engine& engine) { engine.optimizer()->set_lr(0.75); };
  EXPECT_EQ(resumed(config, config, set_all,
                    [](Engine& engine) { EXPECT_THAT(engine.get_lr(), ElementsAre(0.75, 0.75, 0.75)); }),
            "");
}

TEST(GroupCheckpoints, OfOtherGroupsGiveTheirRatesToThoseThatAreLeft) {
  const config::Config one = with_groups("[]"), two = with_groups(R"([{"match": "*.bias", "lr": 0.125}])");
  const auto set_all = [](Engine& engine) { engine.optimizer()->set_lr(0.75); };
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(resumed(one, two, set_all,
                    [](Engine& engine) { EXPECT_THAT(engine.get_lr(), ElementsAre(0.75, 0.125)); }),
            "");
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(log,
              HasSubstr("the rate 0.75 that the saved run's own code had set for group 0 holds for group 0"));
  EXPECT_THAT(log, HasSubstr("optimizer.groups[0].match was not set and is"));
  EXPECT_EQ(
      resumed(one, one, set_all, [](Engine& engine) { EXPECT_THAT(engine.get_lr(), ElementsAre(0.75)); }),
      "");
}

TEST(GroupCheckpoints, OfAProgramWithOtherKeysGiveTheirRateToGroup0) {
  const TempFolder folder;
  on_one_rank(with_groups("[]"), [&](Engine& engine) {
    engine.train_batch([&] { return odd_batch(engine, 0); });
    engine.optimizer()->set_lr(0.75);
    engine.save_checkpoint(folder.path().string(), "a");
  });
  const auto path = folder / "a" / "manifest.json";
  for (const char* config : {"", R"({"a_key_that_is_no_more": 1})"}) {
    engine::Manifest manifest = engine::Manifest::from_json(read_text(path), path);
    manifest.config = config;
    sherd::testing::write_text(path, manifest.to_json());
    on_one_rank(with_groups("[]"), [&](Engine& engine) {
      engine.load_checkpoint(folder.path().string(), "a");
      EXPECT_THAT(engine.get_lr(), ElementsAre(0.75)) << config;
    });
  }
}

TEST(GroupCheckpoints, SayWhichParameterHasAnotherRule) {
  const config::Config adam = with_groups("[]"),
                       sgd = with_groups(R"([{"match": "layer1.weight", "type": "SGD", "momentum": 0.9}])"),
                       plain = with_groups(R"([{"match": "layer1.weight", "type": "SGD"}])");
  EXPECT_THAT(resumed(adam, sgd), HasSubstr("lacks elements from 0 on of 'momentum_buffer.layer1.weight'"));
  EXPECT_THAT(resumed(adam, sgd),
              HasSubstr("its optimizer kept the moments exp_avg, exp_avg_sq; resume with the "
                        "optimizer that it was saved with, and the groups, or begin anew"));
  EXPECT_THAT(resumed(sgd, adam), HasSubstr("its optimizer kept the moments momentum_buffer; resume"))
      << "although other parameters have exp_avg";
  EXPECT_THAT(resumed(plain, adam), HasSubstr("its optimizer kept no moments; resume"));
  EXPECT_EQ(resumed(adam, plain), "") << "what a rule does not keep is left out";
}

TEST(GroupCheckpoints, HaveTheStatesOfEveryRuleByName) {
  const TempFolder folder;
  on_one_rank(with_groups(three_groups), [&](Engine& engine) {
    engine.train_batch([&] { return odd_batch(engine, 0); });
    engine.save_checkpoint(folder.path().string(), "a");
  });
  const std::string file = read_text(folder / "a" / "rank_00000.safetensors");
  for (const char* name : {"momentum_buffer.layer0.weight", "momentum_buffer.layer0.bias",
                           "exp_avg.layer1.weight", "exp_avg_sq.out.bias", "fp32.layer0.weight"})
    EXPECT_NE(file.find(cat("\"", name, "\":{\"dtype\"")), std::string::npos) << name;
  EXPECT_EQ(file.find("exp_avg.layer0"), std::string::npos);
  EXPECT_EQ(file.find("momentum_buffer.layer1"), std::string::npos);
}

}  // namespace
}  // namespace sherd::test
