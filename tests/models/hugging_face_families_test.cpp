// Tiny models of public families, in folders that transformers wrote, against what it makes of them;
// scripts/references/make_hugging_face_reference.py made them and says what they hold.
#include <gtest/gtest.h>

#include "autograd/key_cache.h"
#include "data/packing/span_samples.h"
#include "models/inference/generate.h"
#include "models/inference/score.h"
#include "nn/step_state.h"
#include "support/cpu_fixture.h"
#include "support/hugging_face/published_folder.h"
#include "support/plain_parameters.h"
#include "support/vectors.h"

namespace sherd::models {
namespace {

namespace fs = std::filesystem;
using sherd::testing::read_text;
using sherd::testing::TempFolder;
using tensor::SafetensorsFile;
using tensor::Tensor;
using test::expect_near, test::largest;
using Values = std::vector<double>;

class Family : public ::testing::TestWithParam<std::string> {
 protected:
  Family()
      : folder_(folder_of(GetParam())),
        config_(config_in(folder_)),
        options_(gpt_config(config_, config_.model->vocab_size)),
        layout_(options_),
        expected_(folder_ / "expected.safetensors") {}

  Values expected(const std::string& name) const {
    const auto& entry = expected_.at(name);
    const Tensor out =
        Tensor::empty(*cpu_.device, tensor::Shape{std::span<const std::int64_t>(entry.shape)}, *entry.dtype);
    expected_.read(name, 0, out);
    return cpu_.values(out);
  }
  Tensor ids(const std::string& name) const {
    const Tensor out = Tensor::empty(*cpu_.device, {2, 12}, DType::i32);
    expected_.read(name, 0, out);
    return out;
  }
  /// The weights of a model on one rank.
  void load(const test::PlainParameters& parameters, const fs::path& folder) {
    HuggingFaceWeights weights(folder, layout_);
    weights.check(parameters.all());
    for (const auto& p : parameters.all()) weights.read(p->name, p->logical_slice(), 0, p->value);
  }
  /// Loads the states that a model learns outside of gradients.
  void load_states(Gpt& model) const {
    const std::map<std::string, std::vector<float>> states =
        HuggingFaceWeights(folder_, layout_).step_states();
    model.for_each([&](nn::Module& module) {
      if (auto* state = dynamic_cast<nn::StepState*>(&module); state && !state->saved().empty())
        state->restore(states.at(module.path()));
    });
  }
  HostTensorSource gradients() const {
    return [this](const std::string& name) -> std::optional<HostTensor> {
      const auto* entry = expected_.find("grad." + name);
      if (!entry) return std::nullopt;
      HostTensor out{tensor::Shape{std::span<const std::int64_t>(entry->shape)}, *entry->dtype,
                     std::vector<std::byte>(entry->bytes)};
      expected_.read_bytes(*entry, 0, out.bytes);
      return out;
    };
  }
  Values values_of(const HostTensor& host) const {
    const Tensor out = Tensor::empty(*cpu_.device, host.shape, host.dtype);
    tensor::copy_from_host(*cpu_.device, out, host.bytes.data(), host.bytes.size());
    return cpu_.values(out);
  }

  fs::path folder_;
  config::Config config_;
  GptConfig options_;
  HuggingFaceLayout layout_;
  SafetensorsFile expected_;
  mutable test::Cpu cpu_{2};
};

TEST_P(Family, GivesTheLogitsLossAndGradientsOfTransformers) {
  Gpt model(options_);
  const test::PlainParameters parameters(*cpu_.kernels, model, DType::f32);
  load(parameters, folder_), load_states(model);
  autograd::Tape tape(*cpu_.kernels);
  {
    autograd::Tape::NoGrad pause(tape);
    const Tensor tokens = ids("tokens");
    const Values padded = cpu_.values(options_.classifies() ? model.class_scores(tape, {{"tokens", tokens}})
                                                            : model.logits(tape, tokens).value());
    const std::int64_t columns = options_.padded_scores();
    Values logits;
    for (std::size_t i = 0; i < padded.size(); ++i)
      if (static_cast<std::int64_t>(i) % columns < options_.scores()) logits.push_back(padded[i]);
    expect_near(logits, expected("logits"), 1e-5);
  }
  tape.training = true;
  tensor::Batch batch{{"tokens", ids("tokens")}, {"labels", ids("labels")}};
  for (const char* name : {"token_types", "sentence_labels"})
    if (expected_.find(name)) batch[name] = ids(name);
  if (options_.head == config::Head::mlm || options_.pairs_texts()) {  // as the loader gives it
    std::vector<std::int32_t> targets;
    const std::vector<double> labels = cpu_.values(ids("labels"));
    for (std::size_t i = 0; i < labels.size(); ++i)
      if (labels[i] >= 0) targets.push_back(static_cast<std::int32_t>(i));
    batch["targets"] =
        Tensor::of<std::int32_t>(*cpu_.device, {static_cast<std::int64_t>(targets.size())}, targets);
  }
  const autograd::Var loss = model(tape, batch);
  tape.backward(loss);
  // The language model's alone; routers' losses go into gradients.
  if (options_.moe.aux_loss == 0) {
    EXPECT_NEAR(cpu_.values(loss.value())[0], expected("loss")[0], 1e-5);
  }
  for (const auto& p : parameters.all()) {
    SCOPED_TRACE(p->name);
    const Values want = values_of(from_dict(layout_, p->name, gradients()));
    if (!p->grad_written) {  // an expert without tokens
      EXPECT_EQ(largest(want), 0);
      continue;
    }
    expect_near(cpu_.values(p->grad), want, 1e-5);
  }
}

/// Reading parts of any slice finds the same as reading all.
TEST_P(Family, SlicesAndPartsAreReadAlike) {
  Gpt model(options_);
  model.assign_names();
  HuggingFaceWeights weights(folder_, layout_);
  std::int64_t elements = 0;
  for (const auto& p : model.parameters()) elements += p->shape.numel();
  EXPECT_EQ(options_.num_parameters(), elements);
  for (const auto& p : model.parameters()) {
    SCOPED_TRACE(p->name);
    const Tensor all = Tensor::empty(*cpu_.device, p->shape, DType::f32);
    weights.read(p->name, p->logical_slice(), 0, all);
    const Values want = cpu_.values(all);
    tensor::Slice::Blocks blocks;
    for (const std::int64_t extent : p->shape.dims())
      blocks.push_back({{0, extent / 4}, {extent / 2, (3 * extent + 3) / 4}});
    const tensor::Slice slice(p->shape, blocks);
    Values got;
    for (std::int64_t begin = 0; begin < slice.numel(); begin += 7) {
      const Tensor part =
          Tensor::empty(*cpu_.device, {std::min<std::int64_t>(7, slice.numel() - begin)}, DType::f32);
      weights.read(p->name, slice, begin, part);
      for (const double v : cpu_.values(part)) got.push_back(v);
    }
    Values expected;
    slice.for_each_run(0, slice.numel(), [&](std::int64_t, std::int64_t logical, std::int64_t count) {
      expected.insert(expected.end(), want.begin() + logical, want.begin() + logical + count);
    });
    EXPECT_EQ(got, expected);
  }
}

/// Nothing was trained: every byte comes back, in the family's own layout, and config.json says the same.
TEST_P(Family, ExportGivesTheFilesBack) {
  Gpt model(options_);
  model.assign_names();
  HuggingFaceWeights weights(folder_, layout_);
  TempFolder out;
  export_to_hugging_face(out.path(), layout_, model.parameters(), weights, *cpu_.device,
                         {DType::f32, GetParam() == "llama" ? std::uint64_t{9000} : std::uint64_t{1} << 30});
  expect_same_tensors(tensor::SafetensorsFolder(folder_), tensor::SafetensorsFolder(out.path()));
  const std::string original = read_text(folder_ / "config.json");
  for (const std::string& base : {original, std::string()}) {
    const std::string text = to_hugging_face(*config_.model, 37, "float32", base);
    EXPECT_EQ(from_hugging_face(text, "exported").model, *config_.model) << text;
  }
}

TEST_P(Family, APaddedSourceIsNotSeen) {
  if (!options_.has_encoder()) return;
  Gpt model(options_);
  const test::PlainParameters parameters(*cpu_.kernels, model, DType::f32);
  load(parameters, folder_);
  autograd::Tape tape(*cpu_.kernels);
  const tensor::Batch batch{
      {"tokens", ids("tokens")},
      {"labels", ids("labels")},
      {"source_lengths", Tensor::of<std::int32_t>(*cpu_.device, {2}, std::vector<std::int32_t>{6, 4})}};
  EXPECT_NEAR(cpu_.values(model(tape, batch).value())[0], expected("padded_loss")[0], 1e-5);
  EXPECT_GT(std::abs(expected("padded_loss")[0] - expected("loss")[0]), 1e-4);
}

/// Texts of which spans were cut out, against the loss that transformers gives for what the script holds of
/// them.
TEST_P(Family, TheLossOfSpansIsThatOfTransformers) {
  if (!options_.has_encoder()) return;
  class Text final : public data::Samples {
   public:
    std::int64_t seq_length() const override { return data::span_lengths(6, 0.3, 1.5).tokens; }
    std::int64_t tokens() const override { return 100; }
    std::int64_t tokens_before(std::int64_t position) const override { return position * seq_length(); }
    std::int64_t samples_per_round() const override { return 10; }
    void load(std::int64_t position, data::SampleRow& row) const override {
      row.tokens.clear();
      for (std::int64_t i = 0; i < seq_length(); ++i)
        row.tokens.push_back(static_cast<std::int32_t>(2 + (7 * position + 3 * i) % 30));
    }
    void will_need(std::int64_t) const override {}
  };
  const data::SpanSamples samples(std::make_shared<Text>(), {.density = 0.3,
                                                             .mean_length = 1.5,
                                                             .source = 6,
                                                             .places = 12,
                                                             .seed = 5,
                                                             .start = 0,
                                                             .end = 1,
                                                             .sentinels = {36, 35, 34, 33}});
  std::vector<std::int32_t> tokens, labels;
  for (const std::int64_t position : {0, 1}) {
    data::SampleRow row;
    samples.load(position, row);
    tokens.insert(tokens.end(), row.tokens.begin(), row.tokens.end());
    labels.insert(labels.end(), row.labels.begin(), row.labels.end());
  }
  const auto doubles = [](const std::vector<std::int32_t>& of) { return Values(of.begin(), of.end()); };
  EXPECT_EQ(doubles(tokens), expected("spans.tokens"));
  EXPECT_EQ(doubles(labels), expected("spans.labels"));
  Gpt model(options_);
  const test::PlainParameters parameters(*cpu_.kernels, model, DType::f32);
  load(parameters, folder_);
  autograd::Tape tape(*cpu_.kernels);
  const tensor::Batch batch{{"tokens", Tensor::of<std::int32_t>(*cpu_.device, {2, 12}, tokens)},
                            {"labels", Tensor::of<std::int32_t>(*cpu_.device, {2, 12}, labels)}};
  EXPECT_NEAR(cpu_.values(model(tape, batch).value())[0], expected("spans.loss")[0], 1e-5);
}

/// A decoder behind an encoder writes the same, with the keys and values that it keeps of both.
TEST_P(Family, ADecoderAnswersAsTransformersDoes) {
  if (!options_.has_encoder()) return;
  Gpt model(options_);
  const test::PlainParameters parameters(*cpu_.kernels, model, DType::f32);
  load(parameters, folder_);
  autograd::Tape tape(*cpu_.kernels);
  const Values tokens = cpu_.values(ids("tokens"));
  const std::size_t source = static_cast<std::size_t>(options_.encoder.seq_length);
  const RunPass run = [&](const std::function<void(autograd::Tape&)>& body) {
    tape.training = false;
    body(tape);
  };
  std::vector<TextRequest> requests;
  for (std::size_t row = 0; row < 2; ++row)
    requests.push_back(
        {std::vector<std::int32_t>(tokens.begin() + static_cast<std::ptrdiff_t>(12 * row),
                                   tokens.begin() + static_cast<std::ptrdiff_t>(12 * row + source)),
         options_.target_length()});
  const Values want = expected("generated");
  // A shorter prompt among them, as others' answers do not depend on it.
  requests.insert(requests.begin() + 1, {std::vector<std::int32_t>(3, 7), 4});
  Values alone;
  for (const std::int64_t batch : {1, 3}) {
    std::vector<Values> got(3);
    const GenerationStats stats = generate_texts(model, run, requests, batch, {.temperature = 0},
                                                 [&](std::size_t text, std::int32_t token) {
                                                   got[text].push_back(token);
                                                   return true;
                                                 });
    EXPECT_EQ(got[0], Values(want.begin(), want.begin() + 6)) << batch;
    EXPECT_EQ(got[2], Values(want.begin() + 6, want.end())) << batch;
    EXPECT_EQ(stats.tokens, 16) << batch;
    if (batch == 1) alone = got[1];
    EXPECT_EQ(got[1], alone) << batch;
  }
}

/// An answer's score is the sum of its tokens' log-softmax over the logits, whatever texts are beside it.
TEST_P(Family, ADecodersScoresAreThoseOfItsLogits) {
  if (!options_.has_encoder()) return;
  Gpt model(options_);
  const test::PlainParameters parameters(*cpu_.kernels, model, DType::f32);
  load(parameters, folder_);
  const Values tokens = cpu_.values(ids("tokens")), logits = expected("logits");
  const RunPass run = [&](const std::function<void(autograd::Tape&)>& body) {
    autograd::Tape tape(*cpu_.kernels);
    tape.training = false;
    body(tape);
  };
  // The first row with all of its source, its decoder's tokens and one more; a shorter one beside it.
  std::vector<ScoreRequest> texts{{{3, 4, 5, 6}, 2, {}}, {{}, 6, {}}};
  for (std::size_t i = 0; i < 12; ++i)
    if (i != 6)
      texts[1].tokens.push_back(static_cast<std::int32_t>(tokens[i]));  // which begins the decoder's
  texts[1].tokens.push_back(9);
  const std::vector<Score> together = score_texts(model, run, texts, 1000),
                           alone = score_texts(model, run, texts, 1);
  double want = 0;
  for (std::size_t row = 0; row < 6; ++row) {
    const auto vocabulary = static_cast<std::size_t>(options_.vocab_size);
    const double* of = logits.data() + row * vocabulary;
    double sum = 0;
    for (std::size_t id = 0; id < vocabulary; ++id) sum += std::exp(of[id]);
    want += of[static_cast<std::size_t>(texts[1].tokens[6 + row])] - std::log(sum);
  }
  EXPECT_NEAR(together[1].log_likelihood, want, 1e-4);
  EXPECT_EQ(together[1].tokens, 6);
  EXPECT_EQ(together[0].tokens, 2);
  for (std::size_t i = 0; i < 2; ++i)
    EXPECT_NEAR(together[i].log_likelihood, alone[i].log_likelihood, 1e-5) << i;
}

/// Row by row as in a whole reading.

TEST_P(Family, ADecodersStoredKeysAreThoseOfAWholeReading) {
  if (!options_.has_encoder()) return;
  Gpt model(options_);
  const test::PlainParameters parameters(*cpu_.kernels, model, DType::f32);
  load(parameters, folder_);
  for (const auto& p : parameters.all())  // distances that matter
    if (p->name.ends_with("coder_positions.weight")) cpu_.kernels->scale(p->value, 20, p->value);
  autograd::Tape tape(*cpu_.kernels);
  tape.training = false;
  const autograd::Tape::NoGrad pause(tape);
  const Values whole = cpu_.values(model.logits(tape, ids("tokens")).value()),
               tokens = cpu_.values(ids("tokens"));
  const std::int64_t columns = options_.padded_vocab(), source = 6, targets = 6;
  const Tensor lengths = Tensor::of<std::int32_t>(*cpu_.device, {2}, std::vector<std::int32_t>{6, 4});
  // The loss of the second text's token `label` behind a row, with the shorter source.
  const auto loss = [&](std::int64_t row, std::int32_t label) {
    std::vector<std::int32_t> labels(24, -100);
    labels[static_cast<std::size_t>(12 + source + row)] = label;
    return cpu_.values(model(tape, {{"tokens", ids("tokens")},
                                    {"labels", Tensor::of<std::int32_t>(*cpu_.device, {2, 12}, labels)},
                                    {"source_lengths", lengths}})
                           .value())[0];
  };
  std::vector<Values> losses(static_cast<std::size_t>(targets));
  for (std::int64_t row = 0; row < targets; ++row)
    for (const std::int32_t label : {3, 8, 11})
      losses[static_cast<std::size_t>(row)].push_back(loss(row, label));
  autograd::KeyCache cache(2, targets);
  const autograd::WithKeyCache continues(tape, cache);
  for (std::int64_t row = 0; row < targets; ++row) {
    const std::int64_t begin = row == 0 ? 0 : source + row, end = source + row + 1;
    std::vector<std::int32_t> read;
    for (std::int64_t text = 0; text < 2; ++text)
      for (std::int64_t i = begin; i < end; ++i)
        read.push_back(static_cast<std::int32_t>(tokens[static_cast<std::size_t>(12 * text + i)]));
    cache.begin(*cpu_.device, {{0, row, 1}, {1, row, 1, row == 0 ? 4 : 0}}, 1, row == 0 ? source : 0);
    const Values got =
        cpu_.values(model.next_logits(tape, Tensor::of<std::int32_t>(*cpu_.device, {2, end - begin}, read)));
    const auto of = [&](const Values& all, std::int64_t at) {
      return Values(all.begin() + at * columns, all.begin() + at * columns + options_.vocab_size);
    };
    expect_near(of(got, 0), of(whole, row), 1e-5);
    const Values second = of(got, 1);
    double sum = 0;
    for (const double each : second) sum += std::exp(each);
    expect_near({std::log(sum) - second[3], std::log(sum) - second[8], std::log(sum) - second[11]},
                losses[static_cast<std::size_t>(row)], 1e-5);
  }
}

INSTANTIATE_TEST_SUITE_P(All, Family,
                         ::testing::Values("gpt2", "llama", "llama_linear", "mistral", "qwen2", "qwen3",
                                           "mixtral", "qwen3_moe", "phi3", "phi3_long", "gemma3_text",
                                           "granite", "smollm3", "glm4", "ministral3", "olmo2", "olmo3",
                                           "bert", "modernbert", "bert_classifier", "modernbert_classifier",
                                           "gemma2", "gpt_oss", "llama_biases", "deepseek_v2",
                                           "deepseek_v2_lite", "deepseek_v3", "glm4_moe", "qwen2_moe",
                                           "qwen3_next", "qwen3_5", "qwen3_5_moe", "t5", "t5_gated", "mt5",
                                           "bert_tokens", "modernbert_tokens", "bert_pretraining"),
                         [](const auto& test) { return test.param; });

}  // namespace
}  // namespace sherd::models
