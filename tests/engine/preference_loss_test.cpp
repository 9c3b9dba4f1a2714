// Losses of preferences: values, derivatives and metrics against TRL's trainers
// (scripts/references/make_preference_reference.py), derivatives against central differences, and what is
// known without either.
#include "engine/preference/preference_loss.h"

#include <gtest/gtest.h>

#include <limits>
#include <nlohmann/json.hpp>
#include <set>

#include "base/error.h"
#include "comm/communicator.h"
#include "support/numeric_gradient.h"
#include "support/places.h"
#include "support/temp_folder.h"

namespace sherd::engine {
namespace {

using config::PreferenceLoss;
using nlohmann::json;
using tensor::Batch;
using tensor::Tensor;

/// A text as the reference tells of it.
struct Text {
  std::int32_t side = 0;
  std::vector<double> log_probs;
  double reference = 0;
};

config::Config config_of(const std::string& objective, const std::string& preference) {
  const char* head = objective == "reward" ? R"("head": "reward", )" : "";
  return config::parse_text(cat(R"({"train_micro_batch_size_per_gpu": 2, "model": {)", head,
                                R"("type": "gpt2", "seq_length": 8, "hidden_size": 16, "num_layers": 1,
      "num_heads": 2}, "training": {"objective": ")",
                                objective, R"(", "preference": )", preference, "}}"));
}

/// The loss of some texts, as an engine and its model would compute it.
class Learned {
 public:
  Learned(const std::string& objective, const std::string& preference)
      : Learned(config_of(objective, preference)) {}
  explicit Learned(config::Config config)
      : config_(std::move(config)), device_(device::make_cpu_device(1)), loss_(config_, *device_) {}

  /// Every number of `log_probs` counts in TextScores::log_prob, and in `weighted` as tail_weight() says.
  double operator()(const std::vector<Text>& texts) {
    const std::size_t count = texts.size();
    std::vector<std::int32_t> sides;
    std::vector<double> reference;
    nn::TextScores scores;
    weights_.clear();
    for (const Text& text : texts) sides.push_back(text.side), reference.push_back(text.reference);
    std::vector<std::size_t> shared(count, std::numeric_limits<std::size_t>::max());
    for (const std::size_t i : pairs_of(sides))
      shared[i] = shared[i + 1] = std::min(texts[i].log_probs.size(), texts[i + 1].log_probs.size());
    for (std::size_t i = 0; i < count; ++i) {
      double sum = 0, weighted = 0;
      std::vector<double>& weights = weights_.emplace_back();
      for (const double log_prob : texts[i].log_probs) {
        weights.push_back(weights.size() < shared[i] ? 1 : loss_.tail_weight());
        sum += log_prob, weighted += weights.back() * log_prob;
      }
      const bool rewards = config_.objective() == config::Objective::reward;
      scores.log_prob.push_back(sum), scores.weighted.push_back(weighted);
      scores.targets.push_back(rewards ? 0 : std::ssize(weights));
    }
    const Tensor by_text = Tensor::of<std::int32_t>(*device_, {std::ssize(sides)}, sides);
    Batch batch{{"sides", by_text}};
    if (config_.reference() != config::Reference::none) batch["reference"] = on_processor(reference);
    if (loss_.looks_at_partners()) batch["partners"] = on_processor(partners(sides, scores, reference));
    gradients_ = {std::vector<double>(count, 0.0), std::vector<double>(count, 0.0)};
    return loss_(batch, scores, gradients_);
  }

  /// The last call's gradient by each log-probability of a text.
  std::vector<double> gradient(std::size_t text) const {
    std::vector<double> out;
    for (const double weight : weights_[text])
      out.push_back(gradients_.log_prob[text] + weight * gradients_.weighted[text]);
    return out;
  }

  MetricMeans metrics() {
    const auto ranks = comm::make_self({}), stages = comm::make_self({});
    return loss_.sums().means(*ranks, *stages);
  }

  PreferenceTextLoss& loss() { return loss_; }
  const config::Config& config() const { return config_; }

 private:
  Tensor on_processor(const std::vector<double>& values) {
    return Tensor::of<double>(*device_, {std::ssize(values)}, values);
  }

  /// As a run finds them of a step that is this batch.
  std::vector<double> partners(const std::vector<std::int32_t>& sides, const nn::TextScores& scores,
                               const std::vector<double>& reference) const {
    bool unpaired = false;
    for (const auto& [loss, weight] : config_.preference_terms())
      unpaired = unpaired || loss == PreferenceLoss::aot_unpaired;
    std::vector<double> first, second, out(sides.size(), 0.0);
    for (const std::size_t i : pairs_of(sides)) {
      const double chosen = scores.weighted[i], rejected = scores.weighted[i + 1];
      first.push_back(unpaired ? chosen - reference[i] : chosen - rejected);
      second.push_back(unpaired ? rejected - reference[i + 1] : reference[i] - reference[i + 1]);
    }
    const std::vector<double> of_first = of_same_rank(first, second), of_second = of_same_rank(second, first);
    std::size_t pair = 0;
    for (const std::size_t i : pairs_of(sides)) out[i] = of_first[pair], out[i + 1] = of_second[pair], ++pair;
    return out;
  }

  config::Config config_;
  std::shared_ptr<device::Device> device_;
  PreferenceTextLoss loss_;
  std::vector<std::vector<double>> weights_;
  nn::TextGradients gradients_;
};

const json& reference() {
  static const json read =
      json::parse(testing::read_text(SHERD_SOURCE_DIR "/tests/engine/reference/preference_losses.json"));
  return read;
}

std::vector<Text> texts_of(const std::string& name) {
  std::vector<Text> out;
  for (const json& text : reference().at("texts").at(name))
    out.push_back({text.at("side"), text.at("log_probs"), text.value("reference", 0.0)});
  return out;
}

Learned learned(const json& given) {
  Learned out(given.at("objective"), given.at("preference").dump());
  out.loss().set_step({.baseline = given.value("baseline", 0.0)});
  return out;
}

std::string title(const json& given) {
  return cat(given.at("objective").get<std::string>(), " ", given.at("texts").get<std::string>(), " ",
             given.at("preference").dump());
}

TEST(PreferenceLoss, IsTrls) {
  EXPECT_EQ(reference().at("cases").size(), 106u);
  for (const json& given : reference().at("cases")) {
    SCOPED_TRACE(title(given));
    // The reference has thirteen digits; TRL's alpha_divergence is fp32.
    const double relative = given.contains("fp32") ? 1e-6 : 1e-12,
                 absolute = given.contains("fp32") ? 1e-7 : 1e-15;
    const auto expect_near = [&](double got, double want, const std::string& what) {
      EXPECT_NEAR(got, want, relative * std::abs(want) + absolute) << what;
    };
    const std::vector<Text> texts = texts_of(given.at("texts"));
    Learned learned_loss = learned(given);
    expect_near(learned_loss(texts), given.at("loss"), "loss");
    for (std::size_t i = 0; i < texts.size(); ++i) {
      const std::vector<double> got = learned_loss.gradient(i), want = given.at("gradients").at(i);
      ASSERT_TRUE(want.size() == 1 || want.size() == got.size());
      for (std::size_t token = 0; token < got.size(); ++token)
        expect_near(got[token], want.size() == 1 ? want[0] : want[token], cat("text ", i, ", token ", token));
    }
    const MetricMeans metrics = learned_loss.metrics();
    for (const auto& [name, value] : given.at("metrics").items()) {
      if (given.at("objective") == "kto" && name == "rewards/margins") continue;  // Sherd has them of pairs
      ASSERT_TRUE(metrics.contains(name)) << name;
      expect_near(metrics.at(name), value, name);
    }
  }
}

/// The derivatives of every loss there is, against numeric ones.
TEST(PreferenceLoss, DerivativesAgreeWithDifferences) {
  std::set<PreferenceLoss> seen;
  for (const json& given : reference().at("cases")) {
    SCOPED_TRACE(title(given));
    if (given.at("texts").get<std::string>().starts_with("far")) continue;
    std::vector<Text> texts = texts_of(given.at("texts"));
    Learned learned_loss = learned(given);
    for (const auto& [loss, weight] : learned_loss.config().preference_terms()) seen.insert(loss);
    std::vector<double> got, want;
    learned_loss(texts);
    for (std::size_t i = 0; i < texts.size(); ++i)
      for (const double each : learned_loss.gradient(i)) got.push_back(each);
    for (Text& text : texts)
      for (const double each : test::numeric_gradient(text.log_probs, [&] { return learned_loss(texts); }))
        want.push_back(each);
    test::expect_close_gradients(got, want, "the loss");
  }
  EXPECT_EQ(seen.size(), static_cast<std::size_t>(PreferenceLoss::bradley_terry) + 1);
}

TEST(PreferenceLoss, OfAPolicyThatIsTheReferenceIsLnTwo) {
  std::vector<Text> texts = texts_of("pairs");
  for (Text& text : texts) {
    text.reference = 0;
    for (const double log_prob : text.log_probs) text.reference += log_prob;
  }
  const auto pairs = static_cast<double>(texts.size() / 2);
  for (const double beta : {0.1, 0.5}) {
    Learned dpo("dpo", cat(R"({"beta": )", beta, "}"));
    EXPECT_NEAR(dpo(texts), -std::log(0.5), 1e-15);
    for (std::size_t i = 0; i < texts.size(); ++i)
      for (const double each : dpo.gradient(i)) EXPECT_NEAR(each, -texts[i].side * beta / 2 / pairs, 1e-16);
    EXPECT_EQ(dpo.metrics().at("rewards/accuracies"), 0);
    EXPECT_EQ(dpo.metrics().at("rewards/margins"), 0);
  }
}

/// cDPO: what TRL's sigmoid does not read.
TEST(PreferenceLoss, OfSmoothedLabelsIsThatOfPairsEitherWayRound) {
  const std::vector<Text> texts = texts_of("pairs");
  std::vector<Text> swapped;
  for (std::size_t i = 0; i < texts.size(); i += 2) {
    swapped.push_back(texts[i + 1]), swapped.push_back(texts[i]);
    swapped[i].side = 1, swapped[i + 1].side = -1;
  }
  for (const char* divergence : {"reverse_kl", "js_divergence"}) {
    const auto keys = [&](double smoothing) {
      return cat(R"({"beta": 0.3, "f_divergence_type": ")", divergence, R"(", "label_smoothing": )",
                 smoothing, "}");
    };
    Learned plain("dpo", keys(0)), smoothed("dpo", keys(0.2));
    const double one = plain(texts), other = plain(swapped);
    EXPECT_NEAR(smoothed(texts), 0.8 * one + 0.2 * other, 1e-14);
    EXPECT_GT(std::abs(one - other), 0.01);
  }
}

TEST(PreferenceLoss, OfABatchWithoutPairsIsNothing) {
  const auto expect_nothing = [](Learned&& learned_loss, std::vector<std::int32_t> sides) {
    std::vector<Text> texts;
    for (const std::int32_t side : sides) texts.push_back({side, {-1.0, -2.0}, -2.5});
    EXPECT_EQ(learned_loss(texts), 0);
    for (std::size_t i = 0; i < texts.size(); ++i)
      for (const double each : learned_loss.gradient(i)) EXPECT_EQ(each, 0);
    for (const auto& [name, value] : learned_loss.metrics()) EXPECT_TRUE(std::isfinite(value)) << name;
  };
  for (const char* objective : {"dpo", "orpo", "simpo", "cpo", "reward"})
    for (const auto& sides : {std::vector<std::int32_t>{}, {0, 0}, {1}, {-1, 1}, {1, 0, -1}}) {
      SCOPED_TRACE(cat(objective, " of ", sides.size(), " texts"));
      expect_nothing({objective, "{}"}, sides);
    }
  for (const char* loss : {"sft", "aot", "aot_unpaired", "ipo"})
    expect_nothing({"dpo", cat(R"({"loss_type": ")", loss, "\"}")}, {0, 0});
  expect_nothing({"kto", "{}"}, {0, 0});
  expect_nothing({"kto", "{}"}, {});
}

/// As padding of a micro-batch.
TEST(PreferenceLoss, TextsOfNoSideChangeNothing) {
  for (const auto& [objective, name] : {std::pair{"dpo", "pairs"}, {"orpo", "pairs"}, {"kto", "singles"}}) {
    SCOPED_TRACE(objective);
    std::vector<Text> texts = texts_of(name);
    const std::string keys = objective == std::string("dpo") ? R"({"loss_type": ["sigmoid", "sft"]})" : "{}";
    Learned alone(objective, keys), padded(objective, keys);
    const double loss = alone(texts);
    texts.push_back({0, {-7.0, -7.0, -7.0}, 3});
    EXPECT_EQ(padded(texts), loss);
    EXPECT_EQ(padded.metrics(), alone.metrics());
    for (std::size_t i = 0; i + 1 < texts.size(); ++i) EXPECT_EQ(padded.gradient(i), alone.gradient(i));
    EXPECT_EQ(padded.gradient(texts.size() - 1), std::vector<double>(3, 0.0));
  }
}

/// Chosen answers of micro-batches have different numbers of tokens: each of these counts as much.
TEST(PreferenceLoss, OfChosenAnswersIsTheMeanOverAllTokensOfAStep) {
  const std::vector<Text> texts = texts_of("pairs");
  const std::vector<Text> halves[] = {{texts.begin(), texts.begin() + 6}, {texts.begin() + 6, texts.end()}};
  const std::string keys = R"({"loss_type": ["sigmoid", "sft"], "loss_weights": [1, 0.3]})";
  Learned whole("dpo", keys), split("dpo", keys), by_halves("dpo", keys);
  const double loss = whole(texts);
  double targets = 0;
  for (std::size_t i = 0; i < texts.size(); i += 2) targets += static_cast<double>(texts[i].log_probs.size());
  split.loss().set_step({.sft_scale = 6 / targets});
  EXPECT_NEAR((split(halves[0]) + split(halves[1])) / 2, loss, 1e-14);
  for (std::size_t i = 0; i < 6; ++i) EXPECT_NEAR(split.gradient(i)[0] / 2, whole.gradient(i + 6)[0], 1e-14);
  EXPECT_GT(std::abs((by_halves(halves[0]) + by_halves(halves[1])) / 2 - loss), 1e-3);
  EXPECT_NEAR(split.metrics().at("nll_loss"), whole.metrics().at("nll_loss"), 1e-14);
}

TEST(PreferenceLoss, OfUnpairedTextsReadsTheBaselineInKtoAlone) {
  const config::Preference keys =
      config_of("kto", R"({"beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.5})")
          .training.preference;
  for (const bool desirable : {false, true}) {
    const auto value = [&](PreferenceLoss loss, double ratio, double baseline) {
      return single_loss(loss, desirable, ratio, baseline, keys).value;
    };
    EXPECT_EQ(value(PreferenceLoss::kto, 2, 1.5), value(PreferenceLoss::kto, 0.5, 0));
    EXPECT_EQ(value(PreferenceLoss::apo_zero_unpaired, 2, 1.5), value(PreferenceLoss::kto, 2, 0));
    EXPECT_NE(value(PreferenceLoss::kto, 2, 1.5), value(PreferenceLoss::kto, 2, 0));
  }
}

TEST(PreferenceLoss, OfSameRankGivesEachValueOnce) {
  using Values = std::vector<double>;
  EXPECT_EQ(of_same_rank({3, 1, 2}, {10, 30, 20}), (Values{30, 10, 20}));
  // Equals keep their order.
  EXPECT_EQ(of_same_rank({1, 1, 0, 1}, {7, 5, 8, 6}), (Values{6, 7, 5, 8}));
  EXPECT_EQ(of_same_rank({2, 1}, {4, 4}), (Values{4, 4}));
  EXPECT_EQ(of_same_rank({}, {}), Values{});
}

}  // namespace
}  // namespace sherd::engine
