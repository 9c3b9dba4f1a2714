#include "data/loader.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace sherd::data {

void LoaderPosition::set(std::int64_t samples) {
  require(samples >= 0 && samples <= most, "a loader cannot go to the position ", samples);
  samples_ = samples;
}

void LoaderPosition::set(std::int64_t samples, std::int64_t epoch_samples) {
  set(samples);
  if (epoch_samples <= 0 || epoch_samples_ <= 0 || epoch_samples == epoch_samples_) return;
  const std::int64_t epoch = samples / epoch_samples, place = samples % epoch_samples;
  require(epoch < most / epoch_samples_, "a loader cannot go to epoch ", epoch, " of ", epoch_samples_,
          " samples");
  set(epoch * epoch_samples_ + std::min(place, epoch_samples_));
}

Loader::Loader(LoaderRank rank) : rank_(rank) {
  require(rank.micro_batch > 0, "a micro-batch of ", rank.micro_batch, " samples");
  require(rank.world > 0 && rank.rank >= 0 && rank.rank < rank.world, "rank ", rank.rank, " of ", rank.world);
}

Loader::Iterator::Iterator(Loader& loader, std::int64_t end) : loader_(&loader), end_(end) {
  ++*this;
}

Loader::Iterator& Loader::Iterator::operator++() {
  batch_.clear();  // the old batch's memory goes back before the next one's is taken
  done_ = loader_->position() >= end_;
  if (!done_) batch_ = loader_->next();
  return *this;
}

TokenLoader::TokenLoader(std::shared_ptr<const PackedSamples> samples, LoaderRank rank,
                         tensor::Device& device, std::int64_t window)
    : Loader(rank),
      samples_(std::move(samples)),
      device_(device),
      window_(std::min(window, samples_->samples_per_round())) {
  require(window >= 0, "a window of ", window, " samples");
  const auto length = static_cast<std::size_t>(samples_->seq_length());
  sample_.resize(length + 1);
  tokens_.resize(static_cast<std::size_t>(rank.micro_batch) * length);
  labels_.resize(tokens_.size());
}

tensor::Batch TokenLoader::next() {
  if (!rank().reads) {
    advance(global_batch());
    return {};
  }
  const std::int64_t first = position() + rank().rank * rank().micro_batch;
  const std::int64_t length = samples_->seq_length();
  for (std::int64_t i = 0; i < rank().micro_batch; ++i) {
    samples_->read(wrapped(first + i), sample_);
    std::copy(sample_.begin(), sample_.end() - 1, tokens_.begin() + i * length);
    std::copy(sample_.begin() + 1, sample_.end(), labels_.begin() + i * length);
  }
  const tensor::Shape shape{rank().micro_batch, length};
  tensor::Batch batch;
  batch["tokens"] = tensor::Tensor::of<std::int32_t>(device_, shape, tokens_);
  batch["labels"] = tensor::Tensor::of<std::int32_t>(device_, shape, labels_);
  advance(global_batch());
  for (std::int64_t i = 0; i < rank().micro_batch; ++i)
    samples_->will_need(wrapped(first + global_batch() + i));
  return batch;
}

}  // namespace sherd::data
