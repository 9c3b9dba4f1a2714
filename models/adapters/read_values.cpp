#include "models/adapters/read_values.h"

#include <algorithm>
#include <numeric>

#include "tensor/host_values.h"

namespace sherd::models {

using tensor::Slice;
using tensor::Tensor;

std::vector<float> read_values(nn::WeightSource& source, const std::string& name, const tensor::Shape& shape,
                               std::int64_t begin, std::int64_t count, device::Device& device) {
  const Tensor values = Tensor::on_host(device, {count}, DType::f32);
  source.read(name, Slice::whole(shape), begin, values);
  return {values.data<float>(), values.data<float>() + count};
}

template <class Id>
std::vector<float> read_rows(nn::WeightSource& source, const std::string& table, std::int64_t rows,
                             std::int64_t width, const std::vector<Id>& ids, device::Device& device) {
  std::vector<std::size_t> order(ids.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return ids[a] < ids[b]; });
  std::vector<float> out(ids.size() * static_cast<std::size_t>(width));
  for (const std::size_t i : order) {
    const std::vector<float> row = read_values(source, table, {rows, width}, ids[i] * width, width, device);
    std::copy(row.begin(), row.end(), out.begin() + static_cast<std::ptrdiff_t>(i) * width);
  }
  return out;
}
template std::vector<float> read_rows(nn::WeightSource&, const std::string&, std::int64_t, std::int64_t,
                                      const std::vector<std::int32_t>&, device::Device&);
template std::vector<float> read_rows(nn::WeightSource&, const std::string&, std::int64_t, std::int64_t,
                                      const std::vector<std::int64_t>&, device::Device&);

void write_slice(const std::vector<float>& values, const Slice& slice, std::int64_t begin, const Tensor& to) {
  const std::size_t size = size_of(to.dtype());
  slice.for_each_run(
      begin, begin + to.numel(), [&](std::int64_t local, std::int64_t logical, std::int64_t count) {
        const std::span from(values.data() + logical, static_cast<std::size_t>(count));
        tensor::convert_values(std::as_bytes(from), DType::f32,
                               std::span(to.raw() + static_cast<std::size_t>(local - begin) * size,
                                         static_cast<std::size_t>(count) * size),
                               to.dtype());
      });
}

}  // namespace sherd::models
