#include "comm/exchange/exchange.h"

#include <algorithm>

#include "base/error.h"

namespace sherd::comm {
namespace {

/// The bytes of one request of the library: large enough for its algorithms, and counts fit an int.
constexpr std::size_t most_bytes = std::size_t{16} << 20;

void native_reduce_scatter(Messages& messages, Worker& worker, const Call& call, const ReducePiece& piece) {
  Port& port = messages.port();
  const DType dtype = call.rounding;
  const std::size_t width = size_of(dtype);
  const auto ranks = static_cast<std::size_t>(port.size());
  const auto most = std::max<std::int64_t>(static_cast<std::int64_t>(most_bytes / width / ranks), 1);
  const auto room = static_cast<std::size_t>(std::min(most, piece.end - piece.begin)) * width;
  const Messages::Landing landing(&messages, room * (ranks + 1));
  for (std::int64_t begin = piece.begin; begin < piece.end; begin += most) {
    const std::int64_t count = std::min(most, piece.end - begin);
    const std::size_t bytes = static_cast<std::size_t>(count) * width;
    std::byte* const sum = landing.data() + room * ranks;
    for (std::size_t r = 0; r < ranks; ++r) {
      const std::int64_t at = static_cast<std::int64_t>(r) * piece.shard.numel() + begin;
      worker.copy(landing.data() + r * bytes, piece.full.raw() + static_cast<std::size_t>(at) * width, bytes);
    }
    messages.complete(call, port.reduce_scatter(landing.data(), sum, static_cast<std::size_t>(count), dtype));
    const std::byte* from = sum;
    std::byte* out = piece.shard.raw() + static_cast<std::size_t>(begin) * size_of(piece.shard.dtype());
    worker.reduce(fold_of(piece, dtype, begin), {&from, 1}, {&out, 1}, count);
  }
}

void native_all_reduce(Messages& messages, Worker& worker, const Call& call) {
  Port& port = messages.port();
  const DType dtype = call.x.dtype();
  const std::size_t width = size_of(dtype);
  const auto most = static_cast<std::int64_t>(most_bytes / width);
  const auto room = static_cast<std::size_t>(std::min(most, call.x.numel())) * width;
  const Messages::Landing landing(&messages, 2 * room);
  for (std::int64_t begin = 0; begin < call.x.numel(); begin += most) {
    const std::int64_t count = std::min(most, call.x.numel() - begin);
    std::byte* const part = call.x.raw() + static_cast<std::size_t>(begin) * width;
    std::byte* const sum = landing.data() + room;
    worker.copy(landing.data(), part, static_cast<std::size_t>(count) * width);
    messages.complete(call, port.all_reduce(landing.data(), sum, static_cast<std::size_t>(count), dtype));
    const std::byte* from = sum;
    worker.reduce({ReduceOp::sum, call.factor, dtype, dtype, dtype}, {&from, 1}, {&part, 1}, count);
  }
}

}  // namespace

/// Whether the port's library makes the sums of this call (Reduction::native): the same on all ranks.
bool HostExchange::sums_natively(const Call& call) {
  if (!messages_ || !wants_native_sum(call)) return false;
  const Port& port = messages_->port();
  if (call.kind == Collective::all_reduce) return port.sums(call.x.dtype());
  return call.kind == Collective::reduce_scatter && port.sums(call.rounding) &&
         std::all_of(call.reduces.begin(), call.reduces.end(),
                     [&](const ReducePiece& piece) { return piece.full.dtype() == call.rounding; });
}

/// In the library's own order, whichever machines ranks are on.
void HostExchange::sum_natively(const Call& call) {
  open(call, {});
  if (call.kind == Collective::all_reduce) return native_all_reduce(*messages_, machine_.worker(), call);
  for (const ReducePiece& piece : call.reduces)
    native_reduce_scatter(*messages_, machine_.worker(), call, piece);
}

}  // namespace sherd::comm
