#pragma once

#include <functional>

#include "comm/communicator.h"
#include "support/cpu_fixture.h"

namespace sherd::parallel {

/// Runs body(cpu, group) on so many ranks, each with a CPU of one thread.
inline void on_ranks(int ranks, const std::function<void(test::Cpu&, comm::Communicator&)>& body) {
  comm::run_local(ranks, {.timeout_seconds = 30}, [&](comm::Communicator& group) {
    test::Cpu cpu(1);
    body(cpu, group);
  });
}

}  // namespace sherd::parallel
