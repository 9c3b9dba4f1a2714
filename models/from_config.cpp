#include "models/from_config.h"

#include "base/error.h"
#include "config/hugging_face.h"
#include "models/adapters/adapters.h"

namespace sherd::models {
namespace {

Mlp mlp_for(config::FfnActivation activation) {
  switch (activation) {
    case config::FfnActivation::gelu:
      return Mlp::gelu_erf;
    case config::FfnActivation::swiglu:
      return Mlp::swiglu;
    case config::FfnActivation::gelu_tanh:
      break;
  }
  return Mlp::gelu_tanh;
}

tensor::RouterScores scores_for(config::Router router) {
  switch (router) {
    case config::Router::softmax_topk:
      return tensor::RouterScores::softmax_of_chosen;
    case config::Router::sigmoid:
      return tensor::RouterScores::sigmoid;
    case config::Router::softmax:
      break;
  }
  return tensor::RouterScores::softmax;
}

parallel::BalanceLoss loss_for(config::AuxLoss loss) {
  switch (loss) {
    case config::AuxLoss::gshard:
      return parallel::BalanceLoss::first_choices;
    case config::AuxLoss::hf:
      return parallel::BalanceLoss::pooled;
    case config::AuxLoss::switch_layers:
      break;
  }
  return parallel::BalanceLoss::all_choices;
}

ExpertsOptions experts_for(const config::Moe& moe) {
  ExpertsOptions out;
  out.count = moe.experts, out.ffn_hidden = moe.ffn_hidden_size;
  out.every = moe.every, out.first_dense = moe.first_dense, out.shared = moe.shared_experts;
  out.routing = {static_cast<int>(moe.top_k), scores_for(moe.router),       moe.norm_topk,
                 moe.routed_scaling_factor,   static_cast<int>(moe.groups), static_cast<int>(moe.top_groups)};
  out.losses = {moe.aux_loss, moe.z_loss, loss_for(moe.aux_loss_type)};
  out.jitter = moe.jitter, out.bias_update = moe.bias_update;
  out.shared_gate = moe.shared_expert_gate, out.residual = moe.use_residual;
  out.capacity_factor = moe.capacity_factor;
  out.drop =
      moe.drop == config::DropPolicy::position ? parallel::Drop::by_position : parallel::Drop::by_weight;
  return out;
}

tensor::Rotary rotary_for(const config::Model& model) {
  const config::RopeScaling& scaling = model.rope_scaling;
  tensor::Rotary out;
  out.base = model.rotary_base;
  switch (scaling.type) {
    case config::RopeType::none:
      return out;
    case config::RopeType::linear:
      out.scaling = tensor::RotaryScaling::linear;
      break;
    case config::RopeType::llama3:
      out.scaling = tensor::RotaryScaling::llama3;
      break;
    case config::RopeType::yarn:
      out.scaling = tensor::RotaryScaling::yarn;
      break;
  }
  out.factor = scaling.factor, out.original_positions = scaling.original_max_positions;
  out.low_freq_factor = scaling.low_freq_factor, out.high_freq_factor = scaling.high_freq_factor;
  out.beta_fast = scaling.beta_fast, out.beta_slow = scaling.beta_slow, out.truncate = scaling.truncate;
  out.attention_factor = scaling.attention_factor;
  return out;
}

}  // namespace

GptOptions gpt_options(const config::Config& config, std::int64_t vocabulary) {
  if (!config.model)
    fail(ErrorKind::config,
         "there is no `model` section: add one to the configuration (docs/getting_started.md, "
         "\"Your first training run\"), or give a second file with --config");
  const config::Model& model = *config.model;
  GptOptions out;
  out.vocab_size = model.vocab_size > 0 ? model.vocab_size : vocabulary;
  out.vocab_multiple = model.pad_vocab_to_multiple_of;
  out.max_seq = model.seq_length, out.position_rows = model.max_positions;
  out.hidden = model.hidden_size;
  out.layers = model.num_layers;
  out.heads = static_cast<int>(model.num_heads);
  out.kv_heads = static_cast<int>(model.num_kv_heads), out.head_dim = model.head_dim;
  out.ffn_hidden = model.ffn_hidden_size;
  if (model.moe.experts > 0) out.experts = experts_for(model.moe);
  out.norm = model.norm == config::Norm::rmsnorm ? Norm::rms_norm : Norm::layer_norm;
  out.norm_eps = model.norm_epsilon;
  out.positions = model.position == config::Positions::rotary ? PositionKind::rotary : PositionKind::learned;
  out.rotary = rotary_for(model);
  out.sliding_window = model.sliding_window, out.qk_norm = model.qk_norm;
  out.mlp = mlp_for(model.activation);
  out.bias = model.bias, out.qkv_bias = model.qkv_bias;
  out.tied_embeddings = model.tie_embeddings;
  out.embedding_dropout = static_cast<float>(model.embedding_dropout);
  out.attention_dropout = static_cast<float>(model.attention_dropout);
  out.hidden_dropout = static_cast<float>(model.dropout);
  out.init_std = model.init_std;
  out = out.resolved();
  const config::Adapter& adapter = config.training.adapter;
  if (adapter.type != config::AdapterType::none) {
    out.adapter = adapter_options(adapter, out, config::published_as(model));
    out.experts.bias_update = 0;  // of a router that stays as it is
  }
  return out;
}

}  // namespace sherd::models
