// What files of public families may hold beside their tensors, or in another form, and what is refused.
#include <gtest/gtest.h>

#include <cstring>

#include "models/hub/adapter_targets.h"
#include "support/cpu_fixture.h"
#include "support/expect_error.h"
#include "support/hugging_face/published_folder.h"
#include "support/plain_parameters.h"
#include "support/vectors.h"

namespace sherd::models {
namespace {

namespace fs = std::filesystem;
using sherd::testing::expect_error;
using sherd::testing::read_text;
using sherd::testing::TempFolder;
using sherd::testing::write_text;
using tensor::SafetensorsFile;
using tensor::Tensor;

/// Checks that the matrices of a folder whose files have low bits are those of its expected.safetensors,
/// whole and from anywhere within; returns how many.
int check_decoded(const fs::path& folder) {
  const config::Config config = config_in(folder);
  const GptConfig options = gpt_config(config, config.model->vocab_size);
  const HuggingFaceLayout layout(options);
  Gpt model(options);
  model.assign_names();
  HuggingFaceWeights weights(folder, layout);
  weights.check(model.parameters());
  const SafetensorsFile expected(folder / "expected.safetensors");
  const auto values = [&](const std::string& name) -> std::optional<HostTensor> {
    const auto* entry = expected.find("value." + name);
    if (!entry) return std::nullopt;
    HostTensor out{tensor::Shape{std::span<const std::int64_t>(entry->shape)}, *entry->dtype,
                   std::vector<std::byte>(entry->bytes)};
    expected.read_bytes(*entry, 0, out.bytes);
    return out;
  };
  test::Cpu cpu(1);
  int matrices = 0;
  for (const nn::ParameterPtr& p : model.parameters()) {
    if (!expected.find("value." + layout.published(p->name).tensors[0].name)) continue;
    SCOPED_TRACE(p->name);
    const Tensor whole = Tensor::empty(*cpu.device, p->shape, DType::f32),
                 part = Tensor::empty(*cpu.device, {45}, DType::f32);
    weights.read(p->name, p->logical_slice(), 0, whole);
    EXPECT_TRUE(test::bytes_of(whole) == from_dict(layout, p->name, values).bytes);
    for (std::int64_t first = 83; first + 45 <= p->numel();
         first += 517) {  // from within a block into others
      weights.read(p->name, p->logical_slice(), first, part);
      EXPECT_TRUE(test::bytes_of(part) == test::bytes_of(whole.range(first, first + 45))) << first;
    }
    ++matrices;
  }
  return matrices;
}

TEST(HuggingFaceFolder, Mxfp4IsReadAsTransformersDecodesIt) {
  EXPECT_EQ(check_decoded(folder_of("gpt_oss_mxfp4")), 4);
  Copy cut("gpt_oss_mxfp4");
  cut.rewrite([](Copy::Dict& all) {
    HostTensor& scales = all["model.layers.0.mlp.experts.down_proj_scales"];
    scales.shape = {2, 32, 1}, scales.bytes.resize(64);
  });
  testing::expect_error(ErrorKind::data, "down_proj_scales [2, 32, 1] for [2, 32, 2]", [&] { cut.open(); });
}

/// In 4 bits with and without scales in 8 bits, and in 8 bits; GPT-2's matrices lie transposed elsewhere.
TEST(HuggingFaceFolder, FilesOfBitsandbytesAreReadAsItDecodesThem) {
  EXPECT_EQ(check_decoded(folder_of("llama_nf4")), 4);
  EXPECT_EQ(check_decoded(folder_of("gpt2_fp4")), 4);
  EXPECT_EQ(check_decoded(folder_of("llama_int8")), 4);
  const std::string down = "model.layers.0.mlp.down_proj.";
  Copy cut("llama_nf4");
  cut.rewrite([&](Copy::Dict& all) {
    HostTensor& scales = all[down + "weight.nested_absmax"];
    scales.shape = {2}, scales.bytes.resize(8);
  });
  expect_error(ErrorKind::data, "down_proj.weight.nested_absmax [2] for 1 numbers", [&] { cut.open(); });
  Copy lacking("llama_nf4");
  lacking.rewrite([&](Copy::Dict& all) { all.erase(down + "weight.absmax"); });
  expect_error(ErrorKind::data, "missing are model.layers.0.mlp.down_proj.weight.absmax",
               [&] { lacking.open(); });
  Copy stateless("llama_nf4");
  stateless.rewrite([&](Copy::Dict& all) { all.erase(down + "weight.quant_state.bitsandbytes__nf4"); });
  expect_error(ErrorKind::data, "and no model.layers.0.mlp.down_proj.weight.quant_state",
               [&] { stateless.open(); });
  Copy scaleless("llama_int8");
  scaleless.reword(down + "SCB", down + "SCX");
  expect_error(ErrorKind::data, "missing are model.layers.0.mlp.down_proj.SCB", [&] { scaleless.open(); });
  const auto with_state = [&](const std::string& text, const std::string& part) {
    Copy wrong("llama_nf4");
    wrong.rewrite([&](Copy::Dict& all) {
      HostTensor& state = all[down + "weight.quant_state.bitsandbytes__nf4"];
      state.bytes.resize(text.size());
      std::memcpy(state.bytes.data(), text.data(), text.size());
      state.shape = {static_cast<std::int64_t>(text.size())};
    });
    expect_error(ErrorKind::data, part, [&] { wrong.open(); });
  };
  for (const char* size : {"0", "1", "9223372036854774784", "1e300", "\"64\"", "null"})
    with_state(cat(R"({"shape": [64, 128], "blocksize": )", size, "}"),
               "its blocksize is no number of elements");
  with_state(R"({"blocksize": 63, "shape": [64, 128]})", "its blocksize is odd");
  with_state(R"({"blocksize": 64, "nested_blocksize": 256, "nested_offset": 1e300, "shape": [64, 128]})",
             "its nested_offset is no number");
  for (const char* shape : {"[64]", "[-1, 128]", "[64.5, 128]", "8192", "[64, 128, 1]"})
    with_state(cat(R"({"blocksize": 64, "shape": )", shape, "}"), "its shape is not that of a matrix");
  Copy vector("llama_nf4");
  vector.rewrite([&](Copy::Dict& all) {
    all["model.norm.weight_blocks"] = {{1, 16}, DType::u8, std::vector<std::byte>(16)};
    all["model.norm.weight_scales"] = {{1}, DType::u8, std::vector<std::byte>(1)};
    all.erase("model.norm.weight");
  });
  expect_error(ErrorKind::data, "model.norm.weight_blocks, in few bits, for [64]", [&] { vector.open(); });
  Copy older("llama_int8");
  older.reword(down + R"(weight_format":{"dtype":"U8","shape":[])",
               down + R"(weight_format":{"dtype":"I8","shape":[])");
  expect_error(ErrorKind::data, "down_proj.weight (in an order of an older bitsandbytes",
               [&] { older.open(); });
  Copy rows("llama_int8");
  rows.reword(down + R"(SCB":{"dtype":"F32")", down + R"(SCB":{"dtype":"I32")");
  expect_error(ErrorKind::data, "down_proj.SCB (I32)", [&] { rows.open(); });
}

/// The biases that routers learn outside of gradients are the model's, not its adapter's.
TEST(HuggingFaceFolder, AnAdapterHasNoCorrectionBiases) {
  const config::Config config = config_in(folder_of("glm4_moe"));
  GptConfig options = gpt_config(config, config.model->vocab_size);
  config::Adapter lora;
  lora.type = config::AdapterType::lora;
  options.adapter = resolved_adapter(lora, options);
  const HuggingFaceLayout layout(options);
  Gpt model(options);
  const test::Cpu cpu(1);
  test::PlainParameters parameters(*cpu.kernels, model, DType::f32);
  std::vector<nn::ParameterPtr> own;
  for (const nn::ParameterPtr& p : model.parameters())
    if (is_adapter(p->name)) own.push_back(p);
  ASSERT_FALSE(own.empty());
  class Held : public nn::WeightSource {
   public:
    explicit Held(const std::vector<nn::ParameterPtr>& all) : all_(all) {}
    void check(const std::vector<nn::ParameterPtr>&) const override {}
    bool has(const std::string&) const override { return true; }
    void read(const std::string& name, const tensor::Slice& slice, std::int64_t begin,
              const Tensor& to) override {
      for (const nn::ParameterPtr& p : all_)
        if (p->name == name)
          std::memcpy(to.raw(), p->value.range(begin, begin + to.numel()).raw(), to.bytes());
      (void)slice;
    }

   private:
    const std::vector<nn::ParameterPtr>& all_;
  } held(own);
  const TempFolder out;
  export_to_hugging_face(out.path(), layout, own, held, *cpu.device,
                         {.dtype = DType::f32, .stem = "adapter_model"});
  HuggingFaceWeights back(out.path(), layout, "adapter_model");
  EXPECT_NO_THROW(back.check(own));
  EXPECT_TRUE(back.step_states().empty());
  HuggingFaceWeights whole(folder_of("glm4_moe"), layout);
  EXPECT_EQ(whole.step_states().size(), 1u);
  // A model's files must have them, where they come from and where they go.
  expect_error(ErrorKind::data, "there are no correction biases of blocks.1.mlp", [&] {
    export_to_hugging_face(out.path(), layout, model.parameters(), held, *cpu.device, {.dtype = DType::f32});
  });
}

/// With scales of the 128 x 128 weights of a block; parameters that are rows of several matrices among them.
TEST(HuggingFaceFolder, Fp8InBlocksIsReadAsTorchDecodesIt) {
  EXPECT_EQ(check_decoded(folder_of("deepseek_v3_fp8")), 16);
  const std::string name = "model.layers.0.mlp.down_proj.weight_scale_inv";
  Copy cut("deepseek_v3_fp8");
  cut.reword(name + R"(":{"dtype":"F32","shape":[1,2])", name + R"(":{"dtype":"F32","shape":[2,1])");
  testing::expect_error(ErrorKind::data, name + " [2, 1] for [16, 136]", [&] { cut.open(); });
  Copy missing("deepseek_v3_fp8");
  missing.reword(name, "model.layers.0.mlp.down_proj.weight_scale_off");
  testing::expect_error(ErrorKind::data, "down_proj.weight (F8_E4M3)", [&] { missing.open(); });
}

TEST(HuggingFaceFolder, OlderNamesAndBuffersAreFound) {
  Copy gpt2("gpt2");
  gpt2.rewrite([](Copy::Dict& all) {
    Copy::Dict bare;
    for (auto& [name, host] : all) bare[name.substr(std::strlen("transformer."))] = host;
    bare["h.0.attn.bias"] = {{1, 1, 24, 24}, DType::u8, std::vector<std::byte>(24 * 24)};
    bare["h.0.attn.masked_bias"] = {{1}, DType::f32, std::vector<std::byte>(4)};
    all = std::move(bare);
  });
  EXPECT_NO_THROW(gpt2.open());
  Copy llama("llama_linear");
  llama.rewrite([](Copy::Dict& all) {
    all["model.layers.0.self_attn.rotary_emb.inv_freq"] = {{2}, DType::f32, std::vector<std::byte>(8)};
    all["lm_head.weight"] = all["model.embed_tokens.weight"];
  });
  EXPECT_NO_THROW(llama.open());
}

/// As classes that read pictures too have them, by the names of transformers 4's files and of 5's.
TEST(HuggingFaceFolder, ThePartForTextIsFound) {
  for (const std::string part : {"language_model.model.", "model.language_model."}) {
    Copy copy("glm4");
    copy.rewrite([&](Copy::Dict& all) {
      Copy::Dict renamed;
      for (auto& [name, host] : all) {
        const bool head = name == "lm_head.weight";
        renamed[!head            ? part + name.substr(std::strlen("model."))
                : part[0] == 'l' ? "language_model." + name
                                 : name] = host;
      }
      renamed["vision_tower.patch.weight"] = {{2}, DType::f32, std::vector<std::byte>(8)};
      all = std::move(renamed);
    });
    EXPECT_NO_THROW(copy.open()) << part;
    copy.rewrite([&](Copy::Dict& all) {
      all[part + "layers.0.self_attn.sinks"] = {{2}, DType::f32, std::vector<std::byte>(8)};
    });
    expect_error(ErrorKind::data, "layers.0.self_attn.sinks", [&] { copy.open(); });
  }
}

/// Layers that predict further tokens, behind the model's or beside them.
TEST(HuggingFaceFolder, LayersThatPredictFurtherTokensArePassedOver) {
  for (const auto& [family, name] : {std::pair{"deepseek_v3", "model.layers.2.eh_proj.weight"},
                                     {"glm4_moe", "model.layers.2.mlp.gate.e_score_correction_bias"},
                                     {"qwen3_5", "mtp.layers.0.mlp.up_proj.weight"}}) {
    Copy copy(family);
    copy.rewrite([name = name](Copy::Dict& all) {
      all[name] = {{2}, DType::f32, std::vector<std::byte>(8)};
    });
    EXPECT_NO_THROW(copy.open()) << family;
  }
  Copy other("qwen3");
  other.rewrite([](Copy::Dict& all) {
    all["model.layers.2.mlp.up_proj.weight"] = {{2}, DType::f32, std::vector<std::byte>(8)};
  });
  expect_error(ErrorKind::data, "model.layers.2.mlp.up_proj.weight", [&] { other.open(); });
}

/// As Qwen3.5's files have them, and transformers 5 in memory: [experts, out, in], gates before ups.
TEST(HuggingFaceFolder, StackedExpertsAreReadAsThoseApart) {
  Copy copy("qwen3_5_moe");
  copy.rewrite([](Copy::Dict& all) {
    const std::string at = "model.layers.";
    for (const int layer : {0, 1})
      for (const auto& [parts, name] : {std::pair{std::vector{"gate_proj", "up_proj"}, "gate_up_proj"},
                                        {std::vector{"down_proj"}, "down_proj"}}) {
        const std::string experts = cat(at, layer, ".mlp.experts.");
        HostTensor whole;
        for (int expert = 0; expert < 4; ++expert)
          for (const char* part : parts) {
            const auto found = all.find(cat(experts, expert, ".", part, ".weight"));
            ASSERT_NE(found, all.end());
            const HostTensor& one = found->second;
            whole.dtype = one.dtype;
            whole.shape = {4, std::ssize(parts) * one.shape[0], one.shape[1]};
            whole.bytes.insert(whole.bytes.end(), one.bytes.begin(), one.bytes.end());
            all.erase(found);
          }
        all[experts + name] = std::move(whole);
      }
  });
  EXPECT_NO_THROW(copy.open());
  const config::Config config = config_in(copy.folder());
  const GptConfig options = gpt_config(config, config.model->vocab_size);
  Gpt model(options);
  model.assign_names();
  HuggingFaceWeights stacked(copy.folder(), HuggingFaceLayout(options)),
      apart(folder_of("qwen3_5_moe"), HuggingFaceLayout(options));
  test::Cpu cpu(1);
  for (const nn::ParameterPtr& p : model.parameters()) {
    const Tensor a = Tensor::empty(*cpu.device, p->shape, DType::f32),
                 b = Tensor::empty(*cpu.device, p->shape, DType::f32);
    stacked.read(p->name, p->logical_slice(), 0, a), apart.read(p->name, p->logical_slice(), 0, b);
    EXPECT_EQ(cpu.values(a), cpu.values(b)) << p->name;
  }
}

/// The two may have different types, as of runs that kept the table in fp32.
TEST(HuggingFaceFolder, ATiedHeadMayBeOfAnotherType) {
  const std::string table = "model.embed_tokens.weight";
  const auto with_head = [&](int change) {
    Copy copy("qwen2");
    copy.rewrite([&](Copy::Dict& all) {
      auto& wide = all[table];
      ASSERT_EQ(wide.dtype, DType::f32);
      all["lm_head.weight"] = {wide.shape, DType::bf16, {}};
      for (std::size_t i = 0; i < wide.bytes.size(); i += 4) {  // the upper half of fp32 is bf16
        wide.bytes[i] = wide.bytes[i + 1] = std::byte{0};
        for (const std::size_t k : {i + 2, i + 3}) all["lm_head.weight"].bytes.push_back(wide.bytes[k]);
      }
      wide.bytes[4] = static_cast<std::byte>(change);
    });
    copy.open();
  };
  EXPECT_NO_THROW(with_head(0));
  expect_error(ErrorKind::data, "lm_head.weight differs from", [&] { with_head(1); });
}

/// transformers ties what it finds; a file may have either name.
TEST(HuggingFaceFolder, ATiedTableMayBeStoredAsTheHeadAlone) {
  const std::string table = "model.embed_tokens.weight";
  Copy copy("qwen2");
  copy.rewrite([&](Copy::Dict& all) {
    all["lm_head.weight"] = all[table];
    all.erase(table);
  });
  EXPECT_NO_THROW(copy.open());
  const config::Config config = config_in(copy.folder());
  const HuggingFaceLayout layout(gpt_config(config, config.model->vocab_size));
  test::Cpu cpu(1);
  HuggingFaceWeights one(copy.folder(), layout), other(folder_of("qwen2"), layout);
  const Tensor a = Tensor::empty(*cpu.device, {37, 16}, DType::f32),
               b = Tensor::empty(*cpu.device, {37, 16}, DType::f32);
  const auto slice = tensor::Slice::whole({37, 16});
  one.read("tokens.weight", slice, 0, a), other.read("tokens.weight", slice, 0, b);
  EXPECT_EQ(cpu.values(a), cpu.values(b));
  // A head of its own is not taken for the table.
  Copy untied("qwen3");
  untied.rewrite([&](Copy::Dict& all) { all.erase(table); });
  expect_error(ErrorKind::data, "missing are model.embed_tokens.weight", [&] { untied.open(); });
}

TEST(HuggingFaceFolder, EveryTensorThatDoesNotFitIsNamed) {
  Copy copy("qwen3");
  copy.rewrite([](Copy::Dict& all) {
    all.erase("model.layers.1.self_attn.q_norm.weight");
    all["model.layers.0.self_attn.q_proj.bias"] = {{24}, DType::f32, std::vector<std::byte>(96)};
    all["model.norm.weight"] = {{15}, DType::f32, std::vector<std::byte>(60)};
    all["lm_head.weight"].dtype = DType::i32;
  });
  for (const char* part :
       {"missing are model.layers.1.self_attn.q_norm.weight", "model.norm.weight [15] for [16]",
        "lm_head.weight (I32)", "not the model's are model.layers.0.self_attn.q_proj.bias", "qwen3"})
    expect_error(ErrorKind::data, part, [&] { copy.open(); });
  Copy untied("qwen2");
  untied.rewrite([](Copy::Dict& all) {
    all["lm_head.weight"] = all["model.embed_tokens.weight"];
    all["lm_head.weight"].bytes[5] ^= std::byte{1};
  });
  expect_error(ErrorKind::data, "tie_word_embeddings", [&] { untied.open(); });
}

TEST(HuggingFaceFolder, FilesThatAreNotThereAreNamed) {
  TempFolder empty;
  const auto open = [&] { tensor::SafetensorsFolder unused(empty.path()); };
  expect_error(ErrorKind::data, "neither model.safetensors nor", open);
  write_text(empty / "pytorch_model.bin", "x");
  expect_error(ErrorKind::data, "save_pretrained()", open);
  Copy shards("llama");
  fs::remove(shards.folder() / "model-00002-of-00003.safetensors");
  expect_error(ErrorKind::io, "model-00002-of-00003.safetensors", [&] { shards.open(); });
  Copy mixed("llama");
  fs::copy_file(folder_of("gpt2") / "model.safetensors", mixed.folder() / "model-00002-of-00003.safetensors",
                fs::copy_options::overwrite_existing);
  expect_error(ErrorKind::data, "which does not have it", [&] { mixed.open(); });
}

/// bf16 and fp16 files are widened exactly, and what is exported in them is rounded to nearest.
TEST(HuggingFaceFolder, NarrowTypesRoundOnce) {
  test::Cpu cpu(1);
  const config::Config config = config_in(folder_of("llama_linear"));
  const GptConfig options = gpt_config(config, config.model->vocab_size);
  const HuggingFaceLayout layout(options);
  Gpt model(options);
  model.assign_names();
  for (const DType dtype : {DType::bf16, DType::f16}) {
    TempFolder narrow;
    HuggingFaceWeights wide(folder_of("llama_linear"), layout);
    export_to_hugging_face(narrow.path(), layout, model.parameters(), wide, *cpu.device, {dtype});
    HuggingFaceWeights back(narrow.path(), layout);
    for (const auto& p : model.parameters()) {
      const Tensor a = Tensor::empty(*cpu.device, p->shape, DType::f32),
                   b = Tensor::empty(*cpu.device, p->shape, DType::f32);
      wide.read(p->name, p->logical_slice(), 0, a), back.read(p->name, p->logical_slice(), 0, b);
      for (std::int64_t i = 0; i < p->numel(); ++i) {
        const float x = a.data<float>()[i];
        const float want = dtype == DType::bf16 ? static_cast<float>(bf16(x)) : static_cast<float>(f16(x));
        ASSERT_EQ(b.data<float>()[i], want);
      }
    }
  }
}

}  // namespace
}  // namespace sherd::models
