#include "optim/isa/loop.h"

namespace sherd::optim::SHERD_ISA {
namespace {

template <class Rule, class P, class M>
Extremes update(const SpanChunk& chunk, const void* rule) {
  return run<Streams<P, M, Rule>>(chunk, *static_cast<const Rule*>(rule));
}

// Rules without states have one loop for every dtype of them.
template <class Rule, class P>
constexpr RuleLoop with_bf16_states() {
  if constexpr (Rule::state_count > 0)
    return update<Rule, P, Bf16>;
  else
    return update<Rule, P, float>;
}

#define SHERD_STATES(P) \
  { update<Rule, P, float>, with_bf16_states<Rule, P>() }

template <class Rule>
constexpr RuleLoops loops_of = {
    {SHERD_STATES(float), SHERD_STATES(Bf16), SHERD_STATES(F16), SHERD_STATES(Split)}};

template <class... R>
constexpr UpdateTable table_of(RuleList<R...>) {
  return {{loops_of<R>...}};
}

}  // namespace

const UpdateTable update_table = table_of(Rules{});

}  // namespace sherd::optim::SHERD_ISA
