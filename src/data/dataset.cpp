#include "data/dataset.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/text/excerpt.h"

namespace sherd::data {
namespace {

class FunctionDataset final : public Dataset {
 public:
  FunctionDataset(std::int64_t size, std::function<tensor::Batch(std::int64_t)> get)
      : size_(size), get_(std::move(get)) {
    require(size > 0, "a dataset of ", size, " samples");
    require(get_ != nullptr, "a dataset needs a function that gives its samples");
  }
  std::int64_t size() const override { return size_; }
  tensor::Batch get(std::int64_t index) const override {
    require(index >= 0 && index < size_, "sample ", index, " of ", size_);
    return get_(index);
  }

 private:
  std::int64_t size_;
  std::function<tensor::Batch(std::int64_t)> get_;
};

tensor::Tensor stack(const std::string& name, std::span<const tensor::Batch> samples,
                     tensor::Device& device) {
  const tensor::Tensor& first = samples.front().at(name);
  std::vector<std::byte> bytes;
  bytes.reserve(first.bytes() * samples.size());
  for (const tensor::Batch& sample : samples) {
    const auto it = sample.find(name);
    require(it != sample.end() && it->second.defined(), "cannot stack samples: one has no tensor '", name,
            "'");
    const tensor::Tensor& item = it->second;
    require(item.shape() == first.shape() && item.dtype() == first.dtype(), "cannot stack samples: tensor '",
            name, "' is ", name_of(first.dtype()), " ", first.shape().str(), " in one and ",
            name_of(item.dtype()), " ", item.shape().str(), " in another");
    bytes.insert(bytes.end(), item.raw(), item.raw() + item.bytes());
  }
  std::vector<std::int64_t> dims{static_cast<std::int64_t>(samples.size())};
  dims.insert(dims.end(), first.shape().dims().begin(), first.shape().dims().end());
  tensor::Tensor out = tensor::Tensor::empty(device, tensor::Shape(dims), first.dtype());
  tensor::copy_from_host(device, out, bytes.data(), bytes.size());
  return out;
}

}  // namespace

std::shared_ptr<const Dataset> make_tensor_dataset(tensor::Batch rows) {
  require(!rows.empty(), "a tensor dataset needs at least one tensor");
  std::int64_t size = -1;
  for (const auto& [name, tensor] : rows) {
    require(tensor.defined() && tensor.shape().rank() >= 1, "tensor '", name, "' of the dataset has no rows");
    if (size < 0) size = tensor.shape()[0];
    require(tensor.shape()[0] == size, "tensor '", name, "' of the dataset has ", tensor.shape()[0],
            " rows, '", rows.begin()->first, "' has ", size);
  }
  require(size > 0, "the dataset's tensors have no rows");
  return make_dataset(size, [rows = std::move(rows)](std::int64_t index) {
    tensor::Batch sample;
    for (const auto& [name, tensor] : rows)
      sample[name] = tensor.rows(index, index + 1).reshape(tensor::Shape(tensor.shape().dims().subspan(1)));
    return sample;
  });
}

std::shared_ptr<const Dataset> make_dataset(std::int64_t size,
                                            std::function<tensor::Batch(std::int64_t)> get) {
  return std::make_shared<FunctionDataset>(size, std::move(get));
}

tensor::Batch collate(std::span<const tensor::Batch> samples, tensor::Device& device) {
  require(!samples.empty(), "no samples to stack");
  for (const tensor::Batch& sample : samples)
    for (const auto& [name, tensor] : sample)
      require(samples.front().contains(name), "cannot stack samples: the first has no tensor '", name, "'");
  tensor::Batch batch;
  for (const auto& [name, tensor] : samples.front()) {
    require(tensor.defined(), "cannot stack samples: tensor '", name, "' is undefined");
    batch[name] = stack(name, samples, device);
  }
  return batch;
}

SampleLoader::SampleLoader(std::shared_ptr<const Dataset> dataset, LoaderRank rank,
                           SampleLoaderOptions options, tensor::Device& device)
    : Loader(rank), dataset_(std::move(dataset)), options_(options), device_(device) {
  require(dataset_ && dataset_->size() > 0, "a loader needs a dataset with at least one sample");
  const std::int64_t size = dataset_->size(), world = rank.world;
  epoch_samples_ =
      options.drop_last ? size / global_batch() * global_batch() : (size + world - 1) / world * world;
  require(epoch_samples_ > 0, "drop_last leaves nothing: the dataset has ", counted(size, "sample"),
          ", a batch over ", counted(world, "rank"), " takes ", global_batch());
  set_epoch_samples(epoch_samples_);
}

std::int64_t SampleLoader::index_at(std::int64_t epoch, std::int64_t place) {
  place %= dataset_->size();  // the last batch is filled up from the epoch's beginning
  if (!options_.shuffle) return place;
  if (shuffled_epoch_ != epoch) {
    LegacyRandom random(static_cast<std::uint32_t>(options_.seed + static_cast<std::uint64_t>(epoch)));
    order_ = IndexList(0, dataset_->size());
    order_.shuffle(random, 0, order_.size());
    shuffled_epoch_ = epoch;
  }
  return order_[place];
}

SampleLoader::BatchPart SampleLoader::take() {
  // Only a seek, of a run with another batch, leaves less than a batch where each has to be whole, or a
  // number that the ranks do not divide.
  if (options_.drop_last && epoch_samples_ - position() % epoch_samples_ < global_batch())
    advance(epoch_samples_ - position() % epoch_samples_);
  const std::int64_t epoch = position() / epoch_samples_, begin = position() % epoch_samples_;
  const std::int64_t left = epoch_samples_ - begin, world = rank().world;
  const std::int64_t count = std::min(rank().micro_batch, (left + world - 1) / world);
  advance(std::min(left, count * world));
  return {epoch, begin + rank().rank * count, count};
}

tensor::Batch SampleLoader::load(const BatchPart& part) {
  if (!rank().reads) return {};
  std::vector<tensor::Batch> samples;
  for (std::int64_t i = 0; i < part.count; ++i)
    samples.push_back(dataset_->get(index_at(part.epoch, part.first + i)));
  return collate(samples, device_);
}

tensor::Batch SampleLoader::next() {
  return load(take());
}

CountedBatch SampleLoader::next_of_pass() {
  const std::int64_t epoch = position() / epoch_samples_, begin = position() % epoch_samples_;
  const std::int64_t first = begin + rank().rank * rank().micro_batch,
                     end = std::min(dataset_->size(), epoch_samples_),
                     counted = std::clamp<std::int64_t>(end - first, 0, rank().micro_batch);
  advance(std::min(epoch_samples_ - begin, global_batch()));
  return {load(counted > 0 ? BatchPart{epoch, first, counted} : BatchPart{epoch, 0, 1}), counted};
}

}  // namespace sherd::data
