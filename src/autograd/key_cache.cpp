#include "autograd/key_cache.h"

#include <algorithm>

#include "tensor/argument_checks.h"

namespace sherd::autograd {

KeyCache::KeyCache(std::int64_t texts, std::int64_t positions)
    : texts_(texts),
      positions_(positions),
      ends_(static_cast<std::size_t>(std::max<std::int64_t>(texts, 0))) {
  require(texts >= 1 && positions >= 1, "a key cache for ", texts, " texts of ", positions, " tokens");
}

void KeyCache::begin(tensor::Device& device, std::vector<Rows> rows, std::int64_t width,
                     std::int64_t source_rows) {
  require(!rows.empty() && width >= 1, "a pass over a key cache needs rows");
  std::vector<bool> seen(static_cast<std::size_t>(texts_));
  std::vector<std::int32_t> places;
  fresh_ = width > 1, goes_on_ = true;
  for (const Rows& r : rows) {
    require(r.text >= 0 && r.text < texts_ && !seen[static_cast<std::size_t>(r.text)], "text ", r.text,
            " of ", texts_, " in a key cache, twice in a pass or not there");
    require(r.first >= 0 && r.count >= 1 && r.count <= width && r.first + width <= positions_, "rows ",
            r.first, " to ", r.first + width, " of a text, of which ", r.count,
            " count, where a key cache has ", positions_, " positions");
    seen[static_cast<std::size_t>(r.text)] = true;
    require(r.source >= 0 && r.source <= source_rows, "a source of ", r.source, " of ", source_rows, " rows");
    fresh_ = fresh_ && r.first == 0;
    std::int64_t& end = ends_[static_cast<std::size_t>(r.text)];
    goes_on_ = goes_on_ && (r.first == 0 || r.first == end);
    end = r.first + r.count;
    for (const std::int64_t n : {r.text, r.first, r.count}) places.push_back(static_cast<std::int32_t>(n));
  }
  source_lengths_ = nullptr;
  if (std::any_of(rows.begin(), rows.end(),
                  [&](const Rows& r) { return r.source > 0 && r.source < source_rows; })) {
    std::vector<std::int32_t> lengths;
    for (const Rows& r : rows)
      lengths.push_back(static_cast<std::int32_t>(r.source > 0 ? r.source : source_rows));
    source_lengths_ = std::make_shared<const std::vector<std::int32_t>>(std::move(lengths));
  }
  rows_ = std::move(rows);
  width_ = width;
  places_ = Tensor::of<std::int32_t>(device, {std::ssize(rows_), 3}, places);
  next_ = next_text_keys_ = 0;
  source_rows_ = source_rows;
}

void KeyCache::fork(tensor::Kernels& kernels, std::int64_t from, std::int64_t to) {
  require(from >= 0 && to >= 0 && from < texts_ && to < texts_ && from != to, "text ", from,
          " of a key cache cannot be copied to text ", to, ": it has ", texts_, " texts");
  require(text_keys_.empty(), "keys of layers that find their attention themselves cannot be copied");
  for (const LayerStore& layer : layers_)
    for (const Tensor& kept : {layer.keys, layer.values})
      if (kept) kernels.copy(kept.rows(from, from + 1), kept.rows(to, to + 1));
  ends_[static_cast<std::size_t>(to)] = ends_[static_cast<std::size_t>(from)];
}

std::vector<KeyCache::TextKeys>& KeyCache::text_keys() {
  if (next_text_keys_ == text_keys_.size()) text_keys_.emplace_back(static_cast<std::size_t>(texts_));
  return text_keys_[next_text_keys_++];
}

const KeyCache::LayerStore& KeyCache::next_layer(tensor::Device& device, const Tensor& qkv,
                                                 const tensor::Attention& geometry, bool values_are_keys) {
  if (next_ == layers_.size()) {
    const std::int64_t rows = geometry.window > 0 ? std::min(geometry.window, positions_) : positions_;
    const Shape shape{texts_, geometry.kv_heads, rows, geometry.head_dim(qkv.shape()[2])};
    layers_.push_back({Tensor::empty(device, shape, qkv.dtype()),
                       values_are_keys ? Tensor() : Tensor::empty(device, shape, qkv.dtype())});
  }
  return layers_[next_++];
}

std::size_t KeyCache::bytes() const {
  std::size_t sum = 0;
  for (const LayerStore& layer : layers_)
    sum += layer.keys.bytes() + (layer.values ? layer.values.bytes() : 0);
  for (const auto& layer : text_keys_)
    for (const TextKeys& text : layer)
      if (text.keys) sum += text.keys.bytes() + text.values.bytes();
  return sum;
}

Tensor KeyCache::attend(Tape& tape, const Tensor& qkv, const tensor::Attention& geometry, const Tensor& sinks,
                        bool values_are_keys) {
  require(!tape.recording(), "a key cache is for passes that are not recorded");
  require(!geometry.documents,
          "attention over a key cache knows no documents: each sequence continues a text");
  const Shape& shape = qkv.shape();
  require(shape[0] == std::ssize(rows_) && shape[1] == width_, "attention got rows ", shape.str(),
          " in a pass of ", rows_.size(), " sequences of ", width_, " rows that a key cache was told of");
  const LayerStore& layer = next_layer(tape.device(), qkv, geometry, values_are_keys);
  Tensor out = tape.empty(shape.with_back(geometry.heads * geometry.head_dim(shape[2])), qkv.dtype());
  const tensor::KeyStore store{layer.keys, layer.values, places_};
  if (!fresh_) {
    tape.kernels().attend_stored(qkv, geometry, store, sinks, out);
    return out;
  }
  // Texts that begin see nothing but each other's rows: the kernel for many rows, of another length each
  // time.
  tensor::Attention of_this_length = geometry;
  of_this_length.lengths_vary = true;
  const Tensor lse = tape.empty({shape[0], geometry.heads, shape[1]}, tensor::compute_type(qkv.dtype()));
  tape.kernels().attention(qkv, of_this_length, out, lse);
  if (sinks) tape.kernels().attention_sinks(sinks, out, lse);
  tape.kernels().attend_stored(qkv, geometry, store, {}, {});
  return out;
}

void KeyCache::store(Tape& tape, const Tensor& qkv, const tensor::Attention& geometry, bool values_are_keys) {
  const LayerStore& layer = next_layer(tape.device(), qkv, geometry, values_are_keys);
  tape.kernels().attend_stored(qkv, geometry, {layer.keys, layer.values, places_}, {}, {});
}

tensor::StateStore KeyCache::states(Tape& tape, const Shape& rows, const Shape& each, DType dtype) {
  require(!tape.recording(), "a key cache is for passes that are not recorded");
  require(rows[0] == std::ssize(rows_) && rows[1] == width_, "linear attention got rows ", rows.str(),
          " in a pass of ", rows_.size(), " sequences of ", width_, " rows that a key cache was told of");
  require(goes_on_, "linear attention cannot go back in a text: its states go on where they ended, or begin");
  if (next_ == layers_.size()) {
    std::vector<std::int64_t> shape{texts_};
    for (const std::int64_t extent : each.dims()) shape.push_back(extent);
    layers_.push_back({Tensor::empty(tape.device(), Shape{std::span<const std::int64_t>(shape)}, dtype), {}});
  }
  return {layers_[next_++].keys, places_};
}

std::vector<SameStart> by_start(const Tape& tape, std::int64_t batch, const tensor::Positions& positions) {
  if (!tape.key_cache) return {{0, batch, positions}};
  const std::vector<KeyCache::Rows>& rows = tape.key_cache->rows();
  require(batch == std::ssize(rows) && positions == tensor::Positions{}, "a batch of ", batch,
          " whole sequences, where a key cache continues ", rows.size(), " texts");
  std::vector<SameStart> out;
  for (std::int64_t b = 0; b < batch; ++b) {
    const std::int64_t first = rows[static_cast<std::size_t>(b)].first;
    if (!out.empty() && out.back().positions.first == first)
      out.back().end = b + 1;
    else
      out.push_back({b, b + 1, {.first = first}});
  }
  return out;
}

}  // namespace sherd::autograd
