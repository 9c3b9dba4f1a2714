#pragma once

#include "base/dtype.h"
#include "device/cuda.h"

namespace sherd::device {

/// The FLOP/s that `gpu` reaches at most in dense products of `dtype` summed in fp32, as its data sheet says:
/// the denominator of MFU. bf16 and fp16 run on the tensor cores; fp32 does only with `tf32`. Of a part of a
/// card (MIG) its share of the multiprocessors. A card that is not known counts as multiprocessors × clock ×
/// what one does per cycle at its compute capability; 0 where that is not known either, and for other dtypes.
double peak_flops(const CudaGpu& gpu, DType dtype, bool tf32 = false);

}  // namespace sherd::device
