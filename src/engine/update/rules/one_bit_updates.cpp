#include <algorithm>

#include "engine/update/rules/momentum_exchange.h"
#include "engine/update/rules/rule_updates.h"
#include "optim/one_bit_lamb.h"

namespace sherd::engine {

using optim::Hyper;
using optim::Phase;
using optim::SpanUpdate;

namespace {

class OneBitUpdate final : public ExchangingUpdate<RuleUpdate> {
 public:
  using ExchangingUpdate::ExchangingUpdate;

  bool moves(const UpdateChunk& chunk, Phase phase, const optim::State* state, Access access) const override;
  bool pass(Phase phase, const UpdateView& view, double factor, tensor::Kernels& kernels) override;

 private:
  bool move_by_agreed(const UpdateView& view, double factor, tensor::Kernels& kernels);
};

/// Packing takes the momentum and the error, and leaves the error. Then what was agreed on comes in place of
/// the momentum, as the weights are updated; the variance stays.
bool OneBitUpdate::moves(const UpdateChunk& chunk, Phase phase, const optim::State* state,
                         Access access) const {
  if (!state) return phase != Phase::compress;
  const bool error = state->over_replicas == optim::OverReplicas::own,
             momentum = state == chunk.segment->states().data();
  if (phase == Phase::compress) return error || (momentum && access == Access::read);
  const bool exchanges = chunk.phases.front() == Phase::compress;
  return exchanges ? error || momentum == (access == Access::write) : !error;
}

bool OneBitUpdate::pass(Phase phase, const UpdateView& view, double factor, tensor::Kernels& kernels) {
  if (phase == Phase::compress) return compress(view, factor, kernels);
  return momentum().exchanges(*view.segment) ? move_by_agreed(view, factor, kernels)
                                             : move_weights(view, factor, kernels);
}

bool OneBitUpdate::move_by_agreed(const UpdateView& view, double factor, tensor::Kernels& kernels) {
  device::Device& device = kernels.device();
  const auto work = [&](const UpdateView& part, optim::FiniteCheck& check) {
    for_each_span(part, factor, [&](const Hyper& hyper, const SpanUpdate& span, std::int64_t begin) {
      const auto move = [&](const SpanUpdate& run, const optim::AgreedMomentum& agreed, auto) {
        optim::update_agreed(run, agreed, hyper, context().step, device, check);
      };
      momentum().for_each_agreed(part, span, begin, move);
    });
  };
  return context().passes.run(view, device, {.work = work, .moves_weights = true});
}

class OneBitLambUpdate final : public ExchangingUpdate<TrustUpdate> {
 public:
  using ExchangingUpdate::ExchangingUpdate;

  bool moves(const UpdateChunk& chunk, Phase phase, const optim::State* state, Access access) const override;
  bool pass(Phase phase, const UpdateView& view, double factor, tensor::Kernels& kernels) override;

 private:
  bool refresh(const UpdateView& view, double factor, tensor::Kernels& kernels);
  void refresh_part(const UpdateView& part, double factor, bool counts, tensor::Kernels& kernels);
};

/// Packing takes the momentum and the error, and leaves the error. The pass that refreshes reads all, and
/// leaves the variance; the one that moves the weights leaves all else.
bool OneBitLambUpdate::moves(const UpdateChunk& chunk, Phase phase, const optim::State* state,
                             Access access) const {
  const bool reads = access == Access::read;
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

std::unique_ptr<RuleUpdate> make_one_bit_update(const optim::Description& rule, UpdateContext& context) {
  return std::make_unique<OneBitUpdate>(rule, context);
}

std::unique_ptr<RuleUpdate> make_one_bit_lamb_update(const optim::Description& rule, UpdateContext& context,
                                                     std::shared_ptr<ParameterNorms> norms) {
  return std::make_unique<OneBitLambUpdate>(rule, context, std::move(norms));
}

}  // namespace sherd::engine
