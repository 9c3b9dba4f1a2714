#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "models/inference/score.h"
#include "nn/text_loss.h"
#include "support/expect_error.h"
#include "support/print_dtype.h"
#include "support/tiny_gpt.h"

namespace sherd::models {
namespace {

using Ids = std::vector<std::int32_t>;
using tensor::Tensor;

/// A text, of whose tokens those from `first` on are targets.
struct Text {
  Ids ids;
  std::size_t first;
};

/// Texts of sizes at which products and attention take more than one way.
std::vector<Text> texts_for(const GptConfig& o) {
  std::vector<Text> out;
  for (std::size_t i = 0; i < 6; ++i) {
    Text text{{}, 2 + i * 3};
    for (std::size_t j = 0; j < 9 + i * 11; ++j)
      text.ids.push_back(
          static_cast<std::int32_t>((i * 131 + j * j * 7 + 3) % static_cast<std::size_t>(o.vocab_size)));
    out.push_back(text);
  }
  return out;
}

GptConfig small(GptConfig o) {
  o.vocab_size = 997, o.pad_vocab_to_multiple_of = 8, o.seq_length = 256, o.hidden_size = 64,
  o.num_layers = 2;
  o.num_heads = 4, o.num_kv_heads = o.num_kv_heads == 0 ? 0 : 2, o.head_dim = 16, o.ffn_hidden_size = 96;
  o.init_std = 0.1;
  return o;
}

class TextScores : public ::testing::Test {
 protected:
  /// A batch whose texts lie behind each other in rows, or each in a row of its own.
  tensor::Batch batch_of(const std::vector<Text>& texts, bool packed, std::int64_t length) {
    Ids tokens, labels, sides, documents{0}, positions, targets;
    const auto fill = [&](std::size_t row) {
      const std::size_t end = (row + 1) * static_cast<std::size_t>(length);
      if (tokens.size() == end) return;
      for (std::int32_t p = 0; tokens.size() < end; ++p)
        tokens.push_back(0), labels.push_back(-100), positions.push_back(p);
      if (packed) documents.push_back(static_cast<std::int32_t>(end)), sides.push_back(0);
    };
    std::size_t row = 0;
    for (const Text& text : texts) {
      const std::size_t places = text.ids.size() - 1;
      if (!tokens.empty() &&
          (!packed || tokens.size() + places > (row + 1) * static_cast<std::size_t>(length)))
        fill(row++);
      for (std::size_t i = 0; i < places; ++i) {
        if (i + 1 >= text.first) targets.push_back(static_cast<std::int32_t>(tokens.size()));
        tokens.push_back(text.ids[i]), positions.push_back(static_cast<std::int32_t>(i));
        labels.push_back(i + 1 >= text.first ? text.ids[i + 1] : -100);
      }
      sides.push_back(1);
      if (packed) documents.push_back(static_cast<std::int32_t>(tokens.size()));
    }
    fill(row);
    const tensor::Shape shape{static_cast<std::int64_t>(row) + 1, length};
    const auto of = [&](const tensor::Shape& s, const Ids& v) {
      return Tensor::of<std::int32_t>(*cpu_.device, s, v);
    };
    const auto list = [&](const Ids& v) { return of({std::ssize(v)}, v); };
    tensor::Batch out{{"tokens", of(shape, tokens)},
                      {"labels", of(shape, labels)},
                      {"sides", list(sides)},
                      {"targets", list(targets)}};
    if (packed) out["documents"] = list(documents), out["positions"] = of(shape, positions);
    return out;
  }

  /// The scores of the texts of a batch, without those of filling.
  std::vector<double> scores(Gpt& model, const std::vector<Text>& texts, bool packed, std::int64_t length) {
    const tensor::Batch batch = batch_of(texts, packed, length);
    tape_.training = false;
    const nn::TextScores all = model.text_scores(tape_, batch, false);
    std::vector<double> out;
    for (std::size_t i = 0; i < all.log_prob.size(); ++i)
      if (batch.at("sides").data<std::int32_t>()[i] != 0) out.push_back(all.log_prob[i]);
    return out;
  }

  std::vector<double> scored(Gpt& model, const std::vector<Text>& texts, std::int64_t most_rows) {
    std::vector<ScoreRequest> requests;
    for (const Text& text : texts) requests.push_back({text.ids, static_cast<std::int64_t>(text.first), {}});
    const RunPass run = [this](const std::function<void(Tape&)>& body) {
      tape_.training = false;
      body(tape_);
    };
    std::vector<double> out;
    for (const Score& score : score_texts(model, run, requests, most_rows))
      out.push_back(score.log_likelihood);
    return out;
  }

  test::Cpu cpu_;
  autograd::Tape tape_{*cpu_.kernels};
};

/// The score that training finds for a text has the same bits as that of scoring, which reads the text by way
/// of a key cache, beside whatever other texts.
TEST_F(TextScores, OfTrainingAndOfScoringAreTheSameToTheBit) {
  for (const GptConfig& o :
       {small(test::tiny_gpt2()), small(test::tiny_llama()), small(test::with_experts(test::tiny_llama()))})
    for (const DType dtype : {DType::f32, DType::bf16}) {
      SCOPED_TRACE(
          cat(config::name_of(o.type), o.moe.experts > 0 ? " with experts" : "", ", ", name_of(dtype)));
      Gpt model(o);
      test::PlainParameters parameters(*cpu_.kernels, model, dtype);
      tape_.input_dtype = dtype;
      const std::vector<Text> texts = texts_for(o);
      std::vector<double> alone;
      for (const Text& text : texts)
        alone.push_back(scores(model, {text}, false, std::ssize(text.ids) - 1)[0]);
      EXPECT_EQ(scores(model, texts, true, 256), alone);  // several to a row
      EXPECT_EQ(scores(model, texts, true, 80), alone);
      EXPECT_EQ(scores(model, texts, false, 64), alone);  // a row each
      EXPECT_EQ(scored(model, texts, 512), alone);
      EXPECT_EQ(scored(model, texts, 1), alone);  // one by one
    }
}

/// A text's log-probability is the sum of its tokens', each given all before it.
TEST_F(TextScores, AreSumsOfTheLogSoftmaxOfTheLogits) {
  const GptConfig o = small(test::tiny_llama());
  Gpt model(o);
  test::PlainParameters parameters(*cpu_.kernels, model, DType::f64);
  const std::vector<Text> texts = texts_for(o);
  const std::vector<double> got = scores(model, texts, true, 256);
  for (std::size_t t = 0; t < texts.size(); ++t) {
    const Ids read(texts[t].ids.begin(), texts[t].ids.end() - 1);
    const std::vector<double> logits = cpu_.values(
        model.logits(tape_, Tensor::of<std::int32_t>(*cpu_.device, {1, std::ssize(read)}, read)).value());
    tape_.clear();
    double want = 0;
    for (std::size_t i = texts[t].first; i < texts[t].ids.size(); ++i) {
      const double* row = logits.data() + static_cast<std::ptrdiff_t>(i - 1) * o.padded_vocab();
      double sum = 0;
      for (std::int64_t id = 0; id < o.vocab_size; ++id) sum += std::exp(row[id]);
      want += row[texts[t].ids[i]] - std::log(sum);
    }
    EXPECT_NEAR(got[t], want, 1e-10 * std::abs(want));
  }
}

TEST_F(TextScores, NameWhatDoesNotFit) {
  const GptConfig o = small(test::tiny_gpt2());
  Gpt model(o);
  test::PlainParameters parameters(*cpu_.kernels, model, DType::f32);
  const auto broken = [&](const char* name, const Ids& values) {
    tensor::Batch batch = batch_of(texts_for(o), true, 256);
    batch[name] = Tensor::of<std::int32_t>(*cpu_.device, {std::ssize(values)}, values);
    model.text_scores(tape_, batch, false);
  };
  testing::expect_error(ErrorKind::data, "'sides' tells of 2 texts, of which there are", [&] {
    broken("sides", {1, -1});
  });
  testing::expect_error(ErrorKind::data, "'targets' names row 9999", [&] { broken("targets", {9999}); });
  tensor::Batch batch = batch_of(texts_for(o), true, 256);
  testing::expect_error(ErrorKind::usage, "no loss that reads these: set_text_loss()",
                        [&] { model(tape_, batch); });
}

}  // namespace
}  // namespace sherd::models
