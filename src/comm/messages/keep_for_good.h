#pragma once

#include <atomic>
#include <cstddef>
#include <new>
#include <utility>

namespace sherd::comm {

/// Where what keep_for_good() was given lies, one behind the other; never freed, for threads of libraries may
/// be at work until the process ends.
struct Kept {
  Kept* next = nullptr;
  static inline std::atomic<Kept*> first{nullptr};
};

/// Keeps `value` as long as the process lives: memory that a library may still touch, though nobody waits for
/// it any more. Null where there is no memory for the value's place; what it owns stays all the same.
template <class T>
const T* keep_for_good(T value) noexcept {
  struct Place : Kept {
    explicit Place(T&& kept) : value(std::move(kept)) {}
    T value;
  };
  Place* const place = new (std::nothrow) Place(std::move(value));
  if (!place) {
    alignas(T) std::byte forgotten[sizeof(T)];
    new (forgotten) T(std::move(value));
    return nullptr;
  }
  place->next = Kept::first.load();
  while (!Kept::first.compare_exchange_weak(place->next, place)) {
  }
  return &place->value;
}

}  // namespace sherd::comm
