#include <cmath>

#include "base/error.h"
#include "models/families/family.h"

// T5 (Raffel et al. 2020), also as 1.1 (gated, scores of a table of their own), and mT5 (Xue et al. 2021).
namespace sherd::models {
namespace {

using config::FfnActivation;
using config::Value;
using M = config::Model;

/// The divisor of scores in the first T5, which makes them with the table of embeddings.
double root_of_width(const M& m) {
  return std::sqrt(static_cast<double>(m.hidden_size));
}

/// One share for all that is dropped.
JsonKey dropout_rate() {
  const auto read = [](Published& p, const Value& value) {
    p.model.dropout = p.model.attention_dropout = p.model.embedding_dropout = p.model.ffn_dropout =
        value.real(0, 0.99);
  };
  return config::custom<Published>("dropout_rate", "", read,
                                   [](const Published& p) { return config::node_of(p.model.dropout); });
}

JsonKeys t5_keys() {
  const auto encoder_layers = [](const Published& p) { return config::node_of(p.model.encoder.num_layers); };
  const auto decoder_layers = [](const Published& p) {
    return config::node_of(p.model.num_layers - p.model.encoder.num_layers);
  };
  const auto source_positions = [](const Published& p) {
    return config::node_of(p.model.encoder.seq_length);
  };
  JsonKeys out{
      whole("d_model", &M::hidden_size, 1, config::most_hidden).alias("hidden_size"),
      whole("d_kv", &M::head_dim, 1, config::most_hidden),
      whole("d_ff", &M::ffn_hidden_size, 1, config::most_ffn_hidden),
      whole("num_heads", &M::num_heads, 1, config::most_heads),
      whole("num_layers", &Published::encoder_layers, 1, config::most_layers / 2).written(encoder_layers),
      whole("num_decoder_layers", &Published::decoder_layers, 1, config::most_layers / 2)
          .written(decoder_layers)
          .with(config::null_too),
      whole("relative_attention_num_buckets", &M::relative_attention_num_buckets, 4, config::most_buckets),
      whole("relative_attention_max_distance", &M::relative_attention_max_distance, 2,
            config::most_positions),
      whole("decoder_start_token_id", &M::decoder_start_token_id, 0, config::most_vocabulary),
      whole("n_positions", &M::max_positions, 1, config::most_positions / 2).written(source_positions),
      config::custom<Published>(
          "scale_decoder_outputs", "",
          [](Published& p, const Value& value) { p.scales_scores = value.boolean(); },
          [](const Published& p) { return config::node_of(p.model.logits_scaling != 1); }),
      config::custom<Published>("dense_act_fn", "",
                                [](Published& p, const Value& value) { p.dense_act = value.text(); }),
      config::custom<Published>("is_gated_act", "",
                                [](Published& p, const Value& value) { p.gated_act = value.boolean(); }),
      idle("pad_token_id").written([](const Published& p) {
        return config::node_of(p.model.decoder_start_token_id);
      }),
      dropout_rate(),
      positive("layer_norm_epsilon", &M::norm_epsilon),
      positive("initializer_factor", &M::init_std),
      activation("feed_forward_proj",
                 {{"relu", FfnActivation::relu},
                  {"gelu", FfnActivation::gelu},
                  {"gelu_new", FfnActivation::gelu_tanh},
                  {"gated-gelu", FfnActivation::geglu_tanh},
                  {"gated-silu", FfnActivation::swiglu}},
                 "\"relu\", \"gelu\", \"gelu_new\", \"gated-gelu\" and \"gated-silu\" are"),
      only("is_encoder_decoder", is_true, "the model is an encoder in front of a decoder")
          .written([](const Published&) { return config::node_of(true); }),
      only("is_decoder", config::is_false, "the model is an encoder in front of a decoder")};
  for (const char* name : {"scalable_attention", "classifier_dropout"}) out.push_back(idle(name));
  return out;
}

TensorNames decoder_names() {
  TensorNames names{
      .prefix = "", .tokens = "shared", .norm = "decoder.final_layer_norm", .blocks = "decoder.block"};
  const std::string attention = "layer.0.SelfAttention.", cross = "layer.1.EncDecAttention.";
  names.norm_1 = "layer.0.layer_norm", names.norm_2 = "layer.2.layer_norm";
  names.qkv = {attention + "q", attention + "k", attention + "v"};
  names.projection = attention + "o", names.positions_table = attention + "relative_attention_bias";
  names.cross_norm = "layer.1.layer_norm", names.cross_qkv = {cross + "q", cross + "k", cross + "v"};
  names.cross_projection = cross + "o";
  const std::string wide = "layer.2.DenseReluDense.";
  names.up = {wide + "wi_0", wide + "wi_1"}, names.plain_up = wide + "wi", names.down = wide + "wo";
  names.copies = {"encoder.embed_tokens", "decoder.embed_tokens"};
  names.passed_over = {"decoder.block.0.layer.1.EncDecAttention.relative_attention_bias."};
  return names;
}

TensorNames encoder_names() {
  TensorNames names = decoder_names();
  names.norm = "encoder.final_layer_norm", names.blocks = "encoder.block",
  names.norm_2 = "layer.1.layer_norm";
  const std::string wide = "layer.1.DenseReluDense.";
  names.up = {wide + "wi_0", wide + "wi_1"}, names.plain_up = wide + "wi", names.down = wide + "wo";
  return names;
}

/// The first thing that T5 and mT5 both lack. All dropout probabilities are written as one, `dropout`.
std::optional<std::string> t5_lacks(const M& m) {
  if (m.attention_multiplier != 1) return "model.attention_multiplier that is not 1";
  const double scaling = m.logits_scaling;
  if (scaling != 1 && std::abs(scaling - root_of_width(m)) > 1e-6 * scaling)
    return cat("model.logits_scaling that is neither 1 nor ", root_of_width(m));
  return std::nullopt;
}

std::optional<std::string> mt5_lacks(const M& m) {
  return m.logits_scaling != 1 ? "model.logits_scaling" : t5_lacks(m);
}

void class_defaults(Published& p) {
  p.model.head_dim = 64;
  p.model.dropout = p.model.attention_dropout = p.model.embedding_dropout = p.model.ffn_dropout = 0.1;
}

/// Throws where dense_act_fn and is_gated_act name another activation than feed_forward_proj.
void check_activation(const Published& p) {
  const bool gated = p.model.gated();
  const FfnActivation own = p.model.activation;
  const bool same = p.dense_act.empty() || p.dense_act == (own == FfnActivation::relu     ? "relu"
                                                           : own == FfnActivation::swiglu ? "silu"
                                                           : own == FfnActivation::gelu   ? "gelu"
                                                                                          : "gelu_new");
  if (!same || p.gated_act.value_or(gated) != gated)
    fail(ErrorKind::config,
         "dense_act_fn and is_gated_act contradict feed_forward_proj: take them out, or make "
         "feed_forward_proj say the same");
}

void settle_layers(Published& p) {
  M& m = p.model;
  check_activation(p);
  m.encoder.num_layers = p.encoder_layers;
  m.num_layers = p.encoder_layers + (p.decoder_layers > 0 ? p.decoder_layers : p.encoder_layers);
  m.encoder.seq_length = m.max_positions;  // and as many for the decoder
  m.seq_length = m.max_positions = 2 * m.max_positions;
}

/// The first thing that llama.cpp's graph lacks.
std::optional<std::string> lacks_other_stacks(const M& m) {
  if (m.activation != FfnActivation::relu && m.activation != FfnActivation::geglu_tanh)
    return "model.activation that is neither \"relu\" nor \"geglu_tanh\"";
  if (m.relative_attention_max_distance != 128)
    return "model.relative_attention_max_distance that is not 128";
  if (m.num_layers > 2 * m.encoder.num_layers) return "a decoder of more layers than the encoder has";
  return std::nullopt;
}

Family of_t5(const char* name, const char* architecture) {
  return {.name = name,
          .architecture = architecture,
          .settle = settle_layers,
          .keys = t5_keys(),
          .names = decoder_names(),
          .encoder_names = encoder_names(),
          .lora_targets = {"q", "v"},
          .ia3_targets = {"k", "v", "wo"},
          .has = {"activation", "attention_multiplier", "logits_scaling"},
          .gguf = {.architecture = "t5", .lacks = lacks_other_stacks}};
}

}  // namespace

Family t5() {
  Family out = of_t5("t5", "T5ForConditionalGeneration");
  out.class_defaults = [](Published& p) {
    set_sizes(p.model, {32128, 512, 2048, 0, 8, 0, 512});
    class_defaults(p);
    p.encoder_layers = 6, p.model.activation = FfnActivation::relu, p.model.tie_embeddings = true;
  };
  out.settle = [](Published& p) {
    settle_layers(p);
    // As transformers 5 writes T5 1.1, whose files have a table of their own for scores.
    const bool scales = p.scales_scores.value_or(p.model.tie_embeddings);
    if (!scales) p.model.tie_embeddings = false;
    p.model.logits_scaling = scales ? root_of_width(p.model) : 1;
  };
  out.lacks = t5_lacks;
  return out;
}

Family mt5() {
  Family out = of_t5("mt5", "MT5ForConditionalGeneration");
  out.class_defaults = [](Published& p) {
    set_sizes(p.model, {250112, 512, 1024, 0, 6, 0, 512});
    class_defaults(p);
    p.encoder_layers = 8;
  };
  out.settle = [](Published& p) {  // files have a head of their own, whatever they say
    settle_layers(p);
    p.model.tie_embeddings = false;
  };
  out.lacks = mt5_lacks;
  return out;
}

}  // namespace sherd::models
