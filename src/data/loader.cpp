#include "data/loader.h"

#include <algorithm>
#include <numeric>
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

CountedBatch Loader::next_of_pass() {
  const std::int64_t left = end_of_pass() - position() - rank_.rank * rank_.micro_batch;
  return {next(), std::clamp<std::int64_t>(left, 0, rank_.micro_batch)};
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

TokenLoader::TokenLoader(std::shared_ptr<const Samples> samples, LoaderRank rank, tensor::Device& device,
                         std::int64_t window)
    : Loader(rank),
      samples_(std::move(samples)),
      device_(device),
      window_(std::min(window, samples_->samples_per_round())) {
  require(window >= 0, "a window of ", window, " samples");
}

void TokenLoader::add_documents(tensor::Batch& batch) const {
  std::vector<std::int32_t> positions(tokens_.size());
  for (std::size_t d = 0; d + 1 < documents_.size(); ++d)
    std::iota(positions.begin() + documents_[d], positions.begin() + documents_[d + 1], 0);
  batch["documents"] = tensor::Tensor::on_host(device_, documents_);
  batch["positions"] =
      tensor::Tensor::of<std::int32_t>(device_, {rank().micro_batch, samples_->seq_length()}, positions);
}

std::optional<std::int64_t> TokenLoader::tokens_before(std::int64_t position) const {
  if (window_ == 0) return samples_->tokens_before(position);
  return position / window_ * samples_->tokens_before(window_) + samples_->tokens_before(position % window_);
}

CountedBatch TokenLoader::next_of_pass() {
  const std::int64_t end = end_of_pass();
  CountedBatch out = load(end);
  if (position() > end) seek(end);
  return out;
}

std::int64_t TokenLoader::samples_at_hand() const {
  // Rows of whole documents are as many as they are; a stream's round may be several passes over it.
  const std::int64_t there = samples_->traits().keeps_documents_apart || samples_->traits().tells_sources ||
                                     samples_->traits().has_sides
                                 ? samples_->samples_per_round()
                                 : std::max<std::int64_t>(1, samples_->tokens() / samples_->seq_length());
  return std::min(there, samples_per_epoch());
}

CountedBatch TokenLoader::load(std::int64_t end) {
  if (!rank().reads) {
    advance(global_batch());
    return {};
  }
  const std::int64_t first = position() + rank().rank * rank().micro_batch;
  const std::int64_t counted = std::clamp<std::int64_t>(end - first, 0, rank().micro_batch);
  read_rows(first, counted, false);
  tensor::Batch batch = batch_of_rows(counted);
  if (samples_->traits().has_mismatched) {
    read_rows(first, counted, true);
    for (auto& [name, values] : batch_of_rows(counted)) batch[mismatched_prefix + name] = values;
  }
  advance(global_batch());
  for (std::int64_t i = 0; i < rank().micro_batch; ++i)
    samples_->will_need(wrapped(first + global_batch() + i));
  return {std::move(batch), counted};
}

/// Reads the samples from position `first` on, of which the first `counted` count.
void TokenLoader::read_rows(std::int64_t first, std::int64_t counted, bool mismatched) {
  const std::int64_t length = samples_->seq_length();
  tokens_.clear(), labels_.clear(), types_.clear();
  documents_.assign(1, 0), filling_.clear(), sources_.clear();
  sentences_.clear(), sides_.clear(), texts_.clear();
  for (std::int64_t i = 0; i < rank().micro_batch; ++i) {
    const std::int64_t position = wrapped(first + i);
    if (mismatched)
      samples_->load_mismatched(position, row_);
    else
      samples_->load(position, row_);
    const bool counts = i < counted;
    types_.insert(types_.end(), row_.types.begin(), row_.types.end());
    const auto begin = static_cast<std::int32_t>(tokens_.size());
    tokens_.insert(tokens_.end(), row_.tokens.begin(), row_.tokens.end());
    labels_.insert(labels_.end(), row_.labels.begin(), row_.labels.end());
    for (const std::int32_t ends : row_.ends) documents_.push_back(begin + ends);
    filling_.push_back(row_.filling), sources_.push_back(row_.source);
    for (const std::int32_t side : row_.sides) sides_.push_back(counts ? side : 0);
    texts_.insert(texts_.end(), row_.texts.begin(), row_.texts.end());
    if (samples_->traits().pairs_texts) {
      sentences_.resize(labels_.size(), no_label);
      if (counts) sentences_[static_cast<std::size_t>(begin)] = row_.sentence;
    }
    if (counts) continue;
    std::fill(labels_.end() - length, labels_.end(), no_label);
    filling_.back() = static_cast<std::int32_t>(length);
  }
}

/// How many targets the rows have; pairs, or texts, of those with sides.
std::int64_t TokenLoader::targets_of_rows() const {
  if (!samples_->traits().has_sides)
    return static_cast<std::ptrdiff_t>(labels_.size()) - std::count(labels_.begin(), labels_.end(), no_label);
  return std::count_if(sides_.begin(), sides_.end(), [&](std::int32_t side) {
    return samples_->traits().has_pairs ? side > 0 : side != 0;
  });
}

tensor::Batch TokenLoader::batch_of_rows(std::int64_t counted) const {
  const tensor::Shape shape{rank().micro_batch, samples_->seq_length()};
  tensor::Batch batch;
  batch["tokens"] = tensor::Tensor::of<std::int32_t>(device_, shape, tokens_);
  if (!types_.empty()) batch["token_types"] = tensor::Tensor::of<std::int32_t>(device_, shape, types_);
  batch["labels"] = tensor::Tensor::of<std::int32_t>(device_, shape, labels_);
  batch["target_tokens"] =
      tensor::Tensor::on_host(device_, std::vector{static_cast<std::int32_t>(targets_of_rows())});
  if (samples_->traits().pairs_texts)
    batch["sentence_labels"] = tensor::Tensor::of<std::int32_t>(device_, shape, sentences_);
  if (samples_->traits().has_few_targets) {
    std::vector<std::int32_t> targets;
    for (std::size_t i = 0; i < labels_.size(); ++i)
      if (labels_[i] != no_label) targets.push_back(static_cast<std::int32_t>(i));
    batch["targets"] = tensor::Tensor::on_host(device_, targets);
  }
  if (samples_->traits().has_sides) {
    batch["sides"] = tensor::Tensor::on_host(device_, sides_);
    batch["texts"] = tensor::Tensor::on_host(device_, texts_);
  }
  if (samples_->traits().tells_sources) batch["source_lengths"] = tensor::Tensor::on_host(device_, sources_);
  if (samples_->traits().keeps_documents_apart) add_documents(batch);
  if (samples_->traits().keeps_documents_apart || samples_->traits().has_sides ||
      counted < rank().micro_batch)
    batch["filling"] = tensor::Tensor::on_host(device_, filling_);
  return batch;
}

}  // namespace sherd::data
