#include "models/transformer_block.h"

#include "autograd/key_cache.h"
#include "autograd/ops.h"
#include "models/adapters/adapters.h"
#include "models/delta_net.h"
#include "models/families/family.h"
#include "models/latent_attention.h"

namespace sherd::models {
namespace {

using autograd::Packing;
using config::Norm;
using config::PositionType;

/// Whether a model in its family's style is published with these parts in one tensor.
bool fused(const GptConfig& c, const std::vector<std::string> TensorNames::*parts) {
  const config::Model& style = config::defaults_of(c.type);
  const bool same = c.position == style.position && c.gated() == style.gated();
  return same && (family_of(c.type).names.*parts).size() == 1;
}

/// The rows of Q, K and V, which lie side by side in each group of heads (tensor::Attention).
Packing qkv_packing(const GptConfig& c) {
  Packing packing{.tensors = {{}, {}, {}},
                  .published_as_one = c.position == PositionType::learned || fused(c, &TensorNames::qkv)};
  auto& out = packing.tensors;
  const std::int64_t queries = c.num_heads / c.num_kv_heads * c.head_dim;
  for (std::int64_t begin = 0; begin < c.qkv_width(); begin += queries + 2 * c.head_dim) {
    const std::int64_t key = begin + queries, value = key + c.head_dim;
    out[0].push_back({begin, key}), out[1].push_back({key, value});
    out[2].push_back({value, value + c.head_dim});
  }
  return packing;
}

/// The rows of gate and up.
Packing gated_packing(const GptConfig& c, std::int64_t width) {
  return {.tensors = {{{0, width}}, {{width, 2 * width}}}, .published_as_one = fused(c, &TensorNames::up)};
}

/// The parts' rows, each times the score that the gate's output of the same number has.
Var weighed(Tape& tape, const Var& x, nn::Linear& gate, RouterScores scores, const std::vector<Var>& parts) {
  const std::int64_t tokens = x.shape().rows(), width = x.shape().back();
  const auto as_rows = [&](const Var& part) { return autograd::reshape(part, {tokens, width}); };
  const Var logits = autograd::router_logits(as_rows(x), tape.parameter(gate.weight()),
                                             gate.bias() ? tape.parameter(gate.bias()) : Var());
  // A router that takes everything.
  const int all = static_cast<int>(parts.size());
  const autograd::Routed routed = autograd::route(logits, {}, {.top_k = all, .scores = scores});
  std::vector<std::int32_t> places;
  for (std::size_t i = 0; i < routed.chosen.size(); ++i)
    places.push_back(
        static_cast<std::int32_t>(routed.chosen[i] * tokens + static_cast<std::int64_t>(i) / all));
  std::vector<Var> rows;
  for (const Var& part : parts) rows.push_back(as_rows(part));
  const Var sum = autograd::combine_rows(all == 1 ? rows[0] : autograd::join_rows(rows),
                                         autograd::row_numbers(tape, {tokens, all}, places), routed.weights);
  return autograd::reshape(sum, x.shape());
}

using Cut = parallel::AdaptedLayer::Cut;

/// The options of a layer of experts, with their adapters.
parallel::MoeOptions adapted_experts(const GptConfig& c, const std::string& path,
                                     const parallel::Layout& layout,
                                     std::shared_ptr<parallel::PooledChoices> pooled) {
  parallel::MoeOptions out = c.experts(std::move(pooled));
  const std::int64_t width = out.ffn_hidden, wide = (out.gated ? 2 : 1) * width;
  out.adapter_of = [c, path, layout, width, wide](std::int64_t expert, parallel::ExpertLayer layer) {
    const std::string at = cat(path, ".experts.", expert);
    if (layer == parallel::ExpertLayer::down)
      return make_adapter(c, at + ".down", {Cut::inputs, width, c.hidden_size, {}, true}, layout);
    const auto blocks = wide > width ? std::vector{width, width} : std::vector<std::int64_t>();
    return make_adapter(c, at + ".up", {Cut::outputs, c.hidden_size, wide, blocks, true}, layout);
  };
  return out;
}

}  // namespace

std::shared_ptr<nn::Layer> make_norm(const GptConfig& config, const parallel::Layout& layout) {
  std::shared_ptr<nn::Layer> norm;
  if (config.norm == Norm::rmsnorm)
    norm = std::make_shared<nn::RmsNorm>(config.hidden_size, config.norm_epsilon, config.norm_shift());
  else
    norm = std::make_shared<nn::LayerNorm>(config.hidden_size, config.norm_epsilon, config.norm_bias);
  return parallel::on_stream(std::move(norm), layout);
}

SelfAttention::SelfAttention(const GptConfig& c, std::int64_t layer, const parallel::Layout& layout)
    : layout_(layout),
      geometry_(c.attention(layer)),
      rotary_(c.rotary(layer)),
      norm_eps_(c.norm_epsilon),
      norm_shift_(c.norm_shift()),
      qkv_(add("qkv", std::make_shared<parallel::ColumnLinear>(
                          c.hidden_size, c.qkv_width(), layout,
                          nn::LinearOptions{
                              .bias = c.has_qkv_bias(), .init = c.init(), .packing = qkv_packing(c)}))),
      projection_(add("projection", std::make_shared<parallel::RowLinear>(
                                        c.num_heads * c.head_dim, c.hidden_size, layout,
                                        nn::LinearOptions{.bias = c.bias, .init = c.output_init()}))),
      dropout_(add("dropout", std::make_shared<nn::Dropout>(static_cast<float>(c.attention_dropout)))) {
  const std::int64_t width = c.num_heads * c.head_dim;
  const std::string at = cat("blocks.", layer, ".attention.");
  qkv_->set_adapter(make_adapter(c, at + "qkv", {Cut::outputs, c.hidden_size, c.qkv_width()}, layout));
  projection_->set_adapter(make_adapter(c, at + "projection", {Cut::inputs, width, c.hidden_size}, layout));
  if (c.attention_sinks) {
    const tensor::Slice own = parallel::tensor_slice("attention_sinks", {c.num_heads}, 0, layout);
    parallel::set_slice(sinks_ = declare("sinks", own.shape(), c.init(), {.decay = false}), own);
  }
  if (c.attention_gate)
    gate_ = add("gate", std::make_shared<parallel::ColumnLinear>(
                            c.hidden_size, width, layout,
                            nn::LinearOptions{.bias = c.has_qkv_bias(), .init = c.init()}));
  if (!c.qk_norm) return;
  const auto norm = [&](const char* name, std::int64_t heads) {
    return add(name, std::make_shared<nn::RmsNorm>(c.head_dim * (c.qk_norm_all_heads ? heads : 1),
                                                   c.norm_epsilon, c.norm_shift()));
  };
  query_norm_ = norm("q_norm", c.num_heads), key_norm_ = norm("k_norm", c.num_kv_heads);
  // Tensor ranks have other heads each.
  for (const auto& each : {query_norm_, key_norm_})
    each->weight()->partial_gradient = layout.tensor_size() > 1;
}

Var SelfAttention::forward(Tape& tape, const Var& x) {
  Var qkv = parallel::exchange_heads((*qkv_)(tape, x), geometry_, layout_);
  tensor::Attention geometry = parallel::rank_heads(geometry_, layout_);
  geometry.positions = layout_.inner_positions(qkv.shape()[1]);
  if (tape.training && geometry.dropout > 0) geometry.key = dropout_->key(tape);
  if (query_norm_)
    qkv = autograd::head_norm(qkv, tape.parameter(query_norm_->weight()), tape.parameter(key_norm_->weight()),
                              geometry, norm_eps_, norm_shift_);
  if (rotary_) qkv = autograd::rotary(qkv, geometry, *rotary_);
  const Var sinks = sinks_ ? tape.parameter(sinks_) : Var();
  Var found = parallel::attention(qkv, geometry, layout_, sinks);
  if (gate_) found = autograd::multiply(found, autograd::sigmoid((*gate_)(tape, x)));
  return (*projection_)(tape, found);
}

FeedForward::FeedForward(const GptConfig& c, std::int64_t width, const std::string& path,
                         const parallel::Layout& layout)
    : layout_(layout),
      gated_(c.gated()),
      relu_(c.relu_power()),
      glu_(c.glu()),
      up_(add("up", std::make_shared<parallel::ColumnLinear>(
                        c.hidden_size, gated_ ? 2 * width : width, layout,
                        nn::LinearOptions{.bias = c.has_mlp_bias(),
                                          .activation = c.fused_activation(),
                                          .init = c.init_of(c.hidden_size),
                                          .packing = gated_ ? gated_packing(c, width) : Packing()},
                        gated_ ? std::vector{width, width} : std::vector<std::int64_t>{}))),
      down_(add("down", std::make_shared<parallel::RowLinear>(
                            width, c.hidden_size, layout,
                            nn::LinearOptions{.bias = c.has_mlp_bias(), .init = c.output_init(width)}))) {
  if (c.ffn_dropout > 0)
    dropout_ = add("dropout", std::make_shared<nn::Dropout>(static_cast<float>(c.ffn_dropout)));
  if (path.empty()) return;
  const auto blocks = gated_ ? std::vector{width, width} : std::vector<std::int64_t>{};
  up_->set_adapter(make_adapter(c, path + ".up",
                                {Cut::outputs, c.hidden_size, gated_ ? 2 * width : width, blocks}, layout));
  down_->set_adapter(make_adapter(c, path + ".down", {Cut::inputs, width, c.hidden_size}, layout));
}

Var FeedForward::forward(Tape& tape, const Var& x) {
  Var wide = (*up_)(tape, x);
  if (gated_) wide = autograd::glu(wide, glu_);
  if (relu_ > 0) wide = autograd::relu(wide);
  if (relu_ > 1) wide = autograd::multiply(wide, wide);
  if (dropout_) wide = dropout_->apply(tape, wide, layout_.inner_slice(wide.shape()));
  return (*down_)(tape, wide);
}

ExpertsAndShared::ExpertsAndShared(const GptConfig& c, const std::string& path,
                                   const parallel::Layout& layout,
                                   std::shared_ptr<parallel::PooledChoices> pooled)
    : parallel::Moe(adapted_experts(c, path, layout, std::move(pooled)), layout) {
  const config::Moe& e = c.moe;
  const auto gate = [&](std::int64_t outputs, bool bias) {
    return parallel::on_stream(
        std::make_shared<nn::Linear>(c.hidden_size, outputs,
                                     nn::LinearOptions{.bias = bias, .init = c.init(), .fp8 = false}),
        layout);
  };
  if (e.shared_experts > 0)
    shared_ = add("shared", std::make_shared<FeedForward>(c, e.shared_experts * e.ffn_hidden_size,
                                                          path + ".shared", layout));
  if (shared_ && e.shared_expert_gate) shared_gate_ = add("shared_gate", gate(1, false));
  if (!e.use_residual) return;
  dense_ = add("dense", std::make_shared<FeedForward>(c, c.ffn_hidden_size, "", layout));
  coefficient_ = add("coefficient", gate(2, true));
}

Var ExpertsAndShared::forward(Tape& tape, const Var& x) {
  const Var routed = parallel::Moe::forward(tape, x);
  if (dense_) return weighed(tape, x, *coefficient_, RouterScores::softmax, {routed, (*dense_)(tape, x)});
  if (!shared_) return routed;
  Var beside = (*shared_)(tape, x);
  if (shared_gate_) beside = weighed(tape, x, *shared_gate_, RouterScores::sigmoid, {beside});
  return autograd::add(routed, beside);
}

TransformerBlock::TransformerBlock(const GptConfig& c, std::int64_t index, const parallel::Layout& layout,
                                   std::shared_ptr<parallel::PooledChoices> pooled,
                                   std::shared_ptr<RelativePositions> positions)
    : layout_(layout),
      multiplier_(c.residual_multiplier),
      norms_sums_(c.norm_placement == config::NormPlacement::post_residual),
      source_rows_(c.encoder.seq_length),
      encodes_(c.encodes(index)) {
  const bool before = c.norm_placement != config::NormPlacement::post && !norms_sums_,
             behind = c.norm_placement != config::NormPlacement::pre;
  const auto norm = [&](const char* name, bool there) {
    return there ? add(name, make_norm(c, layout)) : nullptr;
  };
  const auto dropout = [&](const char* name) {
    return add(name, std::make_shared<nn::Dropout>(static_cast<float>(c.dropout)));
  };
  norm_1_ = norm("norm_1", c.norm_before(index));
  if (positions)
    attention_ =
        add("attention", std::make_shared<RelativeAttention>(c, index, layout, std::move(positions)));
  else if (c.linear(index))
    attention_ = add("attention", std::make_shared<DeltaNet>(c, layout));
  else if (c.mla.kv_lora_rank > 0)
    attention_ = add("attention", std::make_shared<LatentAttention>(c, index, layout));
  else
    attention_ = add("attention", std::make_shared<SelfAttention>(c, index, layout));
  post_norm_1_ = norm("post_norm_1", behind);
  attention_dropout_ = dropout("attention_dropout");
  if (c.has_encoder() && !encodes_) {
    cross_norm_ = norm("cross_norm", true);
    cross_attention_ = add("cross_attention", std::make_shared<RelativeAttention>(c, index, layout, nullptr));
    cross_dropout_ = dropout("cross_dropout");
  }
  norm_2_ = norm("norm_2", before);
  const std::string mlp = cat("blocks.", index, ".mlp");
  if (c.moe.in(index))
    mlp_ = add("mlp", std::make_shared<ExpertsAndShared>(c, mlp, layout, std::move(pooled)));
  else
    mlp_ = add("mlp", std::make_shared<FeedForward>(c, c.ffn_hidden_size, mlp, layout));
  post_norm_2_ = norm("post_norm_2", behind);
  mlp_dropout_ = dropout("mlp_dropout");
  if (auto adapter = make_bottlenecks(c, layout)) adapter_ = add("adapter", std::move(adapter));
  if (!encodes_ || index + 1 < c.encoder.num_layers) return;
  output_norm_ = norm("output_norm", true);
  output_dropout_ =
      add("output_dropout", std::make_shared<nn::Dropout>(static_cast<float>(c.embedding_dropout)));
}

std::int64_t source_rows(const Tape& tape, std::int64_t of_a_sample) {
  return tape.key_cache ? tape.key_cache->source_rows() : of_a_sample;
}

Var TransformerBlock::joined(Tape& tape, parallel::Bottlenecks::BlockPart part, const Var& x, const Var& y,
                             nn::Dropout& dropout) {
  const tensor::Slice elements = layout_.stream_slice(x.shape());
  if (!adapter_ || tape.without_adapters || !adapter_->has(part)) return dropout.add_to(tape, y, x, elements);
  const Var given = dropout.apply(tape, y, elements);
  return adapter_->add_to(tape, part, autograd::add(x, given), given);
}

Var TransformerBlock::added(Tape& tape, parallel::Bottlenecks::BlockPart part, const Var& x) {
  const bool first = part == parallel::Bottlenecks::BlockPart::attention;
  nn::Layer& layer = first ? *attention_ : *mlp_;
  const auto &norm = first ? norm_1_ : norm_2_, &post_norm = first ? post_norm_1_ : post_norm_2_;
  Var out = layer(tape, norm ? (*norm)(tape, x) : x);
  if (post_norm && !norms_sums_) out = (*post_norm)(tape, out);
  if (multiplier_ != 1) out = autograd::scale(out, multiplier_);
  out = joined(tape, part, x, out, first ? *attention_dropout_ : *mlp_dropout_);
  return norms_sums_ ? (*post_norm)(tape, out) : out;
}

Var TransformerBlock::run_parts(Tape& tape, const Var& x, const Var& source) {
  using BlockPart = parallel::Bottlenecks::BlockPart;
  Var out = added(tape, BlockPart::attention, x);
  if (cross_attention_) {
    const Var found = cross_attention_->attend(tape, (*cross_norm_)(tape, out), source);
    out = cross_dropout_->add_to(tape, found, out, layout_.stream_slice(out.shape()));
  }
  out = added(tape, BlockPart::mlp, out);
  if (!output_norm_) return out;
  return output_dropout_->apply(tape, (*output_norm_)(tape, out), layout_.stream_slice(out.shape()));
}

Var TransformerBlock::forward(Tape& tape, const Var& x) {
  if (source_rows_ == 0) return run_parts(tape, x, {});
  const std::int64_t first = source_rows(tape, source_rows_), rows = x.shape()[1];
  // A pass that continues texts has no rows of an encoder.
  if (first == 0) return encodes_ ? x : run_parts(tape, x, {});
  const Var source = autograd::slice(x, 1, 0, first), target = autograd::slice(x, 1, first, rows);
  return encodes_ ? autograd::concat({run_parts(tape, source, {}), target}, 1)
                  : autograd::concat({source, run_parts(tape, target, source)}, 1);
}

}  // namespace sherd::models
