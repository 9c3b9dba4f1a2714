#include "engine/pipeline/value_header.h"

#include <algorithm>

namespace sherd::engine {

using tensor::Shape;
using tensor::Tensor;

Tensor make_header(device::Device& device) {
  return Tensor::empty(device, {2 + Shape::max_rank}, DType::i64, device::Category::workspace,
                       device.processor_tier());
}

void write_header(const Tensor& header, const Tensor& value) {
  auto* words = header.data<std::int64_t>();
  const auto dims = value.shape().dims();
  words[0] = static_cast<std::int64_t>(value.dtype());
  words[1] = static_cast<std::int64_t>(dims.size());
  std::copy(dims.begin(), dims.end(), words + 2);
}

ValueForm read_header(const Tensor& header) {
  const auto* words = header.data<std::int64_t>();
  if (words[0] < 0 || words[0] > static_cast<std::int64_t>(DType::u8) || words[1] < 0 ||
      words[1] > Shape::max_rank)
    fail(ErrorKind::comm, "another stage announces a value of dtype ", words[0], " and ", words[1],
         " dimensions: ranks run different programs");
  return {Shape(std::span(words + 2, static_cast<std::size_t>(words[1]))), static_cast<DType>(words[0])};
}

}  // namespace sherd::engine
