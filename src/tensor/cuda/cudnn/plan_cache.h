#pragma once

#include <map>
#include <memory>
#include <mutex>

#include "base/error.h"

namespace sherd::tensor::SHERD_CUDA::cudnn {

/// Plans by key, each made once for all threads: compiling one takes seconds. What cannot be made is not
/// tried again.
template <class Key, class Made>
class PlanCache {
 public:
  /// The plan that `make` made, now or before; null where it threw then, which `refused` is told once. An
  /// error of memory is thrown on, for it says nothing of the plan. Those that ask meanwhile wait.
  template <class Make, class Refused>
  const Made* find(const Key& key, const Make& make, const Refused& refused) {
    std::lock_guard lock(mutex_);
    const auto [at, is_new] = plans_.try_emplace(key);
    if (!is_new) return at->second.get();
    try {
      at->second = make();
    } catch (const Error& error) {
      if (error.kind() == ErrorKind::memory) {
        plans_.erase(at);
        throw;
      }
      refused(error);
    } catch (...) {
      plans_.erase(at);
      throw;
    }
    return at->second.get();
  }

 private:
  std::mutex mutex_;
  std::map<Key, std::unique_ptr<Made>> plans_;  // guarded by mutex_
};

}  // namespace sherd::tensor::SHERD_CUDA::cudnn
