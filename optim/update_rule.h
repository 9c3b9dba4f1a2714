#pragma once

// This folder updates weights: rules on flat spans, schedules of rates, loss scale and clipping. It knows no
// ranks and no modules.
//
// A rule's formula stands once, in rules/, and runs on every instruction set (isa/) and on GPUs (cuda/).
// describe() says what a rule keeps, from which memory, NVMe traffic, checkpoints and estimates follow.
//
// To change, look at:
// - add an optimizer: docs/recipes.md, "An optimizer"; rules/lion.h is the shortest, rules/lamb.h takes
//   norms; the list: rules/list.h
// - loops over elements, and how fp32 masters round to bf16: isa/streams.h, isa/split.cpp, cuda/streams.cuh,
//   all as round_master_to_bf16() (base/dtype.h) says; split masters (split_master.h) need this rounding to
//   be rebuilt
// - norms that LAMB and LARS take: parameter_norms.cpp; over ranks: engine/update/rules/parameter_norms.cpp
// - Muon's iteration: muon.h; moments in 8 bits, their map and codes: quantized.h, isa/quantized.cpp
// - pruned weights, which stay −0 whatever a rule does: pruned.h
// - momentum in one bit: one_bit.h, isa/one_bit.cpp; 1-bit LAMB's ratios: one_bit_lamb.h
// - schedules of rates: lr_schedule.cpp; loss scaling: loss_scaler.cpp; clipping and averages: clipping.h

#include <cstdint>

#include "base/arena.h"
#include "base/cpu_isa.h"
#include "base/dtype.h"
#include "base/random.h"
#include "config/optimizer.h"
#include "optim/clipping.h"

namespace sherd::optim {

/// A rule and its hyper-parameters for one step. lr and the betas may be changed between steps (schedules).
using Hyper = config::OptimizerRule;

/// A flat run of elements and everything the rule reads and writes for them. The caller owns all memory;
/// nothing may overlap, but param may be null where the master itself is the parameter.
///
/// Masters come in two forms, which give the same bits everywhere: fp32 in `master`, with or without a 16-bit
/// copy in `param`; or split (optim/split_master.h), `low` set and `master` null, where the bf16 `param` is
/// the master's high half and is read as well as written.
struct SpanUpdate {
  float* master = nullptr;       ///< fp32 masters; null with split ones
  std::uint16_t* low = nullptr;  ///< the 16 low bits of split masters; param_dtype is bf16 then
  const void* grad = nullptr;
  DType grad_dtype = DType::f32;          ///< f32, bf16 or f16
  void* moments[2] = {nullptr, nullptr};  ///< as many as the rule keeps (describe(), optim/description.h)
  /// f32, bf16 with stochastic rounding, or u8: codes of optim/quantized.h, Adam's only. The span begins with
  /// a block then.
  DType moment_dtype = DType::f32;
  float* scales[2] = {nullptr, nullptr};  ///< u8 moments: of each block, for each state
  RandomKey rounding{};                   ///< bf16 moments: the parameter's stream, {seed, stable_hash(name)}
  std::int64_t first_element = 0;         ///< bf16 moments: the first element's index in the whole parameter
  void* param = nullptr;  ///< 16-bit parameter: bf16 to nearest with ties away from zero, fp16 to even
  DType param_dtype = DType::f32;  ///< f32 (no 16-bit parameter), bf16 or f16
  std::int64_t n = 0;              ///< elements
  double grad_factor = 1;          ///< gradients are multiplied by this, rounded to fp32 (gradient_factor())
  bool decay = true;               ///< false: weight decay leaves this span alone
  double trust = 1;                ///< trust_ratio() of the parameter, for rules that take one
  bool measures = false;           ///< the vector that trust_ratio() measures comes in place of the weight
  bool agreed = false;             ///< momentum comes in place of the gradient (optim/one_bit.h)
};

/// Elements [begin, begin + n) of `span`.
SpanUpdate part_of(const SpanUpdate& span, std::int64_t begin, std::int64_t n);

/// One fused pass: gradient·factor → moments → master → 16-bit copy. `step` counts from 1. The formulas are
/// those of optim/rules/, in fp32 with one rounding per operation, in the order written there (g:
/// gradient·factor, p: master). Their scalars are formed in double and rounded once.
///
/// bf16 moments are rounded stochastically as they are stored; the weight moves by their fp32 values. Below
/// an fp32 moment 16 random bits are added and then the 16 low bits are cut, so that it is rounded away from
/// zero with a chance of exactly the part cut off, and means that move by less than a bf16 step (β2!) are
/// kept in expectation (Gupta et al., "Deep learning with limited numerical precision", 2015; Croci et al.,
/// "Stochastic rounding: implementation, error analysis and applications", 2022). Element e (its index in the
/// whole parameter) stands in tile t = ⌊e/4096⌋, row r = ⌊e/64⌋ mod 64, column c = e mod 64; moment k takes
/// (x(2t, c) + x(2t+1, r)) mod 2¹⁶, where x(s, i) is half of word 2k + ⌊i/32⌋ of block 16·s + ⌊(i mod 32)/2⌋
/// of the Philox stream (base/random.h) rounding.at(0x6d6f6d656e74).at(step): the lower half for even i, else
/// the upper one. Bits of one element are independent from step to step; those of different elements or
/// moments in one step pairwise, so that the errors of a sum have the variance of independent ones.
///
/// Elementwise: cutting spans anywhere, any number of threads and any instruction set give the same bits.
/// Threads must run with flush-to-zero (Arena's do). Returns false when an updated weight, its 16-bit form or
/// a moment is NaN or infinite, or a bf16 moment so large that it might round to infinity; the span is
/// written all the same. Throws Error{usage} for missing pointers or dtypes. `isa`, here and in this folder's
/// other functions: whose loops run; tests name another that the processor has.
bool update(const SpanUpdate& span, const Hyper& hyper, std::int64_t step, Arena& arena,
            CpuIsa isa = cpu_isa());

}  // namespace sherd::optim
