#include "engine/update/rules/momentum_exchange.h"
#include "engine/update/rules/rule_updates.h"

namespace sherd::engine {

using optim::Hyper;
using optim::Phase;
using optim::SpanUpdate;

namespace {

class OneBitUpdate final : public ExchangingUpdate<RuleUpdate> {
 public:
  using ExchangingUpdate::ExchangingUpdate;

  bool moves(const UpdateChunk& chunk, Phase phase, const optim::State* state, Transfer way) const override;
  bool pass(Phase phase, const UpdateView& view, double factor, tensor::Kernels& kernels) override;

 private:
  bool move_by_agreed(const UpdateView& view, double factor, tensor::Kernels& kernels);
};

/// Packing takes the momentum and the error, and leaves the error. Then what was agreed on comes in place of
/// the momentum, as the weights are updated; the variance stays.
bool OneBitUpdate::moves(const UpdateChunk& chunk, Phase phase, const optim::State* state,
                         Transfer way) const {
  if (!state) return phase != Phase::compress;
  const bool error = state->over_replicas == optim::OverReplicas::own,
             momentum = state == chunk.segment->states().data();
  if (phase == Phase::compress) return error || (momentum && way == Transfer::read);
  const bool exchanges = chunk.phases.front() == Phase::compress;
  return exchanges ? error || momentum == (way == Transfer::write) : !error;
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

}  // namespace

std::unique_ptr<RuleUpdate> make_one_bit_update(const optim::Description& rule, UpdateContext& context) {
  return std::make_unique<OneBitUpdate>(rule, context);
}

}  // namespace sherd::engine
