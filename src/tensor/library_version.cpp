#include "tensor/library_version.h"

#include <oneapi/dnnl/dnnl.h>

#include "base/error.h"

namespace sherd::tensor {

std::string matmul_library() {
  const dnnl_version_t* version = dnnl_version();
  const char* runtime = "own threads";
  switch (version->cpu_runtime) {
    case DNNL_RUNTIME_SEQ:
      runtime = "sequential";
      break;
    case DNNL_RUNTIME_OMP:
      runtime = "OpenMP";
      break;
    case DNNL_RUNTIME_TBB:
      runtime = "TBB";
      break;
    default:
      break;
  }
  return cat("own tiles; bf16 on AMX: oneDNN ", version->major, '.', version->minor, '.', version->patch,
             " (", runtime, ")");
}

}  // namespace sherd::tensor
