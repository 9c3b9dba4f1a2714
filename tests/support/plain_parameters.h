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
  void initialize(const autograd::Parameter& p, RandomKey key) {
    switch (p.init.kind) {
      case autograd::Init::Kind::constant:
        kernels_.fill(p.value, p.init.a);
        break;
      case autograd::Init::Kind::normal:
        kernels_.fill_normal(p.value, key, 0, p.init.a, p.init.b);
        break;
      case autograd::Init::Kind::uniform:
        kernels_.fill_uniform(p.value, key, 0, p.init.a, p.init.b);
        break;
    }
  }

  tensor::Kernels& kernels_;
  std::vector<nn::ParameterPtr> parameters_;
};

}  // namespace sherd::test
