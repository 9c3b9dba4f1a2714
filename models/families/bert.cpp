#include "models/families/family.h"

// BERT (Devlin et al. 2019), with its head for masked tokens, and by its class (BertForPreTraining) the
// pooler and the head for next sentences, which are passed over else, as BertForMaskedLM does.
namespace sherd::models {
namespace {

using config::FfnActivation;
using M = config::Model;

/// One share for the embeddings and for what blocks add.
JsonKey hidden_dropout() {
  const auto read = [](Published& p, const config::Value& value) {
    p.model.dropout = p.model.embedding_dropout = value.real(0, 0.99);
  };
  return config::custom<Published>("hidden_dropout_prob", "", read,
                                   [](const Published& p) { return config::node_of(p.model.dropout); });
}

JsonKeys bert_keys() {
  const auto absolute = [](const config::Value& value) { return value.node.is_text("absolute"); };
  return {whole("max_position_embeddings", &M::max_positions, 1, config::most_positions),
          whole("hidden_size", &M::hidden_size, 1, config::most_hidden),
          whole("num_hidden_layers", &M::num_layers, 1, config::most_layers),
          whole("num_attention_heads", &M::num_heads, 1, config::most_heads),
          whole("intermediate_size", &M::ffn_hidden_size, 1, config::most_ffn_hidden),
          whole("type_vocab_size", &M::token_types, 1, config::most_token_types),
          activation("hidden_act",
                     {{"gelu", FfnActivation::gelu},
                      {"gelu_new", FfnActivation::gelu_tanh},
                      {"gelu_pytorch_tanh", FfnActivation::gelu_tanh}},
                     "\"gelu\" and \"gelu_new\" are"),
          hidden_dropout(),
          share("attention_probs_dropout_prob", &M::attention_dropout),
          positive("layer_norm_eps", &M::norm_epsilon),
          only("position_embedding_type", absolute, "positions are learned, and absolute"),
          only("is_decoder", config::is_false, "tokens see those behind them"),
          only("add_cross_attention", config::is_false, "there is no other text to attend to")};
}

TensorNames bert_names() {
  return {.prefix = "bert.",
          .tokens = "embeddings.word_embeddings",
          .positions = "embeddings.position_embeddings",
          .token_types = "embeddings.token_type_embeddings",
          .embedding_norm = "embeddings.LayerNorm",
          .blocks = "encoder.layer",
          .post_norm_1 = "attention.output.LayerNorm",
          .post_norm_2 = "output.LayerNorm",
          .qkv = {"attention.self.query", "attention.self.key", "attention.self.value"},
          .projection = "attention.output.dense",
          .up = {"intermediate.dense"},
          .down = "output.dense",
          .head = "cls.predictions.decoder",
          .head_dense = "cls.predictions.transform.dense",
          .head_norm = "cls.predictions.transform.LayerNorm",
          .head_bias = "cls.predictions",
          .classifier = "classifier",
          .pooler = "pooler.dense",
          .sentence_head = "cls.seq_relationship",
          .passed_over = {"bert.pooler.", "pooler.", "cls.seq_relationship.", "cls.predictions.decoder.bias",
                          "cls.predictions.bias"}};
}

std::optional<std::string> bert_lacks(const M& m) {
  if (m.num_kv_heads != m.num_heads) return "model.num_kv_heads";
  if (m.head_dim * m.num_heads != m.hidden_size) return "model.head_dim";
  if (m.token_types == 0) return "a model without model.token_types";
  if (m.embedding_dropout != m.dropout) return "model.embedding_dropout that is not model.dropout";
  return std::nullopt;
}

}  // namespace

Family bert() {
  return {.name = "bert",
          .architecture = "BertForMaskedLM",
          .sequence_classifier = "BertForSequenceClassification",
          .token_classifier = "BertForTokenClassification",
          .pretraining = "BertForPreTraining",
          .class_defaults =
              [](Published& p) {
                set_sizes(p.model, {30522, 768, 3072, 12, 12, 0, 512});
                p.model.norm_epsilon = 1e-12;
              },
          .keys = bert_keys(),
          .names = bert_names(),
          .lora_targets = {"query", "value"},
          .ia3_targets = {"key", "value", "output.dense"},
          .has = {"token_types"},
          .lacks = bert_lacks,
          .gguf = {
              .architecture = "bert", .post_norm_1 = "attn_output_norm", .post_norm_2 = "layer_output_norm"}};
}

}  // namespace sherd::models
