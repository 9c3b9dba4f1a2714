#include "engine/update/pruned_weights.h"

#include <algorithm>

#include "optim/pruned.h"

namespace sherd::engine {
namespace {

/// Calls visit(span) for what a view has of each parameter of which weights are pruned.
template <class Visit>
void for_each_pruned(const UpdateView& view, const Visit& visit) {
  const sharding::SegmentLayout& layout = view.segment->layout();
  const sharding::MasterForm form = view.segment->master_form();
  for (const sharding::Piece& piece : layout.pieces(view.begin, view.end())) {
    if (!layout.parameters()[piece.slot]->pruned) continue;
    const UpdateView part = view.part(piece.flat_begin, piece.flat_begin + piece.count);
    optim::PrunedSpan span{
        .grad = part.gradients.raw(), .grad_dtype = part.gradients.dtype(), .n = piece.count};
    if (form == sharding::MasterForm::in_parameters) {
      span.master = part.parameters.data<float>();
    } else {
      span.param = part.parameters.raw();
      if (form == sharding::MasterForm::split)
        span.low = part.masters.data<std::uint16_t>();
      else
        span.master = part.masters.data<float>();
    }
    visit(span);
  }
}

}  // namespace

void update_pruned(const UpdateView& view, std::int64_t most, const PassRunner::Work& work,
                   device::Device& device, optim::FiniteCheck& check) {
  for (std::int64_t at = view.begin; at < view.end(); at += most) {
    const UpdateView part = view.part(at, std::min(at + most, view.end()));
    for_each_pruned(part, [&](const optim::PrunedSpan& span) { optim::mark_pruned(span, device); });
    work(part, check);
    for_each_pruned(part, [&](const optim::PrunedSpan& span) { optim::restore_pruned(span, device); });
  }
}

}  // namespace sherd::engine
