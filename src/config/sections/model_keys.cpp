#include <algorithm>
#include <cmath>

#include "config/sections/tables.h"

// Section `model`.
namespace sherd::config {
namespace {

// Words, in the order of their enums.
const std::vector<std::string> position_types = {"learned", "rotary", "relative"};
const std::vector<std::string> norm_names = {"layernorm", "rmsnorm"};
const std::vector<std::string> layer_type_names = {"full_attention", "sliding_attention", "linear_attention"};
const std::vector<std::string> activation_names = {"gelu_tanh", "gelu",       "relu",  "relu2",
                                                   "swiglu",    "geglu_tanh", "geglu", "swiglu_clamped"};
const std::vector<std::string> placement_names = {"pre", "post", "sandwich", "post_residual"};
const std::vector<std::string> head_names = {
    "lm", "mlm", "sequence_classification", "token_classification", "pretraining", "reward"};

bool is_text(const Node& item) {
  return item.is(Node::Kind::string);
}

bool is_learned(const Config& config) {
  return config.model->position != PositionType::rotary;
}
constexpr const char* learned = "no effect without rotary positions";

constexpr const char* not_relative = "no effect without relative positions";
bool has_no_encoder(const Config& config) {
  return !config.model->has_encoder();
}

bool has_no_qk_norm(const Config& config) {
  return !config.model->qk_norm;
}

std::string why_no_window(const Config& config) {
  if (is_learned(config)) return learned;
  return config.model->sliding_window > 0 ? "" : "no effect without model.sliding_window";
}

std::string why_all_seen(const Config& config) {
  const Model& model = *config.model;
  return model.sliding_window < model.seq_length || model.sliding_rope
             ? ""
             : cat("no effect: sequences have ", model.seq_length, " tokens");
}

/// The pattern of layers' types.
Key<Model> layer_types_key() {
  const auto read = [](Model& model, const Value& value) {
    model.layer_types.clear();
    for (std::size_t i = 0; i < length_of(value, is_text, "types of layers"); ++i)
      model.layer_types.push_back(static_cast<LayerType>(value.item(i).choice(layer_type_names)));
  };
  const auto write = [](const Model& model) {
    std::vector<std::string> names;
    for (const LayerType type : model.layer_types) names.emplace_back(name_of(type));
    return list_of(names);
  };
  Key<Model> key = custom<Model>("layer_types", R"(["sliding_attention", "full_attention"])", read, write);
  // A type's own default comes back where the key is left out.
  key.left_out = [](const Model& model) {
    const Model& type = defaults_of(model.type);
    if (type.any_linear() || model.any_linear()) return model.layer_types == type.layer_types;
    return model.sliding_window == 0 || (model.layer_types.empty() && type.layer_types.empty());
  };
  return std::move(key).takes({"list of types of layers, " + words(layer_type_names).words,
                               R"({"type": "array", "items": )" + words(layer_type_names).schema + "}"});
}

const Table<SlidingRope>& sliding_rope_table() {
  using T = SlidingRope;
  static const Table<SlidingRope> table{
      Auto::is_a_value,
      {real("rotary_base", &T::rotary_base, "2e4", 1, infinity, true)
           .means("of the positions of layers with a window, where they are not the others'; gemma3_text "
                  "and modernbert have this section by default"),
       section("rope_scaling", &T::rope_scaling, rope_table()).with(unless_default)}};
  return table;
}

const Table<Mla>& mla_table() {
  using T = Mla;
  static const Table<Mla> table{
      Auto::is_a_value,
      {integer("kv_lora_rank", &T::kv_lora_rank, "512", 0, most_hidden)
           .means(
               "numbers of which a token's keys and values are made, and which generation stores; 0: there "
               "is no such section",
               shapes),
       integer("q_lora_rank", &T::q_lora_rank, "1536", 0, most_hidden)
           .means("numbers of which a token's queries are made; 0: they are made of the stream", shapes),
       integer("qk_nope_head_dim", &T::qk_nope_head_dim, "64", 1, most_hidden)
           .means("elements of a head's queries and keys that do not turn", shapes),
       integer("qk_rope_head_dim", &T::qk_rope_head_dim, "32", 2, most_hidden)
           .means("elements that turn with the position; all heads' keys share them", shapes),
       integer("v_head_dim", &T::v_head_dim, "64", 1, most_hidden)
           .means("elements of a head's values, no more than of its keys", shapes),
       real("norm_epsilon", &T::norm_epsilon, "1e-5", 0, infinity, true)
           .means(
               "of the norms of these numbers, which published models leave at 1e-6 whatever `rms_norm_eps` "
               "says",
               shapes)}};
  return table;
}

const Table<Encoder>& encoder_table() {
  using T = Encoder;
  static const Table<Encoder> table{
      Auto::is_a_value,
      {integer("num_layers", &T::num_layers, "1", 0, most_layers)
           .unset(std::int64_t{0})
           .means("how many of `model.num_layers`, the first ones, are an encoder's in front of the decoder",
                  shapes, by("half of them")),
       integer("seq_length", &T::seq_length, "48", 0, most_positions)
           .unset(std::int64_t{0})
           .means("how many of `model.seq_length`, the first ones, the encoder reads; the decoder writes the "
                  "others",
                  by("half of them"))}};
  return table;
}

const Table<LinearAttention>& linear_table() {
  using T = LinearAttention;
  static const Table<LinearAttention> table{
      Auto::is_a_value,
      {integer("num_key_heads", &T::num_key_heads, "2", 0, most_heads)
           .means("heads of queries and keys, of layers whose `layer_types` is `linear_attention`; 0: there "
                  "is no "
                  "such section",
                  shapes),
       integer("num_value_heads", &T::num_value_heads, "4", 0, most_heads)
           .unset(std::int64_t{0})
           .means("heads of values, each with a state of its own; a multiple", shapes, by("`num_key_heads`")),
       integer("key_head_dim", &T::key_head_dim, "16", 1, most_linear_head)
           .means("elements of a query and of a key: rows of a state", shapes),
       integer("value_head_dim", &T::value_head_dim, "24", 1, most_linear_head)
           .means("elements of a value: columns of a state", shapes),
       integer("conv_kernel_dim", &T::conv_kernel_dim, "3", 1, 8)
           .means("rows that the convolution before queries, keys and values takes together", shapes)}};
  return table;
}

/// Names of classes.
Key<Model> labels_key() {
  const auto read = [](Model& model, const Value& value) {
    model.labels.clear();
    for (std::size_t i = 0; i < length_of(value, is_text, "strings"); ++i)
      model.labels.push_back(value.item(i).text());
  };
  Key<Model> key = custom<Model>("labels", R"(["negative", "positive"])", read,
                                 [](const Model& model) { return list_of(model.labels); });
  key.left_out = [](const Model& model) { return model.labels.empty(); };
  return std::move(key).takes({"list of strings", R"({"type": "array", "items": {"type": "string"}})"});
}

/// How large the model is.
std::vector<Key<Model>> size_keys() {
  using T = Model;
  return {
      choice("type", &T::type, family_names(), "\"llama\"")
          .means("defaults, and the family as which the model is [exported](hugging_face.md); \"others\" are "
                 "all that are not named",
                 shapes),
      integer("vocab_size", &T::vocab_size, "50257", 0, most_vocabulary)
          .means("token ids; 0: the tokenizer's", shapes, Concerns::run),
      integer("pad_vocab_to_multiple_of", &T::pad_vocab_to_multiple_of, "64", 1, 1 << 20)
          .means("the embedding gets rows up to a multiple of this; they take no part in the loss", shapes,
                 Concerns::run),
      integer("seq_length", &T::seq_length, "64", 1, most_positions).means("tokens per sample", required),
      integer("max_positions", &T::max_positions, "512", 1, most_positions)
          .means("longest sequence that the model is made for: rows of learned positions, of which samples "
                 "use the first `seq_length`",
                 shapes, by("`seq_length`")),
      integer("hidden_size", &T::hidden_size, "48", 1, most_hidden).means("width", shapes, required),
      integer("num_layers", &T::num_layers, "3", 1, most_layers).means("blocks", shapes, required),
      integer("num_heads", &T::num_heads, "2", 1, most_heads).means("query heads", shapes, required),
      integer("num_kv_heads", &T::num_kv_heads, "2", 1, most_heads)
          .means("key-value heads (grouped queries); divides `num_heads`", shapes, by("`num_heads`")),
      integer("head_dim", &T::head_dim, "6", 1, most_hidden)
          .means("size of a head; any, where it is given (Qwen3)", shapes, by("`hidden_size` / `num_heads`")),
      integer("ffn_hidden_size", &T::ffn_hidden_size, "100", 1, most_ffn_hidden)
          .means("inner width of the MLP", shapes,
                 by("gpt2 and bert 4 · `hidden_size`; others 8/3 of it, up to a multiple of 64"))};
}

/// The parts of its blocks.
std::vector<Key<Model>> block_keys() {
  using T = Model;
  return {
      boolean("causal", &T::causal)
          .means("a token sees those before it alone; false: all of its document, as in an encoder (BERT)"),
      choice("position", &T::position, position_types, "\"rotary\"")
          .means("rotary needs an even head size; relative, a bias of scores by distance, an `encoder` (T5)",
                 shapes),
      real("rotary_base", &T::rotary_base, "5e5", 1, infinity, true)
          .means("of rotary positions (`rope_theta`)", idle(is_learned, learned)),
      real("partial_rotary_factor", &T::partial_rotary_factor, "0.5", 0, 1, true)
          .means("share of a head's elements, the first ones, that rotary positions turn",
                 idle(is_learned, learned)),
      integer("sliding_window", &T::sliding_window, "16", 0, most_positions)
          .means(
              "tokens that a query sees, itself among them, and without `causal` as many behind it; others "
              "are neither seen nor computed. 0: all",
              idle(why_all_seen)),
      layer_types_key().means(
          "which layers have the window, and which `linear_attention` in the place of attention: a pattern "
          "that "
          "repeats over them. `[]`: all have the window. gemma3_text, olmo3 and modernbert have patterns of "
          "their own, where there is a window",
          by("`[]`; of qwen3_next, qwen3_5_text and qwen3_5_moe_text three of `linear_attention`, then one "
             "of `full_attention`")),
      integer("no_rope_layer_interval", &T::no_rope_layer_interval, "2", 0, most_layers)
          .means("of each so many layers the last has no rotary positions (SmolLM3). 0: all have",
                 idle(is_learned, learned)),
      real("llama_4_scaling_beta", &T::llama_4_scaling_beta, "0.1", 0, infinity)
          .means("β: rotary positions multiply queries at position p by 1 + β · ln(1 + ⌊p / n⌋), n being "
                 "`rope_scaling`'s `original_max_position_embeddings` or else `max_positions` (Ministral 3)",
                 idle(is_learned, learned)),
      integer("relative_attention_num_buckets", &T::relative_attention_num_buckets, "16", 4, most_buckets)
          .means(
              "relative positions: biases of a head by distance; the first half are of one distance each, "
              "the "
              "others of ranges that grow up to `relative_attention_max_distance`. An encoder's half are for "
              "tokens behind",
              shapes, idle(has_no_encoder, not_relative)),
      integer("relative_attention_max_distance", &T::relative_attention_max_distance, "64", 2, most_positions)
          .means("relative positions: tokens from here on share a bias", idle(has_no_encoder, not_relative)),
      boolean("qk_norm", &T::qk_norm)
          .means("RMSNorm of each query and key head, before rotary positions", shapes),
      boolean("qk_norm_all_heads", &T::qk_norm_all_heads)
          .means("with `qk_norm`: one norm of all query heads of a token together, and one of its key heads "
                 "(OLMo 2); not over tensor ranks",
                 shapes, idle(has_no_qk_norm, "no effect without model.qk_norm")),
      boolean("attention_sinks", &T::attention_sinks)
          .means(
              "a learned score of each head beside those of the keys, whose value is 0: a query may look at "
              "nothing (GPT-OSS)",
              shapes),
      real("attn_logit_softcapping", &T::attn_logit_softcapping, "50", 0)
          .means("attention's scores s become c·tanh(s/c) (Gemma 2); 0: they do not", shapes),
      real("final_logit_softcapping", &T::final_logit_softcapping, "30", 0)
          .means("as `attn_logit_softcapping`, of the vocabulary's scores", shapes),
      choice("norm", &T::norm, norm_names, "\"rmsnorm\"").means("of blocks, and before the head", shapes),
      boolean("norm_bias", &T::norm_bias)
          .means("LayerNorm has a bias (ModernBERT's has none)", shapes,
                 idle([](const Config& c) { return c.model->norm == Norm::rmsnorm; },
                      "no effect: RMSNorm has no bias")),
      real("norm_epsilon", &T::norm_epsilon, "1e-6", 0, infinity, true).means("added to the variance"),
      boolean("norm_unit_offset", &T::norm_unit_offset)
          .means("RMSNorm multiplies by 1 + its weight, which begins as 0 (Gemma)", shapes),
      choice("norm_placement", &T::norm_placement, placement_names, "\"sandwich\"")
          .means("norms of a block before its parts, behind them (OLMo 2), on both sides (Gemma), or behind "
                 "the sums of its parts and what they were given (BERT)",
                 shapes),
      choice("activation", &T::activation, activation_names, "\"swiglu\"")
          .means("of the MLP; gelu is x·Φ(x), gelu_tanh its approximation; relu2 is relu's square; swiglu, "
                 "geglu and geglu_tanh have a "
                 "gate; swiglu_clamped is GPT-OSS's, g·sigmoid(1.702·g)·(u + 1) with gate and up within 7",
                 shapes),
      real("dropout", &T::dropout, "0.2", 0, 0.99)
          .means("share dropped of what blocks add to the residual stream"),
      real("attention_dropout", &T::attention_dropout, "0.2", 0, 0.99)
          .means("of attention's weights", by("`dropout`")),
      real("embedding_dropout", &T::embedding_dropout, "0.2", 0, 0.99)
          .means("of the embeddings' sum, and with `encoder` behind both last norms", by("`dropout`")),
      real("ffn_dropout", &T::ffn_dropout, "0.2", 0, 0.99)
          .means("of what the MLP's activation gives; of relative positions, not given, `dropout` (T5)"),
      integer("token_types", &T::token_types, "2", 0, most_token_types)
          .means("rows of a table of types of tokens (`type_vocab_size`), whose first is every token's where "
                 "data do not say others; 0: none",
                 shapes),
      boolean("embedding_norm", &T::embedding_norm)
          .means("a norm behind the embeddings' sum, and none before the first layer's attention (BERT)",
                 shapes),
      boolean("scale_embeddings", &T::scale_embeddings)
          .means("embeddings are multiplied by √`hidden_size` (Gemma)", shapes),
      real("embedding_multiplier", &T::embedding_multiplier, "12", -infinity, infinity)
          .means("of the embeddings (Granite)"),
      real("residual_multiplier", &T::residual_multiplier, "0.22", -infinity, infinity)
          .means("of what blocks add to the residual stream (Granite)"),
      real("attention_multiplier", &T::attention_multiplier, "0.0625", 0, infinity, true)
          .unset(0.0)
          .means("of queries times keys (Granite; Gemma's `query_pre_attn_scalar` to the power of -1/2)",
                 by("1/√`head_dim`")),
      real("logits_scaling", &T::logits_scaling, "8", 0, infinity, true)
          .means("that the vocabulary's scores are divided by (Granite); of relative positions with "
                 "`tie_embeddings`, not given, √`hidden_size` (T5)"),
      boolean("attention_gate", &T::attention_gate)
          .means("what attention finds is multiplied by the sigmoid of a projection of the same input "
                 "(Qwen3-Next)",
                 shapes),
      choice("head", &T::head, head_names, "\"mlm\"")
          .means(
              "behind the blocks: `lm`, scores of the vocabulary; `mlm`, BERT's, a linear layer, the "
              "activation, a norm, and scores with a bias; `sequence_classification`, scores of `labels` by "
              "the first token of a text ([more](data.md#classification)), `token_classification`, of each "
              "token ([more](data.md#labels-of-tokens)); `pretraining`, BERT's, that of `mlm` and beside "
              "it whether a text goes on with the one before ([more](data.md#next-sentences)); `reward`, one "
              "number by the last token of a text ([more](preferences.md#reward-models))",
              shapes),
      labels_key().means("names of the classes of `sequence_classification` or `token_classification`, in "
                         "the order of their "
                         "scores",
                         shapes),
      boolean("tie_embeddings", &T::tie_embeddings).means("the output projection is the embedding", shapes),
      boolean("bias", &T::bias).means("of the blocks' linear layers", shapes),
      boolean("mlp_bias", &T::mlp_bias)
          .means("with `bias`: feed-forward parts and experts have one too", shapes,
                 idle([](const Config& c) { return !c.model->bias; }, "no effect: bias is false")),
      boolean("qkv_bias", &T::qkv_bias)
          .means("of the projection to queries, keys and values", shapes, by("`bias`; qwen2 `true`")),
      real("init_std", &T::init_std, "0.01", 0, infinity, true)
          .means("of normal initial weights; divided by √(2 · layers) where they feed the residual stream",
                 Concerns::run),
      boolean("width_scaled_init", &T::width_scaled_init)
          .means("weights of linear layers begin with `init_std` over the root of their inputs, those of "
                 "queries "
                 "also of `head_dim`, and nothing is divided by layers (T5)",
                 Concerns::run),
      integer("decoder_start_token_id", &T::decoder_start_token_id, "1", 0, most_vocabulary)
          .means("the token in front of what a decoder behind an encoder writes",
                 idle(has_no_encoder, "no effect without model.encoder")),
      section("encoder", &T::encoder, encoder_table()).with(unless_default),
      section("rope_scaling", &T::rope_scaling, rope_table()).with(unless_default, idle(is_learned, learned)),
      section("sliding_rope", &T::sliding_rope, sliding_rope_table())
          .with(unless_default, idle(why_no_window)),
      section("mla", &T::mla, mla_table()).with(unless_default),
      section("linear_attention", &T::linear_attention, linear_table())
          .with(unless_default, idle([](const Config& c) { return !c.model->any_linear(); },
                                     "no effect without linear_attention in model.layer_types")),
      section("moe", &T::moe, moe_table()).with(unless_default)};
}

/// Fills in values that follow from the keys that were given, once all are read.
void fill(Model& model, const Given& given, const Value& section) {
  if (!given.contains("attention_dropout")) model.attention_dropout = model.dropout;
  if (!given.contains("embedding_dropout")) model.embedding_dropout = model.dropout;
  if (!given.contains("ffn_dropout") && model.position == PositionType::relative)
    model.ffn_dropout = model.dropout;
  if (!given.contains("logits_scaling") && model.position == PositionType::relative && model.tie_embeddings)
    model.logits_scaling = std::sqrt(static_cast<double>(model.hidden_size));
  if (!given.contains("qkv_bias")) model.qkv_bias = model.bias || defaults_of(model.type).qkv_bias;
  try {
    model = resolved(model);
  } catch (const Error& error) {
    section.error(error.what());
  }
}

void read_model(Config& config, const Value& section) {
  section.expect(Node::Kind::object);
  std::size_t type = 0;
  if (const Node* given = section.node.find("type"); given && !given->is(Node::Kind::null))
    type = section.at("type").choice(family_names());
  Model model = defaults_of(static_cast<ModelType>(type));
  const Given given = read_section(model_table(), model, section);
  for (const char* name : {"seq_length", "hidden_size", "num_layers", "num_heads"})
    if (!given.contains(name)) section.error("needs \"", name, "\"");
  fill(model, given, section);
  if (given.contains("moe")) finish_moe(model.moe, section.at("moe"));
  config.model = model;
}

}  // namespace

const Table<Model>& model_table() {
  static const Table<Model> table = [] {
    Table<Model> out{Auto::is_a_value, size_keys()};
    append(out.keys, block_keys());
    return out;
  }();
  return table;
}

Key<Config> model_key() {
  Key<Config> key = section("model", &Config::model, model_table());
  key.read = read_model;
  return key;
}

std::string_view name_of(PositionType type) {
  return position_types[static_cast<std::size_t>(type)];
}
std::string_view name_of(Norm norm) {
  return norm_names[static_cast<std::size_t>(norm)];
}
std::string_view name_of(FfnActivation activation) {
  return activation_names[static_cast<std::size_t>(activation)];
}
std::string_view name_of(NormPlacement placement) {
  return placement_names[static_cast<std::size_t>(placement)];
}
std::string_view name_of(Head head) {
  return head_names[static_cast<std::size_t>(head)];
}
std::string_view name_of(LayerType type) {
  return layer_type_names[static_cast<std::size_t>(type)];
}

}  // namespace sherd::config
