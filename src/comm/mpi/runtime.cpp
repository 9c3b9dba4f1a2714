#include "comm/mpi/runtime.h"

#include <mpi.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <new>
#include <thread>

#include "base/deadline.h"
#include "base/error.h"
#include "base/threads.h"
#include "comm/processes/process_group.h"

namespace sherd::comm::mpi {
namespace {

// MPI itself is one per process, started and ended once; this is the one place that keeps its state.
std::mutex start_mutex;
std::atomic<bool> started{false}, abandoned{false}, ended{false};
MPI_Comm exit_comm = MPI_COMM_NULL;
double exit_seconds = 10;         // the longest deadline of any world
std::vector<RankIdentity> world;  // written by start()
std::mutex leavers_mutex;
std::vector<std::function<void()>> leavers;  // guarded by leavers_mutex

/// Waits until every rank has come here as often as this one. False when one is dead or does not come in
/// time.
bool all_meet(double seconds) {
  MPI_Request request;
  if (MPI_Ibarrier(exit_comm, &request) != MPI_SUCCESS) return false;
  const Deadline deadline = Deadline::after_seconds(seconds);
  const RankIdentity self = own_identity();
  for (int turn = 0;; ++turn) {
    int done = 0;
    if (MPI_Test(&request, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS) return false;
    if (done) return true;
    if (deadline.passed()) return false;
    if (turn % 64 == 63)
      for (const RankIdentity& peer : world)
        if (peer.host == self.host && peer.pid != 0 && !running(peer)) {
          // It may have gone after the barrier completed: look once more.
          return MPI_Test(&request, &done, MPI_STATUS_IGNORE) == MPI_SUCCESS && done;
        }
    usleep(turn < 100 ? 100 : 2000);
  }
}

/// True when MPI_Finalize, which waits for every rank, can be called. A rank that failed waits a moment only,
/// yet that long, so that the launcher, which ends a job at its first failure, lets the others report theirs.
/// It may thus abort and go while others see its first barrier complete; nobody passes the second one then.
bool all_leave(int status) {
  return all_meet(status == 0 ? exit_seconds : std::min(exit_seconds, 3.0)) && all_meet(5);
}

/// Runs at exit(status).
void end(int status, void*) {
  int finalised = 0;
  MPI_Finalized(&finalised);
  {
    std::lock_guard lock(leavers_mutex);
    for (const auto& leave : leavers) leave();
  }
  const bool orderly = !finalised && !abandoned && all_leave(status);
  ended = true;
  if (!orderly) {
    // MPI's own threads and destructors may wait for the dead.
    std::fflush(nullptr);
    _exit(status);
  }
  std::thread(own_thread([status] {
    std::this_thread::sleep_for(std::chrono::seconds(10));
    _exit(status);  // only if MPI_Finalize hangs
  })).detach();
  MPI_Finalize();
}

void exchange_identities() {
  int size = 0;
  check(MPI_Comm_size(exit_comm, &size), "MPI_Comm_size");
  world.resize(static_cast<std::size_t>(size));
  RankIdentity mine = own_identity();
  check(MPI_Allgather(&mine, sizeof mine, MPI_BYTE, world.data(), sizeof mine, MPI_BYTE, exit_comm),
        "MPI_Allgather");
  hide_unseen(world, mine);
}

}  // namespace

void start(double seconds) {
  std::lock_guard lock(start_mutex);
  exit_seconds = std::max(exit_seconds, seconds);
  if (started) return;
  int initialised = 0, level = MPI_THREAD_SINGLE;
  MPI_Initialized(&initialised);
  if (initialised)
    check(MPI_Query_thread(&level), "MPI_Query_thread");
  else
    check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level), "MPI_Init_thread");
  if (level < MPI_THREAD_MULTIPLE)
    fail(ErrorKind::comm, "this MPI library offers thread level ", level, ", not MPI_THREAD_MULTIPLE (",
         MPI_THREAD_MULTIPLE, "): install one built with threads, such as Debian's OpenMPI");
  check(MPI_Comm_dup(MPI_COMM_WORLD, &exit_comm), "MPI_Comm_dup");
  MPI_Comm_set_errhandler(exit_comm, MPI_ERRORS_RETURN);
  exchange_identities();
  if (!initialised) on_exit(&end, nullptr);  // whoever started MPI ends it
  started = true;
}

const std::vector<RankIdentity>& identities() {
  return world;
}

void blocking(const std::function<void()>& call, const Patience& patience, const std::function<int()>& dead) {
  struct Shared {
    std::mutex mutex;
    std::condition_variable finished;
    bool done = false;         // guarded by mutex
    std::exception_ptr error;  // guarded by mutex
  };
  auto shared = std::make_shared<Shared>();
  std::thread helper(own_thread([shared, call] {
    std::exception_ptr error;
    try {
      call();
    } catch (...) {
      error = std::current_exception();
    }
    std::lock_guard lock(shared->mutex);
    shared->done = true;
    shared->error = std::move(error);
    shared->finished.notify_all();
  }));
  const Deadline deadline = Deadline::after_seconds(patience.seconds);
  std::unique_lock lock(shared->mutex);
  while (!shared->finished.wait_for(lock, std::chrono::milliseconds(200), [&] { return shared->done; })) {
    const int gone = dead();
    const std::string trouble = patience.trouble ? patience.trouble() : "";
    if (gone < 0 && trouble.empty() && !deadline.passed()) continue;
    abandoned = true;
    helper.detach();
    if (!trouble.empty()) throw Error(ErrorKind::comm, trouble);
    if (gone >= 0) fail(ErrorKind::comm, patience.what, ": rank ", gone, " is dead: its process has ended");
    fail(ErrorKind::comm, patience.what, ": not all ranks came within ", patience.seconds, " s");
  }
  lock.unlock();
  helper.join();
  if (shared->error) std::rethrow_exception(shared->error);
}

void on_leave(std::function<void()> tell) {
  std::lock_guard lock(leavers_mutex);
  leavers.push_back(std::move(tell));
}

bool over() {
  return ended;
}

void check(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  MPI_Error_string(code, text, &length);
  fail(ErrorKind::comm, call, " failed: ", text);
}

}  // namespace sherd::comm::mpi

namespace sherd::comm {

bool mpi_available() {
  return true;
}

LaunchedWorld join_mpi_world(const CommOptions& options) {
  const Patience patience{setup_seconds(options.timeout_seconds), "setting up the world of MPI ranks"};
  return make_process_world(mpi::world_port(patience, options.machine), options);
}

}  // namespace sherd::comm
