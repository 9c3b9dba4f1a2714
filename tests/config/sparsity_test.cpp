#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "config/config.h"
#include "support/expect_error.h"

namespace sherd::config {
namespace {

using ::testing::ElementsAre;

Sparsity sparsity_of(const std::string& section) {
  return parse_text(R"({"training": {"sparsity": )" + section + "}}").training.sparsity;
}

TEST(SparsityKeys, PruneAllLinearLayersUnlessToldOtherwise) {
  EXPECT_FALSE(parse_text("{}").training.sparsity.prunes());
  EXPECT_FALSE(sparsity_of("{}").prunes());
  const Sparsity usual = sparsity_of(R"({"pattern": "2:4"})");
  EXPECT_TRUE(usual.prunes());
  EXPECT_THAT(usual.targets, ElementsAre("*"));
  EXPECT_TRUE(usual.exclude.empty());
  const Sparsity named =
      sparsity_of(R"({"pattern": "2:4", "targets": "*.mlp.*", "exclude": ["blocks.0.*", "blocks.1.*"]})");
  EXPECT_THAT(named.targets, ElementsAre("*.mlp.*"));
  EXPECT_THAT(named.exclude, ElementsAre("blocks.0.*", "blocks.1.*"));
}

TEST(SparsityKeys, AreWrittenAsTheyWereRead) {
  const Config config = parse_text(
      R"({"training": {"sparsity": {"pattern": "2:4", "targets": ["a*", "b*"], "exclude": "a.c"}}})");
  EXPECT_EQ(parse_text(dump(config)).training.sparsity, config.training.sparsity);
  EXPECT_EQ(dump(parse_text("{}")).find("sparsity"), std::string::npos);
}

TEST(SparsityKeys, MistakesAreNamed) {
  testing::expect_error(ErrorKind::config, "\"4:8\" is none of none, 2:4",
                        [] { sparsity_of(R"({"pattern": "4:8"})"); });
  testing::expect_error(ErrorKind::config, "sparsity prunes weights that train", [] {
    parse_text(
        R"({"training": {"init_from": "a", "adapter": {"type": "lora"}, "sparsity": {"pattern": "2:4"}}})");
  });
  parse_text(
      R"({"training": {"init_from": "a", "adapter": {"type": "lora"}, "sparsity": {"pattern": "none"}}})");
}

}  // namespace
}  // namespace sherd::config
