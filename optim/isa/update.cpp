#include "optim/isa/loop.h"

namespace sherd::optim::SHERD_ISA {
namespace {

template <class Rule, class G, class P, class M>
Extremes update(const Chunk& chunk, const void* rule) {
  return run<Streams<G, P, M, Rule>>(chunk, *static_cast<const Rule*>(rule));
}

// Rules without states have one loop for every dtype of them.
template <class Rule, class G, class P>
constexpr RuleLoop with_bf16_states() {
  if constexpr (Rule::state_count > 0)
    return update<Rule, G, P, Bf16>;
  else
    return update<Rule, G, P, float>;
}

#define SHERD_STATES(G, P) \
  { update<Rule, G, P, float>, with_bf16_states<Rule, G, P>() }
#define SHERD_MASTERS(G) \
  { SHERD_STATES(G, float), SHERD_STATES(G, Bf16), SHERD_STATES(G, F16), SHERD_STATES(G, Split) }

template <class Rule>
constexpr RuleLoops loops_of = {{SHERD_MASTERS(float), SHERD_MASTERS(Bf16), SHERD_MASTERS(F16)}};

template <class... R>
constexpr UpdateTable table_of(RuleList<R...>) {
  return {{loops_of<R>...}};
}

}  // namespace

const UpdateTable update_table = table_of(Rules{});

}  // namespace sherd::optim::SHERD_ISA
