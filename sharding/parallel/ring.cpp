#include "sharding/parallel/ring.h"

#include <utility>

#include "sharding/parallel/ring_chunks.h"
#include "tensor/argument_checks.h"

namespace sherd::parallel {

using comm::Communicator;
using device::Category;
using tensor::Kernels;

namespace {

/// A block on its way to the next rank, and the one that comes in its place from the previous rank.
class Hop {
 public:
  Hop() = default;
  Hop(Kernels& kernels, Communicator& ranks, const Tensor& block, const char* label) {
    const comm::CallOptions options{.label = label, .async = true};
    const int rank = ranks.rank(), size = ranks.size();
    arriving_ = Tensor::empty(kernels.device(), block.shape(), block.dtype(), Category::communication);
    sent_ = ranks.send(block, (rank + 1) % size, options);
    received_ = ranks.receive(arriving_, (rank + size - 1) % size, options);
  }
  bool under_way() const { return arriving_.defined(); }
  /// The block that has come; the one that was sent may go.
  Tensor wait() {
    received_.wait(), sent_.wait();
    received_ = {}, sent_ = {};  // they hold what they moved
    return std::exchange(arriving_, {});
  }

 private:
  comm::Work sent_, received_;
  Tensor arriving_;
};

/// Keys and values go around. At each step run(pairs, block) has one rank's, while the next are under way.
template <class Run>
void go_around(Kernels& kernels, Communicator& ranks, const RingChunks& chunks, Tensor block,
               const char* label, const Run& run) {
  const int rank = ranks.rank(), size = ranks.size();
  for (int step = 0; step < size; ++step) {
    Hop hop;
    if (step + 1 < size) hop = Hop(kernels, ranks, block, label);
    run(chunks.pairs((rank + size - step) % size), block);
    if (hop.under_way()) block = hop.wait();
  }
}

std::size_t at(int chunk) {
  return static_cast<std::size_t>(chunk);
}

}  // namespace

RingResult ring_attention(Kernels& kernels, Communicator& ranks, const Tensor& qkv,
                          const tensor::Attention& geometry, const Tensor& sinks) {
  const RingChunks chunks(kernels, ranks.rank(), ranks.size(), qkv, geometry);
  const DType compute = tensor::compute_type(qkv.dtype());
  const std::array<Tensor, 2> sums = chunks.empty_pair(chunks.heads(), compute);
  RingResult result{{}, chunks.empty_pair(chunks.lse(), compute, Category::activations)};
  {
    const Tensor packed = chunks.empty(chunks.packed(), qkv.dtype()),
                 part = chunks.empty(chunks.heads(), qkv.dtype()),
                 part_lse = chunks.empty(chunks.lse(), compute);
    std::array<bool, 2> begun{};
    go_around(kernels, ranks, chunks, chunks.own_block(qkv), "ring attention: keys and values",
              [&](const std::vector<RingPair>& pairs, const Tensor& block) {
                for (const RingPair& pair : pairs) {
                  const std::size_t query = at(pair.query);
                  chunks.pack(qkv, block, pair, packed);
                  kernels.attention(packed, pair.geometry, part, part_lse);
                  kernels.merge_attention(part, part_lse, 0, !begun[query], sums[query], result.lse[query]);
                  begun[query] = true;
                }
              });
  }
  if (sinks) {
    const Tensor scores = chunks.empty(sinks.shape(), compute);
    kernels.copy(sinks, scores);
    for (std::size_t query = 0; query < 2; ++query)
      kernels.attention_sinks(scores, sums[query], result.lse[query]);
  }
  result.out = chunks.empty(chunks.all_heads(), qkv.dtype(), Category::activations);
  chunks.join(sums, result.out);
  return result;
}

Tensor ring_attention_backward(Kernels& kernels, Communicator& ranks, const Tensor& qkv,
                               const tensor::Attention& geometry, const RingResult& result,
                               const Tensor& dout) {
  const RingChunks chunks(kernels, ranks.rank(), ranks.size(), qkv, geometry);
  const DType compute = tensor::compute_type(qkv.dtype());
  const std::array<Tensor, 2> dqueries = chunks.empty_pair(chunks.heads(), compute);
  for (const Tensor& sum : dqueries) kernels.fill(sum, 0);
  Tensor dblock = chunks.empty(chunks.block(), compute, Category::communication);
  kernels.fill(dblock, 0);
  Hop gradients;  // what ranks before found of a block's gradient, on its way during a product
  const auto take_gradients = [&] {
    if (gradients.under_way()) dblock = gradients.wait();
  };
  {
    const std::array<Tensor, 2> out = chunks.cut(result.out), given = chunks.cut(dout);
    const Tensor packed = chunks.empty(chunks.packed(), qkv.dtype()),
                 gradient = chunks.empty(chunks.packed(), qkv.dtype());
    go_around(kernels, ranks, chunks, chunks.own_block(qkv), "ring attention: keys and values, backward",
              [&](const std::vector<RingPair>& pairs, const Tensor& block) {
                for (const RingPair& pair : pairs) {
                  const std::size_t query = at(pair.query);
                  chunks.pack(qkv, block, pair, packed);
                  kernels.attention_backward(packed, pair.geometry, out[query], result.lse[query],
                                             given[query], gradient);
                  take_gradients();
                  chunks.copy(chunks.queries(gradient), chunks.of_heads(dqueries[query]), true);
                  chunks.copy(chunks.keys(gradient), chunks.of_block(dblock, pair.key), true);
                }
                take_gradients();  // of a block that this rank's windows do not reach
                gradients = Hop(kernels, ranks, dblock, "ring attention: gradients of keys and values");
              });
  }
  Tensor dqkv = chunks.empty(qkv.shape(), qkv.dtype(), Category::activations);
  for (int chunk = 0; chunk < 2; ++chunk)
    chunks.copy(chunks.of_heads(dqueries[at(chunk)]), chunks.queries(dqkv, chunk));
  dblock = gradients.wait();  // this rank's own
  for (int chunk = 0; chunk < 2; ++chunk)
    chunks.copy(chunks.of_block(dblock, chunk), chunks.keys(dqkv, chunk));
  return dqkv;
}

void ring_sinks_backward(Kernels& kernels, Communicator& ranks, const Tensor& qkv,
                         const tensor::Attention& geometry, const Tensor& sinks, const RingResult& result,
                         const Tensor& dout, const Tensor& dsinks, bool accumulate) {
  const RingChunks chunks(kernels, ranks.rank(), ranks.size(), qkv, geometry);
  const std::array<Tensor, 2> out = chunks.cut(result.out), given = chunks.cut(dout);
  for (std::size_t query = 0; query < 2; ++query)
    kernels.attention_sinks_backward(sinks, out[query], result.lse[query], given[query], dsinks,
                                     accumulate || query > 0);
}

}  // namespace sherd::parallel
