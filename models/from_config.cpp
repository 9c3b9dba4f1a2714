#include "models/from_config.h"

#include "base/error.h"

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

}  // namespace

GptOptions gpt_options(const config::Config& config, std::int64_t vocabulary) {
  if (!config.model)
    fail(ErrorKind::config,
         "there is no `model` section: add one to the configuration (README, \"Your first training run\"), "
         "or give "
         "a second file with --config");
  const config::Model& model = *config.model;
  if (model.vocab_size > 0 && model.vocab_size < vocabulary)
    fail(ErrorKind::config, "model.vocab_size is ", model.vocab_size, ", but the dataset's tokenizer has ",
         vocabulary, " ids: raise it or leave it out");
  GptOptions out;
  out.vocab_size = model.vocab_size > 0 ? model.vocab_size : vocabulary;
  out.vocab_multiple = model.pad_vocab_to_multiple_of;
  out.max_seq = model.seq_length;
  out.hidden = model.hidden_size;
  out.layers = model.num_layers;
  out.heads = static_cast<int>(model.num_heads);
  out.kv_heads = static_cast<int>(model.num_kv_heads);
  out.ffn_hidden = model.ffn_hidden_size;
  out.norm = model.norm == config::Norm::rmsnorm ? Norm::rms_norm : Norm::layer_norm;
  out.norm_eps = model.norm_epsilon;
  out.positions = model.position == config::Positions::rotary ? PositionKind::rotary : PositionKind::learned;
  out.rotary_base = model.rotary_base;
  out.mlp = mlp_for(model.activation);
  out.bias = model.bias;
  out.tied_embeddings = model.tie_embeddings;
  out.embedding_dropout = static_cast<float>(model.embedding_dropout);
  out.attention_dropout = static_cast<float>(model.attention_dropout);
  out.hidden_dropout = static_cast<float>(model.dropout);
  out.init_std = model.init_std;
  return out.resolved();
}

}  // namespace sherd::models
