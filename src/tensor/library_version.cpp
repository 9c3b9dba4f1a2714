#include "tensor/library_version.h"

#include <oneapi/dnnl/dnnl.h>

#include "base/error.h"

namespace sherd::tensor {

std::string matmul_library() {
  const dnnl_version_t* version = dnnl_version();
  const unsigned runtime = version->cpu_runtime;
  const char* name = runtime == DNNL_RUNTIME_SEQ   ? "sequential"
                     : runtime == DNNL_RUNTIME_OMP ? "OpenMP"
                     : runtime == DNNL_RUNTIME_TBB ? "TBB"
                                                   : "own threads";
  return cat("own tiles; bf16 on AMX: oneDNN ", version->major, '.', version->minor, '.', version->patch,
             " (", name, ")");
}

}  // namespace sherd::tensor
