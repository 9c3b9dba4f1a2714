// NVIDIA's own libraries, loaded where the build found them, and refused where another file lies in their
// place.
#include <cublasLt.h>
#include <cudnn_version.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nccl.h>

#include "comm/nccl/nccl_functions.h"
#include "device/device.h"
#include "lazy_library/look.h"
#include "tensor/cuda/attention/attention_library.h"
#include "tensor/cuda/cuda_kernels.h"

namespace sherd {
namespace {

using sherd::testing::BrokenLibrary;
using sherd::testing::mapped;
using sherd::testing::refusal;
using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(NvidiaLibraries, CublasLtIsLoadedAsKernelsAreMade) {
  EXPECT_FALSE(mapped("libcublasLt"));
  {
    const BrokenLibrary broken(cat("libcublasLt.so.", CUBLAS_VER_MAJOR));
    EXPECT_THAT(refusal([] { tensor::cuda::load_matmul_library(); }),
                AllOf(HasSubstr("cuBLASLt cannot be loaded: /"), HasSubstr("libcublasLt.so."),
                      HasSubstr("cuBLAS"), HasSubstr("device.type")));
  }
  tensor::cuda::load_matmul_library();
  EXPECT_TRUE(mapped("libcublasLt.so"));
}

/// Without a driver it starts in neither case, so what tells them apart is the reason.
TEST(NvidiaLibraries, AttentionGoesOnWithoutCudnn) {
  const auto device = device::make_cpu_device(1);
  const tensor::cuda::Target target{*device};
  const auto said = [&] {
    ::testing::internal::CaptureStderr();
    tensor::cuda::make_attention_library(target);
    return ::testing::internal::GetCapturedStderr();
  };
  EXPECT_FALSE(mapped("libcudnn"));
  {
    const BrokenLibrary broken(cat("libcudnn.so.", CUDNN_MAJOR));
    EXPECT_THAT(said(),
                AllOf(HasSubstr("instead of cuDNN's: cuDNN cannot be loaded: /"), HasSubstr("libcudnn.so.")));
  }
  EXPECT_THAT(said(), ::testing::Not(HasSubstr("cannot be loaded")));
  EXPECT_TRUE(mapped("libcudnn.so"));
}

TEST(NvidiaLibraries, NcclIsLoadedByItsFirstFunction) {
  EXPECT_FALSE(mapped("libnccl"));
  int version = 0;
  {
    const BrokenLibrary broken(cat("libnccl.so.", NCCL_MAJOR));
    EXPECT_THAT(refusal([&] { comm::ncclGetVersion(&version); }),
                AllOf(HasSubstr("NCCL cannot be loaded: /"), HasSubstr("libnccl2")));
  }
  EXPECT_EQ(comm::ncclGetVersion(&version), ncclSuccess);
  EXPECT_EQ(version / 10000, NCCL_MAJOR);
  EXPECT_TRUE(mapped("libnccl.so"));
}

}  // namespace
}  // namespace sherd
