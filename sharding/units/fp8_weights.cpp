#include "sharding/units/fp8_weights.h"

#include "autograd/linear_products.h"

namespace sherd::sharding {

Fp8Weights::Fp8Weights(const Segment& segment) : segment_(segment) {
  const std::vector<ParameterPtr>& parameters = segment.layout().parameters();
  for (std::size_t slot = 0; slot < parameters.size(); ++slot) {
    const tensor::Shape& shape = parameters[slot]->shape;
    begins_.push_back(begins_.back() +
                      tensor::fp8_scales_shape(rule_of(slot).scaling, shape[0], shape[1]).numel());
  }
  scales_ = Tensor::empty(segment.device(), {begins_.back()}, DType::f32, device::Category::communication);
}

tensor::Fp8Rule Fp8Weights::rule_of(std::size_t slot) const {
  return segment_.layout().parameters()[slot]->fp8->recipe.weight;
}

tensor::Fp8Range Fp8Weights::range_of(const Piece& piece) const {
  const tensor::Shape& shape = segment_.layout().parameters()[piece.slot]->shape;
  return {shape[0], shape[1], piece.parameter_begin, piece.parameter_begin + piece.count};
}

void Fp8Weights::agree(const Tensor& own) {
  tensor::Kernels& kernels = segment_.kernels();
  kernels.fill(scales_, 0);
  for (const Piece& piece : segment_.layout().pieces(segment_.own_begin(), segment_.own_end())) {
    const std::int64_t begin = piece.flat_begin - segment_.own_begin();
    kernels.fp8_largest(own.range(begin, begin + piece.count), range_of(piece), rule_of(piece.slot),
                        scales_of(piece.slot));
  }
  segment_.groups()
      .shard->all_reduce(scales_, comm::ReduceOp::max, 1, {.label = segment_.name() + " scales"})
      .wait();
  for (std::size_t slot = 0; slot + 1 < begins_.size(); ++slot)
    kernels.fp8_scales(rule_of(slot).format, scales_of(slot));
  agreed_ = true;
}

void Fp8Weights::encode(const Tensor& own, const Tensor& codes) {
  if (!agreed_) agree(own);
  for (const Piece& piece : segment_.layout().pieces(segment_.own_begin(), segment_.own_end())) {
    const std::int64_t begin = piece.flat_begin - segment_.own_begin(), end = begin + piece.count;
    segment_.kernels().fp8_encode(own.range(begin, end), range_of(piece), rule_of(piece.slot),
                                  scales_of(piece.slot), codes.range(begin, end));
  }
}

void Fp8Weights::decode(const Tensor& codes, const Tensor& full) const {
  for (const Piece& piece : segment_.layout().pieces(0, segment_.layout().padded())) {
    const std::int64_t begin = piece.flat_begin, end = begin + piece.count;
    segment_.kernels().fp8_decode(codes.range(begin, end), range_of(piece), rule_of(piece.slot),
                                  scales_of(piece.slot), full.range(begin, end));
  }
}

}  // namespace sherd::sharding
