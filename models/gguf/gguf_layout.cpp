#include "models/gguf/gguf_layout.h"

#include <algorithm>
#include <cstring>
#include <string_view>
#include <tuple>

#include "models/gguf/gguf_metadata.h"
#include "models/hub/config_json.h"

namespace sherd::models {
namespace {

using tensor::Shape;

/// A block's layers and norms whose tensors have all their rows.
constexpr std::pair<std::string_view, const char*> whole_parts[] = {
    {"norm_1", "attn_norm"},
    {"attention.q_norm", "attn_q_norm"},
    {"attention.k_norm", "attn_k_norm"},
    {"attention.projection", "attn_output"},
    {"mlp.down", "ffn_down"},
    {"mlp.router", "ffn_gate_inp"},
    {"mlp.shared.down", "ffn_down_shexp"},
    {"mlp.shared_gate", "ffn_gate_inp_shexp"}};
/// The same for a model with an encoder in front of a decoder.
constexpr std::pair<std::string_view, const char*> stack_parts[] = {
    {"norm_1", "attn_norm"},
    {"norm_2", "ffn_norm"},
    {"cross_norm", "cross_attn_norm"},
    {"attention.q", "attn_q"},
    {"attention.projection", "attn_o"},
    {"cross_attention.q", "cross_attn_q"},
    {"cross_attention.projection", "cross_attn_o"},
    {"mlp.down", "ffn_down"}};

/// Parts of the names of matrices that readers expect in fp32.
constexpr const char* wide_parts[] = {"_norm.",      "ffn_gate_inp", "position_embd",
                                      "token_types", "ssm_conv1d",   "attn_rel_b"};

Shape shape_for(std::int64_t rows, std::int64_t columns) {
  return columns == 0 ? Shape{rows} : Shape{rows, columns};
}

void append_tensor(GgufParameter& to, const std::string& name, std::int64_t first, std::int64_t rows,
                   std::int64_t columns) {
  to.columns = std::max<std::int64_t>(columns, 1);
  to.rows.push_back({first, rows, static_cast<int>(to.tensors.size()), 0});
  to.tensors.push_back({name, shape_for(rows, columns)});
}

/// All rows, or the first ones.
GgufParameter whole_tensor(const std::string& name, std::int64_t rows, std::int64_t columns) {
  GgufParameter out;
  append_tensor(out, name, 0, rows, columns);
  return out;
}

/// Equal runs of rows, one behind the other.
GgufParameter split_rows(const std::vector<std::string>& names, std::int64_t rows, std::int64_t columns) {
  GgufParameter out;
  const std::int64_t each = rows / std::ssize(names);
  for (const std::string& name : names)
    append_tensor(out, name, std::ssize(out.tensors) * each, each, columns);
  return out;
}

/// Where element i of a head, of which so many turn, is in files, whose pairs are neighbours.
std::int64_t among_pairs(std::int64_t i, std::int64_t turned) {
  return i >= turned ? i : i < turned / 2 ? 2 * i : 2 * (i - turned / 2) + 1;
}

}  // namespace

GgufLayout::GgufLayout(const GptConfig& config)
    : config_(config.resolved()), family_(&family_of(published_as(config_))) {
  require_gguf(config_, *family_);
}

void GgufLayout::append_head(GgufParameter& to, std::int64_t row, std::int64_t count, int tensor,
                             std::int64_t from, std::int64_t turned) const {
  if (!family().pairs) return void(to.rows.push_back({row, count, tensor, from}));
  for (std::int64_t i = 0; i < turned; ++i)
    to.rows.push_back({row + i, 1, tensor, from + among_pairs(i, turned)});
  if (turned < count) to.rows.push_back({row + turned, count - turned, tensor, from + turned});
}

/// Queries, keys and values, which have turns by key heads here.
GgufParameter GgufLayout::of_qkv(const std::string& at, const std::string& kind) const {
  const GptConfig& c = config_;
  const std::int64_t d = c.head_dim, each = c.num_heads / c.num_kv_heads,
                     columns = kind == ".weight" ? c.hidden_size : 0,
                     turned = tensor::rotary_size({.share = c.partial_rotary_factor}, d);
  const std::int64_t heads[3] = {c.num_heads, c.num_kv_heads, c.num_kv_heads};
  GgufParameter out;
  out.columns = std::max<std::int64_t>(columns, 1);
  std::int64_t starts[3] = {0, 0, 0};
  if (family().packed_qkv) {
    starts[1] = heads[0] * d, starts[2] = starts[1] + heads[1] * d;
    out.tensors.push_back({at + "attn_qkv" + kind, shape_for(c.qkv_width(), columns)});
  }
  for (std::size_t i = 0; i < 3 && !family().packed_qkv; ++i)  // a gate's rows are behind each head's queries
    out.tensors.push_back({cat(at, "attn_", "qkv"[i], kind),
                           shape_for((i == 0 && c.attention_gate ? 2 : 1) * heads[i] * d, columns)});
  std::int64_t row = 0;
  const auto append_heads = [&](int part, std::int64_t first, std::int64_t count) {
    const int tensor = family().packed_qkv ? 0 : part;
    for (std::int64_t h = first; h < first + count; ++h, row += d) {
      const std::int64_t from = starts[part] + (part == 0 && c.attention_gate ? 2 : 1) * h * d;
      if (part < 2)
        append_head(out, row, d, tensor, from, turned);
      else
        out.rows.push_back({row, d, tensor, from});
    }
  };
  for (std::int64_t g = 0; g < c.num_kv_heads; ++g)
    append_heads(0, g * each, each), append_heads(1, g, 1), append_heads(2, g, 1);
  return out;
}

/// Layers of latent attention. Of a head's queries those that turn come first here, and last in files.
GgufParameter GgufLayout::of_latents(const std::string& at, const std::string& part, std::int64_t rows,
                                     std::int64_t columns) const {
  const config::Mla& mla = config_.mla;
  const std::int64_t turn = mla.qk_rope_head_dim, still = mla.qk_nope_head_dim, rank = mla.kv_lora_rank,
                     heads = config_.num_heads;
  for (const auto& [own, name] : {std::pair("q_down.weight", "attn_q_a.weight"),
                                  {"q_norm.weight", "attn_q_a_norm.weight"},
                                  {"kv_norm.weight", "attn_kv_a_norm.weight"},
                                  {"projection.weight", "attn_output.weight"}})
    if (part == own) return whole_tensor(at + name, rows, columns);
  GgufParameter out;
  out.columns = columns;
  if (part == "kv_up.weight") {  // the part of keys is written so that it can be taken to the queries
    for (std::int64_t h = 0; h < heads; ++h) {
      const std::int64_t from = h * (still + mla.v_head_dim);
      PublishedTensor keys{at + "attn_k_b.weight", {rank, still}, true, h, heads},
          values{at + "attn_v_b.weight", {mla.v_head_dim, rank}, false, h, heads};
      out.rows.push_back({from, still, static_cast<int>(out.tensors.size()), 0});
      out.rows.push_back({from + still, mla.v_head_dim, static_cast<int>(out.tensors.size()) + 1, 0});
      out.tensors.push_back(std::move(keys)), out.tensors.push_back(std::move(values));
    }
    return out;
  }
  const bool compressed = part == "kv_down.weight";
  require(compressed || part == "q.weight" || part == "q_up.weight", "no parameter of a GPT is named '", part,
          "'");
  const char* name = compressed ? "attn_kv_a_mqa" : part == "q.weight" ? "attn_q" : "attn_q_b";
  out.tensors.push_back({cat(at, name, ".weight"), {rows, columns}});
  if (compressed) {
    out.rows = {{0, rank, 0, 0}};
    append_head(out, rank, turn, 0, rank, turn);
    return out;
  }
  for (std::int64_t row = 0; row < rows; row += turn + still) {
    append_head(out, row, turn, 0, row + still, turn);
    out.rows.push_back({row + turn, still, 0, row});
  }
  return out;
}

/// A part of a layer of linear attention, which here has turns by key heads.
GgufParameter GgufLayout::of_linear(const std::string& at, const std::string& part, std::int64_t rows,
                                    std::int64_t columns) const {
  const config::LinearAttention& l = config_.linear_attention;
  const std::int64_t keys = l.num_key_heads, repeats = l.num_value_heads / keys, dk = l.key_head_dim,
                     dv = l.value_head_dim;
  const bool tiled = family().tiled_values;
  // The place in files of a value head, and all value heads of a key head as runs.
  const auto place = [&](std::int64_t g, std::int64_t r) { return tiled ? r * keys + g : g * repeats + r; };
  const auto append_values = [&](GgufParameter& to, std::int64_t row, std::int64_t g, std::int64_t size,
                                 int tensor, std::int64_t from) {
    for (std::int64_t r = 0; r < repeats; ++r)
      to.rows.push_back({row + r * size, size, tensor, from + place(g, r) * size});
  };
  if (part == "norm.weight") return whole_tensor(at + "ssm_norm.weight", rows, columns);
  if (part == "projection.weight") {
    GgufParameter out = whole_tensor(at + "ssm_out.weight", rows, columns);
    if (!tiled) return out;
    out.column_of.resize(static_cast<std::size_t>(columns));
    for (std::int64_t own = 0; own < columns; ++own) {
      const std::int64_t head = own / dv;
      out.column_of[static_cast<std::size_t>(place(head / repeats, head % repeats) * dv + own % dv)] = own;
    }
    return out;
  }
  if (part == "ba.weight" && !tiled) return whole_tensor(at + "ssm_ba.weight", rows, columns);
  GgufParameter out;
  out.columns = std::max<std::int64_t>(columns, 1);
  if (part == "ba.weight") {
    for (const char* name : {"ssm_beta.weight", "ssm_alpha.weight"})
      out.tensors.push_back({at + name, {rows / 2, columns}});
    for (std::int64_t g = 0; g < keys; ++g)
      for (const int which : {0, 1}) append_values(out, (2 * g + which) * repeats, g, 1, which, 0);
    return out;
  }
  for (const auto& [own, name, size, decay] : {std::tuple("z.weight", "attn_gate.weight", dv, false),
                                               {"a_log", "ssm_a", std::int64_t{1}, true},
                                               {"dt_bias", "ssm_dt.bias", std::int64_t{1}, false}}) {
    if (part != own) continue;
    out.tensors.push_back({at + name, shape_for(rows, columns)});
    for (std::int64_t g = 0; g < keys; ++g) append_values(out, g * repeats * size, g, size, 0, 0);
    out.decay = decay;
    return out;
  }
  require(part == "qkv.weight" || part == "conv", "no parameter of a GPT is named '", part, "'");
  out.tensors.push_back({at + (part == "conv" ? "ssm_conv1d.weight" : "attn_qkv.weight"), {rows, columns}});
  for (std::int64_t g = 0; g < keys; ++g) {
    const std::int64_t row = g * (2 * dk + repeats * dv);
    out.rows.push_back({row, dk, 0, g * dk});
    out.rows.push_back({row + dk, dk, 0, l.key_width() + g * dk});
    append_values(out, row + 2 * dk, g, dv, 0, 2 * l.key_width());
  }
  return out;
}

GgufParameter GgufLayout::of_block(std::int64_t layer, const std::string& part, const std::string& kind,
                                   std::int64_t rows, std::int64_t columns) const {
  const GptConfig& c = config_;
  const Gguf& own = family();
  const bool stacks = c.has_encoder(), encodes = c.encodes(layer);
  const std::string at = !stacks   ? cat("blk.", layer, ".")
                         : encodes ? cat("enc.blk.", layer, ".")
                                   : cat("dec.blk.", layer - c.encoder.num_layers, ".");
  constexpr std::string_view attention = "attention.", experts = "mlp.experts.";
  const std::string inner = part.starts_with(attention) ? part.substr(attention.size()) + kind : "";
  if (!inner.empty() && c.linear(layer)) return of_linear(at, inner, rows, columns);
  if (!inner.empty() && c.mla.kv_lora_rank > 0) return of_latents(at, inner, rows, columns);
  if (part == "attention" && kind == ".sinks") return whole_tensor(at + "attn_sinks.weight", rows, 0);
  if (part == "attention.qkv") return of_qkv(at, kind);
  if (part == "attention.gate") {
    GgufParameter out = whole_tensor(at + "attn_q" + kind, 2 * rows, columns);
    out.rows.clear();
    for (std::int64_t h = 0; h < c.num_heads; ++h)
      out.rows.push_back({h * c.head_dim, c.head_dim, 0, (2 * h + 1) * c.head_dim});
    return out;
  }
  if (stacks && part == "output_norm") return whole_tensor("enc.output_norm.weight", rows, 0);
  for (const char* cross : {"", "cross_"})
    if (part == cat(cross, "attention.kv"))
      return split_rows({cat(at, cross, "attn_k", kind), cat(at, cross, "attn_v", kind)}, rows, columns);
  const auto gates = [&](const char* end) -> std::vector<std::string> {
    if (c.gated()) return {cat(at, "ffn_gate", end, kind), cat(at, "ffn_up", end, kind)};
    return {cat(at, "ffn_up", end, kind)};
  };
  if (part == "mlp.up")
    return split_rows(own.packed_up ? std::vector{gates("").back()} : gates(""), rows, columns);
  if (part == "mlp.shared.up") return split_rows(gates("_shexp"), rows, columns);
  if (part.starts_with(experts)) {
    GgufParameter out = part.ends_with(".up") ? split_rows(gates("_exps"), rows, columns)
                                              : whole_tensor(at + "ffn_down_exps" + kind, rows, columns);
    for (PublishedTensor& tensor : out.tensors)
      tensor.place = std::stoll(part.substr(experts.size())), tensor.stacked = c.moe.experts;
    return out;
  }
  if (part == "mlp.shared_gate") rows = columns, columns = 0;  // one row
  const auto found = [&](const auto& table) -> const char* {
    for (const auto& [name, there] : table)
      if (part == name) return there;
    return nullptr;
  };
  const char* name = stacks                  ? found(stack_parts)
                     : part == "norm_2"      ? own.norm_2
                     : part == "post_norm_1" ? own.post_norm_1
                     : part == "post_norm_2" ? own.post_norm_2
                                             : found(whole_parts);
  require(name, "no parameter of a GPT is named '", part, "' in a block");
  GgufParameter out = whole_tensor(at + name + kind, rows, columns);
  if (part == "mlp.shared_gate") out.columns = rows, out.rows = {{0, 1, 0, 0}};
  return out;
}

std::vector<GgufParameter> GgufLayout::of(const std::string& parameter, std::int64_t rows,
                                          std::int64_t columns) const {
  const GptConfig& c = config_;
  const std::size_t dot = parameter.rfind('.');
  const std::string part = parameter.substr(0, dot), kind = parameter.substr(dot);
  const bool scores_texts = c.scores_texts();
  if (part == "tokens") {
    std::vector<GgufParameter> out{whole_tensor("token_embd.weight", c.vocab_size, columns)};
    if (c.tied() && family().own_head) out.push_back(whole_tensor("output.weight", c.vocab_size, columns));
    return out;
  }
  if (is_of_head(parameter)) {
    if (c.head == config::Head::lm) return {whole_tensor("output.weight", c.vocab_size, columns)};
    if (!scores_texts) return {};  // files have no head for masked tokens
    return {part == "head"        ? whole_tensor("cls.output" + kind, c.scores(), columns)
            : part == "head_norm" ? whole_tensor("cls.norm" + kind, rows, columns)
                                  : whole_tensor("cls" + kind, rows, columns)};
  }
  for (const auto& [own, stack] : {std::pair("encoder_positions", "enc"), {"decoder_positions", "dec"}})
    if (part == own) {
      GgufParameter out = whole_tensor(cat(stack, ".blk.0.attn_rel_b.weight"), rows, columns);
      out.tensors[0].shape = {columns, rows}, out.tensors[0].transposed = true;
      return {out};
    }
  GgufParameter out;
  if (constexpr std::string_view blocks = "blocks."; part.starts_with(blocks)) {
    const std::size_t end = part.find('.', blocks.size());
    const std::string number = part.substr(blocks.size(), end - blocks.size());
    // Attention's own parameters stand beside its layers': "attention.a_log".
    std::string inner = part.substr(end + 1), last = kind;
    if (inner == "attention" && kind != ".sinks") inner += kind, last = "";
    out = of_block(std::stoll(number), inner, last, rows, columns);
  } else {
    const char* name = part == "positions"        ? "position_embd"
                       : part == "token_types"    ? "token_types"
                       : part == "embedding_norm" ? "token_embd_norm"
                       : part != "norm"           ? nullptr
                       : c.has_encoder()          ? "dec.output_norm"
                                                  : "output_norm";
    require(name, "no parameter of a GPT is named '", parameter, "'");
    out = whole_tensor(name + kind, rows, columns);
  }
  const bool norm =
      out.columns == 1 && kind == ".weight" && out.tensors[0].name.find("norm") != std::string::npos;
  if (norm && out.tensors[0].name.find("ssm_norm") == std::string::npos) out.shift = c.norm_shift();
  if (part == "norm" && c.has_encoder()) out.factor = 1 / c.logits_scaling;  // the graph divides no scores
  return {out};
}

std::vector<GgufParameter> GgufLayout::of_adapter(const std::string& layer, const std::string& kind,
                                                  double alpha) const {
  const AdaptedWeight adapted = adapted_weight(config_, layer);
  std::int64_t all = 0, next = 0;
  for (const PublishedParameter::RowRun& run : adapted.weight.rows) all = std::max(all, run.row + run.rows);
  const GgufParameter base = of(layer + ".weight", all, adapted.weight.columns)[0];
  // The module of each row, and its row among those of lora_B.
  std::vector<std::int64_t> module(static_cast<std::size_t>(all), -1), held = module;
  for (const PublishedParameter::RowRun& run : adapted.weight.rows) {
    const auto found = std::find(adapted.tensors.begin(), adapted.tensors.end(), run.tensor);
    if (run.tensor < 0 || found == adapted.tensors.end()) continue;
    for (std::int64_t row = run.row; row < run.row + run.rows; ++row) {
      module[static_cast<std::size_t>(row)] = found - adapted.tensors.begin();
      held[static_cast<std::size_t>(row)] = next++;
    }
  }
  std::vector<std::int64_t> module_of_tensor(base.tensors.size(), -2);
  GgufParameter b;
  b.columns = adapted.rank, b.factor = adapted.scale * static_cast<double>(adapted.rank) / alpha;
  std::vector<int> place(base.tensors.size(), -1);
  for (const PublishedParameter::RowRun& run : base.rows) {
    const auto at = static_cast<std::size_t>(run.tensor);
    const PublishedTensor& tensor = base.tensors[at];
    for (std::int64_t i = 0; i < run.rows; ++i) {
      const auto row = static_cast<std::size_t>(run.row + i);
      if (module_of_tensor[at] == -2) module_of_tensor[at] = module[row];
      if (module[row] != module_of_tensor[at] ||
          (module[row] >= 0 && (tensor.transposed || !base.column_of.empty())))
        fail(ErrorKind::config, "the adapter of ", layer, " has no place in a GGUF file, where ", tensor.name,
             " is not one module's: export the merged model (without --adapter)");
      if (module[row] < 0) continue;
      if (place[at] < 0) {
        place[at] = static_cast<int>(b.tensors.size());
        b.tensors.push_back(
            {tensor.name + ".lora_b", {tensor.shape[0], adapted.rank}, false, tensor.place, tensor.stacked});
      }
      b.rows.push_back({held[row], 1, place[at], run.tensor_row + i});
    }
  }
  std::sort(b.rows.begin(), b.rows.end(), [](const auto& x, const auto& y) { return x.row < y.row; });
  if (kind == "lora_B") return {b};
  std::vector<GgufParameter> out;
  for (std::size_t i = 0; i < base.tensors.size(); ++i) {
    if (place[i] < 0) continue;
    const PublishedTensor& tensor = base.tensors[i];
    GgufParameter& a = out.emplace_back();
    a.columns = adapted.weight.columns;
    a.rows = {{module_of_tensor[i] * adapted.rank, adapted.rank, 0, 0}};
    a.tensors = {{tensor.name + ".lora_a", {adapted.rank, a.columns}, false, tensor.place, tensor.stacked}};
  }
  return out;
}

std::string GgufLayout::correction_bias(const std::string& path) {
  const std::size_t first = path.find('.') + 1;
  return cat("blk.", path.substr(first, path.find('.', first) - first), ".exp_probs_b.bias");
}

bool GgufLayout::stays_wide(const GgufSpec& tensor) {
  if (tensor.name.ends_with(".lora_a") || tensor.name.ends_with(".lora_b")) return false;
  if (tensor.shape.size() == 1 || !tensor.name.ends_with(".weight")) return true;
  return std::any_of(std::begin(wide_parts), std::end(wide_parts),
                     [&](const char* part) { return tensor.name.find(part) != std::string::npos; });
}

}  // namespace sherd::models
