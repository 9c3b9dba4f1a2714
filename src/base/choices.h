#pragma once

#include <cstdint>

// Choices that the configuration names and lower rooms compute: each is here once, where all rooms see it.
namespace sherd {

/// The values that are not kept between forward and backward, which computes them again:
/// `training.recompute`.
enum class Recompute : std::uint8_t {
  none,
  /// All that cheap operations and attention's core can make again: norms, activations, attention's output
  /// (after Korthikanti et al. 2022).
  selective,
  full  ///< every transformer block from its input (Chen et al., "Sublinear memory cost", 2016)
};

/// The order in which ranks' contributions are added up: `parallel.reduction`. Only sums of floating types
/// differ, and only between several ranks.
enum class Reduction : std::uint8_t {
  ordered,  ///< rank order, in fp32: the same bits on every backend and for any number of ranks
  /// As the library that carries the call adds them: NCCL for tensors in GPU memory, in the communication
  /// type; MPI for messages of fp32 and fp64, as its algorithm orders them. Ordered where there is none:
  /// between ranks that share memory, over TCP, and for 16-bit sums over MPI, which has no such types. Agrees
  /// with `ordered` to rounding; one rank accumulates gradients in place.
  native
};

/// How ranks that hold pieces of the same sequences attend to each other's: `parallel.context_method`.
enum class ContextMethod : std::uint8_t {
  ring,    ///< keys and values go around (Liu et al. 2023, "Ring Attention"); any number of heads
  ulysses  ///< all-to-all: each rank takes whole sequences of its heads (Jacobs et al. 2023)
};

/// How frequencies of rotary positions are changed for sequences longer than those that a model was trained
/// with: `rope_type` in Hugging Face's configurations.
enum class RotaryScaling : std::uint8_t {
  none,      ///< "default"
  linear,    ///< all divided by `factor` (position interpolation, Chen et al. 2023)
  llama3,    ///< low ones divided by `factor`, high ones kept, those between interpolated (Llama 3.1)
  yarn,      ///< likewise, over a ramp of pairs instead of wave lengths; longer vectors (Peng et al. 2023)
  longrope,  ///< each divided by a factor of its own, for long sequences by others (LongRoPE, Ding et al.
             ///< 2024)
  dynamic    ///< as none within the model's positions, beyond which transformers changes them (NTK)
};

/// How a router turns logits into scores: `model.moe.router`.
enum class RouterScores : std::uint8_t {
  softmax,            ///< over all experts, before some are chosen (Switch, Mixtral, Qwen-MoE)
  softmax_of_chosen,  ///< over those chosen (Megatron-LM's default): "softmax_topk"
  sigmoid             ///< each expert by itself (DeepSeek-V3)
};

/// The choices of an expert that are dropped where it has more than its capacity: `model.moe.drop`.
enum class Drop : std::uint8_t {
  by_weight,   ///< the lowest weights go (Megatron-LM's default)
  by_position  ///< first choices stay before second ones, earlier tokens before later ones (GShard)
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

/// How the weights of a model that are not trained are kept: `training.base_format`. A block of consecutive
/// elements shares a scale (tensor/formats/stored_format.h).
enum class StoredFormat : std::uint8_t {
  compute,  ///< in the type that the run computes in; no blocks
  bf16,
  int8,
  nf4,  ///< 16 quantiles of a normal distribution (Dettmers et al. 2023, "QLoRA")
  fp4,
  nf4_double,  ///< scales are in 8 bits, too: `training.base_double_quant`
  fp4_double,
  mxfp4,  ///< E2M1 with scales that are powers of two (OCP Microscaling 1.0)
  fp8     ///< E4M3 with scales that are powers of two
};
inline constexpr int stored_formats = 9;

}  // namespace sherd
