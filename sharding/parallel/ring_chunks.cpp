#include "sharding/parallel/ring_chunks.h"

namespace sherd::parallel {

using Count = std::int64_t;

RingChunks::RingChunks(tensor::Kernels& kernels, int rank, int ranks, const Tensor& qkv,
                       const tensor::Attention& geometry)
    : kernels_(kernels),
      rank_(rank),
      ranks_(ranks),
      geometry_(geometry),
      e_(attention_extents("ring attention", qkv, geometry)),
      tokens_(e_.seq / 2) {
  require(e_.seq % 2 == 0, "ring attention: each rank has two chunks of every sequence, which ", e_.seq,
          " tokens are not");
}

std::vector<RingPair> RingChunks::pairs(int from) const {
  std::vector<RingPair> all;
  for (int query = 0; query < 2; ++query)
    for (int key = 0; key < 2; ++key) {
      const Count own = ring_chunk(rank_, ranks_, query), other = ring_chunk(from, ranks_, key);
      RingPair pair{query, key, geometry_};
      pair.geometry.scores.query = own * tokens_, pair.geometry.scores.key = other * tokens_;
      if (seen_keys("ring attention", pair.geometry, tokens_).any(tokens_)) all.push_back(pair);
    }
  return all;
}

Tensor RingChunks::empty(const Shape& shape, DType dtype, device::Category category) const {
  return Tensor::empty(kernels_.device(), shape, dtype, category);
}

RingColumns RingChunks::queries(const Tensor& qkv, int chunk) const {
  return {qkv, chunk * tokens_ * e_.width(), query_width(), query_width() + key_width(), e_.seq * e_.width()};
}
RingColumns RingChunks::queries(const Tensor& packed) const {
  return {packed, 0, query_width(), query_width() + key_width(), tokens_ * e_.width()};
}
RingColumns RingChunks::keys(const Tensor& qkv, int chunk) const {
  RingColumns out = queries(qkv, chunk);
  out.first += query_width(), out.width = key_width();
  return out;
}
RingColumns RingChunks::keys(const Tensor& packed) const {
  RingColumns out = queries(packed);
  out.first += query_width(), out.width = key_width();
  return out;
}
RingColumns RingChunks::of_block(const Tensor& block, int chunk) const {
  const Count sequence = tokens_ * e_.kv_heads * key_width();
  return {block, chunk * e_.batch * sequence, key_width(), key_width(), sequence};
}
RingColumns RingChunks::of_heads(const Tensor& heads, int chunk) const {
  const Count sequence = tokens_ * e_.heads * e_.dim;
  return {heads, chunk * sequence, query_width(), query_width(), 2 * sequence};
}
RingColumns RingChunks::of_heads(const Tensor& heads) const {
  return {heads, 0, query_width(), query_width(), tokens_ * e_.heads * e_.dim};
}

void RingChunks::copy(const RingColumns& from, const RingColumns& to, bool accumulate) const {
  const Count rows = tokens_ * e_.kv_heads;
  const auto dense = [&](const RingColumns& c) { return c.sequence_stride == rows * c.stride; };
  const auto of_sequence = [](const RingColumns& c, Count b) {
    return tensor::StridedRows{c.tensor, c.first + b * c.sequence_stride, c.stride};
  };
  const Count calls = dense(from) && dense(to) ? 1 : e_.batch;
  for (Count b = 0; b < calls; ++b)
    kernels_.copy_rows(of_sequence(from, b), of_sequence(to, b), e_.batch / calls * rows, from.width,
                       accumulate);
}

void RingChunks::pack(const Tensor& qkv, const Tensor& block, const RingPair& pair,
                      const Tensor& packed) const {
  copy(queries(qkv, pair.query), queries(packed));
  copy(of_block(block, pair.key), keys(packed));
}

Tensor RingChunks::own_block(const Tensor& qkv) const {
  Tensor own = empty(block(), qkv.dtype(), device::Category::communication);
  for (int chunk = 0; chunk < 2; ++chunk) copy(keys(qkv, chunk), of_block(own, chunk));
  return own;
}

std::array<Tensor, 2> RingChunks::cut(const Tensor& all) const {
  if (e_.batch == 1) {  // they lie as they should
    const Count half = all.numel() / 2;
    return {all.range(0, half).reshape(heads()), all.range(half, 2 * half).reshape(heads())};
  }
  std::array<Tensor, 2> parts = empty_pair(heads(), all.dtype());
  for (int chunk = 0; chunk < 2; ++chunk)
    copy(of_heads(all, chunk), of_heads(parts[static_cast<std::size_t>(chunk)]));
  return parts;
}

void RingChunks::join(const std::array<Tensor, 2>& parts, const Tensor& all) const {
  for (int chunk = 0; chunk < 2; ++chunk)
    copy(of_heads(parts[static_cast<std::size_t>(chunk)]), of_heads(all, chunk));
}

}  // namespace sherd::parallel
