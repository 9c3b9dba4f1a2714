#include "comm/nccl/nccl_route.h"

#include <nccl.h>

#include <algorithm>
#include <optional>
#include <string_view>

#include "comm/cuda/reduce.h"
#include "comm/nccl/nccl_comm.h"
#include "comm/nccl/nccl_functions.h"
#include "comm/nccl/nccl_transfers.h"

namespace sherd::comm {
namespace {

/// Collectives over NCCL on a stream of their own; queued on the caller's thread, which waits for nothing.
///
/// Under Reduction::ordered NCCL moves bytes only. Its own reductions round 16-bit sums at every hop and
/// choose the order of ranks, so sums are made here: every rank receives what all hold of its part, which is
/// what a ring would send it too, and adds it up in rank order in fp32. So results have the bits of every
/// other backend. What that costs is memory for the parts received, bounded by `scratch_bytes`, and the
/// reductions inside the switch that NCCL knows on some machines.
class NcclRoute final : public GpuRoute {
 public:
  NcclRoute(Backend& backend, const std::shared_ptr<device::Accelerator>& on, std::unique_ptr<NcclComm> comm)
      : GpuRoute(backend, on), comm_(std::move(comm)), transfers_(backend, on) {}
  std::string_view name() const override { return "NCCL"; }
  bool immediate() const override { return true; }
  bool queues(const Call& call) const override;
  void run(Call& call) override;
  void start(Call& transfer) override { transfers_.start(transfer); }
  bool advance(Call& transfer) override { return transfers_.advance(transfer); }
  void cancel(Call& transfer) noexcept override { transfers_.cancel(transfer); }
  std::unique_ptr<GpuRoute> split(int color, int key, Backend* part) override {
    std::unique_ptr<NcclComm> comm = comm_->split(color, key, part);
    return comm ? std::make_unique<NcclRoute>(*part, gpu(), std::move(comm)) : nullptr;
  }

 private:
  static constexpr std::size_t scratch_bytes = std::size_t{64} << 20;

  /// Elements of a sum that this rank gets from all others.
  struct PartialSum {
    Tensor full;  ///< elements for rank r begin at first[r]
    std::vector<std::int64_t> first;
    Tensor out;                        ///< where `count` elements go
    std::int64_t count = 0;            ///< this rank's
    std::vector<std::int64_t> counts;  ///< by rank
  };

  int rank() { return host().rank(); }
  int size() { return host().size(); }
  cudaStream_t native() { return static_cast<cudaStream_t>(stream().native()); }
  void copy(std::byte* to, const std::byte* from, std::size_t bytes) {
    if (to != from) gpu()->copy_on(stream(), to, from, bytes);
  }

  // `number`: the call's, as announced.
  void all_gather(Call& call, std::uint64_t number);
  void reduce_scatter(Call& call, std::uint64_t number);
  void all_reduce(Call& call, std::uint64_t number);
  void native_reduce_scatter(Call& call, std::uint64_t number, const ReducePiece& piece);
  void native_all_reduce(Call& call, std::uint64_t number);
  void pack(const ReducePiece& piece, DType dtype, std::int64_t begin, std::int64_t count, std::byte* to);
  std::byte* scratch(Call& call, std::size_t bytes);
  void broadcast(Call& call, std::uint64_t number);
  void all_to_all(Call& call, std::uint64_t number);
  void compare_counts(const Call& call);
  void sum(Call& call, std::uint64_t number, const PartialSum& part, const ReduceSpec& how);
  void sum_chunk(const Call& call, std::uint64_t number, const PartialSum& part, ReduceSpec how,
                 std::int64_t begin, std::int64_t chunk, std::byte* scratch);

  std::unique_ptr<NcclComm> comm_;
  NcclTransfers transfers_;
};

/// Whether a tensor that NCCL must reach is the host's. It must reach all but the shards of gathers and
/// reductions, which copies and kernels reach.
bool reaches_host(const Call& call, const device::Accelerator& gpu) {
  const auto on_host = [&](const Tensor& x) { return x.defined() && !gpu.in_gpu_memory(x.storage().data()); };
  return on_host(call.x) || on_host(call.out) ||
         std::any_of(call.gathers.begin(), call.gathers.end(),
                     [&](const auto& p) { return on_host(p.full); }) ||
         std::any_of(call.reduces.begin(), call.reduces.end(),
                     [&](const auto& p) { return on_host(p.full); });
}

bool NcclRoute::queues(const Call& call) const {
  return call.kind != Collective::all_to_all && !reaches_host(call, *gpu());
}

void NcclRoute::run(Call& call) {
  // A call that ranks make apart from each other hangs in NCCL, or moves the wrong bytes.
  CallSignature announced = sign(call);
  const bool staged = reaches_host(call, *gpu());
  if (staged) announced.gpu = 2;
  const std::uint64_t number = host().announce(announced);
  if (staged) return GpuRoute::run(call);
  if (call.kind == Collective::all_to_all) compare_counts(call);
  gpu()->make_current();
  stream().wait(call.ready);
  switch (call.kind) {
    case Collective::all_gather:
      all_gather(call, number);
      break;
    case Collective::reduce_scatter:
      reduce_scatter(call, number);
      break;
    case Collective::all_reduce:
      all_reduce(call, number);
      break;
    case Collective::broadcast:
      broadcast(call, number);
      break;
    case Collective::all_to_all:
      all_to_all(call, number);
      break;
    default:
      sherd::fail(ErrorKind::usage, name_of(call.kind), " has no tensors of a GPU");
  }
  call.done = stream().record();
  comm_->watch(call, number);
}

void NcclRoute::all_gather(Call& call, std::uint64_t number) {
  const auto own = [&](const GatherPiece& piece) {
    return piece.full.raw() + static_cast<std::size_t>(rank()) * piece.shard.bytes();
  };
  for (const GatherPiece& piece : call.gathers) copy(own(piece), piece.shard.raw(), piece.shard.bytes());
  comm_->submit(call, number, [&](ncclComm_t comm) {
    for (const GatherPiece& piece : call.gathers)
      ncclAllGather(own(piece), piece.full.raw(), piece.shard.bytes(), ncclInt8, comm, native());
  });
}

void NcclRoute::sum_chunk(const Call& call, std::uint64_t number, const PartialSum& part, ReduceSpec how,
                          std::int64_t begin, std::int64_t chunk, std::byte* scratch) {
  const std::size_t width = size_of(how.in);
  const auto elements = [&](std::int64_t count) {
    return static_cast<std::size_t>(std::clamp<std::int64_t>(count - begin, 0, chunk));
  };
  const auto of = [&](int r) {
    return part.full.raw() +
           static_cast<std::size_t>(part.first[static_cast<std::size_t>(r)] + begin) * width;
  };
  const std::size_t mine = elements(part.count);
  std::vector<const std::byte*> sources;
  comm_->submit(call, number, [&](ncclComm_t comm) {
    for (int r = 0; r < size(); ++r) {
      std::byte* place = scratch + static_cast<std::size_t>(r) * static_cast<std::size_t>(chunk) * width;
      sources.push_back(r == rank() ? of(r) : place);
      if (r == rank()) continue;
      const std::size_t theirs = elements(part.counts[static_cast<std::size_t>(r)]);
      if (theirs) ncclSend(of(r), theirs * width, ncclInt8, r, comm, native());
      if (mine) ncclRecv(place, mine * width, ncclInt8, r, comm, native());
    }
  });
  if (mine == 0) return;
  std::byte* out = part.out.raw() + static_cast<std::size_t>(begin) * size_of(how.out);
  if (how.onto) how.onto += static_cast<std::size_t>(begin) * size_of(how.onto_type);
  reduce_on_gpu(*gpu(), stream(), how, sources, {&out, 1}, static_cast<std::int64_t>(mine));
}

void NcclRoute::sum(Call& call, std::uint64_t number, const PartialSum& part, const ReduceSpec& how) {
  const std::int64_t longest = *std::max_element(part.counts.begin(), part.counts.end());
  if (longest == 0) return;
  // Multiples of 64 elements keep every rank's place aligned.
  const auto room =
      static_cast<std::int64_t>(scratch_bytes / size_of(how.in) / static_cast<std::size_t>(size()));
  const std::int64_t chunk = std::min(std::max<std::int64_t>(room / 64, 1), (longest + 63) / 64) * 64;
  const std::size_t bytes = static_cast<std::size_t>(chunk * size()) * size_of(how.in);
  std::byte* room_for_all = scratch(call, bytes);
  for (std::int64_t begin = 0; begin < longest; begin += chunk)
    sum_chunk(call, number, part, how, begin, chunk, room_for_all);
}

/// The sums of a call follow each other on the stream, so memory that is large enough serves them all.
std::byte* NcclRoute::scratch(Call& call, std::size_t bytes) {
  if (call.staging.empty() || call.staging.back().bytes() < bytes) {
    call.staging.push_back(Tensor::empty(*gpu(), {static_cast<std::int64_t>(bytes)}, DType::u8,
                                         device::Category::communication));
    stream().wait(gpu()->compute_stream().record());  // in whose order the memory is allocated
  }
  return call.staging.back().raw();
}

/// NCCL's name for a type that it adds up itself.
std::optional<ncclDataType_t> native_type(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return ncclFloat32;
    case DType::bf16:
      return ncclBfloat16;
    case DType::f16:
      return ncclFloat16;
    case DType::f64:
      return ncclFloat64;
    default:
      return std::nullopt;
  }
}

/// Elements [begin, begin + count) of every rank's part of `full` behind each other, in `dtype`.
void NcclRoute::pack(const ReducePiece& piece, DType dtype, std::int64_t begin, std::int64_t count,
                     std::byte* to) {
  const DType in = piece.full.dtype();
  for (std::int64_t r = 0; r < size(); ++r, to += static_cast<std::size_t>(count) * size_of(dtype)) {
    const std::byte* from =
        piece.full.raw() + static_cast<std::size_t>(r * piece.shard.numel() + begin) * size_of(in);
    if (in == dtype)
      copy(to, from, static_cast<std::size_t>(count) * size_of(in));
    else
      reduce_on_gpu(*gpu(), stream(), {ReduceOp::sum, 1, in, dtype, dtype}, {&from, 1}, {&to, 1}, count);
  }
}

/// NCCL's sum in the communication type, then folded onto what was there.
void NcclRoute::native_reduce_scatter(Call& call, std::uint64_t number, const ReducePiece& piece) {
  const DType dtype = call.rounding;
  const std::size_t width = size_of(dtype);
  const bool whole = piece.begin == 0 && piece.end == piece.shard.numel();
  const bool as_it_lies = whole && piece.full.dtype() == dtype;
  const bool in_its_place = !piece.onto.defined() && piece.shard.dtype() == dtype;
  const auto room = static_cast<std::int64_t>(scratch_bytes / width / static_cast<std::size_t>(size() + 1));
  const std::int64_t most = as_it_lies ? piece.end : std::max<std::int64_t>(room / 64 * 64, 64);
  for (std::int64_t begin = piece.begin; begin < piece.end; begin += most) {
    const std::int64_t count = std::min(most, piece.end - begin);
    const std::size_t bytes = static_cast<std::size_t>(count) * width;
    const std::size_t packed = as_it_lies ? 0 : bytes * static_cast<std::size_t>(size());
    std::byte* memory =
        packed == 0 && in_its_place ? nullptr : scratch(call, packed + (in_its_place ? 0 : bytes));
    if (packed) pack(piece, dtype, begin, count, memory);
    std::byte* out = piece.shard.raw() + static_cast<std::size_t>(begin) * size_of(piece.shard.dtype());
    std::byte* sum = in_its_place ? out : memory + packed;
    comm_->submit(call, number, [&](ncclComm_t comm) {
      ncclReduceScatter(packed ? memory : piece.full.raw(), sum, static_cast<std::size_t>(count),
                        *native_type(dtype), ncclSum, comm, native());
    });
    if (in_its_place) continue;
    ReduceSpec how = fold_of(piece, dtype, begin);
    how.in = dtype;
    const std::byte* from = sum;
    reduce_on_gpu(*gpu(), stream(), how, {&from, 1}, {&out, 1}, count);
  }
}

void NcclRoute::native_all_reduce(Call& call, std::uint64_t number) {
  const DType dtype = call.x.dtype();
  if (call.x.numel() == 0) return;
  comm_->submit(call, number, [&](ncclComm_t comm) {
    ncclAllReduce(call.x.raw(), call.x.raw(), static_cast<std::size_t>(call.x.numel()), *native_type(dtype),
                  ncclSum, comm, native());
  });
  if (call.factor == 1) return;
  const std::byte* from = call.x.raw();
  std::byte* to = call.x.raw();
  reduce_on_gpu(*gpu(), stream(), {ReduceOp::sum, call.factor, dtype, dtype, dtype}, {&from, 1}, {&to, 1},
                call.x.numel());
}

void NcclRoute::reduce_scatter(Call& call, std::uint64_t number) {
  const bool native_sum = wants_native_sum(call) && native_type(call.rounding);
  for (const ReducePiece& piece : call.reduces) {
    if (native_sum) {
      native_reduce_scatter(call, number, piece);
      continue;
    }
    PartialSum part;
    part.full = piece.full;
    part.count = piece.end - piece.begin;
    part.out = piece.shard.range(piece.begin, piece.end);
    part.counts.assign(static_cast<std::size_t>(size()), part.count);
    for (std::int64_t r = 0; r < size(); ++r) part.first.push_back(r * piece.shard.numel() + piece.begin);
    sum(call, number, part, fold_of(piece, call.rounding, piece.begin));
  }
}

void NcclRoute::all_reduce(Call& call, std::uint64_t number) {
  if (wants_native_sum(call) && native_type(call.x.dtype())) return native_all_reduce(call, number);
  const std::int64_t n = call.x.numel();
  const auto first = [&](int r) { return part_begin(n, size(), r); };
  PartialSum part;
  part.full = call.x;
  part.out = call.x.range(first(rank()), first(rank() + 1));
  part.count = part.out.numel();
  for (int r = 0; r < size(); ++r) {
    part.first.push_back(first(r));
    part.counts.push_back(first(r + 1) - first(r));
  }
  sum(call, number, part, {call.op, call.factor, call.x.dtype(), call.x.dtype(), call.x.dtype()});
  comm_->submit(call, number, [&](ncclComm_t comm) {
    for (int r = 0; r < size(); ++r) {
      const Tensor theirs = call.x.range(first(r), first(r + 1));
      if (theirs.bytes())
        ncclBroadcast(theirs.raw(), theirs.raw(), theirs.bytes(), ncclInt8, r, comm, native());
    }
  });
}

void NcclRoute::broadcast(Call& call, std::uint64_t number) {
  comm_->submit(call, number, [&](ncclComm_t comm) {
    ncclBroadcast(call.x.raw(), call.x.raw(), call.x.bytes(), ncclInt8, call.peer, comm, native());
  });
}

/// Counts may differ between ranks, but not between the two ends of a block.
void NcclRoute::compare_counts(const Call& call) {
  Call counts;
  counts.kind = Collective::agree, counts.label = call.label, counts.words = call.in_counts;
  counts.words.insert(counts.words.end(), call.out_counts.begin(), call.out_counts.end());
  host().run(counts);
  const std::string wrong = count_mismatch(counts.words, size(), [&](int r) { return host().world_rank(r); });
  if (!wrong.empty()) host().fail_and_throw(cat(host().name(), ": ", describe(call), ": ", wrong));
}

void NcclRoute::all_to_all(Call& call, std::uint64_t number) {
  const std::size_t width = size_of(call.x.dtype());
  comm_->submit(call, number, [&](ncclComm_t comm) {
    const std::byte* from = call.x.raw();
    std::byte* to = call.out.raw();
    for (int r = 0; r < size(); ++r) {
      const std::size_t sent = static_cast<std::size_t>(call.in_counts[static_cast<std::size_t>(r)]) * width;
      const std::size_t taken =
          static_cast<std::size_t>(call.out_counts[static_cast<std::size_t>(r)]) * width;
      if (r == rank())
        copy(to, from, sent);
      else {
        if (sent) ncclSend(from, sent, ncclInt8, r, comm, native());
        if (taken) ncclRecv(to, taken, ncclInt8, r, comm, native());
      }
      from += sent, to += taken;
    }
  });
}

}  // namespace

std::unique_ptr<GpuRoute> make_nccl_route(Backend& host, const std::shared_ptr<device::Accelerator>& gpu) {
  return std::make_unique<NcclRoute>(host, gpu, NcclComm::create(host, gpu));
}

}  // namespace sherd::comm
