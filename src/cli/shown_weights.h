#pragma once

#include <unistd.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "engine/report/progress.h"
#include "nn/weight_source.h"

namespace sherd::cli {

/// Weights of another source, which must outlive it. Shows on a terminal how many of the elements of
/// `parameters` were read.
class ShownWeights : public nn::WeightSource {
 public:
  ShownWeights(nn::WeightSource& from, const std::vector<nn::ParameterPtr>& parameters, std::string title)
      : from_(from), state_{.title = std::move(title), .unit = "parameters"} {
    for (const nn::ParameterPtr& parameter : parameters)
      state_.total += static_cast<double>(parameter->logical_slice().logical().numel());
  }

  void check(const std::vector<nn::ParameterPtr>& parameters) const override { from_.check(parameters); }
  bool has(const std::string& name) const override { return from_.has(name); }
  void read(const std::string& name, const tensor::Slice& slice, std::int64_t begin,
            const tensor::Tensor& to) override {
    from_.read(name, slice, begin, to);
    state_.done += static_cast<double>(to.numel());
    bar_.show(state_);
  }
  std::map<std::string, std::vector<float>> step_states() const override { return from_.step_states(); }

 private:
  nn::WeightSource& from_;
  engine::WorkState state_;
  engine::WorkBar bar_{STDERR_FILENO};
};

}  // namespace sherd::cli
