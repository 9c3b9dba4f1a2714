#pragma once

#include "nn/module.h"
#include "support/cpu_fixture.h"

namespace sherd::test {

/// Stores a module's parameters whole, without the sharding room: values drawn from {seed, hash of the name}
/// by each parameter's initialiser, gradients where it trains. Names the module's parts.
class PlainParameters {
 public:
  PlainParameters(tensor::Kernels& kernels, nn::Module& module, DType dtype, std::uint64_t seed = 1,
                  DType grad_dtype = DType::u8 /* as dtype */)
      : kernels_(kernels) {
    module.assign_names();
    parameters_ = module.parameters();
    for (const auto& p : parameters_) {
      p->value = tensor::Tensor::empty(kernels.device(), p->shape, dtype, device::Category::parameters);
      initialize(*p, RandomKey{seed, stable_hash(p->name)});
      if (p->trainable)
        p->grad =
            tensor::Tensor::empty(kernels.device(), p->shape, grad_dtype == DType::u8 ? dtype : grad_dtype,
                                  device::Category::gradients);
    }
  }
  ~PlainParameters() {
    for (const auto& p : parameters_) p->value = {}, p->grad = {};
  }
  PlainParameters(const PlainParameters&) = delete;
  PlainParameters& operator=(const PlainParameters&) = delete;

  /// The next contribution overwrites each gradient.
  void zero_grad() {
    for (const auto& p : parameters_) p->grad_written = false;
  }

  const std::vector<nn::ParameterPtr>& all() const { return parameters_; }
  nn::ParameterPtr find(const std::string& name) const {
    for (const auto& p : parameters_)
      if (p->name == name) return p;
    fail(ErrorKind::usage, "no parameter named ", name);
  }

 private:
  /// By logical index, where this is a slice of a larger tensor.
  void initialize(const autograd::Parameter& p, RandomKey key) {
    using Kind = autograd::Init::Kind;
    if (p.init.kind == Kind::constant) return kernels_.fill(p.value, p.init.a);
    const tensor::Slice slice = p.logical_slice();
    slice.for_each_run(0, p.numel(), [&](std::int64_t local, std::int64_t logical, std::int64_t count) {
      const tensor::Tensor run = p.value.range(local, local + count);
      if (p.init.kind == Kind::normal)
        kernels_.fill_normal(run, key, logical, p.init.a, p.init.b);
      else
        kernels_.fill_uniform(run, key, logical, p.init.a, p.init.b);
    });
  }

  tensor::Kernels& kernels_;
  std::vector<nn::ParameterPtr> parameters_;
};

}  // namespace sherd::test
