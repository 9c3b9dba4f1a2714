#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>

#include "support/expect_error.h"
#include "support/hugging_face/hugging_face_dict.h"
#include "support/tiny_gpt.h"

namespace sherd::models {
namespace {

using sherd::testing::expect_error;

HostTensor counting(const tensor::Shape& shape, std::uint16_t first) {
  HostTensor out{shape, DType::u16, std::vector<std::byte>(static_cast<std::size_t>(shape.numel()) * 2)};
  for (std::int64_t i = 0; i < shape.numel(); ++i) {
    const auto value = static_cast<std::uint16_t>(first + i);
    std::memcpy(out.bytes.data() + 2 * i, &value, 2);
  }
  return out;
}

std::uint16_t element(const HostTensor& t, std::int64_t i) {
  std::uint16_t value;
  std::memcpy(&value, t.bytes.data() + 2 * i, 2);
  return value;
}

HostTensorSource map_source(std::map<std::string, HostTensor> tensors) {
  return [tensors = std::move(tensors)](const std::string& name) -> std::optional<HostTensor> {
    const auto found = tensors.find(name);
    return found == tensors.end() ? std::nullopt : std::optional(found->second);
  };
}

TEST(HuggingFace, LlamaGroupsQueriesWithTheirKeyAndValue) {
  GptConfig o = GptConfig::of_family("llama");
  o.vocab_size = 3, o.seq_length = 8, o.hidden_size = 4, o.num_layers = 1, o.num_heads = 4,
  o.num_kv_heads = 2, o.head_dim = 2, o.ffn_hidden_size = 3;
  const HuggingFaceLayout layout(o);
  const std::string at = "model.layers.0.self_attn.";
  const auto packed = from_dict(layout, "blocks.0.attention.qkv.weight",
                                map_source({{at + "q_proj.weight", counting({8, 4}, 0)},
                                            {at + "k_proj.weight", counting({4, 4}, 100)},
                                            {at + "v_proj.weight", counting({4, 4}, 200)}}));
  EXPECT_EQ(packed.shape, (tensor::Shape{16, 4}));
  std::vector<int> first_columns;
  for (std::int64_t row = 0; row < 16; ++row) first_columns.push_back(element(packed, row * 4));
  // q0 q1 k0 v0, q2 q3 k1 v1; two rows each.
  EXPECT_EQ(first_columns,
            (std::vector<int>{0, 4, 8, 12, 100, 104, 200, 204, 16, 20, 24, 28, 108, 112, 208, 212}));
  const auto fused = from_dict(layout, "blocks.0.mlp.up.weight",
                               map_source({{"model.layers.0.mlp.gate_proj.weight", counting({3, 4}, 0)},
                                           {"model.layers.0.mlp.up_proj.weight", counting({3, 4}, 50)}}));
  EXPECT_EQ(element(fused, 0), 0);
  EXPECT_EQ(element(fused, 12), 50);
}

TEST(HuggingFace, Gpt2IsTransposed) {
  const HuggingFaceLayout layout(test::tiny_gpt2());
  const HostTensor stored = counting({6, 10}, 0);
  const auto up =
      from_dict(layout, "blocks.1.mlp.up.weight", map_source({{"transformer.h.1.mlp.c_fc.weight", stored}}));
  EXPECT_EQ(up.shape, (tensor::Shape{10, 6}));
  for (std::int64_t r = 0; r < 10; ++r)
    for (std::int64_t c = 0; c < 6; ++c) EXPECT_EQ(element(up, r * 6 + c), element(stored, c * 10 + r));
}

TEST(HuggingFace, RoundTripOfEveryParameterAndPaddingIsZero) {
  for (GptConfig o : {test::tiny_gpt2(), test::tiny_llama()}) {
    const HuggingFaceLayout layout(o);
    Gpt model(o);
    model.assign_names();
    std::map<std::string, HostTensor> dict;
    std::map<std::string, HostTensor> values;
    std::uint16_t first = 1;
    for (const auto& p : model.parameters()) {
      values[p->name] = counting(p->shape, first++);
      for (auto& [name, tensor] : to_dict(layout, p->name, values[p->name]))
        EXPECT_TRUE(dict.emplace(name, tensor).second);
    }
    for (const auto& p : model.parameters()) {
      HostTensor want = values[p->name];
      if (p->name == "tokens.weight" || p->name == "head.weight")
        std::fill(want.bytes.begin() + o.vocab_size * o.hidden_size * 2, want.bytes.end(), std::byte{});
      EXPECT_EQ(from_dict(layout, p->name, map_source(dict)).bytes, want.bytes) << p->name;
    }
  }
}

TEST(HuggingFace, WhatNoModelHasIsNamed) {
  const HuggingFaceLayout layout(test::tiny_llama());
  for (const char* name : {"blocks.0.nothing.weight", "else", "norm.bias", "blocks.0.mlp.up.bias",
                           "blocks.0.mlp.experts.0.up.weight", "blocks.0.attention.q_norm.bias"})
    expect_error(ErrorKind::usage, name, [&] { layout.published(name); });
  GptConfig mixed = test::tiny_gpt2();
  mixed.norm = config::Norm::rmsnorm;
  expect_error(ErrorKind::config, "Hugging Face", [&] { HuggingFaceLayout unused(mixed); });
}

}  // namespace
}  // namespace sherd::models
