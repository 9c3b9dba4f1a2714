#include "models/relative_attention.h"

#include <algorithm>
#include <cmath>

#include "autograd/key_cache.h"
#include "autograd/ops.h"
#include "models/adapters/adapters.h"
#include "tensor/argument_checks.h"

namespace sherd::models {

using tensor::Shape, tensor::Tensor;

std::int64_t relative_bucket(std::int64_t distance, bool both_sides, std::int64_t buckets,
                             std::int64_t most_distance) {
  std::int64_t first = 0;
  if (both_sides) {
    buckets /= 2;
    if (distance > 0) first = buckets;
  }
  const std::int64_t away = both_sides ? std::abs(distance) : std::max<std::int64_t>(0, -distance),
                     exact = buckets / 2;
  if (away < exact) return first + away;
  // In fp32, as PyTorch has it: bounds of ranges are where their quotients round to whole numbers.
  const float share =
      std::log(static_cast<float>(away) / static_cast<float>(exact)) /
      static_cast<float>(std::log(static_cast<double>(most_distance) / static_cast<double>(exact))) *
      static_cast<float>(buckets - exact);
  return first + std::min(exact + static_cast<std::int64_t>(share), buckets - 1);
}

RelativePositions::RelativePositions(const GptConfig& c, bool both_sides, const parallel::Layout& layout)
    : both_sides_(both_sides),
      buckets_(c.relative_attention_num_buckets),
      most_distance_(c.relative_attention_max_distance) {
  const tensor::Slice own = parallel::tensor_slice("relative positions", {c.num_heads, buckets_}, 0, layout);
  parallel::set_slice(weight_ = declare("weight", own.shape(), c.init_of(c.hidden_size)), own);
  mark_block();
}

Var RelativePositions::distances(Tape& tape, std::int64_t queries, std::int64_t keys, std::int64_t first) {
  // All layers of a stack ask for the same ones.
  const Tensor ids = tape.shared_value({0, both_sides_, buckets_, most_distance_, queries, keys, first}, [&] {
    std::vector<std::int32_t> buckets;
    for (std::int64_t i = 0; i < queries + keys - 1; ++i)
      buckets.push_back(static_cast<std::int32_t>(
          relative_bucket(i - (queries - 1) - first, both_sides_, buckets_, most_distance_)));
    return Tensor::of<std::int32_t>(tape.device(), {std::ssize(buckets)}, buckets);
  });
  const Var by_bucket = autograd::transpose(tape.parameter(weight_), 0, 1);
  const Var out = autograd::transpose(autograd::embedding(ids, by_bucket), 0, 1);
  return autograd::cast(out, tensor::compute_type(out.dtype()));
}

RelativeAttention::RelativeAttention(const GptConfig& c, std::int64_t layer, const parallel::Layout& layout,
                                     std::shared_ptr<RelativePositions> positions)
    : causal_(!c.encodes(layer) && positions),
      to_source_(!positions),
      heads_(c.num_heads / layout.tensor_size()),
      first_head_(heads_ * layout.tensor_rank()),
      all_heads_(c.num_heads),
      head_dim_(c.head_dim),
      scale_(static_cast<float>(c.attention_multiplier)),
      dropout_(add("dropout", std::make_shared<nn::Dropout>(static_cast<float>(c.attention_dropout)))),
      positions_(std::move(positions)) {
  const std::int64_t width = c.num_heads * c.head_dim;
  const auto column = [&](const char* name, std::int64_t outputs, autograd::Init init,
                          autograd::Packing packing, std::vector<std::int64_t> blocks) {
    return add(name, std::make_shared<parallel::ColumnLinear>(
                         c.hidden_size, outputs, layout,
                         nn::LinearOptions{.bias = false, .init = init, .packing = std::move(packing)},
                         std::move(blocks)));
  };
  q_ = column("q", width, c.init_of(c.hidden_size * c.head_dim), {}, {});
  kv_ = column("kv", 2 * width, c.init_of(c.hidden_size), {.tensors = {{{0, width}}, {{width, 2 * width}}}},
               {width, width});
  projection_ = add("projection", std::make_shared<parallel::RowLinear>(
                                      width, c.hidden_size, layout,
                                      nn::LinearOptions{.bias = false, .init = c.init_of(width)}));
  using Cut = parallel::AdaptedLayer::Cut;
  const std::string at = cat("blocks.", layer, to_source_ ? ".cross_attention." : ".attention.");
  q_->set_adapter(make_adapter(c, at + "q", {Cut::outputs, c.hidden_size, width}, layout));
  kv_->set_adapter(
      make_adapter(c, at + "kv", {Cut::outputs, c.hidden_size, 2 * width, {width, width}}, layout));
  projection_->set_adapter(make_adapter(c, at + "projection", {Cut::inputs, width, c.hidden_size}, layout));
  if (positions_) share("positions", positions_->weight());
}

RelativeAttention::KeysAndValues RelativeAttention::project(Tape& tape, const Var& source) {
  const Var kv = (*kv_)(tape, source);
  const std::int64_t width = heads_ * head_dim_;
  const Shape shape{kv.shape()[0], kv.shape()[1], heads_, head_dim_};
  return {autograd::reshape(autograd::slice(kv, 2, 0, width), shape),
          autograd::reshape(autograd::slice(kv, 2, width, 2 * width), shape)};
}

namespace {

/// Adds keys and values [1, rows, …] of a text behind its first `first`; where they are undefined all are
/// there.
void store(Tape& tape, autograd::KeyCache::TextKeys& text, std::int64_t first, const Tensor& keys,
           const Tensor& values, std::int64_t capacity) {
  if (!keys.defined()) return;
  const std::int64_t rows = keys.shape()[1], width = keys.numel() / rows;
  const Shape room{1, capacity, keys.shape()[2], keys.shape()[3]};
  for (const auto& [to, from] : {std::pair(&text.keys, &keys), {&text.values, &values}}) {
    if (!to->defined() || to->shape() != room) *to = Tensor::empty(tape.device(), room, from->dtype());
    tape.kernels().copy_rows({*from, 0, width}, {*to, first * width, width}, rows, width);
  }
  text.rows = first + rows;
}

/// The first rows of what a text has room for.
Var stored(Tape& tape, const Tensor& room, std::int64_t rows) {
  const std::int64_t heads = room.shape()[2], width = room.shape()[3];
  return tape.input(room.range(0, rows * heads * width).reshape({1, rows, heads, width}));
}

}  // namespace

/// But for distances.
autograd::AttentionMask RelativeAttention::mask(Tape& tape, std::int64_t batch, std::int64_t keys) {
  autograd::AttentionMask out{.causal = causal_, .scale = scale_};
  if (tape.source_lengths && !causal_) {
    std::vector<std::int64_t> what{1, batch, keys};
    what.insert(what.end(), tape.source_lengths->begin(), tape.source_lengths->end());
    out.seen = tape.shared_value(what, [&] {
      std::vector<std::uint8_t> seen(static_cast<std::size_t>(batch * keys));
      for (std::int64_t b = 0; b < batch; ++b)
        std::fill_n(seen.begin() + b * keys, tape.source_lengths->at(static_cast<std::size_t>(b)), 1);
      return Tensor::of<std::uint8_t>(tape.device(), {batch, keys}, seen);
    });
  }
  out.dropout = dropout_->p(), out.first_head = first_head_, out.all_heads = all_heads_;
  if (tape.training && out.dropout > 0) out.key = dropout_->key(tape);
  return out;
}

Var RelativeAttention::continued(Tape& tape, const Var& queries, const Var& source) {
  autograd::KeyCache& cache = *tape.key_cache;
  const std::vector<autograd::KeyCache::Rows>& rows = cache.rows();
  const KeysAndValues made = source.defined() ? project(tape, source) : KeysAndValues();
  std::vector<autograd::KeyCache::TextKeys>& texts = cache.text_keys();
  const std::int64_t count = queries.shape()[1];
  std::vector<Var> found;
  for (std::int64_t i = 0; i < std::ssize(rows); ++i) {
    const autograd::KeyCache::Rows& of = rows[static_cast<std::size_t>(i)];
    const auto own = [i](const Var& all) { return all.defined() ? all.value().rows(i, i + 1) : Tensor(); };
    require(to_source_ || of.first == 0 || count == 1, "a decoder's text goes on by a row at a time, not by ",
            count);
    autograd::KeyCache::TextKeys& text = texts[static_cast<std::size_t>(of.text)];
    Tensor keys = own(made.keys), values = own(made.values);
    if (to_source_ && keys.defined() && of.source > 0)  // those that hold tokens
      for (Tensor* each : {&keys, &values})
        *each = each->range(0, of.source * heads_ * head_dim_).reshape({1, of.source, heads_, head_dim_});
    store(tape, text, to_source_ ? 0 : of.first, keys, values,
          to_source_ && keys.defined() ? keys.shape()[1] : cache.positions());
    autograd::AttentionMask seen{.causal = causal_ && of.first == 0, .scale = scale_};
    if (positions_) seen.distances = positions_->distances(tape, count, text.rows, of.first);
    found.push_back(autograd::attention(tape.input(own(queries)), stored(tape, text.keys, text.rows),
                                        stored(tape, text.values, text.rows), seen));
  }
  return found.size() == 1 ? found[0] : autograd::concat(std::span<const Var>(found), 0);
}

Var RelativeAttention::attend(Tape& tape, const Var& x, const Var& source) {
  const std::int64_t batch = x.shape()[0], rows = x.shape()[1];
  const Var queries = autograd::reshape((*q_)(tape, x), {batch, rows, heads_, head_dim_});
  Var found;
  if (tape.key_cache && (causal_ || to_source_)) {
    found = continued(tape, queries, source);
  } else {
    const auto [keys, values] = project(tape, source);
    autograd::AttentionMask own = mask(tape, batch, keys.shape()[1]);
    if (positions_) own.distances = positions_->distances(tape, rows, rows);
    found = autograd::attention(queries, keys, values, own);
  }
  return (*projection_)(tape, autograd::reshape(found, {batch, rows, heads_ * head_dim_}));
}

}  // namespace sherd::models
