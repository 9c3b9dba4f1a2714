#pragma once

#include <memory>
#include <span>

#include "optim/cuda/dispatch.h"
#include "optim/update_rule.h"
#include "simt/simt.h"
#include "tensor/extents.h"

namespace sherd::test {

/// The CUDA kernels on the emulator, over the memory of a CPU device, which must outlive them; they run at
/// once, or go to `stream`. `capability`: 10 times the major number, and the minor.
std::unique_ptr<tensor::Kernels> make_emulated_kernels(device::Device& device,
                                                       device::StreamQueue* stream = nullptr,
                                                       int capability = 90);
/// Throws what these kernels found wrong with their data, as synchronize() does on a GPU.
void check_emulated_data(tensor::Kernels& kernels);

/// regroup_heads() of tensor/cuda/attention/attention_library.h by the emulated kernels.
void emulated_regroup(const tensor::AttentionExtents& e, const void* from, void* to, std::int64_t rows,
                      bool by_group, device::Device& device);

/// optim/device_update.h by the emulated kernels.
bool emulated_update(std::span<const optim::SpanUpdate> spans, const optim::Hyper& hyper, std::int64_t step,
                     device::Device& device);
void emulated_split_master(const float* master, void* high, std::uint16_t* low, std::int64_t n,
                           device::Device& device);
void emulated_join_master(const void* high, const std::uint16_t* low, float* master, std::int64_t n,
                          device::Device& device);
void emulated_round_masters(const float* master, void* to, DType dtype, std::int64_t n,
                            device::Device& device);
void emulated_mark_pruned(const optim::PrunedSpan& span, device::Device& device);
void emulated_restore_pruned(const optim::PrunedSpan& span, device::Device& device);

/// The kernels of optim/cuda/dispatch.h for 1-bit optimizers.
void emulated_compress(const optim::MomentumSpan& span, device::Device& device);
void emulated_average(const optim::SentMomentum& sent, float* error, std::uint64_t* result, std::int64_t n,
                      device::Device& device);
void emulated_settle(float* error, float scale, std::int64_t n, device::Device& device);
void emulated_take(const optim::AgreedMomentum& agreed, const float* variance, float* momentum,
                   std::int64_t n, device::Device& device);
void emulated_refresh(const optim::FrozenLamb& rule, const optim::SpanUpdate& span,
                      const optim::AgreedMomentum* agreed, const float* weights, float* fresh, bool first,
                      const optim::RefreshResults& results, device::Device& device);

}  // namespace sherd::test
