#pragma once

#include <cstdint>

// Masks of attention, written once for processors and GPUs.

#if defined(__CUDACC__)
#define SHERD_SEEN __host__ __device__ inline
#else
// A function that several instruction sets compile may have no copy of its own.
#define SHERD_SEEN [[gnu::always_inline]] inline
#endif

namespace sherd::tensor {

/// Which of a call's keys its queries see: query i those from i - behind on and before i + ahead, that is
/// [first(i), end(i, seq)), or none where that is empty. Queries and keys count from the call's first ones.
struct SeenKeys {
  std::int64_t ahead = 0;   ///< from -seq to seq: none, all that follow
  std::int64_t behind = 0;  ///< from -seq to seq: none, all before

  SHERD_SEEN std::int64_t first(std::int64_t query) const { return query > behind ? query - behind : 0; }
  SHERD_SEEN std::int64_t end(std::int64_t query, std::int64_t seq) const { return cut(query + ahead, seq); }
  /// The queries [first_query(j), end_query(j, seq)) are those that see key j.
  SHERD_SEEN std::int64_t first_query(std::int64_t key) const { return key >= ahead ? key - ahead + 1 : 0; }
  SHERD_SEEN std::int64_t end_query(std::int64_t key, std::int64_t seq) const {
    return cut(key + behind + 1, seq);
  }
  /// Whether any query sees any key.
  SHERD_SEEN bool any(std::int64_t seq) const { return seq - 1 + ahead > 0 && -behind < seq; }

 private:
  SHERD_SEEN static std::int64_t cut(std::int64_t x, std::int64_t seq) {
    return x < 0 ? 0 : x < seq ? x : seq;
  }
};

}  // namespace sherd::tensor
