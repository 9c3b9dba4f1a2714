// Tensor and context ranks on GPUs that do everything as late as they may have the bits of the processor's: a
// wait that is missing between a collective and the compute stream, or memory given back too early, shows.
#include <gtest/gtest.h>

#include "comm/local/local.h"
#include "support/equality.h"
#include "support/full_suite.h"
#include "tests/comm/lazy_gpus.h"
#include "tests/comm/tcp_ranks.h"

namespace sherd::test {
namespace {

struct StreamLayout {
  const char* name;
  int tensor, context;
  const char* method = "ring";
  bool sequence_parallel = true;
};
constexpr StreamLayout stream_layouts[] = {{"tensor2", 2, 1},
                                           {"tensor2_whole_stream", 2, 1, "ring", false},
                                           {"ring2", 1, 2},
                                           {"ring3", 1, 3},
                                           {"ulysses2", 1, 2, "ulysses"},
                                           {"tensor2_ring2", 2, 2},
                                           {"tensor4", 4, 1}};
void PrintTo(const StreamLayout& layout, std::ostream* out) {
  *out << layout.name;
}

RunSpec spec_of(const StreamLayout& layout) {
  RunSpec spec;
  spec.tensor = layout.tensor, spec.context = layout.context, spec.context_method = layout.method;
  spec.sequence_parallel = layout.sequence_parallel;
  spec.ranks = layout.tensor * layout.context;
  spec.layers = 2, spec.steps = 3, spec.accumulation = 2, spec.stage = 2;
  return spec;
}

/// One card for all ranks, which read each other's memory in the order of their streams.
void on_one_card(int ranks, const comm::CommOptions& options,
                 const std::function<void(comm::Communicator&)>& body) {
  comm::run_local(ranks, comm::LocalOptions{options, comm::reduce_by_processor}, body);
}
/// A card for each; tensors go through the host's memory, and sockets.
void on_own_cards(int ranks, const comm::CommOptions& options,
                  const std::function<void(comm::Communicator&)>& body) {
  comm::CommOptions sockets = options;
  sockets.shared_memory = false;
  comm::on_tcp_ranks(ranks, sockets, body);
}

class LateParallel : public ::testing::TestWithParam<StreamLayout> {};

TEST_P(LateParallel, RanksHaveTheBitsOfTheProcessor) {
  for (const bool llama : {false, true}) {
    RunSpec spec = spec_of(GetParam());
    spec.llama = llama, spec.tied = !llama;
    spec.recompute = llama ? "selective" : "none";
    const RunResult expected = train_local(spec);
    ASSERT_NE(expected.losses.front(), expected.losses.back());
    spec.lazy = true;
    for (const bool one_card : {true, false}) {
      spec.graphs = llama == one_card;
      EXPECT_TRUE(train_on(one_card ? on_one_card : on_own_cards, spec).bits() == expected.bits())
          << (one_card ? "one card" : "a card for each") << ", llama " << llama;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Over, LateParallel, ::testing::ValuesIn(stream_layouts),
                         [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace sherd::test
