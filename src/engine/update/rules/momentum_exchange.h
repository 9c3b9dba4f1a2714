#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "engine/update/rule_update.h"
#include "optim/one_bit.h"

namespace sherd::engine {

/// One segment's momentum on its way between replicas (1-bit Adam). The update range is cut into as many
/// equal parts as there are replicas, of which each serves one: all send it their signs of that part, it adds
/// them up, and sends the signs of the mean back. A *run* is the elements of a part that belong to one
/// parameter; it has a scale of its own, in which rows that pad a vocabulary do not count. Its memory is that
/// of the device or host which updates the segment, and lasts with this. Used from the rank's thread.
class PackedMomentum {
 public:
  PackedMomentum(const sharding::Segment& segment, device::Device& device);

  /// Bytes that each replica sends to each other one, twice a step: signs and scales of a part.
  std::int64_t block_bytes() const { return block_bytes_; }
  /// Opens a step.
  void begin();
  /// Packs elements of a parameter from flat element `begin` on; each element once a step.
  void compress(std::int64_t begin, const optim::MomentumSpan& span, tensor::Kernels& kernels);
  /// Replicas agree. Collective over them.
  void exchange(sharding::Segment& segment, tensor::Kernels& kernels);
  /// Calls visit(flat begin, flat end, what was agreed on there) for the runs of flat elements [begin, end).
  /// `error`: this replica's, of element `begin`.
  template <class Visit>
  void for_each_run(std::int64_t begin, std::int64_t end, float* error, const Visit& visit) const {
    for (const ScaledRun& run : runs_) {
      const std::int64_t from = std::max(begin, run.begin), to = std::min(end, run.end);
      if (from < to)
        visit(from, to,
              optim::AgreedMomentum{signs(run, from), run.agreed_scale, error + (from - begin),
                                    run.sent_scale, bit(run, from)});
    }
  }

 private:
  struct ScaledRun {
    std::int64_t begin, end;   ///< flat elements
    std::int64_t part, place;  ///< who serves it, and which of the part's scales it has
    std::int64_t counted;      ///< elements from its beginning on that are no padding
    tensor::ExactSum squares;  ///< sum over what this replica sends
    float sent_scale = 0, agreed_scale = 0;
  };
  std::byte* block(const tensor::Tensor& of, std::int64_t part) const;
  std::uint64_t* signs(const ScaledRun& run, std::int64_t element) const;
  int bit(const ScaledRun& run, std::int64_t element) const;
  float* scales(const tensor::Tensor& of, std::int64_t part) const;
  template <class Visit>
  void for_each_part(const Visit& visit) const;
  void serve(ScaledRun& run, const tensor::Tensor& errors, tensor::Kernels& kernels);

  std::string name_;
  std::int64_t begin_, part_, block_bytes_ = 0;  ///< begin of the update range; elements and bytes of a part
  std::int64_t places_ = 0;                      ///< for scales in a part
  int replicas_, own_;
  std::vector<ScaledRun> runs_;
  tensor::Tensor packed_, received_;  ///< a block for each part, and from each replica
};

/// The momenta of a rule's segments that replicas exchange in place of gradients behind its freeze_step.
class MomentumExchange {
 public:
  /// Both must outlive it.
  MomentumExchange(const optim::Description& rule, const UpdateContext& context)
      : rule_(rule), context_(context) {}

  /// Whether replicas exchange the segment's momentum in the open step.
  bool exchanges(const sharding::Segment& segment) const {
    return rule_.exchanges_momentum(context_.step) && segment.can_exchange_momentum();
  }
  /// The factor of the segment's gradients: a replica that keeps its own takes the mean over its own ranks.
  double factor_of(const sharding::Segment& segment, double factor) const {
    return exchanges(segment) ? factor * segment.groups().replicas() : factor;
  }
  /// Takes the memory that the segment will need, where it can exchange momentum.
  void prepare(const sharding::Segment& segment, device::Device& device) {
    if (segment.can_exchange_momentum()) of(segment, device);
  }
  /// Opens a step: forgets what one that was abandoned has packed.
  void begin() {
    for (auto& [segment, packed] : packed_) packed->begin();
  }
  /// Packs a span of the view, which begins at flat element `begin`; the error is the last of its states.
  void compress(const UpdateView& view, const optim::SpanUpdate& span, std::int64_t begin, double beta1,
                tensor::Kernels& kernels);
  /// Replicas agree on what was packed of the segment. Collective over them.
  void exchange(sharding::Segment& segment, tensor::Kernels& kernels);
  /// Calls visit(run of the span, what was agreed on there, its first element in the span); no run has a
  /// gradient.
  template <class Visit>
  void for_each_agreed(const UpdateView& view, const optim::SpanUpdate& span, std::int64_t begin,
                       const Visit& visit) const {
    float* error = view.moments.back().data<float>() + (begin - view.begin);
    const auto each = [&](std::int64_t from, std::int64_t to, const optim::AgreedMomentum& agreed) {
      optim::SpanUpdate run = optim::part_of(span, from - begin, to - from);
      run.grad = nullptr;
      visit(run, agreed, from - begin);
    };
    packed_.at(view.segment)->for_each_run(begin, begin + span.n, error, each);
  }

 private:
  PackedMomentum& of(const sharding::Segment& segment, device::Device& device);

  const optim::Description& rule_;
  const UpdateContext& context_;
  std::unordered_map<const sharding::Segment*, std::unique_ptr<PackedMomentum>> packed_;
};

/// The part that rules have in common whose replicas exchange momentum; `Base` is the rule's update without.
template <class Base>
class ExchangingUpdate : public Base {
 public:
  using Base::Base;

  void prepare(const sharding::Segment& segment, device::Device& device) override {
    momentum_.prepare(segment, device);
  }
  void begin_step() override { Base::begin_step(), momentum_.begin(); }
  void exchange(optim::Phase, sharding::Segment& segment, tensor::Kernels& kernels) override {
    momentum_.exchange(segment, kernels);
  }

 protected:
  const MomentumExchange& momentum() const { return momentum_; }
  double factor_of(const sharding::Segment& segment, const optim::Hyper&, double factor) const override {
    return momentum_.factor_of(segment, factor);
  }
  /// The pass that packs the view's momentum.
  bool compress(const UpdateView& view, double factor, tensor::Kernels& kernels) {
    const auto work = [&](const UpdateView& part, optim::FiniteCheck&) {
      const auto pack = [&](const optim::Hyper& hyper, const optim::SpanUpdate& span, std::int64_t begin) {
        momentum_.compress(part, span, begin, hyper.betas()->beta1, kernels);
      };
      RuleUpdate::for_each_span(part, factor, pack);
    };
    return this->context().passes.run(view, kernels.device(), {.work = work});
  }

 private:
  MomentumExchange momentum_{this->rule(), this->context()};
};

}  // namespace sherd::engine
