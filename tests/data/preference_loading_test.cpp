// Rounds of answers that people compared or judged, answers to other prompts, and batches of both.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "data/blend.h"
#include "data/loader.h"
#include "preference_test_support.h"

namespace sherd::data {
namespace {

using Numbers = std::vector<std::int32_t>;

using PreferenceRounds = PreferenceData;

/// All ways to take samples of pairs, and of texts by themselves.
std::vector<PreferenceOptions> all_ways(bool mismatched) {
  std::vector<PreferenceOptions> out;
  for (const bool pairs : {true, false})
    for (const bool packed : {false, true})
      for (const bool shuffle : {false, true})
        if (!mismatched || !pairs)
          out.push_back({.seq_length = 20,
                         .seed = 5,
                         .shuffle = shuffle,
                         .packed = packed,
                         .pairs = pairs,
                         .mismatched = mismatched});
  return out;
}

std::string named(const PreferenceOptions& options) {
  return cat(options.pairs ? "pairs" : "texts", options.packed ? ", packed" : "",
             options.shuffle ? ", shuffled" : "", options.mismatched ? ", mismatched" : "");
}

std::vector<SeenText> seen_at(const PreferenceSamples& samples, std::int64_t position, std::int32_t padding) {
  SampleRow row;
  samples.load(position, row);
  return seen_in(row, samples.seq_length(), padding);
}

/// Places of a text of many_pairs() and many_judged() in rows of 20.
void expect_places(const IndexedDataset& dataset, const PreferenceOptions& options, const SeenText& text) {
  const std::int64_t places = std::ssize(text.tokens), all = dataset.length(text.number) - 1;
  EXPECT_EQ(text, text_in(dataset, text.number, places)) << text.number;
  if (!options.packed || !options.pairs) {
    EXPECT_EQ(places, std::min<std::int64_t>(all, 20)) << text.number;
    return;
  }
  const std::int64_t other = dataset.length(text.number ^ 1) - 1;
  EXPECT_GE(places, std::min<std::int64_t>(all, 10)) << text.number;
  EXPECT_EQ(places == all, all <= std::max<std::int64_t>(10, 20 - other)) << text.number;
}

/// Each chosen answer is followed by the one that was rejected for it.
void expect_pairs(const std::vector<SeenText>& texts) {
  for (std::size_t i = 0; i < texts.size(); ++i) {
    EXPECT_EQ(texts[i].side, i % 2 == 0 ? 1 : -1);
    EXPECT_EQ(texts[i].number % 2, static_cast<std::int32_t>(i % 2));
    if (i % 2 == 1) {
      EXPECT_EQ(texts[i].number, texts[i - 1].number + 1);
    }
  }
}

TEST_F(PreferenceRounds, HaveEveryTextOnce) {
  const auto pairs = prepared(many_pairs(70)), judged = prepared(many_judged(70), "judged");
  for (const auto& dataset : {pairs, judged})
    for (const PreferenceOptions& options : all_ways(false)) {
      if (options.pairs && dataset == judged) continue;
      SCOPED_TRACE(named(options));
      const auto samples = samples_of(dataset, options);
      const std::int64_t rows = samples->samples_per_round();
      std::vector<SeenText> rounds[2];
      for (std::int64_t p = 0; p < 2 * rows; ++p)
        for (const SeenText& text : seen_at(*samples, p, padding_id)) rounds[p / rows].push_back(text);
      std::int64_t places = 0;
      for (const auto& round : rounds) {
        std::map<std::int32_t, int> times;
        for (const SeenText& text : round) ++times[text.number], expect_places(*dataset, options, text);
        for (std::int32_t i = 0; i < dataset->sequences(); ++i)
          EXPECT_EQ(times[i], dataset->length(i) > 1 ? 1 : 0) << i;
        if (options.pairs) expect_pairs(round);
      }
      for (const SeenText& text : rounds[0]) places += std::ssize(text.tokens);
      EXPECT_EQ(samples->tokens(), places);
      EXPECT_EQ(rounds[0] == rounds[1], !options.shuffle) << "another order in another round";
    }
}

TEST_F(PreferenceRounds, AreFunctionsOfThePosition) {
  const auto dataset = prepared(many_pairs(70));
  for (const PreferenceOptions& options : all_ways(false)) {
    SCOPED_TRACE(named(options));
    const auto one = samples_of(dataset, options), other = samples_of(dataset, options);
    PreferenceOptions seeded = options;
    seeded.seed = 6;
    const auto otherwise = samples_of(dataset, seeded);
    const std::int64_t count = 3 * one->samples_per_round();
    std::map<std::int64_t, std::vector<SeenText>> backwards;
    for (std::int64_t p = count; p-- > 0;) backwards[p] = seen_at(*other, p, padding_id);
    std::int64_t same = 0;
    for (std::int64_t p = 0; p < count; ++p) {
      const auto texts = seen_at(*one, p, padding_id);
      EXPECT_EQ(texts, backwards.at(p)) << p;
      same += texts == seen_at(*otherwise, p, padding_id);
    }
    if (options.shuffle)
      EXPECT_LT(same, count / 10);
    else
      EXPECT_EQ(same, count);
  }
}

/// The tokens of the rows before a position are those of all of them together.
void expect_tokens_before(const PreferenceSamples& samples, std::int32_t padding) {
  std::int64_t tokens = 0;
  for (std::int64_t p = 0; p < 3 * samples.samples_per_round(); ++p) {
    ASSERT_EQ(samples.tokens_before(p), tokens) << p;
    for (const SeenText& text : seen_at(samples, p, padding)) tokens += std::ssize(text.tokens);
  }
  EXPECT_EQ(tokens, 3 * samples.tokens());
}

TEST_F(PreferenceRounds, CountTheTokensBeforeAPosition) {
  const auto pairs = prepared(many_pairs(30)), judged = prepared(many_judged(30), "judged");
  for (const PreferenceOptions& options : all_ways(false)) {
    SCOPED_TRACE(named(options));
    expect_tokens_before(*samples_of(options.pairs ? pairs : judged, options), padding_id);
  }
}

/// The tokens of a row's mismatched counterpart are not counted.
TEST_F(PreferenceRounds, CountTheirOwnTokensBesideMismatches) {
  const auto judged = prepared(many_judged(30));
  for (const PreferenceOptions& options : all_ways(true)) {
    SCOPED_TRACE(named(options));
    expect_tokens_before(*samples_of(judged, options), padding_id);
  }
}

TEST_F(PreferenceRounds, KeepTheOrderWithoutAShuffle) {
  const auto dataset = prepared(many_pairs(40));
  for (const PreferenceOptions& options : all_ways(false)) {
    if (options.shuffle) continue;
    SCOPED_TRACE(named(options));
    const auto samples = samples_of(dataset, options);
    Numbers firsts;
    for (std::int64_t p = 0; p < samples->samples_per_round(); ++p) {
      std::int32_t least = 1000;
      for (const SeenText& text : seen_at(*samples, p, padding_id)) least = std::min(least, text.number);
      firsts.push_back(least);
    }
    EXPECT_TRUE(std::is_sorted(firsts.begin(), firsts.end()));
    if (options.packed) continue;
    ASSERT_EQ(firsts.size(), 80u);
    for (std::int32_t i = 0; i < 80; ++i) EXPECT_EQ(firsts[static_cast<std::size_t>(i)], i);
  }
}

TEST_F(PreferenceRounds, PackWell) {
  const auto samples = samples_of(prepared(many_pairs(400)), {.seq_length = 128, .packed = true});
  EXPECT_GT(samples->filled(), 0.95);
  EXPECT_DOUBLE_EQ(samples->filled(), static_cast<double>(samples->tokens()) /
                                          static_cast<double>(128 * samples->samples_per_round()));
}

using PreferenceMismatches = PreferenceData;

TEST_F(PreferenceMismatches, AnswerThePromptsWithOthersAnswers) {
  const auto dataset = prepared(judged_line("a", "b", true) + judged_line("cc", "dd", false) +
                                judged_line("e", "fff", true) + judged_line("g", "h", false));
  const PreferenceOptions options{.seq_length = 6, .shuffle = false, .pairs = false, .mismatched = true};
  const auto samples = samples_of(dataset, options);
  EXPECT_TRUE(samples->traits().has_mismatched);
  const std::vector<std::string> own{"ab....", "ccdd..", "efff..", "gh...."},
      tokens{"afff..", "cch...", "eb....", "gdd..."}, labels{"fff$..", ".h$...", "b$....", "dd$..."};
  const Numbers sides{1, -1, 1, -1}, numbers{0, 3, 4, 7};
  for (std::size_t i = 0; i < 4; ++i) {
    SampleRow row;
    samples->load(static_cast<std::int64_t>(i), row);
    EXPECT_EQ(shown_ids(row.tokens), own[i]);
    samples->load_mismatched(static_cast<std::int64_t>(i), row);
    EXPECT_EQ(shown_ids(row.tokens), tokens[i]);
    EXPECT_EQ(shown_ids(row.labels), labels[i]);
    EXPECT_EQ(row.sides, Numbers{sides[i]});
    EXPECT_EQ(row.texts, Numbers{numbers[i]});
    EXPECT_EQ(row.filling, std::count(tokens[i].begin(), tokens[i].end(), '.'));
  }
  PreferenceOptions packed = options;
  packed.packed = true, packed.seq_length = 15;  // what the longer of both takes, text by text
  const auto together = samples_of(dataset, packed);
  ASSERT_EQ(together->samples_per_round(), 1);
  SampleRow row;
  together->load(0, row);
  EXPECT_EQ(shown_ids(row.tokens), "abccddefffgh...");
  together->load_mismatched(0, row);
  EXPECT_EQ(shown_ids(row.tokens), "afffcchebgdd...");
  EXPECT_EQ(row.ends, (Numbers{4, 7, 9, 12, 15}));
  EXPECT_EQ(row.sides, (Numbers{1, -1, 1, -1, 0}));
  EXPECT_EQ(row.texts, (Numbers{0, 3, 4, 7, -1}));
}

/// The text with the prompt of one and the answer of another, cut to the row.
SeenText mismatch_of(const IndexedDataset& dataset, std::int32_t prompt, std::int32_t answer,
                     std::int64_t row) {
  const SeenText own = text_in(dataset, prompt, dataset.length(prompt) - 1),
                 other = text_in(dataset, answer, dataset.length(answer) - 1);
  const auto first = [](const SeenText& text) {
    return std::find_if(text.labels.begin(), text.labels.end(), [](auto label) { return label >= 0; }) -
           text.labels.begin();
  };
  SeenText out{own.number, own.side, {}, {}};
  out.tokens.assign(own.tokens.begin(), own.tokens.begin() + first(own) + 1);
  out.tokens.insert(out.tokens.end(), other.tokens.begin() + first(other) + 1, other.tokens.end());
  out.labels.assign(static_cast<std::size_t>(first(own)), no_label);
  out.labels.insert(out.labels.end(), other.labels.begin() + first(other), other.labels.end());
  const auto places = static_cast<std::size_t>(std::min(row, std::ssize(out.tokens)));
  out.tokens.resize(places), out.labels.resize(places);
  return out;
}

/// The other text is that which lies half of those further that have a target, in the dataset's order.
TEST_F(PreferenceMismatches, AreLikeTheRowsTheyStandBeside) {
  const auto pairs = prepared(many_pairs(35)),
             judged = prepared(
                 many_judged(20) + judged_line(std::string(30, '?'), "x", true) + many_judged(20), "judged");
  for (const auto& dataset : {pairs, judged})
    for (const PreferenceOptions& options : all_ways(true)) {
      SCOPED_TRACE(named(options));
      const auto samples = samples_of(dataset, options);
      EXPECT_EQ(samples->left_out(), dataset == judged);
      Numbers items;
      for (std::int32_t i = 0; i < dataset->sequences(); ++i)
        if (dataset->length(i) > 1 && dataset->length(i) < 30) items.push_back(i);
      ASSERT_EQ(std::ssize(items), samples->items());
      const std::size_t half = items.size() / 2;
      std::map<std::int32_t, std::int32_t> partner;
      for (std::size_t i = 0; i < items.size(); ++i) partner[items[i]] = items[(i + half) % items.size()];
      std::int64_t texts = 0;
      for (std::int64_t p = 0; p < 2 * samples->samples_per_round(); ++p) {
        SampleRow row;
        samples->load_mismatched(p, row);
        const auto others = seen_in(row, 20, padding_id), own = seen_at(*samples, p, padding_id);
        ASSERT_EQ(others.size(), own.size());
        for (std::size_t i = 0; i < own.size(); ++i, ++texts) {
          EXPECT_EQ(others[i].side, own[i].side);
          EXPECT_EQ(others[i], mismatch_of(*dataset, own[i].number, partner.at(own[i].number), 20));
        }
      }
      EXPECT_EQ(texts, 2 * samples->items());
    }
}

/// An empty answer to an empty prompt has no place, and is left out.
TEST_F(PreferenceMismatches, HaveNoEmptyTexts) {
  const auto samples = samples_of(prepared(judged_line("", "ab", true) + judged_line("q", "", false)),
                                  {.seq_length = 12, .packed = true, .pairs = false, .mismatched = true});
  SampleRow row;
  samples->load_mismatched(0, row);
  EXPECT_EQ(seen_in(row, 12, padding_id).size(), 1u);
}

class PreferenceLoading : public PreferenceData {
 protected:
  static Numbers numbers(const tensor::Batch& batch, const std::string& name) {
    const tensor::Tensor& x = batch.at(name);
    return {x.data<std::int32_t>(), x.data<std::int32_t>() + x.numel()};
  }
  std::shared_ptr<device::Device> device_ = device::make_cpu_device(1);
};

TEST_F(PreferenceLoading, GivesSidesTextsAndTargets) {
  const auto dataset = prepared(pair_line("ab", "c", "de") + pair_line("f", "g", "h"));
  const auto packed = samples_of(dataset, {.seq_length = 7, .shuffle = false, .packed = true});
  tensor::Batch batch = TokenLoader(packed, {.micro_batch = 2}, *device_).next();
  EXPECT_EQ(batch.at("tokens").shape(), (tensor::Shape{2, 7}));
  EXPECT_EQ(shown_ids(numbers(batch, "tokens")), "abcabdefgfh...");
  EXPECT_EQ(shown_ids(numbers(batch, "labels")), ".c$.de$g$h$...");
  EXPECT_EQ(numbers(batch, "sides"), (Numbers{1, -1, 1, -1, 0}));
  EXPECT_EQ(numbers(batch, "texts"), (Numbers{0, 1, 2, 3, -1}));
  EXPECT_EQ(numbers(batch, "targets"), (Numbers{1, 2, 4, 5, 6, 7, 8, 9, 10}));
  EXPECT_EQ(numbers(batch, "target_tokens"), Numbers{2}) << "pairs";
  EXPECT_EQ(numbers(batch, "documents"), (Numbers{0, 3, 7, 9, 11, 14}));
  EXPECT_EQ(numbers(batch, "positions"), (Numbers{0, 1, 2, 0, 1, 2, 3, 0, 1, 0, 1, 0, 1, 2}));
  EXPECT_EQ(numbers(batch, "filling"), (Numbers{0, 3}));
  EXPECT_EQ(batch.size(), 9u);

  const auto apart = samples_of(dataset, {.seq_length = 4, .shuffle = false});
  batch = TokenLoader(apart, {.micro_batch = 4}, *device_).next();
  EXPECT_EQ(shown_ids(numbers(batch, "tokens")), "abc.abdefg..fh..");
  EXPECT_EQ(numbers(batch, "sides"), (Numbers{1, -1, 1, -1}));
  EXPECT_EQ(numbers(batch, "texts"), (Numbers{0, 1, 2, 3}));
  EXPECT_EQ(numbers(batch, "targets"), (Numbers{1, 2, 5, 6, 7, 8, 9, 12, 13}));
  EXPECT_EQ(numbers(batch, "target_tokens"), Numbers{2});
  EXPECT_EQ(numbers(batch, "filling"), (Numbers{1, 0, 2, 2}));
  EXPECT_FALSE(batch.contains("documents") || batch.contains("positions"));

  for (const bool together : {false, true}) {
    const auto texts =
        samples_of(dataset, {.seq_length = 11, .shuffle = false, .packed = together, .pairs = false});
    batch = TokenLoader(texts, {.micro_batch = together ? 1 : 4}, *device_).next();
    EXPECT_EQ(numbers(batch, "target_tokens"), Numbers{4}) << "texts that are judged by themselves";
    EXPECT_EQ(numbers(batch, "targets").size(), 9u);
  }
}

TEST_F(PreferenceLoading, GivesMismatchesBeside) {
  const auto samples =
      samples_of(prepared(many_judged(12)),
                 {.seq_length = 40, .seed = 3, .packed = true, .pairs = false, .mismatched = true});
  const std::int64_t rows = samples->samples_per_round();
  ASSERT_GT(rows, 2);
  TokenLoader loader(samples, {.micro_batch = 2}, *device_);
  const std::string prefix = mismatched_prefix;
  EXPECT_EQ(prefix, "mismatched.");
  for (std::int64_t p = 0; p < 2 * rows; p += 2) {
    const tensor::Batch batch = loader.next();
    Numbers tokens, labels, sides, texts, own_texts;
    for (const std::int64_t i : {p, p + 1}) {
      SampleRow row;
      samples->load_mismatched(i, row);
      tokens.insert(tokens.end(), row.tokens.begin(), row.tokens.end());
      labels.insert(labels.end(), row.labels.begin(), row.labels.end());
      sides.insert(sides.end(), row.sides.begin(), row.sides.end());
      texts.insert(texts.end(), row.texts.begin(), row.texts.end());
    }
    EXPECT_EQ(numbers(batch, prefix + "tokens"), tokens);
    EXPECT_EQ(numbers(batch, prefix + "labels"), labels);
    EXPECT_EQ(numbers(batch, prefix + "sides"), sides);
    EXPECT_EQ(numbers(batch, prefix + "texts"), texts);
    EXPECT_NE(numbers(batch, "tokens"), tokens);
    EXPECT_EQ(numbers(batch, prefix + "target_tokens"), numbers(batch, "target_tokens"));
    EXPECT_EQ(std::ssize(numbers(batch, prefix + "targets")),
              std::count_if(labels.begin(), labels.end(), [](auto label) { return label != no_label; }));
    EXPECT_EQ(numbers(batch, prefix + "documents").size(), sides.size() + 1);
    EXPECT_EQ(batch.size(), 18u) << "all names, twice";
  }
}

/// Rows beyond the end of a pass are there, and nothing of them counts.
TEST_F(PreferenceLoading, APassCountsEveryTextOnce) {
  const auto pairs = prepared(many_pairs(13)), judged = prepared(many_judged(13), "judged");
  for (PreferenceOptions options : all_ways(false)) {
    options.mismatched = !options.pairs;
    SCOPED_TRACE(named(options));
    const auto samples = samples_of(options.pairs ? pairs : judged, options);
    const std::int64_t micro = 4;
    std::map<std::int32_t, int> times;
    std::int64_t targets = 0, beyond = 0;
    for (int rank = 0; rank < 3; ++rank) {
      TokenLoader loader(samples, {micro, rank, 3}, *device_);
      for (std::int64_t b = 0; b < loader.batches_per_epoch(); ++b) {
        const std::int64_t first = b * 3 * micro + rank * micro;
        const auto [batch, counted] = loader.next_of_pass();
        EXPECT_EQ(counted, std::clamp<std::int64_t>(samples->samples_per_round() - first, 0, micro));
        const Numbers sides = numbers(batch, "sides"), texts = numbers(batch, "texts");
        ASSERT_EQ(sides.size(), texts.size());
        for (std::size_t i = 0; i < sides.size(); ++i)
          if (sides[i] != 0) ++times[texts[i]];
        for (const char* prefix : {"", mismatched_prefix}) {
          if (*prefix != 0 && !options.mismatched) continue;
          Numbers judged_sides = sides, here = numbers(batch, cat(prefix, "sides"));
          std::erase(judged_sides, 0), std::erase(here, 0);
          EXPECT_EQ(here, judged_sides);
          for (const std::int32_t target : numbers(batch, cat(prefix, "targets")))
            EXPECT_LT(target, counted * samples->seq_length());
          const Numbers filling = numbers(batch, cat(prefix, "filling"));
          for (std::int64_t i = counted; i < micro; ++i)
            EXPECT_EQ(filling.at(static_cast<std::size_t>(i)), samples->seq_length());
        }
        targets += numbers(batch, "target_tokens")[0], beyond += micro - counted;
      }
      EXPECT_EQ(loader.position(), samples->samples_per_round());
    }
    EXPECT_GT(beyond, 0);
    EXPECT_EQ(targets, samples->items());
    EXPECT_EQ(std::ssize(times), options.pairs ? 2 * samples->items() : samples->items());
    for (const auto& [number, count] : times) EXPECT_EQ(count, 1) << number;
  }
}

TEST_F(PreferenceLoading, RanksSeeTogetherWhatOneSees) {
  const auto pairs = prepared(many_pairs(20)), judged = prepared(many_judged(20), "judged");
  for (PreferenceOptions options : all_ways(false)) {
    options.mismatched = !options.pairs;
    SCOPED_TRACE(named(options));
    const auto samples = samples_of(options.pairs ? pairs : judged, options);
    TokenLoader alone(samples, {.micro_batch = 4}, *device_), first(samples, {2, 0, 2}, *device_),
        second(samples, {2, 1, 2}, *device_);
    std::vector<std::string> names{"tokens", "labels", "sides", "texts", "target_tokens"};
    if (options.mismatched) names.insert(names.end(), {"mismatched.tokens", "mismatched.labels"});
    for (int step = 0; step < 30; ++step) {
      const auto all = alone.next(), a = first.next(), b = second.next();
      for (const std::string& name : names) {
        Numbers together = numbers(a, name);
        const Numbers rest = numbers(b, name);
        if (name == "target_tokens")
          together[0] += rest[0];
        else
          together.insert(together.end(), rest.begin(), rest.end());
        EXPECT_EQ(together, numbers(all, name)) << name << ", step " << step;
      }
    }
  }
}

/// Short texts are as many samples as long ones.
TEST_F(PreferenceLoading, TellsHowManySamplesThereAre) {
  for (PreferenceOptions options : all_ways(false)) {
    options.seq_length = 50;
    SCOPED_TRACE(named(options));
    const auto samples = samples_of(prepared(many_pairs(20)), options);
    const TokenLoader loader(samples, {.micro_batch = 2}, *device_);
    EXPECT_EQ(loader.samples_at_hand(), samples->samples_per_round());
    EXPECT_EQ(loader.samples_per_epoch(), samples->samples_per_round());
  }
}

/// A pair that is two rows comes from one source.
TEST_F(PreferenceLoading, SourcesKeepPairsTogether) {
  const auto one = prepared(many_pairs(20)), two = prepared(many_pairs(9), "two");
  for (const PreferenceOptions& options : all_ways(false)) {
    if (!options.pairs) continue;
    SCOPED_TRACE(named(options));
    PreferenceOptions behind = options;
    behind.first_text = 1000;
    const auto blended = std::make_shared<BlendedSamples>(
        std::vector<std::shared_ptr<const Samples>>{samples_of(one, options), samples_of(two, behind)},
        std::vector<double>{1, 1});
    TokenLoader loader(blended, {.micro_batch = 2}, *device_);
    bool of_first = false, of_second = false;
    for (int step = 0; step < 30; ++step) {
      const tensor::Batch batch = loader.next();
      Numbers sides = numbers(batch, "sides"), texts = numbers(batch, "texts"), chosen, rejected;
      for (std::size_t i = 0; i < sides.size(); ++i) {
        if (sides[i] > 0) chosen.push_back(texts[i] + 1);
        if (sides[i] < 0) rejected.push_back(texts[i]);
        of_first = of_first || (sides[i] != 0 && texts[i] < 1000);
        of_second = of_second || texts[i] >= 1000;
      }
      ASSERT_EQ(chosen, rejected) << step;
    }
    EXPECT_TRUE(of_first && of_second);
  }
}

}  // namespace
}  // namespace sherd::data
