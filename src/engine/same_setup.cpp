#include "engine/same_setup.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string_view>

#include "base/random.h"
#include "tensor/tensor.h"

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

/// Every rank's `mine`, of equal length, one after the other.
std::vector<std::int64_t> gather(const Distributed& dist, std::span<const std::int64_t> mine) {
  const auto host = device::make_cpu_device(1);
  const auto count = static_cast<std::int64_t>(mine.size());
  const tensor::Tensor shard = tensor::Tensor::of<std::int64_t>(*host, {count}, mine);
  const tensor::Tensor full = tensor::Tensor::empty(*host, {count * dist.world_size()}, DType::i64);
  dist.world().all_gather({{shard, full}}, {.label = "configuration", .scalar = true}).wait();
  std::vector<std::int64_t> all(static_cast<std::size_t>(full.numel()));
  std::memcpy(all.data(), full.raw(), full.bytes());
  return all;
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
  const std::vector<std::int64_t> shapes = gather(dist, std::span(&shape, 1));
  for (std::size_t rank = 1; rank < shapes.size(); ++rank)
    if (shapes[rank] != shapes[0]) differs(rank, "set of keys");
  const std::vector<std::int64_t> all = gather(dist, hashes);
  for (std::size_t i = hashes.size(); i < all.size(); ++i)
    if (const std::size_t key = i % hashes.size(); all[i] != all[key])
      differs(i / hashes.size(), cat(facts[key].first, " (here ", facts[key].second, ")"));
}

}  // namespace sherd::engine
