// Unigram models, and SentencePiece's table of replacements, where the package's ids
// (tokenizer_edges_test.cpp) do not tell enough.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "data/hugging_face/segmentation/byte_trie.h"
#include "data/hugging_face/steps/charsmap.h"
#include "data/hugging_face/steps/cluster.h"
#include "data/tokenizer.h"
#include "data_test_support.h"
#include "support/expect_error.h"

namespace sherd::data {
namespace {

using nlohmann::json;
using testing::expect_error;
using Ids = std::vector<std::int32_t>;

using Pieces = std::vector<std::pair<std::string, double>>;

json unigram_file(const Pieces& vocabulary) {
  return {{"model", {{"type", "Unigram"}, {"vocab", vocabulary}, {"unk_id", 0}}}};
}

std::shared_ptr<const Tokenizer> made_of(const json& file) {
  return make_tokenizer("hf:x?eod=</s>&bos=", file.dump());
}

const Pieces few_pieces = {{"<unk>", 0}, {"</s>", 0}, {"a", -1}, {"aa", -1.5}, {"ab", -2}};

TEST(Unigram, FilesThatDoNotNameTheModelAreKnownByTheirList) {
  json file = unigram_file(few_pieces);
  EXPECT_EQ(made_of(file)->encode("aabx"), (Ids{2, 4, 0}));
  file["model"].erase("type");
  EXPECT_EQ(made_of(file)->encode("aabx"), (Ids{2, 4, 0}));
}

TEST(Unigram, NothingIsUnknownWhereTheFileSaysNoPieceIs) {
  json file = unigram_file(few_pieces);
  file["model"]["unk_id"] = nullptr;
  const auto tokenizer = made_of(file);
  EXPECT_EQ(tokenizer->encode("aab"), (Ids{2, 4}));
  expect_error(ErrorKind::data, "'x' is in no piece of the vocabulary, and the model has no unk_id",
               [&] { tokenizer->encode("aax"); });
}

/// Where a piece is there twice its last id is taken; both are decoded.
TEST(Unigram, APieceMayBeThereTwice) {
  const auto tokenizer =
      made_of(unigram_file({{"<unk>", 0}, {"</s>", 0}, {"a", -1}, {"b", -1}, {"ab", -9}, {"ab", -1}}));
  EXPECT_EQ(tokenizer->encode("ab"), (Ids{5}));
  EXPECT_EQ(tokenizer->decode(Ids{4, 5}), "ab ab");
  EXPECT_EQ(tokenizer->vocab_size(), 6);
}

/// Spaces at the ends of a text become what transformers makes of them: a text that was cut has none where it
/// goes on.
TEST(Unigram, TheBeginningOfATextIsThatOfTheWhole) {
  json file = unigram_file(few_pieces);
  file["model"]["vocab"].push_back({"\u2581", -3});
  file["normalizer"] =
      json::parse(R"({"type": "Replace", "pattern": {"Regex": "\\A +| +\\z"}, "content": ""})");
  file["pre_tokenizer"] = {{"type", "Metaspace"}, {"replacement", "\u2581"}, {"split", false}};
  const auto tokenizer = made_of(file);
  EXPECT_EQ(tokenizer->encode("  a a "), (Ids{5, 2, 5, 2}));
  Ids continued;
  tokenizer->encode("  a a ", {.behind = EncodeOptions::Behind::text}, continued);
  EXPECT_EQ(continued, (Ids{5, 5, 2, 5, 2}));
}

/// Time and result of a text without spaces: each place looks no further than the longest piece.
TEST(Unigram, ALongWordIsReadInOneGo) {
  const auto tokenizer = made_of(unigram_file(few_pieces));
  const std::size_t pairs = std::size_t{1} << 20;
  const Ids ids = tokenizer->encode(std::string(2 * pairs, 'a'));
  EXPECT_EQ(ids, Ids(pairs, 3));
}

TEST(Unigram, FaultsOfTheFileAreNamed) {
  const auto refuse = [](const char* what, const char* key, const json& value) {
    json file = unigram_file(few_pieces);
    file["model"][key] = value;
    expect_error(ErrorKind::data, what, [&] { made_of(file); });
  };
  refuse("model.unk_id is 5, and the vocabulary has 5 pieces", "unk_id", 5);
  refuse("model.unk_id is -1", "unk_id", -1);
  refuse("model.unk_id is no integer", "unk_id", "<unk>");
  refuse("model.vocab has [\"a\"], which is no piece and its score", "vocab", json::parse(R"([["a"]])"));
  refuse("which is no piece and its score", "vocab", json::parse(R"([["a", "b"]])"));
  refuse("model.vocab is no list", "vocab", json::parse(R"({"a": 1})"));
  refuse("key 'alpha'", "alpha", 0.1);
}

TEST(ByteTrie, FindsEachTextAtTheFront) {
  const ByteTrie trie({{"b", 1}, {"abc", 2}, {"ab", 3}, {"ab", 4}, {"", 5}, {"abcd", 6}, {"\xff", 7}});
  const auto found = [&](std::string_view text) {
    std::vector<std::pair<std::size_t, std::int32_t>> out;
    trie.for_each_prefix(text,
                         [&](std::size_t bytes, std::int32_t number) { out.emplace_back(bytes, number); });
    return out;
  };
  using Found = std::vector<std::pair<std::size_t, std::int32_t>>;
  EXPECT_EQ(found("abcx"), (Found{{2, 3}, {3, 2}}));
  EXPECT_EQ(found("abcd"), (Found{{2, 3}, {3, 2}, {4, 6}}));
  EXPECT_EQ(found("a"), Found{});
  EXPECT_EQ(found(""), Found{});
  EXPECT_EQ(found("\xff\xff"), (Found{{1, 7}}));
  EXPECT_FALSE(trie.empty());
  EXPECT_TRUE(ByteTrie().empty());
}

TEST(Clusters, AreThoseOfUnicode) {
  const auto clusters = [](std::string_view text) {
    std::vector<std::size_t> out;
    for (; !text.empty(); text.remove_prefix(out.back())) out.push_back(cluster_length(text));
    return out;
  };
  using Sizes = std::vector<std::size_t>;
  EXPECT_EQ(clusters("ab\r\n\n\ra"), (Sizes{1, 1, 2, 1, 1, 1}));
  EXPECT_EQ(clusters("e\u0301\u0323x"), (Sizes{5, 1}));
  EXPECT_EQ(clusters("\n\u0301"), (Sizes{1, 2})) << "control characters join nothing";
  EXPECT_EQ(clusters("\u0600a\u0600\n"), (Sizes{3, 2, 1}));
  EXPECT_EQ(clusters("\u1100\u1100\u1161\u11a8\u11a8\u1161"), (Sizes{15, 3})) << "syllables of Hangul";
  EXPECT_EQ(clusters("\uac00\u1161\u11a8\u1100\uac01\u11a8\u1161"), (Sizes{9, 9, 3}));
  EXPECT_EQ(clusters("\u2122\u00ae"), (Sizes{3, 2})) << "pictographs join by U+200D alone";
  EXPECT_EQ(clusters("\U0001F469\U0001F3FD\u200d\U0001F469a"), (Sizes{15, 1}));
  EXPECT_EQ(clusters("\U0001F469\u200d\u200d\U0001F469"), (Sizes{10, 4}));
  EXPECT_EQ(clusters("a\u200d\U0001F469"), (Sizes{4, 4}));
  EXPECT_EQ(clusters("\U0001F1E9\U0001F1EA\U0001F1E9"), (Sizes{8, 4})) << "flags are pairs";
  EXPECT_EQ(clusters("\u0915\u094d\u0937\u093f"), (Sizes{12})) << "conjuncts";
  EXPECT_EQ(clusters("\u0915\u0937"), (Sizes{3, 3}));
  EXPECT_EQ(clusters("\u0915\u094d\u200d\u0937"), (Sizes{12}));
  EXPECT_EQ(clusters("\u0915\u094d\u200c\u0937"), (Sizes{9, 3}));
  EXPECT_EQ(clusters("\u0915\u0903\u094d\u0937"), (Sizes{9, 3}));
}

TEST(Charsmap, FaultsAreNamed) {
  const auto refuse = [](const char* what, const std::string& base64) {
    expect_error(ErrorKind::data, what, [&] {
      std::string out;
      std::size_t of_first = 0;
      Charsmap(base64).apply("b", out, of_first);
    });
  };
  refuse("has 0 bytes, which hold no table", "");
  refuse("has 4 bytes, which hold no table", "BAAAAA==");
  refuse("has a byte 4 that is no base64", "BAAA_AAA");
  refuse("is cut off", "BAAAAAAAA");
  refuse("replacements that are no UTF-8", "BAAAAAAAAAD/");
  refuse("leads outside of its trie", "BAAAAAAAAAA=");
}

}  // namespace
}  // namespace sherd::data
