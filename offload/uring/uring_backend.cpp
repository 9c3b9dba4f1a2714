#include <liburing.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/files.h"
#include "offload/io_backend.h"

namespace sherd::offload {
namespace {

/// The kernel takes at most this much in one registered buffer.
constexpr std::size_t largest_registered = std::size_t{1} << 30;
constexpr unsigned most_registered = 1024;
constexpr std::uint64_t wake_tag = ~std::uint64_t{0};

std::string refusal(int error) {
  switch (error) {
    case EPERM:
    case EACCES:
      return "the kernel forbids it: kernel.io_uring_disabled, or a container's seccomp profile";
    case ENOSYS:
      return "the kernel lacks it";
    default:
      return std::strerror(error);
  }
}

std::string registration_refusal(int error) {
  if (error == EINVAL) return "that takes Linux 5.19";
  if (error != ENOMEM) return std::strerror(error);
  rlimit limit{};
  ::getrlimit(RLIMIT_MEMLOCK, &limit);
  return cat("the limit of locked memory, ", limit.rlim_cur, " bytes, is too low: raise it with ulimit -l");
}

/// Owns a ring. Only the thread of submit() and reap() touches its queues; the kernel guards registration.
class UringBackend final : public IoBackend {
 public:
  UringBackend(const io_uring& ring, FileDescriptor wake_event, const StoreOptions& options)
      : ring_(ring), wake_event_(std::move(wake_event)), single_submit_(options.single_submit) {
    const int error = -io_uring_register_buffers_sparse(&ring_, most_registered);
    if (error != 0) table_refusal_ = registration_refusal(error);
    slots_taken_.resize(error == 0 ? most_registered : 0);
    listen();
  }

  ~UringBackend() override { io_uring_queue_exit(&ring_); }

  std::string name() const override { return "io_uring"; }

  void attach(int descriptor) override {
    descriptor_ = descriptor;
    registered_file_ = io_uring_register_files(&ring_, &descriptor, 1) == 0;
  }

  int register_memory(std::span<std::byte> memory, std::string* why) override;
  void unregister_memory(int handle) noexcept override;
  void submit(std::span<const IoRequest> requests) override;
  std::size_t reap(std::span<IoCompletion> completions, std::chrono::nanoseconds patience) override;
  void wake() noexcept override { ::eventfd_write(wake_event_.get(), 1); }

 private:
  /// Memory in consecutive slots of the kernel's table, largest_registered bytes in each but the last.
  struct Registration {
    std::byte* data = nullptr;
    std::size_t bytes = 0;
    std::size_t first_slot = 0, slots = 0;
  };

  io_uring_sqe* next_entry();
  void flush();
  void listen();
  int slot_of(const IoRequest& request) const;
  bool take_slots(Registration& registration);
  void free_slots(const Registration& registration, std::size_t filled) noexcept;

  io_uring ring_;
  FileDescriptor wake_event_;
  int descriptor_ = -1;
  const bool single_submit_;
  bool registered_file_ = false;
  std::string table_refusal_;
  mutable std::mutex mutex_;                 // guards what follows
  std::vector<Registration> registrations_;  // by handle
  std::vector<bool> slots_taken_;
};

io_uring_sqe* UringBackend::next_entry() {
  io_uring_sqe* entry = io_uring_get_sqe(&ring_);
  if (!entry) fail(ErrorKind::io, "the ring has no entry left");
  return entry;
}

void UringBackend::flush() {
  for (int attempt = 0; io_uring_sq_ready(&ring_) > 0; ++attempt) {
    const int taken = io_uring_submit(&ring_);
    if (taken >= 0) continue;
    if ((taken != -EINTR && taken != -EAGAIN && taken != -EBUSY) || attempt > 1000)
      fail(ErrorKind::io, "io_uring takes no requests: ", std::strerror(-taken));
    if (taken != -EINTR) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

/// Has the next wake() end a reap().
void UringBackend::listen() {
  io_uring_sqe* entry = next_entry();
  io_uring_prep_poll_add(entry, wake_event_.get(), POLLIN);
  entry->user_data = wake_tag;
  flush();
}

bool UringBackend::take_slots(Registration& registration) {
  registration.slots = (registration.bytes + largest_registered - 1) / largest_registered;
  const std::vector<bool> free(registration.slots, false);
  const auto found = std::search(slots_taken_.begin(), slots_taken_.end(), free.begin(), free.end());
  if (found == slots_taken_.end()) return false;
  registration.first_slot = static_cast<std::size_t>(found - slots_taken_.begin());
  std::fill_n(found, registration.slots, true);
  return true;
}

void UringBackend::free_slots(const Registration& registration, std::size_t filled) noexcept {
  for (std::size_t i = 0; i < filled; ++i) {
    iovec none{};
    io_uring_register_buffers_update_tag(&ring_, static_cast<unsigned>(registration.first_slot + i), &none,
                                         nullptr, 1);
  }
  std::fill_n(slots_taken_.begin() + static_cast<std::ptrdiff_t>(registration.first_slot), registration.slots,
              false);
}

int UringBackend::register_memory(std::span<std::byte> memory, std::string* why) {
  std::lock_guard lock(mutex_);
  *why = table_refusal_;
  if (!table_refusal_.empty() || memory.empty()) return -1;
  Registration registration{.data = memory.data(), .bytes = memory.size()};
  if (!take_slots(registration)) {
    *why = cat("all ", most_registered, " GiB that can be registered are");
    return -1;
  }
  for (std::size_t i = 0; i < registration.slots; ++i) {
    const std::size_t begin = i * largest_registered;
    const iovec part{memory.data() + begin, std::min(largest_registered, memory.size() - begin)};
    const int done = io_uring_register_buffers_update_tag(
        &ring_, static_cast<unsigned>(registration.first_slot + i), &part, nullptr, 1);
    if (done == 1) continue;
    free_slots(registration, i);
    *why = registration_refusal(-done);
    return -1;
  }
  registrations_.push_back(registration);
  return static_cast<int>(registrations_.size()) - 1;
}

void UringBackend::unregister_memory(int handle) noexcept {
  std::lock_guard lock(mutex_);
  Registration& registration = registrations_[static_cast<std::size_t>(handle)];
  free_slots(registration, registration.slots);
  registration = {};
}

/// The kernel's table entry that holds all of the request's memory; -1 for none.
int UringBackend::slot_of(const IoRequest& request) const {
  if (request.registered < 0) return -1;
  const Registration& registration = registrations_[static_cast<std::size_t>(request.registered)];
  const auto begin = static_cast<std::size_t>(request.memory - registration.data);
  if (begin / largest_registered != (begin + request.bytes - 1) / largest_registered) return -1;
  return static_cast<int>(registration.first_slot + begin / largest_registered);
}

void UringBackend::submit(std::span<const IoRequest> requests) {
  for (const IoRequest& request : requests) {
    int slot;
    {
      std::lock_guard lock(mutex_);
      slot = slot_of(request);
    }
    io_uring_sqe* entry = next_entry();
    const int file = registered_file_ ? 0 : descriptor_;
    if (slot >= 0 && request.write)
      io_uring_prep_write_fixed(entry, file, request.memory, request.bytes, request.offset, slot);
    else if (slot >= 0)
      io_uring_prep_read_fixed(entry, file, request.memory, request.bytes, request.offset, slot);
    else if (request.write)
      io_uring_prep_write(entry, file, request.memory, request.bytes, request.offset);
    else
      io_uring_prep_read(entry, file, request.memory, request.bytes, request.offset);
    if (registered_file_) entry->flags |= IOSQE_FIXED_FILE;
    entry->user_data = request.tag;
    if (single_submit_) flush();
  }
  flush();
}

std::size_t UringBackend::reap(std::span<IoCompletion> completions, std::chrono::nanoseconds patience) {
  __kernel_timespec limit{};
  limit.tv_sec = patience.count() / 1'000'000'000;
  limit.tv_nsec = patience.count() % 1'000'000'000;
  io_uring_cqe* first = nullptr;
  const int error = io_uring_wait_cqe_timeout(&ring_, &first, &limit);
  if (error == -ETIME || error == -EINTR || error == -EAGAIN) return 0;
  if (error < 0) fail(ErrorKind::io, "io_uring cannot wait: ", std::strerror(-error));
  std::size_t count = 0;
  io_uring_cqe* entry = nullptr;
  while (count < completions.size() && io_uring_peek_cqe(&ring_, &entry) == 0) {
    const IoCompletion completion{entry->user_data, entry->res};
    io_uring_cqe_seen(&ring_, entry);
    if (completion.tag != wake_tag) {
      completions[count++] = completion;
      continue;
    }
    eventfd_t ignored = 0;
    ::eventfd_read(wake_event_.get(), &ignored);
    listen();
  }
  return count;
}

}  // namespace

std::unique_ptr<IoBackend> make_uring_backend(const StoreOptions& options, std::string* why) {
  FileDescriptor wake_event(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  io_uring ring{};
  // One entry is the waking poll's.
  const int error =
      wake_event ? -io_uring_queue_init(static_cast<unsigned>(options.queue_depth) + 1, &ring, 0) : errno;
  if (error == 0) return std::make_unique<UringBackend>(ring, std::move(wake_event), options);
  *why = refusal(error);
  return nullptr;
}

}  // namespace sherd::offload
