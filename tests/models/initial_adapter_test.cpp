// What an adapter begins as, against PEFT's (support/hugging_face/peft_reference.h).
#include "models/adapters/initial_adapter.h"

#include <gtest/gtest.h>

#include "models/adapters/adapters.h"
#include "support/hugging_face/peft_reference.h"
#include "support/tiny_gpt.h"

namespace sherd::models {
namespace {

using tensor::Tensor;
using test::expect_near;

/// PEFT's own initial A and B; singular vectors have either sign.
TEST(InitialAdapter, BeginsAsPartsOfTheWeights) {
  for (const char* name : {"llama_pissa", "gpt2_pissa", "llama_olora"}) {
    test::PeftReference of(name);
    InitialAdapter begins(of.base, of.options, *of.cpu.device, of.products.get());
    Gpt model(of.options);
    model.assign_names();
    int layers = 0;
    for (const auto& p : adapter_parameters(model.parameters())) {
      if (!p->name.ends_with("lora_A")) continue;
      SCOPED_TRACE(cat(name, " ", p->name));
      const std::string other = p->name.substr(0, p->name.size() - 1) + "B";
      std::int64_t rows = 0, rank = 0;
      for (const auto& q : adapter_parameters(model.parameters()))
        if (q->name == other) rows = q->shape[0], rank = q->shape[1];
      const auto read = [&](const std::string& parameter, const tensor::Shape& shape) {
        const Tensor out = Tensor::empty(*of.cpu.device, shape, DType::f32);
        begins.read(parameter, tensor::Slice::whole(shape), 0, out);
        return of.cpu.values(out);
      };
      Values a = read(p->name, p->shape), b = read(other, {rows, rank});
      const std::vector<float> want_a = of.in_file(p->name, "begun."), want_b = of.in_file(other, "begun.");
      const std::int64_t in = p->shape[1];
      const InitialProducts::Layer* layer = of.products->of(p->name.substr(0, p->name.find(".adapter.")));
      ASSERT_TRUE(layer);
      for (std::int64_t k = 0; k < p->shape[0]; ++k) {
        double dot = 0;
        for (std::int64_t c = 0; c < in; ++c)
          dot += a[static_cast<std::size_t>(k * in + c)] * want_a[static_cast<std::size_t>(k * in + c)];
        if (std::string(name).ends_with("olora"))
          EXPECT_GT(dot, 0) << "the signs of Householder's reflections";
        if (dot >= 0) continue;
        for (std::int64_t c = 0; c < in; ++c) a[static_cast<std::size_t>(k * in + c)] *= -1;
        for (std::size_t row = 0; row < layer->row_of.size(); ++row)
          if (layer->row_of[row] >= 0 && layer->target_of[row] == k / rank)
            b[static_cast<std::size_t>(layer->row_of[row] * rank + k % rank)] *= -1;
      }
      expect_near(a, {want_a.begin(), want_a.end()}, 1e-5);
      expect_near(b, {want_b.begin(), want_b.end()}, 1e-5);
      ++layers;
    }
    EXPECT_GE(layers, 6);
  }
}

/// An adapter that began as a part of the weights is exported as LoRA beside the weights themselves.
TEST(InitialAdapter, ThatBeganAsPartsBecomesAPlainOne) {
  for (const char* name : {"llama_pissa", "gpt2_pissa", "llama_olora"}) {
    SCOPED_TRACE(name);
    test::PeftReference of(name);
    GptConfig options = of.options;
    options.adapter = PlainLora::keys(options.adapter);
    PlainLora plain(of.adapter, *of.products, *of.cpu.device);
    WithAdapter both(of.base, &plain);
    Gpt model(options);
    const test::PlainParameters parameters(*of.cpu.kernels, model, DType::f32);
    for (const auto& p : parameters.all()) both.read(p->name, p->logical_slice(), 0, p->value);
    expect_near(of.logits(model, of.ids("tokens")), of.expected("logits"), 1e-5);
    const config::Adapter written =
        from_peft(adapter_config(PlainLora::keys(of.config.training.adapter), options, ""), "written");
    EXPECT_EQ(written.lora.init, config::LoraInit::uniform);
    EXPECT_EQ(written.lora.rank, 2 * of.options.adapter.lora.rank);
  }
}

}  // namespace
}  // namespace sherd::models
