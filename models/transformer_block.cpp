#include "models/transformer_block.h"

#include "autograd/ops.h"
#include "models/adapters/adapters.h"

namespace sherd::models {
namespace {

using autograd::Init;

using autograd::Packing;

/// The rows of Q, K and V, which lie side by side in each group of heads (tensor::Attention).
Packing qkv_packing(const GptOptions& o) {
  Packing packing{.tensors = {{}, {}, {}}, .published_as_one = o.positions == PositionKind::learned};
  auto& out = packing.tensors;
  const std::int64_t queries = o.heads / o.kv_heads * o.head_dim;
  for (std::int64_t begin = 0; begin < o.qkv_width(); begin += queries + 2 * o.head_dim) {
    const std::int64_t key = begin + queries, value = key + o.head_dim;
    out[0].push_back({begin, key}), out[1].push_back({key, value});
    out[2].push_back({value, value + o.head_dim});
  }
  return packing;
}

/// The rows of gate and up.
Packing gated_packing(std::int64_t width) {
  return {{{{0, width}}, {{width, 2 * width}}}};
}

}  // namespace

std::shared_ptr<nn::Layer> make_norm(const GptOptions& options, const parallel::Layout& layout) {
  std::shared_ptr<nn::Layer> norm;
  if (options.norm == Norm::rms_norm)
    norm = std::make_shared<nn::RmsNorm>(options.hidden, options.norm_eps);
  else
    norm = std::make_shared<nn::LayerNorm>(options.hidden, options.norm_eps);
  return parallel::on_stream(std::move(norm), layout);
}

SelfAttention::SelfAttention(const GptOptions& o, const parallel::Layout& layout)
    : layout_(layout),
      geometry_(o.geometry()),
      rotary_(o.positions == PositionKind::rotary ? std::optional(o.rotary) : std::nullopt),
      norm_eps_(o.norm_eps),
      qkv_(add("qkv",
               std::make_shared<parallel::ColumnLinear>(
                   o.hidden, o.qkv_width(), layout,
                   nn::LinearOptions{
                       .bias = o.qkv_bias, .init = Init::normal(0, o.init_std), .packing = qkv_packing(o)}))),
      projection_(add("projection", std::make_shared<parallel::RowLinear>(
                                        o.heads * o.head_dim, o.hidden, layout,
                                        nn::LinearOptions{.bias = o.bias, .init = o.output_init()}))),
      dropout_(add("dropout", std::make_shared<nn::Dropout>(o.attention_dropout))) {
  using Cut = parallel::AdaptedLayer::Cut;
  const std::int64_t width = o.heads * o.head_dim;
  qkv_->set_adapter(make_adapter(o, "attention.qkv", {o.qkv_width(), o.hidden}, Cut::outputs, layout));
  projection_->set_adapter(make_adapter(o, "attention.projection", {o.hidden, width}, Cut::inputs, layout));
  if (!o.qk_norm) return;
  query_norm_ = add("q_norm", std::make_shared<nn::RmsNorm>(o.head_dim, o.norm_eps));
  key_norm_ = add("k_norm", std::make_shared<nn::RmsNorm>(o.head_dim, o.norm_eps));
  // Tensor ranks have other heads each.
  for (const auto& norm : {query_norm_, key_norm_})
    norm->weight()->partial_gradient = layout.tensor_size() > 1;
}

Var SelfAttention::forward(Tape& tape, const Var& x) {
  Var qkv = parallel::exchange_heads((*qkv_)(tape, x), geometry_, layout_);
  tensor::Attention geometry = parallel::rank_heads(geometry_, layout_);
  geometry.positions = layout_.inner_positions(qkv.shape()[1]);
  if (tape.training && geometry.dropout > 0) geometry.key = dropout_->key(tape);
  if (query_norm_)
    qkv = autograd::head_norm(qkv, tape.parameter(query_norm_->weight()), tape.parameter(key_norm_->weight()),
                              geometry, norm_eps_);
  if (rotary_) qkv = autograd::rotary(qkv, geometry, *rotary_);
  return (*projection_)(tape, parallel::attention(qkv, geometry, layout_));
}

FeedForward::FeedForward(const GptOptions& o, std::int64_t width, const parallel::Layout& layout)
    : gated_(o.mlp == Mlp::swiglu),
      up_(add("up", std::make_shared<parallel::ColumnLinear>(
                        o.hidden, gated_ ? 2 * width : width, layout,
                        nn::LinearOptions{.bias = o.bias,
                                          .activation = fused_activation(o.mlp),
                                          .init = Init::normal(0, o.init_std),
                                          .packing = gated_ ? gated_packing(width) : Packing()},
                        gated_ ? std::vector{width, width} : std::vector<std::int64_t>{}))),
      down_(add("down",
                std::make_shared<parallel::RowLinear>(
                    width, o.hidden, layout, nn::LinearOptions{.bias = o.bias, .init = o.output_init()}))) {}

void FeedForward::set_adapters(const GptOptions& o, const parallel::Layout& layout) {
  using Cut = parallel::AdaptedLayer::Cut;
  const std::int64_t width = o.ffn_hidden;
  const auto blocks = gated_ ? std::vector{width, width} : std::vector<std::int64_t>{};
  up_->set_adapter(
      make_adapter(o, "mlp.up", {gated_ ? 2 * width : width, o.hidden}, Cut::outputs, layout, blocks));
  down_->set_adapter(make_adapter(o, "mlp.down", {o.hidden, width}, Cut::inputs, layout));
}

Var FeedForward::forward(Tape& tape, const Var& x) {
  Var wide = (*up_)(tape, x);
  if (gated_) wide = autograd::swiglu(wide);
  return (*down_)(tape, wide);
}

ExpertsAndShared::ExpertsAndShared(const GptOptions& o, const parallel::Layout& layout,
                                   std::shared_ptr<parallel::PooledChoices> pooled)
    : parallel::Moe(o.moe(std::move(pooled)), layout) {
  const ExpertsOptions& e = o.experts;
  const auto gate = [&](std::int64_t outputs, bool bias) {
    return parallel::on_stream(
        std::make_shared<nn::Linear>(o.hidden, outputs,
                                     nn::LinearOptions{.bias = bias, .init = Init::normal(0, o.init_std)}),
        layout);
  };
  if (e.shared > 0)
    shared_ = add("shared", std::make_shared<FeedForward>(o, e.shared * e.ffn_hidden, layout));
  if (shared_ && e.shared_gate) shared_gate_ = add("shared_gate", gate(1, false));
  if (!e.residual) return;
  dense_ = add("dense", std::make_shared<FeedForward>(o, o.ffn_hidden, layout));
  coefficient_ = add("coefficient", gate(2, true));
}

namespace {

/// The parts' rows, each times the score that the gate's output of the same number has.
Var weighed(Tape& tape, const Var& x, nn::Linear& gate, tensor::RouterScores scores,
            const std::vector<Var>& parts) {
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
  const Var sum = autograd::combine_rows(
      all == 1 ? rows[0] : autograd::join_rows(rows),
      tensor::Tensor::of<std::int32_t>(tape.device(), {tokens, all}, places), routed.weights);
  return autograd::reshape(sum, x.shape());
}

}  // namespace

Var ExpertsAndShared::forward(Tape& tape, const Var& x) {
  const Var routed = parallel::Moe::forward(tape, x);
  if (dense_)
    return weighed(tape, x, *coefficient_, tensor::RouterScores::softmax, {routed, (*dense_)(tape, x)});
  if (!shared_) return routed;
  Var beside = (*shared_)(tape, x);
  if (shared_gate_) beside = weighed(tape, x, *shared_gate_, tensor::RouterScores::sigmoid, {beside});
  return autograd::add(routed, beside);
}

namespace {

/// The feed-forward part of a block without experts. Of a model that has some in other blocks adapters are in
/// the attention alone.
std::shared_ptr<FeedForward> dense_part(const GptOptions& o, const parallel::Layout& layout) {
  auto out = std::make_shared<FeedForward>(o, o.ffn_hidden, layout);
  if (o.experts.count == 0) out->set_adapters(o, layout);
  return out;
}

}  // namespace

TransformerBlock::TransformerBlock(const GptOptions& o, std::int64_t index, const parallel::Layout& layout,
                                   std::shared_ptr<parallel::PooledChoices> pooled)
    : layout_(layout),
      norm_1_(add("norm_1", make_norm(o, layout))),
      norm_2_(nullptr),
      attention_(add("attention", std::make_shared<SelfAttention>(o, layout))),
      attention_dropout_(add("attention_dropout", std::make_shared<nn::Dropout>(o.hidden_dropout))) {
  norm_2_ = add("norm_2", make_norm(o, layout));
  if (o.experts.in(index))
    mlp_ = add("mlp", std::make_shared<ExpertsAndShared>(o, layout, std::move(pooled)));
  else
    mlp_ = add("mlp", dense_part(o, layout));
  mlp_dropout_ = add("mlp_dropout", std::make_shared<nn::Dropout>(o.hidden_dropout));
  if (auto adapter = make_bottlenecks(o, layout)) adapter_ = add("adapter", std::move(adapter));
}

Var TransformerBlock::joined(Tape& tape, parallel::Bottlenecks::Part part, const Var& x, const Var& y,
                             nn::Dropout& dropout) {
  const tensor::Slice elements = layout_.stream_slice(x.shape());
  if (!adapter_ || !adapter_->has(part)) return dropout.add_to(tape, y, x, elements);
  const Var given = dropout.apply(tape, y, elements);
  return adapter_->add_to(tape, part, autograd::add(x, given), given);
}

Var TransformerBlock::forward(Tape& tape, const Var& x) {
  using Part = parallel::Bottlenecks::Part;
  const Var middle =
      joined(tape, Part::attention, x, (*attention_)(tape, (*norm_1_)(tape, x)), *attention_dropout_);
  return joined(tape, Part::mlp, middle, (*mlp_)(tape, (*norm_2_)(tape, middle)), *mlp_dropout_);
}

}  // namespace sherd::models
