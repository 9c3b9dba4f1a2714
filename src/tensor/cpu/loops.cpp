#include "tensor/cpu/loops.h"

namespace sherd::tensor::cpu {

void require_floating(const char* kernel, const char* name, const Tensor& t) {
  require(t.defined(), kernel, ": ", name, " is not defined");
  require(is_floating(t.dtype()), kernel, ": ", name, " must be floating, not ", name_of(t.dtype()));
}

void require_alike(const char* kernel, const Tensor& first, std::initializer_list<const Tensor*> others) {
  require_floating(kernel, "the output", first);
  for (const Tensor* other : others) {
    require(other->defined(), kernel, ": an argument is not defined");
    require(other->shape() == first.shape(), kernel, ": shapes differ: ", other->shape().str(), " and ",
            first.shape().str());
    require(other->dtype() == first.dtype(), kernel, ": dtypes differ: ", name_of(other->dtype()), " and ",
            name_of(first.dtype()), "; copy() one to the other's first");
  }
}

void require_vector(const char* kernel, const char* name, const Tensor& t, Count n, DType dtype) {
  require(t.defined(), kernel, ": ", name, " is not defined");
  require(t.numel() == n, kernel, ": ", name, " must have ", n, " elements, not ", t.shape().str());
  require(t.dtype() == dtype, kernel, ": ", name, " must be ", name_of(dtype), ", not ", name_of(t.dtype()));
}

void require_gradient(const char* kernel, const char* name, const Tensor& t, Count n, DType dtype) {
  require_floating(kernel, name, t);
  require(t.numel() == n, kernel, ": ", name, " must have ", n, " elements, not ", t.shape().str());
  require(compute_type(t.dtype()) == compute_type(dtype), kernel, ": ", name, " cannot be ",
          name_of(t.dtype()), " for values in ", name_of(dtype));
}

}  // namespace sherd::tensor::cpu
