#pragma once

// This room turns files into batches: tokenizers, datasets of token ids, samples that are packed and
// shuffled, loaders.
//
// To change, look at:
// - `sherd prepare`: prepare.cpp; files on disk: dataset_builder.cpp, indexed_dataset.cpp; marks of
//   the tokens that are learned: PREFIX.mask
// - the learned part of an input line; conversations, of which form ever: text/example.h; ids:
//   text/segments.h
// - how conversations are written, and which of their tokens are answers: templates/chat_template.h; the four
//   that are here: templates/builtin_templates.cpp; a model's own: templates/published_template.h; the
//   language: jinja/template.h
// - keys of a `tokenizer.json`: hugging_face/tokenizer_file.cpp; files beside it: files_beside.h; the way
//   of a text: hugging_face/tokenizer.cpp, pre_tokenizer.cpp, bpe.cpp; Oniguruma's dialect:
//   pattern_dialect.cpp
// - how samples are packed, documents kept apart, virtual tokens put in front: packing/
// - which source a sample is of: blend.h; which samples of a pass count: Loader::next_of_pass(), loader.h

#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "data/loader.h"
#include "data/packing/legacy_random.h"
#include "tensor/tensor.h"

namespace sherd::data {

/// Samples of any kind, for models that are not language models. Must be safe to read from several threads
/// when ranks share it.
class Dataset {
 public:
  virtual ~Dataset() = default;
  virtual std::int64_t size() const = 0;
  /// Sample `index` in [0, size()): named tensors without a batch axis, of the same names, shapes and dtypes
  /// for every index, on a CPU device.
  virtual tensor::Batch get(std::int64_t index) const = 0;
};

/// Rows of tensors that are in memory: sample i is row i of each. Throws Error{usage} unless all have the
/// same number of rows, at least one.
std::shared_ptr<const Dataset> make_tensor_dataset(tensor::Batch rows);

/// `size` samples, made by `get` when they are asked for.
std::shared_ptr<const Dataset> make_dataset(std::int64_t size,
                                            std::function<tensor::Batch(std::int64_t)> get);

/// Stacks samples along a new axis 0 in memory of `device`. Throws Error{usage} naming the tensor when names,
/// shapes or dtypes differ, or for no samples.
tensor::Batch collate(std::span<const tensor::Batch> samples, tensor::Device& device);

struct SampleLoaderOptions {
  bool shuffle = true;        ///< anew every epoch
  std::uint64_t seed = 1234;  ///< epoch e is shuffled with the low 32 bits of seed + e
  /// Leave out the samples behind the last whole batch of an epoch. Else the last batch is smaller, and
  /// filled up with samples from the epoch's beginning so that all ranks get the same number.
  bool drop_last = false;
};

/// Batches of a Dataset, collated. Every epoch begins with a fresh batch.
class SampleLoader final : public Loader {
 public:
  /// Throws Error{usage} for an empty dataset, or with drop_last one that is smaller than a batch of all
  /// ranks. The device must outlive the loader.
  SampleLoader(std::shared_ptr<const Dataset> dataset, LoaderRank rank, SampleLoaderOptions options,
               tensor::Device& device);

  tensor::Batch next() override;
  /// The last batches are cut, so that no sample comes twice; a rank that is left without any has one that
  /// does not count.
  CountedBatch next_of_pass() override;
  std::int64_t samples_per_epoch() const override { return epoch_samples_; }
  /// Every batch has as many samples as the others: none is cut short at the end of an epoch.
  bool batches_are_whole() const { return epoch_samples_ % global_batch() == 0; }

 private:
  std::int64_t index_at(std::int64_t epoch, std::int64_t place);
  /// This rank's part of the next batch: [first, first + count) of an epoch's places.
  struct BatchPart {
    std::int64_t epoch, first, count;
  };
  BatchPart take();
  tensor::Batch load(const BatchPart& part);

  std::shared_ptr<const Dataset> dataset_;
  SampleLoaderOptions options_;
  tensor::Device& device_;
  std::int64_t epoch_samples_ = 0;
  std::int64_t shuffled_epoch_ = -1;  // whose order order_ holds
  IndexList order_;
};

}  // namespace sherd::data
