#include "tensor/tensor.h"

#include <algorithm>
#include <cstring>

namespace sherd::tensor {

Shape::Shape(std::span<const std::int64_t> dims) : rank_(static_cast<int>(dims.size())) {
  require(dims.size() <= max_rank, "a shape has at most ", max_rank, " extents, not ", dims.size());
  for (const std::int64_t dim : dims) require(dim >= 0, "negative extent ", dim, " in a shape");
  std::copy(dims.begin(), dims.end(), dims_.begin());
}

std::int64_t Shape::numel() const {
  constexpr std::int64_t most = std::int64_t{1} << 59;  // whose bytes a number holds in every dtype
  std::int64_t product = 1;
  for (const std::int64_t dim : dims())
    if (__builtin_mul_overflow(product, dim, &product) || product > most) [[unlikely]]
      fail(ErrorKind::usage, "a tensor of ", str(), " has more elements than there can be, 2^59");
  return product;
}

Shape Shape::with(int axis, std::int64_t extent) const {
  Shape out = *this;
  if (axis < 0) axis += rank_;
  require(0 <= axis && axis < rank_, "a shape of ", rank_, " extents has no axis ", axis);
  out.dims_[static_cast<std::size_t>(axis)] = extent;
  return out;
}

bool Shape::operator==(const Shape& other) const {
  return std::equal(dims().begin(), dims().end(), other.dims().begin(), other.dims().end());
}

/// By hand: conditions that hold have made the text of their error, too, which dry runs would wait for.
std::string Shape::str() const {
  std::string out = "[";
  for (const std::int64_t dim : dims()) {
    if (out.size() > 1) out += ", ";
    out += std::to_string(dim);
  }
  return out += "]";
}

Tensor Tensor::empty(Device& device, const Shape& shape, DType dtype, Category category, device::Tier tier) {
  const auto bytes = static_cast<std::size_t>(shape.numel()) * size_of(dtype);
  return view_of(device.allocate(bytes, category, tier), 0, shape, dtype);
}

Tensor Tensor::zeros(Device& device, const Shape& shape, DType dtype, Category category) {
  Tensor out = empty(device, shape, dtype, category);
  device.zero(out.raw(), out.bytes());
  return out;
}

Tensor Tensor::view_of(device::Storage storage, std::size_t byte_offset, const Shape& shape, DType dtype) {
  Tensor out;
  out.storage_ = std::move(storage);
  out.offset_ = byte_offset;
  out.shape_ = shape;
  out.numel_ = shape.numel();
  out.dtype_ = dtype;
  require(byte_offset + out.bytes() <= out.storage_.bytes(), "a view of ", out.bytes(), " bytes at ",
          byte_offset, " does not fit a storage of ", out.storage_.bytes());
  return out;
}

Tensor Tensor::reshape(const Shape& shape) const {
  if (shape.numel() != numel_) [[unlikely]]  // without it texts of shapes would be made in each call
    fail(ErrorKind::usage, "cannot view ", shape_.str(), " as ", shape.str());
  Tensor out = *this;
  out.shape_ = shape;
  return out;
}

Tensor Tensor::range(std::int64_t begin, std::int64_t end) const {
  require(0 <= begin && begin <= end && end <= numel_, "range [", begin, ", ", end, ") of ", numel_,
          " elements");
  Tensor out = *this;
  out.offset_ += static_cast<std::size_t>(begin) * size_of(dtype_);
  out.shape_ = Shape{end - begin};
  out.numel_ = end - begin;
  return out;
}

Tensor Tensor::rows(std::int64_t begin, std::int64_t end) const {
  if (shape_.rank() < 1 || begin < 0 || begin > end || end > shape_[0]) [[unlikely]]
    fail(ErrorKind::usage, "rows [", begin, ", ", end, ") of ", shape_.str());
  const std::int64_t row = shape_[0] == 0 ? 0 : numel_ / shape_[0];
  return range(begin * row, end * row).reshape(shape_.with(0, end - begin));
}

void copy_from_host(Device& device, const Tensor& to, const void* from, std::size_t bytes) {
  require(bytes == to.bytes(), "copying ", bytes, " host bytes into a tensor of ", to.bytes());
  if (device.processor_tier() == device::Tier::device) return device.copy(to.raw(), from, bytes);
  // Out of page-locked memory nobody has to wait for the copy, or for the work before it.
  const device::Storage staged = device.allocate(bytes, Category::workspace, device.processor_tier());
  if (bytes) std::memcpy(staged.data(), from, bytes);
  device.copy(to.raw(), staged.data(), bytes);
}

Tensor to_host(Device& device, const Tensor& x) {
  if (device.processor_tier() == device::Tier::device) return x;
  Tensor out = Tensor::on_host(device, x.shape(), x.dtype());
  device.copy(out.raw(), x.raw(), x.bytes());
  device.synchronize();
  return out;
}

double read_scalar(Device& device, const Tensor& x) {
  return scalar_value(to_host(device, x));
}

double scalar_value(const Tensor& value) {
  require(value.numel() == 1, "one number was expected, not a tensor of shape ", value.shape().str());
  switch (value.dtype()) {
    case DType::f32:
      return value.data<float>()[0];
    case DType::f64:
      return value.data<double>()[0];
    case DType::bf16:
      return static_cast<float>(value.data<bf16>()[0]);
    case DType::f16:
      return static_cast<float>(value.data<f16>()[0]);
    default:
      fail(ErrorKind::usage, "a tensor of ", name_of(value.dtype()), " has no floating number to read");
  }
}

}  // namespace sherd::tensor
