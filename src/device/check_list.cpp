#include "device/check_list.h"

#include <utility>
#include <vector>

namespace sherd::device {

std::shared_ptr<void> CheckList::add(std::function<void()> check) {
  const auto entry = std::make_shared<CheckRegistration>();
  entry->check = std::move(check);
  const std::lock_guard lock(entries_->mutex);
  const auto at = entries_->all.insert(entries_->all.end(), entry);
  return {entry.get(), [entries = entries_, at, entry](void*) {
            {
              const std::lock_guard guard(entries->mutex);
              entries->all.erase(at);
            }
            const std::lock_guard guard(entry->mutex);
            entry->check = nullptr;
          }};
}

void CheckList::call() const {
  std::vector<std::shared_ptr<CheckRegistration>> all;
  {
    const std::lock_guard lock(entries_->mutex);
    all.assign(entries_->all.begin(), entries_->all.end());
  }
  for (const std::shared_ptr<CheckRegistration>& entry : all) {
    const std::lock_guard lock(entry->mutex);
    if (entry->check) entry->check();
  }
}

}  // namespace sherd::device
