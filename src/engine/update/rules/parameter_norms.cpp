#include "engine/update/rules/parameter_norms.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <set>
#include <string_view>

#include "base/random.h"
#include "base/text/excerpt.h"
#include "comm/gather.h"
#include "device/device.h"
#include "engine/report/report.h"
#include "optim/description.h"

namespace sherd::engine {

using sharding::Segment;

Segment::Range ParameterNorms::counted(const Segment& segment) {
  if (segment.groups().holder() != 0) return {0, 0};
  return {segment.own_begin(), segment.own_end()};
}

void ParameterNorms::learn_names(sharding::ShardedModel& model, device::Device& device,
                                 const HyperOf& hyper_of) {
  for (const Segment* segment : model.trainable_segments())
    for (const auto& parameter : segment->layout().parameters()) {
      if (!hyper_of(*parameter)) continue;
      for (const MeasuredTensor& tensor : measured_tensors(*parameter)) {
        const auto [at, added] = mine_.emplace(stable_hash(tensor.name()), tensor);
        require(added, "parameters '", tensor.name(), "' and '", at->second.name(),
                "' have names of one hash: rename one of them");
      }
    }
  // In one order on all ranks: those of other stages and slices know other parameters.
  std::vector<std::int64_t> mine;
  for (const auto& [name, tensor] : mine_) mine.push_back(static_cast<std::int64_t>(name));
  std::set<std::uint64_t> all;
  for (const std::vector<std::int64_t>& names : comm::gather_lists(
           model.gradients().model_ranks(), device, std::move(mine), "names of measured parameters"))
    all.insert(names.begin(), names.end());
  names_.assign(all.begin(), all.end());
}

/// The largest ratios, of every tensor.
void ParameterNorms::share_ratios(comm::Communicator& ranks, device::Device& device) {
  if (ranks.size() == 1 || device.kind() == device::Kind::meta) return;
  std::vector<float> ratios(names_.size());
  for (std::size_t i = 0; i < names_.size(); ++i)
    if (const auto found = mine_.find(names_[i]); found != mine_.end())
      ratios[i] = sums_[found->second].ratio;
  comm::reduce_values(ranks, device, std::span(ratios), "ratios of variances", comm::ReduceOp::max);
  for (std::size_t i = 0; i < names_.size(); ++i)
    if (const auto found = mine_.find(names_[i]); found != mine_.end())
      sums_[found->second].ratio = ratios[i];
}

/// A memory of all tensors of a parameter together is where each of them begins.
void ParameterNorms::part_memories() {
  if (memories_.empty()) return;
  for (const auto& [name, tensor] : mine_) {
    const auto found = memories_.find(tensor.parameter->name);
    if (found == memories_.end() || tensor.name() == tensor.parameter->name) continue;
    for (const MeasuredTensor& each : measured_tensors(*tensor.parameter))
      memories_.emplace(each.name(), found->second);
    memories_.erase(found);
  }
}

double ParameterNorms::trust_of(const MeasuredTensor& tensor, const optim::NormSums& sums, std::int64_t step,
                                const optim::Hyper& hyper) {
  const double weight = std::sqrt(sums.weight.value()), measured = std::sqrt(sums.measured.value());
  const bool remembers = hyper.type == config::OptimizerType::onebitlamb;
  if (remembers && step > hyper.as<config::OneBitLambOptions>().freeze_step)
    return optim::frozen_trust(hyper, weight, measured, sums.ratio, memories_[tensor.name()]);
  const bool matrix = tensor.parameter->logical_slice().shape().rank() > 1;
  const double trust = optim::trust_ratio(hyper, weight, measured, matrix);
  if (remembers) optim::remember(hyper, trust, memories_[tensor.name()]);
  return trust;
}

void ParameterNorms::share(sharding::ShardedModel& model, device::Device& device, std::int64_t step,
                           const HyperOf& hyper_of, bool ratios) {
  if (names_.empty()) learn_names(model, device, hyper_of);
  std::vector<tensor::ExactSum> sums(2 * names_.size());
  const auto for_each_of_mine = [&](const auto& visit) {
    for (std::size_t i = 0; i < names_.size(); ++i)
      if (const auto found = mine_.find(names_[i]); found != mine_.end())
        visit(found->second, sums_[found->second], sums[2 * i], sums[2 * i + 1]);
  };
  for_each_of_mine([&](const auto&, const optim::NormSums& own, auto& weight, auto& measured) {
    weight = own.weight, measured = own.measured;
  });
  model.gradients().sum_over_ranks(sums, "parameter norms");
  if (ratios) share_ratios(model.gradients().model_ranks(), device);
  part_memories();
  for_each_of_mine(
      [&](const MeasuredTensor& tensor, optim::NormSums& own, const auto& weight, const auto& measured) {
        own.weight = weight, own.measured = measured;
        trust_[tensor] = trust_of(tensor, own, step, *hyper_of(*tensor.parameter));
      });
}

namespace {
/// Behind the numbers of a tensor that has a fresh variance.
constexpr std::string_view refreshed_mark = " refreshed";
}  // namespace

std::map<std::string, std::string> ParameterNorms::save() const {
  std::map<std::string, std::string> out;
  for (const auto& [name, memory] : memories_) {
    out[name] = cat(exact(memory.mean), ' ', exact(memory.factor), memory.refreshed ? refreshed_mark : "");
  }
  return out;
}

void ParameterNorms::restore(const std::map<std::string, std::string>& saved) {
  memories_.clear();
  for (const auto& [name, text] : saved) {
    optim::TrustMemory& memory = memories_[name];
    const char* end = text.data() + text.size();
    const auto mean = std::from_chars(text.data(), end, memory.mean);
    const auto factor = std::from_chars(std::min(mean.ptr + 1, end), end, memory.factor);
    const std::string_view rest(factor.ptr, end);
    memory.refreshed = rest == refreshed_mark;
    if (mean.ec != std::errc() || factor.ec != std::errc() || (!rest.empty() && !memory.refreshed) ||
        !(memory.mean >= 0) || !(memory.factor >= 0) || std::isinf(memory.mean + memory.factor))
      fail(ErrorKind::data, "what the optimizer has learned of '", name, "' is '", excerpt(text, 40),
           "', not two numbers, or these and '", refreshed_mark.substr(1), "'");
  }
}

bool ParameterNorms::refreshed(const MeasuredTensor& tensor) const {
  auto found = memories_.find(tensor.name());
  if (found == memories_.end()) found = memories_.find(tensor.parameter->name);
  return found != memories_.end() && found->second.refreshed;
}

double ParameterNorms::trust(const MeasuredTensor& tensor) const {
  const auto found = trust_.find(tensor);
  return found == trust_.end() ? 1 : found->second;
}

}  // namespace sherd::engine
