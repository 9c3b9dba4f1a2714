#include <algorithm>

#include "config/config.h"
#include "config/support.h"

namespace sherd::config {
namespace {

std::string mistake(std::int64_t shard_size, int ranks) {
  Parallel parallel;
  parallel.shard_size = shard_size;
  try {
    resolve_shard_size(parallel, ranks);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::config);
    return error.what();
  }
  return {};
}

TEST(ResolveShardSize, IsAllRanksUnlessGiven) {
  EXPECT_EQ(resolve_shard_size({}, 1), 1);
  EXPECT_EQ(resolve_shard_size({}, 6), 6);
}

TEST(ResolveShardSize, TakesDivisorsAndNothingElse) {
  for (int ranks = 1; ranks <= 12; ++ranks)
    for (int size = 1; size <= 13; ++size) {
      SCOPED_TRACE(testing::Message() << size << " of " << ranks);
      bool cuts = false;  // whether groups of `size`, one after the other, end with the ranks
      for (int begin = 0; begin < ranks; begin += size) cuts = begin + size == ranks;
      EXPECT_EQ(mistake(size, ranks).empty(), cuts);
      if (!cuts) continue;
      Parallel parallel;
      parallel.shard_size = size;
      EXPECT_EQ(resolve_shard_size(parallel, ranks), size);
    }
}

TEST(ResolveShardSize, NamesTheSizesThatWouldDo) {
  EXPECT_EQ(mistake(4, 6),
            "parallel.shard_size 4 does not divide 6 data-parallel ranks; sizes that do: 1, 2, 3, 6");
  EXPECT_EQ(mistake(2, 1), "parallel.shard_size 2 does not divide 1 data-parallel rank; sizes that do: 1");
  EXPECT_EQ(mistake(std::int64_t{1} << 40, 2),
            "parallel.shard_size 1099511627776 does not divide 2 data-parallel ranks; sizes that do: 1, 2");
}

TEST(ParallelKeys, MicsMeansTheShardSize) {
  EXPECT_EQ(parse_text("{}").parallel.shard_size, 0);
  const Config mics = parse_text(R"({"zero_optimization": {"stage": 3, "mics_shard_size": 4,
                                                           "mics_hierarchical_params_gather": true}})");
  EXPECT_EQ(mics.parallel.shard_size, 4);
  EXPECT_TRUE(has_note(mics, "zero_optimization.mics_hierarchical_params_gather: one all-gather"));
  EXPECT_TRUE(mics == parse_text(R"({"zero_optimization": {"stage": 3}, "parallel": {"shard_size": 4}})"));
  for (const char* both : {R"({"zero_optimization": {"mics_shard_size": 2}, "parallel": {"shard_size": 2}})",
                           R"({"parallel": {"shard_size": 2}, "zero_optimization": {"mics_shard_size": 2}})"})
    EXPECT_EQ(parse_text(both).parallel.shard_size, 2) << both;
}

TEST(ParallelKeys, MicsIsOffAsInDeepSpeed) {
  for (const char* off : {"-1", "0", "\"auto\"", "null"}) {
    const std::string text =
        std::string(R"({"parallel": {"shard_size": 3}, "zero_optimization": {"mics_shard_size": )") + off +
        "}}";
    EXPECT_EQ(parse_text(text).parallel.shard_size, 3) << text;
  }
}

TEST(ParallelKeys, ReductionIsOrderedUnlessNative) {
  EXPECT_EQ(parse_text("{}").parallel.reduction, Reduction::ordered);
  EXPECT_EQ(parse_text(R"({"parallel": {"reduction": "native"}})").parallel.reduction, Reduction::native);
}

// Ranks compare their configurations key by key, so a key that is not given must be there too.
TEST(ParallelKeys, AreInEveryFlatDump) {
  for (const char* text : {"{}", R"({"parallel": {"shard_size": 2}})"}) {
    const auto keys = flat_dump(parse_text(text));
    for (const char* name : {"parallel.shard_size", "parallel.reduction"})
      EXPECT_EQ(std::count_if(keys.begin(), keys.end(), [&](const auto& key) { return key.first == name; }),
                1)
          << name << " in " << text;
  }
}

}  // namespace
}  // namespace sherd::config
