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
class ShownWeights : public nn::ForwardedWeights {
 public:
  ShownWeights(nn::WeightSource& from, const std::vector<nn::ParameterPtr>& parameters, std::string title)
      : ForwardedWeights(from), state_{.title = std::move(title), .unit = "parameters"} {
    for (const nn::ParameterPtr& parameter : parameters)
      state_.total += static_cast<double>(parameter->logical_slice().logical().numel());
  }

  void read(const std::string& name, const tensor::Slice& slice, std::int64_t begin,
            const tensor::Tensor& to) override {
    source_.read(name, slice, begin, to);
    state_.done += static_cast<double>(to.numel());
    bar_.show(state_);
  }

 private:
  engine::WorkState state_;
  engine::WorkBar bar_{STDERR_FILENO};
};

}  // namespace sherd::cli
