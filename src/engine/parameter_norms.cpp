#include "engine/parameter_norms.h"

#include <algorithm>
#include <cmath>

#include "base/random.h"
#include "device/device.h"
#include "optim/description.h"

namespace sherd::engine {

using sharding::Segment;
using tensor::Tensor;

Segment::Range ParameterNorms::counted(const Segment& segment) {
  if (segment.groups().holder() != 0) return {0, 0};
  return {segment.own_begin(), segment.own_end()};
}

/// What all ranks measure, in one order: those of other stages and slices know other parameters.
std::vector<std::uint64_t> ParameterNorms::gather_names(comm::Communicator& ranks,
                                                        device::Device& device) const {
  std::vector<std::int64_t> names;
  for (const auto& [name, parameter] : mine_) names.push_back(static_cast<std::int64_t>(name));
  if (ranks.size() > 1 && device.kind() != device::Kind::meta) {  // peers of a dry run know the same ones
    const comm::CallOptions options{.label = "names of measured parameters", .scalar = true};
    const auto gather = [&](const std::vector<std::int64_t>& each) {
      const auto count = static_cast<std::int64_t>(each.size());
      const Tensor full = Tensor::empty(device, {count * ranks.size()}, DType::i64);
      ranks.all_gather({{Tensor::of<std::int64_t>(device, {count}, std::span(each)), full}}, options).wait();
      const Tensor here = tensor::to_host(device, full);
      return std::vector<std::int64_t>(here.data<std::int64_t>(), here.data<std::int64_t>() + here.numel());
    };
    const std::vector<std::int64_t> counts = gather({static_cast<std::int64_t>(names.size())});
    names.resize(static_cast<std::size_t>(*std::max_element(counts.begin(), counts.end())));
    if (!names.empty()) names = gather(names);
  }
  std::vector<std::uint64_t> out(names.begin(), names.end());
  std::erase(out, 0u);  // what fills up the shorter lists
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

void ParameterNorms::share(sharding::ShardedModel& model, device::Device& device,
                           const std::function<bool(const Segment&)>& measured) {
  if (names_.empty()) {
    for (const Segment* segment : model.trainable_segments()) {
      if (!measured(*segment)) continue;
      for (const auto& parameter : segment->layout().parameters()) {
        const auto [at, added] = mine_.emplace(stable_hash(parameter->name), parameter.get());
        require(added, "parameters '", parameter->name, "' and '", at->second->name,
                "' have names of one hash: rename one of them");
      }
    }
    names_ = gather_names(model.gradients().model_ranks(), device);
  }
  std::vector<tensor::ExactSum> sums(2 * names_.size());
  const auto for_each_of_mine = [&](const auto& visit) {
    for (std::size_t i = 0; i < names_.size(); ++i)
      if (const auto found = mine_.find(names_[i]); found != mine_.end())
        visit(found->second, sums[2 * i], sums[2 * i + 1]);
  };
  for_each_of_mine([&](const autograd::Parameter* parameter, auto& weight, auto& update) {
    const optim::NormSums& own = sums_[parameter];
    weight = own.weight, update = own.measured;
  });
  model.gradients().sum_over_ranks(sums, "parameter norms");
  for_each_of_mine([&](const autograd::Parameter* parameter, const auto& weight, const auto& update) {
    norms_[parameter] = {std::sqrt(weight.value()), std::sqrt(update.value())};
  });
}

double ParameterNorms::trust(const autograd::Parameter& parameter, const optim::Hyper& hyper) const {
  const auto found = norms_.find(&parameter);
  if (found == norms_.end()) return 1;
  const bool matrix = parameter.logical_slice().shape().rank() > 1;
  return optim::trust_ratio(hyper, found->second.weight, found->second.measured, matrix);
}

}  // namespace sherd::engine
