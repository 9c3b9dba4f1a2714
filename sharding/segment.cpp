#include "sharding/segment.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace sherd::sharding {

using device::Category;

StateBuffer::StateBuffer(device::Device& device, Tensor tensor, Category category, std::uint64_t padding_bytes)
    : device_(&device), tensor_(std::move(tensor)), category_(category), padding_(padding_bytes) {
  device_->ledger().reclassify(device::Tier::device, category_, Category::padding, padding_);
}

StateBuffer::~StateBuffer() {
  if (tensor_.defined()) device_->ledger().reclassify(device::Tier::device, Category::padding, category_, padding_);
}

StateBuffer::StateBuffer(StateBuffer&& other) noexcept
    : device_(other.device_), tensor_(std::exchange(other.tensor_, {})), category_(other.category_),
      padding_(other.padding_) {}

StateBuffer& StateBuffer::operator=(StateBuffer&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(tensor_, other.tensor_);
  std::swap(category_, other.category_);
  std::swap(padding_, other.padding_);
  return *this;
}

std::shared_ptr<const Tensor> ExchangePool::take(std::int64_t numel, DType dtype) {
  const std::size_t bytes = static_cast<std::size_t>(numel) * size_of(dtype);
  auto& free = shelf_->free;
  const auto it = std::find_if(free.begin(), free.end(), [&](const auto& entry) { return entry.first == bytes; });
  device::Storage storage;
  if (it != free.end()) {
    storage = std::move(it->second);
    free.erase(it);
  } else {
    storage = group_.allocate(device_, bytes, Category::communication);
  }
  auto* tensor = new Tensor(Tensor::view_of(std::move(storage), 0, {numel}, dtype));
  return {tensor, [shelf = shelf_, bytes](const Tensor* held) {
            shelf->free.emplace_back(bytes, held->storage());
            delete held;
          }};
}

Segment::Segment(std::string name, SegmentKey key, std::vector<ParameterPtr> parameters, const PlacementTable& table,
                 int moments, std::uint64_t seed, comm::Communicator& group, tensor::Kernels& kernels)
    : name_(std::move(name)), key_(key), layout_(std::move(parameters), group.size()),
      // Over one rank, sharded and replicated are the same thing.
      parameters_sharded_(table.parameters.spread == Spread::sharded && !key.persistent && group.size() > 1),
      gradients_sharded_(table.gradients.spread == Spread::sharded && group.size() > 1),
      optimizer_sharded_(table.masters.spread == Spread::sharded && group.size() > 1),
      gather_after_update_(key.trainable && optimizer_sharded_ && !parameters_sharded_),
      own_begin_(group.rank() * layout_.shard()), device_(kernels.device()) {
  parameters_ = make(Category::parameters, table.parameters.dtype, parameters_sharded_, true, group);
  if (key_.trainable) {
    gradients_ = make(Category::gradients, table.gradients.dtype, gradients_sharded_, true, group);
    if (table.separate_masters) masters_ = make(Category::optimizer, DType::f32, optimizer_sharded_, false, group);
    for (int i = 0; i < moments; ++i) {
      moments_.push_back(make(Category::optimizer, DType::f32, optimizer_sharded_, false, group));
      kernels.fill(moments_.back().tensor(), 0);
    }
    kernels.fill(gradients_.tensor(), 0);
  }
  draw_initial_values(seed, kernels);
}

StateBuffer Segment::make(Category category, DType dtype, bool sharded, bool shared, comm::Communicator& group) {
  const std::int64_t begin = sharded ? own_begin_ : 0;
  const std::int64_t numel = sharded ? layout_.shard() : layout_.padded();
  const std::size_t bytes = static_cast<std::size_t>(numel) * size_of(dtype);
  device::Storage storage = shared ? group.allocate(device_, bytes, category) : device_.allocate(bytes, category);
  const std::int64_t padding = numel - layout_.payload_in(begin, begin + numel);
  return StateBuffer(device_, Tensor::view_of(std::move(storage), 0, {numel}, dtype), category,
                     static_cast<std::uint64_t>(padding) * size_of(dtype));
}

namespace {
void draw(const autograd::Parameter& parameter, const Tensor& values, std::int64_t first, std::uint64_t seed,
          tensor::Kernels& kernels) {
  const RandomKey key{seed, stable_hash(parameter.name)};
  using Kind = autograd::Init::Kind;
  switch (parameter.init.kind) {
    case Kind::constant: return kernels.fill(values, parameter.init.a);
    case Kind::normal: return kernels.fill_normal(values, key, first, parameter.init.a, parameter.init.b);
    case Kind::uniform: return kernels.fill_uniform(values, key, first, parameter.init.a, parameter.init.b);
  }
}
}  // namespace

void Segment::draw_initial_values(std::uint64_t seed, tensor::Kernels& kernels) {
  // Values are drawn in fp32 and rounded as masters are, piece by piece, so that no rank needs more memory than what
  // it will keep.
  const Tensor& held = parameters();
  std::memset(held.raw(), 0, held.bytes());
  if (masters_) std::memset(masters_.tensor().raw(), 0, masters_.tensor().bytes());
  const std::int64_t begin = parameters_sharded_ ? own_begin_ : 0;
  constexpr std::int64_t chunk = std::int64_t{1} << 20;
  for (const Piece& piece : layout_.pieces(begin, begin + held.numel())) {
    for (std::int64_t done = 0; done < piece.count; done += chunk) {
      const std::int64_t count = std::min(chunk, piece.count - done), flat = piece.flat_begin + done;
      const Tensor to = held.range(flat - begin, flat - begin + count);
      Tensor values = to.dtype() == DType::f32 || to.dtype() == DType::f64
                          ? to : Tensor::empty(device_, {count}, DType::f32, Category::workspace);
      draw(*layout_.parameters()[piece.slot], values, piece.parameter_begin + done, seed, kernels);
      if (to.dtype() == DType::bf16 || to.dtype() == DType::f16)
        sharding::round_masters(values, to, device_.arena());
      if (!masters_) continue;
      const std::int64_t from = std::max(flat, update_begin()), end = std::min(flat + count, update_end());
      if (from < end)
        kernels.copy(values.range(from - flat, end - flat),
                     masters_.tensor().range(from - update_begin(), end - update_begin()));
    }
  }
}

Tensor Segment::own_parameters() const {
  return parameters_sharded_ ? parameters() : parameters().range(own_begin(), own_end());
}

Tensor Segment::updated_parameters() const {
  return parameters_sharded_ ? parameters() : parameters().range(update_begin(), update_end());
}

Tensor Segment::own_gradients() const {
  return gradients_sharded_ ? gradients() : gradients().range(own_begin(), own_end());
}

Tensor Segment::update_gradients() const {
  return gradients_sharded_ ? gradients() : gradients().range(update_begin(), update_end());
}

Tensor Segment::masters() const { return masters_ ? masters_.tensor() : updated_parameters(); }

void Segment::attach_values(const Tensor& full) {
  for (std::size_t i = 0; i < layout_.parameters().size(); ++i) {
    autograd::Parameter& parameter = *layout_.parameters()[i];
    parameter.value = full.range(layout_.offset(i), layout_.offset(i) + parameter.numel()).reshape(parameter.shape);
  }
}

void Segment::detach_values() {
  for (const ParameterPtr& parameter : layout_.parameters()) parameter->value = {};
}

void Segment::attach_gradients(const Tensor& full) {
  for (std::size_t i = 0; i < layout_.parameters().size(); ++i) {
    autograd::Parameter& parameter = *layout_.parameters()[i];
    parameter.grad = full.range(layout_.offset(i), layout_.offset(i) + parameter.numel()).reshape(parameter.shape);
  }
}

void Segment::close_gradients() {
  for (std::size_t i = 0; i < layout_.parameters().size(); ++i) {
    autograd::Parameter& parameter = *layout_.parameters()[i];
    if (!parameter.grad.defined()) continue;
    if (!parameter.grad_written) std::memset(parameter.grad.raw(), 0, parameter.grad.bytes());
    // The gap up to the next parameter takes part in sums over the flat segment.
    const std::int64_t end = layout_.offset(i) + parameter.numel();
    const std::int64_t next = i + 1 < layout_.parameters().size() ? layout_.offset(i + 1) : layout_.padded();
    const std::size_t gap = static_cast<std::size_t>(next - end) * size_of(parameter.grad.dtype());
    std::memset(parameter.grad.raw() + parameter.grad.bytes(), 0, gap);
    parameter.grad = {};
  }
}

void Segment::round_masters(tensor::Kernels& kernels) {
  if (masters_) sharding::round_masters(masters_.tensor(), updated_parameters(), kernels.device().arena());
}

void round_masters(const Tensor& masters, const Tensor& to, Arena& arena) {
  const float* from = masters.data<float>();
  constexpr std::int64_t grain = std::int64_t{1} << 16;
  arena.parallel_for(masters.numel(), grain, [&](std::int64_t begin, std::int64_t end) {
    if (to.dtype() == DType::bf16) {
      bf16* out = to.data<bf16>();
      for (std::int64_t i = begin; i < end; ++i) out[i] = round_master_to_bf16(from[i]);
    } else if (to.dtype() == DType::f16) {
      f16* out = to.data<f16>();
      for (std::int64_t i = begin; i < end; ++i) out[i] = f16(from[i]);
    } else {
      std::memcpy(to.data<float>() + begin, from + begin, static_cast<std::size_t>(end - begin) * sizeof(float));
    }
  });
}

}  // namespace sherd::sharding
