#pragma once

#include "tensor/tensor.h"

namespace sherd::engine {

/// The form of a tensor, which a rank has to know before it can receive it.
struct ValueForm {
  tensor::Shape shape;
  DType dtype = DType::f32;
  bool operator==(const ValueForm&) const = default;
};

/// Room for a form where the processor reads and writes it, as it travels: dtype, number of dimensions,
/// extents, as int64.
tensor::Tensor make_header(device::Device& device);
void write_header(const tensor::Tensor& header, const tensor::Tensor& value);
/// Throws Error{comm} for what is no form.
ValueForm read_header(const tensor::Tensor& header);

}  // namespace sherd::engine
