// Entities and their scores against seqeval's (scripts/references/make_label_references.py).
#include "cli/inference/entities.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "support/places.h"
#include "support/temp_folder.h"

namespace sherd::cli {
namespace {

using Labels = std::vector<std::string>;

TEST(Entities, BeginAndEndAsSeqevalHasThem) {
  const Labels text{"B-PER", "I-PER", "O", "I-LOC", "I-PER", "B-PER", "I-PER"};
  EXPECT_EQ(entities_in(text),
            (std::vector<Entity>{{"PER", 0, 2}, {"LOC", 3, 4}, {"PER", 4, 5}, {"PER", 5, 7}}));
  EXPECT_TRUE(entities_in({}).empty());
  const Labels of{"O", "B-X", "I-X"}, others{"O", "X"}, none{"O"}, empty{"O", "B-"};
  EXPECT_TRUE(are_of_entities(of));
  for (const Labels& labels : {others, none, empty}) EXPECT_FALSE(are_of_entities(labels));
}

TEST(Entities, AreCountedAsSeqevalCountsThem) {
  const auto reference =
      nlohmann::json::parse(testing::read_text(SHERD_SOURCE_DIR "/tests/cli/reference/entities.json"));
  const auto labels = reference.at("labels").get<Labels>();
  const auto named = [&](const nlohmann::json& text) {
    Labels out;
    for (const std::size_t label : text.get<std::vector<std::size_t>>()) out.push_back(labels.at(label));
    return out;
  };
  EntityScores scores;
  for (std::size_t i = 0; i < reference.at("true").size(); ++i)
    scores.add(named(reference["true"][i]), named(reference["given"][i]));
  const auto expect_same = [](const FoundCounts& got, const nlohmann::json& want) {
    EXPECT_NEAR(got.precision(), want.at("precision").get<double>(), 1e-12);
    EXPECT_NEAR(got.recall(), want.at("recall").get<double>(), 1e-12);
    EXPECT_NEAR(got.f1(), want.at("f1").get<double>(), 1e-12);
    EXPECT_EQ(got.there, want.at("entities").get<std::int64_t>());
  };
  expect_same(scores.all(), reference.at("all"));
  ASSERT_EQ(scores.by_type().size(), reference.at("types").size());
  for (const auto& [type, counts] : scores.by_type()) {
    SCOPED_TRACE(type);
    expect_same(counts, reference["types"].at(type));
  }
  EXPECT_EQ(EntityScores().all().f1(), 0);
}

}  // namespace
}  // namespace sherd::cli
