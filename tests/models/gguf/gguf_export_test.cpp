// Models as GGUF files: where each value of the published tensors is, by the definition of llama.cpp's
// graphs.
#include "models/gguf/gguf_export.h"

#include <cmath>

#include "gguf_reader.h"
#include "models/gguf/gguf_metadata.h"
#include "models/gpt.h"
#include "models/hub/config_json.h"
#include "models/hub/hugging_face_weights.h"
#include "support/cpu_fixture.h"
#include "support/expect_error.h"
#include "support/places.h"

namespace sherd::models {
namespace {

using sherd::testing::expect_error, sherd::testing::TempFolder;
using test::GgufReader;
using Values = std::vector<double>;

std::filesystem::path folder_of(const std::string& family) {
  return std::filesystem::path(SHERD_SOURCE_DIR) / "tests/models/reference/hugging_face" / family;
}

GptConfig config_of(const std::string& family) {
  return GptConfig{
      from_hugging_face(testing::read_text(folder_of(family) / "config.json"), "config.json").model}
      .resolved();
}

/// A family's tiny model in published files, and as a GGUF file.
struct AsGguf {
  explicit AsGguf(const std::string& family, const std::function<void(GptConfig&)>& change = nullptr,
                  GgufType type = GgufType::f32)
      : options(config_of(family)), published(folder_of(family)) {
    if (change) change(options);
    Gpt model(options);
    model.assign_names();
    HuggingFaceWeights weights(folder_of(family), HuggingFaceLayout(options));
    GgufMetadata metadata;
    metadata.set("general.architecture", GgufLayout(options).family().architecture);
    bytes = export_to_gguf(folder / "x.gguf", metadata, GgufLayout(options), model.parameters(), weights,
                           *cpu.device, type);
    file.emplace(folder / "x.gguf");
  }
  Values there(const std::string& name) const { return file->tensors.at(name).values(); }
  Values weight(const std::string& name) const {
    const auto* entry = published.find(name);
    require(entry != nullptr, "no weight ", name);
    std::vector<float> out(entry->bytes / sizeof(float));  // all are fp32
    published.read_bytes(name, 0, std::as_writable_bytes(std::span(out)));
    return {out.begin(), out.end()};
  }
  std::string key(const std::string& name) const { return file->metadata.at(name); }

  test::Cpu cpu{1};
  TempFolder folder;
  GptConfig options;
  tensor::SafetensorsFolder published;
  std::uint64_t bytes = 0;
  std::optional<GgufReader> file;
};

/// A head's halves, that turn together, become neighbours.
Values as_pairs(const Values& rows, std::size_t head, std::size_t turned, std::size_t columns) {
  Values out(rows.size());
  for (std::size_t row = 0; row < rows.size() / columns; ++row) {
    const std::size_t at = row % head, base = row - at;
    const std::size_t from = at >= turned ? row : base + at / 2 + (at % 2) * (turned / 2);
    std::copy_n(rows.begin() + static_cast<std::ptrdiff_t>(from * columns), columns,
                out.begin() + static_cast<std::ptrdiff_t>(row * columns));
  }
  return out;
}

Values plus(Values values, double more) {
  for (double& value : values) value += more;
  return values;
}

/// [rows, columns] to [columns, rows].
Values turned(const Values& values, std::size_t columns) {
  Values out(values.size());
  const std::size_t rows = values.size() / columns;
  for (std::size_t i = 0; i < values.size(); ++i) out[i % columns * rows + i / columns] = values[i];
  return out;
}

TEST(GgufExport, LlamasQueriesAndKeysTurnInPairs) {
  const AsGguf llama("llama");
  const std::string hf = "model.layers.1.", own = "blk.1.";
  EXPECT_EQ(llama.there(own + "attn_q.weight"),
            as_pairs(llama.weight(hf + "self_attn.q_proj.weight"), 4, 4, 16));
  EXPECT_EQ(llama.there(own + "attn_k.weight"),
            as_pairs(llama.weight(hf + "self_attn.k_proj.weight"), 4, 4, 16));
  for (const auto& [name, published] : {std::pair("attn_v", "self_attn.v_proj"),
                                        {"attn_output", "self_attn.o_proj"},
                                        {"ffn_gate", "mlp.gate_proj"},
                                        {"ffn_up", "mlp.up_proj"},
                                        {"ffn_down", "mlp.down_proj"},
                                        {"attn_norm", "input_layernorm"},
                                        {"ffn_norm", "post_attention_layernorm"}})
    EXPECT_EQ(llama.there(cat(own, name, ".weight")), llama.weight(cat(hf, published, ".weight"))) << name;
  EXPECT_EQ(llama.there("token_embd.weight"), llama.weight("model.embed_tokens.weight"));
  EXPECT_EQ(llama.there("output.weight"), llama.weight("lm_head.weight"));
  EXPECT_EQ(llama.there("output_norm.weight"), llama.weight("model.norm.weight"));
  EXPECT_EQ(llama.file->tensors.at("blk.0.ffn_down.weight").shape, (std::vector<std::int64_t>{16, 20}));
  // Llama 3's factors of frequencies, theta^(-i/2) here: waves longer than 8 positions are divided by 8,
  // those shorter than 8/4 stay.
  const Values factors = llama.there("rope_freqs.weight");
  ASSERT_EQ(factors.size(), 2);
  const double wave = 2 * M_PI, share = (8 / wave - 1) / (4 - 1);
  EXPECT_NEAR(factors[0], 1 / ((1 - share) / 8 + share), 1e-6);
  EXPECT_NEAR(factors[1], 8, 1e-6);
}

TEST(GgufExport, MetadataSaysTheModel) {
  const AsGguf llama("llama");
  for (const auto& [name, value] : {std::pair("llama.vocab_size", "37"),
                                    {"llama.context_length", "24"},
                                    {"llama.embedding_length", "16"},
                                    {"llama.block_count", "2"},
                                    {"llama.feed_forward_length", "20"},
                                    {"llama.attention.head_count", "4"},
                                    {"llama.attention.head_count_kv", "2"},
                                    {"llama.attention.key_length", "4"},
                                    {"llama.rope.dimension_count", "4"},
                                    {"llama.rope.freq_base", "500000"},
                                    {"llama.attention.layer_norm_rms_epsilon", "1e-06"},
                                    {"general.file_type", "0"}})
    EXPECT_EQ(llama.key(name), value) << name;
  const AsGguf gemma("gemma2", [](GptConfig& c) { c.attention_multiplier = 0; });
  EXPECT_EQ(gemma.key("gemma2.attention.sliding_window"), "5");
  EXPECT_EQ(gemma.key("gemma2.attention.sliding_window_pattern"), "true|false");
  EXPECT_EQ(gemma.key("gemma2.attn_logit_softcapping"), "0.2");
  EXPECT_EQ(gemma.key("gemma2.final_logit_softcapping"), "0.5");
  const AsGguf granite("granite");
  EXPECT_EQ(granite.key("granite.embedding_scale"), "3");
  EXPECT_EQ(granite.key("granite.residual_scale"), "0.22");
  EXPECT_EQ(granite.key("granite.attention.scale"), "0.3");
  EXPECT_EQ(granite.key("granite.logit_scale"), "4");
  const AsGguf windowed("mistral");  // whose graph has no windows
  EXPECT_EQ(windowed.key("llama.context_length"), "5");
  EXPECT_EQ(gguf_notes(windowed.options).size(), 1);
  const AsGguf olmo("olmo3");
  EXPECT_EQ(olmo.key("olmo2.rope.scaling.type"), "yarn");
  EXPECT_EQ(olmo.key("olmo2.rope.scaling.attn_factor"), "1");  // the usual one
  EXPECT_EQ(olmo.key("olmo2.rope.scaling.original_context_length"), "4");
}

TEST(GgufExport, PackedAndTransposedMatricesAreAsGraphsHaveThem) {
  const AsGguf gpt2("gpt2");
  EXPECT_EQ(gpt2.there("blk.0.attn_qkv.weight"),
            turned(gpt2.weight("transformer.h.0.attn.c_attn.weight"), 48));
  EXPECT_EQ(gpt2.there("blk.0.attn_qkv.bias"), gpt2.weight("transformer.h.0.attn.c_attn.bias"));
  EXPECT_EQ(gpt2.there("blk.0.ffn_up.weight"), turned(gpt2.weight("transformer.h.0.mlp.c_fc.weight"), 20));
  EXPECT_EQ(gpt2.there("position_embd.weight"), gpt2.weight("transformer.wpe.weight"));
  EXPECT_FALSE(gpt2.file->tensors.contains("output.weight"));  // tied
  const AsGguf phi3("phi3");
  EXPECT_EQ(phi3.there("blk.1.attn_qkv.weight"), phi3.weight("model.layers.1.self_attn.qkv_proj.weight"));
  EXPECT_EQ(phi3.there("blk.1.ffn_up.weight"), phi3.weight("model.layers.1.mlp.gate_up_proj.weight"));
  const AsGguf glm("glm4");  // whose own files have pairs already
  EXPECT_EQ(glm.there("blk.0.attn_q.weight"), glm.weight("model.layers.0.self_attn.q_proj.weight"));
  EXPECT_EQ(glm.there("blk.0.attn_q.bias"), glm.weight("model.layers.0.self_attn.q_proj.bias"));
  EXPECT_EQ(glm.there("blk.0.post_ffw_norm.weight"), glm.weight("model.layers.0.post_mlp_layernorm.weight"));
  EXPECT_EQ(glm.key("glm4.rope.dimension_count"), "4");
}

TEST(GgufExport, GainsOfGemmaHaveTheirOne) {
  const AsGguf gemma("gemma3_text", [](GptConfig& c) { c.attention_multiplier = 0; });
  for (const auto& [name, published] : {std::pair("attn_norm", "input_layernorm"),
                                        {"post_attention_norm", "post_attention_layernorm"},
                                        {"ffn_norm", "pre_feedforward_layernorm"},
                                        {"post_ffw_norm", "post_feedforward_layernorm"},
                                        {"attn_q_norm", "self_attn.q_norm"}}) {
    const Values want = plus(gemma.weight(cat("model.layers.0.", published, ".weight")), 1);
    const Values got = gemma.there(cat("blk.0.", name, ".weight"));
    ASSERT_EQ(got.size(), want.size()) << name;
    for (std::size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], want[i], 1e-7) << name;
  }
  EXPECT_NEAR(gemma.there("output_norm.weight")[3], 1 + gemma.weight("model.norm.weight")[3], 1e-7);
}

TEST(GgufExport, ExpertsLieBehindEachOther) {
  const AsGguf mixtral("mixtral");
  for (const auto& [name, published] :
       {std::pair("ffn_gate_exps", "w1"), {"ffn_up_exps", "w3"}, {"ffn_down_exps", "w2"}}) {
    const Values all = mixtral.there(cat("blk.1.", name, ".weight"));
    Values want;
    for (int expert = 0; expert < 4; ++expert)
      for (const double value :
           mixtral.weight(cat("model.layers.1.block_sparse_moe.experts.", expert, ".", published, ".weight")))
        want.push_back(value);
    EXPECT_EQ(all, want) << name;
  }
  EXPECT_EQ(mixtral.there("blk.0.ffn_gate_inp.weight"),
            mixtral.weight("model.layers.0.block_sparse_moe.gate.weight"));
  EXPECT_EQ(mixtral.key("llama.expert_count"), "4");
  EXPECT_EQ(mixtral.key("llama.expert_used_count"), "2");
}

/// Keys' part of what makes keys and values of latents is transposed for each head; queries turn last.
TEST(GgufExport, LatentAttentionIsAbsorbed) {
  const AsGguf deepseek("deepseek_v3", [](GptConfig& c) { c.norm_epsilon = c.mla.norm_epsilon; });
  const Values both = deepseek.weight("model.layers.0.self_attn.kv_b_proj.weight");
  const Values keys = deepseek.there("blk.0.attn_k_b.weight"),
               values = deepseek.there("blk.0.attn_v_b.weight");
  const std::size_t still = 6, v = 8, rank = 10;
  for (std::size_t head = 0; head < 4; ++head)
    for (std::size_t r = 0; r < rank; ++r) {
      for (std::size_t i = 0; i < still; ++i)
        ASSERT_EQ(keys[(head * rank + r) * still + i], both[(head * (still + v) + i) * rank + r]);
      for (std::size_t i = 0; i < v; ++i)
        ASSERT_EQ(values[(head * v + i) * rank + r], both[(head * (still + v) + still + i) * rank + r]);
    }
  EXPECT_EQ(deepseek.there("blk.0.attn_q_b.weight"),
            deepseek.weight("model.layers.0.self_attn.q_b_proj.weight"));
  EXPECT_EQ(deepseek.there("blk.0.attn_kv_a_mqa.weight"),
            deepseek.weight("model.layers.0.self_attn.kv_a_proj_with_mqa.weight"));
  EXPECT_EQ(deepseek.there("blk.1.exp_probs_b.bias"),
            deepseek.weight("model.layers.1.mlp.gate.e_score_correction_bias"));
  EXPECT_EQ(deepseek.key("deepseek2.attention.key_length"), "14");
  EXPECT_EQ(deepseek.key("deepseek2.attention.key_length_mla"), "10");
  EXPECT_EQ(deepseek.key("deepseek2.expert_gating_func"), "2");
  EXPECT_EQ(deepseek.key("deepseek2.rope.scaling.yarn_log_multiplier"), "0.1");  // of mscale_all_dim 1
}

TEST(GgufExport, MatricesHaveTheTypeAndTheRestStaysWide) {
  const auto type = [](const AsGguf& of, const char* name) {
    return name_of(of.file->tensors.at(name).type);
  };
  const auto wider = [](GptConfig& c) { c.hidden_size = 16; };
  const AsGguf half("mixtral", wider, GgufType::f16);
  EXPECT_EQ(type(half, "blk.0.ffn_up_exps.weight"), "f16");
  EXPECT_EQ(type(half, "blk.0.ffn_gate_inp.weight"), "f32");
  EXPECT_EQ(type(half, "blk.0.attn_norm.weight"), "f32");
  const AsGguf few("llama", wider, GgufType::q8_0);  // rows of 16 are no blocks
  EXPECT_EQ(type(few, "blk.0.ffn_up.weight"), "f16");
  EXPECT_EQ(few.key("general.file_type"), "7");
}

TEST(GgufExport, ATableIsThereTwiceWhereGraphsNeedOneOfScores) {
  for (const auto& [family, tables] : {std::pair("olmo2", 2), {"llama", 1}}) {
    GptConfig options = config_of(family);
    options.tie_embeddings = true;
    const auto found = GgufLayout(options).of("tokens.weight", options.padded_vocab(), 16);
    ASSERT_EQ(found.size(), tables) << family;
    EXPECT_EQ(found.back().tensors[0].name, tables == 2 ? "output.weight" : "token_embd.weight");
  }
}

TEST(GgufExport, RefusesWhatGraphsLack) {
  const auto refused = [](const std::string& family, const std::string& part,
                          const std::function<void(GptConfig&)>& change = nullptr) {
    GptConfig options = config_of(family);
    if (change) change(options);
    expect_error(ErrorKind::config, part, [&] { GgufLayout layout(options); });
  };
  refused("deepseek_v2", "model.moe.groups");
  refused("deepseek_v3", "model.mla.norm_epsilon");
  refused("smollm3", "no_rope_layer_interval");
  refused("gemma2", "attention_multiplier");
  refused("qwen3_moe", "blocks without experts");
  refused("qwen3_next", "value_head_dim");
  refused("t5", "relative_attention_max_distance");
  refused("bert_tokens", "token_classification");
  refused("gpt2", "gelu", [](GptConfig& c) { c.activation = config::FfnActivation::gelu; });
  refused("qwen2", "llama3", [](GptConfig& c) {
    c.rope_scaling = {.type = RotaryScaling::llama3, .factor = 8, .original_max_positions = 8};
  });
}

TEST(GgufExport, NamesAWeightThatFp16DoesNotHold) {
  struct Large : nn::WeightSource {
    void check(const std::vector<nn::ParameterPtr>&) const override {}
    void read(const std::string&, const tensor::Slice&, std::int64_t, const tensor::Tensor& to) override {
      std::fill_n(to.data<float>(), to.numel(), 1e5f);
    }
  } weights;
  const GptConfig options = config_of("llama");
  Gpt model(options);
  model.assign_names();
  const test::Cpu cpu{1};
  const TempFolder folder;
  expect_error(ErrorKind::data, "more than fp16 holds: export with --type bf16", [&] {
    export_to_gguf(folder / "x.gguf", {}, GgufLayout(options), model.parameters(), weights, *cpu.device,
                   GgufType::f16);
  });
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

/// Large matrices are written a part at a time, which ends within a head.
TEST(GgufExport, PartsOfAMatrixComeTogether) {
  GptConfig options = config_of("llama");
  options.hidden_size = 1040, options.head_dim = 260, options.num_layers = 1, options.ffn_hidden_size = 8;
  options = options.resolved();
  struct Counted : nn::WeightSource {
    void check(const std::vector<nn::ParameterPtr>&) const override {}
    void read(const std::string&, const tensor::Slice&, std::int64_t begin,
              const tensor::Tensor& to) override {
      for (std::int64_t i = 0; i < to.numel(); ++i)
        to.data<float>()[i] = static_cast<float>((begin + i) / 1040);
    }
  } weights;  // each number is that of its row
  Gpt model(options);
  model.assign_names();
  const test::Cpu cpu{1};
  const TempFolder folder;
  export_to_gguf(folder / "x.gguf", {}, GgufLayout(options), model.parameters(), weights, *cpu.device,
                 GgufType::f32);
  const GgufReader file(folder / "x.gguf");
  // Packed, two heads' queries stand before a key's and a value's.
  const auto first = [&](const char* name, std::size_t row) {
    return file.tensors.at(cat("blk.0.", name, ".weight")).values()[row * 1040];
  };
  for (const std::size_t row : {0u, 1u, 259u, 260u, 519u, 520u, 777u, 1000u, 1039u}) {
    const std::size_t head = row / 260, own = head / 2 * 4 * 260 + head % 2 * 260, at = row % 260;
    EXPECT_EQ(first("attn_q", row), own + at / 2 + at % 2 * 130) << row;
  }
  for (const std::size_t row : {0u, 130u, 260u, 519u})
    EXPECT_EQ(first("attn_v", row), row / 260 * 4 * 260 + 3 * 260 + row % 260) << row;
}

/// The product that readers add to a weight, alpha/rank·B·A, is the one that the adapter adds to the
/// published weight.
TEST(GgufExport, LoraIsOfTheFilesMatrices) {
  GptConfig options = config_of("llama");
  options.adapter.type = config::AdapterType::lora;
  options.adapter.lora.rank = 2, options.adapter.lora.alpha = 6;
  options.adapter.targets = {"q_proj", "v_proj", "down_proj"};
  options = options.resolved();
  Gpt model(options);
  model.assign_names();
  struct Numbered : nn::WeightSource {  // of each parameter another row of numbers
    void check(const std::vector<nn::ParameterPtr>&) const override {}
    static float value(const std::string& name, std::int64_t i) {
      return std::sin(static_cast<float>(name.size()) + 0.37f * static_cast<float>(i));
    }
    void read(const std::string& name, const tensor::Slice&, std::int64_t begin,
              const tensor::Tensor& to) override {
      for (std::int64_t i = 0; i < to.numel(); ++i) to.data<float>()[i] = value(name, begin + i);
    }
  } weights;
  const test::Cpu cpu{1};
  const TempFolder folder;
  export_lora_to_gguf(folder / "x.gguf", {}, GgufLayout(options), model.parameters(), weights, *cpu.device,
                      GgufType::f32);
  const GgufReader file(folder / "x.gguf");
  EXPECT_EQ(file.metadata.at("adapter.type"), "lora");
  EXPECT_EQ(file.metadata.at("adapter.lora.alpha"), "6");
  EXPECT_FALSE(file.tensors.contains("blk.0.attn_k.weight.lora_a"));
  EXPECT_EQ(file.tensors.at("blk.1.ffn_down.weight.lora_a").shape, (std::vector<std::int64_t>{2, 20}));
  const Values a = file.tensors.at("blk.0.attn_q.weight.lora_a").values(),
               b = file.tensors.at("blk.0.attn_q.weight.lora_b").values();
  // In the packed layer two heads' queries stand before each key, and only queries and values have rows of B.
  const std::string at = "blocks.0.attention.qkv.adapter.";
  Values own_a, own_b;
  for (std::int64_t i = 0; i < 2 * 16; ++i) own_a.push_back(Numbered::value(at + "lora_A", i));
  for (const std::int64_t group : {0, 1})
    for (std::int64_t i = 0; i < 8 * 2; ++i)
      own_b.push_back(Numbered::value(at + "lora_B", group * 12 * 2 + i));
  EXPECT_EQ(a, own_a);
  EXPECT_EQ(b, as_pairs(own_b, 4, 4, 2));
  options.adapter.lora.dora = true;
  expect_error(ErrorKind::config, "DoRA", [&] {
    export_lora_to_gguf(folder / "y.gguf", {}, GgufLayout(options), model.parameters(), weights, *cpu.device,
                        GgufType::f32);
  });
}

}  // namespace
}  // namespace sherd::models
