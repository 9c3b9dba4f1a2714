#pragma once

// This room has tensors and the kernels that compute on them, for processors (cpu/, loops per instruction set
// in cpu/isa/), NVIDIA's cards (cuda/) and estimates (meta/).
//
// To change, look at:
// - add a kernel: docs/recipes.md, "A kernel"; kernels.h declares them
// - which keys a query sees, by causal masks, windows and documents: seen_keys(), extents.h; seen_keys.h, by
//   which all kernels cut their tiles
// - whose kernels attention takes on a GPU: cuDNN by attention_by_library(), cuda/workspace.h; own ones by
//   tensor cores attention_mma.cu, else attention.cu; documents in one grid: DocumentTable, attention.cuh
// - frequencies of rotary positions, scaled or not: rotary.h
// - products of matrices: cut into panels and blocks in cpu/gemm_blocked.cpp; who multiplies a block:
//   block_product(), cpu/gemm_tiles.cpp; register tiles: cpu/isa/gemm_tiles.h
// - products of few rows, which read weights at memory's speed: Matmul::few_rows, cpu/isa/few_rows.cpp
// - how shapes repeat, and folds along an axis: arrays.h, cpu/folds.cpp
// - FP8: the numbers, fp8_code.h; matrices and recipes, fp8.h; who multiplies them: linear_products.h in
//   src/autograd
// - exact sums: exact_sum.h; one token's experts: routing_row.h; weights in few bits: stored_format.h
// - files of tensors: safetensors_folder.h

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/error.h"
#include "device/device.h"

namespace sherd::tensor {

using device::Category;
using device::Device;

/// Up to six extents, row-major, outermost first.
class Shape {
 public:
  static constexpr int max_rank = 6;
  Shape() = default;
  Shape(std::initializer_list<std::int64_t> dims) : Shape(std::span(dims.begin(), dims.size())) {}
  explicit Shape(std::span<const std::int64_t> dims);

  int rank() const { return rank_; }
  /// Negative axes count from the end.
  std::int64_t operator[](int axis) const {
    return dims_[static_cast<std::size_t>(axis < 0 ? axis + rank_ : axis)];
  }
  std::int64_t back() const { return (*this)[-1]; }
  std::int64_t numel() const;
  /// Product of all extents but the last: the number of rows.
  std::int64_t rows() const { return rank_ == 0 ? 1 : numel() / std::max<std::int64_t>(1, back()); }
  std::span<const std::int64_t> dims() const { return {dims_.data(), static_cast<std::size_t>(rank_)}; }
  /// This shape with one extent replaced, or with the last.
  Shape with(int axis, std::int64_t extent) const;
  Shape with_back(std::int64_t extent) const { return with(-1, extent); }
  bool operator==(const Shape& other) const;
  std::string str() const;  ///< "[4, 512, 768]"

 private:
  std::array<std::int64_t, max_rank> dims_{};
  int rank_ = 0;
};

/// A value handle to contiguous elements: copying shares the storage. Owns a share of the storage, so views
/// keep it alive. Not synchronised: one thread writes at a time.
class Tensor {
 public:
  Tensor() = default;
  /// Uninitialised elements in new storage of `device`.
  static Tensor empty(Device& device, const Shape& shape, DType dtype,
                      Category category = Category::activations, device::Tier tier = device::Tier::device);
  static Tensor zeros(Device& device, const Shape& shape, DType dtype,
                      Category category = Category::activations);
  /// Uninitialised elements that the processor reads and writes, in Device::processor_tier().
  static Tensor on_host(Device& device, const Shape& shape, DType dtype,
                        Category category = Category::workspace) {
    return empty(device, shape, dtype, category, device.processor_tier());
  }
  /// A list of activations that the processor reads; a meta device holds no values.
  template <class T>
  static Tensor on_host(Device& device, const std::vector<T>& values);
  /// A view of `storage` that begins `byte_offset` in. Throws Error{usage} when it does not fit.
  static Tensor view_of(device::Storage storage, std::size_t byte_offset, const Shape& shape, DType dtype);
  /// Copies host values.
  template <class T>
  static Tensor of(Device& device, const Shape& shape, std::span<const T> values);

  bool defined() const { return static_cast<bool>(storage_); }
  explicit operator bool() const { return defined(); }
  const Shape& shape() const { return shape_; }
  std::int64_t numel() const { return numel_; }
  DType dtype() const { return dtype_; }
  std::size_t bytes() const { return static_cast<std::size_t>(numel_) * size_of(dtype_); }
  const device::Storage& storage() const { return storage_; }
  std::size_t byte_offset() const { return offset_; }

  std::byte* raw() const { return storage_.data() + offset_; }
  /// The elements as T; throws Error{usage} when the dtype is another.
  template <class T>
  T* data() const {
    require(dtype_ == dtype_of<T>(), "tensor holds ", name_of(dtype_), ", not ", name_of(dtype_of<T>()));
    return reinterpret_cast<T*>(raw());
  }

  /// The same elements under another shape of equal numel.
  Tensor reshape(const Shape& shape) const;
  /// Elements [begin, end) of the flattened tensor, as one dimension.
  Tensor range(std::int64_t begin, std::int64_t end) const;
  /// Rows [begin, end) along axis 0.
  Tensor rows(std::int64_t begin, std::int64_t end) const;

 private:
  device::Storage storage_;
  std::size_t offset_ = 0;
  Shape shape_;
  std::int64_t numel_ = 0;
  DType dtype_ = DType::f32;
};

/// Named inputs of one micro-batch ("tokens", "labels", …), as loaders make and models take them.
using Batch = std::map<std::string, Tensor>;

/// Fills `to` from memory of the processor, which may be reused on return.
void copy_from_host(Device& device, const Tensor& to, const void* from, std::size_t bytes);

/// `x` where the processor can read it, all work on it done: itself on CPUs, a copy in the host tier beside
/// an accelerator.
Tensor to_host(Device& device, const Tensor& x);

/// The one element of a floating tensor; waits for the device. Throws Error{usage} for another size or dtype.
double read_scalar(Device& device, const Tensor& x);
/// The same of a tensor that the processor can read; does not wait.
double scalar_value(const Tensor& x);

template <class T>
Tensor Tensor::on_host(Device& device, const std::vector<T>& values) {
  Tensor out = on_host(device, {std::ssize(values)}, dtype_of<T>(), Category::activations);
  if (device.kind() != device::Kind::meta) std::copy(values.begin(), values.end(), out.data<T>());
  return out;
}

template <class T>
Tensor Tensor::of(Device& device, const Shape& shape, std::span<const T> values) {
  require(static_cast<std::int64_t>(values.size()) == shape.numel(), values.size(), " values for shape ",
          shape.str());
  Tensor out = empty(device, shape, dtype_of<T>());
  copy_from_host(device, out, values.data(), values.size_bytes());
  return out;
}

}  // namespace sherd::tensor
