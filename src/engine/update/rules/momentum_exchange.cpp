#include "engine/update/rules/momentum_exchange.h"

#include <algorithm>
#include <span>

#include "device/trace_range.h"
#include "engine/update/rules/packed_tensors.h"
#include "engine/update/update_staging.h"

namespace sherd::engine {

using optim::signs_per_word;
using sharding::Segment;
using tensor::Tensor;

PackedMomentum::PackedMomentum(const Segment& segment, device::Device& device)
    : name_(segment.name()),
      begin_(segment.update_begin()),
      replicas_(segment.groups().replicas()),
      own_(segment.groups().replica_index()) {
  const std::int64_t all = segment.update_end() - begin_;
  part_ = ((all + replicas_ - 1) / replicas_ + signs_per_word - 1) / signs_per_word * signs_per_word;
  for (std::int64_t part = 0; part < replicas_; ++part) {
    std::int64_t place = 0;
    const std::int64_t from = std::min(all, part * part_), to = std::min(all, from + part_);
    for (const sharding::Piece& piece : segment.layout().pieces(begin_ + from, begin_ + to))
      runs_.push_back(
          {piece.flat_begin,
           piece.flat_begin + piece.count,
           part,
           place++,
           std::clamp<std::int64_t>(
               unpadded(*segment.layout().parameters()[piece.slot]) - piece.parameter_begin, 0, piece.count),
           {}});
    places_ = std::max(places_, (place + 1) / 2 * 2);  // words stay aligned
  }
  block_bytes_ = part_ / 8 + places_ * static_cast<std::int64_t>(sizeof(float));
  const device::Tier tier =
      UpdateStaging::by_processor(segment) ? device.processor_tier() : device::Tier::device;
  for (Tensor* tensor : {&packed_, &received_})
    *tensor =
        Tensor::empty(device, {replicas_ * block_bytes_}, DType::u8, device::Category::communication, tier);
}

std::byte* PackedMomentum::block(const Tensor& of, std::int64_t part) const {
  return static_cast<std::byte*>(of.raw()) + part * block_bytes_;
}

std::uint64_t* PackedMomentum::signs(const ScaledRun& run, std::int64_t element) const {
  const std::int64_t within = element - begin_ - run.part * part_;
  return reinterpret_cast<std::uint64_t*>(block(packed_, run.part)) + within / signs_per_word;
}

/// The element's bit in the word that signs() points to.
int PackedMomentum::bit(const ScaledRun& run, std::int64_t element) const {
  return static_cast<int>((element - begin_ - run.part * part_) % signs_per_word);
}

float* PackedMomentum::scales(const Tensor& of, std::int64_t part) const {
  return reinterpret_cast<float*>(block(of, part) + part_ / 8);
}

/// Calls visit(part, its runs).
template <class Visit>
void PackedMomentum::for_each_part(const Visit& visit) const {
  for (auto at = runs_.begin(); at != runs_.end();) {
    const auto end =
        std::find_if(at, runs_.end(), [&](const ScaledRun& run) { return run.part != at->part; });
    visit(at->part, std::span(at, end));
    at = end;
  }
}

void PackedMomentum::begin() {
  for (ScaledRun& run : runs_) run.squares = {};
}

void PackedMomentum::compress(std::int64_t begin, const optim::MomentumSpan& span, tensor::Kernels& kernels) {
  const auto bytes = static_cast<std::int64_t>(size_of(span.grad_dtype));
  for (ScaledRun& run : runs_) {
    const std::int64_t from = std::max(begin, run.begin), to = std::min(begin + span.n, run.end);
    if (from >= to) continue;
    optim::MomentumSpan part = span;
    part.grad = static_cast<const std::byte*>(span.grad) + (from - begin) * bytes;
    part.momentum += from - begin, part.error += from - begin;
    part.signs = signs(run, from), part.n = to - from;
    optim::compress_momentum(part, kernels, run.squares);
  }
}

/// Takes the mean of what all have sent of a run of this replica's part, in place of its own.
void PackedMomentum::serve(ScaledRun& run, const Tensor& errors, tensor::Kernels& kernels) {
  const std::int64_t n = run.end - run.begin, first = run.begin - begin_ - run.part * part_;
  const optim::SentMomentum sent{
      reinterpret_cast<const std::uint64_t*>(block(received_, 0)) + first / signs_per_word,
      scales(received_, 0) + run.place, block_bytes_, replicas_};
  float* error = errors.data<float>() + first;
  tensor::ExactSum squares;
  optim::average_momentum(sent, error, signs(run, run.begin), n, kernels, squares);
  if (run.counted < n) {  // replicas' signs of padding say nothing, and are not 0
    squares = {};
    kernels.sum_of_squares(errors.range(first, first + run.counted), squares);
  }
  run.agreed_scale = optim::one_bit_scale(squares, run.counted);
  optim::settle_error(error, run.agreed_scale, n, kernels.device());
}

namespace {
/// The segment's errors as the one that serves a part; of those on NVMe, a copy in memory.
Tensor server_errors(const sharding::StateBuffer& errors, device::Device& device) {
  if (!errors.stored()) return errors.tensor();
  Tensor here = Tensor::on_host(device, {errors.end() - errors.begin()}, DType::f32);
  if (here.numel() > 0) errors.read(errors.begin(), here).wait();
  return here;
}
}  // namespace

void PackedMomentum::exchange(Segment& segment, tensor::Kernels& kernels) {
  device::Device& device = kernels.device();
  const bool computes = device.kind() != device::Kind::meta;
  std::vector<float> here(static_cast<std::size_t>(places_));
  const auto bytes_of = [](std::span<const ScaledRun> runs) { return runs.size() * sizeof(float); };
  const auto put = [&](std::int64_t part, std::span<const ScaledRun> runs, float ScaledRun::*scale) {
    for (std::size_t i = 0; i < runs.size(); ++i) here[i] = runs[i].*scale;
    device.copy(scales(packed_, part), here.data(), bytes_of(runs));
    device.synchronize();
  };
  for (ScaledRun& run : runs_) run.sent_scale = optim::one_bit_scale(run.squares, run.counted);
  if (computes) for_each_part([&](auto part, auto runs) { put(part, runs, &ScaledRun::sent_scale); });

  comm::Communicator& replicas = *segment.groups().replica;
  const comm::CallOptions options{.label = name_ + " momentum"};
  replicas.all_to_all(packed_, received_, {}, {}, options).wait();
  sharding::StateBuffer& state = segment.moments().back();
  const Tensor errors = server_errors(state, device);
  for (ScaledRun& run : runs_)
    if (run.part == own_ && computes) serve(run, errors, kernels);
  if (state.stored() && errors.numel() > 0) state.write(state.begin(), errors).wait();
  if (computes)
    for_each_part([&](auto part, auto runs) {
      if (part == own_) put(part, runs, &ScaledRun::agreed_scale);
    });
  const Tensor own = packed_.range(own_ * block_bytes_, (own_ + 1) * block_bytes_);
  replicas.all_gather({{own, packed_}}, options).wait();
  if (!computes) return;
  std::size_t at = 0;
  for_each_part([&](auto part, auto runs) {
    device.copy(here.data(), scales(packed_, part), bytes_of(runs));
    device.synchronize();
    for (std::size_t i = 0; i < runs.size(); ++i) runs_[at++].agreed_scale = here[i];
  });
}

PackedMomentum& MomentumExchange::of(const Segment& segment, device::Device& device) {
  std::unique_ptr<PackedMomentum>& packed = packed_[&segment];
  if (!packed) packed = std::make_unique<PackedMomentum>(segment, device);
  return *packed;
}

void MomentumExchange::compress(const UpdateView& view, const optim::SpanUpdate& span, std::int64_t begin,
                                double beta1, tensor::Kernels& kernels) {
  optim::MomentumSpan packs{span.grad, span.grad_dtype, span.grad_factor, beta1};
  packs.momentum = static_cast<const float*>(span.moments[0]);
  packs.error = view.moments.back().data<float>() + (begin - view.begin);
  packs.n = span.n;
  of(*view.segment, kernels.device()).compress(begin, packs, kernels);
}

void MomentumExchange::exchange(Segment& segment, tensor::Kernels& kernels) {
  const device::TraceRange range("exchange momentum", segment.name());
  of(segment, kernels.device()).exchange(segment, kernels);
}

}  // namespace sherd::engine
