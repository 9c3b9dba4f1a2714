#include "engine/setup/same_setup.h"

#include <algorithm>
#include <span>

#include "base/random.h"
#include "comm/gather.h"

namespace sherd::engine {
namespace {

/// A rank's facts in two numbers.
struct Digest {
  std::uint64_t names = 0, values = 0;
  bool operator==(const Digest&) const = default;
};

[[noreturn]] void differs(std::size_t rank, const std::string& what) {
  fail(ErrorKind::config, "rank ", rank, " was started with another ", what,
       " than rank 0: start all ranks with the same ",
       "configuration and data (old files on one of the machines?)");
}

}  // namespace

void require_same(const Facts& facts, const Distributed& dist) {
  if (dist.world_size() == 1) return;
  std::string names, values;
  std::vector<std::uint64_t> hashes;
  for (const auto& [name, value] : facts) {
    names += name + '\n', values += value + '\n';
    hashes.push_back(stable_hash(value));
  }
  const Digest mine{stable_hash(names), stable_hash(values)};
  const std::vector<Digest> digests = comm::gather_records(dist.world(), mine, "configuration");
  if (std::count(digests.begin(), digests.end(), digests[0]) == dist.world_size()) return;
  for (std::size_t rank = 1; rank < digests.size(); ++rank)
    if (digests[rank].names != digests[0].names) differs(rank, "set of keys");
  const auto all = comm::gather_records(dist.world(), std::span<const std::uint64_t>(hashes),
                                        "values of the configuration");
  for (std::size_t i = hashes.size(); i < all.size(); ++i)
    if (const std::size_t fact = i % hashes.size(); all[i] != all[fact])
      differs(i / hashes.size(), cat(facts[fact].first, " (here ", facts[fact].second, ")"));
}

void require_same_setup(const config::Config& config, const Distributed& dist) {
  Facts facts;
  for (config::Setting& setting : config::settings(config))
    if (setting.concerns != config::Concerns::machine)
      facts.emplace_back(std::move(setting.key), std::move(setting.value));
  require_same(facts, dist);
}

void require_same_data(const TokenData& data, const Distributed& dist) {
  require_same(
      {{"vocabulary of the data", std::to_string(data.vocab_size)},
       {"fingerprint of the tokens", std::to_string(data.fingerprint)},
       {"number of training tokens", std::to_string(data.train->tokens())},
       {"number of validation tokens", std::to_string(data.validation ? data.validation->tokens() : 0)}},
      dist);
}

}  // namespace sherd::engine
