#include "engine/same_setup.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "base/random.h"
#include "engine/gather_records.h"

namespace sherd::engine {
namespace {

using Facts = std::vector<std::pair<std::string, std::string>>;

/// May differ from machine to machine without a trace in what is computed.
bool is_of_a_machine(std::string_view key) {
  constexpr std::array of_machines{"data.path", "training.save_dir", "log_level", "device.type", "device.threads_per_rank",
                                   "device.bind_cores", "device.device_memory_limit", "device.host_memory_limit",
                                   "device.peak_tflops", "parallel.timeout_seconds"};
  return key.ends_with(".nvme_path") || key.starts_with("aio.") ||
         std::find(of_machines.begin(), of_machines.end(), key) != of_machines.end();
}

Facts facts_of(const config::Config& config, const TokenData* data) {
  Facts facts = config::flat_dump(config);
  std::erase_if(facts, [](const auto& fact) { return is_of_a_machine(fact.first); });
  if (!data) return facts;
  facts.emplace_back("the vocabulary of the data", std::to_string(data->vocab_size));
  facts.emplace_back("the number of training tokens", std::to_string(data->train->tokens()));
  facts.emplace_back("the number of validation tokens", std::to_string(data->validation ? data->validation->tokens() : 0));
  return facts;
}

[[noreturn]] void differs(std::size_t rank, const std::string& what) {
  fail(ErrorKind::config, "rank ", rank, " was started with another ", what, " than rank 0: start all ranks with the same configuration "
       "and data (old files on one of the machines?)");
}

}  // namespace

void require_same_setup(const config::Config& config, const TokenData* data, const Distributed& dist) {
  const Facts facts = facts_of(config, data);
  std::string keys;
  std::vector<std::int64_t> hashes;
  for (const auto& [key, value] : facts) {
    keys += key + '\n';
    hashes.push_back(static_cast<std::int64_t>(stable_hash(value)));
  }
  const auto shape = static_cast<std::int64_t>(stable_hash(keys));
  const std::vector<std::int64_t> shapes = gather_records(dist, shape, "set of keys");
  for (std::size_t rank = 1; rank < shapes.size(); ++rank)
    if (shapes[rank] != shapes[0]) differs(rank, "set of keys");
  const std::vector<std::int64_t> all = gather_records(dist, std::span<const std::int64_t>(hashes), "configuration");
  for (std::size_t i = hashes.size(); i < all.size(); ++i)
    if (const std::size_t key = i % hashes.size(); all[i] != all[key])
      differs(i / hashes.size(), cat(facts[key].first, " (here ", facts[key].second, ")"));
}

}  // namespace sherd::engine
