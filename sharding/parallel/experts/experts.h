#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "autograd/experts.h"
#include "nn/layers.h"
#include "sharding/parallel/adapters/adapters.h"
#include "sharding/parallel/experts/dispatch.h"
#include "sharding/parallel/layout.h"

namespace sherd::parallel {

using autograd::Tape;
using autograd::Var;

/// The two layers of an expert.
enum class ExpertLayer : std::uint8_t { up, down };

/// Sizes and functions that all experts of a layer have.
struct ExpertOptions {
  std::int64_t hidden = 0, ffn_hidden = 0;  ///< widths of the stream, and within an expert
  std::int64_t experts = 0;
  bool gated = false;                                             ///< "up" is [gate; up]
  tensor::Glu glu = tensor::Glu::swiglu;                          ///< for experts that are gated
  tensor::Activation activation = tensor::Activation::gelu_tanh;  ///< for experts that are not gated
  bool bias = false;
  nn::Init init = nn::Init::normal(0, 0.02), output_init = nn::Init::normal(0, 0.02);
  /// Makes the adapter of a layer of that expert; there is none where this function, or its result, is null.
  std::function<std::shared_ptr<LinearAdapter>(std::int64_t expert, ExpertLayer layer)> adapter_of = {};
};

/// Feed-forward networks, each of which computes the rows that are sent to it. Every expert is a block of its
/// own, gathered where it has rows on any rank, and left alone otherwise (nn::Module::mark_on_demand()).
///
/// Parameters, of expert e: "e.up.weight" [ffn_hidden, or twice that where gated, hidden] and
/// "e.down.weight" [hidden, ffn_hidden], with biases where asked. Expert ranks (parallel.expert) share
/// experts out evenly, in order: Parameter::expert_rank. Tensor ranks cut each as they cut dense layers.
class Experts : public nn::Module {
 public:
  /// Throws Error{config} for sizes that do not divide.
  explicit Experts(const ExpertOptions& options, const Layout& layout = {});

  /// out[t] = Σ_j weights[t, j] · expert(rows[t]), over the choices that `plan` has places for. rows: this
  /// rank's tokens, [tokens, hidden]; weights: [tokens, top_k]. Of tensor ranks, which all have the same
  /// rows, each gives a part of the sum; its gradients of rows and weights are parts too. Collective over the
  /// ranks of the layout, whatever their plans: counts of rows first, which say who computes what.
  Var operator()(Tape& tape, const Var& rows, const Var& weights, const Dispatch& plan);

 private:
  class Expert;

  std::vector<std::vector<std::int64_t>> gather_counts(Tape& tape,
                                                       const std::vector<std::int64_t>& own) const;
  std::vector<bool> in_use(Tape& tape, const std::vector<std::int64_t>& rows);
  std::vector<bool> ask_in_use(Tape& tape, std::vector<std::int64_t> rows) const;
  Var compute(Tape& tape, const Var& rows, const std::vector<std::vector<std::int64_t>>& by_source);
  std::string label(const char* what) const;

  comm::Communicator* expert_ = nullptr;       ///< ranks that share experts out; null: this one alone
  comm::Communicator* expert_data_ = nullptr;  ///< ranks that have the same experts; null: likewise
  int rank_ = 0, ranks_ = 1;                   ///< among those that share experts out
  std::vector<std::shared_ptr<Expert>> all_;
  /// By micro-batch that backward will run again: which experts were in use.
  std::map<std::pair<std::uint64_t, std::uint64_t>, std::vector<bool>> runs_again_;
};

}  // namespace sherd::parallel
