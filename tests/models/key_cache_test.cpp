// Texts that grow by what a key cache has of them, against models that read them whole.
#include "autograd/key_cache.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "support/expect_error.h"
#include "support/tiny_gpt.h"

namespace sherd::models {
namespace {

using autograd::KeyCache;
using tensor::Tensor;
using Values = std::vector<double>;

struct CachedFamily {
  std::string name;
  GptConfig options;
};

GptConfig llama_with(const std::function<void(GptConfig&)>& change) {
  GptConfig o = GptConfig::of_family("llama");
  o.vocab_size = 61, o.pad_vocab_to_multiple_of = 8, o.seq_length = 40, o.hidden_size = 24, o.num_layers = 3,
  o.num_heads = 6, o.num_kv_heads = 2, o.head_dim = 10, o.ffn_hidden_size = 36, o.init_std = 0.2;
  change(o);
  return o;
}

std::vector<CachedFamily> cached_families() {
  GptConfig gpt2;
  gpt2.vocab_size = 53, gpt2.pad_vocab_to_multiple_of = 8, gpt2.seq_length = 40, gpt2.hidden_size = 24,
  gpt2.num_layers = 3, gpt2.num_heads = 3, gpt2.init_std = 0.2, gpt2.max_positions = 44;
  const auto scaled = [](RotaryScaling scaling) {
    return llama_with(
        [&](GptConfig& o) { o.rope_scaling = {.type = scaling, .factor = 4, .original_max_positions = 16}; });
  };
  const auto latents = [](bool other) {
    return llama_with([&](GptConfig& o) {
      o.num_kv_heads = o.head_dim = 0;
      o.mla = {
          .kv_lora_rank = 14, .qk_nope_head_dim = 6, .qk_rope_head_dim = 4, .v_head_dim = other ? 10 : 7};
      o.mla.q_lora_rank = other ? 9 : 0;
      if (!other) return;
      o.rope_scaling = {.type = RotaryScaling::yarn, .factor = 4, .original_max_positions = 16};
      o.attention_multiplier = 0.4, o.rotary_base = 50;
    });
  };
  const auto experts = [](GptConfig& o) { o.moe.experts = 4, o.moe.top_k = 2, o.moe.aux_loss = 0; };
  return {{"gpt2", gpt2},
          {"grouped queries", llama_with([](GptConfig&) {})},
          {"one key-value head", llama_with([](GptConfig& o) { o.num_kv_heads = 1; })},
          {"window", llama_with([](GptConfig& o) { o.sliding_window = 5; })},
          {"window of one", llama_with([](GptConfig& o) { o.sliding_window = 1; })},
          {"layers of two kinds", llama_with([](GptConfig& o) {
             o.num_layers = 3, o.sliding_window = 5, o.no_rope_layer_interval = 2;
             o.layer_types = {config::LayerType::sliding_attention, config::LayerType::full_attention,
                              config::LayerType::sliding_attention};
             o.sliding_rope = config::SlidingRope{50, {}}, o.partial_rotary_factor = 0.4;
             o.norm_placement = config::NormPlacement::sandwich, o.norm_unit_offset = true;
             o.scale_embeddings = true, o.attention_multiplier = 0.3, o.logits_scaling = 4;
           })},
          {"queries that grow", llama_with([](GptConfig& o) {
             o.rope_scaling = {.type = RotaryScaling::yarn, .factor = 4, .original_max_positions = 8};
             o.llama_4_scaling_beta = 0.3, o.qk_norm = o.qk_norm_all_heads = true;
             o.norm_placement = config::NormPlacement::post;
           })},
          {"sinks, capped scores", llama_with([&](GptConfig& o) {
             o.attention_sinks = true, o.attn_logit_softcapping = 2, o.final_logit_softcapping = 3;
             o.sliding_window = 5, o.bias = true, o.activation = config::FfnActivation::swiglu_clamped;
             o.layer_types = {config::LayerType::sliding_attention, config::LayerType::full_attention};
             experts(o), o.moe.router_bias = true;
           })},
          {"latents", latents(false)},
          {"latents of many heads", llama_with([](GptConfig& o) {
             o.num_heads = 19, o.num_kv_heads = o.head_dim = 0;
             o.mla = {.kv_lora_rank = 6, .qk_nope_head_dim = 4, .qk_rope_head_dim = 2, .v_head_dim = 4};
           })},
          {"linear attention, gates", llama_with([](GptConfig& o) {
             o.layer_types = {config::LayerType::linear_attention, config::LayerType::full_attention};
             o.linear_attention = {
                 .num_key_heads = 2, .num_value_heads = 4, .key_head_dim = 6, .value_head_dim = 5};
             o.attention_gate = true;
           })},
          {"latents of queries, values as long as keys", latents(true)},
          {"qk_norm, biases", llama_with([](GptConfig& o) { o.qk_norm = o.qkv_bias = true; })},
          {"linear", scaled(RotaryScaling::linear)},
          {"llama3", scaled(RotaryScaling::llama3)},
          {"yarn", scaled(RotaryScaling::yarn)},
          {"experts", llama_with(experts)},
          {"experts beside others", llama_with([&](GptConfig& o) {
             experts(o);
             o.moe.shared_experts = 1, o.moe.shared_expert_gate = true, o.moe.every = 2;
           })}};
}

class KeyCacheTest : public ::testing::Test {
 protected:
  Values whole(Gpt& model, const Tensor& text) {
    autograd::Tape tape(*cpu_.kernels);
    tape.training = false;
    return cpu_.values(model.logits(tape, text).value());
  }

  /// The logits behind each of the pieces into which `ends` cuts the texts.
  Values in_pieces(Gpt& model, const Tensor& text, const std::vector<std::int64_t>& ends) {
    autograd::Tape tape(*cpu_.kernels);
    tape.training = false;
    const std::int64_t texts = text.shape()[0], seq = text.shape()[1];
    KeyCache cache(texts, model.config().seq_length);
    tape.key_cache = &cache;
    Values out;
    std::int64_t begin = 0;
    for (const std::int64_t end : ends) {
      const std::int64_t rows = end - begin;
      const Tensor ids = Tensor::empty(*cpu_.device, {texts, rows}, DType::i32);
      cpu_.kernels->copy_rows({text, begin, seq}, {ids, 0, rows}, texts, rows);
      std::vector<KeyCache::Rows> places;
      for (std::int64_t t = 0; t < texts; ++t) places.push_back({texts - 1 - t, begin, rows});
      cache.begin(*cpu_.device, places, rows);
      const Values got = cpu_.values(model.next_logits(tape, ids));
      out.insert(out.end(), got.begin(), got.end());
      begin = end;
    }
    return out;
  }

  test::Cpu cpu_;
};

/// Relative to the largest logit.
double error(const Values& got, const Values& whole, std::int64_t texts, std::int64_t seq,
             const std::vector<std::int64_t>& ends) {
  const std::size_t ids = got.size() / (ends.size() * static_cast<std::size_t>(texts));
  double most = 0, largest = 0;
  std::size_t at = 0;
  for (const std::int64_t end : ends)
    for (std::int64_t t = 0; t < texts; ++t)
      for (std::size_t i = 0; i < ids; ++i, ++at) {
        const double want = whole[static_cast<std::size_t>(t * seq + end - 1) * ids + i];
        most = std::max(most, std::abs(got[at] - want));
        largest = std::max(largest, std::abs(want));
      }
  return most / largest;
}

TEST_F(KeyCacheTest, GivesTheLogitsOfAWholeReadingOfEveryFamilyAndSplit) {
  constexpr std::int64_t texts = 3, seq = 23;
  std::vector<std::vector<std::int64_t>> splits{{seq}, {}, {9}, {1, 8, 9, 20}, {4, 5, 6, 17}};
  for (std::int64_t end = 1; end <= seq; ++end) splits[1].push_back(end);
  for (std::int64_t end = 10; end <= seq; ++end) splits[2].push_back(end);
  for (const CachedFamily& family : cached_families()) {
    for (const auto& [dtype, bound] :
         {std::pair{DType::f64, 1e-12}, {DType::f32, 1e-5}, {DType::bf16, 0.06}}) {
      if (dtype == DType::bf16 && family.options.moe.experts > 0) continue;  // other experts by a rounding
      Gpt model(family.options);
      const test::PlainParameters parameters(*cpu_.kernels, model, dtype);
      const Tensor text = cpu_.ids({texts, seq}, 3, 50);
      const Values want = whole(model, text);
      for (const auto& ends : splits)
        EXPECT_LE(error(in_pieces(model, text, ends), want, texts, seq, ends), bound)
            << family.name << ", " << name_of(dtype) << ", pieces: " << ends.size();
    }
  }
}

TEST_F(KeyCacheTest, TextsOfOtherLengthsGoOnSideBySide) {
  for (const CachedFamily& family : cached_families()) {
    Gpt model(family.options);
    const test::PlainParameters parameters(*cpu_.kernels, model, DType::f32);
    autograd::Tape tape(*cpu_.kernels);
    tape.training = false;
    KeyCache cache(3, 30);
    tape.key_cache = &cache;
    const std::vector<std::int64_t> prompts{11, 4, 8};
    const Tensor text = cpu_.ids({3, 16}, 5, 50);
    const Values want = whole(model, text);
    const std::size_t ids = static_cast<std::size_t>(model.config().padded_vocab());
    const double largest = std::abs(*std::max_element(
        want.begin(), want.end(), [](double a, double b) { return std::abs(a) < std::abs(b); }));
    std::vector<std::int64_t> ends(3);
    const auto check = [&](const std::vector<std::int64_t>& which, std::int64_t rows,
                           const std::vector<std::int64_t>& counts) {
      std::vector<std::int32_t> tokens(which.size() * static_cast<std::size_t>(rows), 7);
      std::vector<KeyCache::Rows> places;
      for (std::size_t i = 0; i < which.size(); ++i) {
        const std::int64_t t = which[i];
        places.push_back({t, ends[static_cast<std::size_t>(t)], counts[i]});
        for (std::int64_t j = 0; j < counts[i]; ++j)
          tokens[i * static_cast<std::size_t>(rows) + static_cast<std::size_t>(j)] =
              text.data<std::int32_t>()[t * 16 + places.back().first + j];
      }
      cache.begin(*cpu_.device, places, rows);
      const Values got = cpu_.values(
          model.next_logits(tape, Tensor::of<std::int32_t>(*cpu_.device, {std::ssize(which), rows}, tokens)));
      for (std::size_t i = 0; i < which.size(); ++i) {
        const auto t = static_cast<std::size_t>(which[i]);
        ends[t] += counts[i];
        for (std::size_t k = 0; k < ids; ++k)
          ASSERT_NEAR(got[i * ids + k], want[(t * 16 + static_cast<std::size_t>(ends[t]) - 1) * ids + k],
                      1e-5 * largest)
              << family.name << ", text " << t << " at " << ends[t];
      }
    };
    check({0, 1}, 13, {11, 4});
    check({1, 0}, 1, {1, 1});
    check({2}, 9, {8});
    check({2, 0, 1}, 1, {1, 1, 1});
    check({1, 2}, 3, {3, 1});
    ends[0] = 0;  // another text in its place
    check({0}, 6, {5});
    check({0, 1, 2}, 1, {1, 1, 1});
  }
}

/// A text must not depend on the others, of which capacities speak.
TEST_F(KeyCacheTest, ExpertsDropNoTokens) {
  GptConfig dropless = test::with_experts(test::tiny_llama()), tight = dropless;
  tight.moe.capacity_factor = 0.5;
  Gpt a(dropless), b(tight);
  const test::PlainParameters of_a(*cpu_.kernels, a, DType::f32), of_b(*cpu_.kernels, b, DType::f32);
  const Tensor text = cpu_.ids({2, 7}, 3, 11);
  EXPECT_NE(whole(a, text), whole(b, text));
  EXPECT_EQ(in_pieces(a, text, {5, 6, 7}), in_pieces(b, text, {5, 6, 7}));
}

TEST_F(KeyCacheTest, TakesWhatItSays) {
  const auto held = [&] {
    return cpu_.device->ledger().current(device::Tier::device, device::Category::activations);
  };
  for (const std::int64_t window : {0, 5}) {
    Gpt model(llama_with([&](GptConfig& o) { o.sliding_window = window; }));
    const test::PlainParameters parameters(*cpu_.kernels, model, DType::bf16);
    const std::uint64_t before = held();
    autograd::Tape tape(*cpu_.kernels);
    tape.training = false;
    KeyCache cache(4, 30);
    tape.key_cache = &cache;
    cache.begin(*cpu_.device, {{2, 0, 3}}, 3);
    (void)model.next_logits(tape, cpu_.ids({1, 3}, 1, 50));
    const std::size_t want =
        3 * 2 * 4 * 2 * 10 * 2 * (window ? window : 30);  // layers, K and V, texts, heads …
    EXPECT_EQ(cache.bytes(), want);
    EXPECT_GE(held() - before, want);
    EXPECT_LE(held() - before, want + 7 * 64u);  // rounded up for alignment; and the places
  }
}

/// The latents that make a token's keys and values are kept, and its rotary keys, once for all heads.
TEST_F(KeyCacheTest, LatentsAreKeptCompressed) {
  GptConfig o = test::tiny_latents();
  o.seq_length = 40;
  for (const auto& [dtype, size] : {std::pair{DType::bf16, 2}, {DType::f32, 4}}) {
    Gpt model(o);
    const test::PlainParameters parameters(*cpu_.kernels, model, dtype);
    autograd::Tape tape(*cpu_.kernels);
    tape.training = false;
    KeyCache cache(3, 30);
    tape.key_cache = &cache;
    cache.begin(*cpu_.device, {{2, 0, 3}}, 3);
    (void)model.next_logits(tape, cpu_.ids({1, 3}, 1, 9));
    EXPECT_EQ(cache.bytes(), std::size_t{2 * 3 * 30} * (6 + 2) * static_cast<std::size_t>(size));
  }
}

TEST_F(KeyCacheTest, WhatDoesNotFitIsRefused) {
  using testing::expect_error;
  Gpt model(test::tiny_llama());
  const test::PlainParameters parameters(*cpu_.kernels, model, DType::f32);
  autograd::Tape tape(*cpu_.kernels);
  const Tensor one = cpu_.ids({1, 1}, 1, 9);
  expect_error(ErrorKind::usage, "key cache", [&] { model.next_logits(tape, one); });
  KeyCache cache(2, 5);
  tape.key_cache = &cache;
  expect_error(ErrorKind::usage, "twice", [&] { cache.begin(*cpu_.device, {{1, 0, 1}, {1, 1, 1}}, 1); });
  expect_error(ErrorKind::usage, "text 2 of 2", [&] { cache.begin(*cpu_.device, {{2, 0, 1}}, 1); });
  expect_error(ErrorKind::usage, "5 positions", [&] { cache.begin(*cpu_.device, {{0, 5, 1}}, 1); });
  cache.begin(*cpu_.device, {{0, 0, 2}}, 2);
  expect_error(ErrorKind::usage, "told of", [&] { model.next_logits(tape, one); });
  Gpt hybrid(test::tiny_hybrid());
  const test::PlainParameters others(*cpu_.kernels, hybrid, DType::f32);
  KeyCache states(2, 5);
  tape.key_cache = &states;
  states.begin(*cpu_.device, {{0, 0, 2}}, 2);
  (void)hybrid.next_logits(tape, cpu_.ids({1, 2}, 1, 9));
  states.begin(*cpu_.device, {{0, 1, 1}}, 1);  // a row that was read
  expect_error(ErrorKind::usage, "cannot go back", [&] { hybrid.next_logits(tape, one); });
  states.begin(*cpu_.device, {{0, 0, 1}}, 1);
  EXPECT_NO_THROW(hybrid.next_logits(tape, one));
}

/// cuDNN, which would take seconds to compile for each length, is not asked for a prompt: on a GPU its
/// workspace would be booked.
TEST(KeyCachePrompt, AsksNoLibraryToPrepareForItsLength) {
  const auto device = device::make_meta_gpu(1);
  const auto kernels = tensor::make_kernels(*device);
  autograd::Tape tape(*kernels);
  const autograd::Tape::NoGrad no_grad(tape);
  const tensor::Attention geometry{.heads = 2, .kv_heads = 2};
  const Tensor qkv = Tensor::empty(*device, {1, 32, 3 * 2 * 64}, DType::bf16);
  const auto booked = [&](const auto& attend) {
    device->ledger().reset_peaks();
    attend();
    return device->ledger().peak(device::Tier::device, device::Category::workspace);
  };
  EXPECT_GT(booked([&] { kernels->attention(qkv, geometry, {}, {}); }), 0u);
  KeyCache cache(1, 64);
  cache.begin(*device, {{0, 0, 32}}, 32);
  EXPECT_EQ(booked([&] { cache.attend(tape, qkv, geometry); }), 0u);
}

}  // namespace
}  // namespace sherd::models
