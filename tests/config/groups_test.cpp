#include <gmock/gmock.h>

#include <map>

#include "config/config.h"
#include "config/keys.h"
#include "config/support.h"

namespace sherd::config {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string with_groups(const std::string& groups, const std::string& more = "") {
  return R"({"optimizer": {"groups": )" + groups +
         R"(, "type": "AdamW", "params": {"lr": 0.002, "weight_decay": 0.05, "betas": [0.8, 0.9]}})" + more +
         "}";
}

TEST(OptimizerGroups, TakeFromTheSectionWhatTheyDoNotGive) {
  const Config config = parse_text(with_groups(R"([{"match": ["*.bias", "*norm*"], "weight_decay": 0},
                                                   {"match": "wte.*", "lr": 1e-4, "betas": [0.5, 0.6]}])"));
  ASSERT_EQ(config.optimizer.groups.size(), 2u);
  OptimizerRule first = config.optimizer, second = config.optimizer;
  EXPECT_EQ(first.lr, 0.002);
  first.weight_decay = 0;
  second.lr = 1e-4, second.betas()->beta1 = 0.5, second.betas()->beta2 = 0.6;
  EXPECT_EQ(static_cast<OptimizerRule>(config.optimizer.groups[0]), first);
  EXPECT_EQ(static_cast<OptimizerRule>(config.optimizer.groups[1]), second);
  EXPECT_THAT(config.optimizer.groups[0].match, ElementsAre("*.bias", "*norm*"));
  EXPECT_THAT(config.optimizer.groups[1].match, ElementsAre("wte.*"));
}

TEST(OptimizerGroups, OfAnotherTypeTakeRateAndDecayAlone) {
  const Config config =
      parse_text(with_groups(R"([{"match": "a", "type": "SGD", "momentum": 0.9, "nesterov": true},
                                                   {"match": "b", "type": "adam", "lr": 1}])"));
  OptimizerRule sgd = default_rule(OptimizerType::sgd), adam = default_rule(OptimizerType::adam);
  sgd.lr = 0.002, sgd.weight_decay = 0.05, sgd.options = SgdOptions{.momentum = 0.9, .nesterov = true};
  adam.lr = 1, adam.weight_decay = 0.05;
  EXPECT_EQ(static_cast<OptimizerRule>(config.optimizer.groups[0]), sgd);
  EXPECT_EQ(static_cast<OptimizerRule>(config.optimizer.groups[1]), adam) << "betas are the type's own";
}

// The keys below `params` in the section stand beside `match` in a group.
TEST(OptimizerGroups, TakeEveryKeyOfTheirType) {
  int effective = 0;
  for (const KeyInfo& key : known_keys()) {
    const auto open = key.path.find('['), close = key.path.find("].params.");
    if (!key.path.starts_with("optimizer[") || close == std::string::npos) continue;
    SCOPED_TRACE(key.path);
    const std::string type = key.path.substr(open + 1, close - open - 1), name = key.path.substr(close + 9);
    const auto group = [&](const std::string& more) {
      return with_groups(R"([{"match": "a", "type": ")" + type + "\"" +
                         (name == "nesterov" ? R"(, "momentum": 0.5)" : "") + more + "}]");
    };
    const std::string given = group(", \"" + name + "\": " + key.example);
    if (key.effect == Effect::refused) {
      EXPECT_THAT(error_of(given), HasSubstr("optimizer.groups[0]." + name + ": "));
      continue;
    }
    const Config changed = parse_text(given), base = parse_text(group(""));
    EXPECT_EQ(changed == base, key.effect == Effect::noted);
    if (name != "torch_adam") {  // has an effect and a note
      EXPECT_EQ(has_note(changed, "optimizer.groups[0]." + name), key.effect == Effect::noted);
    }
    EXPECT_TRUE(parse_text(dump(changed)) == changed) << dump(changed);
    EXPECT_EQ(dump(parse_text(dump(changed))), dump(changed));
    effective += key.effect == Effect::effective;
  }
  EXPECT_GE(effective, 14);
}

TEST(OptimizerGroups, AreKeysOfTheirOwnWhereConfigurationsAreCompared) {
  const Config config = parse_text(with_groups(R"([{"match": "a"}, {"match": "b", "lr": 0.25}])"));
  std::map<std::string, std::string> keys;
  for (const Setting& setting : settings(config)) {
    keys[setting.key] = setting.value;
    if (!setting.key.starts_with("optimizer.")) continue;
    EXPECT_EQ(setting.concerns, Concerns::training) << setting.key;
    EXPECT_FALSE(setting.decides_parameters) << setting.key;
  }
  EXPECT_THAT(keys, ::testing::Contains(::testing::Pair("optimizer.groups[0].match", R"(["a"])")));
  EXPECT_THAT(keys, ::testing::Contains(::testing::Pair("optimizer.groups[1].lr", "0.25")));
  EXPECT_FALSE(config == parse_text(with_groups(R"([{"match": "b", "lr": 0.25}, {"match": "a"}])")));
}

TEST(OptimizerGroups, NotesLookAtEveryRule) {
  const std::string cycle =
      R"(, "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3}})";
  const std::string sgd = R"({"type": "SGD", "params": {"lr": 0.1})";
  const std::string adam_group = R"(, "groups": [{"match": "a", "type": "AdamW"}])";
  for (const bool grouped : {false, true}) {
    const Config config =
        parse_text(R"({"optimizer": )" + sgd + (grouped ? adam_group : "") + "}" + cycle +
                   R"(, "bf16": {"enabled": true}, "training": {"moments_dtype": "bf16"}})");
    EXPECT_EQ(has_note(config, "scheduler.params.cycle_momentum"), !grouped);
    EXPECT_EQ(has_note(config, "training.moments_dtype"), !grouped);
  }
}

TEST(OptimizerGroups, CanBeOverriddenOneByOne) {
  const std::string text = with_groups(R"([{"match": "a"}, {"match": "b", "type": "SGD"}])");
  const Config config =
      parse_text(text, "run.json", {"optimizer.groups[1].lr=0.5", "optimizer.groups[0].betas=[0, 0.25]"});
  EXPECT_EQ(config.optimizer.groups[1].lr, 0.5);
  EXPECT_EQ(config.optimizer.groups[0].betas()->beta2, 0.25);
  for (const char* path : {"optimizer.groups[2]", "optimizer.groups[x]", "optimizer.groups[]",
                           "optimizer.grps[0]", "optimizer.params[0]", "[0]"})
    EXPECT_EQ(error_of(text, {cat(path, ".lr=1")}),
              cat("--set ", path, ".lr=1: there is no entry ", path, " in the configuration"));
}

struct GroupMistake {
  std::string groups, message;
};
void PrintTo(const GroupMistake& mistake, std::ostream* to) {
  *to << mistake.groups;
}
class GroupMistakes : public ::testing::TestWithParam<GroupMistake> {};

TEST_P(GroupMistakes, AreNamed) {
  EXPECT_EQ(error_of(with_groups(GetParam().groups)), GetParam().message);
}

INSTANTIATE_TEST_SUITE_P(
    , GroupMistakes,
    ::testing::Values(
        GroupMistake{R"({"match": "a"})", "run.json:1: optimizer.groups: must be a list, not {…}"},
        GroupMistake{R"([3])", "run.json:1: optimizer.groups[0]: must be a section, not 3"},
        GroupMistake{R"([{"lr": 1}])",
                     "run.json:1: optimizer.groups[0]: needs \"match\", a pattern of parameter names "
                     "such as \"*.bias\", or a list of them"},
        GroupMistake{R"([{"match": []}])",
                     "run.json:1: optimizer.groups[0].match: needs at least one pattern, such as \"*.bias\""},
        GroupMistake{R"([{"match": "a"}, {"match": 7}])",
                     "run.json:1: optimizer.groups[1].match: must be a pattern of parameter names such as "
                     "\"*.bias\", or "
                     "a list of them, not 7"},
        GroupMistake{R"([{"match": ["a", ""]}])",
                     "run.json:1: optimizer.groups[0].match[1]: must be a pattern of parameter names such as "
                     "\"*.bias\", "
                     "not \"\""},
        GroupMistake{
            R"([{"match": "a", "weight_decy": 0}])",
            "run.json:1: unknown key \"optimizer.groups[0].weight_decy\"; did you mean \"weight_decay\"?"},
        GroupMistake{R"([{"mach": "a"}])",
                     "run.json:1: unknown key \"optimizer.groups[0].mach\"; did you mean \"match\"?"},
        GroupMistake{
            R"([{"match": "a", "momentum": 0.9}])",
            "run.json:1: optimizer.groups[0].momentum: belongs to the type SGD, which this group is not "
            "of; set "
            "its \"type\" or drop it"},
        GroupMistake{
            R"([{"match": "a", "params": {"lr": 1}}])",
            "run.json:1: optimizer.groups[0].params: a group has its parameters beside \"match\": put "
            "them there, "
            "without \"params\""},
        GroupMistake{
            R"([{"match": "a", "type": "SGDD"}])",
            "run.json:1: optimizer.groups[0].type: \"SGDD\" is none of Adam, AdamW, SGD, Lion, Adagrad, "
            "Lamb, NVLamb, LARS, OneBitAdam, OneBitLamb, Muon, AdamW8bit; did you mean "
            "\"SGD\"?"},
        GroupMistake{
            R"([{"match": "a", "type": "SGD", "nesterov": true}])",
            "run.json:1: optimizer.groups[0]: nesterov needs a momentum above 0; set momentum or drop "
            "nesterov"},
        GroupMistake{
            R"([{"match": "a", "lr": -1}, {"match": "b", "betas": [0.9]}])",
            "the configuration has 2 problems:\n"
            "run.json:1: optimizer.groups[0].lr: must be a number >= 0, not -1\n"
            "run.json:1: optimizer.groups[1].betas: must be a list of two numbers such as [0.9, 0.999], "
            "not […]"},
        GroupMistake{
            R"([{"match": "a", "lr": "auto"}])",
            "run.json:1: optimizer.groups[0].lr: transformers' Trainer has no argument that would fill in "
            "\"auto\" here; give a value, or one with --set optimizer.groups[0].lr=VALUE"}));

TEST(OptimizerGroups, KeepTheirProportionsToARate) {
  const std::string scheduler = R"(, "scheduler": {"type": "WarmupLR"})";
  const auto text = [&](const std::string& group_lr, const std::string& more) {
    return R"({"optimizer": {"type": "SGD", "params": {"lr": 0}, "groups": [{"match": "a", "lr": )" +
           group_lr + "}]}" + more + "}";
  };
  EXPECT_THAT(
      error_of(text("1", scheduler)),
      HasSubstr("run.json:1: optimizer: a group's rate keeps its proportion to params.lr under a scheduler, "
                "and params.lr is 0"));
  EXPECT_EQ(error_of(text("0", scheduler)), "");
  EXPECT_EQ(error_of(text("1", "")), "");
}

}  // namespace
}  // namespace sherd::config
