#include "autograd/gradients.h"

namespace sherd::autograd {

void write_kernel_grad(Tape& tape, const GradRef& ref, const Shape& shape, DType dtype,
                       const std::function<void(const Tensor&, bool)>& write) {
  tape.write_grad(ref, shape, dtype, [&](const Tensor& to, bool add) {
    if (to.dtype() == dtype || (to.dtype() == DType::f32 && dtype != DType::f64)) {
      write(to.reshape(shape), add);
      return;
    }
    Tensor made = tape.empty(shape, dtype);
    write(made, false);
    if (!add) {
      tape.kernels().copy(made, to);
      return;
    }
    Tensor converted = tape.empty(to.shape(), to.dtype());
    tape.kernels().copy(made, converted);
    tape.kernels().add(to, converted, to);
  });
}

void write_folded_grad(Tape& tape, const GradRef& ref, const Shape& shape, DType dtype,
                       const std::function<void(const Tensor&, bool, std::optional<DType>)>& write) {
  const bool folded = tape.fold_grad(ref, shape, dtype, [&](const Tensor& to, bool add, DType rounding) {
    write(to.reshape(shape), add, rounding);
  });
  if (!folded)
    write_kernel_grad(tape, ref, shape, dtype, [&](const Tensor& to, bool add) { write(to, add, {}); });
}

Tensor reuse_or_empty(Tape& tape, const Tensor& dy) {
  return dy.storage().unique() ? dy : tape.empty(dy.shape(), dy.dtype());
}

}  // namespace sherd::autograd
