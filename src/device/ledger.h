#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>

namespace sherd::device {

/// Where bytes live.
enum class Tier : std::uint8_t { device, host, nvme };
inline constexpr int tier_count = 3;

/// The uses of memory. `checkpoint` is the copy of states that a save in the background writes; `padding` is
/// the alignment that layouts add to model states, listed apart.
enum class Category : std::uint8_t {
  parameters,
  gradients,
  optimizer,
  activations,
  communication,
  workspace,
  checkpoint,
  padding
};
inline constexpr int category_count = 8;

std::string_view name_of(Tier tier);
std::string_view name_of(Category category);

/// One rank's memory, tracked: every allocator charges it. Thread-safe (a lock guards all members; charges
/// are rare next to the work done in the memory they pay for).
class Ledger {
 public:
  /// Refuses charges that would take `tier` above `bytes`; 0 means no limit.
  void set_limit(Tier tier, std::uint64_t bytes);
  std::uint64_t limit(Tier tier) const;

  /// Throws Error{memory} naming tier, category, bytes and the largest holders when the limit would be
  /// passed.
  void charge(Tier tier, Category category, std::uint64_t bytes);
  void credit(Tier tier, Category category, std::uint64_t bytes) noexcept;
  /// Moves bytes between categories of one tier without a change of the total.
  void reclassify(Tier tier, Category from, Category to, std::uint64_t bytes);

  /// The bytes that each category holds of `tier`, the largest first: "parameters 100, gradients 50";
  /// "nothing" where all are empty.
  std::string holders(Tier tier) const;

  std::uint64_t current(Tier tier, Category category) const;
  std::uint64_t current(Tier tier) const;
  /// The highest value that current() has had since construction or reset_peaks().
  std::uint64_t peak(Tier tier, Category category) const;
  std::uint64_t peak(Tier tier) const;
  void reset_peaks();

 private:
  struct Account {
    std::uint64_t current = 0, peak = 0;
  };
  struct TierBook {
    std::array<Account, category_count> accounts;
    Account total;
    std::uint64_t limit = 0;
  };
  TierBook& book(Tier tier) { return books_[static_cast<std::size_t>(tier)]; }
  const TierBook& book(Tier tier) const { return books_[static_cast<std::size_t>(tier)]; }

  std::string holders_of(const TierBook& page) const;

  mutable std::mutex mutex_;
  std::array<TierBook, tier_count> books_;  // guarded by mutex_
};

}  // namespace sherd::device
