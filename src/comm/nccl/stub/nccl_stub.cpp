#include "comm/nccl/nccl_route.h"

namespace sherd::comm {

std::uint64_t nccl_card(device::Accelerator&) {
  return 0;
}

std::unique_ptr<GpuRoute> make_nccl_route(Backend&, const std::shared_ptr<device::Accelerator>&) {
  fail(ErrorKind::usage, "this build has no NCCL communicator: install NCCL and configure again");
}

std::string nccl_version() {
  return "";
}

}  // namespace sherd::comm
