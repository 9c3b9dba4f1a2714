#pragma once

// This folder has what preferences are learned by.
//
//   losses.h            the losses of a pair, and of a text that is judged by itself, with their derivatives
//   preference_loss.h   the loss of a micro-batch, and what people watch of it
//   preference_run.h    what a step needs before it: the reference's log-probabilities, and numbers of the
//                       whole global batch
//   reference_file.h    log-probabilities that were computed once; reference_copy.h: a second model
//
// The model's side is nn/text_loss.h, its head sharding/parallel/text_loss.h, the rows
// data/packing/preference_samples.h.

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "engine/preference/preference_loss.h"
#include "engine/preference/reference_file.h"
#include "engine/token_data.h"

namespace sherd::engine {

/// How often a step runs each micro-batch forward before it is learned: through the reference, unless its
/// log-probabilities were computed once, and for numbers of the whole batch (KTO's baseline, partners).
int passes_before_step(const config::Config& config);

/// Gives the micro-batches of a run that learns preferences what their loss reads beside the texts. One per
/// rank, used from its thread; every call is collective.
class PreferenceRun {
 public:
  /// `reference`: of config::Reference::copy, an engine with the model as it began. All outlive this. Throws
  /// Error{config} where the engine's model is no nn::TextModel.
  PreferenceRun(Engine& engine, std::shared_ptr<const TokenData> data, Engine* reference = nullptr);

  /// The micro-batches of the coming step, from `next`, in order. The reference's passes, and those of the
  /// policy that say something of the whole global batch, run before. Precomputed log-probabilities are
  /// computed here, before the first step, unless their file is there and the model finds the same. Throws
  /// what evaluations throw, Error{io} or Error{data} for that file, Error{config} for one of another run.
  std::function<tensor::Batch()> begin_step(const std::function<tensor::Batch()>& next);
  /// Means over the step's global batch, by TRL's names.
  MetricMeans end_step();

  struct Evaluated {
    double loss = 0;
    MetricMeans metrics;
  };
  /// One pass over a loader, whose position it moves.
  Evaluated evaluate(data::Loader& loader);

  /// Writes no file from here on: the run is looked at, and not trained.
  void write_nothing() { writes_ = false; }
  /// Adds the reference's checksum to a checkpoint; a run that restores it is refused with another reference.
  void save(ClientState& client) const;
  void restore(const ClientState& client);

 private:
  using Batches = std::vector<tensor::Batch>;
  nn::TextScores scores(Engine& engine, const tensor::Batch& batch, bool without_adapter) const;
  enum class Answers { own, of_others };
  void add_reference(tensor::Batch& batch, Answers answers);
  PreferenceStep before(Batches& batches);
  double baseline(Batches& batches);
  double sft_scale(const Batches& batches) const;
  void add_partners(Batches& batches) const;
  std::vector<std::vector<double>> of_all_ranks(const std::vector<std::vector<double>>& mine) const;
  ReferenceFacts facts() const;
  void prepare_reference();
  bool agrees(const ReferenceValues& values);
  ReferenceValues compute();
  bool speaks() const { return engine_.dist().rank() == 0; }

  Engine& engine_;
  nn::TextModel& model_;
  std::shared_ptr<const TokenData> data_;
  Engine* copy_;
  config::Reference reference_;
  ReferenceFile file_;
  std::optional<ReferenceValues> values_;  ///< of precomputed ones, once they are there
  bool writes_ = true;
  std::string restored_;  ///< what a checkpoint said of them; empty: none did
};

}  // namespace sherd::engine
