// Adapters that PEFT wrote against what it makes of them (support/hugging_face/peft_reference.h).
#include "models/adapters/adapters.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>

#include "models/adapters/initial_adapter.h"
#include "support/expect_error.h"
#include "support/hugging_face/peft_reference.h"
#include "support/temp_folder.h"
#include "support/tiny_gpt.h"
#include "tensor/formats/stored_format.h"
#include "tensor/safetensors/safetensors_folder.h"

namespace sherd::models {
namespace {

using sherd::testing::expect_error;
using sherd::testing::TempFolder;
using tensor::Tensor;
using test::expect_near;
using test::with_adapter;
using Values = std::vector<double>;

config::Adapter lora(std::vector<std::string> targets = {}) {
  config::Adapter out;
  out.type = config::AdapterType::lora, out.targets = std::move(targets);
  return out;
}

/// Models that have no adapters yet say so.
TEST(Adapters, OfOtherAttentionsAreRefusedByName) {
  using sherd::testing::expect_error;
  for (const auto& [options, part] : {std::pair{test::tiny_latents(), "yet to come for latent attention"},
                                      {test::tiny_hybrid(), "yet to come for linear attention"}})
    expect_error(ErrorKind::config, part, [&, o = options] { resolved_adapter(lora(), o.resolved()); });
}

class Peft : public ::testing::TestWithParam<std::string>, protected test::PeftReference {
 protected:
  Peft() : PeftReference(GetParam()) {}
};

TEST_P(Peft, GivesItsLogitsLossAndGradients) {
  expect_same_training();
}

/// One model without an adapter that gives the same.
TEST_P(Peft, MergedWeightsGiveTheSameLogits) {
  GptConfig plain = options;
  plain.adapter = {};
  Gpt model(plain);
  const test::PlainParameters parameters(*cpu.kernels, model, DType::f32);
  MergedWeights merged(both, options, *cpu.device);
  load(parameters, merged);
  expect_near(logits(model, ids("tokens")), expected("logits"), 1e-5);
  // Part by part they are the same to the bit.
  for (const auto& p : parameters.all()) {
    Values got;
    for (std::int64_t begin = 0; begin < p->numel(); begin += 13) {
      const Tensor part =
          Tensor::empty(*cpu.device, {std::min<std::int64_t>(13, p->numel() - begin)}, DType::f32);
      merged.read(p->name, p->logical_slice(), begin, part);
      for (const double v : cpu.values(part)) got.push_back(v);
    }
    EXPECT_EQ(got, cpu.values(p->value)) << p->name;
  }
}

/// Nothing was trained: every byte comes back, and the description means the same adapter.
TEST_P(Peft, ExportGivesTheFilesBack) {
  Gpt model(options);
  model.assign_names();
  TempFolder out;
  export_to_hugging_face(out.path(), layout, adapter_parameters(model.parameters(), saved), both, *cpu.device,
                         {.dtype = DType::f32, .stem = "adapter_model"});
  expect_same_tensors(tensor::SafetensorsFolder(folder, "adapter_model"),
                      tensor::SafetensorsFolder(out.path(), "adapter_model"));
  const config::Adapter again =
      from_peft(adapter_config(config.training.adapter, options, family), "written");
  const config::Adapter read = resolved_adapter(again, options);
  EXPECT_EQ(read.lora.scale(read.lora.rank, read.lora.alpha),
            options.adapter.lora.scale(read.lora.rank, options.adapter.lora.alpha));
  EXPECT_EQ(read.lora.rank, options.adapter.lora.rank);
  GptConfig other = options;
  other.adapter = read;
  Gpt same(other);
  same.assign_names();
  ASSERT_EQ(same.parameters().size(), model.parameters().size());
  for (std::size_t i = 0; i < same.parameters().size(); ++i)
    EXPECT_EQ(same.parameters()[i]->name, model.parameters()[i]->name);
}

INSTANTIATE_TEST_SUITE_P(All, Peft,
                         ::testing::Values("gpt2_all", "gpt2_default", "llama_all", "llama_default",
                                           "qwen2_some", "qwen3_moe_attention", "gpt2_ia3", "llama_ia3",
                                           "qwen2_ia3", "t5_default", "t5_all", "t5_ia3", "llama_patterns",
                                           "llama_layers", "gpt2_regex", "llama_nf4_all", "llama_saved",
                                           "gpt2_saved", "llama_dora", "gpt2_dora", "mixtral_experts",
                                           "gpt_oss_experts", "qwen2_moe_beside", "qwen3_moe_modules",
                                           "llama_tokens", "gpt2_tokens", "gemma2_tokens", "llama_pissa",
                                           "gpt2_pissa", "llama_olora"),
                         [](const auto& test) { return test.param; });

GptConfig options_of(const std::string& family, const config::Adapter& adapter) {
  const config::Config config = with_adapter(family, adapter);
  return gpt_config(config, config.model->vocab_size);
}

/// Names of adapters' parameters in a block, with their shapes.
std::string in_block(int block, const GptConfig& options) {
  const std::string own = cat("blocks.", block, ".");
  Gpt model(options);
  model.assign_names();
  std::string out;
  for (const auto& p : adapter_parameters(model.parameters()))
    if (p->name.starts_with(own)) out += cat(p->name.substr(own.size()), " ", p->shape.str(), "; ");
  return out;
}

std::string in_first_block(const GptConfig& options) {
  return in_block(0, options);
}

TEST(Adapters, TargetsAreEndsOfPublishedNames) {
  EXPECT_EQ(in_first_block(options_of("gpt2", lora())),
            "attention.qkv.adapter.lora_A [8, 16]; attention.qkv.adapter.lora_B [48, 8]; ");
  // Two of three in one weight: rows of keys have none.
  EXPECT_EQ(in_first_block(options_of("llama", lora())),
            "attention.qkv.adapter.lora_A [16, 16]; attention.qkv.adapter.lora_B [24, 8]; ");
  EXPECT_EQ(in_first_block(options_of("gpt2", lora({"c_proj"}))),
            "attention.projection.adapter.lora_A [8, 16]; attention.projection.adapter.lora_B [16, 8]; "
            "mlp.down.adapter.lora_A [8, 20]; mlp.down.adapter.lora_B [16, 8]; ");
  EXPECT_EQ(in_first_block(options_of("gpt2", lora({"mlp.c_proj"}))),
            "mlp.down.adapter.lora_A [8, 20]; mlp.down.adapter.lora_B [16, 8]; ");
  EXPECT_EQ(in_first_block(options_of("llama", lora({"model.layers.0.mlp.up_proj", "layers.1.mlp.up_proj",
                                                     "model.layers.1.mlp.up_proj"}))),
            "mlp.up.adapter.lora_A [8, 16]; mlp.up.adapter.lora_B [20, 8]; ");
}

/// Full names of one stack's blocks, or of both's: the number of a block is its stack's own.
TEST(Adapters, TargetsOfAnEncoderAndADecoderCountByStack) {
  const std::vector<std::string> of_decoder{"decoder.block.0.layer.1.EncDecAttention.q",
                                            "decoder.block.1.layer.1.EncDecAttention.q"};
  std::vector<std::string> both{
      "encoder.block.0.layer.0.SelfAttention.q", "encoder.block.1.layer.0.SelfAttention.q",
      "decoder.block.0.layer.0.SelfAttention.q", "decoder.block.1.layer.0.SelfAttention.q"};
  EXPECT_EQ(in_first_block(options_of("t5", lora(of_decoder))), "");
  EXPECT_EQ(in_block(2, options_of("t5", lora(of_decoder))),
            "cross_attention.q.adapter.lora_A [8, 16]; cross_attention.q.adapter.lora_B [24, 8]; ");
  EXPECT_EQ(in_first_block(options_of("t5", lora(both))),
            "attention.q.adapter.lora_A [8, 16]; attention.q.adapter.lora_B [24, 8]; ");
  both.pop_back();
  expect_error(ErrorKind::config, "has an adapter in 1 of the 2 blocks",
               [&] { options_of("t5", lora(both)); });
  both.pop_back();
  expect_error(ErrorKind::config, "SelfAttention.q has an adapter in the encoder alone",
               [&] { options_of("t5", lora(both)); });
  expect_error(ErrorKind::config, "DenseReluDense.wo, EncDecAttention.q",
               [] { options_of("t5", lora({"nowhere"})); });
  // One stack's part, which files of PEFT name by its number.
  const GptConfig one = options_of("t5", lora({"layer.2.DenseReluDense.wo"}));
  EXPECT_EQ(in_first_block(one), "");
  EXPECT_EQ(in_block(2, one), "mlp.down.adapter.lora_A [8, 20]; mlp.down.adapter.lora_B [16, 8]; ");
  const config::Adapter again = from_peft(adapter_config(one.adapter, one, "t5"), "written");
  EXPECT_EQ(again.targets, std::vector<std::string>{"layer.2.DenseReluDense.wo"});
}

/// As PEFT writes "all-linear" of a model without a head, whose blocks lie in a part called encoder.
TEST(Adapters, TargetsOfAnEncoderAloneCountAllBlocks) {
  EXPECT_EQ(in_first_block(options_of("bert", lora({"encoder.layer.0.attention.self.query",
                                                    "encoder.layer.1.attention.self.query"}))),
            "attention.qkv.adapter.lora_A [8, 16]; attention.qkv.adapter.lora_B [16, 8]; ");
}

TEST(Adapters, WhatThereIsNotIsNamedWithWhatThereIs) {
  expect_error(ErrorKind::config,
               "no module is called 'q_proj'; there are attn.c_attn, attn.c_proj, mlp.c_fc, "
               "mlp.c_proj",
               [] {
                 options_of("gpt2", lora({"c_attn", "q_proj"}));
               });
  expect_error(ErrorKind::config, "no module is called 'proj'", [] { options_of("llama", lora({"proj"})); });
  expect_error(ErrorKind::config, "no module is called 'lm_head'",
               [] { options_of("llama", lora({"lm_head"})); });
}

TEST(Adapters, ExpertsAreNamedByModulesOrAsAllOfThem) {
  const auto of_block = [](int block, const std::string& family, const std::vector<std::string>& targets,
                           const std::vector<std::string>& parameters) {
    config::Adapter adapter = lora(targets);
    adapter.lora.target_parameters = parameters, adapter.lora.rank = 2;
    return in_block(block, options_of(family, adapter));
  };
  // One expert's module alone; each of two packed ones has an A of its own.
  EXPECT_EQ(of_block(0, "mixtral", {"experts.2.w3"}, {}),
            "mlp.experts.2.up.adapter.lora_A [2, 16]; mlp.experts.2.up.adapter.lora_B [20, 2]; ");
  const std::string modules = of_block(0, "mixtral", {"w1", "w3"}, {}),
                    both = of_block(0, "mixtral", {}, {"experts.gate_up_proj"});
  EXPECT_NE(modules.find("mlp.experts.3.up.adapter.lora_A [4, 16]; mlp.experts.3.up.adapter.lora_B [40, 2]"),
            std::string::npos)
      << modules;
  EXPECT_NE(both.find("mlp.experts.3.up.adapter.lora_A [2, 16]; mlp.experts.3.up.adapter.lora_B [40, 2]"),
            std::string::npos)
      << both;
  // All linear layers are those of dense blocks and of experts, but no router.
  const std::string dense = of_block(0, "qwen3_moe", {"all-linear"}, {}),
                    experts = of_block(1, "qwen3_moe", {"all-linear"}, {});
  EXPECT_NE(dense.find("mlp.up.adapter.lora_A [4, 16]"), std::string::npos) << dense;
  EXPECT_NE(experts.find("mlp.experts.0.down.adapter.lora_B [16, 2]"), std::string::npos) << experts;
  EXPECT_EQ(experts.find("router"), std::string::npos) << experts;
  // Which are none of GPT-OSS's experts: these are one parameter.
  EXPECT_EQ(of_block(0, "gpt_oss", {"all-linear"}, {}).find("experts"), std::string::npos);
  expect_error(ErrorKind::config,
               "no weight of experts is called 'gate.weight'; there are "
               "mlp.experts.gate_up_proj, mlp.experts.down_proj (routers",
               [&] { of_block(0, "mixtral", {}, {"gate.weight"}); });
  expect_error(ErrorKind::config, "the model has no experts",
               [&] { of_block(0, "llama", {}, {"experts.down_proj"}); });
  expect_error(ErrorKind::config, "use_dora is not for experts' weights", [] {
    config::Adapter adapter = lora({"w2"});
    adapter.lora.dora = true;
    options_of("mixtral", adapter);
  });
}

/// PEFT's names of modules come back as the same ones, also where some experts have none.
TEST(Adapters, ModulesOfSomeExpertsComeBack) {
  for (const std::vector<std::string>& targets : {std::vector<std::string>{"all-linear"},
                                                  {"q_proj", "experts.1.down_proj"},
                                                  {"mlp.down_proj"},
                                                  {"down_proj"}}) {
    const config::Adapter adapter = lora(targets);
    const GptConfig options = options_of("qwen3_moe", adapter);
    const GptConfig again =
        options_of("qwen3_moe", from_peft(adapter_config(adapter, options, ""), "written"));
    for (const int block : {0, 1}) EXPECT_EQ(in_block(block, again), in_block(block, options)) << targets[0];
  }
}

/// An adapter that short names cannot describe is written by whole ones, which mean the same adapter.
TEST(Adapters, WhatIsInSomeBlocksComesBack) {
  const auto round_trip = [](config::Adapter adapter, const std::string& first, const std::string& second) {
    const GptConfig options = options_of("llama", adapter);
    EXPECT_EQ(in_first_block(options), first);
    EXPECT_EQ(in_block(1, options), second);
    const config::Adapter again = from_peft(adapter_config(adapter, options, ""), "written");
    EXPECT_EQ(in_first_block(options_of("llama", again)), first);
    EXPECT_EQ(in_block(1, options_of("llama", again)), second);
  };
  const std::string up = "mlp.up.adapter.lora_A [8, 16]; mlp.up.adapter.lora_B [20, 8]; ",
                    down = "mlp.down.adapter.lora_A [8, 20]; mlp.down.adapter.lora_B [16, 8]; ";
  round_trip(lora({"model.layers.0.mlp.up_proj", "down_proj"}), up + down, down);
  config::Adapter excluded = lora({"up_proj", "down_proj"});
  excluded.exclude = {"layers.0.mlp.up_proj"};
  round_trip(excluded, down, up + down);
  excluded.exclude = {R"(.*layers\.0\..*)"};
  round_trip(excluded, "", up + down);
  config::Adapter pattern = lora({".*up_proj", "down_proj"});
  pattern.lora.layers = {1};
  round_trip(pattern, "", up + down);
}

/// A name that is nothing's would go unseen.
TEST(Adapters, PatternsAndLayersAreChecked) {
  const auto with = [](const std::function<void(config::Adapter&)>& change) {
    config::Adapter adapter = lora({"q_proj", "v_proj", "o_proj"});
    change(adapter);
    return options_of("llama", adapter);
  };
  expect_error(ErrorKind::config, "rank_pattern: 'k_proj' fits no module with an adapter", [&] {
    with([](auto& a) { a.lora.rank_pattern = {{"k_proj", 2}}; });
  });
  expect_error(ErrorKind::config, "q_proj and model.layers.0.self_attn.v_proj are one layer here", [&] {
    with([](auto& a) { a.lora.rank_pattern = {{"v_proj", 2}}; });
  });
  expect_error(ErrorKind::config, "q_proj and model.layers.1.self_attn.v_proj are one layer here", [&] {
    with([](auto& a) { a.lora.alpha_pattern = {{R"(1\.self_attn\.q_proj)", 2}}; });
  });
  expect_error(ErrorKind::config, "alpha_pattern: '(o_proj' is no regular expression", [&] {
    with([](auto& a) { a.lora.alpha_pattern = {{"(o_proj", 2}}; });
  });
  expect_error(ErrorKind::config, "there is no block 2 among 2", [&] {
    with([](auto& a) { a.lora.layers = {0, 2}; });
  });
  expect_error(ErrorKind::config, "no module is left", [&] {
    with([](auto& a) { a.exclude = {"q_proj", "v_proj", ".*o_proj"}; });
  });
  expect_error(ErrorKind::config, "exclude: 'k_proj' is no module that targets name",
               [&] { with([](auto& a) { a.exclude = {"k_proj"}; }); });
  expect_error(ErrorKind::config, "modules_to_save: 'all-linear' is none",
               [&] { with([](auto& a) { a.modules_to_save = {"all-linear"}; }); });
  expect_error(ErrorKind::config, "no module is called '.*qq_proj'",
               [&] { with([](auto& a) { a.targets = {".*qq_proj"}; }); });
  expect_error(ErrorKind::config,
               "modules_to_save: 'wte' is none of those that can be trained whole beside an "
               "adapter: model.embed_tokens, lm_head",
               [&] { with([](auto& a) {
                       a.modules_to_save = {"lm_head", "wte"};
                     }); });
  const GptConfig second = with([](auto& a) { a.lora.layers = {1}; });
  EXPECT_EQ(in_first_block(second), "");
  EXPECT_NE(in_block(1, second), "");
}

/// Words that say where a row of tokens, or a way to begin, cannot be.
TEST(Adapters, RowsOfTokensAndBeginningsAreChecked) {
  const auto with = [](const char* family, const std::function<void(config::LoraKeys&)>& change) {
    config::Adapter adapter = lora({"all-linear"});
    change(adapter.lora);
    return options_of(family, adapter);
  };
  using Indices = std::vector<std::pair<std::string, std::vector<std::int64_t>>>;
  const auto of_tokens = [&](const char* family, const Indices& indices) {
    return with(family, [&](auto& lora) { lora.token_indices = indices; });
  };
  expect_error(ErrorKind::config,
               "there is no id 37 in a vocabulary of 37: to train vectors of tokens that the", [&] {
                 of_tokens("llama", {{"", {3, 37}}});
               });
  expect_error(ErrorKind::config, "'q_proj' is no table of tokens: name model.embed_tokens or lm_head", [&] {
    of_tokens("llama", {{"q_proj", {3}}});
  });
  expect_error(ErrorKind::config, "'lm_head' is the table of tokens, which makes the scores, too: name", [&] {
    of_tokens("gpt2", {{"lm_head", {3}}});
  });
  expect_error(ErrorKind::config, "model.embed_tokens is named twice", [&] {
    of_tokens("llama", {{"", {3}}, {"embed_tokens", {4}}});
  });
  expect_error(ErrorKind::config, "yet to come for models with an encoder", [&] {
    of_tokens("t5", {{"", {3}}});
  });
  expect_error(ErrorKind::config, "all of model.embed_tokens is trained already", [] {
    config::Adapter adapter = lora({"q_proj"});
    adapter.lora.token_indices = {{"", {3}}}, adapter.modules_to_save = {"embed_tokens"};
    options_of("llama", adapter);
  });
  const auto begins = [&](const char* family, config::LoraInit init, std::int64_t rank = 2) {
    return with(family, [&](auto& lora) { lora.init = init, lora.rank = rank; });
  };
  using config::LoraInit;
  expect_error(ErrorKind::config, "\"pissa\" is not for experts' weights, and model.layers.0",
               [&] { begins("mixtral", LoraInit::pissa); });
  expect_error(ErrorKind::config, "as transformer.h.0.attn.c_attn is, which PEFT takes apart the other way",
               [&] { begins("gpt2", LoraInit::olora); });
  expect_error(ErrorKind::config, "has no 9 parts: training.adapter.rank is to be 8 at most",
               [&] { begins("llama", LoraInit::olora, 9); });
  expect_error(ErrorKind::config, "yet to come with use_dora", [&] {
    with("llama", [](auto& lora) { lora.init = LoraInit::pissa, lora.dora = true, lora.rank = 2; });
  });
}

/// DoRA begins with the norms of the base's rows, as the run keeps these: nothing changes.
TEST(Adapters, MagnitudesBeginAsNorms) {
  for (const char* family : {"llama", "gpt2"}) {
    config::Adapter adapter = lora({"all-linear"});
    adapter.lora.dora = true;
    for (const StoredFormat format : {StoredFormat::compute, StoredFormat::nf4}) {
      adapter.base_format = format;
      const GptConfig options = options_of(family, adapter);
      GptConfig plain = options;
      plain.adapter = {};
      test::Cpu cpu{1};
      HuggingFaceWeights base(test::models_reference() / "hugging_face" / family, HuggingFaceLayout(options));
      InitialAdapter magnitudes(base, options, *cpu.device);
      WithAdapter both(base, &magnitudes);
      Gpt with(options), without(plain);
      const test::PlainParameters one(*cpu.kernels, with, DType::f32),
          other(*cpu.kernels, without, DType::f32);
      for (const auto& p : other.all()) base.read(p->name, p->logical_slice(), 0, p->value);
      for (const auto& p : one.all()) {
        if (!both.has(p->name)) continue;
        both.read(p->name, p->logical_slice(), 0, p->value);
        if (!is_adapter(p->name) && p->stored_as == StoredFormat::nf4) {
          std::vector<std::byte> blocks(static_cast<std::size_t>(tensor::stored_bytes(format, p->numel())));
          const std::span values(p->value.data<float>(), static_cast<std::size_t>(p->numel()));
          ASSERT_TRUE(tensor::quantize(format, values, blocks.data(), cpu.device->arena()));
          tensor::dequantize(format, blocks.data(), 0, values);
          for (const auto& same : other.all())
            if (same->name == p->name) std::memcpy(same->value.raw(), p->value.raw(), p->value.bytes());
        }
      }
      const auto logits = [&](Gpt& model) {
        autograd::Tape tape(*cpu.kernels);
        autograd::Tape::NoGrad pause(tape);
        const Tensor tokens =
            Tensor::of<std::int32_t>(*cpu.device, {1, 8}, std::vector<std::int32_t>{3, 1, 4, 1, 5, 9, 2, 6});
        return cpu.values(model.logits(tape, tokens).value());
      };
      expect_near(logits(with), logits(without), 1e-5);
    }
  }
}

/// As PEFT draws them: nothing changes before the first step.
TEST(Adapters, BeginAsTheModelWithoutThem) {
  test::Cpu cpu{1};
  const GptConfig options = options_of("llama", lora({"all-linear"}));
  GptConfig plain = options;
  plain.adapter = {};
  Gpt with(options), without(plain);
  const test::PlainParameters one(*cpu.kernels, with, DType::f32), other(*cpu.kernels, without, DType::f32);
  for (const auto& p : adapter_parameters(one.all())) {
    const Values values = cpu.values(p->value);
    const double most = *std::max_element(values.begin(), values.end()),
                 least = *std::min_element(values.begin(), values.end());
    if (p->name.ends_with("lora_B")) {
      EXPECT_EQ(most, 0);
      EXPECT_EQ(least, 0);
    } else {
      const double bound = 1 / std::sqrt(static_cast<double>(p->shape[1]));
      EXPECT_LE(most, bound);
      EXPECT_GE(least, -bound);
      EXPECT_GT(most, 0.8 * bound);
      EXPECT_LT(least, -0.8 * bound);
    }
  }
  const Tensor tokens = Tensor::of<std::int32_t>(*cpu.device, {1, 4}, std::vector<std::int32_t>{1, 5, 9, 3});
  autograd::Tape tape(*cpu.kernels);
  autograd::Tape::NoGrad pause(tape);
  EXPECT_EQ(cpu.values(with.logits(tape, tokens).value()), cpu.values(without.logits(tape, tokens).value()));
}

TEST(Adapters, FlopsLeaveOutGradientsOfFrozenWeights) {
  const GptConfig options = options_of("llama", lora());
  GptConfig plain = options;
  plain.adapter = {};
  const double all = flops_per_token(plain, 12, AttentionFlops::full),
               frozen = flops_per_token(options, 12, AttentionFlops::full);
  EXPECT_DOUBLE_EQ(frozen, all * 2 / 3);
}

}  // namespace
}  // namespace sherd::models
