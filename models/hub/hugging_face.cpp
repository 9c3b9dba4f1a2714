#include "models/hub/hugging_face.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <cstring>
#include <tuple>

#include "models/hub/adapter_names.h"
#include "models/hub/config_json.h"

namespace sherd::models {
namespace {

using tensor::Shape;

/// A parameter of so many rows, published as tensors of equally many that follow each other in it. `columns`
/// 0: vectors.
PublishedParameter stacked(const std::vector<std::string>& names, std::int64_t rows, std::int64_t columns,
                           bool transposed = false) {
  const std::int64_t each = rows / std::ssize(names);
  transposed = transposed && columns > 0;
  PublishedParameter out;
  out.columns = columns == 0 ? 1 : columns;
  for (const std::string& name : names) {
    const auto index = static_cast<int>(out.tensors.size());
    out.tensors.push_back({name,
                           columns == 0 ? Shape{each}
                           : transposed ? Shape{columns, each}
                                        : Shape{each, columns},
                           transposed});
    out.rows.push_back({index * each, each, index, 0});
  }
  return out;
}

/// Rows of linear attention's key heads, whose queries, keys and values lie apart there.
std::vector<PublishedParameter::RowRun> grouped_rows(const config::LinearAttention& l) {
  std::vector<PublishedParameter::RowRun> out;
  const std::int64_t dk = l.key_head_dim, values = l.value_width() / l.num_key_heads, group = 2 * dk + values;
  for (std::int64_t g = 0; g < l.num_key_heads; ++g) {
    out.push_back({g * group, dk, 0, g * dk});
    out.push_back({g * group + dk, dk, 0, l.key_width() + g * dk});
    out.push_back({g * group + 2 * dk, values, 0, 2 * l.key_width() + g * values});
  }
  return out;
}

/// A table of the vocabulary's rows, of which the last only pad it.
PublishedParameter padded(PublishedParameter table, std::int64_t rows, std::int64_t padding) {
  if (padding > 0) table.rows.push_back({rows, padding, -1, 0});
  return table;
}

}  // namespace

tensor::Shape PublishedTensor::in_file() const {
  if (stacked == 0) return shape;
  if (stack != Stack::tensors) {
    const bool rows = stack == Stack::rows;
    return {(rows ? stacked : 1) * shape[0], (rows ? 1 : stacked) * shape[1]};
  }
  std::vector<std::int64_t> dims{stacked};
  for (const std::int64_t extent : shape.dims()) dims.push_back(extent);
  return Shape{std::span<const std::int64_t>(dims)};
}

HuggingFaceLayout::HuggingFaceLayout(const GptConfig& config)
    : config_(config.resolved()), family_(&family_of(published_as(config_))) {}

PublishedParameter HuggingFaceLayout::of_qkv(const std::string& at, const std::string& kind) const {
  const GptConfig& c = config_;
  const std::int64_t columns = kind == "weight" ? c.hidden_size : 0;
  const std::int64_t d = c.head_dim, each = c.num_heads / c.num_kv_heads;
  const std::vector<std::string>& names = family_->names.qkv;
  const bool one = names.size() == 1;
  const std::int64_t heads[3] = {c.num_heads, c.num_kv_heads, c.num_kv_heads};
  std::int64_t starts[3] = {0, 0, 0};  // the first row of queries, keys and values in their tensor
  if (one) starts[1] = heads[0] * d, starts[2] = (heads[0] + heads[1]) * d;
  PublishedParameter out;
  for (std::size_t i = 0; i < names.size(); ++i) {
    const bool gated = i == 0 && c.attention_gate;
    PublishedParameter tensor =
        stacked({at + names[i] + "." + kind}, one ? c.qkv_width() : (gated ? 2 : 1) * heads[i] * d, columns,
                family_->names.transposed);
    out.columns = tensor.columns;
    out.tensors.push_back(std::move(tensor.tensors[0]));
  }
  std::int64_t row = 0;
  const auto append = [&](int part, std::int64_t first_head, std::int64_t count) {
    const int tensor = one ? 0 : part;
    const std::int64_t from = starts[part] + first_head * d;
    if (part < 2 && family_->names.interleaved)
      for (std::int64_t h = 0; h < count; ++h) {
        const std::int64_t turned = tensor::rotary_size({.share = c.partial_rotary_factor}, d),
                           own = row + h * d;
        append_pairs(out.rows, own, tensor, from + h * d, turned);
        if (turned < d) out.rows.push_back({own + turned, d - turned, tensor, from + h * d + turned});
      }
    else if (part == 0 && c.attention_gate)  // each head's gate follows it
      for (std::int64_t h = 0; h < count; ++h)
        out.rows.push_back({row + h * d, d, tensor, 2 * (from + h * d)});
    else
      out.rows.push_back({row, count * d, tensor, from});
    row += count * d;
  };
  for (std::int64_t g = 0; g < c.num_kv_heads; ++g)
    append(0, g * each, each), append(1, g, 1), append(2, g, 1);
  return out;
}

/// Rows of which 2i and 2i + 1 turn together: here these are i and i + turned/2.
void HuggingFaceLayout::append_pairs(std::vector<PublishedParameter::RowRun>& rows, std::int64_t row,
                                     int tensor, std::int64_t from, std::int64_t turned) const {
  for (std::int64_t i = 0; i < turned; ++i)
    rows.push_back({row + i, 1, tensor, from + (i < turned / 2 ? 2 * i : 2 * (i - turned / 2) + 1)});
}

/// The weight `part` of a layer of latent attention. Of a head's queries those that turn come first here, and
/// behind the others there.
std::optional<PublishedParameter> HuggingFaceLayout::of_latents(const std::string& at,
                                                                const std::string& part) const {
  const GptConfig& c = config_;
  const config::Mla& mla = c.mla;
  const std::int64_t turn = mla.qk_rope_head_dim, rank = mla.kv_lora_rank;
  const auto matrix = [&](const std::string& name, std::int64_t rows, std::int64_t columns) {
    return stacked({at + name + ".weight"}, rows, columns);
  };
  const auto append_turning = [&](PublishedParameter& to, std::int64_t row, std::int64_t from) {
    if (names().interleaved)
      append_pairs(to.rows, row, 0, from, turn);
    else
      to.rows.push_back({row, turn, 0, from});
  };
  if (part == "q" || part == "q_up") {
    const bool straight = part == "q";
    PublishedParameter out = matrix(straight ? names().q : names().q_up, c.num_heads * c.head_dim,
                                    straight ? c.hidden_size : mla.q_lora_rank);
    out.rows.clear();
    for (std::int64_t row = 0; row < c.num_heads * c.head_dim; row += c.head_dim) {
      append_turning(out, row, row + mla.qk_nope_head_dim);
      out.rows.push_back({row + turn, mla.qk_nope_head_dim, 0, row});
    }
    return out;
  }
  if (part == "kv_down") {
    PublishedParameter out = matrix(names().kv_down, rank + turn, c.hidden_size);
    out.rows = {{0, rank, 0, 0}};
    append_turning(out, rank, rank);
    return out;
  }
  if (part == "q_down") return matrix(names().q_down, mla.q_lora_rank, c.hidden_size);
  if (part == "q_norm") return matrix(names().q_latent_norm, mla.q_lora_rank, 0);
  if (part == "kv_norm") return matrix(names().kv_latent_norm, rank, 0);
  if (part == "kv_up")
    return matrix(names().kv_up, c.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim), rank);
  if (part == "projection") return matrix(names().projection, c.hidden_size, c.num_heads * mla.v_head_dim);
  return std::nullopt;
}

/// The gates of attention's heads, which lie behind the heads' queries.
PublishedParameter HuggingFaceLayout::of_gates(const std::string& at, const std::string& kind) const {
  const GptConfig& c = config_;
  const std::int64_t d = c.head_dim;
  PublishedParameter out =
      stacked({at + names().qkv[0] + "." + kind}, 2 * c.num_heads * d, kind == "weight" ? c.hidden_size : 0);
  out.rows.clear();
  for (std::int64_t h = 0; h < c.num_heads; ++h) out.rows.push_back({h * d, d, 0, (2 * h + 1) * d});
  return out;
}

/// A part of a layer of linear attention, as TensorNames::linear says.
std::optional<PublishedParameter> HuggingFaceLayout::of_linear(const std::string& at,
                                                               const std::string& part) const {
  const config::LinearAttention& l = config_.linear_attention;
  const LinearNames& own = names().linear;
  const std::int64_t hidden = config_.hidden_size, keys = l.num_key_heads, dk = l.key_head_dim,
                     values = l.value_width() / keys, group = 2 * dk + values,
                     repeats = l.num_value_heads / keys;
  const auto named = [&](const std::string& name) { return at + own.prefix + "." + name; };
  if (part == "z.weight" || part == "qkv.weight") {
    const bool z = part == "z.weight";
    if (!own.grouped && z) return stacked({named(own.z) + ".weight"}, l.value_width(), hidden);
    const std::int64_t all = own.grouped ? l.width() + l.value_width() : l.width();
    PublishedParameter out = stacked({named(own.qkv) + ".weight"}, all, hidden);
    if (own.grouped) {  // of each key head also z
      out.rows.clear();
      for (std::int64_t g = 0; g < keys; ++g)
        out.rows.push_back(z ? PublishedParameter::RowRun{g * values, values, 0, g * (group + values) + group}
                             : PublishedParameter::RowRun{g * group, group, 0, g * (group + values)});
    } else {
      out.rows = grouped_rows(l);
    }
    return out;
  }
  if (part == "conv") {
    PublishedParameter out = stacked({named("conv1d.weight")}, l.width(), l.conv_kernel_dim);
    out.tensors[0].shape = {l.width(), 1, l.conv_kernel_dim};
    out.rows = grouped_rows(l);
    return out;
  }
  if (part == "ba.weight") {
    if (own.ba.size() == 1) return stacked({named(own.ba[0]) + ".weight"}, 2 * l.num_value_heads, hidden);
    PublishedParameter out =
        stacked({named(own.ba[0]) + ".weight", named(own.ba[1]) + ".weight"}, 2 * l.num_value_heads, hidden);
    out.rows.clear();
    for (std::int64_t g = 0; g < keys; ++g)
      for (const int which : {0, 1})
        out.rows.push_back({(2 * g + which) * repeats, repeats, which, g * repeats});
    return out;
  }
  if (part == "a_log") return stacked({named("A_log")}, l.num_value_heads, 0);
  if (part == "dt_bias") return stacked({named("dt_bias")}, l.num_value_heads, 0);
  if (part == "norm.weight") return stacked({named("norm.weight")}, l.value_head_dim, 0);
  if (part == "projection.weight") return stacked({named("out_proj.weight")}, hidden, l.value_width());
  return std::nullopt;
}

/// A matrix or a bias of an expert that lies in one tensor with all others'.
PublishedParameter HuggingFaceLayout::of_stacked(const std::string& at, std::int64_t expert, bool up,
                                                 const std::string& kind) const {
  const config::Moe& moe = config_.moe;
  const bool matrix = kind == "weight", pairs = up && config_.gated();
  const std::int64_t width = moe.ffn_hidden_size, hidden = config_.hidden_size,
                     rows = !up ? hidden : (pairs ? 2 : 1) * width;
  const std::string name =
      cat(at, names().experts, ".", up ? names().expert_up[0] : names().expert_down, matrix ? "" : "_bias");
  PublishedParameter out = stacked({name}, rows, !matrix ? 0 : up ? hidden : width, true);
  out.tensors[0].place = expert, out.tensors[0].stacked = moe.experts;
  if (!pairs) return out;
  out.rows.clear();  // gates, then ups
  for (std::int64_t row = 0; row < rows; ++row)
    out.rows.push_back({row, 1, 0, row < width ? 2 * row : 2 * (row - width) + 1});
  return out;
}

/// A parameter of a layer of experts: "router", "experts.3.up" or "experts.3.down".
std::optional<PublishedParameter> HuggingFaceLayout::of_experts(const std::string& at,
                                                                const std::string& part,
                                                                const std::string& kind) const {
  const config::Moe& moe = config_.moe;
  const bool matrix = kind == "weight";
  const std::int64_t hidden = config_.hidden_size, width = moe.ffn_hidden_size;
  if (part == "router" && (matrix || moe.router_bias))
    return stacked({at + names().router + "." + kind}, moe.experts, matrix ? hidden : 0);
  if (matrix && part == "shared_gate") return stacked({at + names().shared_gate + ".weight"}, 1, hidden);
  if (matrix && (part == "shared.up" || part == "shared.down")) {
    const std::string shared = at + names().shared + ".";
    if (part.ends_with("down"))
      return stacked({shared + names().expert_down + ".weight"}, hidden, moe.shared_experts * width);
    std::vector<std::string> tensors;
    for (const std::string& name : names().expert_up) tensors.push_back(shared + name + ".weight");
    return stacked(tensors, (config_.gated() ? 2 : 1) * moe.shared_experts * width, hidden);
  }
  const std::size_t dot = part.rfind('.'), number = std::strlen("experts.");
  if (!part.starts_with("experts.") || dot < number || !(matrix || config_.has_mlp_bias()))
    return std::nullopt;
  const std::string expert = part.substr(number, dot - number);
  const bool up = part.substr(dot + 1) == "up";
  if (names().stacked_experts) return of_stacked(at, std::stoll(expert), up, kind);
  if (experts_stacked_ && matrix) {
    PublishedParameter out = stacked({cat(at, names().experts, up ? ".gate_up_proj" : ".down_proj")},
                                     up ? (config_.gated() ? 2 : 1) * width : hidden, up ? hidden : width);
    out.tensors[0].place = std::stoll(expert), out.tensors[0].stacked = moe.experts;
    return out;
  }
  std::vector<std::string> tensors;
  for (const std::string& name : up ? names().expert_up : std::vector{names().expert_down})
    tensors.push_back(cat(at, names().experts, ".", expert, ".", name, ".", kind));
  const std::int64_t rows = !up ? hidden : (config_.gated() ? 2 : 1) * width;
  return stacked(tensors, rows, !matrix ? 0 : up ? hidden : width);
}

std::optional<PublishedParameter> HuggingFaceLayout::among_experts(const std::string& parameter) const {
  const std::size_t at = parameter.find(".mlp.experts.");
  if (at == std::string::npos || !parameter.ends_with(".weight")) return std::nullopt;
  HuggingFaceLayout stacks = *this;
  stacks.experts_stacked_ = true;
  PublishedParameter out = stacks.plainly_published(parameter);
  const std::string block = parameter.substr(std::strlen("blocks."), at - std::strlen("blocks."));
  std::string& name = out.tensors[0].name;
  name = at_block(block) + "mlp.experts" + name.substr(name.rfind('.'));
  return out;
}

std::string HuggingFaceLayout::stacked_experts() const {
  for (std::int64_t i = 0; i < config_.num_layers && !names().stacked_experts; ++i)
    if (config_.moe.in(i)) return cat(at_block(std::to_string(i)), names().experts, ".gate_up_proj");
  return {};
}

std::string HuggingFaceLayout::at_block(const std::string& block) const {
  if (config_.has_encoder()) {
    const std::int64_t layer = std::stoll(block), first = config_.encoder.num_layers;
    return config_.encodes(layer) ? cat(prefix(), family_->encoder_names.blocks, ".", layer, ".")
                                  : cat(prefix(), names().blocks, ".", layer - first, ".");
  }
  return cat(prefix(), names().blocks, ".", block, ".");
}

/// A parameter of an encoder's block, or of the decoder's behind it.
std::optional<PublishedParameter> HuggingFaceLayout::of_stacks(std::int64_t layer, const std::string& part,
                                                               const std::string& kind) const {
  const GptConfig& c = config_;
  const TensorNames& own = c.encodes(layer) ? family_->encoder_names : names();
  const std::string at = at_block(std::to_string(layer));
  const std::int64_t heads = c.num_heads * c.head_dim;
  const auto found = [&](const std::vector<std::string>& called, std::int64_t rows, std::int64_t columns) {
    std::vector<std::string> tensors;
    for (const std::string& name : called) tensors.push_back(cat(at, name, ".weight"));
    return stacked(tensors, rows, columns);
  };
  if (kind != "weight") return std::nullopt;
  if (part == "output_norm") return stacked({cat(prefix(), own.norm, ".weight")}, c.hidden_size, 0);
  for (const auto& [name, norm] : {std::pair("norm_1", &TensorNames::norm_1),
                                   {"norm_2", &TensorNames::norm_2},
                                   {"cross_norm", &TensorNames::cross_norm}})
    if (part == name) return found({own.*norm}, c.hidden_size, 0);
  for (const auto& [name, qkv, projection] :
       {std::tuple("attention.", &TensorNames::qkv, &TensorNames::projection),
        {"cross_attention.", &TensorNames::cross_qkv, &TensorNames::cross_projection}}) {
    const std::vector<std::string>& names = own.*qkv;
    if (part == cat(name, "q")) return found({names[0]}, heads, c.hidden_size);
    if (part == cat(name, "kv")) return found({names[1], names[2]}, 2 * heads, c.hidden_size);
    if (part == cat(name, "projection")) return found({own.*projection}, c.hidden_size, heads);
  }
  if (part == "mlp.up")
    return found(c.gated() ? own.up : std::vector{own.plain_up}, (c.gated() ? 2 : 1) * c.ffn_hidden_size,
                 c.hidden_size);
  if (part == "mlp.down") return found({own.down}, c.hidden_size, c.ffn_hidden_size);
  return std::nullopt;
}

std::optional<PublishedParameter> HuggingFaceLayout::of_block(const std::string& layer,
                                                              const std::string& part,
                                                              const std::string& kind) const {
  const GptConfig& c = config_;
  const std::string at = at_block(layer);
  const bool matrix = kind == "weight";
  if (c.has_encoder()) return of_stacks(std::stoll(layer), part, kind);
  if (part == "attention" && kind == "sinks") return stacked({at + names().sinks}, c.num_heads, 0);
  if (c.linear(std::stoll(layer)) && part.starts_with("attention"))
    return of_linear(at, (part + "." + kind).substr(std::strlen("attention.")));
  if (!matrix && kind != "bias") return std::nullopt;
  constexpr std::string_view attention = "attention.";
  if (matrix && c.mla.kv_lora_rank > 0 && part.starts_with(attention))
    return of_latents(at, part.substr(attention.size()));
  if (part == "attention.qkv") return of_qkv(at, kind);
  if (part == "attention.gate") return of_gates(at, kind);
  const auto linear = [&](const std::vector<std::string>& names, std::int64_t rows, std::int64_t columns) {
    std::vector<std::string> tensors;
    for (const std::string& name : names) tensors.push_back(at + name + "." + kind);
    return stacked(tensors, rows, matrix ? columns : 0, family_->names.transposed);
  };
  if (matrix && c.qk_norm && (part == "attention.q_norm" || part == "attention.k_norm"))
    return linear({part.ends_with("q_norm") ? names().q_norm : names().k_norm},
                  c.head_dim * (!c.qk_norm_all_heads       ? 1
                                : part.ends_with("q_norm") ? c.num_heads
                                                           : c.num_kv_heads),
                  0);
  if (c.moe.experts > 0 && part.starts_with("mlp."))
    if (auto found = of_experts(at, part.substr(std::strlen("mlp.")), kind)) return found;
  if (!matrix && !c.bias) return std::nullopt;
  for (const auto& [own, name] : {std::pair("norm_1", &TensorNames::norm_1),
                                  {"norm_2", &TensorNames::norm_2},
                                  {"post_norm_1", &TensorNames::post_norm_1},
                                  {"post_norm_2", &TensorNames::post_norm_2}})
    if (part == own) return stacked({at + names().*name + "." + kind}, c.hidden_size, 0);
  if (part == "attention.projection")
    return linear({names().projection}, c.hidden_size, c.num_heads * c.head_dim);
  if (part == "mlp.up") return linear(names().up, (c.gated() ? 2 : 1) * c.ffn_hidden_size, c.hidden_size);
  if (part == "mlp.down") return linear({names().down}, c.hidden_size, c.ffn_hidden_size);
  return std::nullopt;
}

std::vector<std::pair<std::string, PublishedTensor>> HuggingFaceLayout::states() const {
  std::vector<std::pair<std::string, PublishedTensor>> out;
  const config::Moe& moe = config_.moe;
  for (std::int64_t i = 0; i < config_.num_layers && moe.correction_bias; ++i)
    if (moe.in(i))
      out.emplace_back(cat("blocks.", i, ".mlp"),
                       PublishedTensor{at_block(std::to_string(i)) + names().correction_bias, {moe.experts}});
  return out;
}

std::vector<std::string> HuggingFaceLayout::copies_of_tokens() const {
  std::vector<std::string> out;
  for (const std::string& name : names().copies) out.push_back(cat(prefix(), name, ".weight"));
  return out;
}

bool HuggingFaceLayout::passes_over(const std::string& tensor) const {
  std::vector<std::string> begins = names().passed_over;
  if (const std::string blocks = cat(prefix(), names().blocks, ".");
      names().more_layers && tensor.starts_with(blocks)) {
    const char* number = tensor.c_str() + blocks.size();
    if (std::isdigit(static_cast<unsigned char>(*number)) && std::atoll(number) >= config_.num_layers)
      return true;
  }
  if (config_.scores_texts())  // and files have the head for masked tokens, or for other labels
    for (const std::string& part :
         {names().head, names().head_dense, names().head_norm, names().head_bias, names().classifier})
      if (!part.empty()) begins.push_back(part + ".");
  return std::any_of(begins.begin(), begins.end(),
                     [&](const std::string& begin) { return tensor.starts_with(begin); });
}

/// The parameter of a layer before or behind the blocks, but for the vocabulary's tables; nothing for others.
std::optional<PublishedParameter> HuggingFaceLayout::of_table_or_norm(const std::string& parameter) const {
  const GptConfig& c = config_;
  const std::size_t dot = parameter.rfind('.');
  if (dot == std::string::npos) return std::nullopt;
  const std::string part = parameter.substr(0, dot), kind = parameter.substr(dot);
  const bool matrix = kind == ".weight";
  if (!matrix && !(kind == ".bias" && c.bias)) return std::nullopt;
  struct Place {
    const char* part;
    std::string name;
    std::int64_t rows, columns;  ///< 0 columns: a norm
  };
  for (const auto& [own, name, rows, columns] :
       {Place{"positions", prefix() + names().positions, c.max_positions, c.hidden_size},
        {"token_types", prefix() + names().token_types, c.token_types, c.hidden_size},
        {"embedding_norm", prefix() + names().embedding_norm, c.hidden_size, 0},
        {"norm", prefix() + names().norm, c.hidden_size, 0},
        {"head_dense", c.pools() ? prefix() + names().pooler : names().head_dense, c.hidden_size,
         c.hidden_size},
        {"pooler", prefix() + names().pooler, c.hidden_size, c.hidden_size},
        {"head_norm", names().head_norm, c.hidden_size, 0}})
    if (part == own && !name.empty() && name != prefix())
      return stacked({name + kind}, rows, matrix ? columns : 0);
  return std::nullopt;
}

HuggingFaceLayout HuggingFaceLayout::of_adapter() const {
  HuggingFaceLayout out = *this;
  out.in_front_ = "base_model.model.";
  return out;
}

PublishedParameter HuggingFaceLayout::published(const std::string& parameter) const {
  PublishedParameter out = plainly_published(parameter);
  if (parameter.find(".adapter.") == std::string::npos)
    for (PublishedTensor& tensor : out.tensors) tensor.name = in_front_ + tensor.name;
  return out;
}

PublishedParameter HuggingFaceLayout::plainly_published(const std::string& parameter) const {
  const GptConfig& c = config_;
  const std::size_t block = std::strlen("blocks.");
  if (const std::size_t at = parameter.find(".adapter."); at != std::string::npos) {
    const std::string layer = parameter.substr(0, at), name = parameter.substr(at + std::strlen(".adapter."));
    if (name == "rows") return published_rows(c, layer);
    if (layer == "tokens") return published_prompt(c, name);
    if (layer.find('.', block) == std::string::npos)
      return published_bottleneck(c, at_block(layer.substr(block)), name);
    return published_adapter(c, layer, name);
  }
  const std::int64_t padding = c.padded_vocab() - c.vocab_size;
  const auto table = [&](const std::string& name) {
    return padded(stacked({name}, c.vocab_size, c.hidden_size), c.vocab_size, padding);
  };
  if (parameter == "tokens.weight") return table(cat(prefix(), names().tokens, ".weight"));
  const std::int64_t extra = c.padded_scores() - c.scores();
  if (parameter == "head.weight" && !tied())
    return padded(stacked({plain_head()}, c.scores(), c.hidden_size), c.scores(), extra);
  if (parameter.starts_with("sentence_head."))
    return padded(stacked({names().sentence_head + parameter.substr(parameter.rfind('.'))}, sentence_scores,
                          parameter.ends_with(".weight") ? c.hidden_size : 0),
                  sentence_scores, padded_sentence_scores - sentence_scores);
  // A head of its own has a bias of its own.
  if (const std::string& bias = c.classifies() ? names().classifier
                                : tied()       ? names().head_bias
                                               : names().head;
      parameter == "head.bias" && !bias.empty())
    return padded(stacked({bias + ".bias"}, c.scores(), 0), c.scores(), extra);
  for (const auto& [own, layer] : {std::pair("encoder_positions.weight", std::int64_t{0}),
                                   {"decoder_positions.weight", c.encoder.num_layers}})
    if (parameter == own && c.has_encoder())
      return stacked({cat(at_block(std::to_string(layer)), names().positions_table, ".weight")}, c.num_heads,
                     c.relative_attention_num_buckets, true);
  if (auto found = of_table_or_norm(parameter)) return *std::move(found);
  const std::size_t rest = parameter.find('.', block), last = parameter.rfind('.');
  if (parameter.starts_with("blocks.") && rest != std::string::npos && last > rest)
    if (auto found = of_block(parameter.substr(block, rest - block),
                              parameter.substr(rest + 1, last - rest - 1), parameter.substr(last + 1)))
      return *std::move(found);
  fail(ErrorKind::usage, "no parameter of a GPT is named '", parameter, "'");
}

}  // namespace sherd::models
