// The conformance suite on tensors of GPUs, over every way that they travel; ranks are threads. What a
// machine has too few cards for is skipped, and says so.
#include "comm/nccl/nccl_route.h"
#include "tests/comm/gpu/gpu_case.h"
#include "tests/comm/tcp_ranks.h"

namespace sherd::comm::conformance {
namespace {

/// Threads of one process that share a card read each other's memory in place.
Case shared_card(int ranks) {
  Case out;
  out.name = cat("sharedCard", ranks);
  out.ranks = ranks;
  out.options.timeout_seconds = 60;
  gpu::use_gpus(out);
  out.device = [](Communicator&) { return gpu::gpu_of(0); };
  out.run = [ranks](const CommOptions& options, const std::function<void(Communicator&)>& body) {
    run_local(ranks, options, body);
  };
  return out;
}

Case over_tcp(const std::string& name, int ranks, bool shared_memory) {
  Case out;
  out.name = cat(name, ranks);
  out.ranks = ranks;
  out.options.timeout_seconds = 60;
  out.options.shared_memory = shared_memory;
  out.run = [ranks](const CommOptions& options, const std::function<void(Communicator&)>& body) {
    on_tcp_ranks(ranks, options, body);
  };
  return out;
}

/// Through page-locked memory, for ranks of processes that share a card.
Case staged(const std::string& name, int ranks, bool shared_memory) {
  Case out = over_tcp(name, ranks, shared_memory);
  gpu::use_gpus(out);
  out.device = [](Communicator&) { return gpu::gpu_of(0); };
  return out;
}

/// NCCL, which takes one rank per card.
Case nccl(int ranks, bool shared_memory) {
  Case out = over_tcp(shared_memory ? "nccl" : "ncclByMessages", ranks, shared_memory);
  gpu::use_gpus(out, static_cast<std::size_t>(ranks));
  out.queues = true;
  out.unavailable = [ranks] {
    return nccl_version().empty() ? "this build has no NCCL" : gpu::lacking(static_cast<std::size_t>(ranks));
  };
  return out;
}

INSTANTIATE_TEST_SUITE_P(Gpu, Conformance,
                         ::testing::Values(shared_card(1), shared_card(2), shared_card(4),
                                           staged("windows", 2, true), staged("messages", 2, false),
                                           staged("messages", 4, false), nccl(1, true), nccl(2, true),
                                           nccl(3, true), nccl(2, false)),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace sherd::comm::conformance
