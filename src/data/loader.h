#pragma once

#include <cstdint>
#include <iterator>
#include <limits>
#include <memory>
#include <optional>

#include "data/packing/samples.h"
#include "tensor/tensor.h"

namespace sherd::data {

/// The data-parallel rank that loads, and how much at a time.
struct LoaderRank {
  std::int64_t micro_batch = 1;  ///< samples per batch of one rank
  int rank = 0, world = 1;
  /// False: nobody here needs the samples, as on a pipeline's stages between the first and the last. Batches
  /// are then empty, and nothing is read; the position moves as ever.
  bool reads = true;
};

/// A micro-batch of an evaluation, in which some samples only fill up the number that the ranks take
/// together.
struct CountedBatch {
  tensor::Batch batch;
  std::int64_t samples = 0;  ///< so many of its samples count
};

/// How far a loader has come. Shared by the loader and by whoever saves and restores that (the Engine's
/// checkpoints), so that either may go first.
class LoaderPosition {
 public:
  /// Far from where arithmetic with positions would overflow.
  static constexpr std::int64_t most = std::int64_t{1} << 60;

  /// Samples that all ranks together have consumed.
  std::int64_t samples() const { return samples_; }
  /// Throws Error{usage} for a position outside [0, most].
  void set(std::int64_t samples);

  /// Samples of one pass where that depends on the number of ranks, which round it; else 0.
  std::int64_t epoch_samples() const { return epoch_samples_; }
  /// Called by the loader, once.
  void set_epoch_samples(std::int64_t samples) { epoch_samples_ = samples; }
  /// Goes to the same epoch, and as far into it, as `samples` were where an epoch had `epoch_samples`. Beyond
  /// the end of an epoch here is the beginning of the next. Throws as set() does.
  void set(std::int64_t samples, std::int64_t epoch_samples);

 private:
  std::int64_t samples_ = 0, epoch_samples_ = 0;
};

/// Gives one rank its micro-batches. All ranks walk one global order of samples: batch k of a run is the next
/// micro_batch·world samples of it, and rank r takes the r-th contiguous slice. So the samples of an
/// optimizer step depend on their position in the order only, not on how many ranks share the work. One
/// thread per loader.
///
///     for (auto& batch : loader) …  runs to the end of the epoch; the next loop goes on with the next epoch.
class Loader {
 public:
  virtual ~Loader() = default;

  /// This rank's next micro-batch (LoaderRank::reads); never ends.
  virtual tensor::Batch next() = 0;
  /// The next micro-batch of an evaluation, which sees each sample of a pass once, however many ranks share
  /// it. Samples of the last batches beyond the pass's end do not count, or are not there. A loader of one's
  /// own whose last batches are fuller than what counts of them by position overrides this. Begin a pass with
  /// seek(0).
  virtual CountedBatch next_of_pass();

  /// Samples that all ranks together have consumed. seek(position()) in another run resumes at the same
  /// sample.
  std::int64_t position() const { return position_->samples(); }
  /// Throws Error{usage} for a position outside [0, LoaderPosition::most].
  void seek(std::int64_t position) { position_->set(position); }
  /// A share of this loader's position: the loader goes on from the position that is set there.
  const std::shared_ptr<LoaderPosition>& shared_position() const { return position_; }

  /// Samples of one pass, over all ranks.
  virtual std::int64_t samples_per_epoch() const = 0;
  /// Samples that the data make before one comes again; less than an epoch's where that joins several passes.
  virtual std::int64_t samples_at_hand() const { return samples_per_epoch(); }
  /// Batches of each rank that hold them; the last may go beyond the pass's end.
  std::int64_t batches_per_epoch() const {
    return (samples_per_epoch() + global_batch() - 1) / global_batch();
  }
  /// Tokens that all ranks' samples before a position have; nothing: samples are not of tokens.
  virtual std::optional<std::int64_t> tokens_before(std::int64_t /*position*/) const { return {}; }

  class Iterator {
   public:
    using iterator_category = std::input_iterator_tag;
    using value_type = tensor::Batch;
    using difference_type = std::ptrdiff_t;
    using pointer = tensor::Batch*;
    using reference = tensor::Batch&;
    Iterator(Loader& loader, std::int64_t end);
    tensor::Batch& operator*() { return batch_; }
    tensor::Batch* operator->() { return &batch_; }
    Iterator& operator++();
    void operator++(int) { ++*this; }
    bool operator==(std::default_sentinel_t) const { return done_; }

   private:
    Loader* loader_;
    std::int64_t end_;  // position of the epoch's end
    bool done_ = false;
    tensor::Batch batch_;
  };
  Iterator begin() { return {*this, end_of_pass()}; }
  std::default_sentinel_t end() const { return {}; }

 protected:
  explicit Loader(LoaderRank rank);
  const LoaderRank& rank() const { return rank_; }
  /// Samples of one batch over all ranks.
  std::int64_t global_batch() const { return rank_.micro_batch * rank_.world; }
  void set_epoch_samples(std::int64_t samples) { position_->set_epoch_samples(samples); }
  void advance(std::int64_t samples) { seek(position() + samples); }
  /// The position at which the present pass ends.
  std::int64_t end_of_pass() const { return (position() / samples_per_epoch() + 1) * samples_per_epoch(); }

 private:
  LoaderRank rank_;
  std::shared_ptr<LoaderPosition> position_ = std::make_shared<LoaderPosition>();
};

/// The prefix of the names of a batch's mismatched entries.
inline constexpr const char* mismatched_prefix = "mismatched.";

/// Batches of samples: {"tokens": int32 [b, s], "labels": int32 [b, s]}, labels[i] being the token after
/// tokens[i] (or what else samples say), or no_label where it is no target, {"token_types": int32 [b, s]}
/// where samples have types, {"sentence_labels": int32 [b, s]} where they are pairs of texts (their
/// SampleRow::sentence at the first token, else no_label), {"targets": int32 [n]}, the numbers of the rows
/// among b·s that have a label, where these are few and where the processor reads it, and {"target_tokens":
/// int32 [1]}, how many are, where the processor reads it. Of samples that keep documents apart also
/// {"documents": int32 [n + 1]}, where the processor reads it: where they begin and end among the b·s rows,
/// behind each other (cu_seqlens of variable-length attention),
/// {"positions": int32 [b, s]}, each token's within its document, and
/// {"filling": int32 [b]}, how many places at the end of each row hold no token, where the processor reads
/// it. Of samples that tell sources {"source_lengths": int32 [b]}, how many of the first places of each row,
/// an encoder's, hold one, where the processor reads it. Of samples with sides {"sides": int32 [texts]} and
/// {"texts": int32 [texts]}, SampleRow's, where the processor reads them; "target_tokens" are then pairs, or
/// texts that are judged by themselves. Their mismatched likes have the same names behind mismatched_prefix.
/// While a batch is in use the kernel reads the next
/// one ahead.
class TokenLoader final : public Loader {
 public:
  /// `window` > 0 walks only the first `window` positions of the samples and begins again: a fixed held-out
  /// set for validation, together with PackingOptions::shuffle = false. The device must outlive the loader.
  TokenLoader(std::shared_ptr<const Samples> samples, LoaderRank rank, tensor::Device& device,
              std::int64_t window = 0);

  /// Throws Error{data} naming file, position and id for a token outside the vocabulary.
  tensor::Batch next() override { return load(std::numeric_limits<std::int64_t>::max()).batch; }
  /// Samples beyond the pass's end have no targets, and are filling to routers.
  CountedBatch next_of_pass() override;

  /// The window, or else one round of the samples.
  std::int64_t samples_per_epoch() const override {
    return window_ > 0 ? window_ : samples_->samples_per_round();
  }
  std::int64_t samples_at_hand() const override;
  std::optional<std::int64_t> tokens_before(std::int64_t position) const override;

 private:
  std::int64_t wrapped(std::int64_t position) const { return window_ > 0 ? position % window_ : position; }

  std::shared_ptr<const Samples> samples_;
  tensor::Device& device_;
  std::int64_t window_;
  /// The next batch, of which samples from the position `end` on do not count.
  CountedBatch load(std::int64_t end);
  void read_rows(std::int64_t first, std::int64_t counted, bool mismatched);
  std::int64_t targets_of_rows() const;
  tensor::Batch batch_of_rows(std::int64_t counted) const;
  void add_documents(tensor::Batch& batch) const;

  SampleRow row_;
  std::vector<std::int32_t> tokens_, labels_, sentences_, types_, documents_, filling_, sources_, sides_,
      texts_;
};

}  // namespace sherd::data
