#pragma once

#include <cstdint>
#include <variant>
#include <vector>

#include "engine/estimate/dry_run.h"

namespace sherd::engine {

/// The work of a rank at one moment of a pass: a kernel, or a call to other ranks.
using Work = std::variant<tensor::KernelWork, comm::CommWork>;

/// The work of a rank for one part of a model (nn::LayeredModel) and one micro-batch, and the memory that it
/// holds for it.
struct PartWork {
  std::vector<Work> forward;
  std::vector<Work> backward;  ///< with what is computed again
  /// The pass that preferences run before a step (DryRun::before_step()), where they do.
  std::vector<Work> reference;
  /// Elements of the parameters that this rank computes with, frozen ones and experts' apart.
  std::int64_t trained = 0, frozen = 0, experts = 0;
  std::int64_t in_fp8 = 0, experts_in_fp8 = 0;  ///< of them those of products in FP8
  bool tied = false;                            ///< some of them are an earlier part's too, and counted there
  std::uint64_t saved = 0;   ///< bytes of activations on the device that forward leaves for backward
  std::uint64_t output = 0;  ///< bytes that go to the next part
};

/// The work of each part of a model on rank 0 of its tensor, context and expert ranks, as `config` has them,
/// with nothing sharded or offloaded: what schedules, stages and tiers add, whoever prices a step adds. One
/// pass dry. Throws what DryRun throws, and Error{config} for a model that offers no list of parts.
std::vector<PartWork> record_parts(const config::Config& config, const ModelSource& model,
                                   const MakeBatch& batch);

}  // namespace sherd::engine
