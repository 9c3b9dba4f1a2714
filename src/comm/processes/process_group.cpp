#include "comm/processes/process_group.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>

#include "comm/exchange/shared_exchange.h"
#include "comm/messages/message_exchange.h"
#include "comm/processes/window_pool.h"

namespace sherd::comm {
namespace {

/// What a group of processes is made from.
struct Origin {
  std::shared_ptr<Port> port;
  std::shared_ptr<WindowRegistry> windows;  ///< of the world
  CommOptions options;
  std::shared_ptr<Health> parent;
};

std::unique_ptr<Backend> make_backend(Origin origin);

class WindowMemory final : public Memory {
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

/// Processes of one machine over a board in a shared window.
class WindowExchange final : public SharedExchange {
 public:
  WindowExchange(Origin origin, std::shared_ptr<Board> board)
      : SharedExchange(std::move(board),
                       std::make_shared<WindowMemory>(origin.windows, origin.port->world_ranks()),
                       origin.options.threads),
        origin_(std::move(origin)) {}

  device::Storage allocate(device::Device& device, std::size_t bytes, device::Category category,
                           device::Tier tier) override {
    // Kernels of a GPU reach no window, and copies from one are slow: tensors of GPUs travel by routes of
    // their own.
    if (device.kind() == device::Kind::cuda) return device.allocate(bytes, category, tier);
    // An empty block of the device keeps its ledger alive for as long as this one may need it.
    const device::Storage anchor = device.allocate(0, category, tier);
    device::Ledger& ledger = device.ledger();
    ledger.charge(tier, category, bytes);
    try {
      const auto [part, data] = take(bytes);
      return device::Storage({data, bytes},
                             [part = part, anchor, &ledger, category, tier](device::Block block) {
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

  using Taken = std::pair<std::shared_ptr<WindowPart>, std::byte*>;

  /// Blocks are taken where this rank has room; peers learn where when they need it. Only when someone has no
  /// room do all make another window.
  Taken take(std::size_t bytes) {
    const auto room =
        std::find_if(parts_.begin(), parts_.end(), [&](auto& part) { return part->fits(bytes); });
    const std::vector<std::int64_t> short_of =
        agree({room == parts_.end() ? 1 : 0}, cat("allocation of ", bytes, " bytes"));
    if (std::find(short_of.begin(), short_of.end(), 1) != short_of.end()) grow(bytes);
    for (const auto& part : parts_)
      if (std::byte* data = part->take(bytes)) return {part, data};
    sherd::fail(ErrorKind::memory, name(), ": no room for ", bytes, " bytes in a window made for them");
  }

  void grow(std::size_t bytes) {
    constexpr std::size_t step = std::size_t{1} << 20;
    const std::size_t size = std::max<std::size_t>(1, (bytes + step - 1) / step) * step;
    const Patience wait = patience("allocating shared memory on ");
    // Unique in the world: the first member's world rank and its count of windows made as first.
    static std::atomic<std::uint64_t> made{0};
    const std::uint64_t id = origin_.port->from_first(
        static_cast<std::uint64_t>(origin_.port->world_ranks()[0]) << 40 | (rank() == 0 ? ++made : 0), wait);
    const std::vector<std::byte*> parts = origin_.port->shared_window(size, wait);
    std::byte* own = parts[static_cast<std::size_t>(rank())];
    madvise(own, size, MADV_HUGEPAGE);  // where the system allows it for shared memory
#ifdef MADV_POPULATE_WRITE
    // Now rather than by a bus error later, should /dev/shm have filled up meanwhile.
    if (madvise(own, size, MADV_POPULATE_WRITE) != 0 && errno != EINVAL)
      sherd::fail(ErrorKind::memory, wait.what, ": the system has no ", size,
                  " bytes of shared memory left (", std::strerror(errno),
                  "); make /dev/shm larger (containers: --shm-size)");
#endif
    origin_.windows->add(id, origin_.port->world_ranks(), parts, rank(), size);
    parts_.push_back(std::make_shared<WindowPart>(own, size));
  }

  Origin origin_;
  std::vector<std::shared_ptr<WindowPart>> parts_;
};

std::unique_ptr<Backend> make_backend(Origin origin) {
  Port& port = *origin.port;
  const std::string name = group_name(port.kind(), port.world_ranks(), port.world_size());
  if (!origin.options.shared_memory || !port.one_machine() || port.size() > Notice::max_ranks)
    return make_message_exchange(origin.port, name, origin.options, std::move(origin.parent));

  BoardLayout layout;
  layout.ranks = port.size();
  layout.stage_bytes = std::size_t{512} << 10;
  layout.ring_bytes = std::clamp((std::size_t{1} << 20) / static_cast<std::size_t>(port.size()),
                                 std::size_t{16} << 10, std::size_t{256} << 10);
  const Patience patience{setup_seconds(origin.options), cat("setting up ", name)};
  std::vector<std::byte*> segments = port.shared_window(layout.segment_bytes(), patience);
  Board::prepare(segments[static_cast<std::size_t>(port.rank())], layout);
  port.meet(patience);  // every rank has prepared its segment
  BoardSettings settings;
  settings.name = name;
  settings.timeout_seconds = origin.options.timeout_seconds;
  settings.crowded = port.crowded();
  settings.gone = [port = origin.port](int rank) { return port->gone(rank); };
  settings.parent = std::move(origin.parent);
  auto board = std::make_shared<Board>(port.rank(), layout, std::move(segments), std::move(settings));
  origin.port->on_leave([weak = std::weak_ptr<Board>(board)] {
    if (const auto alive = weak.lock()) alive->depart();
  });
  return std::make_unique<WindowExchange>(std::move(origin), std::move(board));
}

}  // namespace

double setup_seconds(const CommOptions& options) {
  return std::max(60.0, options.timeout_seconds);
}

LaunchedWorld make_process_world(std::shared_ptr<Port> port, const CommOptions& options) {
  const LocalPlace place = port->place();
  Origin origin;
  origin.port = std::move(port);
  origin.windows = std::make_shared<WindowRegistry>();
  origin.options = options;
  return {make_group(make_backend(std::move(origin))), place.rank, place.size};
}

}  // namespace sherd::comm
