#pragma once

#include <span>
#include <string>

#include "models/compressed/matrix.h"
#include "tensor/kernels.h"

namespace sherd::models {

/// Rounds a matrix so that what a layer makes of its inputs changes little (Frantar et al. 2022, "GPTQ"):
/// columns one after the other, each one's error spread over those that are to come, by the inverse of the
/// Hessian Σ x·xᵀ with 1 % of its diagonal's mean added to the diagonal. Scales of int4 are those of a
/// group's values when its first column comes, which earlier errors have changed; with `activation_order`
/// those of the values as given, and columns with the largest inputs come first.
///
/// `values`: [rows, columns]. `hessian`: Σ x·xᵀ over calibration, [columns, columns] fp32 on a processor; it
/// is overwritten. An input that is always 0 has no part in it: its column is rounded to nearest. (The
/// paper's code makes it 0.) Throws as round_to_nearest() does, and Error{data} where the Hessian is not
/// finite.
CompressedMatrix gptq(const CompressedScheme& scheme, const std::string& name, std::span<const float> values,
                      std::int64_t rows, const tensor::Tensor& hessian, tensor::Kernels& kernels);

}  // namespace sherd::models
