#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "offload/io_backend.h"
#include "offload/store.h"
#include "support/temp_folder.h"

namespace sherd::offload {

inline const char* backend_text(StoreOptions::Backend backend) {
  return backend == StoreOptions::Backend::io_uring  ? "io_uring"
         : backend == StoreOptions::Backend::threads ? "threads"
                                                     : "automatic";
}

inline bool uring_works() {
  std::string why;
  return make_uring_backend({}, &why) != nullptr;
}

inline Deadline soon() {
  return Deadline::after_seconds(20);
}

/// `bytes` bytes that differ by `seed`.
inline std::vector<unsigned char> pattern(std::size_t bytes, std::uint64_t seed) {
  std::vector<unsigned char> out(bytes);
  std::uint64_t state = seed * 0x9e3779b97f4a7c15ull + 1;
  for (auto& byte : out) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    byte = static_cast<unsigned char>(state >> 56);
  }
  return out;
}

inline std::vector<unsigned char> read_all(Store& store, const Span& span) {
  std::vector<unsigned char> out(span.bytes(), 0xcd);
  store.read(span, 0, out.data(), out.size()).wait();
  return out;
}

/// A folder, options for a store in it, and a ledger.
class StoreFixture : public ::testing::Test {
 protected:
  StoreFixture() {
    options.folder = folder.path();
    options.rank = 3;
    options.timeout_seconds = 20;
  }
  sherd::testing::TempFolder folder;
  device::Ledger ledger;
  StoreOptions options;
};

}  // namespace sherd::offload
