#include "models/gpt.h"

#include <gtest/gtest.h>

#include "support/expect_error.h"
#include "support/tiny_gpt.h"

namespace sherd::models {
namespace {

using sherd::testing::expect_error;
using test::bytes_of;

class GptTest : public ::testing::Test {
 protected:
  test::Cpu cpu_;
};

TEST_F(GptTest, Gpt2SmallHasItsParameters) {
  const GptConfig o = test::gpt2_small();
  EXPECT_EQ(o.num_parameters(false), 124'439'808);  // as published
  EXPECT_EQ(o.num_parameters(true), 124'439'808 + (50304 - 50257) * 768);
  GptConfig seven = GptConfig::of_family("llama");
  seven.vocab_size = 32000, seven.seq_length = 4096, seven.hidden_size = 4096, seven.num_layers = 32,
  seven.num_heads = 32;
  seven.ffn_hidden_size = 11008;
  EXPECT_EQ(seven.num_parameters(false), 6'738'415'616);  // Llama 2 7B
}

/// The activation relu gives the positive part of the up projection, relu2 its square.
TEST_F(GptTest, PowersOfRelu) {
  using Values = std::vector<double>;
  GptConfig o = test::tiny_gpt2();
  o.mlp_bias = false;
  const std::int64_t hidden = o.hidden_size, width = o.ffn_hidden_size;
  for (const auto& [activation, power] :
       {std::pair(config::FfnActivation::relu, 1), {config::FfnActivation::relu2, 2}}) {
    o.activation = activation;
    FeedForward part(o, width, "", {});
    const test::PlainParameters parameters(*cpu_.kernels, part, DType::f32);
    Values weights[2];
    for (const auto& p : parameters.all()) weights[p->shape[0] == width ? 0 : 1] = cpu_.values(p->value);
    autograd::Tape tape(*cpu_.kernels);
    std::vector<float> x(static_cast<std::size_t>(hidden));
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = 3 * std::sin(static_cast<float>(i));
    const Values got = cpu_.values(
        part(tape, tape.input(tensor::Tensor::of<float>(*cpu_.device, {1, 1, hidden}, x))).value());
    Values want(x.size());
    for (std::int64_t j = 0; j < width; ++j) {
      double wide = 0;
      for (std::int64_t i = 0; i < hidden; ++i)
        wide += weights[0][static_cast<std::size_t>(j * hidden + i)] * x[static_cast<std::size_t>(i)];
      wide = std::pow(std::max(wide, 0.0), power);
      for (std::int64_t i = 0; i < hidden; ++i)
        want[static_cast<std::size_t>(i)] += weights[1][static_cast<std::size_t>(i * width + j)] * wide;
    }
    for (std::size_t i = 0; i < x.size(); ++i)
      EXPECT_NEAR(got[i], want[i], 1e-6 + 1e-5 * std::abs(want[i])) << power << " at " << i;
  }
}

GptConfig gated() {
  GptConfig o = test::with_experts(test::tiny_llama());
  o.moe.shared_experts = 2, o.moe.shared_expert_gate = true, o.moe.first_dense = 1;
  return o;
}

GptConfig residual() {
  GptConfig o = test::with_experts(test::tiny_gpt2());
  o.moe.use_residual = true, o.moe.ffn_hidden_size = 6;
  return o;
}

TEST_F(GptTest, CountsMatchWhatIsDeclared) {
  for (const GptConfig& o :
       {test::tiny_gpt2(), test::tiny_llama(), test::tiny_gemma(), test::tiny_post_norms(),
        test::gpt2_small(), gated(), residual(), test::tiny_latents(), test::tiny_hybrid()}) {
    Gpt model(o);
    std::int64_t declared = 0;
    for (const auto& p : model.parameters()) declared += p->numel();
    EXPECT_EQ(declared, o.num_parameters());
  }
}

TEST_F(GptTest, HeadsOfLabelsHaveTheLayersOfTheirClasses) {
  using Names = std::vector<std::string>;
  const auto layers = [](const char* family, config::Head head) {
    GptConfig o = GptConfig::of_family(family);
    o.vocab_size = 37, o.seq_length = 8, o.hidden_size = 8, o.num_layers = 1, o.num_heads = 2;
    o.head = head, o.labels = {"a", "b"};
    Names out;
    const Gpt model(o);
    for (const auto& [name, module] : model.children())
      if (name.starts_with("head")) out.push_back(name);
    return out;
  };
  const auto of_texts = config::Head::sequence_classification, of_tokens = config::Head::token_classification;
  EXPECT_EQ(layers("bert", of_texts), (Names{"head_dense", "head_dropout", "head"}));
  EXPECT_EQ(layers("bert", of_tokens), (Names{"head_dropout", "head"}));
  const Names all{"head_dense", "head_norm", "head_dropout", "head"};
  EXPECT_EQ(layers("modernbert", of_texts), all);
  EXPECT_EQ(layers("modernbert", of_tokens), all);
}

TEST_F(GptTest, TheRootThatScalesEmbeddingsIsRoundedToTheirDtype) {
  const GptConfig o = test::tiny_gemma();  // of width 6
  EXPECT_EQ(o.embedding_root(DType::f32), std::sqrt(6.0f));
  EXPECT_EQ(o.embedding_root(DType::bf16), 2.453125);
  EXPECT_EQ(test::tiny_llama().embedding_root(DType::bf16), 1);
}

TEST_F(GptTest, LongRopeGoesByTheLengthOfSequences) {
  GptConfig o = test::tiny_gemma();
  o.layer_types.clear(), o.sliding_window = 0, o.max_positions = 16;
  o.rope_scaling = {
      .type = RotaryScaling::longrope, .short_factor = {2}, .long_factor = {3}, .original_max_positions = 8};
  const auto factor = [&](std::int64_t seq) {
    o.seq_length = seq;
    const tensor::Rotary rotary = *o.resolved().rotary(0);
    EXPECT_NEAR(attention_scale(rotary), std::sqrt(1 + std::log(2) / std::log(8)), 1e-15);
    return rotary_frequencies(rotary, 1)[0];
  };
  EXPECT_EQ(factor(8), 1.0 / 2);
  EXPECT_EQ(factor(9), 1.0 / 3);
  o.rope_scaling.long_factor = {3, 4};
  testing::expect_error(ErrorKind::config, "longrope has 2 factors for 1 pairs", [&] { o.resolved(); });
}

/// Queries that grow with their position do so within each document.
TEST_F(GptTest, PositionsBeginAnewWithEachDocument) {
  GptConfig o = test::tiny_llama();
  o.rope_scaling = {.type = RotaryScaling::yarn, .factor = 4, .original_max_positions = 4};
  o.llama_4_scaling_beta = 0.1, o.seq_length = 16;
  Gpt model(o);
  const test::PlainParameters parameters(*cpu_.kernels, model, DType::f32);
  autograd::Tape tape(*cpu_.kernels);
  const std::vector<std::int32_t> text{3, 1, 4, 1, 5, 9, 2, 6};
  const auto loss = [&](std::int64_t first) {  // of the text behind `first` other tokens
    std::vector<std::int32_t> tokens(static_cast<std::size_t>(first), 7), labels(tokens.size(), -100);
    tokens.insert(tokens.end(), text.begin(), text.end());
    labels.insert(labels.end(), text.begin(), text.end());
    const auto rows = static_cast<std::int32_t>(tokens.size());
    const auto of = [&](const tensor::Shape& shape, const std::vector<std::int32_t>& values) {
      return tensor::Tensor::of<std::int32_t>(*cpu_.device, shape, values);
    };
    std::vector<std::int32_t> bounds{0, rows};
    if (first > 0) bounds.insert(bounds.begin() + 1, static_cast<std::int32_t>(first));
    const autograd::Tape::NoGrad pause(tape);
    const auto out = model(tape, {{"tokens", of({1, rows}, tokens)},
                                  {"labels", of({1, rows}, labels)},
                                  {"documents", of({std::ssize(bounds)}, bounds)},
                                  {"positions", of({1, rows}, tokens)}});
    return cpu_.values(out.value());
  };
  EXPECT_EQ(loss(1), loss(0));
}

TEST_F(GptTest, NamesTiesAndDecay) {
  Gpt model(test::tiny_gpt2());
  model.assign_names();
  std::vector<std::string> names, kept;
  for (const auto& p : model.parameters()) {
    names.push_back(p->name);
    if (!p->decay) kept.push_back(p->name);
  }
  EXPECT_EQ(names.size(), 2u + 2 * 12 + 2);
  EXPECT_EQ(names[0], "tokens.weight");
  EXPECT_EQ(names[1], "positions.weight");
  EXPECT_EQ(std::vector(names.begin() + 2, names.begin() + 14),
            (std::vector<std::string>{
                "blocks.0.norm_1.weight", "blocks.0.norm_1.bias", "blocks.0.attention.qkv.weight",
                "blocks.0.attention.qkv.bias", "blocks.0.attention.projection.weight",
                "blocks.0.attention.projection.bias", "blocks.0.norm_2.weight", "blocks.0.norm_2.bias",
                "blocks.0.mlp.up.weight", "blocks.0.mlp.up.bias", "blocks.0.mlp.down.weight",
                "blocks.0.mlp.down.bias"}));
  EXPECT_EQ(kept.size(), 2u * 8 + 2);
  EXPECT_EQ(model.named_parameters().back().first, "head.weight");
  EXPECT_EQ(model.named_parameters().back().second->name, "tokens.weight");
  Gpt untied(test::tiny_llama());
  untied.assign_names();
  EXPECT_EQ(untied.named_parameters().back().second->name, "head.weight");
}

/// Optimizers take norms of tensors as they are published.
TEST_F(GptTest, PackedProjectionsAreOneTensorWhereTheFamilyHasThemSo) {
  const auto one = [](GptConfig o, const char* name) {
    Gpt model(o);
    model.assign_names();
    for (const auto& p : model.parameters())
      if (p->name == name) return p->packing.published_as_one;
    throw std::runtime_error(name);
  };
  GptConfig phi3 = test::tiny_llama();
  phi3.type = config::family_named("phi3");
  for (const char* name : {"blocks.0.attention.qkv.weight", "blocks.0.mlp.up.weight"}) {
    EXPECT_FALSE(one(test::tiny_llama(), name)) << name;
    EXPECT_TRUE(one(phi3, name)) << name;
  }
  EXPECT_TRUE(one(test::tiny_gpt2(), "blocks.0.attention.qkv.weight"));
  EXPECT_FALSE(one(test::tiny_gpt2(), "blocks.0.mlp.up.weight"));
}

TEST_F(GptTest, OutputProjectionsStartSmaller) {
  GptConfig o = test::gpt2_small();
  o.vocab_size = 64, o.hidden_size = 128, o.num_layers = 8, o.num_heads = 4, o.init_std = 0.02;
  Gpt model(o);
  test::PlainParameters parameters(*cpu_.kernels, model, DType::f32);
  const auto deviation = [&](const std::string& name) {
    double squares = 0;
    const std::vector<double> values = cpu_.values(parameters.find(name)->value);
    for (const double v : values) squares += v * v;
    return std::sqrt(squares / static_cast<double>(values.size()));
  };
  EXPECT_NEAR(deviation("tokens.weight"), 0.02, 0.001);
  EXPECT_NEAR(deviation("blocks.3.attention.qkv.weight"), 0.02, 0.001);
  EXPECT_NEAR(deviation("blocks.3.attention.projection.weight"), 0.005, 0.0002);
  EXPECT_NEAR(deviation("blocks.7.mlp.down.weight"), 0.005, 0.0002);
  EXPECT_EQ(deviation("blocks.7.mlp.down.bias"), 0.0);
}

TEST_F(GptTest, FlopsFollowThePublishedFormulas) {
  GptConfig o = test::gpt2_small();
  const double B = 4, s = 512, h = 768, L = 12, V = 50257;
  const double tokens = B * s, base = 72 * B * L * s * h * h;
  const auto near = [](double got, double want) { EXPECT_NEAR(got / want, 1.0, 1e-12); };
  near(flops_per_token(o, 512, AttentionFlops::full) * tokens, base * (1 + s / (6 * h) + V / (12 * h * L)));
  near(flops_per_token(o, 512, AttentionFlops::causal_half) * tokens,
       base * (1 + s / (12 * h) + V / (12 * h * L)));
  // SwiGLU's third matrix makes the feed-forward part, 48 of the 72, half as large again.
  o.activation = config::FfnActivation::swiglu, o.ffn_hidden_size = 4 * 768;
  near(flops_per_token(o, 512, AttentionFlops::full) * tokens,
       base * (1 + 24.0 / 72 + s / (6 * h) + V / (12 * h * L)));
}

TEST_F(GptTest, OptionsThatDoNotFitAreConfigErrors) {
  const auto refuses = [](const std::string& part, const std::function<void(GptConfig&)>& change) {
    GptConfig o = test::gpt2_small();
    change(o);
    expect_error(ErrorKind::config, part, [&] { Gpt model(o); });
  };
  refuses("multiple of num_heads", [](GptConfig& o) { o.num_heads = 7; });
  refuses("not a multiple of num_kv_heads 5", [](GptConfig& o) { o.num_kv_heads = 5; });
  refuses("even head size", [](GptConfig& o) { o.position = config::PositionType::rotary, o.head_dim = 3; });
  refuses("dropout", [](GptConfig& o) { o.attention_dropout = 1.0f; });
  refuses("num_layers 0", [](GptConfig& o) { o.num_layers = 0; });
  refuses("vocabulary", [](GptConfig& o) { o.vocab_size = 0; });
}

TEST_F(GptTest, BatchesThatDoNotFitAreDataErrors) {
  Gpt model(test::tiny_gpt2());
  test::PlainParameters parameters(*cpu_.kernels, model, DType::f32);
  autograd::Tape tape(*cpu_.kernels);
  tensor::Batch batch = test::tiny_batch(cpu_, model.config(), 2, 5);
  batch.erase("labels");
  expect_error(ErrorKind::data, "holds 'tokens'", [&] { model(tape, batch); });
  batch["labels"] = cpu_.ids({2, 4}, 1, 5);
  expect_error(ErrorKind::data, "do not match", [&] { model(tape, batch); });
  expect_error(ErrorKind::data, "seq_length 7",
               [&] { model(tape, test::tiny_batch(cpu_, model.config(), 1, 8)); });
  batch = test::tiny_batch(cpu_, model.config(), 2, 5);
  batch["tokens"].data<std::int32_t>()[3] = 13;  // a row of the padded table, yet no token
  expect_error(ErrorKind::data, "token id 13", [&] { model(tape, batch); });
  batch = test::tiny_batch(cpu_, model.config(), 2, 5);
  batch["labels"].data<std::int32_t>()[3] = 13;
  expect_error(ErrorKind::data, "13", [&] { model(tape, batch); });
  batch["tokens"] = cpu_.normal({2, 5}, 1, DType::f32);
  expect_error(ErrorKind::data, "int32", [&] { model(tape, batch); });
}

TEST_F(GptTest, PaddingOfTheVocabularyTakesNoPart) {
  for (const GptConfig& o : {test::tiny_gpt2(), test::tiny_llama()}) {
    Gpt model(o);
    test::PlainParameters parameters(*cpu_.kernels, model, DType::f32);
    const tensor::Batch batch = test::tiny_batch(cpu_, o, 2, 7);
    const auto run = [&] {
      autograd::Tape tape(*cpu_.kernels);
      parameters.zero_grad();
      const Var loss = model(tape, batch);
      tape.backward(loss);
      std::vector<std::vector<std::byte>> out{bytes_of(loss.value())};
      for (const auto& p : parameters.all()) out.push_back(bytes_of(p->grad));
      return out;
    };
    const auto before = run();
    for (const char* name : {"tokens.weight", "head.weight"})
      for (const auto& [path, p] : model.named_parameters())
        if (path == name) cpu_.kernels->fill(p->value.rows(o.vocab_size, o.padded_vocab()), 7.5);
    EXPECT_EQ(run(), before);
    const auto& table = parameters.find("tokens.weight")->grad;
    for (const double g : cpu_.values(table.rows(o.vocab_size, o.padded_vocab()))) EXPECT_EQ(g, 0.0);
  }
}

TEST(GptConfig, HasBoundsThatItNames) {
  const auto refused = [](const std::string& part, void (*change)(GptConfig&)) {
    GptConfig options = test::gpt2_small();
    change(options);
    testing::expect_error(ErrorKind::config, part, [&] { static_cast<void>(options.resolved()); });
  };
  refused("num_layers 1000000 is beyond 2048", [](GptConfig& o) { o.num_layers = 1'000'000; });
  refused("hidden_size 9223372036854775807 is beyond", [](GptConfig& o) { o.hidden_size = INT64_MAX; });
  refused("vocab_size 9223372036854775807 is beyond", [](GptConfig& o) { o.vocab_size = INT64_MAX; });
  refused("pad_vocab_to_multiple_of 9223372036854775807 is beyond",
          [](GptConfig& o) { o.pad_vocab_to_multiple_of = INT64_MAX; });
  refused("seq_length 9223372036854775807 is beyond", [](GptConfig& o) { o.seq_length = INT64_MAX; });
  refused("ffn_hidden_size 9223372036854775807 is beyond",
          [](GptConfig& o) { o.ffn_hidden_size = INT64_MAX; });
  refused("head_dim 9223372036854775807 is beyond", [](GptConfig& o) { o.head_dim = INT64_MAX; });
  refused("num_heads 65536 x head_dim 1048576 is beyond",
          [](GptConfig& o) { o.num_heads = 1 << 16, o.head_dim = 1 << 20; });
}

TEST_F(GptTest, TheFutureDoesNotReachThePast) {
  for (const GptConfig& o : {test::tiny_gpt2(), test::tiny_llama()}) {
    Gpt model(o);
    test::PlainParameters parameters(*cpu_.kernels, model, DType::f32);
    autograd::Tape tape(*cpu_.kernels);
    tensor::Tensor tokens = cpu_.ids({1, 7}, 3, 11);
    const auto before = cpu_.values(model.logits(tape, tokens).value());
    tokens.data<std::int32_t>()[4] = (tokens.data<std::int32_t>()[4] + 1) % 11;
    const auto after = cpu_.values(model.logits(tape, tokens).value());
    const auto split = static_cast<std::ptrdiff_t>(4 * model.config().padded_vocab());
    EXPECT_EQ(std::vector(before.begin(), before.begin() + split),
              std::vector(after.begin(), after.begin() + split));
    EXPECT_NE(std::vector(before.begin() + split, before.end()),
              std::vector(after.begin() + split, after.end()));
  }
}

}  // namespace
}  // namespace sherd::models
