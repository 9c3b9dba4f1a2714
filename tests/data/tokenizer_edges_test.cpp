// Rare parts of tokenizers, and tokens that only the files beside a tokenizer.json name: the ids of the
// tokenizers package and of transformers, in tokenizers/edges.jsonl
// (scripts/references/make_tokenizer_edges.py).
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "data/hugging_face/files_beside.h"
#include "data/tokenizer.h"
#include "data_test_support.h"
#include "support/expect_error.h"
#include "support/places.h"

namespace sherd::data {
namespace {

using nlohmann::json;
using testing::expect_error, testing::TempFolder, testing::write_text;

/// Checks each line of a file: a folder, texts and their ids. Returns how many folders have settings, and how
/// many have none.
std::pair<int, int> check_lines(const std::string& name) {
  std::ifstream in(std::string(SHERD_SOURCE_DIR) + "/tests/data/tokenizers/" + name);
  int folders = 0, alone = 0;
  for (std::string text; std::getline(in, text);) {
    const json line = json::parse(text);
    const TempFolder folder;
    for (const auto& [file, content] : line["files"].items()) write_text(folder / file, content);
    const bool with_settings = line["files"].contains("tokenizer_config.json");
    const auto tokenizer = make_tokenizer(
        cat("hf:", folder.path().string(), with_settings ? "" : "/tokenizer.json?eod=</s>&bos="));
    for (std::size_t i = 0; i < line["texts"].size(); ++i)
      EXPECT_EQ(tokenizer->encode(line["texts"][i].get<std::string>()), line["ids"][i])
          << line["texts"][i] << "\n"
          << text;
    ++(with_settings ? folders : alone);
  }
  return {folders, alone};
}

TEST(TokenizerEdges, HaveTheIdsOfThePackages) {
  const auto [folders, alone] = check_lines("edges.jsonl");
  EXPECT_GE(folders, 13);
  EXPECT_GE(alone, 34);
}

/// Sums that are equal, unknown characters and their runs, and what SentencePiece's table makes of clusters
/// (scripts/references/make_unigram_edges.py).
TEST(TokenizerEdges, HaveTheIdsOfThePackageWithUnigramModels) {
  EXPECT_GE(check_lines("unigram.jsonl").second, 27);
}

const std::string one_token =
    R"({"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 0, "content": "a"}]})";

TEST(TokensBeside, LeaveTheBytesWhereNothingIsAdded) {
  const auto with = [](const std::string& file, const std::string& settings) {
    return with_tokens_beside(file, [&](const std::string& name) {
      return name == "tokenizer_config.json" ? settings : std::string();
    });
  };
  for (const char* settings : {"", "{}", "[]", R"({"eos_token": "a"})",
                               R"({"eos_token": null, "pad_token": 3})", R"({"pad_token": ""})"})
    EXPECT_EQ(with(one_token, settings), one_token) << settings;
  for (const char* other : {"", "{", "[]", "{}", R"({"model": {"vocab": []}})"})
    EXPECT_EQ(with(other, R"({"eos_token": "b"})"), other) << "whose reader says what is wrong";
  EXPECT_NE(with(one_token, R"({"eos_token": "b"})"), one_token);
  expect_error(ErrorKind::data, "'tokenizer_config.json' is no JSON", [&] { with(one_token, "{"); });
}

TEST(TokenizerEdges, RefuseATokenOfWhichNothingIsLeft) {
  const json file{{"model", {{"type", "BPE"}, {"vocab", {{"a", 0}, {"e", 1}}}, {"merges", json::array()}}},
                  {"normalizer", {{"type", "Strip"}, {"strip_left", true}, {"strip_right", true}}},
                  {"added_tokens", {{{"id", 2}, {"content", "\n"}, {"normalized", true}}}}};
  expect_error(ErrorKind::data, "the normalizer leaves nothing of the added token",
               [&] { make_tokenizer("hf:x?eod=e", file.dump()); });
}

/// The package puts the id of the step's own table in front, 2 here, whatever the name's is.
TEST(TokenizerEdges, TakeTheIdOfThePostProcessor) {
  json file{
      {"model", {{"type", "BPE"}, {"vocab", {{"<s>", 0}, {"e", 1}, {"b", 2}}}, {"merges", json::array()}}},
      {"post_processor",
       {{"type", "TemplateProcessing"},
        {"single",
         {{{"SpecialToken", {{"id", "<s>"}, {"type_id", 0}}}},
          {{"Sequence", {{"id", "A"}, {"type_id", 0}}}}}},
        {"pair", json::array()},
        {"special_tokens", {{"<s>", {{"id", "<s>"}, {"ids", {2}}, {"tokens", {"b"}}}}}}}}};
  const auto made = [&] { return make_tokenizer("hf:x?eod=e", file.dump()); };
  EXPECT_EQ(made()->begin_of_document(), 2);
  file["post_processor"]["special_tokens"]["<s>"]["ids"] = {0, 2};
  expect_error(ErrorKind::data, "puts 2 tokens in front of a text for '<s>'", made);
  file["post_processor"]["special_tokens"]["<s>"]["ids"] = {9};
  expect_error(ErrorKind::data, "with the id 9 in front of a text, which no token has", made);
}

/// transformers builds GPT-2's tokenizer by its setting; the package, and Sherd, go by the file.
TEST(TokenizerEdges, TellOfAPrefixSpaceThatTheFileDoesNotHave) {
  const TempFolder folder;
  std::filesystem::copy_file(std::string(SHERD_SOURCE_DIR) + "/tests/data/tokenizers/gpt2.json",
                             folder / "tokenizer.json");
  const auto told = [&](const char* settings) {
    write_text(folder / "tokenizer_config.json", settings);
    ::testing::internal::CaptureStderr();
    make_tokenizer("hf:" + folder.path().string());
    return ::testing::internal::GetCapturedStderr();
  };
  EXPECT_NE(
      told(R"({"eos_token": "<|endoftext|>", "add_prefix_space": true})").find("says add_prefix_space true"),
      std::string::npos);
  EXPECT_EQ(told(R"({"eos_token": "<|endoftext|>", "add_prefix_space": false})"), "");
}

TEST(TokenizerEdges, NameTheTypeOfAStepThatIsNotSupported) {
  const json file{{"model", {{"type", "BPE"}, {"vocab", {{"e", 0}}}, {"merges", json::array()}}},
                  {"normalizer", {{"type", "ByteLevel"}}}};
  expect_error(ErrorKind::data, "is of the type 'ByteLevel'",
               [&] { make_tokenizer("hf:x?eod=e", file.dump()); });
}

}  // namespace
}  // namespace sherd::data
