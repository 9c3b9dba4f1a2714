#include "comm/gather.h"

#include <algorithm>
#include <array>
#include <new>

#include "device/device.h"
#include "tensor/tensor.h"

namespace sherd::comm {

using tensor::Tensor;

std::vector<std::vector<std::int64_t>> gather_lists(Communicator& ranks, device::Device& device,
                                                    std::vector<std::int64_t> mine,
                                                    const std::string& label) {
  const auto size = static_cast<std::size_t>(ranks.size());
  if (size == 1 || device.kind() == device::Kind::meta)
    return std::vector<std::vector<std::int64_t>>(size, std::move(mine));
  const CallOptions options{.label = label, .scalar = true};
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

std::vector<std::byte> gather_bytes(Communicator& ranks, std::span<const std::byte> mine,
                                    const std::string& label) {
  if (ranks.size() == 1) return {mine.begin(), mine.end()};
  const auto host = device::make_cpu_device(1);
  const auto bytes = static_cast<std::int64_t>(mine.size());
  const auto* begin = reinterpret_cast<const std::uint8_t*>(mine.data());
  const Tensor shard = Tensor::of<std::uint8_t>(*host, {bytes}, std::span(begin, mine.size()));
  const Tensor full = Tensor::empty(*host, {bytes * ranks.size()}, DType::u8);
  ranks.all_gather({{shard, full}}, {.label = label, .scalar = true}).wait();
  std::vector<std::byte> all(full.bytes());
  if (!all.empty()) std::memcpy(all.data(), full.raw(), all.size());
  return all;
}

std::string broadcast_text(Communicator& ranks, std::string mine, int root, const std::string& label) {
  if (ranks.size() == 1) return mine;
  const auto host = device::make_cpu_device(1);
  const CallOptions options{.label = label, .scalar = true};
  const Tensor bytes = Tensor::of<std::int64_t>(*host, {1}, std::array{std::ssize(mine)});
  ranks.broadcast(bytes, root, options).wait();
  mine.resize(static_cast<std::size_t>(*bytes.data<std::int64_t>()));
  if (mine.empty()) return mine;
  const auto* begin = reinterpret_cast<const std::uint8_t*>(mine.data());
  const Tensor text = Tensor::of<std::uint8_t>(*host, {std::ssize(mine)}, std::span(begin, mine.size()));
  ranks.broadcast(text, root, options).wait();
  std::memcpy(mine.data(), text.raw(), mine.size());
  return mine;
}

PartOutcome PartOutcome::of(const std::exception_ptr& error) noexcept {
  PartOutcome out;
  out.failed = true;
  const auto say = [&](const char* what) {
    std::memcpy(out.message, what, std::min(std::strlen(what), sizeof out.message - 1));
  };
  try {
    std::rethrow_exception(error);
  } catch (const Error& known) {
    out.kind = known.kind();
    say(known.what());
  } catch (const std::bad_alloc& memory) {
    out.kind = ErrorKind::memory;
    say(memory.what());
  } catch (const std::exception& other) {
    say(other.what());
  } catch (...) {
    say("an exception of unknown type");
  }
  return out;
}

void PartOutcome::rethrow(std::size_t rank) const {
  fail(kind, "rank ", rank, " failed: ", message);
}

}  // namespace sherd::comm
