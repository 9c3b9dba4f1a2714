#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "base/dtype.h"

namespace sherd::config {

enum class OptimizerType : std::uint8_t {
  adam,
  adamw,
  sgd,
  lion,
  adagrad,
  lamb,
  nvlamb,
  lars,
  onebitadam,
  onebitlamb,
  muon,
  adamw8bit
};

/// The factor of Muon's step for a matrix of so many rows and columns.
enum class MuonScale : std::uint8_t {
  original,           ///< √max(1, rows/columns) (Jordan et al. 2024)
  match_rms_adamw,    ///< 0.2·√max(rows, columns): the size of AdamW's steps (Liu et al. 2025)
  spectral_unclamped  ///< √(rows/columns) (Bernstein 2025)
};

/// As in configurations: "AdamW".
const char* name_of(OptimizerType type);
std::vector<OptimizerType> optimizer_types();

/// Shares of running means that stay with a step, each in [0, 1): of gradients, and of their squares (Lion:
/// of the momentum in the step, and of that which stays).
struct Betas {
  double beta1 = 0.9, beta2 = 0.999;
  bool operator==(const Betas&) const = default;
};

/// Betas, and what is added to the root of the mean of squares.
struct Moments : Betas {
  double eps = 1e-8;  ///< ≥ 0
  bool operator==(const Moments&) const = default;
};

// The keys of `params` that each type has beside `lr` and `weight_decay`; fields are called as the keys.

/// Adam, AdamW and AdamW8bit.
struct AdamOptions : Moments {
  bool bias_correction = true;
  bool adam_w_mode = true;  ///< false gives type Adam L2 decay; the others ignore it
  bool operator==(const AdamOptions&) const = default;
};

struct SgdOptions {
  double momentum = 0;    ///< ≥ 0
  bool nesterov = false;  ///< needs momentum > 0
  bool operator==(const SgdOptions&) const = default;
};

struct LionOptions : Betas {
  LionOptions() : Betas{0.9, 0.99} {}
  bool operator==(const LionOptions&) const = default;
};

struct AdagradOptions {
  double lr_decay = 0;                   ///< ≥ 0
  double initial_accumulator_value = 0;  ///< ≥ 0
  double eps = 1e-10;                    ///< ≥ 0
  bool operator==(const AdagradOptions&) const = default;
};

struct LambOptions : Moments {
  bool bias_correction = true;
  double max_coeff = 10, min_coeff = 0.01;  ///< bounds of the trust ratio, ≥ 0
  bool operator==(const LambOptions&) const = default;
};

struct NvLambOptions : Moments {
  bool bias_correction = true;
  double normalize_above = 0;  ///< ≥ 0; gradients are divided by their global norm where that is larger
  bool operator==(const NvLambOptions&) const = default;
};

struct LarsOptions {
  double momentum = 0.9;            ///< ≥ 0
  double eps = 1e-8;                ///< ≥ 0
  double trust_coefficient = 1e-3;  ///< ≥ 0
  bool clip = false;                ///< at most lr, as LARC
  bool operator==(const LarsOptions&) const = default;
};

struct OneBitAdamOptions : Moments {
  /// Steps, ≥ 1, after which replicas exchange compressed momentum, not gradients.
  std::int64_t freeze_step = 100000;
  bool operator==(const OneBitAdamOptions&) const = default;
};

struct OneBitLambOptions : Moments {
  std::int64_t freeze_step = 100000;        ///< as OneBitAdam's
  double max_coeff = 10, min_coeff = 0.01;  ///< bounds of the trust ratio, ≥ 0
  double coeff_beta = 0.9;                  ///< share of the mean of trust ratios that stays, in [0, 1)
  /// ≥ 0; bounds of the factor on that mean after freeze_step, and of its relative change in a step.
  double factor_max = 4, factor_min = 0.5, factor_threshold = 0.1;
  bool operator==(const OneBitLambOptions&) const = default;
};

/// The moments are those of the AdamW that takes what Muon leaves (optim::beside()).
struct MuonOptions : Moments {
  double momentum = 0.95;  ///< in [0, 1)
  bool nesterov = true;
  std::int64_t ns_steps = 5;  ///< Newton-Schulz iterations, 1 to 99
  /// X ← a·X + b·(X·Xᵀ)·X + c·(X·Xᵀ)²·X; c ≥ 0.
  std::array<double, 3> ns_coefficients = {3.4445, -4.7750, 2.0315};
  double ns_eps = 1e-7;  ///< > 0: what a matrix's Frobenius norm is at least taken for
  MuonScale adjust_lr_fn = MuonScale::original;
  /// ≥ 0: the rate of parameters that are left to AdamW; none: lr. (`muon_lr` overrides `lr` for the
  /// matrices.)
  std::optional<double> adam_lr{};
  bool operator==(const MuonOptions&) const = default;
};

/// An update rule with its parameters: what all types have, and the type's own options. Learning rates are
/// per step; a scheduler, when there is one, overrides `lr`. default_rule() makes one of a type.
struct OptimizerRule {
  OptimizerType type = OptimizerType::adamw;  ///< `type`, case ignored; it goes with the kind of options
  double lr = 1e-3;                           ///< `params.lr`, ≥ 0
  double weight_decay = 0;                    ///< `params.weight_decay`, ≥ 0
  std::variant<AdamOptions, SgdOptions, LionOptions, AdagradOptions, LambOptions, NvLambOptions, LarsOptions,
               OneBitAdamOptions, OneBitLambOptions, MuonOptions>
      options = {};

  /// The options, which are of that kind: rule.as<SgdOptions>().momentum. Throws Error{config} where the type
  /// has others.
  template <class Options>
  Options& as() {
    return const_cast<Options&>(static_cast<const OptimizerRule*>(this)->as<Options>());
  }
  template <class Options>
  const Options& as() const {
    const auto* own = std::get_if<Options>(&options);
    if (!own) other_options();
    return *own;
  }
  /// The betas, of types that have `params.betas`; null for others.
  Betas* betas();
  const Betas* betas() const;

  /// Whether anything is kept per element beside the weights.
  bool keeps_states() const { return type != OptimizerType::sgd || as<SgdOptions>().momentum > 0; }
  /// Adam's decay acts on the weight (p ← p − lr·wd·p) rather than on the gradient. DeepSpeed's rule: type
  /// AdamW, or type Adam unless adam_w_mode is false.
  bool decoupled_decay() const {
    return type == OptimizerType::adamw || type == OptimizerType::adamw8bit ||
           (type == OptimizerType::adam && as<AdamOptions>().adam_w_mode);
  }
  /// Replicas exchange momentum, after freeze_step.
  bool exchanges_momentum() const {
    return type == OptimizerType::onebitadam || type == OptimizerType::onebitlamb;
  }
  bool operator==(const OptimizerRule&) const = default;

  /// The rule of a group of type `other` that says nothing else: this one where it is of that type, else its
  /// lr and weight_decay with the defaults of `other`.
  OptimizerRule for_type(OptimizerType other) const;

 private:
  [[noreturn]] void other_options() const;
};

/// The rule of a section that gives the type alone.
OptimizerRule default_rule(OptimizerType type);
/// Whether all numbers of a rule are finite.
bool is_finite(const OptimizerRule& rule);

/// An entry of `optimizer.groups`: parameters with a rule of their own (PyTorch's param_groups).
struct OptimizerGroup : OptimizerRule {
  /// Shell patterns of full parameter names (fnmatch(3); `*` matches dots too). The first group of which one
  /// matches has the parameter.
  std::vector<std::string> match;
  bool operator==(const OptimizerGroup&) const = default;
};

/// Section `optimizer`: the rule of the parameters that no group has, which are group 0, and the groups 1, 2,
/// …
struct Optimizer : OptimizerRule {
  bool given = false;  ///< false: no section in the files; the defaults are Sherd's choice
  std::vector<OptimizerGroup> groups;
  bool operator==(const Optimizer&) const = default;
};

/// Scheduler type `LRRangeTest` (Smith, "Cyclical learning rates for training neural networks", 2017).
struct LrRangeTest {
  double min_lr = 1e-3;           ///< `lr_range_test_min_lr`
  std::int64_t step_size = 2000;  ///< `lr_range_test_step_size`, steps, > 0
  double step_rate = 1.0;         ///< `lr_range_test_step_rate`
  bool staircase = false;         ///< `lr_range_test_staircase`
  bool operator==(const LrRangeTest&) const = default;
};

/// Scheduler type `OneCycle`.
struct OneCycle {
  double cycle_min_lr = 0, cycle_max_lr = 0;  ///< required keys
  double decay_lr_rate = 0;
  std::int64_t cycle_first_step_size = 2000;   ///< steps, > 0
  std::int64_t cycle_second_step_size = 2000;  ///< steps, ≥ 0; default the first
  std::int64_t cycle_first_stair_count = 0;    ///< 0: no stairs
  std::int64_t cycle_second_stair_count = 0;   ///< default the first
  std::int64_t decay_step_size = 0;            ///< steps; 0: no decay after the cycle
  bool cycle_momentum = true;  ///< cycles β1 (β2 becomes 0.99) where the optimizer has betas
  double cycle_min_mom = 0.8, cycle_max_mom = 0.9;
  double decay_mom_rate = 0;
  bool operator==(const OneCycle&) const = default;
};

enum class WarmupType : std::uint8_t { log, linear };

/// Scheduler types `WarmupLR` and, with total_num_steps > 0, `WarmupDecayLR`.
struct Warmup {
  /// 0: WarmupLR; > 0: WarmupDecayLR, linear to warmup_min_lr at this step.
  std::int64_t total_num_steps = 0;
  double warmup_min_lr = 0;
  std::optional<double> warmup_max_lr;   ///< nullopt: the optimizer's lr
  std::int64_t warmup_num_steps = 1000;  ///< steps, > 0; the formulas use at least 2
  WarmupType warmup_type = WarmupType::log;
  bool operator==(const Warmup&) const = default;
};

/// Scheduler type `WarmupCosineLR`: factors on the optimizer's lr.
struct WarmupCosine {
  std::int64_t total_num_steps = 0;  ///< required key, steps
  double warmup_min_ratio = 0;
  std::int64_t warmup_num_steps = 1000;  ///< steps, > 0; the formulas use at least 2
  double cos_min_ratio = 1e-4;
  WarmupType warmup_type = WarmupType::log;
  bool operator==(const WarmupCosine&) const = default;
};

/// How a schedule of transformers' goes on after its linear warmup from 0.
enum class RateShape : std::uint8_t {
  linear,               ///< linearly to 0 at the last step
  cosine,               ///< half a cosine to 0 at the last step
  constant_with_warmup  ///< stays
};

/// Scheduler types `linear`, `cosine` and `constant_with_warmup`, which transformers' Trainer calls
/// `lr_scheduler_type`: factors on the optimizer's lr.
struct TrainerSchedule {
  RateShape shape = RateShape::linear;
  std::int64_t total_num_steps = 0;   ///< required key, steps; not of constant_with_warmup
  std::int64_t warmup_num_steps = 0;  ///< steps, ≥ 0
  bool operator==(const TrainerSchedule&) const = default;
};

/// Section `scheduler`; monostate keeps the optimizer's lr. Formulas: optim/lr_schedule.h.
using Scheduler = std::variant<std::monostate, LrRangeTest, OneCycle, Warmup, WarmupCosine, TrainerSchedule>;

/// Keys of section `fp16` that steer the loss scale. State machine: optim/loss_scaler.h.
struct LossScaling {
  double loss_scale = 0;                  ///< 0: dynamic; > 0: static. Finite
  int initial_scale_power = 16;           ///< the dynamic scale starts at 2^this
  std::int64_t loss_scale_window = 1000;  ///< clean steps before the scale doubles, > 0
  int hysteresis = 2;                     ///< overflows before the scale halves, ≥ 1
  bool consecutive_hysteresis = false;    ///< refill the hysteresis on every clean step
  double min_loss_scale = 1;              ///< floor of the dynamic scale; an overflow there ends the run
  bool dynamic() const { return loss_scale == 0; }
  double initial_scale() const { return dynamic() ? std::ldexp(1.0, initial_scale_power) : loss_scale; }
  bool operator==(const LossScaling&) const = default;
};

/// Sections `fp16`, `bf16` and `data_types`. Masters are fp32 always, moments as training.moments_dtype says.
struct Precision {
  DType compute = DType::f32;  ///< type of parameters and activations: f32, bf16 or f16
  LossScaling fp16;            ///< in use when compute is f16
  /// `bf16.check_grad_overflow`: skip a bf16 step whose gradients hold inf or NaN.
  bool check_grad_overflow = true;
  std::optional<DType> grad_accum_dtype;         ///< `data_types.grad_accum_dtype`; nullopt: compute
  std::optional<DType> communication_data_type;  ///< top-level key, f32, bf16 or f16; nullopt: compute

  DType gradient_dtype() const { return grad_accum_dtype.value_or(compute); }
  DType communication_dtype() const { return communication_data_type.value_or(compute); }
  bool operator==(const Precision&) const = default;
};

/// The recipes of FP8, in the order of tensor::fp8_recipes(), which says what they are.
enum class Fp8RecipeName : std::uint8_t { current, blockwise, rowwise };

/// Section `fp8`: products of linear layers, and of experts, in FP8 (docs/fp8.md). The head, tables, routers,
/// gates and adapters never are.
struct Fp8 {
  bool enabled = false;  ///< beside bf16
  Fp8RecipeName recipe = Fp8RecipeName::blockwise;
  /// Shell patterns (fnmatch(3)) of full names of weights, or of their modules, whose products stay in bf16.
  std::vector<std::string> exclude;
  /// Ranks that share parameters out (stage 3) gather the weights of such products in FP8; not with rowwise.
  bool gather = true;
  bool gathers() const { return enabled && gather && recipe != Fp8RecipeName::rowwise; }
  bool operator==(const Fp8&) const = default;
};

}  // namespace sherd::config
