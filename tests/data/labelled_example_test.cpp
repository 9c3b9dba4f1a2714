// Words with labels: how they are encoded, what a dataset of them holds, and how samples are made of it.
#include "data/text/labelled_example.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>

#include "data/packing/document_packing.h"
#include "data/prepare.h"
#include "data_test_support.h"
#include "support/expect_error.h"

namespace sherd::data {
namespace {

using testing::expect_error;
using testing::read_text;
using testing::TempFolder;
using testing::write_text;
using Ids = std::vector<std::int32_t>;

/// As scripts/references/make_label_references.py has them.
const std::vector<std::string> some_words{"Anna", "Müller-Weber", "lives",    "in",     "São Paulo", ",",
                                          "",     "unbelievably", "New-York", "\u200b", "don't",     "3.5%",
                                          "."};

std::vector<std::int64_t> numbers_in(const std::string& list) {
  std::vector<std::int64_t> out;
  std::istringstream in(list);
  for (std::string number; std::getline(in, number, ',');) out.push_back(std::stoll(number));
  return out;
}

TEST(LabelledExample, WordsAreEncodedApartAsTransformersDoes) {
  std::istringstream lines(read_text(tokenizers_folder + "words.txt"));
  int read = 0;
  for (std::string name, ids, first; lines >> name >> ids >> first; ++read) {
    SCOPED_TRACE(name);
    const std::string end = name.starts_with("bert") || name == "albert" ? "[SEP]"
                            : name == "gpt2" || name == "qwen"           ? "<|endoftext|>"
                            : name == "llama3"                           ? "<|end_of_text|>"
                                                                         : "</s>";
    const auto tokenizer = make_tokenizer(cat("hf:", tokenizers_folder, name, ".json?eod=", end));
    const EncodedWords got = encode_words(*tokenizer, some_words);
    const auto begin = tokenizer->begin_of_document();
    std::vector<std::int64_t> want_ids = numbers_in(ids), want_first = numbers_in(first);
    if (begin) {
      want_ids.insert(want_ids.begin(), *begin);
      for (std::int64_t& each : want_first) each += each >= 0;
    }
    want_ids.push_back(tokenizer->end_of_document());
    EXPECT_EQ(std::vector<std::int64_t>(got.ids.begin(), got.ids.end()), want_ids);
    EXPECT_EQ(got.first, want_first);
  }
  EXPECT_EQ(read, 9);
}

TEST(LabelledExample, CutsWordsWithTheirTokens) {
  const auto tokenizer = make_byte_tokenizer();
  const std::vector<std::string> words{"ab", "", "cd", "e"};
  EncodedWords text = encode_words(*tokenizer, words);
  EXPECT_EQ(text.first, (std::vector<std::int64_t>{0, -1, 2, 4}));
  cut_words(text, 6, 256);
  EXPECT_EQ(text.first, (std::vector<std::int64_t>{0, -1, 2, 4})) << "it fits";
  cut_words(text, 4, 256);
  EXPECT_EQ(text.ids, (Ids{'a', 'b', 'c', 256}));
  EXPECT_EQ(text.first, (std::vector<std::int64_t>{0, -1, 2, -1}));
  cut_words(text, 3, 256);
  EXPECT_EQ(text.first, (std::vector<std::int64_t>{0, -1, -1, -1})) << "an end stands in its place";
  EXPECT_EQ(words_in(" ab\tcd\n\n e "), (std::vector<std::string>{"ab", "cd", "e"}));
  EXPECT_TRUE(words_in(" \n").empty());
}

class LabelledWordsData : public ::testing::Test {
 protected:
  PrepareReport prepare_lines(const std::string& lines, PrepareOptions options = {}) {
    write_text(folder_ / "l.jsonl", lines);
    options.inputs = {(folder_ / "l.jsonl").string()};
    options.output = prefix();
    if (options.labels.empty()) options.labels = {"O", "B-X", "I-X"};
    return prepare(options);
  }
  std::string prefix() const { return (folder_ / "words").string(); }
  TempFolder folder_;
};

TEST_F(LabelledWordsData, PutsLabelsBehindTheTokens) {
  const PrepareReport report =
      prepare_lines(R"({"tokens": ["ab", "c", "", "d"], "labels": ["B-X", 0, "O", null], "id": 7})"
                    "\n"
                    R"({"tokens": ["e", "f"], "labels": [-100, 2]})"
                    "\n");
  EXPECT_TRUE(report.info.labels_of_tokens);
  EXPECT_EQ(report.info.masked_tokens, 8) << "tokens of the texts";
  EXPECT_EQ(report.info.text_bytes, 10) << "with spaces between words";
  const auto info = read_dataset_info(prefix());
  ASSERT_TRUE(info);
  EXPECT_TRUE(info->labels_of_tokens);
  const auto dataset = IndexedDataset::open(prefix());
  EXPECT_EQ(read_all(*dataset), (Ids{'a', 'b', 'c', 'd', 256, 2, 0, 1, 0, 0, 'e', 'f', 256, 0, 3, 0}));
  Ids labels(5);
  read_token_classes(*dataset, 0, labels);
  EXPECT_EQ(labels, (Ids{1, no_label, 0, no_label, no_label}));
  labels.resize(3);
  read_token_classes(*dataset, 0, labels);
  EXPECT_EQ(labels, (Ids{1, no_label, no_label})) << "the end stands for the last one";
}

TEST_F(LabelledWordsData, ReadsOtherKeysAndNumbers) {
  prepare_lines(R"({"words": ["a", "b"], "ner_tags": [2, 1], "tokens": 3})",
                {.json_field = "words", .label_field = "ner_tags"});
  EXPECT_EQ(read_all(*IndexedDataset::open(prefix())), (Ids{'a', 'b', 256, 3, 2, 0}));
}

TEST_F(LabelledWordsData, NamesLinesThatDoNotFit) {
  const std::string good = R"({"tokens": ["a"], "labels": ["O"]})"
                           "\n";
  const auto refused = [&](const std::string& line, const std::string& part) {
    expect_error(ErrorKind::data, part, [&] { prepare_lines(good + line); });
  };
  refused(R"({"tokens": ["a", "b"], "labels": ["O"]})",
          "line 2, 'tokens' has 2 words and 'labels' 1 label: give one of each word");
  refused(R"({"tokens": ["a"], "labels": ["B-Y"]})",
          "line 2, has the label \"B-Y\", which is none of --labels");
  refused(R"({"tokens": ["a"], "labels": [3]})", "nor a number below 3");
  refused(R"({"tokens": ["a"], "ner_tags": [0]})", "by --label-field");
  refused(R"({"tokens": ["a", 2], "labels": [0, 0]})", "'tokens' has 2, which is no string");
  refused(R"({"text": "a", "label": "O"})", "has no 'tokens'");
  refused(R"({"tokens": ["a"], "labels": [0], "text_pair": "b"})", "has 'text_pair' beside its words");
  refused(R"({"tokens": "a", "labels": "O"})", "'tokens' is no list, and the first line has");
  expect_error(ErrorKind::data, "line 2, has no string 'text'",
               [&] { prepare_lines("{\"text\": \"a\", \"label\": 0}\n" + good); });
}

/// Texts of 4, 8 and 2 tokens in rows of 6, the second one cut.
TEST_F(LabelledWordsData, SamplesHaveTheLabelsOfTheirTokens) {
  prepare_lines(R"({"tokens": ["ab", "c"], "labels": ["B-X", "O"]})"
                "\n"
                R"({"tokens": ["defg", "h", "i", "j"], "labels": ["O", "B-X", "I-X", "O"]})"
                "\n"
                R"({"tokens": ["k"], "labels": ["I-X"]})");
  const auto dataset = IndexedDataset::open(prefix());
  const DocumentSamples samples(dataset, {0, 3},
                                {.seq_length = 6, .shuffle = false, .targets = Targets::token_classes}, 256);
  EXPECT_EQ(samples.cut(), 1);
  ASSERT_EQ(samples.samples_per_round(), 2);
  SampleRow row;
  samples.load(0, row);
  EXPECT_EQ(row.tokens, (Ids{'a', 'b', 'c', 256, 'k', 256}));
  EXPECT_EQ(row.labels, (Ids{1, no_label, 0, no_label, 2, no_label}));
  EXPECT_EQ(row.ends, (Ids{4, 6}));
  EXPECT_EQ(row.types, Ids(6, 0));
  samples.load(1, row);
  EXPECT_EQ(row.tokens, (Ids{'d', 'e', 'f', 'g', 'h', 256}));
  EXPECT_EQ(row.labels, (Ids{0, no_label, no_label, no_label, 1, no_label}));
  samples.will_need(1);
}

TEST(Labels, OfAWholeTextThoughItHasTokensToo) {
  const LabelledOptions options{.labels = {"a", "b"}};
  EXPECT_FALSE(*has_words(R"({"text": "The jar", "label": 0, "tokens": ["The", "jar"]})", options));
  EXPECT_TRUE(*has_words(R"({"labels": [0, 1], "tokens": ["The", "jar"]})", options));
  EXPECT_TRUE(*has_words(R"({"text": "The jar", "labels": [0, 1], "tokens": ["The", "jar"]})",
                         LabelledOptions{.text_field = "tokens", .labels = {"a", "b"}}));
}

}  // namespace
}  // namespace sherd::data
