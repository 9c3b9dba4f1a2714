#include "device/cuda.h"

#include <gtest/gtest.h>

namespace sherd::device {
namespace {

CudaGpu card(const std::string& name, int major, int minor, int processors, double clock_hz = 0) {
  CudaGpu gpu;
  gpu.name = name, gpu.major = major, gpu.minor = minor, gpu.processors = processors, gpu.clock_hz = clock_hz;
  return gpu;
}

double tflops(const CudaGpu& gpu, DType dtype, bool tf32 = false) {
  return peak_flops(gpu, dtype, tf32) / 1e12;
}

TEST(PeakFlops, OfKnownCardsAreTheirDataSheets) {
  struct Sheet {
    CudaGpu gpu;
    double half, tf32, single;
  };
  const Sheet sheets[] = {{card("NVIDIA A100-SXM4-80GB", 8, 0, 108), 312, 156, 19.5},
                          {card("NVIDIA A100 80GB PCIe", 8, 0, 108), 312, 156, 19.5},
                          {card("NVIDIA H100 80GB HBM3", 9, 0, 132), 989, 495, 67},
                          {card("NVIDIA H100 PCIe", 9, 0, 114), 756, 378, 51},
                          {card("NVIDIA H200", 9, 0, 132), 989, 495, 67},
                          {card("NVIDIA GH200 480GB", 9, 0, 132), 989, 495, 67},
                          {card("NVIDIA H20", 9, 0, 78), 148, 74, 44}};
  for (const Sheet& sheet : sheets) {
    SCOPED_TRACE(sheet.gpu.name);
    EXPECT_NEAR(tflops(sheet.gpu, DType::bf16), sheet.half, 1);
    EXPECT_EQ(tflops(sheet.gpu, DType::f16), tflops(sheet.gpu, DType::bf16));
    EXPECT_EQ(tflops(sheet.gpu, DType::bf16, true), tflops(sheet.gpu, DType::bf16));
    EXPECT_NEAR(tflops(sheet.gpu, DType::f32, true), sheet.tf32, 1);
    EXPECT_NEAR(tflops(sheet.gpu, DType::f32), sheet.single, 0.5);
  }
}

TEST(PeakFlops, OfPartOfACardAreItsShare) {
  EXPECT_DOUBLE_EQ(tflops(card("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 9, 0, 66), DType::bf16), 989.4 / 2);
}

TEST(PeakFlops, OfOtherCardsFollowFromTheirProcessors) {
  EXPECT_NEAR(tflops(card("NVIDIA A40", 8, 6, 84, 1.74e9), DType::bf16), 149.7, 0.5);
  EXPECT_NEAR(tflops(card("NVIDIA L4", 8, 9, 58, 2.04e9), DType::bf16), 121, 0.5);
  EXPECT_NEAR(tflops(card("NVIDIA GeForce RTX 4090", 8, 9, 128, 2.52e9), DType::bf16), 165.2, 0.5);
  EXPECT_NEAR(tflops(card("NVIDIA GeForce RTX 4090", 8, 9, 128, 2.52e9), DType::f32), 82.6, 0.5);
  // Whole words: this one is no A100.
  EXPECT_NEAR(tflops(card("NVIDIA RTX A1000", 8, 6, 18, 1.46e9), DType::bf16), 26.9, 0.5);
  EXPECT_EQ(tflops(card("A card to come", 20, 0, 100, 2e9), DType::bf16), 0);
  EXPECT_EQ(tflops(card("NVIDIA L4", 8, 9, 58, 0), DType::bf16), 0) << "the driver does not tell the clock";
  EXPECT_EQ(tflops(card("NVIDIA H200", 9, 0, 132), DType::f64), 0);
}

}  // namespace
}  // namespace sherd::device
