#include "optim/one_bit_lamb.h"

#include <algorithm>

#include "engine/update/rules/momentum_exchange.h"
#include "engine/update/rules/rule_updates.h"

namespace sherd::engine {

using optim::Hyper;
using optim::Phase;
using optim::SpanUpdate;

namespace {

class OneBitLambUpdate final : public ExchangingUpdate<TrustUpdate> {
 public:
  using ExchangingUpdate::ExchangingUpdate;

  bool moves(const UpdateChunk& chunk, Phase phase, const optim::State* state, Transfer way) const override;
  bool pass(Phase phase, const UpdateView& view, double factor, tensor::Kernels& kernels) override;

 private:
  bool refresh(const UpdateView& view, double factor, tensor::Kernels& kernels);
  void refresh_part(const UpdateView& part, double factor, bool counts, tensor::Kernels& kernels);
};

/// Packing takes the momentum and the error, and leaves the error. The pass that refreshes reads all, and
/// leaves the variance; the one that moves the weights leaves all else.
bool OneBitLambUpdate::moves(const UpdateChunk& chunk, Phase phase, const optim::State* state,
                             Transfer way) const {
  const bool reads = way == Transfer::read;
  if (!state) return phase == Phase::refresh ? reads : phase != Phase::compress;
  const bool error = state->over_replicas == optim::OverReplicas::own,
             momentum = state == chunk.segment->states().data();
  if (phase == Phase::compress) return error || (momentum && reads);
  if (phase == Phase::refresh) return reads || momentum || error || state->fresh;
  const bool refreshed =
      std::find(chunk.phases.begin(), chunk.phases.end(), Phase::refresh) != chunk.phases.end();
  return (reads || !refreshed) && !error && !state->fresh;
}

bool OneBitLambUpdate::pass(Phase phase, const UpdateView& view, double factor, tensor::Kernels& kernels) {
  if (phase == Phase::compress) return compress(view, factor, kernels);
  if (phase == Phase::refresh) return refresh(view, factor, kernels);
  return TrustUpdate::pass(phase, view, factor, kernels);
}

/// Takes all of the view, of which a part is counted here.
bool OneBitLambUpdate::refresh(const UpdateView& view, double factor, tensor::Kernels& kernels) {
  device::Device& device = kernels.device();
  const sharding::Segment::Range counted = ParameterNorms::counted(*view.segment);
  const auto work = [&](const UpdateView& all, optim::FiniteCheck&) {
    const std::int64_t begin = std::clamp(counted.begin, all.begin, all.end()),
                       end = std::clamp(counted.end, begin, all.end());
    if (all.begin < begin) refresh_part(all.part(all.begin, begin), factor, false, kernels);
    if (begin < end) refresh_part(all.part(begin, end), factor, true, kernels);
    if (end < all.end()) refresh_part(all.part(end, all.end()), factor, false, kernels);
  };
  const auto charge = [&] { optim::charge_refresh(device, view.gradients.numel()); };
  return context().passes.run(view, device, {.work = work, .charge_on_gpu = charge});
}

/// The fresh variance is the third of the view's moments.
void OneBitLambUpdate::refresh_part(const UpdateView& part, double factor, bool counts,
                                    tensor::Kernels& kernels) {
  for_each_tensor_span(
      part, factor,
      [&](const MeasuredTensor& tensor, const Hyper& hyper, const SpanUpdate& span, std::int64_t begin) {
        float* fresh = part.moments[2].data<float>() + (begin - part.begin);
        const bool first = !norms().refreshed(tensor);
        optim::NormSums unused;
        optim::NormSums& sums = counts && !tensor.is_padding() ? norms().of(tensor) : unused;
        if (!momentum().exchanges(*part.segment))
          return optim::refresh_variance(span, nullptr, fresh, first, hyper, kernels, sums);
        momentum().for_each_agreed(
            part, span, begin,
            [&](const SpanUpdate& run, const optim::AgreedMomentum& agreed, std::int64_t at) {
              optim::refresh_variance(run, &agreed, fresh + at, first, hyper, kernels, sums);
            });
      });
}

}  // namespace

std::unique_ptr<RuleUpdate> make_one_bit_lamb_update(const optim::Description& rule, UpdateContext& context,
                                                     std::shared_ptr<ParameterNorms> norms) {
  return std::make_unique<OneBitLambUpdate>(rule, context, std::move(norms));
}

}  // namespace sherd::engine
