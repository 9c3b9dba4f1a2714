#include "comm/tcp/socket_port.h"

#include <cstdlib>
#include <mutex>
#include <utility>
#include <vector>

#include "comm/processes/process_group.h"

namespace sherd::comm {
namespace {

/// Meshes that are leaving, for which the process waits as it exits. So whoever drops a world goes on at
/// once: what made it end, such as a missed deadline, is told before peers that do not answer have been
/// waited for.
class Departures {
 public:
  static Departures& of_process() {
    static Departures& all = *new Departures;  // worlds in static objects may end later than others
    return all;
  }

  /// Before a mesh is made: makes room, so that add() allocates nothing, as it may be called where nothing
  /// may fail.
  void expect_one() {
    std::lock_guard lock(mutex_);
    leaving_.reserve(++worlds_);
  }
  void add(std::unique_ptr<Mesh> mesh) noexcept {
    mesh->leave();
    std::lock_guard lock(mutex_);
    std::erase_if(leaving_, [](const auto& one) { return one->has_left(); });
    if (!exiting_) leaving_.push_back(std::move(mesh));
  }

 private:
  Departures() {
    std::atexit([] { of_process().finish(); });
  }
  void finish() {
    std::vector<std::unique_ptr<Mesh>> last;
    std::lock_guard lock(mutex_);
    exiting_ = true;
    last.swap(leaving_);
  }

  std::mutex mutex_;
  std::vector<std::unique_ptr<Mesh>> leaving_;  // guarded by mutex_
  std::size_t worlds_ = 0;                      // guarded by mutex_; that were ever made
  bool exiting_ = false;                        // guarded by mutex_
};

}  // namespace

LaunchedWorld join_tcp_world(LaunchEnvironment launch, const CommOptions& options) {
  launch.machine = options.machine;
  const Patience patience{setup_seconds(options.timeout_seconds), "joining the launcher's ranks"};
  Departures& departures = Departures::of_process();
  departures.expect_one();
  const std::shared_ptr<Mesh> mesh(
      new Mesh(launch.rank, rendezvous(launch, patience)),
      [&departures](Mesh* dropped) { departures.add(std::unique_ptr<Mesh>(dropped)); });
  return make_process_world(make_socket_port(mesh, options.shared_memory, patience), options);
}

}  // namespace sherd::comm
