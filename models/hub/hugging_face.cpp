#include "models/hub/hugging_face.h"

#include <cstring>

#include "models/adapters/adapters.h"

namespace sherd::models {
namespace {

using config::ModelType;
using tensor::Shape;

[[noreturn]] void no_such(const std::string& parameter) {
  fail(ErrorKind::usage, "no parameter of a GPT is named '", parameter, "'");
}

/// One tensor, all of whose rows follow each other in the parameter. `columns` 0: a vector.
PublishedParameter alone(std::string name, std::int64_t rows, std::int64_t columns, bool transposed = false,
                         std::int64_t padding = 0) {
  PublishedParameter out;
  out.columns = columns == 0 ? 1 : columns;
  out.tensors.push_back({std::move(name),
                         columns == 0 ? Shape{rows}
                         : transposed ? Shape{columns, rows}
                                      : Shape{rows, columns},
                         transposed});
  out.rows.push_back({0, rows, 0, 0});
  if (padding > 0) out.rows.push_back({rows, padding, -1, 0});
  return out;
}

/// Two matrices of as many rows, one behind the other.
PublishedParameter stacked(std::string first, std::string second, std::int64_t rows, std::int64_t columns) {
  PublishedParameter out = alone(std::move(first), rows, columns);
  out.tensors.push_back({std::move(second), {rows, columns}});
  out.rows.push_back({rows, rows, 1, 0});
  return out;
}

ModelType family_of(const GptOptions& o) {
  const bool gpt2 = o.norm == Norm::layer_norm && o.positions == PositionKind::learned &&
                    o.mlp != Mlp::swiglu && o.bias && o.kv_heads == o.heads &&
                    o.head_dim * o.heads == o.hidden && o.experts.count == 0;
  const bool llama =
      o.norm == Norm::rms_norm && o.positions == PositionKind::rotary && o.mlp == Mlp::swiglu && !o.bias;
  if (!gpt2 && !llama)
    fail(ErrorKind::config,
         "only GPT-2's shape (LayerNorm, learned positions, GELU, biases, one key-value head per "
         "head) and Llama's (RMSNorm, rotary positions, SwiGLU, no biases) have a Hugging Face layout");
  return gpt2 ? ModelType::gpt2 : o.experts.count > 0 ? ModelType::mixtral : ModelType::llama;
}

}  // namespace

HuggingFaceLayout::HuggingFaceLayout(const GptOptions& options, std::optional<ModelType> family)
    : options_(options.resolved()),
      family_(family ? *family : family_of(options_)),
      gpt2_(family_ == ModelType::gpt2) {}

PublishedParameter HuggingFaceLayout::of_qkv(const std::string& at, const std::string& kind) const {
  const GptOptions& o = options_;
  const bool matrix = kind == "weight";
  const std::int64_t d = o.head_dim, each = o.heads / o.kv_heads;
  const std::int64_t starts[3] = {0, o.heads * d, (o.heads + o.kv_heads) * d};
  PublishedParameter out;
  out.columns = matrix ? o.hidden : 1;
  if (gpt2_) {
    out = alone(at + "attn.c_attn." + kind, o.qkv_width(), matrix ? o.hidden : 0, matrix);
    out.rows.clear();
  } else {
    for (const auto& [name, heads] : {std::pair{"q", o.heads}, {"k", o.kv_heads}, {"v", o.kv_heads}})
      out.tensors.push_back({at + "self_attn." + name + "_proj." + kind,
                             matrix ? Shape{heads * d, o.hidden} : Shape{heads * d}});
  }
  std::int64_t row = 0;
  const auto append = [&](int part, std::int64_t first_head, std::int64_t heads) {
    const std::int64_t first = first_head * d;
    out.rows.push_back({row, heads * d, gpt2_ ? 0 : part, gpt2_ ? starts[part] + first : first});
    row += heads * d;
  };
  for (std::int64_t g = 0; g < o.kv_heads; ++g) append(0, g * each, each), append(1, g, 1), append(2, g, 1);
  return out;
}

PublishedParameter HuggingFaceLayout::of_expert(const std::string& at, const std::string& expert,
                                                bool up) const {
  const bool mixtral = family_ == ModelType::mixtral;
  const std::string in = at + "experts." + expert + ".";
  const std::int64_t f = options_.experts.ffn_hidden, h = options_.hidden;
  if (!up) return alone(in + (mixtral ? "w2.weight" : "down_proj.weight"), h, f);
  return stacked(in + (mixtral ? "w1.weight" : "gate_proj.weight"),
                 in + (mixtral ? "w3.weight" : "up_proj.weight"), f, h);
}

std::optional<PublishedParameter> HuggingFaceLayout::of_mlp(const std::string& at, const std::string& part,
                                                            const std::string& kind) const {
  const GptOptions& o = options_;
  const bool matrix = kind == "weight";
  const std::string name = at + "mlp.";
  if (part == "up") {
    if (gpt2_) return alone(name + "c_fc." + kind, o.ffn_hidden, matrix ? o.hidden : 0, matrix);
    if (matrix) return stacked(name + "gate_proj.weight", name + "up_proj.weight", o.ffn_hidden, o.hidden);
  }
  if (part == "down" && (gpt2_ || matrix))
    return alone(name + (gpt2_ ? "c_proj." : "down_proj.") + kind, o.hidden, matrix ? o.ffn_hidden : 0,
                 gpt2_ && matrix);
  const std::string experts = family_ == ModelType::mixtral ? at + "block_sparse_moe." : name;
  if (o.experts.count > 0 && part == "router" && matrix)
    return alone(experts + "gate.weight", o.experts.count, o.hidden);
  if (const std::size_t dot = part.rfind('.');
      matrix && o.experts.count > 0 && part.starts_with("experts.") && dot > 7)
    return of_expert(experts, part.substr(8, dot - 8), part.substr(dot + 1) == "up");
  return std::nullopt;
}

std::string HuggingFaceLayout::at_block(const std::string& block) const {
  return cat(gpt2_ ? "transformer.h." : "model.layers.", block, ".");
}

PublishedParameter HuggingFaceLayout::of_block(const std::string& parameter, const std::string& layer,
                                               const std::string& part, const std::string& kind) const {
  const GptOptions& o = options_;
  const std::string at = at_block(layer);
  const auto named = [&](const char* gpt2_name, const char* llama_name) {
    return at + (gpt2_ ? gpt2_name : llama_name) + "." + kind;
  };
  const bool matrix = kind == "weight";
  if (!matrix && kind != "bias") no_such(parameter);
  if (part == "norm_1" && (gpt2_ || matrix)) return alone(named("ln_1", "input_layernorm"), o.hidden, 0);
  if (part == "norm_2" && (gpt2_ || matrix))
    return alone(named("ln_2", "post_attention_layernorm"), o.hidden, 0);
  if (part == "attention.qkv") return of_qkv(at, kind);
  if (part == "attention.projection" && (gpt2_ || matrix))
    return alone(named("attn.c_proj", "self_attn.o_proj"), o.hidden, matrix ? o.heads * o.head_dim : 0,
                 gpt2_ && matrix);
  if (!gpt2_ && matrix && (part == "attention.q_norm" || part == "attention.k_norm"))
    return alone(at + "self_attn." + part.substr(part.find('.') + 1) + ".weight", o.head_dim, 0);
  if (part.starts_with("mlp."))
    if (auto found = of_mlp(at, part.substr(4), kind)) return *std::move(found);
  no_such(parameter);
}

PublishedParameter HuggingFaceLayout::published(const std::string& parameter) const {
  const GptOptions& o = options_;
  if (const std::size_t at = parameter.find(".adapter."); at != std::string::npos) {
    const std::string layer = parameter.substr(0, at);
    if (layer == "tokens") return published_prompt(o, parameter.substr(at + 9));
    const std::size_t block = std::strlen("blocks.");
    if (layer.find('.', block) == std::string::npos)
      return published_bottleneck(o, at_block(layer.substr(block)), parameter.substr(at + 9));
    return published_adapter(o.adapter, published(layer + ".weight"), parameter.substr(at + 9),
                             layer.ends_with("mlp.down"));
  }
  const std::int64_t padding = o.padded_vocab() - o.vocab_size;
  if (parameter == "tokens.weight")
    return alone(gpt2_ ? "transformer.wte.weight" : "model.embed_tokens.weight", o.vocab_size, o.hidden,
                 false, padding);
  if (parameter == "head.weight" && !o.tied_embeddings)
    return alone("lm_head.weight", o.vocab_size, o.hidden, false, padding);
  if (parameter == "positions.weight" && gpt2_)
    return alone("transformer.wpe.weight", o.position_rows, o.hidden);
  if (parameter == "norm.weight")
    return alone(gpt2_ ? "transformer.ln_f.weight" : "model.norm.weight", o.hidden, 0);
  if (parameter == "norm.bias" && gpt2_) return alone("transformer.ln_f.bias", o.hidden, 0);
  const std::size_t layer = std::strlen("blocks.");
  if (!parameter.starts_with("blocks.")) no_such(parameter);
  const std::size_t rest = parameter.find('.', layer), last = parameter.rfind('.');
  if (rest == std::string::npos || last <= rest) no_such(parameter);
  return of_block(parameter, parameter.substr(layer, rest - layer),
                  parameter.substr(rest + 1, last - rest - 1), parameter.substr(last + 1));
}

}  // namespace sherd::models
