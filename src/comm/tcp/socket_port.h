#pragma once

#include <memory>

#include "comm/messages/port.h"
#include "comm/tcp/mesh.h"

namespace sherd::comm {

/// The group of all ranks of a mesh. Collective. With `shared_memory` ranks of one machine try whether they
/// can map each other's; where they cannot, they exchange messages. Throws Error{comm}.
std::shared_ptr<Port> make_socket_port(std::shared_ptr<Mesh> mesh, bool shared_memory,
                                       const Patience& patience);

/// The ranks of a launch over TCP connections, through shared memory where they are on one machine and can
/// map each other's. Collective. Throws Error{comm} naming ranks that do not come or contradict each other.
LaunchedWorld join_tcp_world(LaunchEnvironment launch, const CommOptions& options);

}  // namespace sherd::comm
