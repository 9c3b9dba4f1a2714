#pragma once

#include <memory>

#include "comm/messages/port.h"
#include "comm/tcp/mesh.h"

namespace sherd::comm {

/// The group of all ranks of a mesh. Collective. With `shared_memory` ranks of one machine try whether they
/// can map each other's; where they cannot, they exchange messages. Throws Error{comm}.
std::shared_ptr<Port> make_socket_port(std::shared_ptr<Mesh> mesh, bool shared_memory,
                                       const Patience& patience);

}  // namespace sherd::comm
