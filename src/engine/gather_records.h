#pragma once

#include <cstddef>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "engine/distributed.h"

namespace sherd::engine {

/// What gather_records() does, with the bytes of the records.
std::vector<std::byte> gather_bytes(const Distributed& dist, std::span<const std::byte> mine,
                                    const std::string& label);

/// Every rank's `mine`, equally many on each, in rank order. Collective; of the host's memory, before the
/// world is bound to a device and after. `label` says in errors what for. Counted as scalars.
template <class Record>
requires std::is_trivially_copyable_v<Record> std::vector<Record> gather_records(const Distributed& dist,
                                                                                 std::span<const Record> mine,
                                                                                 const std::string& label) {
  const std::vector<std::byte> bytes = gather_bytes(dist, std::as_bytes(mine), label);
  std::vector<Record> all(bytes.size() / sizeof(Record));
  if (!bytes.empty()) std::memcpy(all.data(), bytes.data(), bytes.size());
  return all;
}
/// The same of one record from each.
template <class Record>
requires std::is_trivially_copyable_v<Record> std::vector<Record> gather_records(const Distributed& dist,
                                                                                 const Record& mine,
                                                                                 const std::string& label) {
  return gather_records(dist, std::span<const Record>(&mine, 1), label);
}

}  // namespace sherd::engine
