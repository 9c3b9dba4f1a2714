#include "comm/tcp/tcp_world.h"

#include "comm/processes/process_group.h"
#include "comm/tcp/socket_port.h"

namespace sherd::comm {

LaunchedWorld join_tcp_world(const LaunchEnvironment& launch, const CommOptions& options) {
  const Patience patience{setup_seconds(options), "joining the launcher's ranks"};
  auto mesh = std::make_shared<Mesh>(launch.rank, rendezvous(launch, patience));
  return make_process_world(make_socket_port(std::move(mesh), options.shared_memory, patience), options);
}

}  // namespace sherd::comm
