#pragma once

#include "device/meta.h"
#include "engine/update/optimizer.h"
#include "engine/update/update_staging.h"
#include "optim/device_update.h"

// What the sources of Optimizer share: how a view is cut into spans, as rules take them.

namespace sherd::engine {

/// What updates on or beside a GPU need.
struct Optimizer::OnGpu {
  explicit OnGpu(device::CudaDevice& device) : check(device), staging(device) {}
  optim::FiniteCheck check;
  UpdateStaging staging;
};

/// Whether the processor updates what a GPU computes with.
inline bool by_processor_beside_gpu(device::Device& device, const sharding::Segment& segment) {
  return device::stands_for(device) == device::Kind::cuda && UpdateStaging::by_processor(segment);
}

/// Calls visit(run, first logical element) for the parts of a piece that are updated by themselves: all of
/// it, but where moments are rounded by the element's place in the whole parameter, of which there is a
/// slice.
template <class Visit>
void for_each_run(const UpdateView& view, const sharding::Piece& piece, const Visit& visit) {
  const tensor::Slice slice = view.segment->layout().parameters()[piece.slot]->logical_slice();
  if (slice.is_whole() || view.moments.empty() || view.moments[0].dtype() != DType::bf16)
    return visit(piece, piece.parameter_begin);
  slice.for_each_run(piece.parameter_begin, piece.parameter_begin + piece.count,
                     [&](std::int64_t local, std::int64_t logical, std::int64_t count) {
                       const std::int64_t flat = piece.flat_begin + local - piece.parameter_begin;
                       visit(sharding::Piece{piece.slot, local, flat, count}, logical);
                     });
}

template <class Visit>
void Optimizer::for_each_span_of(const UpdateView& view, const sharding::Piece& piece, double factor,
                                 const Visit& visit) const {
  // A replica that keeps its gradients takes the mean over its own ranks.
  const double own =
      exchanges_momentum(*view.segment, steps_) ? factor * view.segment->groups().replicas() : factor;
  const std::size_t group = group_of(*view.segment->layout().parameters()[piece.slot]);
  const optim::Hyper& hyper = used_[group];
  const bool normalizes = hyper.type == config::OptimizerType::nvlamb &&
                          norm_ > hyper.as<config::NvLambOptions>().normalize_above;
  for_each_run(view, piece, [&](const sharding::Piece& run, std::int64_t first_element) {
    optim::SpanUpdate span = span_of(view, run, normalizes ? own / norm_ : own);
    span.first_element = first_element;
    visit(group, span, run.flat_begin);
  });
}

template <class Visit>
void Optimizer::for_each_span(const UpdateView& view, double factor, const Visit& visit) const {
  for (const sharding::Piece& piece : view.segment->layout().pieces(view.begin, view.end()))
    for_each_span_of(view, piece, factor, visit);
}

/// Spans begin where blocks of norms do (tensor/exact_sum.h), or end with such a block, so that sums do not
/// depend on how a segment is cut.
template <class Visit>
void Optimizer::for_each_tensor_span(const UpdateView& view, double factor, const Visit& visit) const {
  const sharding::SegmentLayout& layout = view.segment->layout();
  constexpr std::int64_t block = sharding::layout_alignment;
  for (const sharding::Piece& piece : layout.pieces(view.begin, view.end())) {
    const std::int64_t first = piece.parameter_begin;
    const auto each = [&](std::int64_t begin, std::int64_t end, const MeasuredTensor& tensor) {
      const sharding::Piece part{piece.slot, begin, piece.flat_begin + begin - first, end - begin};
      for_each_span_of(view, part, factor, [&](std::size_t group, optim::SpanUpdate span, std::int64_t flat) {
        span.trust = norms_.trust(tensor);
        const std::int64_t head = std::min(span.n, (block - flat % block) % block);
        if (head > 0) visit(group, tensor, optim::part_of(span, 0, head), flat);
        if (head < span.n) visit(group, tensor, optim::part_of(span, head, span.n - head), flat + head);
      });
    };
    for_each_measured(*layout.parameters()[piece.slot], first, first + piece.count, each);
  }
}

template <class Visit>
void Optimizer::for_each_matrix_span(const UpdateView& view, const tensor::Tensor& kept,
                                     const Visit& visit) const {
  const sharding::SegmentLayout& layout = view.segment->layout();
  for (const sharding::Piece& piece : layout.pieces(view.begin, view.end())) {
    const autograd::Parameter& parameter = *layout.parameters()[piece.slot];
    const std::size_t group = group_of(parameter);
    const auto each = [&](std::int64_t begin, std::int64_t count, std::int64_t rows, std::int64_t columns) {
      const std::int64_t flat = piece.flat_begin + begin - piece.parameter_begin;
      optim::SpanUpdate span =
          span_of(view, {piece.slot, begin, flat, count}, optim::step_scale(used_[group], rows, columns));
      const std::int64_t at = flat - view.segment->update_begin();
      span.grad = kept.range(at, at + count).raw(), span.grad_dtype = kept.dtype();
      for (void*& moment : span.moments) moment = nullptr;
      visit(group, span, flat);
    };
    for_each_shape(parameter, piece.parameter_begin, piece.parameter_begin + piece.count, each);
  }
}

/// Calls visit(run of the span, what was agreed on there, its first element in the span); no run has a
/// gradient. The error is the last of the view's moments.
template <class Visit>
void Optimizer::for_each_agreed(const PackedMomentum& momentum, const UpdateView& view,
                                const optim::SpanUpdate& span, std::int64_t begin, const Visit& visit) const {
  float* error = view.moments.back().data<float>() + (begin - view.begin);
  momentum.for_each_run(begin, begin + span.n, error,
                        [&](std::int64_t from, std::int64_t to, const optim::AgreedMomentum& agreed) {
                          optim::SpanUpdate run = optim::part_of(span, from - begin, to - from);
                          run.grad = nullptr;
                          visit(run, agreed, from - begin);
                        });
}

}  // namespace sherd::engine
