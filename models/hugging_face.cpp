#include "models/hugging_face.h"

#include <cstring>
#include <numeric>

namespace sherd::models {
namespace {

using tensor::Shape;

std::int64_t total_rows(const auto& parts) {
  std::int64_t rows = 0;
  for (const auto& part : parts) rows += part.rows;
  return rows;
}

/// to[c, r] = from[r, c]
void transpose(const std::byte* from, std::int64_t rows, std::int64_t columns, std::size_t size,
               std::byte* to) {
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t c = 0; c < columns; ++c)
      std::memcpy(to + static_cast<std::size_t>(c * rows + r) * size,
                  from + static_cast<std::size_t>(r * columns + c) * size, size);
}

}  // namespace

HuggingFaceLayout::HuggingFaceLayout(const GptOptions& options) : options_(options.resolved()) {
  const GptOptions& o = options_;
  const bool gpt2 = o.norm == Norm::layer_norm && o.positions == PositionKind::learned &&
                    o.mlp != Mlp::swiglu && o.bias && o.kv_heads == o.heads &&
                    o.head_dim * o.heads == o.hidden && o.tied_embeddings;
  const bool llama = o.norm == Norm::rms_norm && o.positions == PositionKind::rotary && o.mlp == Mlp::swiglu;
  if (!gpt2 && !llama)
    fail(ErrorKind::config,
         "only GPT-2's shape (LayerNorm, learned positions, GELU, biases, one key-value head per "
         "head, tied tables) and Llama's (RMSNorm, rotary positions, SwiGLU) have a Hugging Face layout");
  gpt2_ = gpt2;
}

HuggingFaceLayout::Entry HuggingFaceLayout::block_entry(const std::string& parameter,
                                                        const std::string& layer, const std::string& part,
                                                        const std::string& kind) const {
  const GptOptions& o = options_;
  const std::string at = gpt2_ ? "transformer.h." + layer + "." : "model.layers." + layer + ".";
  const auto named = [&](const char* gpt2_name, const char* llama_name) {
    return at + (gpt2_ ? gpt2_name : llama_name) + "." + kind;
  };
  const bool matrix = kind == "weight";
  const auto product = [&](std::vector<Part> parts, std::int64_t in, bool qkv = false) {
    return Entry{std::move(parts), matrix ? in : 1, matrix, gpt2_ && matrix, qkv, 0};
  };
  const std::int64_t q = o.heads * o.head_dim, kv = o.kv_heads * o.head_dim, f = o.ffn_hidden;
  if (part == "norm_1") return {{{named("ln_1", "input_layernorm"), o.hidden}}};
  if (part == "norm_2") return {{{named("ln_2", "post_attention_layernorm"), o.hidden}}};
  if (part == "attention.qkv") {
    if (gpt2_) return product({{named("attn.c_attn", ""), q + 2 * kv}}, o.hidden, true);
    return product({{named("", "self_attn.q_proj"), q},
                    {named("", "self_attn.k_proj"), kv},
                    {named("", "self_attn.v_proj"), kv}},
                   o.hidden, true);
  }
  if (part == "attention.projection")
    return product({{named("attn.c_proj", "self_attn.o_proj"), o.hidden}}, q);
  if (part == "mlp.up") {
    if (gpt2_) return product({{named("mlp.c_fc", ""), f}}, o.hidden);
    return product({{named("", "mlp.gate_proj"), f}, {named("", "mlp.up_proj"), f}}, o.hidden);
  }
  if (part == "mlp.down") return product({{named("mlp.c_proj", "mlp.down_proj"), o.hidden}}, f);
  fail(ErrorKind::usage, "no parameter of a GPT is named '", parameter, "'");
}

HuggingFaceLayout::Entry HuggingFaceLayout::entry(const std::string& parameter) const {
  const GptOptions& o = options_;
  const std::int64_t padding = o.padded_vocab() - o.vocab_size;
  if (parameter == "tokens.weight")
    return {{{gpt2_ ? "transformer.wte.weight" : "model.embed_tokens.weight", o.vocab_size}},
            o.hidden,
            true,
            false,
            false,
            padding};
  if (parameter == "head.weight" && !o.tied_embeddings)
    return {{{"lm_head.weight", o.vocab_size}}, o.hidden, true, false, false, padding};
  if (parameter == "positions.weight" && gpt2_)
    return {{{"transformer.wpe.weight", o.max_seq}}, o.hidden, true};
  if (parameter == "norm.weight")
    return {{{gpt2_ ? "transformer.ln_f.weight" : "model.norm.weight", o.hidden}}};
  if (parameter == "norm.bias" && gpt2_) return {{{"transformer.ln_f.bias", o.hidden}}};
  const std::size_t layer = std::strlen("blocks."), rest = parameter.find('.', layer),
                    last = parameter.rfind('.');
  require(parameter.starts_with("blocks.") && rest != std::string::npos && last > rest,
          "no parameter of a GPT is named '", parameter, "'");
  return block_entry(parameter, parameter.substr(layer, rest - layer),
                     parameter.substr(rest + 1, last - rest - 1), parameter.substr(last + 1));
}

std::vector<std::int64_t> HuggingFaceLayout::qkv_rows() const {
  const std::int64_t d = options_.head_dim, heads = options_.heads, groups = options_.kv_heads;
  std::vector<std::int64_t> rows;
  const auto append = [&](std::int64_t head) {
    for (std::int64_t i = 0; i < d; ++i) rows.push_back(head * d + i);
  };
  for (std::int64_t g = 0; g < groups; ++g) {
    for (std::int64_t h = 0; h < heads / groups; ++h) append(g * (heads / groups) + h);
    append(heads + g);
    append(heads + groups + g);
  }
  return rows;
}

std::vector<std::string> HuggingFaceLayout::names(const std::string& parameter) const {
  std::vector<std::string> out;
  for (const Part& part : entry(parameter).parts) out.push_back(part.name);
  return out;
}

std::vector<std::pair<std::string, HostTensor>> HuggingFaceLayout::to(const std::string& parameter,
                                                                      const HostTensor& value) const {
  const Entry e = entry(parameter);
  const std::int64_t rows = total_rows(e.parts);
  const std::size_t size = size_of(value.dtype), row_bytes = static_cast<std::size_t>(e.columns) * size;
  require(value.shape.numel() == (rows + e.padding_rows) * e.columns &&
              value.bytes.size() == static_cast<std::size_t>(value.shape.numel()) * size,
          "parameter '", parameter, "' has ", rows + e.padding_rows, " rows of ", e.columns,
          ", not the shape ", value.shape.str());
  std::vector<std::byte> plain(
      value.bytes.begin(),
      value.bytes.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(rows) * row_bytes));
  if (e.grouped_qkv) {
    const std::vector<std::int64_t> source = qkv_rows();
    for (std::size_t i = 0; i < source.size(); ++i)
      std::memcpy(plain.data() + static_cast<std::size_t>(source[i]) * row_bytes,
                  value.bytes.data() + i * row_bytes, row_bytes);
  }
  std::vector<std::pair<std::string, HostTensor>> out;
  const std::byte* from = plain.data();
  for (const Part& part : e.parts) {
    HostTensor piece{e.matrix ? Shape{part.rows, e.columns} : Shape{part.rows}, value.dtype, {}};
    piece.bytes.assign(from, from + static_cast<std::size_t>(part.rows) * row_bytes);
    if (e.transposed) {
      transpose(from, part.rows, e.columns, size, piece.bytes.data());
      piece.shape = {e.columns, part.rows};
    }
    from += static_cast<std::size_t>(part.rows) * row_bytes;
    out.emplace_back(part.name, std::move(piece));
  }
  return out;
}

HostTensor HuggingFaceLayout::piece(const Entry& e, const Part& part, const HostTensorSource& source) const {
  constexpr std::string_view prefix = "transformer.";
  std::optional<HostTensor> found = source(part.name);
  if (!found && part.name.starts_with(prefix)) found = source(part.name.substr(prefix.size()));
  if (!found) fail(ErrorKind::data, "the state dict has no tensor '", part.name, "'");
  const Shape want = !e.matrix      ? Shape{part.rows}
                     : e.transposed ? Shape{e.columns, part.rows}
                                    : Shape{part.rows, e.columns};
  const std::size_t size = size_of(found->dtype);
  if (found->shape != want || found->bytes.size() != static_cast<std::size_t>(want.numel()) * size)
    fail(ErrorKind::data, "tensor '", part.name, "' has shape ", found->shape.str(),
         " where the model needs ", want.str());
  if (!e.transposed) return *std::move(found);
  HostTensor turned{{part.rows, e.columns}, found->dtype, std::vector<std::byte>(found->bytes.size())};
  transpose(found->bytes.data(), e.columns, part.rows, size, turned.bytes.data());
  return turned;
}

HostTensor HuggingFaceLayout::from(const std::string& parameter, const HostTensorSource& source) const {
  const Entry e = entry(parameter);
  const std::int64_t rows = total_rows(e.parts) + e.padding_rows;
  HostTensor out{e.matrix ? Shape{rows, e.columns} : Shape{rows}, DType::f32, {}};
  for (const Part& part : e.parts) {
    const HostTensor found = piece(e, part, source);
    if (out.bytes.empty()) out.dtype = found.dtype;
    if (found.dtype != out.dtype)
      fail(ErrorKind::data, "tensor '", part.name, "' holds ", name_of(found.dtype),
           " where its siblings hold ", name_of(out.dtype));
    out.bytes.insert(out.bytes.end(), found.bytes.begin(), found.bytes.end());
  }
  const std::size_t row_bytes = static_cast<std::size_t>(e.columns) * size_of(out.dtype);
  out.bytes.resize(static_cast<std::size_t>(rows) * row_bytes);  // rows that pad are zero
  if (e.grouped_qkv) {
    const std::vector<std::byte> ungrouped = out.bytes;
    const std::vector<std::int64_t> order = qkv_rows();
    for (std::size_t i = 0; i < order.size(); ++i)
      std::memcpy(out.bytes.data() + i * row_bytes,
                  ungrouped.data() + static_cast<std::size_t>(order[i]) * row_bytes, row_bytes);
  }
  return out;
}

}  // namespace sherd::models
