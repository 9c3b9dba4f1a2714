// Bottleneck adapters that AdapterHub wrote against what it makes of them;
// scripts/references/make_bottleneck_reference.py made them.
#include <gtest/gtest.h>

#include "support/expect_error.h"
#include "support/hugging_face/peft_reference.h"
#include "tensor/safetensors/safetensors_folder.h"

namespace sherd::models {
namespace {

using sherd::testing::expect_error;
using sherd::testing::TempFolder;
using test::expect_near;
using Values = std::vector<double>;

class Bottleneck : public ::testing::TestWithParam<std::string>, protected test::PeftReference {
 protected:
  Bottleneck() : PeftReference(GetParam()) {}
};

TEST_P(Bottleneck, GivesItsLogitsLossAndGradients) {
  EXPECT_EQ(expect_same_training(), GetParam().ends_with("houlsby") ? 16U : 8U);
}

/// Nothing was trained: every byte comes back, and the description means the same adapter.
TEST_P(Bottleneck, ExportGivesTheFilesBack) {
  Gpt model(options);
  model.assign_names();
  TempFolder out;
  export_to_hugging_face(out.path(), layout, adapter_parameters(model.parameters()), adapter, *cpu.device,
                         {.dtype = DType::f32, .stem = adapter_stem(options.adapter.type)});
  expect_same_tensors(tensor::SafetensorsFolder(folder, "adapter"),
                      tensor::SafetensorsFolder(out.path(), "adapter"));
  EXPECT_EQ(from_adapter_hub(adapter_config(config.training.adapter, options, family), "written"),
            config.training.adapter);
}

/// As Houlsby et al. ask for: nothing changes before the first step.
TEST_P(Bottleneck, BeginsAsTheModelWithoutIt) {
  GptConfig plain = options;
  plain.adapter = {};
  Gpt with(options), without(plain);
  const test::PlainParameters one(*cpu.kernels, with, DType::f32), other(*cpu.kernels, without, DType::f32);
  EXPECT_EQ(logits(with, ids("tokens")), logits(without, ids("tokens")));
  for (const auto& p : adapter_parameters(one.all())) {
    const Values values = cpu.values(p->value);
    const bool zero = std::all_of(values.begin(), values.end(), [](double v) { return v == 0; });
    EXPECT_EQ(zero, !p->name.ends_with("_down.weight")) << p->name;
  }
}

INSTANTIATE_TEST_SUITE_P(All, Bottleneck,
                         ::testing::Values("gpt2_houlsby", "gpt2_pfeiffer", "llama_houlsby", "llama_pfeiffer",
                                           "mistral_attention"),
                         [](const auto& test) { return test.param; });

}  // namespace
}  // namespace sherd::models
