#include "cli/inference/growing_text.h"

#include <gtest/gtest.h>

#include "cli/inference/prompts_file.h"
#include "support/expect_error.h"
#include "support/temp_folder.h"

namespace sherd::cli {
namespace {

using testing::TempFolder, testing::write_text, testing::read_text;

/// Bytes as ids: every string and every character is cut.
class Bytes : public ::testing::Test {
 protected:
  std::string grow(const std::string& prompt, const std::string& more, std::vector<std::string> stops,
                   std::string* text = nullptr) {
    GrowingText growing(*tokenizer_, tokenizer_->encode(prompt), std::move(stops));
    std::string printed;
    for (const std::int32_t id : tokenizer_->encode(more)) {
      const bool goes_on = growing.add(id);
      printed += growing.take(!goes_on);
      EXPECT_EQ(goes_on, !growing.stopped());
      if (!goes_on) break;
    }
    printed += growing.take(true);
    if (text) *text = growing.text();
    return printed;
  }
  std::shared_ptr<const data::Tokenizer> tokenizer_ = data::make_byte_tokenizer();
};

TEST_F(Bytes, TextsGrowByWholeCharacters) {
  const std::string more = "naïve — 日本語 \U0001F600 and a long tail that moves the window more than once";
  EXPECT_EQ(grow("é", more, {}), more);
  EXPECT_EQ(grow("", more, {}), more);
  EXPECT_EQ(grow("x", "abc\xe6\x97", {}), "abc") << "the character has not come to its end";
  GrowingText growing(*tokenizer_, tokenizer_->encode("x"), {});
  const std::vector<std::int32_t> ids = tokenizer_->encode("日");
  growing.add(ids[0]);
  EXPECT_EQ(growing.take(), "");
  growing.add(ids[1]), growing.add(ids[2]);
  EXPECT_EQ(growing.take(), "日");
}

TEST_F(Bytes, StopStringsEndTheTextWhereverTokensCutThem) {
  std::string text;
  EXPECT_EQ(grow("p", "one\n\ntwo", {"\n\n"}, &text), "one");
  EXPECT_EQ(text, "one");
  EXPECT_EQ(grow("p", "one\ntwo", {"\n\n"}, &text), "one\ntwo");
  EXPECT_EQ(grow("p", "aab aac", {"aac", "zz"}), "aab ");
  EXPECT_EQ(grow("p", "ababac", {"abac"}), "ab") << "a false start inside";
  EXPECT_EQ(grow("p", "ends in EN", {"END"}), "ends in EN") << "held back, and given at the end";
  EXPECT_EQ(grow("p", "first, second", {"second", "first"}), "");
  EXPECT_EQ(grow("stop", "py", {"stoppy", ""}), "py") << "the prompt takes no part";
  const std::string tail(100, 'x');
  EXPECT_EQ(grow("p", tail + "##" + tail, {"##"}), tail);
}

TEST_F(Bytes, WhatMayBeAStopStringIsNotShown) {
  GrowingText growing(*tokenizer_, {}, {"<end>"});
  for (const std::int32_t id : tokenizer_->encode("a<en")) growing.add(id);
  EXPECT_EQ(growing.take(), "a");
  growing.add(tokenizer_->encode("!")[0]);
  EXPECT_EQ(growing.take(), "<en!");
}

std::vector<std::string> texts_of(const std::filesystem::path& path) {
  std::vector<std::string> out;
  for (const Prompt& prompt : read_prompts(path)) {
    EXPECT_TRUE(prompt.conversation.messages.empty());
    out.push_back(prompt.text);
  }
  return out;
}

TEST(Prompts, ComeFromLinesAndFromJson) {
  const TempFolder folder;
  write_text(folder / "a.txt", "one\r\n\n two \nlast");
  EXPECT_EQ(texts_of(folder / "a.txt"), (std::vector<std::string>{"one", " two ", "last"}));
  write_text(folder / "a.jsonl", "{\"prompt\": \"a\\nb\", \"id\": 1}\n\n{\"prompt\": \"\"}\n");
  EXPECT_EQ(texts_of(folder / "a.jsonl"), (std::vector<std::string>{"a\nb", ""}));
  write_text(folder / "b.jsonl", "{\"prompt\": \"a\"}\n{\"text\": \"a\"}\n");
  testing::expect_error(ErrorKind::data, "b.jsonl:2", [&] { read_prompts(folder / "b.jsonl"); });
  write_text(folder / "c.jsonl", "{\"prompt\": 3}\n");
  testing::expect_error(ErrorKind::data, "c.jsonl:1", [&] { read_prompts(folder / "c.jsonl"); });
  write_text(folder / "empty.txt", "\n\n");
  testing::expect_error(ErrorKind::data, "no prompts", [&] { read_prompts(folder / "empty.txt"); });
  testing::expect_error(ErrorKind::io, "none.txt", [&] { read_prompts(folder / "none.txt"); });
}

TEST(Prompts, MayBeConversations) {
  const TempFolder folder;
  write_text(
      folder / "a.jsonl",
      R"({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u\n"}], "prompt": "p"}
{"messages": [{"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "role": "user"}]}
{"prompt": "p"}
)");
  const std::vector<Prompt> prompts = read_prompts(folder / "a.jsonl");
  ASSERT_EQ(prompts.size(), 3u);
  ASSERT_EQ(prompts[0].conversation.messages.size(), 2u);
  EXPECT_EQ(prompts[0].conversation.messages[0].role, "system");
  EXPECT_EQ(prompts[0].conversation.messages[1].content, "u\n");
  EXPECT_TRUE(prompts[0].text.empty()) << "messages go before a prompt, as in training";
  EXPECT_EQ(prompts[1].conversation.messages.at(0).content, "ab");
  EXPECT_EQ(prompts[2].text, "p");
  EXPECT_TRUE(prompts[1].place.ends_with("a.jsonl:2")) << prompts[1].place;
  CompletionsFile file(folder / "out.jsonl", prompts);
  file.add(0, {"x", 1, "stop"});
  EXPECT_EQ(
      read_text(folder / "out.jsonl"),
      "{\"messages\":[{\"role\":\"system\",\"content\":\"s\"},{\"role\":\"user\",\"content\":\"u\\n\"}],"
      "\"completion\":\"x\",\"tokens\":1,\"finish\":\"stop\"}\n");
  for (const auto& [line, what] : std::vector<std::pair<std::string, std::string>>{
           {R"({"messages": "hi"})", "'messages' is no list"},
           {R"({"messages": [{"role": "user"}]})", "no string 'content'"},
           {R"({"messages": [["user", "a"]]})", "no object with a string 'role'"}}) {
    write_text(folder / "b.jsonl", "{\"prompt\": \"a\"}\n" + line + "\n");
    testing::expect_error(ErrorKind::data, what, [&] { read_prompts(folder / "b.jsonl"); });
    testing::expect_error(ErrorKind::data, "line 2", [&] { read_prompts(folder / "b.jsonl"); });
  }
}

TEST_F(Bytes, WhatATemplateWritesBeforeAnAnswerIsTakenOff) {
  const auto grow_without = [&](const std::string& drop, const std::string& more) {
    GrowingText growing(*tokenizer_, tokenizer_->encode("p"), {}, drop);
    std::string printed;
    for (const std::int32_t id : tokenizer_->encode(more)) growing.add(id), printed += growing.take();
    printed += growing.take(true);
    EXPECT_EQ(printed, growing.text());
    return printed;
  };
  EXPECT_EQ(grow_without(" ", " yes  no"), "yes  no");
  EXPECT_EQ(grow_without(" ", "  yes"), " yes") << "once";
  EXPECT_EQ(grow_without(" ", "yes no"), "yes no");
  EXPECT_EQ(grow_without("", " yes"), " yes");
}

TEST(Prompts, CompletionsAreWrittenInTheirOrder) {
  const TempFolder folder;
  const std::vector<Prompt> prompts{{"a", {}, ""}, {"b\n", {}, ""}, {"c", {}, ""}};
  CompletionsFile file(folder / "out.jsonl", prompts);
  file.add(2, {"3", 1, "length"});
  file.add(0, {"1\xff", 2, "stop"});
  EXPECT_EQ(read_text(folder / "out.jsonl"),
            "{\"prompt\":\"a\",\"completion\":\"1\xef\xbf\xbd\",\"tokens\":2,\"finish\":\"stop\"}\n");
  file.add(1, {"2", 3, "length"});
  EXPECT_EQ(read_text(folder / "out.jsonl"),
            "{\"prompt\":\"a\",\"completion\":\"1\xef\xbf\xbd\",\"tokens\":2,\"finish\":\"stop\"}\n"
            "{\"prompt\":\"b\\n\",\"completion\":\"2\",\"tokens\":3,\"finish\":\"length\"}\n"
            "{\"prompt\":\"c\",\"completion\":\"3\",\"tokens\":1,\"finish\":\"length\"}\n");
  testing::expect_error(ErrorKind::io, "cannot write",
                        [&] { CompletionsFile(folder / "no/x.jsonl", prompts); });
}

}  // namespace
}  // namespace sherd::cli
