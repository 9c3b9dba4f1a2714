#include "tensor/cpu/cpu_kernels.h"

#include "base/cpu_isa.h"
#include "tensor/cpu/isa/tables.h"
#include "tensor/cuda/make.h"
#include "tensor/meta/meta_kernels.h"

namespace sherd::tensor {

std::unique_ptr<Kernels> make_kernels(Device& device, const CudaOptions& options) {
  if (device.kind() == device::Kind::meta) return std::make_unique<meta::MetaKernels>(device, options);
  if (device.accelerator()) return make_cuda_kernels(device, options);
  return std::make_unique<cpu::CpuKernels>(device);
}

}  // namespace sherd::tensor

namespace sherd::tensor::cpu {

const IsaTable& isa_table(CpuIsa isa) {
  static constexpr IsaTable tables[] = {
      {portable::elementwise, portable::convert, portable::norm, portable::softmax, portable::dropout,
       portable::few_rows, portable::normals},
      {avx2::elementwise, avx2::convert, avx2::norm, avx2::softmax, avx2::dropout, avx2::few_rows,
       avx2::normals},
      {avx512::elementwise, avx512::convert, avx512::norm, avx512::softmax, avx512::dropout, avx512::few_rows,
       avx512::normals}};
  return tables[static_cast<int>(isa)];
}

}  // namespace sherd::tensor::cpu
