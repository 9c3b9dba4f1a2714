#include "engine/checkpoint/background_save.h"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>
#include <utility>

#include "base/arena.h"
#include "base/log.h"
#include "base/threads.h"

namespace sherd::engine {
namespace fs = std::filesystem;
using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

struct BackgroundSave::Shared {
  Shared(SaveAct what, double timeout) : act(std::move(what)), timeout_seconds(timeout) {}

  void reach(Progress next) {
    std::lock_guard lock(mutex);
    progress = next;
    changed.notify_all();
  }
  /// Sleeps while rank 0 waits for the file of `rank`, which may have `failed`. Throws where it is to end.
  void wait_for_file(int rank, bool failed, Clock::duration time) {
    std::unique_lock lock(mutex);
    changed.wait_for(lock, time, [&] { return cancelled; });
    if (cancelled) fail(ErrorKind::io, "given up");
    if (closing && failed) fail(ErrorKind::io, "rank ", rank, " could not write its file");
    if (Clock::now() >= others_until())
      fail(ErrorKind::io, "rank ", rank, "'s file did not come to '", act.partial.string(),
           "' in time: all ranks must see that folder, under the same path");
  }
  void go_on() {
    std::lock_guard lock(mutex);
    if (cancelled) fail(ErrorKind::io, "given up");
    moved = Clock::now();
  }
  /// From here on nothing takes the checkpoint away.
  void begin_publishing() {
    std::lock_guard lock(mutex);
    if (cancelled) fail(ErrorKind::io, "given up");
    publishing = true;
  }
  /// Until when rank 0 waits for the others' files: their deadline; where it is to end, about as long as it
  /// took itself for its own. Locked.
  Clock::time_point others_until() const {
    const Clock::time_point latest = written + seconds(timeout_seconds);
    if (!closing) return latest;
    return std::min(latest, std::max(closed, written) + std::max<Clock::duration>(2s, written - begun));
  }
  /// Waits until `done`, for the deadline from the last time on that anything was written. False where it
  /// passes.
  template <class Done>
  bool wait(std::unique_lock<std::mutex>& lock, double timeout, const Done& done) {
    const Clock::time_point asked = Clock::now();
    for (Clock::time_point seen;;) {
      seen = moved;
      if (changed.wait_until(lock, std::max(asked, seen) + seconds(timeout), done)) return true;
      if (moved == seen) return false;
    }
  }
  static Clock::duration seconds(double count) {
    return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(count));
  }

  SaveAct act;  // the thread's own
  const double timeout_seconds;
  const Clock::time_point begun = Clock::now();

  mutable std::mutex mutex;  // guards what follows
  std::condition_variable changed;
  Progress progress = Progress::writing;
  std::exception_ptr error;
  bool cancelled = false, ended = false;
  bool publishing = false;            // on rank 0: what follows is not cancelled any more
  bool closing = false;               // nobody will tell ranks of each other's errors
  Clock::time_point moved = begun;    // when a part of this rank's file was written last
  Clock::time_point written, closed;  // when its file was, and when it was to end
};

namespace {

/// Where a rank leaves the checksum of its file until rank 0 has read it.
fs::path sum_path(const SaveAct& act, int rank) {
  return act.partial / (rank_file(rank) + ".crc32c");
}

/// The rank's file is on disk by then, so this one needs no sync. Once the line is there rank 0 may take it
/// and rename the folder: what came after, such as syncing that folder, would fail.
void write_sum(const fs::path& path, FileChecksum sum) {
  std::ofstream out(path);
  out << cat(sum.bytes, " ", sum.crc32c, "\n") << std::flush;
  if (!out) fail(ErrorKind::io, "cannot write '", path.string(), "': ", std::strerror(errno));
}

/// Computing threads go first, on processors and drives. What the system refuses is left as it is.
void lower_priority() {
  constexpr int of_thread = 1, best_effort = 2, lowest = 7, class_shift = 13;
  ::setpriority(PRIO_PROCESS, static_cast<id_t>(::gettid()), 10);
  ::syscall(SYS_ioprio_set, of_thread, 0, best_effort << class_shift | lowest);
}

/// The mark that a rank that could not write its file leaves in place of the sum.
constexpr const char* failed_mark = "failed";

/// None where there is no whole sum; then `failed` says whether none will come.
std::optional<FileChecksum> read_sum(const fs::path& path, bool& failed) {
  failed = false;
  std::ifstream in(path);
  std::string line;
  std::getline(in, line);
  if (in.fail() || in.eof()) return {};  // not there, or not to its end yet
  failed = line == failed_mark;
  FileChecksum sum;
  if (std::istringstream(line) >> sum.bytes >> sum.crc32c) return sum;
  return {};
}

}  // namespace

BackgroundSave::BackgroundSave(SaveAct act, double timeout_seconds)
    : shared_(std::make_shared<Shared>(std::move(act), timeout_seconds)), timeout_seconds_(timeout_seconds) {
  thread_ = std::thread(own_thread([state = shared_] { run(state); }));
}

void BackgroundSave::run(const std::shared_ptr<Shared>& state) {
  const ThreadRank rank(state->act.rank);
  lower_priority();
  set_flush_denormals();  // as where moments are read by the computing threads
  std::exception_ptr error;
  try {
    write(*state);
  } catch (...) {
    error = std::current_exception();
    if (!state->act.write && state->act.rank != 0)
      std::ofstream(sum_path(state->act, state->act.rank)) << failed_mark << '\n';
  }
  state->act.file = {};  // updates of what was not read wait for that
  std::lock_guard lock(state->mutex);
  if (!state->error) state->error = error;
  state->ended = true;
  state->changed.notify_all();
}

void BackgroundSave::write(Shared& state) {
  SaveAct& act = state.act;
  if (act.write) {
    act.write(act, [&] { state.go_on(); });
    return state.reach(Progress::written);
  }
  const FileChecksum own = write_rank_file(act.rank_path(), act.file, act.save_id, [&] { state.go_on(); });
  act.file = {};
  if (act.rank != 0) {
    write_sum(sum_path(act, act.rank), own);
    return state.reach(Progress::written);
  }
  state.reach(Progress::written);
  const std::vector<FileChecksum> sums = gather_sums(state, own);
  state.begin_publishing();
  act.publish(sums);
  state.reach(Progress::whole);
}

std::vector<FileChecksum> BackgroundSave::gather_sums(Shared& state, FileChecksum own) {
  constexpr std::chrono::milliseconds most = 100ms;
  {
    std::lock_guard lock(state.mutex);
    state.written = Clock::now();
  }
  std::vector<FileChecksum> sums{own};
  for (int rank = 1; rank < state.act.ranks; ++rank) {
    const fs::path path = sum_path(state.act, rank);
    bool failed = false;
    std::optional<FileChecksum> sum;
    for (std::chrono::milliseconds pause = 1ms; !(sum = read_sum(path, failed));
         pause = std::min(2 * pause, most))
      state.wait_for_file(rank, failed, pause);
    sums.push_back(*sum);
  }
  for (int rank = 1; rank < state.act.ranks; ++rank) fs::remove(sum_path(state.act, rank));
  return sums;
}

BackgroundSave::Progress BackgroundSave::progress() const {
  std::lock_guard lock(shared_->mutex);
  return shared_->progress;
}

std::exception_ptr BackgroundSave::error() const {
  std::lock_guard lock(shared_->mutex);
  return shared_->error;
}

void BackgroundSave::wait_for(Progress progress) {
  Shared& state = *shared_;
  std::unique_lock lock(state.mutex);
  if (state.wait(lock, timeout_seconds_, [&] { return state.ended || state.progress >= progress; })) return;
  try {
    fail(ErrorKind::io, state.act.name(), " in '", state.act.partial.string(), "' did not get on for ",
         timeout_seconds_,
         " s: the drive is stuck or very slow. Check it, or raise parallel.timeout_seconds");
  } catch (const Error&) {
    state.error = std::current_exception();
  }
  timeout_seconds_ = std::min(timeout_seconds_, 1.0);  // who has waited once does not wait again
}

bool BackgroundSave::wait_until_ended() {
  std::unique_lock lock(shared_->mutex);
  return shared_->wait(lock, timeout_seconds_, [&] { return shared_->ended; });
}

void BackgroundSave::cancel() {
  {
    std::lock_guard lock(shared_->mutex);
    shared_->cancelled = !shared_->publishing;
    shared_->changed.notify_all();
  }
  wait_until_ended();
}

bool BackgroundSave::ended() const {
  std::lock_guard lock(shared_->mutex);
  return shared_->ended;
}

void BackgroundSave::remove_partial() const {
  {
    std::lock_guard lock(shared_->mutex);
    // One that is being published becomes whole, or an error of its own.
    if (!shared_->act.owns_partial || shared_->progress == Progress::whole ||
        (shared_->publishing && !shared_->ended))
      return;
  }
  remove_folder(shared_->act.partial);
}

BackgroundSave::~BackgroundSave() {
  Shared& state = *shared_;
  {
    std::lock_guard lock(state.mutex);
    state.closing = true;
    state.closed = Clock::now();
    state.changed.notify_all();
  }
  if (!wait_until_ended()) {
    log_warning("leaving ", state.act.name(), " behind in '", state.act.partial.string(),
                "', which did not get on for ", timeout_seconds_, " s");
    thread_.detach();  // it keeps what it works with
    return;
  }
  thread_.join();
  if (!state.error || state.cancelled) return;
  try {
    std::rethrow_exception(state.error);
  } catch (const std::exception& error) {
    log_warning(state.act.name(), " was being written and is given up: ", error.what());
  }
  remove_partial();
}

}  // namespace sherd::engine
