#include "tensor/cpu/loops.h"

namespace sherd::tensor::cpu {

void CpuKernels::copy_rows(const StridedRows&, const StridedRows&, std::int64_t, std::int64_t, bool) {
  fail(ErrorKind::usage, "copy_rows: not written yet");
}

void CpuKernels::add_scaled(const Tensor&, const Tensor&, const Tensor&, bool) {
  fail(ErrorKind::usage, "add_scaled: not written yet");
}

void CpuKernels::quotient(const Tensor&, const Tensor&, double, const Tensor&) {
  fail(ErrorKind::usage, "quotient: not written yet");
}

void CpuKernels::merge_attention(const Tensor&, const Tensor&, std::int64_t, bool, const Tensor&,
                                 const Tensor&) {
  fail(ErrorKind::usage, "merge_attention: not written yet");
}

}  // namespace sherd::tensor::cpu
