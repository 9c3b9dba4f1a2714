// The conformance suite on tensors of GPUs that do everything as late as marks allow: shared by the ranks,
// and of ranks that send bytes of the host. What runs the same on real ones is in gpu/.
#include "comm/local/local.h"
#include "tests/comm/conformance.h"
#include "tests/comm/lazy_gpus.h"
#include "tests/comm/tcp_ranks.h"

namespace sherd::comm::conformance {
namespace {

Case lazy_case(const std::string& name, int ranks) {
  Case out;
  out.name = cat(name, ranks);
  out.ranks = ranks;
  out.options.timeout_seconds = 60;
  out.device = [](Communicator&) { return std::make_shared<sherd::testing::LazyCudaDevice>(); };
  return out;
}

Case shared_card(int ranks) {
  Case out = lazy_case("sharedCard", ranks);
  out.run = [ranks](const CommOptions& options, const std::function<void(Communicator&)>& body) {
    run_local(ranks, LocalOptions{options, reduce_by_processor}, body);
  };
  return out;
}

Case staged(int ranks, bool shared_memory) {
  Case out = lazy_case(shared_memory ? "windows" : "messages", ranks);
  out.options.shared_memory = out.one_machine = shared_memory;
  out.run = [ranks](const CommOptions& options, const std::function<void(Communicator&)>& body) {
    on_tcp_ranks(ranks, options, body);
  };
  return out;
}

INSTANTIATE_TEST_SUITE_P(LazyGpus, Conformance,
                         ::testing::Values(shared_card(1), shared_card(2), shared_card(4), staged(2, true),
                                           staged(3, false)),
                         [](const auto& test) { return test.param.name; });

/// The words by which ranks split lie in the host's memory, whatever the last call's tensors lay in, and stay
/// until all have read them.
TEST(LazyGpus, RanksSplitRightAfterACallOnGpus) {
  run_local(4, LocalOptions{{.timeout_seconds = 60}, reduce_by_processor}, [](Communicator& comm) {
    const auto gpu = std::make_shared<sherd::testing::LazyCudaDevice>();
    comm.bind(gpu);
    comm.all_reduce(Tensor::zeros(*gpu, {64}, DType::f32)).wait();
    for (int turn = 0; turn < 300; ++turn) {
      const auto part = comm.split((comm.rank() + turn) % 2, 0);
      ASSERT_EQ(part->size(), 2) << turn;
      ASSERT_EQ(part->rank(), comm.rank() / 2) << turn;
    }
  });
}

}  // namespace
}  // namespace sherd::comm::conformance
