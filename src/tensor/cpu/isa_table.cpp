#include "base/cpu_isa.h"
#include "tensor/cpu/isa/tables.h"

namespace sherd::tensor::cpu {

const IsaTable& isa_table(CpuIsa isa) {
  static constexpr IsaTable tables[] = {
      {portable::elementwise, portable::convert, portable::norm, portable::softmax, portable::dropout,
       portable::normals},
      {avx2::elementwise, avx2::convert, avx2::norm, avx2::softmax, avx2::dropout, avx2::normals},
      {avx512::elementwise, avx512::convert, avx512::norm, avx512::softmax, avx512::dropout,
       avx512::normals}};
  return tables[static_cast<int>(isa)];
}

}  // namespace sherd::tensor::cpu
