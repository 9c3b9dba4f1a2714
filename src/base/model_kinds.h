#pragma once

#include <cstdint>

// Choices that the configuration names and lower rooms compute: each is here once, where all rooms see it.
namespace sherd {

/// How frequencies of rotary positions are changed for sequences longer than those that a model was trained
/// with: `rope_type` in Hugging Face's configurations.
enum class RotaryScaling : std::uint8_t {
  none,    ///< "default"
  linear,  ///< all divided by `factor` (position interpolation, Chen et al. 2023)
  llama3,  ///< low ones divided by `factor`, high ones kept, those between interpolated (Llama 3.1)
  yarn     ///< likewise, over a ramp of pairs instead of wave lengths; longer vectors (Peng et al. 2023)
};

/// What a router makes of its logits: `model.moe.router`.
enum class RouterScores : std::uint8_t {
  softmax,            ///< over all experts, before some are chosen (Switch, Mixtral, Qwen-MoE)
  softmax_of_chosen,  ///< over those chosen (Megatron-LM's default): "softmax_topk"
  sigmoid             ///< of each by itself (DeepSeek-V3)
};

/// Whose choice of an expert goes where it has more than its capacity: `model.moe.drop`.
enum class Drop : std::uint8_t {
  by_weight,   ///< those with the lowest weights (Megatron-LM's default)
  by_position  ///< first choices before second ones, and earlier tokens before later ones (GShard)
};

/// Which loss keeps experts evenly loaded: `model.moe.aux_loss_type`. Of E experts each of a micro-batch's T
/// tokens takes k; n_i choices fall on expert i, before any are dropped, and P(t, i) is its share of token
/// t's scores.
enum class BalanceLoss : std::uint8_t {
  /// "switch": E/(k·T²)·Σ_i n_i·Σ_t P(t, i) of each layer (Fedus et al. 2021, "Switch transformers").
  all_choices,
  /// "gshard": likewise E/T²·Σ_i n_i·Σ_t P(t, i), where n_i counts first choices alone (Lepikhin et al.
  /// 2020).
  first_choices,
  /// "hf": E·Σ_i (Σ_l n_li/(L·T))·(Σ_l Σ_t P_l(t, i)/(L·T)) over all L layers together, as Hugging Face has
  /// it.
  pooled
};

}  // namespace sherd
