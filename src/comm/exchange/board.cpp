#include "comm/exchange/board.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

namespace sherd::comm {
namespace {

std::size_t round_up(std::size_t bytes, std::size_t to) {
  return (bytes + to - 1) / to * to;
}

}  // namespace

/// Offsets inside a segment: header (used in rank 0's only), slot, outgoing channels, their rings, stage.
struct Board::Places {
  explicit Places(const BoardLayout& layout) {
    const auto n = static_cast<std::size_t>(layout.ranks);
    slot = round_up(sizeof(BoardHeader), 64);
    channels = slot + round_up(sizeof(RankSlot), 64);
    rings = round_up(channels + n * sizeof(PairChannel), shared_page);
    stage = round_up(rings + n * layout.ring_bytes, shared_page);
    end = round_up(stage + 2 * layout.stage_bytes, shared_page);
  }
  std::size_t slot, channels, rings, stage, end;
};

BoardLayout BoardLayout::of_processes(int ranks, bool spans) {
  BoardLayout out;
  out.ranks = ranks;
  if (ranks == 1) return out;  // nobody to hide from
  out.stage_bytes = spans ? spanning_stage : stage;
  out.ring_bytes = std::clamp((std::size_t{1} << 20) / static_cast<std::size_t>(ranks), std::size_t{16} << 10,
                              std::size_t{256} << 10);
  return out;
}

std::size_t BoardLayout::segment_bytes() const {
  return Board::Places(*this).end;
}

std::shared_ptr<std::byte> BoardLayout::allocate(int segments) const {
  void* const memory = std::aligned_alloc(shared_page, segment_bytes() * static_cast<std::size_t>(segments));
  if (!memory) throw std::bad_alloc();
  return {static_cast<std::byte*>(memory), [](std::byte* each) { std::free(each); }};
}

void Board::prepare(std::byte* segment, const BoardLayout& layout) {
  const Places places(layout);
  new (segment) BoardHeader;
  new (segment + places.slot) RankSlot;
  for (int r = 0; r < layout.ranks; ++r)
    new (segment + places.channels + static_cast<std::size_t>(r) * sizeof(PairChannel)) PairChannel;
}

Board::Board(int rank, const BoardLayout& layout, std::vector<std::byte*> segments, BoardSettings settings)
    : rank_(rank),
      layout_(layout),
      segments_(std::move(segments)),
      settings_(std::move(settings)),
      spins_(settings_.crowded ? 0 : 2000),
      yields_(settings_.crowded ? 32 : 0) {
  require(layout.ranks <= BoardLayout::max_ranks, settings_.name, ": at most ", BoardLayout::max_ranks,
          " ranks exchange through shared memory on one machine");
}

BoardHeader& Board::header() const {
  return *std::launder(reinterpret_cast<BoardHeader*>(segments_[0]));
}

RankSlot& Board::slot(int rank) const {
  static const std::size_t offset = round_up(sizeof(BoardHeader), 64);
  return *std::launder(reinterpret_cast<RankSlot*>(place(rank, offset)));
}

PairChannel& Board::channel(int from, int to) {
  return *std::launder(reinterpret_cast<PairChannel*>(
      place(from, Places(layout_).channels + static_cast<std::size_t>(to) * sizeof(PairChannel))));
}

std::byte* Board::ring(int from, int to) {
  return place(from, Places(layout_).rings + static_cast<std::size_t>(to) * layout_.ring_bytes);
}

std::byte* Board::stage(int rank, std::uint64_t chunk) {
  return place(rank, Places(layout_).stage + static_cast<std::size_t>(chunk % 2) * layout_.stage_bytes);
}

void Board::barrier(const Call& call) {
  const std::uint64_t number = ++barriers_;
  const auto n = static_cast<std::uint64_t>(size());
  BoardHeader& shared = header();
  slot(rank_).arrived.store(number, std::memory_order_release);
  // The chain of read-modify-writes carries every rank's earlier writes to the last one, whose store to
  // `completed` carries them on.
  if (shared.arrivals.fetch_add(1, std::memory_order_acq_rel) + 1 == number * n) {
    shared.completed.store(number, std::memory_order_release);
    shared.met.wake_all();
    return;
  }
  const auto missing = [&] {
    std::vector<int> out;
    for (int r = 0; r < size(); ++r)
      if (slot(r).arrived.load(std::memory_order_acquire) < number) out.push_back(r);
    return out;
  };
  const Deadline deadline = Deadline::after_seconds(settings_.timeout_seconds);
  wait(
      shared.met, [&] { return shared.completed.load(std::memory_order_acquire) >= number; },
      [&] {
        const bool late = deadline.passed();  // first: who comes meanwhile is not missing
        return Waited{call, missing(), deadline, late};
      });
}

std::uint64_t Announcements::add(const CallSignature& call) {
  std::array<std::uint64_t, words> plain{};
  std::memcpy(plain.data(), &call, sizeof call);
  const std::uint64_t number = count_.load(std::memory_order_relaxed) + 1;
  Announcement& entry = entries_[number % kept];
  entry.number.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  for (std::size_t i = 0; i < words; ++i) entry.call[i].store(plain[i], std::memory_order_relaxed);
  // In one order with what its peers look at after their own: of two ranks, one at least sees the other's.
  entry.number.store(number, std::memory_order_seq_cst);
  count_.store(number, std::memory_order_seq_cst);
  return number;
}

bool Announcements::read(std::uint64_t number, CallSignature& call) const {
  const Announcement& entry = entries_[number % kept];
  if (entry.number.load(std::memory_order_seq_cst) != number) return false;
  std::array<std::uint64_t, words> plain{};
  for (std::size_t i = 0; i < words; ++i) plain[i] = entry.call[i].load(std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_acquire);
  if (entry.number.load(std::memory_order_relaxed) != number) return false;
  std::memcpy(static_cast<void*>(&call), plain.data(), sizeof call);
  return true;
}

std::uint64_t Board::announce(const CallSignature& call) {
  const std::uint64_t number = slot(rank_).announced.add(call);
  std::vector<CallSignature> calls;
  std::vector<int> ranks;
  CallSignature one;
  for (int r = 0; r < size(); ++r)
    if (slot(r).announced.read(number, one)) calls.push_back(one), ranks.push_back(in_world(r));
  fail_if(mismatch(calls, ranks));
  return number;
}

std::vector<int> Board::not_announced(std::uint64_t number) const {
  std::vector<int> out;
  for (int r = 0; r < size(); ++r)
    if (slot(r).announced.count() < number) out.push_back(in_group(r));
  return out;
}

void Board::nap(WaitWord& word, std::uint32_t seen, const Deadline& deadline) const {
  // Short enough to notice a dead process, or a failed parent group, within a fraction of a second.
  std::chrono::nanoseconds longest = std::chrono::milliseconds(100);
  // Who polls messages must not sleep through one on which another rank waits.
  if (settings_.progress && settings_.progress()) longest = std::chrono::microseconds(50);
  const auto left =
      std::chrono::duration_cast<std::chrono::nanoseconds>(deadline.at() - Deadline::Clock::now());
  const bool late = left.count() <= 0;  // and a rank that waits elsewhere is still heard
  word.sleep(seen, late ? longest : std::clamp(left, std::chrono::nanoseconds(1000), longest));
}

/// Past the deadline: whether one of these ranks may still say for whom it waits elsewhere.
bool Board::may_hear_more(const std::vector<int>& missing, const Deadline& deadline) const {
  if (Deadline::Clock::now() >= deadline.at() + std::chrono::seconds(1)) return false;
  return std::any_of(missing.begin(), missing.end(),
                     [&](int r) { return r != rank_ && slot(r).asks_elsewhere.load() != 0; });
}

void Board::record(const Waited& waited) const {
  if (!waited.call.record || is_transfer(waited.call)) return;  // whose peer stands there
  std::array<int, FlightRecorder::missing_kept> ranks{};
  const std::size_t count = waited.missing.size();
  for (std::size_t i = 0; i < std::min(count, ranks.size()); ++i) ranks[i] = in_world(waited.missing[i]);
  waited.call.record.wait_for(ranks, count);
}

std::string Board::diagnose(const Waited& waited, bool slow_checks) {
  const auto& [call, missing, deadline, late] = waited;
  for (const int r : missing) {
    if (r == rank_) continue;
    if (slot(r).departed.load(std::memory_order_acquire))
      return cat(name(), ": rank ", in_world(r), " has left the group while rank ", in_world(rank_),
                 " waited for it in ", describe(call), "; see that rank's own output");
    if (slow_checks && settings_.gone && settings_.gone(r))
      return cat(name(), ": rank ", in_world(r), " is dead: its process ended while rank ", in_world(rank_),
                 " waited for it in ", describe(call), "; see that rank's own output");
  }
  if (!late || may_hear_more(missing, deadline)) return "";
  return cat(name(), ": ", describe(call), ": ", name_late_ranks(missing),
             "; raise parallel.timeout_seconds if the work in between takes that long");
}

/// The rank for which `rank` waits in a transfer, the one for which that one does, and so on, by their
/// numbers in the world. Empty where it waits for none, or they wait for each other.
std::vector<int> Board::waits_behind(int rank) const {
  std::vector<int> out, seen{in_world(rank_), in_world(rank)};
  for (int at = rank;;) {
    const int next = slot(at).waits_for.load();
    if (next < 0) return out;
    if (std::find(seen.begin(), seen.end(), next) != seen.end()) return {};
    out.push_back(next), seen.push_back(next);
    for (at = 0; at < size() && in_world(at) != next;) ++at;
    if (at == size()) return out;
  }
}

/// Names those who did not come. Who waits itself for another in a transfer is not to blame.
std::string Board::name_late_ranks(const std::vector<int>& missing) const {
  std::vector<int> numbers;
  for (const int r : missing) numbers.push_back(in_world(r));
  const std::vector<int> behind = missing.size() == 1 ? waits_behind(missing[0]) : std::vector<int>{};
  const std::string late = behind.empty() ? name_ranks(numbers) : name_ranks({behind.back()});
  std::string text = cat(late, " did not come within ", settings_.timeout_seconds, " s, while rank ",
                         in_world(rank_), " waited");
  if (behind.empty()) return text;
  text += cat(" for ", name_ranks(numbers));
  for (const int r : behind) text += cat(", that for rank ", r);
  return text;
}

void Board::fail(const std::string& reason) noexcept {
  BoardHeader& shared = header();
  std::uint32_t none = 0;
  if (!shared.failure.compare_exchange_strong(none, 1)) return;
  const std::size_t length = std::min(reason.size(), BoardHeader::text_bytes - 1);
  std::memcpy(shared.text.data(), reason.data(), length);
  shared.text[length] = 0;
  shared.failure.store(2, std::memory_order_release);
  shared.met.wake_all();
  for (int r = 0; r < size(); ++r) slot(r).moved.wake_all();
  if (settings_.tell_failure) settings_.tell_failure(reason);
}

void Board::fail_and_throw(const std::string& reason) {
  fail(reason);
  throw_failure();
}

void Board::fail_if(const std::string& wrong) {
  if (!wrong.empty()) fail_and_throw(cat(name(), ": ", wrong));
}

void Board::throw_failure() const {
  throw Error(ErrorKind::comm, failure());
}

bool Board::failed() const noexcept {
  return header().failure.load(std::memory_order_acquire) != 0 ||
         (settings_.parent && settings_.parent->failed());
}

std::string Board::failure() const {
  if (!failed()) return "";
  std::lock_guard lock(failure_mutex_);
  if (first_failure_.empty()) first_failure_ = shared_failure();
  return first_failure_;
}

std::string Board::shared_failure() const {
  const auto state = [&] { return header().failure.load(std::memory_order_acquire); };
  if (state() == 0) return settings_.parent ? settings_.parent->failure() : "";
  // The writer needs a moment, unless it died while writing.
  for (int i = 0; i < 1000 && state() == 1; ++i) usleep(1000);
  if (state() == 1) return cat(name(), ": a rank died while it reported a failure");
  return header().text.data();
}

void Board::look_after_peers() noexcept {
  if (!settings_.gone || failed()) return;
  for (int r = 0; r < size(); ++r)
    if (r != rank_ && !slot(r).departed.load(std::memory_order_acquire) && settings_.gone(r))
      return fail(
          cat(name(), ": rank ", in_world(r), " is dead: its process ended; see that rank's own output"));
}

void Board::depart() noexcept {
  try {
    // News from other machines may reach the others here later than the sight of this rank's
    // leaving.
    if (failed()) fail(failure());
  } catch (const std::exception&) {
    fail(cat(name(), ": rank ", in_world(rank_), " left after a failure that it cannot tell"));
  }
  slot(rank_).departed.store(1, std::memory_order_release);
  header().met.wake_all();
  for (int r = 0; r < size(); ++r) slot(r).moved.wake_all();
}

}  // namespace sherd::comm
