// Tokenizers as GGUF files have them: scripts/checks/check_gguf.py compares llama.cpp's ids.
#include "models/gguf/gguf_tokenizer.h"

#include <regex>

#include "gguf_reader.h"
#include "models/gguf/gguf_vocabulary.h"
#include "support/expect_error.h"
#include "support/places.h"

namespace sherd::models {
namespace {

using sherd::testing::expect_error, sherd::testing::read_text, sherd::testing::TempFolder;
using test::GgufReader;

std::string json_of(const std::string& name) {
  return read_text(std::string(SHERD_SOURCE_DIR) + "/tests/data/tokenizers/" + name + ".json");
}

/// Metadata of a tokenizer, read back.
std::map<std::string, std::string> described(GgufTokenizer tokenizer, std::int64_t ids,
                                             std::map<std::string, std::string> beside = {}) {
  tokenizer.ids = ids;
  tokenizer.beside = [=](const std::string& name) {
    const auto found = beside.find(name);
    return found == beside.end() ? std::string() : found->second;
  };
  GgufMetadata metadata;
  describe_tokenizer(metadata, tokenizer);
  const TempFolder folder;
  GgufWriter(folder / "x.gguf", metadata, {}).finish();
  return GgufReader(folder / "x.gguf").metadata;
}

std::vector<std::string> parts(const std::string& text) {
  std::vector<std::string> out(1);
  for (const char c : text)
    if (c == '|')
      out.emplace_back();
    else
      out.back() += c;
  return out;
}

const std::map<std::string, std::string> ends{{"config.json", R"({"eos_token_id": [1, 2]})"}};

TEST(GgufTokenizer, ByteLevelBpe) {
  const auto qwen = described(
      {.json = json_of("qwen")}, 710,
      {{"tokenizer_config.json", R"({"eos_token": {"content": "<|im_end|>"}, "chat_template": "T"})"},
       {"generation_config.json", R"({"eos_token_id": [702, 700]})"}});
  EXPECT_EQ(qwen.at("tokenizer.ggml.model"), "gpt2");
  EXPECT_EQ(qwen.at("tokenizer.ggml.pre"), "qwen2");
  const auto types = parts(qwen.at("tokenizer.ggml.token_type"));
  ASSERT_EQ(types.size(), 710);
  EXPECT_EQ(types[0], "1");
  EXPECT_EQ(types[702], "3");  // <|im_end|>
  EXPECT_EQ(types[703], "4");  // naïve
  EXPECT_EQ(types[709], "5");
  EXPECT_EQ(qwen.at("tokenizer.ggml.eos_token_id"), "702");
  EXPECT_EQ(qwen.at("tokenizer.ggml.eot_token_id"), "700");
  EXPECT_EQ(qwen.at("tokenizer.ggml.add_bos_token"), "false");
  EXPECT_EQ(qwen.at("tokenizer.chat_template"), "T");
  // Merges are in the file's order.
  const std::string file = json_of("qwen");
  std::smatch first;
  ASSERT_TRUE(std::regex_search(file, first, std::regex(R"re("merges":\[\["([^"]+)","([^"]+)"\])re")));
  EXPECT_TRUE(qwen.at("tokenizer.ggml.merges").starts_with(cat(first[1].str(), ' ', first[2].str(), '|')));
  const auto llama = described({.json = json_of("llama3")}, 804, ends);
  EXPECT_EQ(llama.at("tokenizer.ggml.pre"), "llama-bpe");
  EXPECT_EQ(llama.at("tokenizer.ggml.add_bos_token"), "true");
  EXPECT_EQ(llama.at("tokenizer.ggml.bos_token_id"), "800");
  EXPECT_EQ(described({.json = json_of("llama3")}, 804,
                      {{"config.json", R"({"eos_token_id": 1})"},
                       {"tokenizer_config.json", R"({"add_bos_token": false})"}})
                .at("tokenizer.ggml.add_bos_token"),
            "false");
}

TEST(GgufTokenizer, UnigramAndWordPiece) {
  const auto t5 = described({.json = json_of("t5")}, 848, ends);
  EXPECT_EQ(t5.at("tokenizer.ggml.model"), "t5");
  EXPECT_EQ(t5.at("tokenizer.ggml.remove_extra_whitespaces"), "true");
  EXPECT_EQ(t5.at("tokenizer.ggml.add_eos_token"), "true");
  EXPECT_EQ(t5.at("tokenizer.ggml.unknown_token_id"), "2");
  EXPECT_EQ(parts(t5.at("tokenizer.ggml.token_type"))[2], "2");
  EXPECT_GT(parts(t5.at("tokenizer.ggml.precompiled_charsmap")).size(), 1000);
  const auto bert = described({.json = json_of("bert"), .token_types = 2}, 900, ends);
  EXPECT_EQ(bert.at("tokenizer.ggml.model"), "bert");
  EXPECT_EQ(bert.at("tokenizer.ggml.seperator_token_id"), "3");
  EXPECT_EQ(bert.at("tokenizer.ggml.token_type_count"), "2");
  const std::string tokens = bert.at("tokenizer.ggml.tokens");
  EXPECT_TRUE(tokens.starts_with("[PAD]|[UNK]|[CLS]|[SEP]|[MASK]|"));
  EXPECT_EQ(tokens.find("##"), std::string::npos);
}

/// One id a byte, by the letters of byte-level BPE, which merges nothing.
TEST(GgufTokenizer, Bytes) {
  const auto bytes = described({.bytes = true}, 384);
  EXPECT_TRUE(bytes.at("tokenizer.ggml.tokens").starts_with("Ā|ā|"));
  EXPECT_TRUE(bytes.at("tokenizer.ggml.tokens").find("|þ|ÿ|<|endoftext|>|[PAD257]|") != std::string::npos);
  EXPECT_EQ(letter_of('A'), "A");
  EXPECT_EQ(letter_of(' '), "Ġ");
  EXPECT_EQ(letter_of('\n'), "Ċ");
  EXPECT_EQ(letter_of(0xAD), "Ń");
  EXPECT_EQ(bytes.at("tokenizer.ggml.eos_token_id"), "256");
  EXPECT_EQ(bytes.at("tokenizer.ggml.merges"), "");
}

TEST(GgufTokenizer, RefusesWhatLlamaCppWouldReadOtherwise) {
  const auto refused = [](const std::string& name, const std::string& part) {
    expect_error(ErrorKind::config, part, [&] { described({.json = json_of(name)}, 1100, ends); });
  };
  refused("gpt2", "token 'word' is found at whole words alone");
  refused("mistral", "not those of a SentencePiece model");
  refused("variety", "neither of bytes nor falls back");
  refused("mt5", "falls back to bytes");
  refused("albert", "its normalizer Replace");
  refused("bert_cased", "without BertPreTokenizer");
  expect_error(ErrorKind::config, "neither a tokenizer.json nor", [] { described({}, 10); });
  expect_error(ErrorKind::config, "no file says which token ends",
               [] { described({.json = json_of("qwen")}, 705); });
  std::string other = json_of("qwen");
  other.replace(other.find("ll|'d"), 5, "ll|'x");
  expect_error(ErrorKind::config,
               "no pre-tokenizer of llama.cpp does what its own does: split (?i:'s|'t|'re|'ve|'m|'ll|'x)",
               [&] { described({.json = other}, 705, ends); });
}

TEST(GgufVocabulary, RanksAreThoseOfSentencePiece) {
  const TokenIds ids{{"a", 0}, {"b", 1}, {"c", 2}, {"ab", 3}, {"bc", 4}, {"abc", 5}, {"<s>", 6}};
  std::string odd;
  const auto ranks = ranks_of_pieces(ids, {{"a", "b"}, {"b", "c"}, {"a", "bc"}, {"ab", "c"}}, {"<s>"}, odd);
  ASSERT_TRUE(ranks);
  EXPECT_LT(ranks->at("ab"), ranks->at("bc"));
  EXPECT_LT(ranks->at("bc"), ranks->at("abc"));
  EXPECT_FALSE(
      ranks_of_pieces(ids, {{"a", "b"}, {"b", "c"}, {"ab", "c"}}, {"<s>"}, odd));  // a, bc is not there
  EXPECT_EQ(odd, "abc");
  EXPECT_FALSE(ranks_of_pieces(ids, {{"a", "bc"}, {"a", "b"}, {"b", "c"}, {"ab", "c"}}, {"<s>"}, odd));
  EXPECT_EQ(odd, "abc");
  EXPECT_EQ(token_beyond_merges(ids, {{"a", "b"}, {"b", "c"}, {"ab", "c"}}, {"<s>"}), "");
  EXPECT_EQ(token_beyond_merges(ids, {{"a", "b"}, {"b", "c"}}, {"<s>"}), "abc");
  EXPECT_EQ(bytes_of_base64("AQL/"), (std::vector<std::uint8_t>{1, 2, 255}));
  EXPECT_EQ(bytes_of_base64("AQ=="), std::vector<std::uint8_t>{1});
}

}  // namespace
}  // namespace sherd::models
