#pragma once

#include <memory>

#include "sharding/parallel/experts/moe.h"

namespace sherd::parallel {

/// How many of each the layers of router_test.cpp, router_losses_test.cpp and filling_test.cpp have.
inline constexpr std::int64_t hidden = 12, experts = 6;

/// A layer within something, so that it has a path.
struct HeldMoe : nn::Module {
  explicit HeldMoe(const MoeOptions& o, const Layout& layout = {})
      : layer(add("moe", std::make_shared<Moe>(o, layout))) {}
  std::shared_ptr<Moe> layer;
};

}  // namespace sherd::parallel
