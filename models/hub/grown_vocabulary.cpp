#include "models/hub/grown_vocabulary.h"

#include <algorithm>

#include "tensor/host_values.h"

namespace sherd::models {

using tensor::Shape;
using tensor::Slice;
using tensor::Tensor;

GrownVocabulary::GrownVocabulary(nn::WeightSource& source, const GptConfig& from, const GptConfig& to,
                                 device::Device& device)
    : ForwardedWeights(source), from_(from.resolved()), to_(to.resolved()), device_(device) {
  require(0 < from_.vocab_size && from_.vocab_size < to_.vocab_size, "a vocabulary of ", from_.vocab_size,
          " does not grow to ", to_.vocab_size);
}

bool GrownVocabulary::grows(const std::string& name) const {
  return name == "tokens.weight" || (!to_.scores_texts() && (name == "head.weight" || name == "head.bias"));
}

Shape GrownVocabulary::shape_there(const std::string& name) const {
  if (name == "head.bias") return {from_.padded_vocab()};
  return {from_.padded_vocab(), from_.hidden_size};
}

void GrownVocabulary::check(const std::vector<nn::ParameterPtr>& parameters) const {
  std::vector<nn::ParameterPtr> there = parameters;
  for (nn::ParameterPtr& parameter : there)
    if (grows(parameter->name)) {
      auto own = std::make_shared<autograd::Parameter>();
      own->name = parameter->name, own->shape = shape_there(parameter->name);
      parameter = std::move(own);
    }
  source_.check(there);
}

const std::vector<float>& GrownVocabulary::mean(const std::string& name) {
  const auto [found, is_new] = means_.try_emplace(name);
  if (!is_new) return found->second;
  const Shape shape = shape_there(name);
  const std::int64_t columns = shape.rank() == 1 ? 1 : shape[1], rows = from_.vocab_size;
  const std::int64_t step = std::max<std::int64_t>(1, (std::int64_t{1} << 20) / columns);
  std::vector<double> sums(static_cast<std::size_t>(columns));
  for (std::int64_t row = 0; row < rows; row += step) {
    const std::int64_t count = std::min(step, rows - row) * columns;
    const Tensor part = Tensor::on_host(device_, {count}, DType::f32);
    source_.read(name, Slice::whole(shape), row * columns, part);
    for (std::int64_t i = 0; i < count; ++i)
      sums[static_cast<std::size_t>(i % columns)] += part.data<float>()[i];
  }
  for (const double sum : sums) found->second.push_back(static_cast<float>(sum / static_cast<double>(rows)));
  return found->second;
}

void GrownVocabulary::read(const std::string& name, const Slice& slice, std::int64_t begin,
                           const Tensor& to) {
  if (!grows(name)) return source_.read(name, slice, begin, to);
  const Shape shape = shape_there(name);
  const std::int64_t columns = shape.rank() == 1 ? 1 : shape[1], old = from_.vocab_size * columns,
                     end = to_.vocab_size * columns;
  const std::vector<float> of_new = end > old ? mean(name) : std::vector<float>();
  const Tensor flat = to.reshape({to.numel()});
  std::vector<float> values;
  slice.for_each_run(
      begin, begin + to.numel(), [&](std::int64_t local, std::int64_t logical, std::int64_t count) {
        const std::int64_t there = std::clamp<std::int64_t>(old - logical, 0, count), at = local - begin;
        if (there > 0) source_.read(name, Slice::whole(shape), logical, flat.range(at, at + there));
        values.clear();
        for (std::int64_t i = logical + there; i < logical + count; ++i)
          values.push_back(i < end ? of_new[static_cast<std::size_t>(i % columns)]
                                   : 0);  // what pads it is zero
        const Tensor rest = flat.range(at + there, at + count);
        tensor::convert_values(std::as_bytes(std::span(values)), DType::f32, {rest.raw(), rest.bytes()},
                               to.dtype());
      });
}

}  // namespace sherd::models
