#include "device/ledger.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/text/excerpt.h"

namespace sherd::device {

std::string_view name_of(Tier tier) {
  constexpr std::array<std::string_view, tier_count> names{"device", "host", "nvme"};
  return names[static_cast<std::size_t>(tier)];
}

std::string_view name_of(Category category) {
  constexpr std::array<std::string_view, category_count> names{"parameters",  "gradients",     "optimizer",
                                                               "activations", "communication", "workspace",
                                                               "checkpoint",  "padding"};
  return names[static_cast<std::size_t>(category)];
}

void Ledger::set_limit(Tier tier, std::uint64_t bytes) {
  std::lock_guard lock(mutex_);
  book(tier).limit = bytes;
}

std::uint64_t Ledger::limit(Tier tier) const {
  std::lock_guard lock(mutex_);
  return book(tier).limit;
}

void Ledger::charge(Tier tier, Category category, std::uint64_t bytes) {
  std::lock_guard lock(mutex_);
  TierBook& page = book(tier);
  if (page.limit && (bytes > page.limit || page.total.current > page.limit - bytes))
    fail(ErrorKind::memory, "out of ", name_of(tier), " memory: ", bytes, " more bytes for ",
         name_of(category), " would pass the limit of ", page.limit, "; held now: ", holders_of(page),
         ". Shard further (zero_optimization.stage), shrink the micro-batch, turn on training.recompute, or "
         "raise ",
         "device.device_memory_limit");
  for (Account* account : {&page.accounts[static_cast<std::size_t>(category)], &page.total}) {
    account->current += bytes;
    account->peak = std::max(account->peak, account->current);
  }
}

void Ledger::credit(Tier tier, Category category, std::uint64_t bytes) noexcept {
  std::lock_guard lock(mutex_);
  TierBook& page = book(tier);
  page.accounts[static_cast<std::size_t>(category)].current -= bytes;
  page.total.current -= bytes;
}

void Ledger::reclassify(Tier tier, Category from, Category to, std::uint64_t bytes) {
  std::lock_guard lock(mutex_);
  TierBook& page = book(tier);
  page.accounts[static_cast<std::size_t>(from)].current -= bytes;
  Account& account = page.accounts[static_cast<std::size_t>(to)];
  account.current += bytes;
  account.peak = std::max(account.peak, account.current);
}

std::string Ledger::holders(Tier tier) const {
  std::lock_guard lock(mutex_);
  return holders_of(book(tier));
}

std::string Ledger::holders_of(const TierBook& page) const {
  std::vector<std::pair<std::uint64_t, std::string_view>> held;
  for (int i = 0; i < category_count; ++i)
    if (page.accounts[i].current)
      held.emplace_back(page.accounts[i].current, name_of(static_cast<Category>(i)));
  std::stable_sort(held.begin(), held.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  const auto line = [](const auto& one) { return cat(one.second, " ", one.first); };
  return held.empty() ? "nothing" : joined_text(held, ", ", line);
}

std::uint64_t Ledger::current(Tier tier, Category category) const {
  std::lock_guard lock(mutex_);
  return book(tier).accounts[static_cast<std::size_t>(category)].current;
}
std::uint64_t Ledger::current(Tier tier) const {
  std::lock_guard lock(mutex_);
  return book(tier).total.current;
}
std::uint64_t Ledger::peak(Tier tier, Category category) const {
  std::lock_guard lock(mutex_);
  return book(tier).accounts[static_cast<std::size_t>(category)].peak;
}
std::uint64_t Ledger::peak(Tier tier) const {
  std::lock_guard lock(mutex_);
  return book(tier).total.peak;
}

void Ledger::reset_peaks() {
  std::lock_guard lock(mutex_);
  for (TierBook& page : books_) {
    for (Account& account : page.accounts) account.peak = account.current;
    page.total.peak = page.total.current;
  }
}

}  // namespace sherd::device
