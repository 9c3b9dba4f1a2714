#pragma once

#include "optim/device_update.h"
#include "tensor/kernels.h"

// Muon (Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024; Liu et al., "Muon is
// scalable for LLM training", 2025) in three parts, for whoever gathers whole matrices between them:
// directions() updates momenta and gives what orthogonalize() takes, and the update() of step_rule() moves
// the weights by what it makes: p ← p − lr·(wd·p + step_scale()·O).

namespace sherd::optim {

/// The dtype in which directions are kept, exchanged and orthogonalised: fp32 where the model computes in
/// fp32, else bf16.
DType direction_dtype(DType parameters);

/// Momenta of a span, and its directions into `to`, rounded from fp32 to nearest with ties away from zero.
/// The weights are neither read nor written. Where the memory is, as update() of device_update.h, leaving
/// word in `check` of a momentum or a direction that is NaN or infinite.
void directions(const SpanUpdate& span, const Hyper& hyper, std::int64_t step, void* to, DType dtype,
                device::Device& device, FiniteCheck& check);
/// The same by the processor; false where the check would fail.
bool directions(const SpanUpdate& span, const Hyper& hyper, std::int64_t step, void* to, DType dtype,
                Arena& arena);
/// Takes the memory that directions() does on a GPU, and gives it back: for a device that only tracks it.
void charge_directions(device::Device& device, std::int64_t elements, DType dtype);

/// x [rows, columns] in place: divided by its Frobenius norm, or by ns_eps if that is larger, then
/// X ← a·X + b·(X·Xᵀ)·X + c·(X·Xᵀ)²·X, ns_steps times, on the side of the smaller extent. What comes out is
/// to be multiplied by step_scale(). Takes workspace of a matrix and three squares of its smaller extent. A
/// GPU is waited for once.
void orthogonalize(const tensor::Tensor& x, const Hyper& hyper, tensor::Kernels& kernels);
/// Floating-point operations of that.
double orthogonalize_flops(std::int64_t rows, std::int64_t columns, const Hyper& hyper);

/// The factor of orthogonalize()'s result: `adjust_lr_fn`, and a constant that it leaves out.
double step_scale(const Hyper& hyper, std::int64_t rows, std::int64_t columns);
/// The rule that takes the result times step_scale() as a gradient: gradient descent without momentum.
Hyper step_rule(const Hyper& muon);
/// The rule for parameters of a Muon section that are no matrices of blocks: AdamW.
Hyper beside_muon(const Hyper& muon);

}  // namespace sherd::optim
