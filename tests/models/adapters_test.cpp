// Adapters of tiny models of public families, in folders that PEFT wrote, against what it makes of them;
// scripts/make_peft_reference.py made them and says what they hold.
#include "models/adapters.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>

#include "config/hugging_face.h"
#include "models/from_config.h"
#include "models/gpt.h"
#include "models/hugging_face_weights.h"
#include "models/merged_weights.h"
#include "support/cpu_fixture.h"
#include "support/expect_error.h"
#include "support/hugging_face_dict.h"
#include "support/places.h"
#include "support/plain_parameters.h"
#include "support/temp_folder.h"
#include "tensor/safetensors_folder.h"

namespace sherd::models {
namespace {

namespace fs = std::filesystem;
using sherd::testing::expect_error;
using sherd::testing::read_text;
using sherd::testing::TempFolder;
using tensor::SafetensorsFile;
using tensor::Tensor;
using Values = std::vector<double>;

fs::path reference() {
  return fs::path(SHERD_SOURCE_DIR) / "tests/models/reference";
}

/// The configuration of a family's tiny model with an adapter, as a file would have it.
config::Config with_adapter(const std::string& family, const config::Adapter& adapter) {
  const fs::path folder = reference() / "hugging_face" / family;
  const auto published = config::from_hugging_face(read_text(folder / "config.json"), "config.json");
  config::Config out = config::parse_text(config::section_of(published.model));
  out.training.adapter = adapter;
  return out;
}

config::Adapter lora(std::vector<std::string> targets = {}) {
  config::Adapter out;
  out.type = config::AdapterType::lora, out.targets = std::move(targets);
  return out;
}

void expect_near(const Values& got, const Values& want, double tolerance) {
  ASSERT_EQ(got.size(), want.size());
  double scale = 1e-3;
  for (const double v : want) scale = std::max(scale, std::abs(v));
  for (std::size_t i = 0; i < got.size(); ++i)
    ASSERT_NEAR(got[i], want[i], tolerance * scale) << "element " << i;
}

class Peft : public ::testing::TestWithParam<std::string> {
 protected:
  Peft()
      : folder_(reference() / "peft" / GetParam()),
        family_(GetParam().starts_with("qwen3_moe") ? "qwen3_moe"
                                                    : GetParam().substr(0, GetParam().find('_'))),
        config_(with_adapter(family_, config::from_peft(read_text(folder_ / "adapter_config.json"), "peft"))),
        options_(gpt_options(config_, config_.model->vocab_size)),
        layout_(options_, options_.adapter.family),
        expected_(folder_ / "expected.safetensors"),
        base_(reference() / "hugging_face" / family_, layout_),
        adapter_(folder_, layout_, "adapter_model"),
        both_(base_, &adapter_) {}

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
  static void load(const test::PlainParameters& parameters, nn::WeightSource& weights) {
    weights.check(parameters.all());
    for (const auto& p : parameters.all()) weights.read(p->name, p->logical_slice(), 0, p->value);
  }
  Values logits(Gpt& model) {
    autograd::Tape tape(*cpu_.kernels);
    autograd::Tape::NoGrad pause(tape);
    const Values padded = cpu_.values(model.logits(tape, ids("tokens")).value());
    const std::int64_t columns = options_.padded_vocab();
    Values out;
    for (std::size_t i = 0; i < padded.size(); ++i)
      if (static_cast<std::int64_t>(i) % columns < options_.vocab_size) out.push_back(padded[i]);
    return out;
  }

  fs::path folder_;
  std::string family_;
  config::Config config_;
  GptOptions options_;
  HuggingFaceLayout layout_;
  SafetensorsFile expected_;
  HuggingFaceWeights base_, adapter_;
  WithAdapter both_;
  mutable test::Cpu cpu_{2};
};

TEST_P(Peft, GivesItsLogitsLossAndGradients) {
  Gpt model(options_);
  const test::PlainParameters parameters(*cpu_.kernels, model, DType::f32);
  load(parameters, both_);
  expect_near(logits(model), expected("logits"), 1e-5);
  autograd::Tape tape(*cpu_.kernels);
  const autograd::Var loss = model(tape, {{"tokens", ids("tokens")}, {"labels", ids("labels")}});
  tape.backward(loss);
  EXPECT_NEAR(cpu_.values(loss.value())[0], expected("loss")[0], 1e-5);
  for (const auto& p : parameters.all()) {
    SCOPED_TRACE(p->name);
    EXPECT_EQ(p->trainable, is_adapter(p->name));
    if (!p->trainable) continue;
    const HostTensor want =
        from_dict(layout_, p->name, [&](const std::string& name) -> std::optional<HostTensor> {
          const auto* entry = expected_.find("grad." + name);
          if (!entry) return std::nullopt;
          HostTensor out{tensor::Shape{std::span<const std::int64_t>(entry->shape)}, *entry->dtype,
                         std::vector<std::byte>(entry->bytes)};
          expected_.read_bytes(*entry, 0, out.bytes);
          return out;
        });
    std::vector<float> values(want.bytes.size() / sizeof(float));
    std::memcpy(values.data(), want.bytes.data(), want.bytes.size());
    expect_near(cpu_.values(p->grad), {values.begin(), values.end()}, 1e-5);
  }
}

/// One model without an adapter that gives the same.
TEST_P(Peft, MergedWeightsGiveTheSameLogits) {
  GptOptions plain = options_;
  plain.adapter = {};
  Gpt model(plain);
  const test::PlainParameters parameters(*cpu_.kernels, model, DType::f32);
  MergedWeights merged(both_, options_, *cpu_.device);
  load(parameters, merged);
  expect_near(logits(model), expected("logits"), 1e-5);
  // Part by part they are the same to the bit.
  for (const auto& p : parameters.all()) {
    Values got;
    for (std::int64_t begin = 0; begin < p->numel(); begin += 13) {
      const Tensor part =
          Tensor::empty(*cpu_.device, {std::min<std::int64_t>(13, p->numel() - begin)}, DType::f32);
      merged.read(p->name, p->logical_slice(), begin, part);
      for (const double v : cpu_.values(part)) got.push_back(v);
    }
    EXPECT_EQ(got, cpu_.values(p->value)) << p->name;
  }
}

/// Nothing was trained: every byte comes back, and the description means the same adapter.
TEST_P(Peft, ExportGivesTheFilesBack) {
  Gpt model(options_);
  model.assign_names();
  TempFolder out;
  export_to_hugging_face(out.path(), layout_, adapter_parameters(model.parameters()), adapter_, *cpu_.device,
                         {.dtype = DType::f32, .stem = "adapter_model"});
  const tensor::SafetensorsFolder there(folder_, "adapter_model"), back(out.path(), "adapter_model");
  ASSERT_EQ(back.names(), there.names());
  for (const std::string& name : there.names()) {
    const auto &a = *there.find(name), &b = *back.find(name);
    EXPECT_EQ(a.shape, b.shape) << name;
    std::vector<std::byte> one(a.bytes), other(b.bytes);
    there.read_bytes(name, 0, one), back.read_bytes(name, 0, other);
    EXPECT_EQ(one, other) << name;
  }
  const config::Adapter again =
      config::from_peft(peft_config(config_.training.adapter, options_, family_), "written");
  const AdapterOptions read = adapter_options(again, options_, options_.adapter.family);
  EXPECT_EQ(read.scale, options_.adapter.scale);
  EXPECT_EQ(read.rank, options_.adapter.rank);
  GptOptions other = options_;
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
                                           "qwen2_ia3"),
                         [](const auto& test) { return test.param; });

GptOptions options_of(const std::string& family, const config::Adapter& adapter) {
  const config::Config config = with_adapter(family, adapter);
  return gpt_options(config, config.model->vocab_size);
}

/// Names of adapters' parameters in block 0, with their shapes.
std::string in_first_block(const GptOptions& options) {
  Gpt model(options);
  model.assign_names();
  std::string out;
  for (const auto& p : adapter_parameters(model.parameters()))
    if (p->name.starts_with("blocks.0.")) out += cat(p->name.substr(9), " ", p->shape.str(), "; ");
  return out;
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
  expect_error(ErrorKind::config, "experts' weights have no adapters yet",
               [] { options_of("mixtral", lora({"w1"})); });
  expect_error(ErrorKind::config, "experts' weights too",
               [] { options_of("qwen3_moe", lora({"all-linear"})); });
  expect_error(ErrorKind::config, "1 of the 2 blocks",
               [] { options_of("llama", lora({"model.layers.0.mlp.up_proj"})); });
}

/// As PEFT draws them: nothing changes before the first step.
TEST(Adapters, BeginAsTheModelWithoutThem) {
  test::Cpu cpu{1};
  const GptOptions options = options_of("llama", lora({"all-linear"}));
  GptOptions plain = options;
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
  const GptOptions options = options_of("llama", lora());
  GptOptions plain = options;
  plain.adapter = {};
  const double all = flops_per_token(plain, 12, AttentionFlops::full),
               frozen = flops_per_token(options, 12, AttentionFlops::full);
  EXPECT_DOUBLE_EQ(frozen, all * 2 / 3);
}

}  // namespace
}  // namespace sherd::models
