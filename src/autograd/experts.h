#pragma once

#include <functional>
#include <span>
#include <vector>

#include "autograd/ops.h"

// The operations that layers of experts are made of (sharding/parallel/experts/moe.h puts them together).
namespace sherd::autograd {

/// x·wᵀ + b in fp32 (fp64 for fp64), whatever their dtype: a router's logits. x: [tokens, in]; w: [experts,
/// in]; b: [experts] or undefined; the result: [tokens, experts]. Gradients are formed in fp32 too, and round
/// once.
Var router_logits(const Var& x, const Var& w, const Var& b = {});

/// A router's choice.
struct Routed {
  Var weights;                           ///< [tokens, top_k], fp32 or fp64
  std::vector<std::int32_t> chosen;      ///< [tokens, top_k], of the most preferred first; -1: none
                                         ///< (empty in a dry run, whose tokens take all experts in turn)
  std::vector<std::int64_t> per_expert;  ///< how many of these each expert has
};

/// The factors that auxiliary losses linear in Σ_t P(t, i), and the z-loss, give these sums. P: the
/// softmax, or sigmoids over their sum.
struct RouterLossFactors {
  std::vector<double> balance;  ///< [experts], of Σ_t P(t, i); empty: none
  double z = 0;                 ///< factor of Σ_t (log Σ exp logits)² (Zoph et al. 2022, "ST-MoE")
};
/// These sums over the tokens of logits [tokens, experts].
struct RouterSums {
  std::vector<double> probabilities;
  double z = 0;
};
/// Waits for the device; zeros on a meta device. `filling`: as in route().
RouterSums router_sums(Tape& tape, const Tensor& logits, const tensor::Routing& routing,
                       const std::vector<bool>& filling = {});

/// Chooses experts by logits of [tokens, experts]; `bias` ([experts] in their dtype, may be undefined) counts
/// for the choice alone. In backward the gradients of the losses that `losses` tells then go to the logits,
/// times Tape::loss_seed; null: none. `filling`: by row, whether it holds no token: such a row chooses -1,
/// counts nowhere, and its logits have no gradient; empty: all hold one. Waits for the device.
Routed route(const Var& logits, const Tensor& bias, const tensor::Routing& routing,
             std::function<RouterLossFactors()> losses = nullptr, std::vector<bool> filling = {});

/// Numbers of rows, on the device. A dry run has none, and `values` may be empty.
Tensor row_numbers(Tape& tape, const Shape& shape, std::span<const std::int32_t> values);
/// The rows of x that `rows` (int32) names. x: [n, width]; the result: [rows.numel(), width]. Gradients of
/// one row are added in the order of `rows`.
Var take_rows(const Var& x, const Tensor& rows);
/// x in another order: row i of the result is row `order[i]` of x; `inverse` leads back. Both int32, on the
/// device.
Var permute_rows(const Var& x, const Tensor& order, const Tensor& inverse);

/// x cut into runs of rows, which share its memory: the first counts[0] rows, and so on, without runs of
/// none. x: [Σ counts, width]. Each run has to be used, and takes a gradient where x does.
std::vector<Var> split_rows(const Var& x, std::span<const std::int64_t> counts);
/// Runs of rows, one behind the other, as split_rows() would cut them; at least one.
Var join_rows(std::span<const Var> runs);

/// out[t] = Σ_j weights[t, j]·rows[places[t, j]] without places of -1; see Kernels::combine_rows().
Var combine_rows(const Var& rows, const Tensor& places, const Var& weights);

/// autograd::linear() of rows from several sources, x's runs of `sources` rows, one after the other: where
/// the parameters' gradients are summed apart for each (Parameter::grad_sources, which is as many), each run
/// gives a contribution of its own, in the order of the sources; else all rows together give one. x: [Σ
/// sources, in].
/// Where not `adds_bias`, b is left to another rank's part of a sum, and only its gradient is found.
Var linear_by_source(const Var& x, const Var& w, const Var& b, Activation activation,
                     std::vector<std::int64_t> sources, bool adds_bias = true);

}  // namespace sherd::autograd
