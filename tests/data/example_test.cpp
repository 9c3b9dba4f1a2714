// Conversations and completions: how they are written down, and which of their tokens are targets.
#include "data/text/example.h"
#include "data/text/segments.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "data/loader.h"
#include "data/packing/packing.h"
#include "data/prepare.h"
#include "data_test_support.h"
#include "support/expect_error.h"

namespace sherd::data {
namespace {

using testing::expect_error;
using ::testing::HasSubstr;
using testing::TempFolder;
using testing::write_text;

/// The texts of the segments, learned ones in ⟦⟧; the end of a document is ∎.
std::string shown(const std::vector<TextSegment>& segments) {
  std::string out;
  bool open = false;
  for (const TextSegment& segment : segments) {
    if (segment.learned != open) out += segment.learned ? "⟦" : "⟧", open = segment.learned;
    out += segment.kind == SegmentKind::end ? "∎" : segment.text;
  }
  return out + (open ? "⟧" : "");
}

const auto bytes = make_byte_tokenizer();
std::vector<TextSegment> rendered(const std::string& name, const std::vector<ChatMessage>& messages) {
  return ChatTemplate::named(name, *bytes).render({messages});
}

const std::vector<ChatMessage> talk{{"system", "Be brief."},
                                    {"user", " Hi\n"},
                                    {"assistant", "Hello. "},
                                    {"user", "Bye"},
                                    {"assistant", "Bye.", false}};

// The texts are written by hand after Qwen2.5's and Llama 3 Instruct's tokenizer_config.json and
// mistral-common's v1.
TEST(ChatTemplate, WritesWhatTheFamiliesPublish) {
  EXPECT_EQ(shown(rendered("chatml", talk)),
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n Hi\n<|im_end|>\n"
            "<|im_start|>assistant\n⟦Hello. <|im_end|>⟧\n<|im_start|>user\nBye<|im_end|>\n"
            "<|im_start|>assistant\nBye.<|im_end|>\n");
  EXPECT_EQ(shown(rendered("llama3", talk)),
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Hello.<|eot_id|>⟧"
            "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nBye.<|eot_id|>");
  EXPECT_EQ(shown(rendered("mistral", talk)),
            "<s>[INST] Be brief.\n\n Hi\n [/INST]⟦ Hello. ∎⟧[INST] Bye [/INST] Bye.∎");
  EXPECT_EQ(
      shown(rendered("plain", talk)),
      "Be brief.\n\n### User:\n Hi\n\n\n### Assistant:\n⟦Hello. ∎⟧### User:\nBye\n\n### Assistant:\nBye.∎");
}

TEST(ChatTemplate, RefusesWhatItCannotWrite) {
  expect_error(ErrorKind::data, "the role 'tool'; the template chatml is of system, user and assistant", [] {
    rendered("chatml", {{"tool", "x"}});
  });
  expect_error(ErrorKind::data, "without messages", [] { rendered("plain", {}); });
  expect_error(ErrorKind::data, "user and assistant are to take turns in the template mistral", [] {
    rendered("mistral", {{"assistant", "x"}});
  });
  expect_error(ErrorKind::data, "take turns in the template mistral, the user first", [] {
    rendered("mistral", {{"user", "x"}, {"user", "y"}});
  });
  expect_error(ErrorKind::data, "not the first", [] {
    rendered("mistral", {{"user", "x"}, {"system", "y"}});
  });
  expect_error(ErrorKind::config, "did you mean 'llama3'?", [] { ChatTemplate::named("llama-3", *bytes); });
  for (const std::string& name : builtin_templates())
    EXPECT_EQ(ChatTemplate::of_spec(name, *bytes).spec(), name);
}

Example read_bytes_example(const std::string& line, const std::string& field = "") {
  return read_examples(line, {field, ChatTemplate::named("plain", *bytes)}, "in.jsonl", 7).front();
}

TEST(Examples, AreWhatTheirKeysSay) {
  EXPECT_EQ(shown(read_bytes_example(R"({"text": "a"})").segments), "⟦a⟧");
  EXPECT_EQ(shown(read_bytes_example(R"({"prompt": "a", "completion": "b"})").segments), "a⟦b∎⟧");
  EXPECT_EQ(
      shown(read_bytes_example(
                R"({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})")
                .segments),
      "### User:\na\n\n### Assistant:\n⟦b∎⟧");
  EXPECT_EQ(shown(read_bytes_example(
                      R"({"prompt": "x", "prompt_id": 1, "messages": [{"role": "assistant", "content":
                        [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]})")
                      .segments),
            "### Assistant:\n⟦ab∎⟧");
  EXPECT_EQ(shown(read_bytes_example(
                      R"({"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
                           "completion": [{"role": "assistant", "content": "c"}]})")
                      .segments),
            "### User:\na\n\n### Assistant:\nb∎### Assistant:\n⟦c∎⟧");
  EXPECT_EQ(shown(read_bytes_example(R"({"messages": [{"role": "assistant", "content": "a", "weight": 0},
                           {"role": "assistant", "content": "b", "weight": 1}]})")
                      .segments),
            "### Assistant:\na∎### Assistant:\n⟦b∎⟧");
  EXPECT_EQ(shown(read_bytes_example(R"({"messages": "m", "text": "a"})", "text").segments), "⟦a⟧")
      << "as it was asked for";
}

/// As ShareGPT, Alpaca and others have them.
TEST(Examples, AreReadAsTheyAreFound) {
  const auto said = [](const std::string& line) { return shown(read_bytes_example(line).segments); };
  const std::string talk = "S\n\n### User:\na\n\n### Assistant:\n⟦b∎⟧";
  EXPECT_EQ(said(R"({"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "a"},
                                  {"role": "assistant", "content": "b"}]})"),
            talk);
  EXPECT_EQ(said(R"({"system": "S", "conversations": [{"from": "human", "value": "a"},
                                                      {"from": "gpt", "value": "b"}]})"),
            talk);
  EXPECT_EQ(said(R"({"conversations": [{"from": "system", "value": "S"}, {"from": "user", "value": "a"},
                                       {"from": "assistant", "value": "b", "weight": null}]})"),
            talk);
  EXPECT_EQ(said(R"({"conversations": [{"role": "user", "content": "a"}, {"role": "assistant", "content":
                     "b"}]})"),
            talk.substr(3));
  EXPECT_EQ(said(R"({"instruction": "a", "input": "", "output": "b", "system": "S"})"), talk);
  EXPECT_EQ(said(R"({"instruction": "a", "input": "c", "output": "b", "history": [["x", "y"]]})"),
            "### User:\nx\n\n### Assistant:\n⟦y∎⟧### User:\na\nc\n\n### Assistant:\n⟦b∎⟧");
  EXPECT_EQ(said(R"({"prompt": "a", "response": "b"})"), "a⟦b∎⟧");
  EXPECT_EQ(said(R"({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b",
                     "weight": 0}, {"from": "human", "value": "c"}, {"from": "gpt", "value": "d"}]})"),
            "### User:\na\n\n### Assistant:\nb∎### User:\nc\n\n### Assistant:\n⟦d∎⟧");
}

TEST(Examples, NameFileLineAndCause) {
  const auto expect = [](const std::string& line, const std::string& part) {
    expect_error(ErrorKind::data, "'in.jsonl', line 7, ", [&] { read_bytes_example(line); });
    expect_error(ErrorKind::data, part, [&] { read_bytes_example(line); });
  };
  expect("{", "is no JSON");
  expect("[1]", "is no JSON object");
  expect(
      R"({"prompt": "a", "body": "b"})",
      "has no string 'text', no 'messages', 'conversations' or 'instruction' with 'output', and no 'prompt' "
      "with 'completion'; name the field that holds the text, by --json-field (keys: 'prompt', 'body')");
  expect(R"({"conversations": []})", "without messages");
  expect(R"({"conversations": [{"from": "narrator", "value": "x"}]})",
         "a turn is from 'narrator'; known are");
  expect(R"({"conversations": [{"from": "human"}]})", "no object with texts 'from' and 'value'");
  expect(R"({"instruction": "a", "output": "b", "text": "c"})",
         "has 'text' beside 'instruction' and 'output'");
  expect(R"({"instruction": 1, "output": "b"})", "'instruction' is no text");
  expect(R"({"instruction": "a", "output": "b", "history": [["x"]]})", "no list of pairs of texts");
  expect(R"({"messages": "a"})", "'messages' is no list");
  expect(R"({"messages": []})", "without messages");
  expect(R"({"messages": [1]})", "no object with a string 'role'");
  expect(R"({"messages": [{"role": "user"}]})", "no string 'content'");
  expect(R"({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]})", "a part that is no text");
  expect(R"({"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": 1}]}]})",
         "'tool_calls'");
  expect(R"({"messages": [{"role": "assistant", "content": "", "weight": 0.5}]})",
         "'weight' is 0 or 1, not 0.5");
  expect(R"({"messages": [{"role": "assistant", "content": "", "wieght": 0}]})",
         "a message has 'wieght'; did you mean 'weight'?");
  expect(R"({"prompt": "a", "completion": []})", "neither two strings nor two lists");
}

std::string talk_with(const std::string& more, const std::string& beside = "") {
  return R"({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b")" + more +
         "}]" + beside + "}";
}

/// OpenAI's, transformers' and other trainers' fields, of which plain writes none.
TEST(ConversationFields, ThatATemplateDoesNotWriteAreRefused) {
  const auto refused = [](const std::string& line, const std::string& part) {
    expect_error(ErrorKind::data, part, [&] { read_bytes_example(line); });
  };
  for (const char* key : {"function_call", "reasoning_content", "thinking", "tool_calls", "name", "refusal"})
    refused(talk_with(cat(", \"", key, "\": \"x\"")),
            cat("a message has '", key, "', which the template does not write"));
  refused(talk_with(R"(, "tool_calls": [{"id": 1}])"), "a message has 'tool_calls'");
  refused(talk_with("", R"(, "tools": [{"type": "function"}])"),
          "gives the template 'tools' beside the messages");
  refused(talk_with("", R"(, "functions": [{"name": "f"}])"),
          "gives the template 'functions' beside the messages");
  refused(talk_with("", R"(, "chat_template_kwargs": {"enable_thinking": false})"),
          "gives the template 'enable_thinking' beside the messages");
  refused(R"({"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant",
              "content": "b"}], "tools": [{}]})",
          "gives the template 'tools' beside the messages");
  refused(R"({"messages": [{"role": "assistant", "content": [{"type": "thinking", "text": "x"}]}]})",
          "a part that is no text");
  refused(R"({"messages": [{"role": "assistant", "content": [{"type": "text", "text": "x", "y": 1}]}]})",
          "a part of a message's 'content' has 'y'");
  refused(talk_with(R"(, "train": 1)"), "a message's 'train' is true or false, not 1");
  refused(talk_with("", R"(, "tools": "x")"), "'tools' is no list");
  refused(talk_with(", \"name\": " + std::string(200, '[') + "1" + std::string(200, ']')),
          "deep within each other");
  refused(R"({"conversations": [{"from": "gpt", "value": "a", "role": "user"}]})",
          "a turn of 'conversations' has 'role' beside 'from' and 'value'");
  // Keys without a value may stand there: a table of columns writes all keys in each line.
  EXPECT_NO_THROW(read_bytes_example(talk_with(R"(, "tool_calls": null, "name": null, "function_call": {})",
                                               R"(, "tools": [], "id": 7, "source": "x")")));
}

TEST(ConversationFields, AreGivenToATemplateThatWritesThem) {
  const std::string by =
      "{{ tools | tojson }}{{ mood }}{% for m in messages %}{{ m.content if m.content is not none else '-' }}"
      "{{ m.tool_calls | tojson if m.tool_calls else '' }}{% endfor %}";
  const std::string line =
      R"({"tools": [{"b": 1, "a": [2.5, null]}], "chat_template_kwargs": {"mood": "calm"}, "messages":
          [{"role": "user", "content": "a"}, {"role": "assistant", "content": null, "tool_calls": ["c"]}]})";
  EXPECT_EQ(shown(read_examples(line, {"", ChatTemplate::of_text(by, {}, *bytes)}, "in.jsonl", 7).front().segments),
            R"([{"b": 1, "a": [2.5, null]}]calma⟦-["c"]∎⟧)");
}

TEST(ConversationFields, SayWhatIsLearned) {
  const auto learns = [](const std::string& more) { return read_bytes_example(talk_with(more)).teaches(); };
  EXPECT_TRUE(learns(""));
  EXPECT_TRUE(learns(R"(, "weight": 1, "train": true, "loss": null)"));
  EXPECT_FALSE(learns(R"(, "weight": 0)"));
  EXPECT_FALSE(learns(R"(, "train": false)"));
  EXPECT_FALSE(learns(R"(, "loss": false)"));
}

/// Bytes, but "ab" is one token, 300, and "<|im_end|>" another.
class Pairs final : public Tokenizer {
 public:
  using Tokenizer::encode;
  void encode(std::string_view text, const EncodeOptions&, std::vector<std::int32_t>& ids) const override {
    for (std::size_t i = 0; i < text.size(); ++i) {
      const bool pair = text.substr(i).starts_with("ab");
      ids.push_back(pair ? 300 : static_cast<unsigned char>(text[i]));
      i += pair;
    }
  }
  std::string decode(std::span<const std::int32_t>) const override { return {}; }
  std::int64_t vocab_size() const override { return 302; }
  std::int32_t end_of_document() const override { return 256; }
  std::optional<std::int32_t> token_id(std::string_view token) const override {
    return token == "<|im_end|>" ? std::optional(301) : std::nullopt;
  }
  std::string token(std::int32_t) const override { return {}; }
  bool is_special(std::int32_t id) const override { return id == 256; }
  bool lossless() const override { return true; }
  const std::string& spec() const override { return spec_; }

 private:
  std::string spec_ = "pairs";
};

using Ids = std::vector<std::int32_t>;
using Marks = std::vector<std::uint8_t>;

TEST(Examples, AreEncodedAsOneTextBetweenTokensOfTheTemplate) {
  using Kind = SegmentKind;
  const auto encoded = [](const std::vector<TextSegment>& segments) {
    std::pair<Ids, Marks> out;
    encode_segments(Pairs(), segments, SpelledTokens::text, out.first, out.second);
    EXPECT_EQ(out.first.size(), out.second.size());
    return out;
  };
  EXPECT_EQ(encoded({{"xa", false}, {"bc", true}}), std::pair(Ids{'x', 300, 'c'}, Marks{0, 1, 1}))
      << "a token that crosses into what is learned is learned";
  EXPECT_EQ(encoded({{"xa", true}, {"bc", false}}), std::pair(Ids{'x', 300, 'c'}, Marks{1, 1, 0}))
      << "and one that crosses out of it";
  EXPECT_EQ(encoded({{"x", true}, {"bc", false}}), std::pair(Ids{'x', 'b', 'c'}, Marks{1, 0, 0}));
  EXPECT_EQ(encoded({{"a", false}, {"<|im_end|>", true, Kind::control}, {"b", false}}),
            std::pair(Ids{'a', 301, 'b'}, Marks{0, 1, 0}))
      << "nothing is joined over a token of the template";
  EXPECT_EQ(encoded({{"a", true}, {"b", true, Kind::control}, {"", true, Kind::end}}),
            std::pair(Ids{300, 256}, Marks{1, 1}))
      << "a token that the tokenizer has not is text";
  EXPECT_EQ(encoded({{"a", false}, {"b", true}, {"a", false}, {"b", true}}),
            std::pair(Ids{300, 300}, Marks{1, 1}));
  EXPECT_EQ(encoded({}), std::pair(Ids{}, Marks{}));
}

TEST(Examples, AreTargetsOfTheLoaderWhereTheyAreLearned) {
  const TempFolder folder;
  write_text(folder / "in.jsonl",
             "{\"prompt\": \"ab\", \"completion\": \"cd\"}\n"
             "{\"messages\": [{\"role\": \"user\", \"content\": \"only a question\"}]}\n"
             "{\"text\": \"efg\"}\n"
             "{\"messages\": [{\"role\": \"assistant\", \"content\": \"h\"}]}\n");
  PrepareOptions options;
  options.inputs = {(folder / "in.jsonl").string()};
  options.output = (folder / "out").string();
  const PrepareReport report = prepare(options);
  EXPECT_EQ(report.left_out, 1);
  EXPECT_EQ(report.info.tokens, 5 + 4 + 15 + 2);
  EXPECT_EQ(report.info.masked_tokens, 26 - (3 + 4 + 2));
  EXPECT_EQ(report.info.chat_template, "plain");
  const auto info = read_dataset_info(options.output);
  EXPECT_EQ(info->masked_tokens, 17);
  EXPECT_EQ(info->chat_template, "plain");

  const auto dataset = IndexedDataset::open(options.output);
  EXPECT_TRUE(dataset->has_mask());
  EXPECT_EQ(read_all(*dataset).size(), 26u);
  const auto samples = std::make_shared<PackedSamples>(dataset, SequenceRange{0, 3},
                                                       PackingOptions{.seq_length = 25, .shuffle = false});
  const auto device = device::make_cpu_device(1);
  const tensor::Batch batch = TokenLoader(samples, {.micro_batch = 1}, *device).next();
  std::string labels;
  for (std::int64_t i = 0; i < 25; ++i) {
    const std::int32_t label = batch.at("labels").data<std::int32_t>()[i];
    labels += label == no_label ? '.' : label == 256 ? '$' : static_cast<char>(label);
  }
  EXPECT_EQ(labels, ".cd$efg$...............h$");
  EXPECT_EQ(*batch.at("target_tokens").data<std::int32_t>(), 9);

  // A dataset of text alone has no mask, and one that lies there from before is gone.
  write_text(folder / "in.jsonl", "{\"text\": \"efg\"}\n");
  prepare(options);
  EXPECT_FALSE(std::filesystem::exists(mask_path(options.output)));
  EXPECT_FALSE(IndexedDataset::open(options.output)->has_mask());
}

/// Lines as they are found, some of which are none.
TEST(Examples, AreSkippedWhereThatIsAskedFor) {
  const TempFolder folder;
  const std::string good = R"({"prompt": "a", "completion": "b"})";
  std::string lines =
      good + "\n{\n" + R"({"text": null})" + "\n" + R"({"text": NaN})" + "\n" + R"({"text": "\ud800"})" +
      "\n" + R"({"messages": [{"role": "user", "content": "x"}, {"role": "tool", "content": "y"}]})" + "\n" +
      good + "\n";
  write_text(folder / "in.jsonl", lines);
  PrepareOptions options;
  options.inputs = {(folder / "in.jsonl").string()};
  options.output = (folder / "out").string();
  expect_error(ErrorKind::data, "line 2, is no JSON", [&] { prepare(options); });
  options.skip_errors = true;
  PrepareReport report = prepare(options);
  EXPECT_EQ(report.skipped, 5);
  ASSERT_EQ(report.first_skipped.size(), 5u);
  for (std::size_t i = 0; i < 5; ++i)
    EXPECT_THAT(report.first_skipped[i], HasSubstr(cat("line ", i + 2, ", ")));
  EXPECT_THAT(report.first_skipped[4], HasSubstr("the role 'tool'"));
  EXPECT_EQ(report.info.documents, 2);
  EXPECT_EQ(read_all(*IndexedDataset::open(options.output)), (Ids{'a', 'b', 256, 'a', 'b', 256}));
  for (int i = 0; i < 20; ++i) lines += "[]\n";
  write_text(folder / "in.jsonl", lines);
  report = prepare(options);
  EXPECT_EQ(report.skipped, 25);
  EXPECT_EQ(report.first_skipped.size(), PrepareReport::most_told);
  write_text(folder / "in.jsonl", "[]\n[]\n");
  expect_error(ErrorKind::data,
               "nothing is left: 2 lines were skipped, the first for: ", [&] { prepare(options); });
}

TEST(Examples, EndADocumentOnce) {
  const TempFolder folder;
  PrepareOptions options;
  options.inputs = {(folder / "in.jsonl").string()};
  options.output = (folder / "out").string();
  options.chat_template = "chatml";
  write_text(folder / "in.jsonl", "{\"messages\": [{\"role\": \"assistant\", \"content\": \"h\"}]}\n");
  prepare(options);
  const auto ids = read_all(*IndexedDataset::open(options.output));
  EXPECT_EQ(std::count(ids.begin(), ids.end(), 256), 1)
      << "a template that has another end gets the document's";
  EXPECT_EQ(ids.back(), 256);
  options.chat_template = "plain";
  write_text(folder / "in.jsonl",
             "{\"messages\": [{\"role\": \"assistant\", \"content\": \"h\"}, {\"role\": \"user\", "
             "\"content\": \"u\"}]}\n");
  prepare(options);
  EXPECT_EQ(read_all(*IndexedDataset::open(options.output)).back(), 256) << "a question is no end";
  write_text(folder / "in.jsonl", "{\"messages\": [{\"role\": \"user\", \"content\": \"u\"}]}\n");
  expect_error(ErrorKind::data, "none of 1 example has an answer to learn from", [&] { prepare(options); });
  options.chat_template = "chat";
  expect_error(ErrorKind::config, "there is no chat template 'chat'", [&] { prepare(options); });
}

TEST(Masks, LieBesideTheTokensBitByBit) {
  const TempFolder folder;
  const std::string prefix = (folder / "data").string();
  std::vector<Marks> all;
  {
    DatasetBuilder builder(prefix, 1000);
    for (const std::size_t length : {3u, 0u, 21u, 8u, 100000u, 5u}) {
      Marks marks(length, 1);
      // The first sequence and the last are learned whole.
      for (std::size_t i = 0; i < length && length > 5; ++i)
        marks[i] = static_cast<std::uint8_t>(i * i % 7 % 2);
      const Ids tokens(length, 1);
      builder.add(tokens, true,
                  length == 5 ? std::span<const std::uint8_t>() : std::span<const std::uint8_t>(marks));
      all.push_back(marks);
    }
    DatasetInfo info{"byte", 1000, 0, "uint16", builder.counts().tokens, 6, 6, 0, 0, builder.counts().masked,
                     ""};
    builder.finish([&] { write_dataset_info(prefix, info); });
  }
  const auto dataset = IndexedDataset::open(prefix);
  ASSERT_TRUE(dataset->has_mask());
  for (std::size_t s = 0; s < all.size(); ++s)
    for (const std::size_t from : {0u, 1u, 7u, 77777u}) {
      if (from > all[s].size()) continue;
      Marks got(all[s].size() - from);
      dataset->read_mask(static_cast<std::int64_t>(s), static_cast<std::int64_t>(from), got);
      EXPECT_TRUE(std::equal(got.begin(), got.end(), all[s].begin() + static_cast<std::ptrdiff_t>(from)))
          << s;
    }
  std::vector<std::uint8_t> too_many(4);
  expect_error(ErrorKind::usage, "of a sequence of 3", [&] { dataset->read_mask(0, 0, too_many); });
  const std::uint32_t print = dataset->fingerprint();
  std::string mask = testing::read_text(mask_path(prefix));
  mask[5] = static_cast<char>(mask[5] ^ 4);
  write_text(mask_path(prefix), mask);
  EXPECT_NE(IndexedDataset::open(prefix)->fingerprint(), print);
  write_text(mask_path(prefix), mask.substr(1));
  expect_error(ErrorKind::data, "data.mask' has 12504 bytes, but a bit for each of 100037 tokens takes 12505",
               [&] { IndexedDataset::open(prefix); });
  std::filesystem::remove(mask_path(prefix));
  expect_error(ErrorKind::io, "data.mask' does not exist", [&] { IndexedDataset::open(prefix); });
}

}  // namespace
}  // namespace sherd::data
