#include "comm/tcp/socket_port.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <numeric>
#include <thread>

#include "base/log.h"
#include "base/random.h"
#include "comm/exchange/backend.h"
#include "comm/exchange/descriptor.h"

namespace sherd::comm {
namespace {

constexpr int socket_failure_tag = -1, socket_setup_tag = -2;

std::byte* map(int file, std::size_t bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  return data == MAP_FAILED ? nullptr : static_cast<std::byte*>(data);
}

/// Memory of this process that other processes of the machine can map while `file` is open. It has no name,
/// so that nothing is left behind however a process ends, and does not count against /dev/shm.
struct SharedMemory {
  FileDescriptor file;  ///< empty, with errno, where the system does not give any
  std::byte* data = nullptr;
};

SharedMemory make_shared_memory(std::size_t bytes) {
  SharedMemory out;
  out.file = FileDescriptor(memfd_create("sherd", MFD_CLOEXEC));
  if (out.file && ftruncate(out.file.get(), static_cast<off_t>(bytes)) == 0)
    out.data = map(out.file.get(), bytes);
  if (!out.data) {
    const int why = errno;
    out.file = FileDescriptor();
    errno = why;
  }
  return out;
}

/// Maps what another process of this machine and user holds open as `descriptor`. Null, with errno, where
/// that cannot be. The mapping stays until the process ends.
std::byte* map_memory_of(long long pid, int descriptor, std::size_t bytes) {
  const FileDescriptor file(open(cat("/proc/", pid, "/fd/", descriptor).c_str(), O_RDWR | O_CLOEXEC));
  if (!file) return nullptr;
  struct stat found {};
  if (fstat(file.get(), &found) != 0) return nullptr;
  if (!S_ISREG(found.st_mode) || found.st_size != static_cast<off_t>(bytes)) {
    errno = ESTALE;  // not the process that was meant
    return nullptr;
  }
  return map(file.get(), bytes);
}

class SocketPort final : public Port {
 public:
  /// `machines`: a number for each rank of the world, as machines() says.
  SocketPort(std::shared_ptr<Mesh> mesh, std::uint64_t group, std::vector<int> world_ranks,
             std::vector<std::uint64_t> machines)
      : mesh_(std::move(mesh)),
        group_(group),
        world_ranks_(std::move(world_ranks)),
        rank_(static_cast<int>(std::find(world_ranks_.begin(), world_ranks_.end(), mesh_->rank()) -
                               world_ranks_.begin())),
        neighbours_(mesh_->identities(), world_ranks_, rank_),
        machines_(std::move(machines)) {}

  std::string kind() const override { return "tcp"; }
  // The system closes the connections of a process that exits, which tells the others as much.
  void on_leave(std::function<void()>) override {}
  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(world_ranks_.size()); }
  const std::vector<int>& world_ranks() const override { return world_ranks_; }
  int world_size() const override { return mesh_->size(); }
  std::vector<std::uint64_t> machines() const override {
    std::vector<std::uint64_t> out;
    for (const int r : world_ranks_) out.push_back(machines_[static_cast<std::size_t>(r)]);
    return out;
  }
  bool crowded() const override { return neighbours_.crowded(); }
  LocalPlace place() const override { return neighbours_.place(); }
  // Not by the process's end, which is seen before the last that it sent.
  bool gone(int rank) const override { return mesh_->gone(world(rank)); }

  std::shared_ptr<Port> split(int color, int key, const Patience& patience) override {
    const SplitPlan plan = plan_split(from_all({color, key}, patience), rank_);
    const std::uint64_t id = mix_seed(mix_seed(group_, ++splits_), static_cast<std::uint64_t>(color) + 1);
    if (plan.rank < 0) return nullptr;
    std::vector<int> members;
    for (const int r : plan.members) members.push_back(world(r));
    return std::make_shared<SocketPort>(mesh_, id, std::move(members), machines_);
  }
  std::vector<std::byte*> shared_window(std::size_t bytes, const Patience& patience) override;
  std::uint64_t from_first(std::uint64_t value, const Patience& patience) override {
    return static_cast<std::uint64_t>(from_all({static_cast<std::int64_t>(value)}, patience).front());
  }
  void meet(const Patience& patience) override { from_all({0}, patience); }

  int send(const void* data, std::size_t bytes, int to, int tag) override {
    return keep(mesh_->send(world(to), group_, tag, data, bytes));
  }
  int receive(void* data, std::size_t bytes, int from, int tag) override {
    return keep(mesh_->receive(world(from), group_, tag, data, bytes));
  }
  bool test(int request) override {
    const bool done = mesh_->done(ticket(request));
    if (done) forget(request);
    return done;
  }
  bool cancel(int request) noexcept override {
    const Mesh::Ticket open = ticket(request);
    if (!open) return true;
    mesh_->cancel(open);
    forget(request);
    return true;
  }
  bool release(int request) noexcept override { return cancel(request); }
  std::uint64_t news() override { return mesh_->news(); }
  std::uint64_t pause(std::uint64_t seen, int turn) override { return mesh_->pause(seen, turn); }

  void broadcast_failure(const std::string& text) noexcept override {
    for (int r = 0; r < size(); ++r) try {
        if (r != rank_) mesh_->send_copy(world(r), group_, socket_failure_tag, text.data(), text.size());
      } catch (const std::exception&) {  // who cannot be told finds out by itself
      }
  }
  std::string poll_failure() override {
    std::vector<std::byte> text;
    for (int r = 0; r < size(); ++r)
      if (r != rank_ && mesh_->take(world(r), group_, socket_failure_tag, text))
        return {reinterpret_cast<const char*>(text.data()), text.size()};
    return "";
  }

  void set_machines(std::vector<std::uint64_t> machines) { machines_ = std::move(machines); }

  /// Every rank's words, in rank order.
  std::vector<std::int64_t> from_all(const std::vector<std::int64_t>& mine, const Patience& patience) {
    const std::size_t bytes = mine.size() * sizeof(std::int64_t);
    for (int r = 0; r < size(); ++r)
      if (r != rank_) mesh_->send_copy(world(r), group_, socket_setup_tag, mine.data(), bytes);
    const Deadline deadline = Deadline::after_seconds(patience.seconds);
    std::vector<std::int64_t> all;
    for (int r = 0; r < size(); ++r) {
      std::vector<std::byte> message(bytes);
      if (r == rank_)
        std::memcpy(message.data(), mine.data(), bytes);
      else
        await(r, message, patience, deadline);
      require(message.size() == bytes, patience.what, ": rank ", world(r), " sent ", message.size(),
              " bytes, not ", bytes);
      all.resize(all.size() + mine.size());
      std::memcpy(all.data() + all.size() - mine.size(), message.data(), bytes);
    }
    return all;
  }

 private:
  int world(int rank) const { return world_ranks_[static_cast<std::size_t>(rank)]; }

  int keep(Mesh::Ticket ticket) {
    std::lock_guard lock(mutex_);
    const auto free = std::find(open_.begin(), open_.end(), nullptr);
    const auto place = free - open_.begin();
    if (free == open_.end())
      open_.push_back(std::move(ticket));
    else
      *free = std::move(ticket);
    return static_cast<int>(place);
  }
  Mesh::Ticket ticket(int request) {
    std::lock_guard lock(mutex_);
    return open_[static_cast<std::size_t>(request)];
  }
  void forget(int request) {
    std::lock_guard lock(mutex_);
    open_[static_cast<std::size_t>(request)] = nullptr;
  }

  /// Throws, and tells the others: who hears that this rank left because another died names that one.
  [[noreturn]] void blame(int rank, const Patience& patience) {
    const std::string heard = poll_failure();
    if (heard.starts_with('F')) throw Error(ErrorKind::comm, heard.substr(1));
    const std::string text = cat(patience.what, ": ", dead(rank));
    broadcast_failure("F" + text);  // a failure, as groups tell them: MessageHealth
    throw Error(ErrorKind::comm, text);
  }

  void await(int from, std::vector<std::byte>& message, const Patience& patience, const Deadline& deadline) {
    for (int turn = 0; !mesh_->take(world(from), group_, socket_setup_tag, message); ++turn) {
      const bool over = gone(from);
      if (over && mesh_->take(world(from), group_, socket_setup_tag, message)) return;
      if (over) blame(from, patience);
      if (const std::string trouble = patience.trouble ? patience.trouble() : ""; !trouble.empty())
        throw Error(ErrorKind::comm, trouble);
      if (deadline.passed())
        fail(ErrorKind::comm, patience.what, ": rank ", world(from), " did not come within ",
             patience.seconds, " s");
      std::this_thread::sleep_for(std::chrono::microseconds(turn < 1000 ? 100 : 2000));
    }
  }

  std::string dead(int rank) const {
    return cat("rank ", world(rank),
               " is dead: its process or the connection to it ended; see that rank's own output");
  }

  /// Why this rank failed: an errno, and the rank without which it could not, if it is one that died.
  struct Obstacle {
    int error = 0, dead = -1;
  };

  /// Throws, the same on all ranks, when some rank met an obstacle: Error{comm} naming who died, else
  /// Error{memory}.
  void refuse(const Obstacle& mine, const char* what, const Patience& patience) {
    const std::vector<std::int64_t> all = from_all({mine.error, mine.dead}, patience);
    const auto word = [&](int r, std::size_t k) {
      return static_cast<int>(all[2 * static_cast<std::size_t>(r) + k]);
    };
    for (int r = 0; r < size(); ++r)
      if (word(r, 1) >= 0) fail(ErrorKind::comm, patience.what, ": ", dead(word(r, 1)));
    for (int r = 0; r < size(); ++r)
      if (word(r, 0) != 0)
        fail(ErrorKind::memory, patience.what, ": rank ", world(r), " cannot ", what, ": ",
             std::strerror(word(r, 0)), "; leave it more memory, or lower what is kept in memory");
  }

  /// A process that ends closes its files a moment before it counts as ended.
  bool dies(int rank) const {
    const Deadline moment = Deadline::after_seconds(0.5);
    while (!neighbours_.gone(rank) && !gone(rank)) {
      if (moment.passed()) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
  }

  std::shared_ptr<Mesh> mesh_;
  std::uint64_t group_;
  std::vector<int> world_ranks_;
  int rank_;
  Neighbours neighbours_;
  std::vector<std::uint64_t> machines_;
  std::uint64_t splits_ = 0;
  std::mutex mutex_;
  std::vector<Mesh::Ticket> open_;  // guarded by mutex_
};

std::vector<std::byte*> SocketPort::shared_window(std::size_t bytes, const Patience& patience) {
  bytes = (bytes + shared_page - 1) / shared_page * shared_page;
  SharedMemory mine = make_shared_memory(bytes);
  refuse({mine.data ? 0 : errno}, "get shared memory", patience);
  std::vector<std::byte*> parts(static_cast<std::size_t>(size()));
  parts[static_cast<std::size_t>(rank_)] = mine.data;
  const std::vector<std::int64_t> files = from_all({mine.file.get()}, patience);
  Obstacle met;
  for (int r = 0; r < size() && met.error == 0; ++r) {
    if (r == rank_) continue;
    const RankIdentity& peer = mesh_->identities()[static_cast<std::size_t>(world(r))];
    std::byte*& part = parts[static_cast<std::size_t>(r)];
    errno = ESRCH;  // the process is not seen from here
    if (peer.pid != 0)
      part = map_memory_of(peer.pid, static_cast<int>(files[static_cast<std::size_t>(r)]), bytes);
    if (!part) met.error = errno;
    if (peer.pid != 0 && (met.error == ENOENT || met.error == ESTALE) && dies(r)) met.dead = r;
  }
  try {
    refuse(met, "map another rank's memory", patience);
  } catch (...) {
    for (std::byte* part : parts)
      if (part) munmap(part, bytes);
    throw;
  }
  return parts;
}

/// Whether the ranks of this machine can map each other's memory: containers and sandboxes may stand between
/// them. All of the machine come to the same answer.
bool try_sharing(const std::shared_ptr<Mesh>& mesh, const Patience& patience) {
  const auto& all = mesh->identities();
  const auto host = all[static_cast<std::size_t>(mesh->rank())].host;
  std::vector<int> here;
  for (int r = 0; r < mesh->size(); ++r)
    if (all[static_cast<std::size_t>(r)].host == host) here.push_back(r);
  if (here.size() < 2) return false;
  SocketPort machine(mesh, mix_seed(0, host), here, {});
  try {
    for (std::byte* part : machine.shared_window(shared_page, patience)) munmap(part, shared_page);
    return true;
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::memory) throw;
    if (machine.rank() == 0)
      log_warning("ranks of this machine exchange messages, which is slower than sharing memory: ",
                  error.what());
    return false;
  }
}

}  // namespace

std::shared_ptr<Port> make_socket_port(std::shared_ptr<Mesh> mesh, bool shared_memory,
                                       const Patience& patience) {
  std::vector<int> all(static_cast<std::size_t>(mesh->size()));
  std::iota(all.begin(), all.end(), 0);
  const bool shares = shared_memory && try_sharing(mesh, patience);
  std::vector<std::uint64_t> machines;
  for (const RankIdentity& identity : mesh->identities()) machines.push_back(identity.host);
  auto port = std::make_shared<SocketPort>(std::move(mesh), 1, std::move(all), machines);
  const std::vector<std::int64_t> sharing =
      port->from_all({shares}, patience);  // nobody leaves before all have met
  for (std::size_t r = 0; r < machines.size(); ++r)
    if (sharing[r] == 0) machines[r] = mix_seed(machines[r], r + 1);  // a machine of its own
  port->set_machines(std::move(machines));
  return port;
}

}  // namespace sherd::comm
