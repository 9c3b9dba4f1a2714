#pragma once

#include <concepts>
#include <functional>
#include <memory>
#include <type_traits>
#include <utility>

#include "nn/module.h"
#include "sharding/parallel/layout.h"

namespace sherd {

/// A model, or how to build one: with the layout of the ranks that share it, once their groups exist, or
/// without. Modules only declare parameters, so building costs no memory either way.
class ModelSource {
 public:
  template <class M>
  requires std::derived_from<M, nn::Model> ModelSource(std::shared_ptr<M> model)
      : build_([model = std::move(model)](const parallel::Layout&) { return model; }),
        takes_layout_(false) {}  // NOLINT
  template <class F>
  requires std::is_invocable_v<F, const parallel::Layout&> ModelSource(F build)
      : build_(std::move(build)) {}  // NOLINT
  template <class F>
  requires(std::is_invocable_v<F> && !std::is_invocable_v<F, const parallel::Layout&>) ModelSource(F build)
      : build_([build = std::move(build)](const parallel::Layout&) { return build(); }),
        takes_layout_(false) {}  // NOLINT

  /// The model for `layout`; one that was given is given back.
  std::shared_ptr<nn::Model> build(const parallel::Layout& layout) const { return build_(layout); }
  /// It builds models that know their layout.
  bool takes_layout() const { return takes_layout_; }

 private:
  std::function<std::shared_ptr<nn::Model>(const parallel::Layout&)> build_;
  bool takes_layout_ = true;
};

}  // namespace sherd
