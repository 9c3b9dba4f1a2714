#include <nlohmann/json.hpp>
#include <optional>

#include "base/error.h"
#include "config/hugging_face.h"

namespace sherd::config {
namespace {

using Json = nlohmann::ordered_json;

struct Family {
  ModelType type;
  const char* architecture;
};
constexpr Family families[] = {
    {ModelType::gpt2, "GPT2LMHeadModel"},         {ModelType::llama, "LlamaForCausalLM"},
    {ModelType::mistral, "MistralForCausalLM"},   {ModelType::qwen2, "Qwen2ForCausalLM"},
    {ModelType::qwen3, "Qwen3ForCausalLM"},       {ModelType::mixtral, "MixtralForCausalLM"},
    {ModelType::qwen3_moe, "Qwen3MoeForCausalLM"}};

bool has_experts(ModelType type) {
  return type == ModelType::mixtral || type == ModelType::qwen3_moe;
}
bool has_qk_norm(ModelType type) {
  return type == ModelType::qwen3 || type == ModelType::qwen3_moe;
}

/// The first thing of the experts that transformers' classes do not have.
std::optional<std::string> missing_of_experts(const Moe& moe, ModelType type) {
  const bool mixtral = type == ModelType::mixtral;
  if (moe.router == Router::sigmoid) return "model.moe.router \"sigmoid\"";
  if (mixtral && !moe.norm_topk && moe.router == Router::softmax) return "model.moe.norm_topk false";
  if (moe.shared_experts > 0) return "model.moe.shared_experts";
  if (moe.use_residual) return "model.moe.use_residual";
  if (moe.routed_scaling_factor != 1) return "model.moe.routed_scaling_factor";
  if (moe.groups != 1) return "model.moe.groups";
  if (moe.capacity_factor > 0) return "model.moe.capacity_factor";
  if (moe.bias_update > 0) return "model.moe.bias_update";
  if (mixtral && (moe.every != 1 || moe.first_dense != 0)) return "blocks without experts";
  if (moe.first_dense % moe.every != 0) return "model.moe.first_dense that model.moe.every does not divide";
  return std::nullopt;
}

/// The first thing of the model that the family's class does not have, or has and the model does not.
std::optional<std::string> missing_of(const Model& m, ModelType type) {
  if (type == ModelType::gpt2) {
    if (m.norm != Norm::layernorm) return "model.norm \"rmsnorm\"";
    if (m.position != Positions::learned) return "model.position \"rotary\"";
    if (m.activation == FfnActivation::swiglu) return "model.activation \"swiglu\"";
    if (!m.bias) return "model.bias false";
    if (m.num_kv_heads != m.num_heads) return "model.num_kv_heads";
    if (m.head_dim * m.num_heads != m.hidden_size) return "model.head_dim";
  } else {
    if (m.norm != Norm::rmsnorm) return "model.norm \"layernorm\"";
    if (m.position != Positions::rotary) return "model.position \"learned\"";
    if (m.activation != FfnActivation::swiglu) return cat("model.activation \"", name_of(m.activation), "\"");
    if (m.bias) return "model.bias true";
    if (m.qkv_bias != (type == ModelType::qwen2))
      return m.qkv_bias ? "model.qkv_bias true" : "model.qkv_bias false";
  }
  if (m.qk_norm != has_qk_norm(type)) return m.qk_norm ? "model.qk_norm true" : "model.qk_norm false";
  if (m.sliding_window > 0 && (type == ModelType::gpt2 || type == ModelType::llama))
    return "model.sliding_window";
  if ((m.moe.experts > 0) != has_experts(type))
    return m.moe.experts > 0 ? "model.moe" : "a model without model.moe";
  return m.moe.experts > 0 ? missing_of_experts(m.moe, type) : std::nullopt;
}

Json gpt2_of(const Model& m) {
  return {{"n_positions", m.max_positions},
          {"n_embd", m.hidden_size},
          {"n_layer", m.num_layers},
          {"n_head", m.num_heads},
          {"n_inner", m.ffn_hidden_size == 4 * m.hidden_size ? Json(nullptr) : Json(m.ffn_hidden_size)},
          {"activation_function", m.activation == FfnActivation::gelu ? "gelu" : "gelu_new"},
          {"resid_pdrop", m.dropout},
          {"embd_pdrop", m.embedding_dropout},
          {"attn_pdrop", m.attention_dropout},
          {"layer_norm_epsilon", m.norm_epsilon}};
}

Json rope_of(const RopeScaling& rope) {
  Json out{{"rope_type", name_of(rope.type)}};
  if (rope.type == RopeType::none) return out;
  out["factor"] = rope.factor;
  if (rope.type != RopeType::linear) out["original_max_position_embeddings"] = rope.original_max_positions;
  if (rope.type == RopeType::llama3)
    out.update({{"low_freq_factor", rope.low_freq_factor}, {"high_freq_factor", rope.high_freq_factor}});
  if (rope.type == RopeType::yarn) {
    out.update({{"beta_fast", rope.beta_fast}, {"beta_slow", rope.beta_slow}});
    if (!rope.truncate) out["truncate"] = false;
    if (rope.attention_factor > 0) out["attention_factor"] = rope.attention_factor;
  }
  return out;
}

/// transformers 4 knows the older form alone, 5 both, of which the newer goes before: both say the same.
void put_rope(Json& out, const Model& m, bool newer) {
  Json rope = rope_of(m.rope_scaling);
  out["rope_theta"] = m.rotary_base;
  out["rope_scaling"] = m.rope_scaling.type == RopeType::none ? Json(nullptr) : rope;
  if (!newer) return;
  rope["rope_theta"] = m.rotary_base;
  out["rope_parameters"] = std::move(rope);
}

void put_experts(Json& out, const Moe& moe, ModelType type) {
  const bool pooled = moe.aux_loss_type == AuxLoss::hf && moe.aux_loss > 0;
  out["num_experts_per_tok"] = moe.top_k;
  out["output_router_logits"] = pooled;
  if (pooled) out["router_aux_loss_coef"] = moe.aux_loss;
  if (type == ModelType::mixtral) {
    out["num_local_experts"] = moe.experts;
    out["intermediate_size"] = moe.ffn_hidden_size;
    return;
  }
  out["num_experts"] = moe.experts;
  out["moe_intermediate_size"] = moe.ffn_hidden_size;
  out["decoder_sparse_step"] = moe.every;
  out["norm_topk_prob"] = moe.norm_topk || moe.router == Router::softmax_topk;
  out["mlp_only_layers"] = Json::array();
  for (std::int64_t layer = 0; layer < moe.first_dense; ++layer) out["mlp_only_layers"].push_back(layer);
}

Json decoder_of(const Model& m, ModelType type, bool newer_rope) {
  Json out{{"max_position_embeddings", m.max_positions},
           {"hidden_size", m.hidden_size},
           {"intermediate_size", m.ffn_hidden_size},
           {"num_hidden_layers", m.num_layers},
           {"num_attention_heads", m.num_heads},
           {"num_key_value_heads", m.num_kv_heads},
           {"head_dim", m.head_dim},
           {"hidden_act", "silu"},
           {"rms_norm_eps", m.norm_epsilon},
           {"attention_dropout", m.attention_dropout}};
  if (type == ModelType::llama || has_qk_norm(type)) out["attention_bias"] = false;
  if (type == ModelType::llama) out["mlp_bias"] = false;
  put_rope(out, m, newer_rope);
  const Json window = m.sliding_window > 0 ? Json(m.sliding_window) : Json(nullptr);
  if (type != ModelType::llama) out["sliding_window"] = window;
  if (type == ModelType::qwen2 || has_qk_norm(type)) out["use_sliding_window"] = m.sliding_window > 0;
  if (type == ModelType::qwen2 || type == ModelType::qwen3)
    out["max_window_layers"] = m.sliding_window > 0 ? 0 : m.num_layers;
  if (m.moe.experts > 0) put_experts(out, m.moe, type);
  return out;
}

}  // namespace

ModelType published_as(const Model& model) {
  if (!missing_of(model, model.type)) return model.type;
  std::string reasons;
  for (const Family& family : families) {
    const std::optional<std::string> missing = missing_of(model, family.type);
    if (!missing) return family.type;
    // Of families that are something else altogether there is nothing to say.
    const bool near = (family.type == ModelType::gpt2) == (model.norm == Norm::layernorm) &&
                      has_experts(family.type) == (model.moe.experts > 0);
    if (near) reasons += cat(reasons.empty() ? "" : ", ", name_of(family.type), " not with ", *missing);
  }
  fail(ErrorKind::config, "no family that Hugging Face's transformers knows can be this model: ",
       reasons.empty() ? "none has experts beside LayerNorm" : reasons,
       ". Train it with other keys to export it; its checkpoints are whole without");
}

std::string to_hugging_face(const Model& model, std::int64_t vocab_size, std::string_view dtype,
                            std::string_view original) {
  const ModelType type = published_as(model);
  Json out = original.empty() ? Json::object() : Json::parse(original);
  const bool newer_rope = out.contains("rope_parameters");
  // Keys that mean the same as some that follow.
  for (const char* name : {"rope_theta", "rope_scaling", "rope_parameters", "layer_types",
                           "num_local_experts", "num_experts", "dtype", "torch_dtype", "quantization_config"})
    out.erase(name);
  for (const Family& family : families)
    if (family.type == type) out["architectures"] = {family.architecture};
  out["model_type"] = name_of(type);
  out["vocab_size"] = vocab_size;
  out.update(type == ModelType::gpt2 ? gpt2_of(model) : decoder_of(model, type, newer_rope));
  out["tie_word_embeddings"] = model.tie_embeddings;
  out["initializer_range"] = model.init_std;
  out["torch_dtype"] = dtype;
  return out.dump(2) + "\n";
}

}  // namespace sherd::config
