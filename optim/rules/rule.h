#pragma once

#include <cstdint>

// All update rules have the following in common. A rule is a struct of fp32 numbers, formed once per span and
// step, and its formula, written once as
//
//   template <class Math, class F>
//   SHERD_RULE void operator()(Math, F& p, F g, F& state, …) const;
//
// for an element or a register of elements: p the fp32 master, g the gradient (unscaled, averaged, clipped),
// then the states in the order of describe(). F is a vector in the loops of optim/isa and a float in the
// kernels of optim/cuda; + - * / round once per operation in the order written, comparisons choose by ?:, and
// Math has the functions that differ between them (Math::root). Every rule has
//
//   static constexpr int state_count;  // the states that it takes
//   static constexpr int watched;      // the state that is not finite whenever any state is not (if any)
//   float decay;                       // all that may differ between spans of one Hyper (SpanUpdate::decay)
//   static bool serves(const config::OptimizerRule&);
//   static Description describe(const config::OptimizerRule&);
//   static Rule make(const config::OptimizerRule&, std::int64_t step, const SpanTerms&);
//
// and, where describe() has Phase::parameter_norms,
//
//   static double trust(const config::OptimizerRule&, double weight, double measured, bool matrix);
//   friend bool operator==(const Rule&, const Rule&) = default;
//
// Headers of rules are compiled once per instruction set: plain declarations and the formula alone, nothing
// of the standard library (tensor/cpu/isa/tables.h). What runs on the host is in optim/rules.cpp.

namespace sherd::config {
struct OptimizerRule;
}

#if defined(__CUDACC__)
#define SHERD_RULE __host__ __device__ __forceinline__
#else
#define SHERD_RULE [[gnu::always_inline]] inline
#endif

namespace sherd::optim {

struct Description;

/// The terms of one span's update beside its Hyper and the step.
struct SpanTerms {
  bool decays = true;     ///< weight decay applies
  double trust = 1;       ///< trust() of the parameter
  bool measures = false;  ///< nothing is updated: what trust() takes a norm of comes in place of the weight
  bool agreed = false;    ///< momentum that replicas agreed on comes in place of the gradient
};

/// Rules, by number.
template <class... Rules>
struct RuleList {
  static constexpr int count = sizeof...(Rules);
};

/// One step of `rule` on an element that may have more states beside it than the rule takes.
template <class Rule, class Math, class F>
SHERD_RULE void step_element(const Rule& rule, Math math, F& p, F g, F& first, F& second) {
  if constexpr (Rule::state_count == 0)
    rule(math, p, g);
  else if constexpr (Rule::state_count == 1)
    rule(math, p, g, first);
  else
    rule(math, p, g, first, second);
}

}  // namespace sherd::optim
