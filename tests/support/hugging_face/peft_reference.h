#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>

#include "models/adapters/adapters.h"
#include "models/adapters/initial_adapter.h"
#include "models/gpt.h"
#include "models/hub/adapter_config.h"
#include "models/hub/adapter_names.h"
#include "models/hub/adapter_tables.h"
#include "models/hub/config_json.h"
#include "models/hub/hugging_face_weights.h"
#include "support/cpu_fixture.h"
#include "support/hugging_face/hugging_face_dict.h"
#include "support/places.h"
#include "support/plain_parameters.h"
#include "support/temp_folder.h"
#include "support/vectors.h"
#include "tensor/safetensors/safetensors.h"

// Adapters of tiny models of public families, in folders that PEFT or AdapterHub wrote, and what they make of
// them; scripts/references/make_peft_reference.py and make_bottleneck_reference.py made them and say what
// they hold.
namespace sherd::test {

inline std::filesystem::path models_reference() {
  return std::filesystem::path(SHERD_SOURCE_DIR) / "tests/models/reference";
}

/// The configuration of a family's tiny model with an adapter, as a file would have it.
inline config::Config with_adapter(const std::string& family, const config::Adapter& adapter) {
  const auto folder = models_reference() / "hugging_face" / family;
  const auto published = models::from_hugging_face(testing::read_text(folder / "config.json"), "config.json");
  config::Config out = config::parse_text(config::section_of(published.model));
  out.training.adapter = adapter;
  // The references know losses of tokens alone.
  config::Moe& moe = out.model->moe;
  if (moe.experts > 0) moe.aux_loss = 0, moe.aux_loss_type = BalanceLoss::all_choices;
  return out;
}

/// The folder of a reference adapter: PEFT's, or AdapterHub's.
inline std::filesystem::path adapter_reference(const std::string& name) {
  const auto own = models_reference() / "bottleneck" / name;
  return std::filesystem::exists(own) ? own : models_reference() / "peft" / name;
}

inline config::Adapter adapter_in(const std::filesystem::path& folder) {
  const std::string text = testing::read_text(folder / "adapter_config.json");
  return models::is_adapter_hub(text, "adapter_config.json")
             ? models::from_adapter_hub(text, "adapter_config.json")
             : models::from_peft(text, "adapter_config.json");
}

/// A reference folder with the family's tiny model that it belongs to.
struct PeftReference {
  static std::string family_of(const std::string& name) {
    for (const char* family : {"qwen2_moe", "qwen3_moe", "gpt_oss", "llama_nf4"})
      if (name.starts_with(family)) return family;
    return name.substr(0, name.find('_'));
  }

  explicit PeftReference(const std::string& name)
      : folder(adapter_reference(name)),
        family(family_of(name)),
        config(with_adapter(family, adapter_in(folder))),
        options(models::gpt_config(config, config.model->vocab_size)),
        layout(models::HuggingFaceLayout(options).of_adapter()),
        saved(models::saved_parameters(options)),
        expected_file(folder / "expected.safetensors"),
        base(models_reference() / "hugging_face" / family, models::HuggingFaceLayout(options)),
        adapter(folder, layout, models::adapter_stem(options.adapter.type)),
        both(own_base(), &adapter, saved) {}

  /// The base as it stands beside the adapter.
  nn::WeightSource& own_base() {
    if (!config::takes_from_base(options.adapter.lora.init)) return base;
    products = std::make_unique<models::InitialProducts>(base, options, *cpu.device);
    without = std::make_unique<models::WithoutProducts>(*products);
    return *without;
  }

  std::vector<double> expected(const std::string& name) const {
    const auto& entry = expected_file.at(name);
    const tensor::Tensor out = tensor::Tensor::empty(
        *cpu.device, tensor::Shape{std::span<const std::int64_t>(entry.shape)}, *entry.dtype);
    expected_file.read(name, 0, out);
    return cpu.values(out);
  }
  /// Values of an adapter's parameter, or their gradients.
  std::vector<float> published(const std::string& parameter, bool gradient) const {
    return in_file(parameter, gradient ? "grad." : "");
  }
  /// In what begins so of expected.safetensors; "": in the adapter's own file.
  std::vector<float> in_file(const std::string& parameter, const std::string& prefix) const {
    const tensor::SafetensorsFile values(folder /
                                         (models::adapter_stem(options.adapter.type) + ".safetensors"));
    const tensor::SafetensorsFile& file = prefix.empty() ? values : expected_file;
    const models::HostTensor host = models::from_dict(
        layout, parameter, [&](const std::string& name) -> std::optional<models::HostTensor> {
          const auto* entry = file.find(prefix + name);
          if (!entry) return std::nullopt;
          models::HostTensor out{tensor::Shape{std::span<const std::int64_t>(entry->shape)}, *entry->dtype,
                                 std::vector<std::byte>(entry->bytes)};
          file.read_bytes(*entry, 0, out.bytes);
          return out;
        });
    std::vector<float> out(host.bytes.size() / sizeof(float));
    std::memcpy(out.data(), host.bytes.data(), host.bytes.size());
    return out;
  }
  /// "tokens" or "labels".
  tensor::Tensor ids(const std::string& name) const {
    const tensor::Tensor out = tensor::Tensor::empty(*cpu.device, {2, 12}, DType::i32);
    expected_file.read(name, 0, out);
    return out;
  }
  static void load(const PlainParameters& parameters, nn::WeightSource& weights) {
    weights.check(parameters.all());
    for (const auto& p : parameters.all()) weights.read(p->name, p->logical_slice(), 0, p->value);
  }
  /// The logits of every row of `tokens`, without the vocabulary's padding.
  std::vector<double> logits(models::Gpt& model, const tensor::Tensor& tokens) const {
    autograd::Tape tape(*cpu.kernels);
    autograd::Tape::NoGrad pause(tape);
    const std::vector<double> padded = cpu.values(model.logits(tape, tokens).value());
    const std::int64_t columns = options.padded_vocab();
    std::vector<double> out;
    for (std::size_t i = 0; i < padded.size(); ++i)
      if (static_cast<std::int64_t>(i) % columns < options.vocab_size) out.push_back(padded[i]);
    return out;
  }
  /// Logits, loss and the adapter's gradients are as the reference has them. Gives the number of parameters
  /// that are trained.
  std::size_t expect_same_training() {
    models::Gpt model(options);
    const PlainParameters parameters(*cpu.kernels, model, DType::f32);
    load(parameters, both);
    expect_near(logits(model, ids("tokens")), expected("logits"), 1e-5);
    autograd::Tape tape(*cpu.kernels);
    const autograd::Var loss = model(tape, {{"tokens", ids("tokens")}, {"labels", ids("labels")}});
    tape.backward(loss);
    EXPECT_NEAR(cpu.values(loss.value())[0], expected("loss")[0], 1e-5);
    std::size_t found = 0;
    for (const auto& p : parameters.all()) {
      SCOPED_TRACE(p->name);
      EXPECT_EQ(p->trainable,
                models::is_adapter(p->name) || std::find(saved.begin(), saved.end(), p->name) != saved.end());
      if (!p->trainable) continue;
      ++found;
      const std::vector<float> want = published(p->name, true);
      expect_near(cpu.values(p->grad), {want.begin(), want.end()}, 1e-5);
    }
    return found;
  }

  mutable Cpu cpu{2};
  std::filesystem::path folder;
  std::string family;
  config::Config config;
  models::GptConfig options;
  models::HuggingFaceLayout layout;  ///< of the adapter's files
  std::vector<std::string> saved;
  tensor::SafetensorsFile expected_file;
  models::HuggingFaceWeights base, adapter;
  std::unique_ptr<models::InitialProducts> products;
  std::unique_ptr<models::WithoutProducts> without;
  models::WithAdapter both;
};

}  // namespace sherd::test
