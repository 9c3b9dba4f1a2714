// Tokens that an encoder learns to tell, against BERT's recipe (Devlin et al. 2019, 3.1): shares by the
// binomial distribution.
#include "data/packing/masked_samples.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <numeric>

#include "data/tokenizer.h"
#include "support/expect_error.h"

namespace sherd::data {
namespace {

constexpr std::int32_t mask = 1, sep = 2, vocabulary = 50;

/// Samples of 64 ids that count up from the position, with `sep` at each fifth place, in two documents, and
/// some places at the end that hold nothing.
class CountingSamples final : public Samples {
 public:
  std::int64_t seq_length() const override { return 64; }
  std::int64_t tokens() const override { return 6400; }
  std::int64_t tokens_before(std::int64_t position) const override { return position * 60; }
  std::int64_t samples_per_round() const override { return 100; }
  RowTraits traits() const override { return {.keeps_documents_apart = true}; }
  void load(std::int64_t position, SampleRow& row) const override {
    row.tokens.resize(64), row.labels.assign(64, 7);
    for (std::int64_t i = 0; i < 64; ++i)
      row.tokens[static_cast<std::size_t>(i)] =
          i % 5 == 4 ? sep : static_cast<std::int32_t>(3 + (position * 64 + i) % (vocabulary - 3));
    row.ends = {23, 60, 64}, row.filling = 4;
  }
  void will_need(std::int64_t) const override {}
};

MaskingOptions counting_options() {
  MaskingOptions out;
  out.vocab_size = vocabulary, out.mask_token = mask;
  out.special.assign(vocabulary, false);
  out.special[mask] = out.special[sep] = true;
  return out;
}

struct Drawn {
  SampleRow before, after;
};

Drawn drawn(const MaskingOptions& options, std::int64_t position) {
  const auto samples = std::make_shared<CountingSamples>();
  Drawn out;
  samples->load(position, out.before);
  MaskedSamples(samples, options).load(position, out.after);
  return out;
}

/// Within four deviations of a binomial distribution.
void expect_share(std::int64_t found, std::int64_t of, double share, const char* what) {
  const double n = static_cast<double>(of);
  EXPECT_NEAR(static_cast<double>(found), n * share, 4 * std::sqrt(n * share * (1 - share))) << what;
}

TEST(MaskedSamples, FollowTheRecipe) {
  for (const double probability : {0.15, 0.4}) {
    MaskingOptions options = counting_options();
    options.probability = probability;
    std::int64_t places = 0, targets = 0, masked = 0, same = 0, other = 0;
    std::map<std::int32_t, std::int64_t> replaced;
    for (std::int64_t position = 0; position < 2000; ++position) {
      const auto [before, after] = drawn(options, position);
      ASSERT_EQ(after.ends, before.ends);
      for (std::size_t i = 0; i < 64; ++i) {
        const bool may = i < 60 && before.tokens[i] != sep;
        places += may;
        if (after.labels[i] == no_label) {
          ASSERT_EQ(after.tokens[i], before.tokens[i]);
          continue;
        }
        ASSERT_TRUE(may) << "place " << i;
        ASSERT_EQ(after.labels[i], before.tokens[i]);
        ++targets;
        masked += after.tokens[i] == mask;
        same += after.tokens[i] == before.tokens[i];
        if (after.tokens[i] != mask && after.tokens[i] != before.tokens[i])
          ++other, ++replaced[after.tokens[i]];
      }
    }
    expect_share(targets, places, probability, "targets");
    // A token that is drawn may be the mask, or the one that was there.
    expect_share(masked, targets, 0.8 + 0.1 / vocabulary, "masked");
    expect_share(same, targets, 0.1 + 0.1 / vocabulary, "left");
    expect_share(other, targets, 0.1 * (vocabulary - 2) / vocabulary, "replaced");
    EXPECT_EQ(replaced.size(), static_cast<std::size_t>(vocabulary - 1)) << "every token is drawn";
    for (const auto& [id, count] : replaced) expect_share(count, other, 1.0 / (vocabulary - 1), "a token");
  }
}

TEST(MaskedSamples, ArePureFunctionsOfSeedAndPosition) {
  MaskingOptions options = counting_options();
  const Drawn one = drawn(options, 5), again = drawn(options, 5), next = drawn(options, 105);
  EXPECT_EQ(one.after.tokens, again.after.tokens);
  EXPECT_EQ(one.after.labels, again.after.labels);
  const auto targets = [](const Drawn& d) {
    std::vector<bool> out;
    for (const std::int32_t label : d.after.labels) out.push_back(label != no_label);
    return out;
  };
  EXPECT_NE(targets(one), targets(next)) << "another pass over the data masks other tokens";
  options.seed = 1235;
  EXPECT_NE(targets(one), targets(drawn(options, 5)));
}

TEST(MaskedSamples, TakeWholeWordsWithinADocument) {
  MaskingOptions options = counting_options();
  options.whole_words = true;
  options.goes_on.assign(vocabulary, false);
  for (std::int32_t id = 0; id < vocabulary; ++id)
    options.goes_on[static_cast<std::size_t>(id)] = id % 2 == 0;
  std::int64_t words = 0, taken = 0, apart = 0;
  for (std::int64_t position = 0; position < 1000; ++position) {
    const auto [before, after] = drawn(options, position);
    for (std::size_t i = 1; i < 60; ++i) {
      if (before.tokens[i] == sep || before.tokens[i - 1] == sep) continue;
      const bool here = after.labels[i] != no_label, last = after.labels[i - 1] != no_label;
      if (before.tokens[i] % 2 == 0 && i != 23)
        ASSERT_EQ(here, last) << "position " << position << ", place " << i;
      else
        ++words, taken += here, apart += here != last;
    }
  }
  expect_share(taken, words, 0.15, "words");
  EXPECT_GT(apart, words / 8) << "words are drawn apart";
}

TEST(MaskedSamples, KnowWhatTokenizersCallThem) {
  const auto tokenizer = make_tokenizer("hf:" SHERD_SOURCE_DIR "/tests/data/tokenizers/bert.json");
  const MaskingOptions bert = masking_of(*tokenizer, tokenizer->vocab_size());
  EXPECT_EQ(bert.mask_token, tokenizer->token_id("[MASK]"));
  for (std::int32_t id = 0; id < tokenizer->vocab_size(); ++id) {
    const auto at = static_cast<std::size_t>(id);
    EXPECT_EQ(bert.special[at], tokenizer->token(id).starts_with('[') && tokenizer->token(id).size() > 3)
        << id;
    EXPECT_EQ(bert.goes_on[at], tokenizer->token(id).starts_with("##")) << id;
  }
  // A vocabulary that marks spaces has a token of code that begins alike.
  const auto spaced =
      make_tokenizer("hf:" SHERD_SOURCE_DIR "/tests/data/tokenizers/gpt2.json?eod=<|endoftext|>");
  class WithSigns final : public Tokenizer {
   public:
    explicit WithSigns(const Tokenizer& of) : of_(of) {}
    void encode(std::string_view, const EncodeOptions&, std::vector<std::int32_t>&) const override {}
    std::string decode(std::span<const std::int32_t>) const override { return {}; }
    std::int64_t vocab_size() const override { return of_.vocab_size(); }
    std::int32_t end_of_document() const override { return of_.end_of_document(); }
    std::optional<std::int32_t> token_id(std::string_view token) const override {
      return of_.token_id(token);
    }
    std::string token(std::int32_t id) const override { return id == 300 ? "###" : of_.token(id); }
    bool is_special(std::int32_t id) const override { return of_.is_special(id); }
    bool lossless() const override { return true; }
    const std::string& spec() const override { return of_.spec(); }

   private:
    const Tokenizer& of_;
  };
  const MaskingOptions gpt2 = masking_of(WithSigns(*spaced), spaced->vocab_size());
  for (std::int32_t id = 0; id < spaced->vocab_size(); ++id)
    EXPECT_EQ(gpt2.goes_on[static_cast<std::size_t>(id)],
              id == 300 || !spaced->token(id).starts_with("\u0120"))
        << id;
}

TEST(MaskedSamples, NameWhatDoesNotFit) {
  using sherd::testing::expect_error;
  const auto samples = std::make_shared<CountingSamples>();
  MaskingOptions options = counting_options();
  options.probability = 1;
  expect_error(ErrorKind::usage, "in (0, 1)", [&] { MaskedSamples(samples, options); });
  options = counting_options(), options.mask_token = vocabulary;
  expect_error(ErrorKind::usage, "the mask token 50 is not one of 50",
               [&] { MaskedSamples(samples, options); });
  options = counting_options(), options.goes_on.assign(3, true);
  expect_error(ErrorKind::usage, "is told of 3", [&] { MaskedSamples(samples, options); });
  options = counting_options(), options.vocab_size = 20, options.special = {};
  SampleRow row;
  expect_error(ErrorKind::data, "is not one of the vocabulary's 20 ids",
               [&] { MaskedSamples(samples, options).load(0, row); });
  expect_error(ErrorKind::config, "has no token [MASK] or <mask>",
               [] { (void)masking_of(*make_byte_tokenizer(), 257); });
  expect_error(ErrorKind::config, "and model.vocab_size is 3", [] {
    (void)masking_of(*make_tokenizer("hf:" SHERD_SOURCE_DIR "/tests/data/tokenizers/bert.json"), 3);
  });
}

}  // namespace
}  // namespace sherd::data
