#pragma once

#include <map>
#include <string>
#include <vector>

#include "nn/module.h"
#include "tensor/slice.h"

namespace sherd::nn {

/// Where the weights of a whole model come from, for Engine::load_weights(): a checkpoint, published files,
/// or what a caller has. A rank asks for what it holds and for nothing else.
class WeightSource {
 public:
  virtual ~WeightSource() = default;
  /// Throws Error{data} with a list of what is missing, too much or of another shape, unless the source has
  /// the weights of these parameters, which are all of a model's, in their logical shapes.
  virtual void check(const std::vector<ParameterPtr>& parameters) const = 0;
  /// Whether it has that parameter, which check() let pass; else it stays as it is.
  virtual bool has(const std::string&) const { return true; }
  /// Copies local elements [begin, begin + to.numel()) of `slice` of parameter `name` to `to`, in the
  /// processor's memory, and rounds once where `to` has fewer bits. Requests come parameter by parameter with
  /// ascending `begin`, so a source need not hold more than one parameter. Called from one thread.
  virtual void read(const std::string& name, const tensor::Slice& slice, std::int64_t begin,
                    const tensor::Tensor& to) = 0;
  /// The states that modules have beside parameters (StepState: routers' correction biases), by path; those
  /// that it does not name stay as they are.
  virtual std::map<std::string, std::vector<float>> step_states() const { return {}; }
};

/// The weights of another source, which must outlive it, but for what a class derived from it says.
class ForwardedWeights : public WeightSource {
 public:
  void check(const std::vector<ParameterPtr>& parameters) const override { source_.check(parameters); }
  bool has(const std::string& name) const override { return source_.has(name); }
  void read(const std::string& name, const tensor::Slice& slice, std::int64_t begin,
            const tensor::Tensor& to) override {
    source_.read(name, slice, begin, to);
  }
  std::map<std::string, std::vector<float>> step_states() const override { return source_.step_states(); }

 protected:
  explicit ForwardedWeights(WeightSource& source) : source_(source) {}
  WeightSource& source_;
};

}  // namespace sherd::nn
