#include "base/error.h"
#include "engine/update/rules/rule_updates.h"

namespace sherd::engine {

using optim::Hyper;
using optim::SpanUpdate;
using sharding::Piece;

namespace {

class MatrixUpdate final : public RuleUpdate {
 public:
  MatrixUpdate(const optim::Description& rule, UpdateContext& context,
               std::shared_ptr<WholeMatrices> matrices)
      : RuleUpdate(rule, context), matrices_(std::move(matrices)) {}

  bool moves(const UpdateChunk& chunk, optim::Phase phase, const optim::State* state,
             Access access) const override;
  void begin_step() override;
  bool pass(optim::Phase phase, const UpdateView& view, double factor, tensor::Kernels& kernels) override;
  void exchange(optim::Phase phase, sharding::Segment& segment, tensor::Kernels& kernels) override;
  void end_step() noexcept override { matrices_->clear(); }

 private:
  void for_each_span(const UpdateView& view, double factor, const SpanVisit& visit) const override;
  bool make_directions(const UpdateView& view, double factor, tensor::Kernels& kernels);
  const tensor::Tensor& directions_of(const sharding::Segment& segment, device::Device& device);

  std::shared_ptr<WholeMatrices> matrices_;
  std::vector<optim::Hyper> step_rules_;  ///< optim::step_rule() by parameter group
};

/// Momenta in the pass that makes directions, weights in the other.
bool MatrixUpdate::moves(const UpdateChunk&, optim::Phase phase, const optim::State* state, Access) const {
  return (phase == optim::Phase::direction) == (state != nullptr);
}

void MatrixUpdate::begin_step() {
  matrices_->clear();
  step_rules_.clear();
  for (const Hyper& hyper : context().hyper)
    step_rules_.push_back(hyper.type == config::OptimizerType::muon ? optim::step_rule(hyper) : hyper);
}

bool MatrixUpdate::pass(optim::Phase phase, const UpdateView& view, double factor, tensor::Kernels& kernels) {
  if (phase != optim::Phase::direction) {
    const bool finite = move_weights(view, factor, kernels);
    if (view.end() == view.segment->update_end()) matrices_->drop(*view.segment);
    return finite;
  }
  if (!make_directions(view, factor, kernels))
    fail(ErrorKind::numerics, "the momentum of unit '", view.segment->name(),
         "' is NaN or infinite: lower the learning rate and resume from the last checkpoint");
  return true;
}

/// Directions lie where the passes over the segment are made.
const tensor::Tensor& MatrixUpdate::directions_of(const sharding::Segment& segment, device::Device& device) {
  const bool beside_gpu = PassRunner::beside_gpu(device, segment);
  return matrices_->of(segment, device, beside_gpu ? device::Tier::host : device::Tier::device);
}

bool MatrixUpdate::make_directions(const UpdateView& view, double factor, tensor::Kernels& kernels) {
  device::Device& device = kernels.device();
  const tensor::Tensor directions = directions_of(*view.segment, device);
  const auto work = [&](const UpdateView& part, optim::FiniteCheck& check) {
    RuleUpdate::for_each_span(part, factor, [&](const Hyper& hyper, const SpanUpdate& span, auto flat) {
      const std::int64_t at = flat - view.segment->update_begin();
      optim::directions(span, hyper, context().step, directions.range(at, at + span.n).raw(),
                        directions.dtype(), device, check);
    });
  };
  const auto charge = [&] { optim::charge_directions(device, view.gradients.numel(), directions.dtype()); };
  return context().passes.run(view, device, {.work = work, .charge_on_gpu = charge});
}

void MatrixUpdate::exchange(optim::Phase, sharding::Segment&, tensor::Kernels& kernels) {
  matrices_->orthogonalize(
      [&](const autograd::Parameter& parameter) -> const Hyper& {
        return context().hyper[context().group(parameter)];
      },
      kernels);
}

/// Orthogonal directions come in place of gradients, and their scale in place of the factor.
void MatrixUpdate::for_each_span(const UpdateView& view, double, const SpanVisit& visit) const {
  const sharding::SegmentLayout& layout = view.segment->layout();
  const tensor::Tensor& directions = matrices_->at(*view.segment);
  for (const Piece& piece : layout.pieces(view.begin, view.end())) {
    const autograd::Parameter& parameter = *layout.parameters()[piece.slot];
    const std::size_t group = context().group(parameter);
    const auto each = [&](std::int64_t begin, std::int64_t count, std::int64_t rows, std::int64_t columns) {
      const std::int64_t flat = piece.flat_begin + begin - piece.parameter_begin;
      SpanUpdate span = span_of(view, {piece.slot, begin, flat, count},
                                optim::step_scale(context().hyper[group], rows, columns));
      const std::int64_t at = flat - view.segment->update_begin();
      span.grad = directions.range(at, at + count).raw(), span.grad_dtype = directions.dtype();
      for (void*& moment : span.moments) moment = nullptr;
      visit(step_rules_[group], span, flat);
    };
    for_each_shape(parameter, piece.parameter_begin, piece.parameter_begin + piece.count, each);
  }
}

}  // namespace

std::unique_ptr<RuleUpdate> make_matrix_update(const optim::Description& rule, UpdateContext& context,
                                               std::shared_ptr<WholeMatrices> matrices) {
  return std::make_unique<MatrixUpdate>(rule, context, std::move(matrices));
}

}  // namespace sherd::engine
