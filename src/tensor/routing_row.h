#pragma once

#include <cmath>
#include <cstdint>

#include "tensor/routing.h"

// One token's routing, written once for processors and GPUs.

#if defined(__CUDACC__)
#define SHERD_ROUTING __host__ __device__ inline
#else
#define SHERD_ROUTING inline
#endif

namespace sherd::tensor {

/// A row of logits, and what is made of it.
template <class C>
struct RoutingRow {
  const C* logits;
  const C* bias;  ///< counts for the choice alone; may be null
  int experts;
  C* scores;             ///< [experts]
  std::int32_t* chosen;  ///< [top_k]
  C* weights;            ///< [top_k]
};

template <class C>
SHERD_ROUTING C log_sum_exp(const C* logits, int experts) {
  C top = logits[0], sum = 0;
  for (int i = 1; i < experts; ++i) top = logits[i] > top ? logits[i] : top;
  for (int i = 0; i < experts; ++i) sum += std::exp(logits[i] - top);
  return top + std::log(sum);
}

template <class C>
SHERD_ROUTING void make_scores(const RoutingRow<C>& row, RouterScores kind) {
  if (kind == RouterScores::sigmoid) {
    for (int i = 0; i < row.experts; ++i) row.scores[i] = C{1} / (C{1} + std::exp(-row.logits[i]));
    return;
  }
  C top = row.logits[0], sum = 0;
  for (int i = 1; i < row.experts; ++i) top = row.logits[i] > top ? row.logits[i] : top;
  for (int i = 0; i < row.experts; ++i) sum += row.scores[i] = std::exp(row.logits[i] - top);
  for (int i = 0; i < row.experts; ++i) row.scores[i] /= sum;
}

/// The numbers by which experts are compared. Without bias and groups logits do, which tell apart what scores
/// round to one value. A NaN comes last.
template <class C>
SHERD_ROUTING C preference(const RoutingRow<C>& row, const Routing& how, int expert) {
  const C x = row.bias || how.groups > 1 ? row.scores[expert] + (row.bias ? row.bias[expert] : C{0})
                                         : row.logits[expert];
  return x == x ? x : -static_cast<C>(HUGE_VALF);
}

/// A bit for each group that is looked at.
template <class C>
SHERD_ROUTING std::uint64_t open_groups(const RoutingRow<C>& row, const Routing& how) {
  if (how.top_groups == how.groups) return ~std::uint64_t{0};
  const int size = row.experts / how.groups;
  C values[most_expert_groups];
  for (int g = 0; g < how.groups; ++g) {
    C first = preference(row, how, g * size), second = -static_cast<C>(HUGE_VALF);
    for (int i = 1; i < size; ++i) {
      const C x = preference(row, how, g * size + i);
      if (x > first)
        second = first, first = x;
      else if (x > second)
        second = x;
    }
    values[g] = how.scores == RouterScores::sigmoid && size > 1 ? first + second : first;
  }
  std::uint64_t open = 0;
  for (int taken = 0; taken < how.top_groups; ++taken) {
    int best = -1;
    for (int g = 0; g < how.groups; ++g)
      if (!(open >> g & 1) && (best < 0 || values[g] > values[best])) best = g;
    open |= std::uint64_t{1} << best;
  }
  return open;
}

template <class C>
SHERD_ROUTING void choose(const RoutingRow<C>& row, const Routing& how) {
  const std::uint64_t open = open_groups(row, how);
  const int size = row.experts / how.groups;
  C last = 0;
  for (int j = 0; j < how.top_k; ++j) {
    int best = -1;
    C highest = 0;
    for (int i = 0; i < row.experts; ++i) {
      if (!(open >> (i / size) & 1)) continue;
      const C x = preference(row, how, i);
      // Behind those taken: lower, or as high and later.
      if (j > 0 && !(x < last || (x == last && i > row.chosen[j - 1]))) continue;
      if (best < 0 || x > highest) best = i, highest = x;
    }
    row.chosen[j] = best, last = highest;
  }
}

/// The sum of the chosen experts' scores; DeepSeek-V3 keeps it from 0, as it has to be where a bias or groups
/// keep the best experts out.
template <class C>
SHERD_ROUTING C chosen_sum(const C* scores, const std::int32_t* chosen, const Routing& how) {
  C sum = static_cast<C>(how.scores == RouterScores::sigmoid ? 1e-20 : 1e-30);
  for (int j = 0; j < how.top_k; ++j) sum += scores[chosen[j]];
  return sum;
}

/// Scores, choice and weights of one token.
template <class C>
SHERD_ROUTING void route_row(const RoutingRow<C>& row, const Routing& how) {
  make_scores(row, how.scores);
  choose(row, how);
  const C scale = static_cast<C>(how.scale);
  if (how.scores == RouterScores::softmax_of_chosen) {
    // The highest comes first, unless a bias decided.
    C top = row.logits[row.chosen[0]], sum = 0;
    for (int j = 1; j < how.top_k; ++j) {
      const C x = row.logits[row.chosen[j]];
      top = x > top ? x : top;
    }
    for (int j = 0; j < how.top_k; ++j) sum += row.weights[j] = std::exp(row.logits[row.chosen[j]] - top);
    for (int j = 0; j < how.top_k; ++j) row.weights[j] = row.weights[j] / sum * scale;
    return;
  }
  const C sum = how.normalize ? chosen_sum(row.scores, row.chosen, how) : C{1};
  for (int j = 0; j < how.top_k; ++j) row.weights[j] = row.scores[row.chosen[j]] / sum * scale;
}

/// The result of route_row(), and the gradients that reached it.
template <class C>
struct RoutingGradientRow {
  const C* logits;
  const C* scores;
  const std::int32_t* chosen;
  const C* dweights;  ///< [top_k]; may be null
  const C* balance;   ///< [experts]; may be null
  C z;
  int experts;
  C* dlogits;
};

/// dlogits, from where it holds the gradients of scores.
template <class C>
SHERD_ROUTING void through_scores(const RoutingGradientRow<C>& row, RouterScores kind) {
  if (kind == RouterScores::sigmoid) {
    for (int i = 0; i < row.experts; ++i) row.dlogits[i] *= row.scores[i] * (C{1} - row.scores[i]);
    return;
  }
  C sum = 0;
  for (int i = 0; i < row.experts; ++i) sum += row.dlogits[i] * row.scores[i];
  for (int i = 0; i < row.experts; ++i) row.dlogits[i] = row.scores[i] * (row.dlogits[i] - sum);
}

/// Adds the gradient of Σ balance·P to those of scores; P: the softmax, or sigmoids over their sum.
template <class C>
SHERD_ROUTING void add_balance(const RoutingGradientRow<C>& row, RouterScores kind) {
  if (!row.balance) return;
  C whole = 1, mean = 0;
  if (kind == RouterScores::sigmoid) {
    whole = 0;
    for (int i = 0; i < row.experts; ++i) whole += row.scores[i], mean += row.balance[i] * row.scores[i];
    mean /= whole;
  }
  for (int i = 0; i < row.experts; ++i) row.dlogits[i] += (row.balance[i] - mean) / whole;
}

template <class C>
SHERD_ROUTING void route_row_backward(const RoutingGradientRow<C>& row, const Routing& how) {
  const C scale = static_cast<C>(how.scale);
  for (int i = 0; i < row.experts; ++i) row.dlogits[i] = 0;
  const bool late = how.scores == RouterScores::softmax_of_chosen;
  const auto chosen_score = [&](int j) { return row.scores[row.chosen[j]]; };
  // Weights that are quotients of a sum: its part of the gradient goes to all of them.
  C mean = 0, sum = 1;
  if (late || how.normalize) {
    sum = chosen_sum(row.scores, row.chosen, how);
    for (int j = 0; row.dweights && j < how.top_k; ++j) mean += row.dweights[j] * chosen_score(j);
    mean /= sum;
  }
  if (!late) {
    for (int j = 0; row.dweights && j < how.top_k; ++j)
      row.dlogits[row.chosen[j]] = scale * (row.dweights[j] - mean) / sum;
    add_balance(row, how.scores);
    through_scores(row, how.scores);
  } else {
    // The softmax over the chosen ones is that over all, made to add up to 1.
    add_balance(row, how.scores);
    through_scores(row, how.scores);
    for (int j = 0; row.dweights && j < how.top_k; ++j)
      row.dlogits[row.chosen[j]] += scale * chosen_score(j) / sum * (row.dweights[j] - mean);
  }
  if (row.z == 0) return;
  const C lse = log_sum_exp(row.logits, row.experts);
  for (int i = 0; i < row.experts; ++i) row.dlogits[i] += row.z * C{2} * lse * std::exp(row.logits[i] - lse);
}

}  // namespace sherd::tensor
