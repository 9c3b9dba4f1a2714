#include "engine/momentum_exchange.h"

#include <algorithm>

namespace sherd::engine {

using sharding::Segment;
using tensor::Tensor;

namespace {
constexpr std::int64_t word = 64;
}  // namespace

PackedMomentum::PackedMomentum(const Segment& segment, device::Device& device)
    : name_(segment.name()),
      begin_(segment.update_begin()),
      replicas_(segment.groups().replicas()),
      own_(segment.groups().replica_index()) {
  const std::int64_t all = segment.update_end() - begin_;
  part_ = ((all + replicas_ - 1) / replicas_ + word - 1) / word * word;
  std::int64_t most = 0;
  for (std::int64_t part = 0; part < replicas_; ++part) {
    std::int64_t place = 0;
    const std::int64_t from = std::min(all, part * part_), to = std::min(all, from + part_);
    for (const sharding::Piece& piece : segment.layout().pieces(begin_ + from, begin_ + to))
      runs_.push_back({piece.flat_begin, piece.flat_begin + piece.count, part, place++, {}});
    most = std::max(most, place);
  }
  block_bytes_ = part_ / 8 + (most + 1) / 2 * 2 * static_cast<std::int64_t>(sizeof(float));
  for (Tensor* tensor : {&packed_, &received_})
    *tensor = Tensor::empty(device, {replicas_ * block_bytes_}, DType::u8, device::Category::communication,
                            device.processor_tier());
}

std::byte* PackedMomentum::block(const Tensor& of, std::int64_t part) const {
  return static_cast<std::byte*>(of.raw()) + part * block_bytes_;
}

std::uint64_t* PackedMomentum::signs(const Run& run, std::int64_t element) const {
  const std::int64_t within = element - begin_ - run.part * part_;
  return reinterpret_cast<std::uint64_t*>(block(packed_, run.part)) + within / word;
}

float* PackedMomentum::scale(const Run& run) const {
  return reinterpret_cast<float*>(block(packed_, run.part) + part_ / 8) + run.place;
}

void PackedMomentum::begin() {
  for (Run& run : runs_) run.squares = {};
}

void PackedMomentum::compress(std::int64_t begin, const optim::MomentumSpan& span, Arena& arena) {
  const auto bytes = static_cast<std::int64_t>(size_of(span.grad_dtype));
  for (Run& run : runs_) {
    const std::int64_t from = std::max(begin, run.begin), to = std::min(begin + span.n, run.end);
    if (from >= to) continue;
    optim::MomentumSpan part = span;
    part.grad = static_cast<const std::byte*>(span.grad) + (from - begin) * bytes;
    part.momentum += from - begin, part.error += from - begin;
    part.signs = signs(run, from), part.n = to - from;
    optim::compress_momentum(part, arena, run.squares);
  }
}

/// Of a run of this replica's part: the mean of what all have sent, in place of its own.
void PackedMomentum::serve(Run& run, const Tensor& errors, Arena& arena) {
  const std::int64_t n = run.end - run.begin, first = run.begin - begin_ - run.part * part_;
  std::vector<const std::uint64_t*> from;
  std::vector<float> scales;
  for (int replica = 0; replica < replicas_; ++replica) {
    const std::byte* sent = block(received_, replica);
    from.push_back(reinterpret_cast<const std::uint64_t*>(sent) + first / word);
    scales.push_back(reinterpret_cast<const float*>(sent + part_ / 8)[run.place]);
  }
  float* error = errors.data<float>() + first;
  tensor::ExactSum squares;
  optim::average_momentum(from, scales, error, signs(run, run.begin), n, arena, squares);
  *scale(run) = optim::one_bit_scale(squares, n);
  optim::settle_error(error, *scale(run), n, arena);
}

namespace {
/// The segment's errors as the one that serves a part; of those on NVMe, a copy in memory.
Tensor server_errors(const sharding::StateBuffer& errors, device::Device& device) {
  if (!errors.stored()) return errors.tensor();
  Tensor here = Tensor::empty(device, {errors.end() - errors.begin()}, DType::f32,
                              device::Category::workspace, device.processor_tier());
  if (here.numel() > 0) errors.read(errors.begin(), here).wait();
  return here;
}
}  // namespace

void PackedMomentum::exchange(Segment& segment, device::Device& device) {
  const bool computes = device.kind() != device::Kind::meta;
  for (Run& run : runs_) {
    run.sent_scale = optim::one_bit_scale(run.squares, run.end - run.begin);
    if (computes) *scale(run) = run.sent_scale;
  }
  comm::Communicator& replicas = *segment.groups().replica;
  const comm::CallOptions options{.label = name_ + " momentum"};
  replicas.all_to_all(packed_, received_, {}, {}, options).wait();
  sharding::StateBuffer& state = segment.moments().back();
  const Tensor errors = server_errors(state, device);
  for (Run& run : runs_)
    if (run.part == own_ && computes) serve(run, errors, device.arena());
  if (state.stored() && errors.numel() > 0) state.write(state.begin(), errors).wait();
  const Tensor own = packed_.range(own_ * block_bytes_, (own_ + 1) * block_bytes_);
  replicas.all_gather({{own, packed_}}, options).wait();
}

PackedMomentum& MomentumExchange::of(const Segment& segment, device::Device& device) {
  std::unique_ptr<PackedMomentum>& packed = packed_[&segment];
  if (!packed) packed = std::make_unique<PackedMomentum>(segment, device);
  return *packed;
}

}  // namespace sherd::engine
