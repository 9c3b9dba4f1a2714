#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "autograd/tape.h"
#include "tensor/tensor.h"

// Losses of whole texts, of what a model finds for each: how likely it is, or a score. Preferences are
// learned by them (engine/preference/).
namespace sherd::nn {

/// The scores that a model found for the texts of a micro-batch, by text.
struct TextScores {
  /// Σ of the log-probabilities of a text's targets, in nats, or its score where the model has a head for
  /// one.
  std::vector<double> log_prob;
  /// The same, with a text's targets beyond as many as the shorter of its pair has counting
  /// TextLoss::tail_weight() times.
  std::vector<double> weighted;
  std::vector<std::int64_t> targets;  ///< how many these are; 0 of a score
};

/// The derivatives of a loss by TextScores.
struct TextGradients {
  std::vector<double> log_prob, weighted;
};

/// A loss of the texts of a micro-batch, which is computed on the processor: it is a function of few numbers.
/// The batch has {"sides": int32 [texts], where the processor reads it}, what each text is to the loss (0: no
/// part of it), and what else a loss asks for.
class TextLoss {
 public:
  virtual ~TextLoss() = default;
  /// As TextScores::weighted says.
  virtual double tail_weight() const { return 1; }
  /// The mean loss of the micro-batch, 0 where no text is part of it; writes its derivatives, which come as
  /// zeros.
  virtual double operator()(const tensor::Batch& batch, const TextScores& scores,
                            TextGradients& gradients) = 0;
};

/// A model that finds out about texts, and learns by a TextLoss.
class TextModel {
 public:
  virtual ~TextModel() = default;
  /// Sets the loss of batches with "sides" from now on. Called alike on all ranks.
  virtual void set_text_loss(std::shared_ptr<TextLoss> loss) = 0;
  /// Finds the scores of the texts of a batch with "sides", on a tape that does not record: they are there on
  /// every rank that has part of the model. `without_adapter`: as the model was without it. Collective over
  /// these ranks.
  virtual TextScores text_scores(autograd::Tape& tape, const tensor::Batch& batch, bool without_adapter) = 0;
};

}  // namespace sherd::nn
