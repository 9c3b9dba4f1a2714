#include "engine/gather_lists.h"

#include <algorithm>

#include "tensor/tensor.h"

namespace sherd::engine {

using tensor::Tensor;

std::vector<std::vector<std::int64_t>> gather_lists(comm::Communicator& ranks, device::Device& device,
                                                    std::vector<std::int64_t> mine,
                                                    const std::string& label) {
  const auto size = static_cast<std::size_t>(ranks.size());
  if (size == 1 || device.kind() == device::Kind::meta)
    return std::vector<std::vector<std::int64_t>>(size, std::move(mine));
  const comm::CallOptions options{.label = label, .scalar = true};
  const auto gather = [&](const std::vector<std::int64_t>& each) {
    const Tensor own = Tensor::of<std::int64_t>(device, {std::ssize(each)}, std::span(each));
    const Tensor full = Tensor::empty(device, {own.numel() * ranks.size()}, DType::i64);
    ranks.all_gather({{own, full}}, options).wait();
    const Tensor here = tensor::to_host(device, full);
    return std::vector<std::int64_t>(here.data<std::int64_t>(), here.data<std::int64_t>() + here.numel());
  };
  const std::vector<std::int64_t> counts = gather({std::ssize(mine)});
  const std::int64_t most = *std::max_element(counts.begin(), counts.end());
  std::vector<std::vector<std::int64_t>> out(size);
  if (most == 0) return out;
  mine.resize(static_cast<std::size_t>(most));
  const std::vector<std::int64_t> all = gather(mine);
  for (std::size_t rank = 0; rank < size; ++rank) {
    const auto begin = all.begin() + static_cast<std::ptrdiff_t>(rank) * most;
    out[rank].assign(begin, begin + counts[rank]);
  }
  return out;
}

}  // namespace sherd::engine
