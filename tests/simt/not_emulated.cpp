#include "tensor/cuda/cuda_kernels.h"

// What CUDA's libraries do on a GPU, and the emulator does not.

namespace sherd::tensor::SHERD_CUDA {
namespace {

[[noreturn]] void refuse(const char* kernel) { fail(ErrorKind::usage, kernel, ": not emulated, a GPU is needed"); }

}  // namespace

void CudaKernels::matmul(const Matmul&) { refuse("matmul"); }
void CudaKernels::layer_norm(const Tensor&, const Tensor&, const Tensor&, double, const Tensor&, const Tensor&,
                             const Tensor&) {
  refuse("layer_norm");
}
void CudaKernels::layer_norm_backward(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                      const Tensor&, const Tensor&, const Tensor&, bool) {
  refuse("layer_norm_backward");
}
void CudaKernels::rms_norm(const Tensor&, const Tensor&, double, const Tensor&, const Tensor&) { refuse("rms_norm"); }
void CudaKernels::rms_norm_backward(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                    const Tensor&, bool) {
  refuse("rms_norm_backward");
}
void CudaKernels::embedding(const Tensor&, const Tensor&, const Tensor&) { refuse("embedding"); }
void CudaKernels::embedding_backward(const Tensor&, const Tensor&, const Tensor&, bool) {
  refuse("embedding_backward");
}
void CudaKernels::add_positions(const Tensor&, const Tensor&, const Tensor&) { refuse("add_positions"); }
void CudaKernels::add_positions_backward(const Tensor&, const Tensor&, bool) { refuse("add_positions_backward"); }
void CudaKernels::rotary(const Tensor&, const Attention&, double, bool, const Tensor&) { refuse("rotary"); }
void CudaKernels::attention(const Tensor&, const Attention&, const Tensor&, const Tensor&) { refuse("attention"); }
void CudaKernels::attention_backward(const Tensor&, const Attention&, const Tensor&, const Tensor&, const Tensor&,
                                     const Tensor&) {
  refuse("attention_backward");
}
void CudaKernels::cross_entropy(const Tensor&, const Tensor&, std::int64_t, std::int32_t, const Tensor&,
                                const Tensor&) {
  refuse("cross_entropy");
}
void CudaKernels::cross_entropy_backward(const Tensor&, const Tensor&, const Tensor&, std::int64_t, std::int32_t,
                                         double) {
  refuse("cross_entropy_backward");
}
void CudaKernels::mean_squared_error(const Tensor&, const Tensor&, const Tensor&) { refuse("mean_squared_error"); }
void CudaKernels::mean_squared_error_backward(const Tensor&, const Tensor&, double, const Tensor&) {
  refuse("mean_squared_error_backward");
}

}  // namespace sherd::tensor::SHERD_CUDA
