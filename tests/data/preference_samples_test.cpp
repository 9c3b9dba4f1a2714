// Datasets of answers that people compared or judged, and the rows that they become.
#include "data/packing/preference_samples.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "data/dataset_info.h"
#include "data/packing/packing.h"
#include "preference_test_support.h"
#include "support/expect_error.h"

namespace sherd::data {
namespace {

using testing::expect_error;

using PreferencePreparing = PreferenceData;
using Shown = std::vector<std::string>;

/// Each sequence, and behind it its marks.
Shown marked_sequences(const IndexedDataset& dataset) {
  Shown out;
  for (std::int64_t s = 0; s < dataset.sequences(); ++s) {
    std::vector<std::int32_t> ids(static_cast<std::size_t>(dataset.length(s)));
    std::vector<std::uint8_t> marks(ids.size());
    dataset.read(s, 0, ids);
    dataset.read_mask(s, 0, marks);
    out.push_back(shown_ids(ids) + " ");
    for (const std::uint8_t mark : marks) out.back() += mark ? '1' : '0';
  }
  return out;
}

TEST_F(PreferencePreparing, WritesAPairAsADocument) {
  const std::string talk = R"({"prompt": [{"role": "user", "content": "a"}],
      "chosen": [{"role": "assistant", "content": "b"}],
      "rejected": [{"role": "assistant", "content": "c"}]})";
  std::string line;
  for (const char c : talk) line += c == '\n' ? ' ' : c;
  const PrepareOptions options =
      options_of(pair_line("ab", "c", "de") + line + "\n" +
                 R"({"prompt": "p", "responses": ["x", "yy", "z"]})" + "\n" + pair_line("", "", "x"));
  const PrepareReport report = prepare(options);
  const auto dataset = IndexedDataset::open(options.output);
  const std::string asked = "### User:\na\n\n### Assistant:\n", zeros(asked.size(), '0');
  EXPECT_EQ(marked_sequences(*dataset),
            (Shown{"abc$ 0011", "abde$ 00111", asked + "b$ " + zeros + "11", asked + "c$ " + zeros + "11",
                   "px$ 011", "pyy$ 0111", "px$ 011", "pz$ 011", "pyy$ 0111", "pz$ 011", "$ 1", "x$ 11"}));
  EXPECT_EQ(dataset->documents(), 6);
  for (std::int64_t d = 0; d < 6; ++d) EXPECT_EQ(dataset->document_begin(d), 2 * d);
  EXPECT_EQ(report.info.preferences, Preferences::pairs);
  EXPECT_EQ(report.info.chat_template, "plain");
  EXPECT_EQ(report.left_out, 0);
  const auto info = read_dataset_info(options.output);
  ASSERT_TRUE(info);
  EXPECT_EQ(info->preferences, Preferences::pairs);
  EXPECT_EQ(info->documents, 6);
  EXPECT_EQ(info->sequences, 12);
  EXPECT_EQ(info->tokens, dataset->tokens());
}

/// The side that nobody judged is the end of a document.
TEST_F(PreferencePreparing, WritesAJudgedAnswerWithoutTheOther) {
  const PrepareOptions options = options_of(judged_line("ab", "c", true) + judged_line("d", "ef", false));
  prepare(options);
  EXPECT_EQ(marked_sequences(*IndexedDataset::open(options.output)),
            (Shown{"abc$ 0011", "$ 0", "$ 0", "def$ 0111"}));
  const auto info = read_dataset_info(options.output);
  EXPECT_EQ(info->preferences, Preferences::labels);
  EXPECT_EQ(info->documents, 2);
  EXPECT_EQ(info->masked_tokens, 5);
  prepare(options_of("{\"text\": \"a\"}\n"));
  EXPECT_EQ(read_dataset_info(options.output)->preferences, Preferences::none);
}

TEST_F(PreferencePreparing, RefusesLinesOfSeveralKinds) {
  const std::string pair = pair_line("ab", "c", "de"), judged = judged_line("a", "b", true),
                    text = "{\"text\": \"a\"}\n";
  const std::string pairs = "pairs of 'chosen' and 'rejected', or ranked answers",
                    labels = "answers with a 'label'", texts = "texts to be learned";
  const auto refused = [&](const std::string& lines, const std::string& first, const std::string& other) {
    PrepareOptions options = options_of(lines);
    for (const bool skip : {false, true}) {
      options.skip_errors = skip;
      expect_error(ErrorKind::config,
                   cat(" are ", first, ", and this one is ", other, ": prepare each kind by itself"),
                   [&] { prepare(options); });
      EXPECT_FALSE(std::filesystem::exists(index_path(options.output)));
    }
  };
  refused(pair + judged, pairs, labels);
  refused(judged + pair, labels, pairs);
  refused(pair + text, pairs, texts);
  refused(text + judged, texts, labels);
  std::string many;
  while (many.size() < (std::size_t{200} << 10)) many += pair;
  refused(many + judged, pairs, labels);  // which other threads encode
  PrepareOptions options = options_of(pair);
  options.seq2seq = true;
  expect_error(ErrorKind::config, "preferences are learned by decoders: leave it out",
               [&] { prepare(options); });
}

TEST_F(PreferencePreparing, LeavesOutAPairOfWhichAnAnswerIsNotLearned) {
  const auto line = [](const std::string& chosen, const std::string& rejected) {
    return R"({"prompt": "a", "chosen": {"role": "assistant", "content": "b")" + chosen +
           R"(}, "rejected": {"role": "assistant", "content": "c")" + rejected + "}}\n";
  };
  const std::string weight = ", \"weight\": 0";
  const PrepareOptions options =
      options_of(line(weight, "") + line("", weight) + line("", "") + line(weight, weight));
  const PrepareReport report = prepare(options);
  EXPECT_EQ(report.left_out, 3);
  EXPECT_EQ(report.info.documents, 1);
  EXPECT_EQ(IndexedDataset::open(options.output)->sequences(), 2);
  expect_error(ErrorKind::data, "none of 1 example has an answer to learn from",
               [&] { prepare(options_of(line(weight, ""))); });
}

TEST_F(PreferencePreparing, LeavesNothingOfALineThatIsSkipped) {
  const std::string good = pair_line("ab", "c", "de"), other = pair_line("x", "y", "z");
  const auto alone = prepared(good + other, "alone");
  PrepareOptions options = options_of(good + "{\n" + R"({"prompt": "p", "chosen": "q"})" + "\n" +
                                      R"({"prompt": "p", "chosen": "q", "rejected": 5})" + "\n" +
                                      pair_line("p", "q", "q") + other);
  expect_error(ErrorKind::data, "in.jsonl', line 2, is no JSON", [&] { prepare(options); });
  options.skip_errors = true;
  const PrepareReport report = prepare(options);
  EXPECT_EQ(report.skipped, 4);
  EXPECT_EQ(marked_sequences(*IndexedDataset::open(options.output)), marked_sequences(*alone));
  EXPECT_EQ(report.info.text_bytes, read_dataset_info(alone->prefix())->text_bytes);
}

/// A text may be refused when the other of its pair is encoded already.
TEST_F(PreferencePreparing, LeavesNothingOfAPairWhoseSecondTextIsRefused) {
  const std::string good = pair_line("ab", "c", "de"),
                    bad = R"({"prompt": "x", "chosen": {"role": "assistant", "content": "c"},
                              "rejected": {"role": "assistant", "content": "quick"}})",
                    judged = R"({"prompt": "x", "completion": {"role": "assistant", "content": "quick"},
                                 "label": true})";
  const auto of = [&](const std::string& lines) {
    std::string flat;
    for (const char c : lines) flat += c == '\n' ? ' ' : c;
    PrepareOptions options = options_of(flat + "\n" + good);
    options.tokenizer = cat("hf:", tokenizers_folder, "gpt2.json?eod=q");  // which "quick" has in it
    options.chat_template = "plain";
    options.skip_errors = true;
    return prepare(options);
  };
  const PrepareReport alone = of("");
  for (const std::string& line : {bad, judged}) {
    const PrepareReport report = of(line);
    EXPECT_EQ(report.skipped, 1);
    EXPECT_EQ(report.info.sequences, 2);
    EXPECT_EQ(report.info.tokens, alone.info.tokens);
    EXPECT_EQ(report.info.text_bytes, alone.info.text_bytes);
    EXPECT_EQ(report.info.chat_template, "") << "nothing that is left is a conversation";
    EXPECT_EQ(report.info.preferences, Preferences::pairs);
  }
}

using PreferenceSampling = PreferenceData;

TEST_F(PreferenceSampling, PacksTheTextsOfPairs) {
  const auto samples = samples_of(prepared(pair_line("ab", "c", "de") + pair_line("f", "g", "h")),
                                  {.seq_length = 12, .shuffle = false, .packed = true, .first_text = 100});
  EXPECT_EQ(samples->samples_per_round(), 1);
  EXPECT_EQ(samples->items(), 2);
  EXPECT_EQ(samples->tokens(), 11);
  EXPECT_DOUBLE_EQ(samples->filled(), 11.0 / 12);
  EXPECT_TRUE(samples->traits().keeps_documents_apart && samples->traits().has_sides &&
              samples->traits().has_pairs && samples->traits().has_few_targets);
  EXPECT_FALSE(samples->traits().has_mismatched);
  SampleRow row;
  row.types = {1, 2};  // of what was loaded before
  samples->load(0, row);
  EXPECT_EQ(shown_ids(row.tokens), "abcabdefgfh.");
  EXPECT_EQ(shown_ids(row.labels), ".c$.de$g$h$.");
  EXPECT_EQ(row.ends, (std::vector<std::int32_t>{3, 7, 9, 11, 12}));
  EXPECT_EQ(row.sides, (std::vector<std::int32_t>{1, -1, 1, -1, 0}));
  EXPECT_EQ(row.texts, (std::vector<std::int32_t>{100, 101, 102, 103, -1}));
  EXPECT_EQ(row.filling, 1);
  EXPECT_TRUE(row.types.empty());
  const auto full = samples_of(IndexedDataset::open((folder_ / "out").string()),
                               {.seq_length = 11, .shuffle = false, .packed = true});
  full->load(0, row);
  EXPECT_EQ(row.ends, (std::vector<std::int32_t>{3, 7, 9, 11})) << "a full row has no padding";
  EXPECT_EQ(row.filling, 0);
}

TEST_F(PreferenceSampling, GivesTextsRowsInTurns) {
  const auto samples = samples_of(prepared(pair_line("ab", "c", "de") + pair_line("f", "g", "h")),
                                  {.seq_length = 5, .shuffle = false});
  EXPECT_EQ(samples->samples_per_round(), 4);
  EXPECT_EQ(samples->items(), 2);
  EXPECT_EQ(samples->tokens(), 11);
  EXPECT_DOUBLE_EQ(samples->filled(), 11.0 / 20);
  EXPECT_TRUE(samples->traits().has_pairs);
  EXPECT_FALSE(samples->traits().keeps_documents_apart);
  const Shown tokens{"abc..", "abde.", "fg...", "fh..."}, labels{".c$..", ".de$.", "g$...", "h$..."};
  for (std::int32_t i = 0; i < 8; ++i) {
    SampleRow row;
    samples->load(i, row);
    EXPECT_EQ(shown_ids(row.tokens), tokens[static_cast<std::size_t>(i) % 4]);
    EXPECT_EQ(shown_ids(row.labels), labels[static_cast<std::size_t>(i) % 4]);
    EXPECT_TRUE(row.ends.empty());
    EXPECT_EQ(row.sides, std::vector<std::int32_t>{i % 2 == 0 ? 1 : -1});
    EXPECT_EQ(row.texts, std::vector<std::int32_t>{i % 4});
  }
}

/// The texts of a round by their numbers.
std::map<std::int32_t, SeenText> round_of(const PreferenceSamples& samples, std::int32_t padding) {
  std::map<std::int32_t, SeenText> out;
  for (std::int64_t p = 0; p < samples.samples_per_round(); ++p) {
    SampleRow row;
    samples.load(p, row);
    for (const SeenText& text : seen_in(row, samples.seq_length(), padding)) out[text.number] = text;
  }
  return out;
}

/// Each text has half of the row that a pair shares, and what the other leaves.
TEST_F(PreferenceSampling, CutsWhatIsTooLong) {
  struct Case {
    std::int32_t chosen, rejected, first, second;
  };
  const std::vector<Case> cases{{20, 20, 4, 5}, {20, 3, 6, 3}, {3, 20, 3, 6}, {5, 4, 5, 4},
                                {6, 4, 5, 4},   {5, 5, 4, 5},  {9, 2, 7, 2},  {2, 2, 2, 2}};
  std::string lines;
  for (const Case& c : cases)
    lines += pair_line("p", std::string(static_cast<std::size_t>(c.chosen) - 1, 'x'),
                       std::string(static_cast<std::size_t>(c.rejected) - 1, 'y'));
  const auto dataset = prepared(lines);
  const auto packed = samples_of(dataset, {.seq_length = 9, .packed = true});
  const auto apart = samples_of(dataset, {.seq_length = 9});
  EXPECT_EQ(packed->cut(), 6);
  EXPECT_EQ(apart->cut(), 3) << "of 20 places";
  EXPECT_EQ(packed->left_out() + apart->left_out(), 0);
  EXPECT_EQ(packed->items(), 8);
  const auto shared = round_of(*packed, padding_id), own = round_of(*apart, padding_id);
  ASSERT_EQ(shared.size(), 16u);
  ASSERT_EQ(own.size(), 16u);
  std::int64_t tokens = 0;
  for (std::int32_t i = 0; i < 8; ++i) {
    const Case& c = cases[static_cast<std::size_t>(i)];
    EXPECT_EQ(shared.at(2 * i), text_in(*dataset, 2 * i, c.first)) << i;
    EXPECT_EQ(shared.at(2 * i + 1), text_in(*dataset, 2 * i + 1, c.second)) << i;
    EXPECT_EQ(own.at(2 * i), text_in(*dataset, 2 * i, std::min(9, c.chosen))) << i;
    EXPECT_EQ(own.at(2 * i + 1), text_in(*dataset, 2 * i + 1, std::min(9, c.rejected))) << i;
    tokens += c.first + c.second;
  }
  EXPECT_EQ(packed->tokens(), tokens);
  const auto least = samples_of(dataset, {.seq_length = 2, .packed = true});
  EXPECT_EQ(least->items(), 8) << "a place for each, which says what comes behind the prompt";
  EXPECT_EQ(least->tokens(), 16);
}

TEST_F(PreferenceSampling, LeavesOutPairsWhosePromptHasTheRoom) {
  const auto dataset =
      prepared(pair_line("123456", "x", "y") + pair_line("1234", "x", "y") +
               pair_line("123456", "x", std::string(10, 'y')) + pair_line("12345", "xyz", "x"));
  const auto numbers = [&](const PreferenceOptions& options, std::int64_t left_out) {
    const auto samples = samples_of(dataset, options);
    EXPECT_EQ(samples->left_out(), left_out);
    std::set<std::int32_t> out;
    for (const auto& [number, text] : round_of(*samples, padding_id)) out.insert(number);
    EXPECT_EQ(std::ssize(out), (options.pairs ? 2 : 1) * samples->items());
    return out;
  };
  EXPECT_EQ(numbers({.seq_length = 8, .packed = true}, 3), (std::set<std::int32_t>{2, 3}));
  EXPECT_EQ(numbers({.seq_length = 11, .packed = true}, 2), (std::set<std::int32_t>{2, 3, 6, 7}))
      << "of the third, one answer has room and the other has not";
  EXPECT_EQ(numbers({.seq_length = 5}, 2), (std::set<std::int32_t>{2, 3, 6, 7}))
      << "the last place of a row says what comes behind it";
  EXPECT_EQ(numbers({.seq_length = 4, .pairs = false}, 6), (std::set<std::int32_t>{2, 3}));
  EXPECT_EQ(numbers({.seq_length = 40, .packed = true}, 0).size(), 8u);
  expect_error(
      ErrorKind::data,
      "the dataset of '" + dataset->prefix() +
          "' has no pair of answers to learn from in 4 lines whose answers fit model.seq_length; give "
          "it a larger part in data.split, or prepare more",
      [&] { samples_of(dataset, {.seq_length = 3}); });
  expect_error(ErrorKind::data, "has no answer to learn from in 4 lines whose answers fit",
               [&] { samples_of(dataset, {.seq_length = 3, .packed = true, .pairs = false}); });
  expect_error(ErrorKind::data,
               "the part of '" + dataset->prefix() +
                   "' has no pair of answers to learn from in "
                   "0 lines; give",
               [&] {
                 PreferenceSamples(dataset, {2, 2}, {.seq_length = 9}, "part");
               });
}

TEST_F(PreferenceSampling, TakesTextsByThemselves) {
  const auto judged = prepared(judged_line("ab", "c", true) + judged_line("d", "ef", false) +
                               judged_line("g", "h", false)),
             pairs = prepared(pair_line("ab", "c", "de") + pair_line("f", "g", "h"), "pairs");
  for (const bool packed : {false, true}) {
    const PreferenceOptions options{.seq_length = 10, .packed = packed, .pairs = false};
    const auto of_judged = samples_of(judged, options), of_pairs = samples_of(pairs, options);
    EXPECT_FALSE(of_judged->traits().has_pairs);
    EXPECT_TRUE(of_judged->traits().has_sides);
    EXPECT_EQ(of_judged->items(), 3);
    EXPECT_EQ(of_pairs->items(), 4);
    EXPECT_EQ(of_judged->samples_per_round(), packed ? 1 : 3);
    EXPECT_EQ(of_pairs->samples_per_round(), packed ? 2 : 4);
    EXPECT_EQ(round_of(*of_judged, padding_id),
              (std::map<std::int32_t, SeenText>{
                  {0, text_in(*judged, 0, 3)}, {3, text_in(*judged, 3, 3)}, {5, text_in(*judged, 5, 2)}}));
    EXPECT_EQ(round_of(*of_pairs, padding_id),
              (std::map<std::int32_t, SeenText>{{0, text_in(*pairs, 0, 3)},
                                                {1, text_in(*pairs, 1, 4)},
                                                {2, text_in(*pairs, 2, 2)},
                                                {3, text_in(*pairs, 3, 2)}}));
  }
  expect_error(ErrorKind::data,
               "has answers that are judged by themselves, which training.objective \"kto\" learns, and no "
               "pairs of them",
               [&] { samples_of(judged, {.seq_length = 10}); });
}

TEST_F(PreferenceSampling, TakesAPartOfADataset) {
  const auto dataset = prepared(many_pairs(6));
  const PreferenceSamples part(dataset, {4, 8}, {.seq_length = 40, .padding = padding_id, .packed = true});
  EXPECT_EQ(part.items(), 2);
  const auto round = round_of(part, padding_id);
  ASSERT_EQ(round.size(), 4u);
  for (std::int32_t i = 4; i < 8; ++i) EXPECT_EQ(round.at(i), text_in(*dataset, i, dataset->length(i) - 1));
  for (const SequenceRange& range : {SequenceRange{1, 5}, {0, 3}, {0, 14}, {-2, 2}})
    expect_error(ErrorKind::usage, "of 12 in pairs",
                 [&] { PreferenceSamples(dataset, range, {.seq_length = 40}); });
}

/// An answer may be empty, and so may a prompt.
TEST_F(PreferenceSampling, LeavesOutPairsOfWhichATextHasNoPlace) {
  const auto dataset = prepared(pair_line("ab", "c", "de") + pair_line("", "", "x"));
  for (const bool packed : {false, true}) {
    const auto samples = samples_of(dataset, {.seq_length = 12, .packed = packed});
    EXPECT_EQ(samples->items(), 1);
    EXPECT_EQ(samples->left_out(), 1);
  }
}

TEST_F(PreferenceSampling, NeedsNoPrompts) {
  const auto samples = samples_of(prepared(pair_line("", "ab", "cd")), {.seq_length = 8, .packed = true});
  SampleRow row;
  samples->load(0, row);
  EXPECT_EQ(shown_ids(row.labels), "b$d$....");
}

TEST_F(PreferenceSampling, RefusesWhatItCannotRead) {
  const auto dataset = prepared(pair_line("ab", "c", "de"));
  expect_error(ErrorKind::config, "the sequence length must be at least 2, not 1",
               [&] { samples_of(dataset, {.seq_length = 1, .packed = true}); });
  expect_error(ErrorKind::config, "at least 1, not 0", [&] { samples_of(dataset, {.seq_length = 0}); });
  expect_error(ErrorKind::usage, "mismatched answers are of texts by themselves",
               [&] { samples_of(dataset, {.seq_length = 9, .mismatched = true}); });
  const auto samples = samples_of(dataset, {.seq_length = 9, .vocab_size = 100});
  SampleRow row;
  expect_error(ErrorKind::data, "token 3 of sequence 0 is 256, beyond the vocabulary of 100",
               [&] { samples->load(0, row); });
  expect_error(ErrorKind::usage, "rows without mismatched answers",
               [&] { samples->load_mismatched(0, row); });
  expect_error(ErrorKind::usage, "sample position -1", [&] { samples->load(-1, row); });
  const auto texts = prepared("{\"text\": \"a\"}\n{\"text\": \"b\"}\n", "texts");
  expect_error(ErrorKind::usage, "these samples have no mismatched answers", [&] {
    PackedSamples(texts, {0, 2}, {.seq_length = 2}).load_mismatched(0, row);
  });
}

}  // namespace
}  // namespace sherd::data
