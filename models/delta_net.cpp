#include "models/delta_net.h"

#include <cmath>

#include "autograd/ops.h"

namespace sherd::models {
namespace {

/// Rows of queries, of keys and of values, as they lie in each key head's group.
autograd::Packing delta_packing(const config::LinearAttention& l) {
  autograd::Packing packing{.tensors = {{}, {}, {}}, .published_as_one = true};
  const std::int64_t group = l.width() / l.num_key_heads;
  for (std::int64_t begin = 0; begin < l.width(); begin += group) {
    const std::int64_t key = begin + l.key_head_dim, value = key + l.key_head_dim;
    packing.tensors[0].push_back({begin, key}), packing.tensors[1].push_back({key, value});
    packing.tensors[2].push_back({value, begin + group});
  }
  return packing;
}

}  // namespace

DeltaNet::DeltaNet(const GptConfig& c, const parallel::Layout& layout)
    : value_dim_(c.linear_attention.value_head_dim) {
  const config::LinearAttention& l = c.linear_attention;
  const int ranks = layout.tensor_size();
  require(layout.context_size() == 1 && l.num_key_heads % ranks == 0, l.num_key_heads,
          " key heads of linear attention on ", ranks, " tensor and ", layout.context_size(),
          " context ranks");
  rule_.key_heads = static_cast<int>(l.num_key_heads / ranks);
  rule_.value_heads = static_cast<int>(l.num_value_heads / ranks);
  rule_.key_dim = l.key_head_dim;
  const nn::LinearOptions plain{.bias = false, .init = c.init()};
  const auto column = [&](const char* name, std::int64_t width, nn::LinearOptions options) {
    return add(name,
               std::make_shared<parallel::ColumnLinear>(c.hidden_size, width, layout, std::move(options)));
  };
  qkv_ = column("qkv", l.width(), {.bias = false, .init = c.init(), .packing = delta_packing(l)});
  z_ = column("z", l.value_width(), plain);
  // Steps and shares of states: as a router's scores, they are not for FP8.
  ba_ = column("ba", 2 * l.num_value_heads, {.bias = false, .init = c.init(), .fp8 = false});
  const auto own = [&](const char* name, const tensor::Shape& whole, autograd::Init init, bool decay) {
    const tensor::Slice slice = parallel::tensor_slice(cat("linear_attention's ", name), whole, 0, layout);
    nn::ParameterPtr out = declare(name, slice.shape(), init, {.decay = decay});
    parallel::set_slice(out, slice);
    return out;
  };
  // As it is published: no matrix, for which Muon would take it.
  conv_ = own("conv", {l.width(), 1, l.conv_kernel_dim}, c.init(), true);
  // States are forgotten at rates of 1 to 16 at first, times log(1 + exp(1)) and the input's part.
  a_log_ = own("a_log", {l.num_value_heads}, autograd::Init::uniform(0, std::log(16.0)), false);
  dt_bias_ = own("dt_bias", {l.num_value_heads}, autograd::Init::ones(), false);
  norm_ = add("norm", std::make_shared<nn::RmsNorm>(value_dim_, c.norm_epsilon));
  norm_->weight()->partial_gradient = ranks > 1;  // tensor ranks have other heads each
  projection_ = add("projection", std::make_shared<parallel::RowLinear>(
                                      l.value_width(), c.hidden_size, layout,
                                      nn::LinearOptions{.bias = false, .init = c.output_init()}));
}

Var DeltaNet::forward(Tape& tape, const Var& x) {
  const Var conv = tape.parameter(conv_);
  const Var mixed =
      autograd::short_conv((*qkv_)(tape, x), autograd::reshape(conv, {conv.shape()[0], conv.shape()[2]}));
  const Var gates = autograd::delta_gates((*ba_)(tape, x), tape.parameter(a_log_), tape.parameter(dt_bias_),
                                          rule_.key_heads);
  const Var found = autograd::delta_rule(mixed, gates, rule_), z = (*z_)(tape, x);
  const std::int64_t heads = found.value().numel() / value_dim_;
  const auto by_head = [&](const Var& each) { return autograd::reshape(each, {heads, value_dim_}); };
  const Var gated = autograd::glu(autograd::concat({by_head(z), (*norm_)(tape, by_head(found))}, -1));
  return (*projection_)(tape, autograd::reshape(gated, found.shape()));
}

}  // namespace sherd::models
