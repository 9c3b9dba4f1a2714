#include "config/model.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "base/text/excerpt.h"

namespace sherd::config {
namespace {

/// Llama's style: rotary positions, RMSNorm, SwiGLU, no biases, untied embeddings.
Model decoder() {
  Model m;
  m.position = PositionType::rotary, m.norm = Norm::rmsnorm, m.activation = FfnActivation::swiglu;
  m.tie_embeddings = m.bias = m.qkv_bias = false;
  return m;
}

Model with_qkv_bias(Model m) {
  return m.qkv_bias = true, m;
}

Model with_qk_norm(Model m) {
  return m.qk_norm = true, m;
}

/// Gemma 3's: GeGLU, norms on both sides with gains 1 + weight, tied scaled embeddings, windows in 5 of 6.
Model gemma() {
  Model m = with_qk_norm(decoder());
  m.activation = FfnActivation::geglu_tanh, m.norm_placement = NormPlacement::sandwich;
  m.norm_unit_offset = m.scale_embeddings = m.tie_embeddings = true;
  m.rotary_base = 1e6, m.sliding_rope = SlidingRope();
  m.layer_types.assign(6, LayerType::sliding_attention);
  m.layer_types.back() = LayerType::full_attention;
  return m;
}

/// Gemma 2's: without norms of heads, scores that are capped, one rotary base, and a window in every other
/// layer where one is set.
Model gemma2() {
  Model m = gemma();
  m.qk_norm = false, m.rotary_base = 10000, m.sliding_rope.reset();
  m.attn_logit_softcapping = 50, m.final_logit_softcapping = 30;
  m.layer_types = {LayerType::sliding_attention, LayerType::full_attention};
  return m;
}

/// GPT-OSS's: experts whose gates are clamped, biases everywhere, sinks, and a window in every other layer
/// where one is set.
Model gpt_oss() {
  Model m = decoder();
  m.bias = m.qkv_bias = m.attention_sinks = m.moe.router_bias = true;
  m.activation = FfnActivation::swiglu_clamped, m.moe.router = RouterScores::softmax_of_chosen;
  m.rotary_base = 150000;
  m.layer_types = {LayerType::sliding_attention, LayerType::full_attention};
  return m;
}

Model deepseek_v3() {
  Model m = decoder();
  m.moe.router = RouterScores::sigmoid, m.moe.correction_bias = true;
  return m;
}

Model glm4_moe() {
  Model m = deepseek_v3();
  m.partial_rotary_factor = 0.5, m.rotary_base = 1e6;
  return m;
}

Model qwen2_moe() {
  Model m = with_qkv_bias(decoder());
  m.moe.shared_expert_gate = true;
  return m;
}

Model qwen3_5() {
  Model m = with_qk_norm(decoder());
  m.norm_unit_offset = m.attention_gate = true;
  m.partial_rotary_factor = 0.25, m.rotary_base = 1e7;
  m.layer_types.assign(4, LayerType::linear_attention);
  m.layer_types.back() = LayerType::full_attention;
  m.linear_attention.num_key_heads = 16;
  return m;
}

Model qwen3_5_moe() {
  Model m = qwen3_5();
  m.moe.shared_expert_gate = true;
  return m;
}

Model olmo() {
  Model m = with_qk_norm(decoder());
  m.qk_norm_all_heads = true, m.norm_placement = NormPlacement::post;
  return m;
}

Model olmo3() {
  Model m = olmo();
  m.rotary_base = 5e5;
  m.layer_types.assign(4, LayerType::sliding_attention);
  m.layer_types.back() = LayerType::full_attention;
  return m;
}

Model smollm() {
  Model m = decoder();
  m.tie_embeddings = true, m.no_rope_layer_interval = 4, m.rotary_base = 2e6;
  return m;
}

Model glm() {
  Model m = with_qkv_bias(decoder());
  m.norm_placement = NormPlacement::sandwich, m.partial_rotary_factor = 0.5;
  return m;
}

/// BERT's: every token sees all others, norms behind the sums, a head of its own.
Model bert() {
  Model m;
  m.causal = false, m.norm_placement = NormPlacement::post_residual, m.activation = FfnActivation::gelu;
  m.token_types = 2, m.embedding_norm = true, m.head = Head::mlm, m.norm_epsilon = 1e-12;
  m.dropout = m.attention_dropout = m.embedding_dropout = 0.1;
  m.qkv_bias = false;  // those of `bias` are enough
  return m;
}

/// ModernBERT's: gated blocks without biases, and a window in two of three layers where one is set.
Model modernbert() {
  Model m = decoder();
  m.causal = false, m.norm = Norm::layernorm, m.norm_bias = false, m.activation = FfnActivation::geglu;
  m.embedding_norm = m.tie_embeddings = true, m.head = Head::mlm;
  m.rotary_base = 160000, m.sliding_rope = SlidingRope();
  m.layer_types.assign(3, LayerType::sliding_attention);
  m.layer_types.front() = LayerType::full_attention;
  return m;
}

/// T5 1.1's: an encoder and a decoder of gated blocks without biases, scores that are not scaled, relative
/// positions.
Model t5() {
  Model m = decoder();
  m.position = PositionType::relative, m.activation = FfnActivation::geglu_tanh;
  m.attention_multiplier = 1, m.norm_epsilon = 1e-6;
  m.init_std = 1, m.width_scaled_init = true;
  return m;
}

/// GPT-2's style, which a Model has without being told.
Model gpt2() {
  Model m;
  m.dropout = m.attention_dropout = m.embedding_dropout = 0.1;
  m.qkv_bias = false;  // those of `bias` are enough
  return m;
}

/// A family's name, and a model whose fields marked "by type" are the family's defaults.
struct FamilyDefaults {
  std::string_view name;
  Model model;
};

/// All families; a ModelType is a place among them.
const std::vector<FamilyDefaults>& families() {
  static const std::vector<FamilyDefaults> all = [] {
    std::vector<FamilyDefaults> rows{{"gpt2", gpt2()},
                                     {"llama", decoder()},
                                     {"mistral", decoder()},
                                     {"qwen2", with_qkv_bias(decoder())},
                                     {"qwen3", with_qk_norm(decoder())},
                                     {"mixtral", decoder()},
                                     {"qwen3_moe", with_qk_norm(decoder())},
                                     {"phi3", decoder()},
                                     {"granite", decoder()},
                                     {"smollm3", smollm()},
                                     {"gemma2", gemma2()},
                                     {"gemma3_text", gemma()},
                                     {"gpt_oss", gpt_oss()},
                                     {"glm4", glm()},
                                     {"glm4_moe", glm4_moe()},
                                     {"deepseek_v2", decoder()},
                                     {"deepseek_v3", deepseek_v3()},
                                     {"qwen2_moe", qwen2_moe()},
                                     {"qwen3_next", qwen3_5_moe()},
                                     {"qwen3_5_text", qwen3_5()},
                                     {"qwen3_5_moe_text", qwen3_5_moe()},
                                     {"ministral3", decoder()},
                                     {"olmo2", olmo()},
                                     {"olmo3", olmo3()},
                                     {"bert", bert()},
                                     {"modernbert", modernbert()},
                                     {"t5", t5()},
                                     {"mt5", t5()}};
    for (std::size_t i = 0; i < rows.size(); ++i) rows[i].model.type = static_cast<ModelType>(i);
    return rows;
  }();
  return all;
}

template <class... Args>
void expect(bool holds, const Args&... args) {
  if (!holds) fail(ErrorKind::config, args...);
}

/// The bounds of a model, which keep every product of extents far from overflow.
void check_bounds(const Model& m) {
  struct Bound {
    const char* name;
    std::int64_t value, least, most;
  };
  for (const auto& [name, value, least, most] :
       {Bound{"vocab_size", m.vocab_size, 0, most_vocabulary},
        {"pad_vocab_to_multiple_of", m.pad_vocab_to_multiple_of, 1, most_vocabulary},
        {"seq_length", m.seq_length, 1, most_positions},
        {"max_positions", m.max_positions, 0, most_positions},
        {"hidden_size", m.hidden_size, 1, most_hidden},
        {"num_layers", m.num_layers, 1, most_layers},
        {"num_heads", m.num_heads, 1, most_heads},
        {"num_kv_heads", m.num_kv_heads, 0, most_heads},
        {"head_dim", m.head_dim, 0, most_hidden},
        {"ffn_hidden_size", m.ffn_hidden_size, 0, most_ffn_hidden},
        {"sliding_window", m.sliding_window, 0, most_positions},
        {"no_rope_layer_interval", m.no_rope_layer_interval, 0, most_layers},
        {"token_types", m.token_types, 0, most_token_types},
        {"relative_attention_num_buckets", m.relative_attention_num_buckets, 4, most_buckets},
        {"relative_attention_max_distance", m.relative_attention_max_distance, 2, most_positions},
        {"decoder_start_token_id", m.decoder_start_token_id, 0, most_vocabulary},
        {"encoder.num_layers", m.encoder.num_layers, 0, most_layers},
        {"encoder.seq_length", m.encoder.seq_length, 0, most_positions},
        {"mla.kv_lora_rank", m.mla.kv_lora_rank, 0, most_hidden},
        {"mla.q_lora_rank", m.mla.q_lora_rank, 0, most_hidden},
        {"mla.qk_nope_head_dim", m.mla.qk_nope_head_dim, 1, most_hidden},
        {"mla.qk_rope_head_dim", m.mla.qk_rope_head_dim, 2, most_hidden},
        {"mla.v_head_dim", m.mla.v_head_dim, 1, most_hidden},
        {"linear_attention.num_key_heads", m.linear_attention.num_key_heads, 0, most_heads},
        {"linear_attention.num_value_heads", m.linear_attention.num_value_heads, 0, most_heads},
        {"linear_attention.key_head_dim", m.linear_attention.key_head_dim, 1, most_linear_head},
        {"linear_attention.value_head_dim", m.linear_attention.value_head_dim, 1, most_linear_head},
        {"linear_attention.conv_kernel_dim", m.linear_attention.conv_kernel_dim, 1, 8},
        {"moe.experts", m.moe.experts, 0, most_experts},
        {"moe.ffn_hidden_size", m.moe.ffn_hidden_size, 0, most_ffn_hidden},
        {"moe.every", m.moe.every, 1, most_layers},
        {"moe.first_dense", m.moe.first_dense, 0, most_layers},
        {"moe.shared_experts", m.moe.shared_experts, 0, most_experts}}) {
    expect(value >= least, name, " ", value, " is below ", least, ", the least there can be");
    expect(value <= most, name, " ", value, " is beyond ", most, ", the most there can be");
  }
  for (const double p : {m.dropout, m.attention_dropout, m.embedding_dropout, m.ffn_dropout})
    expect(p >= 0 && p < 1, "a dropout probability must be in [0, 1), not ", p);
  expect(m.norm_epsilon > 0, "norm_epsilon ", m.norm_epsilon, " must be positive");
  expect(m.init_std > 0, "init_std ", m.init_std, " must be positive");
  expect(m.rotary_base > 1, "rotary_base ", m.rotary_base, " must be above 1");
  expect(m.partial_rotary_factor > 0 && m.partial_rotary_factor <= 1, "partial_rotary_factor ",
         m.partial_rotary_factor, " must be in (0, 1]");
  expect(m.llama_4_scaling_beta >= 0, "llama_4_scaling_beta ", m.llama_4_scaling_beta,
         " must not be negative");
  expect(m.llama_4_scaling_beta == 0 || m.partial_rotary_factor == 1,
         "llama_4_scaling_beta is for positions that turn the whole head: set partial_rotary_factor to 1");
  expect(m.embedding_multiplier != 0 && m.residual_multiplier != 0,
         "embedding_multiplier and residual_multiplier must not be 0");
  expect(m.attention_multiplier >= 0, "attention_multiplier ", m.attention_multiplier,
         " must not be negative");
  expect(
      m.attn_logit_softcapping >= 0 && m.final_logit_softcapping >= 0,
      "scores cannot be capped at less than 0: set attn_logit_softcapping and final_logit_softcapping to 0 "
      "where they are not capped");
  expect(m.causal || !m.attention_sinks, "attention_sinks are for models that write behind their text");
  expect(m.head == Head::lm || m.final_logit_softcapping == 0, "final_logit_softcapping is for head \"lm\"");
  expect(m.logits_scaling > 0, "logits_scaling ", m.logits_scaling, " must be positive");
  expect(!m.norm_unit_offset || m.norm == Norm::rmsnorm, "norm_unit_offset is for norm \"rmsnorm\"");
  const std::string head = cat("head \"", name_of(m.head), '"');
  expect(!m.pairs_texts() ||
             (!m.causal && m.token_types > 1 && m.norm_placement == NormPlacement::post_residual),
         head, " is BERT's: take type bert, with token_types 2 to tell the texts of a pair apart");
  expect(!m.classifies() || !m.causal, head,
         " is for encoders, whose tokens see all of a text: set causal to false, or take a type that has it "
         "so, such as bert");
  expect(!m.gives_rewards() || m.causal, head,
         " reads a text to its last token: set causal to true, or take a type that has it so, such as llama");
  expect(m.classifies() == !m.labels.empty(),
         m.classifies()
             ? head + " needs labels, the names of the classes"
             : "labels are for head \"sequence_classification\" and head \"token_classification\"");
  expect(m.labels.size() != 1 && std::ssize(m.labels) <= most_labels, "labels must be from 2 to ",
         most_labels, " names, not ", m.labels.size());
  for (auto label = m.labels.begin(); label != m.labels.end(); ++label)
    expect(!label->empty() && std::find(m.labels.begin(), label, *label) == label, "labels has '", *label,
           label->empty() ? "', which names nothing" : "' twice");
  expect(m.causal || m.llama_4_scaling_beta == 0,
         "llama_4_scaling_beta is for models that write behind their text: set causal to true");
  if (m.sliding_rope)
    expect(m.sliding_rope->rotary_base > 1, "sliding_rope.rotary_base ", m.sliding_rope->rotary_base,
           " must be above 1");
}

std::int64_t default_ffn(const Model& m) {
  return defaults_of(m.type).gated() ? (8 * m.hidden_size / 3 + 63) / 64 * 64 : 4 * m.hidden_size;
}

void settle_rope(RopeScaling& rope, const Model& m) {
  if (rope.type == RotaryScaling::yarn && rope.original_max_positions == 0)
    rope.original_max_positions = m.max_positions;
  if (rope.type != RotaryScaling::longrope) return;
  const double first = static_cast<double>(rope.original_max_positions);
  expect(first > 1, "longrope needs original_max_position_embeddings");
  const double turned = m.mla.kv_lora_rank > 0 ? static_cast<double>(m.mla.qk_rope_head_dim)
                                               : static_cast<double>(m.head_dim) * m.partial_rotary_factor;
  const auto pairs = static_cast<std::size_t>(turned) / 2;
  for (const std::vector<double>* factors : {&rope.short_factor, &rope.long_factor}) {
    expect(factors->size() == pairs, "longrope has ", counted(std::ssize(*factors), "factor"), " for ", pairs,
           " pairs of a head that turn: give one for each");
    for (const double factor : *factors)
      expect(factor > 0, "longrope's factors must be positive, not ", factor);
  }
  const double longer = rope.factor > 1 ? rope.factor : static_cast<double>(m.max_positions) / first;
  if (rope.attention_factor == 0)
    rope.attention_factor = longer <= 1 ? 1 : std::sqrt(1 + std::log(longer) / std::log(first));
}

/// Keeps of the layers' types the shortest pattern that says the same.
void settle_layers(Model& m) {
  const bool by_type = m.layer_types == defaults_of(m.type).layer_types;
  if (m.sliding_window == 0 && by_type && !m.any_linear()) m.layer_types.clear();
  expect(by_type || std::ssize(m.layer_types) <= m.num_layers, "layer_types names ",
         counted(std::ssize(m.layer_types), "layer"), " of ", m.num_layers, ": give a shorter pattern");
  const bool sliding =
      std::count(m.layer_types.begin(), m.layer_types.end(), LayerType::sliding_attention) > 0;
  expect(!sliding || m.sliding_window > 0,
         "layer_types has layers with sliding_attention: set sliding_window, the tokens that they see");
  if (!m.layer_types.empty() && !sliding) m.sliding_window = 0;
  std::vector<LayerType> all;
  for (std::int64_t i = 0; i < m.num_layers && !m.layer_types.empty(); ++i) all.push_back(m.layer_type(i));
  std::size_t length = 1;
  const auto repeats = [&] {
    for (std::size_t i = length; i < all.size(); ++i)
      if (all[i] != all[i - length]) return false;
    return true;
  };
  while (!repeats()) ++length;
  if (length == 1 && !m.any_linear()) all.clear();
  all.resize(std::min(length, all.size()));
  m.layer_types = std::move(all);
}

/// Layers whose attention is linear.
void settle_linear(Model& m) {
  LinearAttention& linear = m.linear_attention;
  if (!m.any_linear()) return;
  expect(
      linear.num_key_heads > 0,
      "layer_types has layers with linear_attention: say its num_key_heads in the section linear_attention");
  if (linear.num_value_heads == 0) linear.num_value_heads = linear.num_key_heads;
  expect(linear.num_value_heads % linear.num_key_heads == 0, "linear_attention: num_value_heads ",
         linear.num_value_heads, " is not a multiple of num_key_heads ", linear.num_key_heads);
  expect(m.causal, "linear_attention is for models that write behind their text: set causal to true");
  expect(!m.bias, "linear_attention has no biases: set bias to false");
}

/// Heads of keys that latents make.
void settle_latents(Model& m) {
  const Mla& mla = m.mla;
  expect(mla.kv_lora_rank > 0 || mla == Mla(), "mla needs a kv_lora_rank");
  if (mla.kv_lora_rank == 0) return;
  const std::int64_t head = mla.qk_nope_head_dim + mla.qk_rope_head_dim;
  expect(m.num_kv_heads == 0 || m.num_kv_heads == m.num_heads,
         "mla gives each query head a key of its own: leave num_kv_heads out");
  expect(m.head_dim == 0 || m.head_dim == head, "head_dim ", m.head_dim, " is not mla's ", head,
         ", qk_nope_head_dim + qk_rope_head_dim: leave it out");
  expect(mla.v_head_dim <= head, "mla.v_head_dim ", mla.v_head_dim, " is more than a key's ", head);
  for (const auto& [key, value] : {std::pair{"qk_rope_head_dim", mla.qk_rope_head_dim},
                                   {"qk_nope_head_dim", mla.qk_nope_head_dim},
                                   {"kv_lora_rank", mla.kv_lora_rank}})
    expect(value % 2 == 0, "mla.", key, " ", value, " must be even");
  expect(
      m.position == PositionType::rotary && m.causal && m.partial_rotary_factor == 1,
      "mla is for models of rotary positions that write behind their text, and says itself which part of a "
      "head turns");
  expect(!m.has_qkv_bias() && !m.qk_norm && !m.attention_sinks && !m.attention_gate &&
             m.llama_4_scaling_beta == 0,
         "mla has no bias, qk_norm, attention_sinks, attention_gate or llama_4_scaling_beta: set bias, "
         "qkv_bias, "
         "qk_norm, attention_sinks and attention_gate to false");
  m.head_dim = head;
}

/// Layers of an encoder in front of a decoder's: half of both where nothing else is said.
void settle_encoder(Model& m) {
  Encoder& e = m.encoder;
  if (m.position == PositionType::relative && e.num_layers == 0) e.num_layers = m.num_layers / 2;
  if (m.position == PositionType::relative && e.seq_length == 0) e.seq_length = m.seq_length / 2;
  expect(m.position == PositionType::relative || e == Encoder(),
         "encoder goes with position \"relative\": take a type that has it, such as t5");
  if (m.position != PositionType::relative) return;
  expect(e.num_layers > 0 && e.seq_length > 0,
         "position \"relative\" is of an encoder and a decoder: make num_layers and seq_length 2 or more");
  expect(e.num_layers < m.num_layers, "encoder.num_layers ", e.num_layers, " leaves no layer of ",
         m.num_layers, " to the decoder: num_layers counts both");
  expect(e.seq_length > 0 && e.seq_length < m.seq_length, "encoder.seq_length ", e.seq_length,
         " leaves no token of ", m.seq_length, " to the decoder: seq_length counts both");
  expect(m.num_kv_heads == m.num_heads,
         "encoder gives each query head a key of its own: leave num_kv_heads out");
  expect(m.causal && m.head == Head::lm,
         "encoder is for models whose decoder writes: leave causal and head out");
  expect(m.relative_attention_max_distance > m.relative_attention_num_buckets / 2,
         "relative_attention_max_distance ", m.relative_attention_max_distance,
         " is within the first half of ", m.relative_attention_num_buckets,
         " buckets, which have a distance each");
  const std::pair<const char*, bool> others[] = {{"moe", m.moe.experts > 0},
                                                 {"mla", m.mla.kv_lora_rank > 0},
                                                 {"layer_types", !m.layer_types.empty()},
                                                 {"sliding_window", m.sliding_window > 0},
                                                 {"qk_norm", m.qk_norm},
                                                 {"attention_sinks", m.attention_sinks},
                                                 {"attention_gate", m.attention_gate},
                                                 {"attn_logit_softcapping", m.attn_logit_softcapping != 0},
                                                 {"token_types", m.token_types > 0},
                                                 {"embedding_norm", m.embedding_norm},
                                                 {"bias", m.has_qkv_bias()},
                                                 {"residual_multiplier", m.residual_multiplier != 1},
                                                 {"norm_placement", m.norm_placement != NormPlacement::pre}};
  for (const auto& [key, there] : others)
    expect(!there, key, " is not for models with an encoder in front: leave it out");
}

void check_experts(const Model& m) {
  const Moe& e = m.moe;
  if (e.experts == 0) return;
  expect(!e.use_residual || e.shared_experts == 0,
         "moe: use_residual and shared_experts are both a dense part beside the experts; take one");
  expect(e.shared_experts <= most_ffn_hidden / e.ffn_hidden_size, "moe: ", e.shared_experts,
         " shared experts are too many");
  expect(e.blocks(m.num_layers) > 0, "moe: none of ", m.num_layers, " blocks has experts: the first ",
         e.first_dense, " have none, and behind them one of ", e.every, " has");
}

}  // namespace

std::vector<std::string> family_names() {
  std::vector<std::string> out;
  for (const FamilyDefaults& family : families()) out.emplace_back(family.name);
  return out;
}

ModelType family_named(std::string_view name) {
  for (const FamilyDefaults& family : families())
    if (family.name == name) return family.model.type;
  fail(ErrorKind::usage, "no family of models is called '", name, "'");
}

const Model& defaults_of(ModelType type) {
  return families()[static_cast<std::size_t>(type)].model;
}

std::string_view name_of(ModelType type) {
  return families()[static_cast<std::size_t>(type)].name;
}

Model resolved(Model m) {
  check_bounds(m);
  settle_latents(m);
  if (m.moe.bias_update > 0) m.moe.correction_bias = true;
  const bool own_head = m.head_dim > 0;
  if (m.max_positions == 0 || m.position == PositionType::relative) m.max_positions = m.seq_length;
  if (m.num_kv_heads == 0) m.num_kv_heads = m.num_heads;
  expect(own_head || m.hidden_size % m.num_heads == 0, "hidden_size ", m.hidden_size,
         " is not a multiple of num_heads ", m.num_heads, "; set head_dim to have them differ");
  if (!own_head) m.head_dim = m.hidden_size / m.num_heads;
  if (m.ffn_hidden_size == 0) m.ffn_hidden_size = default_ffn(m);
  if (!m.bias) m.mlp_bias = true;      // which has no effect then
  if (m.moe.experts == 0) m.moe = {};  // what a family's experts have by default
  if (m.moe.experts > 0 && m.moe.ffn_hidden_size == 0) m.moe.ffn_hidden_size = m.ffn_hidden_size;
  settle_layers(m), settle_linear(m);
  for (RopeScaling* rope : {&m.rope_scaling, m.sliding_rope ? &m.sliding_rope->rope_scaling : nullptr})
    if (rope) settle_rope(*rope, m);
  expect(m.num_heads % m.num_kv_heads == 0, "num_heads ", m.num_heads, " is not a multiple of num_kv_heads ",
         m.num_kv_heads);
  expect(m.head_dim <= most_ffn_hidden / m.num_heads, "num_heads ", m.num_heads, " x head_dim ", m.head_dim,
         " is beyond ", most_ffn_hidden, ", the most there can be");
  expect(m.seq_length <= m.max_positions, "seq_length ", m.seq_length,
         " is longer than the model's max_positions ", m.max_positions);
  expect(m.position != PositionType::rotary || m.head_dim % 2 == 0,
         "rotary positions need an even head size, not ",
         own_head ? "head_dim = " : "hidden_size/num_heads = ", m.head_dim);
  const auto turned = static_cast<std::int64_t>(static_cast<double>(m.head_dim) * m.partial_rotary_factor);
  expect(m.position != PositionType::rotary || (turned > 0 && turned % 2 == 0) || m.mla.kv_lora_rank > 0,
         "partial_rotary_factor ", m.partial_rotary_factor, " turns ", turned, " of a head's ", m.head_dim,
         " elements, which must be an even number of them");
  settle_encoder(m);
  const bool relu = m.activation == FfnActivation::relu || m.activation == FfnActivation::relu2;
  expect(!relu || (m.moe.experts == 0 && m.head == Head::lm), "activation \"", name_of(m.activation),
         "\" is neither for experts nor for the layers of other heads than \"lm\": take \"gelu\"");
  expect(m.ffn_dropout == 0 || m.moe.experts == 0, "ffn_dropout is not for experts: leave it at 0");
  check_experts(m);
  return m;
}

}  // namespace sherd::config
