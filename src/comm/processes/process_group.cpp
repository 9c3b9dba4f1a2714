#include "comm/processes/process_group.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <map>

#include "base/random.h"
#include "comm/exchange/exchange.h"
#include "comm/processes/window_pool.h"

namespace sherd::comm {
namespace {

/// The ports and identities that a group of processes is made from.
struct Origin {
  std::shared_ptr<Port> port;
  std::shared_ptr<WindowRegistry> windows;  ///< the world's
  CommOptions options;
  std::shared_ptr<Health> parent;
};

/// The board of the group's ranks on this machine. `port`: theirs; null for a rank by itself.
struct LocalBoard {
  std::shared_ptr<Port> port;
  std::shared_ptr<Board> board;
};

std::unique_ptr<Backend> make_backend(Origin origin);

class WindowMemory final : public PeerMemory {
 public:
  WindowMemory(std::shared_ptr<WindowRegistry> windows, std::vector<int> world_ranks)
      : windows_(std::move(windows)), world_ranks_(std::move(world_ranks)) {}
  Address locate(const std::byte* data, std::size_t bytes) const override {
    return windows_->locate(data, bytes, world_ranks_);
  }
  std::byte* resolve(int rank, const Address& address) const override {
    return windows_->resolve(world_ranks_[static_cast<std::size_t>(rank)], address);
  }

 private:
  std::shared_ptr<WindowRegistry> windows_;
  std::vector<int> world_ranks_;
};

/// Memory of a rank that has its machine to itself.
class OwnMemory final : public PeerMemory {
 public:
  Address locate(const std::byte*, std::size_t) const override { return {}; }
  std::byte* resolve(int, const Address&) const override {
    sherd::fail(ErrorKind::usage, "no peer shares memory");
  }
};

std::shared_ptr<PeerMemory> make_memory(const Origin& origin, const LocalBoard& local) {
  if (!local.port) return std::make_shared<OwnMemory>();
  return std::make_shared<WindowMemory>(origin.windows, local.port->world_ranks());
}

/// Processes: those of one machine over a board in a shared window.
class ProcessExchange final : public HostExchange {
 public:
  ProcessExchange(Origin origin, LocalBoard local, std::shared_ptr<const Topology> topology,
                  std::unique_ptr<Messages> messages)
      : HostExchange(std::move(topology), local.board, make_memory(origin, local), std::move(messages),
                     origin.options.threads),
        origin_(std::move(origin)),
        local_(std::move(local)) {}

  device::Storage allocate(device::Device& device, std::size_t bytes, device::Category category,
                           device::Tier tier) override {
    // Kernels of a GPU reach no window, and copies from one are slow: tensors of GPUs travel by routes of
    // their own.
    if (device.accelerator() || topology().machines() == size())
      return device.allocate(bytes, category, tier);
    if (!local_.port) {  // others have machines together, and agree on their windows
      agree({0}, allocation_of(bytes));
      return device.allocate(bytes, category, tier);
    }
    // An empty block of the device keeps its ledger alive for as long as this one may need it.
    const device::Storage anchor = device.allocate(0, category, tier);
    device::Ledger& ledger = device.ledger();
    ledger.charge(tier, category, bytes);
    try {
      const auto [part, data] = take(bytes);
      return device::Storage({data, bytes},
                             [part = part, anchor, &ledger, category, tier](device::MemoryBlock block) {
                               part->give(block.data, block.bytes);
                               ledger.credit(tier, category, block.bytes);
                             });
    } catch (...) {
      ledger.credit(tier, category, bytes);
      throw;
    }
  }

  std::unique_ptr<Backend> split(int color, int key) override {
    // Everybody is here before the port is asked, where a missing rank could only be waited for.
    agree({color, key}, "split");
    Origin part = origin_;
    part.port = origin_.port->split(color, key, patience("splitting "));
    if (!part.port) return nullptr;
    part.parent = shared_board();
    return make_backend(std::move(part));
  }

 private:
  Patience patience(const char* doing) {
    return {timeout_seconds(), cat(doing, name()), [this] { return failure(); }};
  }

  static std::string allocation_of(std::size_t bytes) { return cat("allocation of ", bytes, " bytes"); }

  using Taken = std::pair<std::shared_ptr<WindowPart>, std::byte*>;

  /// Blocks are taken where this rank has room; peers learn where when they need it. Only when someone on
  /// this machine has no room do all of the machine make another window.
  Taken take(std::size_t bytes) {
    const auto room =
        std::find_if(parts_.begin(), parts_.end(), [&](auto& part) { return part->fits(bytes); });
    const std::vector<std::int64_t> short_of = agree({room == parts_.end() ? 1 : 0}, allocation_of(bytes));
    const auto is_short = [&](int r) { return short_of[static_cast<std::size_t>(r)] != 0; };
    if (std::any_of(topology().locals().begin(), topology().locals().end(), is_short)) grow(bytes);
    for (const auto& part : parts_)
      if (std::byte* data = part->take(bytes)) return {part, data};
    sherd::fail(ErrorKind::memory, name(), ": no room for ", bytes, " bytes in a window made for them");
  }

  void grow(std::size_t bytes) {
    // Small blocks share a window; a large one has its own, no larger than it is.
    constexpr std::size_t least = std::size_t{1} << 20;
    const std::size_t size = std::max(least, (bytes + shared_page - 1) / shared_page * shared_page);
    const Patience wait = patience("allocating shared memory on ");
    // Unique in the world: the first member's world rank and its count of windows made as first.
    static std::atomic<std::uint64_t> made{0};
    Port& port = *local_.port;
    const std::uint64_t id = port.from_first(
        static_cast<std::uint64_t>(port.world_ranks()[0]) << 40 | (port.rank() == 0 ? ++made : 0), wait);
    const std::vector<std::byte*> parts = port.shared_window(size, wait);
    std::byte* own = parts[static_cast<std::size_t>(port.rank())];
    madvise(own, size, MADV_HUGEPAGE);  // where the system allows it for shared memory
#ifdef MADV_POPULATE_WRITE
    // Now rather than by a bus error later, should /dev/shm have filled up meanwhile.
    if (madvise(own, size, MADV_POPULATE_WRITE) != 0 && errno != EINVAL)
      sherd::fail(ErrorKind::memory, wait.what, ": the system has no ", size,
                  " bytes of shared memory left (", std::strerror(errno),
                  "); make /dev/shm larger (containers: --shm-size)");
#endif
    origin_.windows->add(id, port.world_ranks(), parts, port.rank(), size);
    parts_.push_back(std::make_shared<WindowPart>(own, size));
  }

  Origin origin_;
  LocalBoard local_;
  std::vector<std::shared_ptr<WindowPart>> parts_;
};

std::shared_ptr<const Topology> topology_of(const Port& port, const CommOptions& options) {
  if (!options.shared_memory) return std::make_shared<Topology>(Topology::apart(port.rank(), port.size()));
  std::vector<std::uint64_t> machines = port.machines();
  std::map<std::uint64_t, int> ranks;
  for (std::uint64_t& machine : machines)  // a board takes so many; others count as another machine's
    machine = mix_seed(machine, static_cast<std::uint64_t>(ranks[machine]++ / BoardLayout::max_ranks));
  return std::make_shared<Topology>(port.rank(), machines);
}

/// A board of one rank, in memory of its own.
std::shared_ptr<Board> make_own_board(BoardSettings settings) {
  const BoardLayout layout = BoardLayout::of_processes(1, true);
  const std::shared_ptr<std::byte> memory = layout.allocate(1);
  Board::prepare(memory.get(), layout);
  settings.memory = memory;
  return std::make_shared<Board>(0, layout, std::vector<std::byte*>{memory.get()}, std::move(settings));
}

/// Collective over the group where it spans machines of which some have several ranks.
LocalBoard make_local_board(const Origin& origin, const Topology& topology, BoardSettings settings) {
  const Patience patience{setup_seconds(origin.options.timeout_seconds), cat("setting up ", settings.name)};
  const bool spans = topology.machines() > 1;
  if (topology.machines() == topology.size() && spans) return {nullptr, make_own_board(std::move(settings))};
  const auto port = spans ? origin.port->split(topology.machine(), topology.rank(), patience) : origin.port;
  settings.gone = [port](int rank) { return port->gone(rank); };
  if (port->size() == 1 && spans) return {nullptr, make_own_board(std::move(settings))};
  const BoardLayout layout = BoardLayout::of_processes(port->size(), spans);
  std::vector<std::byte*> segments = port->shared_window(layout.segment_bytes(), patience);
  Board::prepare(segments[static_cast<std::size_t>(port->rank())], layout);
  port->meet(patience);  // every rank has prepared its segment
  return {port, std::make_shared<Board>(port->rank(), layout, std::move(segments), std::move(settings))};
}

std::unique_ptr<Backend> make_backend(Origin origin) {
  Port& port = *origin.port;
  auto topology = topology_of(port, origin.options);
  BoardSettings settings;
  settings.name = group_name(port.kind(), port.world_ranks(), port.world_size());
  settings.ranks = topology->locals(), settings.world = port.world_ranks();
  settings.timeout_seconds = origin.options.timeout_seconds;
  settings.crowded = port.crowded();
  settings.parent = origin.parent;
  std::unique_ptr<Messages> messages;
  std::weak_ptr<MessageHealth> health;
  if (topology->machines() > 1) {
    messages = std::make_unique<Messages>(origin.port, settings.name, topology, settings.timeout_seconds,
                                          std::move(origin.parent));
    health = messages->health();
    settings.parent = messages->health();
    settings.tell_failure = [told = messages->health()](const std::string& reason) { told->fail(reason); };
    settings.progress = [moving = messages.get()] { return moving->progress(); };
  }
  LocalBoard local = make_local_board(origin, *topology, std::move(settings));
  port.on_leave([board = std::weak_ptr<Board>(local.board), health] {
    if (const auto alive = board.lock()) alive->depart();
    if (const auto alive = health.lock()) alive->depart();
  });
  return std::make_unique<ProcessExchange>(std::move(origin), std::move(local), std::move(topology),
                                           std::move(messages));
}

}  // namespace

LaunchedWorld make_process_world(std::shared_ptr<Port> port, const CommOptions& options) {
  const LocalPlace place = port->place();
  Origin origin;
  origin.port = std::move(port);
  origin.windows = std::make_shared<WindowRegistry>();
  origin.options = options;
  return {make_group(make_backend(std::move(origin))), place.rank, place.size};
}

}  // namespace sherd::comm
