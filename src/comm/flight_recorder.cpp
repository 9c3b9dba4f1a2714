#include "comm/flight_recorder.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

namespace sherd::comm {
namespace {

std::int64_t now_us() {
  return std::chrono::duration_cast<std::chrono::microseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

constexpr auto relaxed = std::memory_order_relaxed;

// An entry's word: the number of its call, and in the lowest bits CallState + 1, or 0 while it is written.
constexpr int state_bits = 3;
constexpr std::uint64_t word_of(std::uint64_t number, std::uint64_t low) {
  return number << state_bits | low;
}
constexpr std::uint64_t word_of(std::uint64_t number, CallState state) {
  return word_of(number, static_cast<std::uint64_t>(state) + 1);
}
constexpr std::uint64_t number_of(std::uint64_t word) {
  return word >> state_bits;
}
constexpr std::uint64_t low_of(std::uint64_t word) {
  return word & ((1u << state_bits) - 1);
}
/// Whether nobody will look for the call any more.
bool is_free(std::uint64_t word) {
  return word == 0 || low_of(word) > static_cast<std::uint64_t>(CallState::under_way) + 1;
}

bool is_transfer(Collective kind) {
  return kind == Collective::send || kind == Collective::receive;
}

}  // namespace

std::string_view name_of(CallState state) {
  constexpr std::string_view names[] = {"issued", "under way", "done", "failed"};
  return names[static_cast<std::size_t>(state)];
}

/// Atomic throughout: a reader may look while it is written, and then sees another word before and after.
struct FlightRecorder::Entry {
  std::atomic<std::uint64_t> word{0};
  std::atomic<std::uint64_t> sequence, bytes;
  std::atomic<std::int64_t> issued, begun, ended;
  std::atomic<std::uint32_t> group;
  std::atomic<std::int32_t> peer;
  std::atomic<Collective> kind;
  std::array<std::atomic<std::uint64_t>, label_bytes / 8> label;
  std::atomic<std::int32_t> missing_count;
  std::array<std::atomic<std::int32_t>, missing_kept> missing;
};

FlightRecorder::FlightRecorder() : entries_(std::make_unique<Entry[]>(kept)) {}
FlightRecorder::~FlightRecorder() = default;

// ---- groups ----

FlightRecorder::Group::Group(std::string id, std::string name, std::vector<int> ranks)
    : id_(std::move(id)),
      name_(std::move(name)),
      ranks_(std::move(ranks)),
      sends_(ranks_.size()),
      receives_(ranks_.size()) {}

std::uint64_t FlightRecorder::Group::next(Collective kind, int peer) {
  if (!is_transfer(kind)) return issued_.fetch_add(1, relaxed) + 1;
  return ++(kind == Collective::send ? sends_ : receives_)[static_cast<std::size_t>(peer)];
}

std::shared_ptr<FlightRecorder::Group> FlightRecorder::add(std::string id, std::string name,
                                                           std::vector<int> ranks, int rank) {
  auto group = std::make_shared<Group>(std::move(id), std::move(name), std::move(ranks));
  std::lock_guard lock(mutex_);
  forget_groups();
  if (world_size_ == 0) rank_ = rank, world_size_ = static_cast<int>(group->ranks_.size());
  group->number_ = groups_made_++;
  groups_.push_back(group);
  return group;
}

/// Forgets the groups that are gone and have no call left here.
void FlightRecorder::forget_groups() {
  std::erase_if(groups_, [&](const std::shared_ptr<Group>& group) {
    return group.use_count() == 1 && std::none_of(&entries_[0], &entries_[kept], [&](const Entry& entry) {
             return entry.word.load() != 0 && entry.group.load() == group->number_;
           });
  });
}

void FlightRecorder::set_purpose(Group& group, const std::string& purpose) {
  std::lock_guard lock(mutex_);
  group.purpose_ = purpose;
}

// ---- calls ----

/// A call that is under way keeps its place, so that later ones on other groups do not hide it; where many
/// are, it may lose it.
FlightRecorder::Ticket FlightRecorder::issue(Group& group, const Issued& call) noexcept {
  constexpr int tries = 16;
  Ticket out;
  out.group_ = &group;
  out.transfer_ = is_transfer(call.kind);
  out.sequence_ = group.next(call.kind, call.peer);
  for (int i = 0; !out.entry_; ++i) {
    out.number_ = calls_.fetch_add(1, relaxed) + 1;
    Entry& entry = entries_[out.number_ % kept];
    std::uint64_t word = entry.word.load(relaxed);
    if (low_of(word) == 0 && word != 0) continue;  // another thread writes it
    if (i < tries && !is_free(word)) continue;
    if (entry.word.compare_exchange_strong(word, word_of(out.number_, 0))) out.entry_ = &entry;
  }
  Entry& entry = *out.entry_;
  std::atomic_thread_fence(std::memory_order_release);
  entry.sequence.store(out.sequence_, relaxed), entry.bytes.store(call.bytes, relaxed);
  entry.group.store(group.number_, relaxed), entry.peer.store(call.world_peer, relaxed);
  entry.kind.store(call.kind, relaxed);
  entry.issued.store(now_us(), relaxed), entry.begun.store(0, relaxed), entry.ended.store(0, relaxed);
  entry.missing_count.store(0, relaxed);
  std::array<std::uint64_t, label_bytes / 8> words{};
  std::memcpy(words.data(), call.label.data(), std::min(call.label.size(), label_bytes - 1));
  for (std::size_t i = 0; i < words.size(); ++i) entry.label[i].store(words[i], relaxed);
  entry.word.store(word_of(out.number_, CallState::issued), std::memory_order_release);
  return out;
}

bool FlightRecorder::Ticket::holds() const noexcept {
  return entry_ && number_of(entry_->word.load(relaxed)) == number_;
}

void FlightRecorder::Ticket::move_to(CallState state) const noexcept {
  std::uint64_t word = entry_->word.load(relaxed);
  while (number_of(word) == number_ && !is_free(word) &&
         !entry_->word.compare_exchange_weak(word, word_of(number_, state), std::memory_order_release,
                                             relaxed)) {
  }
}

void FlightRecorder::Ticket::begin() const noexcept {
  if (!holds()) return;
  entry_->begun.store(now_us(), relaxed);
  move_to(CallState::under_way);
}

void FlightRecorder::Ticket::end(bool well) const noexcept {
  if (!entry_) return;
  if (well && !transfer_) {
    std::uint64_t last = group_->finished_.load(relaxed);
    while (last < sequence_ && !group_->finished_.compare_exchange_weak(last, sequence_, relaxed)) {
    }
  }
  if (!holds()) return;
  entry_->ended.store(now_us(), relaxed);
  move_to(well ? CallState::done : CallState::failed);
}

void FlightRecorder::Ticket::wait_for(std::span<const int> ranks, std::size_t count) const noexcept {
  if (!holds()) return;
  for (std::size_t i = 0; i < std::min(ranks.size(), missing_kept); ++i)
    entry_->missing[i].store(ranks[i], relaxed);
  entry_->missing_count.store(static_cast<std::int32_t>(count), std::memory_order_release);
}

// ---- what is told ----

FlightRecord FlightRecorder::record() const {
  FlightRecord out;
  std::vector<std::uint32_t> numbers;
  {
    std::lock_guard lock(mutex_);
    out.rank = rank_, out.world_size = std::max(world_size_, 1);
    for (const auto& group : groups_) {
      numbers.push_back(group->number_);
      out.groups.push_back({group->id_, group->name_, group->purpose_, group->ranks_, group->issued_.load(),
                            group->finished_.load()});
    }
  }
  for (std::size_t i = 0; i < kept; ++i) {
    const Entry& entry = entries_[i];
    const std::uint64_t word = entry.word.load(std::memory_order_acquire);
    if (low_of(word) == 0) continue;
    RecordedCall call;
    call.number = number_of(word), call.state = static_cast<CallState>(low_of(word) - 1);
    call.sequence = entry.sequence.load(relaxed), call.bytes = entry.bytes.load(relaxed);
    call.kind = entry.kind.load(relaxed), call.peer = entry.peer.load(relaxed);
    call.issued_us = entry.issued.load(relaxed), call.begun_us = entry.begun.load(relaxed);
    if (is_free(word)) call.ended_us = entry.ended.load(relaxed);
    const std::uint32_t group = entry.group.load(relaxed);
    std::array<std::uint64_t, label_bytes / 8> words{};
    for (std::size_t w = 0; w < words.size(); ++w) words[w] = entry.label[w].load(relaxed);
    if (call.state != CallState::done) {
      call.missing_count = entry.missing_count.load(std::memory_order_acquire);
      const auto known = std::min(static_cast<std::size_t>(call.missing_count), missing_kept);
      for (std::size_t m = 0; m < known; ++m) call.missing.push_back(entry.missing[m].load(relaxed));
    }
    std::atomic_thread_fence(std::memory_order_acquire);
    if (number_of(entry.word.load(relaxed)) != call.number) continue;  // a later call has its place now
    call.label = reinterpret_cast<const char*>(words.data());
    const auto known = std::find(numbers.begin(), numbers.end(), group);
    if (known == numbers.end()) continue;  // made since
    call.group = static_cast<std::size_t>(known - numbers.begin());
    out.calls.push_back(std::move(call));
  }
  std::sort(out.calls.begin(), out.calls.end(),
            [](const RecordedCall& a, const RecordedCall& b) { return a.number < b.number; });
  return out;
}

void FlightRecorder::on_failure(std::function<void(const std::string&)> tell) {
  std::lock_guard lock(mutex_);
  tell_ = std::move(tell);
}

void FlightRecorder::tell_failure(const std::string& reason) noexcept {
  std::function<void(const std::string&)> tell;
  {
    std::lock_guard lock(mutex_);
    if (!tell_ || std::exchange(told_, true)) return;
    tell = tell_;  // which looks at the record, under the lock
  }
  tell(reason);
}

}  // namespace sherd::comm
