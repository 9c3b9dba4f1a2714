#include "engine/step/metric_sums.h"

#include <bit>

#include "comm/communicator.h"
#include "comm/gather.h"

namespace sherd::engine {

using tensor::Tensor;

namespace {

/// Element `i` of a floating tensor that the processor can read.
double element(const Tensor& x, std::int64_t i) {
  return tensor::scalar_value(x.range(i, i + 1));
}

/// The first of the largest of n >= 1 elements from `first` on.
std::int64_t largest(const Tensor& x, std::int64_t first, std::int64_t n) {
  std::int64_t best = 0;
  double top = element(x, first);
  for (std::int64_t i = 1; i < n; ++i)
    if (const double value = element(x, first + i); value > top) top = value, best = i;
  return best;
}

}  // namespace

void MetricSums::add(const std::string& name, double sum, double count) {
  if (batches_.empty()) next_batch();
  Sum& to = batches_.back()[name];
  to.sum += sum, to.count += count;
}

void MetricSums::add(const std::string& name, const Tensor& sum, double count) {
  add(name, device_.kind() == device::Kind::meta ? 0.0 : tensor::read_scalar(device_, sum), count);
}

void MetricSums::add_accuracy(const std::string& name, const Tensor& logits, const Tensor& labels,
                              std::int32_t ignore_index) {
  require(logits.shape().rank() >= 1 && logits.shape().back() > 0 && is_floating(logits.dtype()) &&
              labels.dtype() == DType::i32 && labels.numel() == logits.shape().rows(),
          "accuracy: labels must be int32, one for each row of the logits ", logits.shape().str(), ", not ",
          name_of(labels.dtype()), " ", labels.shape().str());
  const std::int64_t classes = logits.shape().back();
  if (device_.kind() == device::Kind::meta) return add(name, 0, static_cast<double>(labels.numel()));
  const Tensor values = tensor::to_host(device_, logits), wanted = tensor::to_host(device_, labels);
  std::int64_t right = 0, counted = 0;
  for (std::int64_t row = 0; row < labels.numel(); ++row) {
    const std::int32_t label = wanted.data<std::int32_t>()[row];
    if (label == ignore_index) continue;
    ++counted;
    right += largest(values, row * classes, classes) == label ? 1 : 0;
  }
  add(name, static_cast<double>(right), static_cast<double>(counted));
}

/// Batch by batch how many metrics, and of each its name's length, its name, its sum and its count.
std::vector<std::int64_t> MetricSums::packed() const {
  std::vector<std::int64_t> out;
  for (const Batch& batch : batches_) {
    out.push_back(std::ssize(batch));
    for (const auto& [name, sum] : batch) {
      out.push_back(std::ssize(name));
      out.insert(out.end(), name.begin(), name.end());
      out.push_back(std::bit_cast<std::int64_t>(sum.sum));
      out.push_back(std::bit_cast<std::int64_t>(sum.count));
    }
  }
  return out;
}

std::vector<MetricSums::Batch> MetricSums::unpacked(const std::vector<std::int64_t>& numbers) {
  std::vector<Batch> out;
  auto at = numbers.begin();
  while (at != numbers.end()) {
    out.emplace_back();
    for (std::int64_t left = *at++; left > 0; --left) {
      const auto length = *at++;
      const std::string name(at, at + length);
      at += length;
      Sum& sum = out.back()[name];
      sum.sum = std::bit_cast<double>(*at++);
      sum.count = std::bit_cast<double>(*at++);
    }
  }
  return out;
}

MetricMeans MetricSums::means(comm::Communicator& ranks, comm::Communicator& stages) const {
  std::vector<std::vector<Batch>> all;
  for (const std::vector<std::int64_t>& each : comm::gather_lists(ranks, device_, packed(), "metrics"))
    all.push_back(unpacked(each));
  MetricSums total(device_);
  for (std::size_t i = 0; i < all[0].size(); ++i)
    for (const std::vector<Batch>& of_rank : all) {
      require(of_rank.size() == all[0].size(), "evaluation: ranks have ", all[0].size(), " and ",
              of_rank.size(), " batches; all must have as many");
      for (const auto& [name, sum] : of_rank[i]) total.add(name, sum.sum, sum.count);
    }
  if (stages.size() > 1)
    total.batches_ =
        unpacked(comm::gather_lists(stages, device_, total.packed(), "metrics of the last stage").back());
  MetricMeans out;
  if (total.batches_.empty()) return out;
  for (const auto& [name, sum] : total.batches_.front()) out[name] = sum.count == 0 ? 0 : sum.sum / sum.count;
  return out;
}

}  // namespace sherd::engine
