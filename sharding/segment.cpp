#include "sharding/segment.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "optim/split_master.h"
#include "tensor/formats/pruned.h"

namespace sherd::sharding {

using device::Category;
using device::Tier;

namespace {
/// Elements that pass through memory at once where states are filled or read as a whole: few enough that no
/// tier notices.
constexpr std::int64_t chunk_elements = std::int64_t{1} << 20;

/// Memory of the processor for a while.
Tensor room(device::Device& device, std::int64_t elements, DType dtype) {
  return Tensor::on_host(device, {elements}, dtype);
}

void fill_stored(StateBuffer& state, double value, tensor::Kernels& kernels) {
  device::Device& device = kernels.device();
  const std::int64_t most = std::min(chunk_elements, state.end() - state.begin());
  const Tensor filled = Tensor::empty(device, {most}, state.dtype(), Category::workspace);
  kernels.fill(filled, value);
  const Tensor chunk = tensor::to_host(device, filled);
  for (std::int64_t at = state.begin(); at < state.end(); at += most) {
    state.write(at, chunk.range(0, std::min(most, state.end() - at))).wait();
    if (device.kind() == device::Kind::meta) break;  // which books what all chunks would
  }
}
}  // namespace

Segment::Segment(std::string name, SegmentKey key, std::vector<ParameterPtr> parameters,
                 const PlacementTable& table, const StateFormat& format, std::uint64_t seed,
                 const StateSources& sources)
    : name_(std::move(name)),
      key_(key),
      layout_(std::move(parameters), key.groups.shards(), format.block),
      kernels_(sources.kernels),
      // Over one rank, sharded and replicated are the same thing, unless the device is not where they stay.
      parameters_sharded_(table.parameters.spread == Spread::sharded && !key.persistent &&
                          (key.groups.shards() > 1 || table.parameters.tier != Tier::device)),
      folds_gradients_(table.reduce_every_micro_batch()),
      gradients_staged_(folds_gradients_ &&
                        (key.groups.shards() > 1 || table.gradients.tier != Tier::device)),
      optimizer_sharded_(table.masters.spread == Spread::sharded && key.groups.shards() > 1),
      gather_after_update_(key.trainable && optimizer_sharded_ && !parameters_sharded_),
      master_form_(table.master_form),
      compute_dtype_(table.parameters.dtype),
      own_begin_(key.groups.shard->rank() * layout_.shard()) {
  Placement compute = table.parameters;
  if (!parameters_sharded_) compute.tier = Tier::device;
  if (key_.in_blocks()) compute.dtype = DType::u8;
  parameters_ = make(sources, Category::parameters, compute, held(parameters_sharded_), true, "parameters");
  if (key_.trainable) {
    gradients_ = make(sources, Category::gradients, table.gradients,
                      held(folds_gradients_ && key.groups.shards() > 1), true, "gradients");
    kernels_.fill(gradients_.tensor(), 0);
    if (master_form_ != MasterForm::in_parameters)
      masters_ =
          make(sources, Category::optimizer, table.masters, held(optimizer_sharded_), false, "masters");
    for (const optim::State& state : format.states)
      if (state.over_replicas == optim::OverReplicas::same || (key.groups.replica && !key.groups.over_stages))
        states_.push_back(state);
    make_moments(sources, table.moments);
  }
  draw_initial_values(seed);
}

void Segment::make_moments(const StateSources& sources, const Placement& placement) {
  for (const optim::State& state : states_) {
    const bool coded = state.code != optim::Code::none;
    const Range range =
        state.over_replicas == optim::OverReplicas::spread ? served() : held(optimizer_sharded_);
    Placement where = placement;
    if (coded) where.dtype = DType::u8;
    StateBuffer& made =
        moments_.emplace_back(make(sources, Category::optimizer, where, range, false, state.name.c_str()));
    scales_.emplace_back();
    if (range.begin == range.end) continue;
    if (coded) {
      const std::int64_t blocks = (range.end - range.begin) / optim::quantized_block;
      scales_.back() = Tensor::empty(kernels_.device(), {blocks}, DType::f32, Category::optimizer,
                                     where.tier == Tier::nvme ? Tier::host : where.tier);
      kernels_.fill(scales_.back(), 0);
    }
    const double initial = coded ? optim::zero_code(state.code) : state.initial;
    if (!made.stored())
      kernels_.fill(made.tensor(), initial);
    else if (initial != 0)  // a new span is all zeros
      fill_stored(made, initial, kernels_);
  }
}

StateBuffer Segment::make(const StateSources& sources, Category category, const Placement& placement,
                          Range range, bool shared, const char* kind) {
  device::Device& device = kernels_.device();
  const bool blocks = key_.in_blocks() && category == Category::parameters;
  const std::int64_t begin = blocks ? stored(range.begin) : range.begin,
                     numel = (blocks ? stored(range.end) : range.end) - begin;
  std::int64_t payload = 0;
  for (const Piece& piece : layout_.pieces(range.begin, range.end))
    payload += blocks ? stored(piece.count) : piece.count;
  const std::uint64_t padding = static_cast<std::uint64_t>(numel - payload) * size_of(placement.dtype);
  if (placement.tier == Tier::nvme) {
    offload::Store* store =
        category == Category::parameters ? sources.parameter_store : sources.optimizer_store;
    require(store != nullptr, "states placed on NVMe need a store");
    return StateBuffer(device, *store, name_ + " " + kind, begin, numel, placement.dtype, category, padding);
  }
  const std::size_t bytes = static_cast<std::size_t>(numel) * size_of(placement.dtype);
  device::Storage storage = shared ? key_.groups.shard->allocate(device, bytes, category, placement.tier)
                                   : device.allocate(bytes, category, placement.tier);
  return StateBuffer(device, Tensor::view_of(std::move(storage), 0, {numel}, placement.dtype), begin,
                     placement.tier, category, padding);
}

Tensor Segment::scales(std::size_t state, std::int64_t begin, std::int64_t end) const {
  constexpr std::int64_t block = optim::quantized_block;
  const Tensor& all = scales_[state];
  if (!all.defined()) return {};
  return all.range((begin - update_begin()) / block, (end - update_begin() + block - 1) / block);
}

void Segment::read_state(std::size_t state, std::int64_t begin, const Tensor& to) const {
  const optim::Code code = states_[state].code;
  if (code == optim::Code::none) return moments_[state].read(begin, to).wait();
  device::Device& device = kernels_.device();
  const std::int64_t count = to.numel(), skipped = (begin - update_begin()) % optim::quantized_block,
                     blocks = (skipped + count + optim::quantized_block - 1) / optim::quantized_block;
  if (device.kind() == device::Kind::meta) return;
  const Tensor codes = room(device, count, DType::u8), scales = room(device, blocks, DType::f32);
  moments_[state].read(begin, codes).wait();
  device.copy(scales.raw(), this->scales(state, begin, begin + count).raw(), scales.bytes());
  device.synchronize();
  optim::dequantize(code, {codes.data<std::uint8_t>(), static_cast<std::size_t>(count)}, skipped,
                    scales.data<float>(), to.data<float>(), device.arena());
}

void Segment::write_state(std::size_t state, std::int64_t begin, const Tensor& from) {
  const optim::Code code = states_[state].code;
  if (code == optim::Code::none) return moments_[state].write(begin, from).wait();
  device::Device& device = kernels_.device();
  if (device.kind() == device::Kind::meta) return;
  require((begin - update_begin()) % optim::quantized_block == 0, "state ", states_[state].name, " of '",
          name_, "' is written from within a block");
  const std::int64_t count = from.numel();
  const Tensor to = scales(state, begin, begin + count), codes = room(device, count, DType::u8),
               scales = room(device, to.numel(), DType::f32);
  optim::quantize(code, {from.data<float>(), static_cast<std::size_t>(count)}, codes.data<std::uint8_t>(),
                  scales.data<float>(), device.arena());
  moments_[state].write(begin, codes).wait();
  device.copy(to.raw(), scales.raw(), scales.bytes());
  device.synchronize();
}

bool Segment::can_exchange_momentum() const {
  return std::any_of(states_.begin(), states_.end(), [](const optim::State& state) {
    return state.over_replicas != optim::OverReplicas::same;
  });
}

Segment::Range Segment::served() const {
  const std::int64_t all = update_end() - update_begin(), replicas = groups().replicas();
  const std::int64_t each =
      ((all + replicas - 1) / replicas + layout_alignment - 1) / layout_alignment * layout_alignment;
  const std::int64_t begin = std::min(all, each * groups().replica_index());
  return {update_begin() + begin, update_begin() + std::min(all, begin + each)};
}

RankGroups Segment::gradient_groups() const {
  RankGroups groups = key_.groups;
  if (own_gradients_only_) groups.replica = nullptr;
  return groups;
}

void draw_initial(const autograd::Parameter& parameter, const Tensor& values, std::int64_t first,
                  std::uint64_t seed, tensor::Kernels& kernels) {
  const autograd::Init& init = parameter.init;
  using Kind = autograd::Init::Kind;
  if (init.kind == Kind::constant) return kernels.fill(values, init.a);
  const tensor::Slice slice = parameter.logical_slice();
  require(slice.shape() == parameter.shape, "parameter '", parameter.name, "' has the shape ",
          parameter.shape.str(), ", and its slice is ", slice.str());
  const RandomKey key{seed, stable_hash(parameter.name)};
  slice.for_each_run(first, first + values.numel(),
                     [&](std::int64_t local, std::int64_t logical, std::int64_t count) {
                       const Tensor run = values.range(local - first, local - first + count);
                       if (init.kind == Kind::normal)
                         kernels.fill_normal(run, key, logical, init.a, init.b);
                       else
                         kernels.fill_uniform(run, key, logical, init.a, init.b);
                     });
}

void Segment::draw_initial_values(std::uint64_t seed) {
  // Values are drawn in fp32 and rounded as masters are, chunk by chunk, so that no rank needs more memory
  // than what it will keep.
  const auto [begin, end] = held(parameters_sharded_);
  const std::int64_t most = std::min(chunk_elements, end - begin);
  const Tensor chunk = Tensor::empty(kernels_.device(), {most}, DType::f32, Category::workspace);
  // A meta device books memory and holds no values: the first chunk, and the first two of the update range,
  // of which one lies in it whole, book what all would.
  const bool books_only = kernels_.device().kind() == device::Kind::meta;
  const std::int64_t updated =
      begin + (std::clamp(update_begin(), begin, end) - begin) / std::max<std::int64_t>(most, 1) * most;
  for (std::int64_t at = begin; at < end; at += most) {
    if (books_only && at != begin && at != updated && at != updated + most) continue;
    const Tensor values = chunk.range(0, std::min(most, end - at));
    if (!books_only) {
      kernels_.fill(values, 0);
      for (const Piece& piece : layout_.pieces(at, at + values.numel()))
        draw_initial(*layout_.parameters()[piece.slot],
                     values.range(piece.flat_begin - at, piece.flat_begin - at + piece.count),
                     piece.parameter_begin, seed, kernels_);
    }
    if (has_pruned() && !books_only) {
      const Tensor here = tensor::to_host(kernels_.device(), values);
      prune(at, here);
      write_values(at, here);
    } else {
      write_values(at, values);
    }
  }
}

bool Segment::has_pruned() const {
  const auto& all = layout_.parameters();
  return std::any_of(all.begin(), all.end(), [](const ParameterPtr& p) { return p->pruned; });
}

/// Prunes weights in fp32 from flat element `begin` on, in memory of the processor. Shards, and chunks of
/// them, begin at multiples of layout_alignment, and so between fours.
void Segment::prune(std::int64_t begin, const Tensor& values) const {
  for (const Piece& piece : layout_.pieces(begin, begin + values.numel()))
    if (layout_.parameters()[piece.slot]->pruned)
      tensor::prune_two_of_four(
          {values.data<float>() + (piece.flat_begin - begin), static_cast<std::size_t>(piece.count)});
}

/// Weights that were rounded to 16 bits.
void Segment::keep_unpruned(std::int64_t begin, const Tensor& values, const Tensor& rounded) const {
  for (const Piece& piece : layout_.pieces(begin, begin + values.numel())) {
    if (!layout_.parameters()[piece.slot]->pruned) continue;
    const auto at = piece.flat_begin - begin;
    const auto count = static_cast<std::size_t>(piece.count);
    tensor::keep_unpruned({values.data<float>() + at, count},
                          {reinterpret_cast<std::uint16_t*>(rounded.raw()) + at, count});
  }
}

void Segment::write_values(std::int64_t begin, const Tensor& from) {
  // Rounded and split by the processor on every device: rare, and always the same bits.
  device::Device& device = kernels_.device();
  const Tensor values = tensor::to_host(device, from);
  if (key_.in_blocks()) return write_in_blocks(begin, values);
  Tensor rounded = values;
  if (parameters_.dtype() != DType::f32) {
    rounded = room(device, from.numel(), parameters_.dtype());
    if (device.kind() != device::Kind::meta)
      optim::round_masters(values.data<float>(), rounded.raw(), rounded.dtype(), values.numel(),
                           device.arena());
    if (has_pruned() && device.kind() != device::Kind::meta) keep_unpruned(begin, values, rounded);
  }
  offload::Io parameters_written = parameters_.write(begin, rounded);
  const std::int64_t first = std::max(begin, update_begin());
  const std::int64_t last = std::min(begin + from.numel(), update_end());
  if (masters_ && first < last) {
    Tensor kept = values.range(first - begin, last - begin);
    if (master_form_ == MasterForm::split) {
      const Tensor high = room(device, last - first, DType::bf16),
                   low = room(device, last - first, DType::u16);
      if (device.kind() != device::Kind::meta)
        optim::split_master(kept.data<float>(), high.raw(), low.data<std::uint16_t>(), kept.numel(),
                            device.arena());
      kept = low;
    }
    masters_.write(first, kept).wait();
  }
  parameters_written.wait();
}

void Segment::write_in_blocks(std::int64_t begin, const Tensor& values) {
  require(begin % layout_.block() == 0, "parameters of '", name_, "' are written from within a block");
  device::Device& device = kernels_.device();
  const std::int64_t count = values.numel();
  const Tensor blocks = room(device, stored(count), DType::u8);
  if (device.kind() != device::Kind::meta &&
      !tensor::quantize(key_.format, {values.data<float>(), static_cast<std::size_t>(count)}, blocks.raw(),
                        device.arena()))
    for (const Piece& piece : layout_.pieces(begin, begin + count)) {
      const float* first = values.data<float>() + (piece.flat_begin - begin);
      if (std::any_of(first, first + piece.count, [](float x) { return !std::isfinite(x); }))
        fail(ErrorKind::data, "weight '", layout_.parameters()[piece.slot]->name,
             "' holds values that are infinite or no numbers, which ", tensor::name_of(key_.format),
             " cannot: give weights without them, or set training.adapter.base_format to \"compute\"");
    }
  write_blocks(begin, blocks);
}

void Segment::read_masters(std::int64_t begin, const Tensor& to) const {
  if (master_form_ != MasterForm::split) return (masters_ ? masters_ : parameters_).read(begin, to).wait();
  device::Device& device = kernels_.device();
  const Tensor low = room(device, to.numel(), DType::u16), high = room(device, to.numel(), DType::bf16);
  offload::Io low_read = masters_.read(begin, low), high_read = parameters_.read(begin, high);
  low_read.wait();
  high_read.wait();
  optim::join_master(high.raw(), low.data<std::uint16_t>(), to.data<float>(), to.numel(), device.arena());
}

Frozen Segment::freeze_masters(std::int64_t begin, std::int64_t count, FrozenMemory& memory) const {
  device::Device& device = kernels_.device();
  if (master_form_ != MasterForm::split)
    return Frozen::of(device, masters_ ? masters_ : parameters_, begin, count, memory);
  if (!device.has_own_memory() && !masters_.stored() && !parameters_.stored()) {
    const Tensor to = memory.take(count, DType::f32);  // as many bytes as the two halves
    if (memory.counts() || device.kind() == device::Kind::meta) return {to, nullptr};
    optim::join_master(parameters_.range(begin, begin + count).raw(),
                       masters_.range(begin, begin + count).data<std::uint16_t>(), to.data<float>(), count,
                       device.arena());
    return {to, nullptr};
  }
  memory.note_reading(count);
  return {{},
          [low = Frozen::of(device, masters_, begin, count, memory),
           high = Frozen::of(device, parameters_, begin, count, memory),
           count](const Tensor& to, FrozenReading& with) {
            const Tensor lower = low.in(with.in_low(count, DType::u16), with);
            const Tensor upper = high.in(with.in_high(count, DType::bf16), with);
            optim::join_master(upper.raw(), lower.data<std::uint16_t>(), to.data<float>(), count, with.arena);
          }};
}

Frozen Segment::freeze_state(std::size_t state, std::int64_t begin, std::int64_t count,
                             FrozenMemory& memory) const {
  const optim::Code code = states_[state].code;
  device::Device& device = kernels_.device();
  Frozen codes = Frozen::of(device, moments_[state], begin, count, memory);
  if (code == optim::Code::none) return codes;
  memory.note_reading(count);
  return {
      {},
      [codes = std::move(codes),
       scales = Frozen::of(device, this->scales(state, begin, begin + count), memory), code, count,
       skipped = (begin - update_begin()) % optim::quantized_block](const Tensor& to, FrozenReading& with) {
        const Tensor coded = codes.in(with.in_low(count, DType::u8), with);
        optim::dequantize(code, {coded.data<std::uint8_t>(), static_cast<std::size_t>(count)}, skipped,
                          scales.memory.data<float>(), to.data<float>(), with.arena);
      }};
}

device::Event Segment::gradients_arrived(std::int64_t end) const {
  for (const GradientArrival& arrival : arrivals_)
    if (arrival.end >= end) return arrival.event;
  return arrivals_.empty() ? device::Event() : arrivals_.back().event;
}

void Segment::attach_values(const Tensor& full) {
  for (std::size_t i = 0; i < layout_.parameters().size(); ++i) {
    autograd::Parameter& parameter = *layout_.parameters()[i];
    const Tensor own = full.range(stored(layout_.offset(i)), stored(layout_.offset(i) + parameter.numel()));
    if (key_.in_blocks())
      parameter.in_blocks = {own, compute_dtype_};
    else
      parameter.value = own.reshape(parameter.shape);
  }
}

void Segment::detach_values() {
  for (const ParameterPtr& parameter : layout_.parameters()) parameter->value = {}, parameter->in_blocks = {};
}

void Segment::attach_gradients(const Tensor& full, std::optional<DType> fold, bool onto) {
  for (std::size_t i = 0; i < layout_.parameters().size(); ++i) {
    autograd::Parameter& parameter = *layout_.parameters()[i];
    const auto of = [&](const Tensor& flat) {
      return flat.range(layout_.offset(i), layout_.offset(i) + parameter.numel()).reshape(parameter.shape);
    };
    parameter.grad = of(full.range(0, layout_.padded()));
    parameter.grad_sum = {};
    parameter.grad_sources = sources();
    parameter.source_grads.clear();
    for (std::int64_t at = layout_.padded(); at < full.numel(); at += layout_.padded())
      parameter.source_grads.push_back(of(full.range(at, at + layout_.padded())));
    if (fold) parameter.grad_sum = {of(gradients_.tensor()), *fold, onto, false};
  }
}

void Segment::zero_pruned_gradients() {
  for (const ParameterPtr& parameter : layout_.parameters()) {
    if (!parameter->pruned || !parameter->grad.defined()) continue;
    if (parameter->grad_sum.folded)
      kernels_.zero_pruned(parameter->value, parameter->grad_sum.to);
    else if (parameter->grad_written)
      kernels_.zero_pruned(parameter->value, parameter->grad);
    if (parameter->sources_written)
      for (const Tensor& of_source : parameter->source_grads)
        kernels_.zero_pruned(parameter->value, of_source);
  }
}

std::vector<Segment::Range> Segment::close_gradients() {
  std::vector<Range> apart;
  const auto add = [&](std::int64_t begin, std::int64_t end) {
    if (begin == end) return;
    if (!apart.empty() && apart.back().end == begin)
      apart.back().end = end;
    else
      apart.push_back({begin, end});
  };
  for (std::size_t i = 0; i < layout_.parameters().size(); ++i) {
    autograd::Parameter& parameter = *layout_.parameters()[i];
    if (!parameter.grad.defined()) continue;
    const bool folded = parameter.grad_sum.folded;
    const std::int64_t end = layout_.offset(i) + parameter.numel();
    const std::int64_t next = i + 1 < layout_.parameters().size() ? layout_.offset(i + 1) : layout_.padded();
    const std::size_t further = parameter.source_grads.size();
    parameter.source_grads.push_back(parameter.grad);
    for (std::size_t source = 0; source <= further; ++source) {
      const Tensor& grad = parameter.source_grads[source];
      const bool written = source < further ? parameter.sources_written : parameter.grad_written;
      if (!folded && !written) kernels_.fill(grad, 0);
      // The gap up to the next parameter takes part in sums over the flat segment.
      const std::size_t after = grad.byte_offset() + grad.bytes();
      kernels_.fill(Tensor::view_of(grad.storage(), after, {next - end}, grad.dtype()), 0);
    }
    add(folded ? end : layout_.offset(i), next);
    parameter.grad = {};
    parameter.grad_sum = {};
    parameter.grad_sources = 1;
    parameter.source_grads.clear();
    parameter.sources_written = false;
  }
  return apart;
}

}  // namespace sherd::sharding
