#include "engine/gather_records.h"

#include "device/device.h"
#include "tensor/tensor.h"

namespace sherd::engine {

std::vector<std::byte> gather_bytes(const Distributed& dist, std::span<const std::byte> mine,
                                    const std::string& label) {
  if (dist.world_size() == 1) return {mine.begin(), mine.end()};
  const auto host = device::make_cpu_device(1);
  const auto bytes = static_cast<std::int64_t>(mine.size());
  const auto* begin = reinterpret_cast<const std::uint8_t*>(mine.data());
  const tensor::Tensor shard =
      tensor::Tensor::of<std::uint8_t>(*host, {bytes}, std::span(begin, mine.size()));
  const tensor::Tensor full = tensor::Tensor::empty(*host, {bytes * dist.world_size()}, DType::u8);
  dist.world().all_gather({{shard, full}}, {.label = label, .scalar = true}).wait();
  std::vector<std::byte> all(full.bytes());
  if (!all.empty()) std::memcpy(all.data(), full.raw(), all.size());
  return all;
}

}  // namespace sherd::engine
