#include "sharding/parallel/adapters/bottleneck.h"

#include "autograd/ops.h"
#include "sharding/parallel/linear.h"

namespace sherd::parallel {

Bottlenecks::Bottlenecks(const BottleneckOptions& options, const Layout& layout) : options_(options) {
  require(options.width > 0 && options.size > 0 && options.non_linearity, "a bottleneck of ", options.size,
          " features of ", options.width, options.non_linearity ? "" : " without a non-linearity");
  const auto network = [&](BlockPart part, const char* name, bool there) {
    if (!there) return;
    const auto linear = [&](std::int64_t in, std::int64_t out, nn::Init init) {
      return on_stream(std::make_shared<nn::Linear>(in, out, nn::LinearOptions{.init = init, .fp8 = false}),
                       layout);
    };
    Network& to = networks_[static_cast<std::size_t>(part)];
    to.down = add(cat(name, "_down"), linear(options.width, options.size, nn::Init::normal(0, 0.02)));
    to.up = add(cat(name, "_up"), linear(options.size, options.width, nn::Init::zeros()));
  };
  network(BlockPart::attention, "attention", options.attention);
  network(BlockPart::mlp, "mlp", options.mlp);
}

Var Bottlenecks::add_to(Tape& tape, BlockPart part, const Var& sum, const Var& y) {
  const Network& network = networks_[static_cast<std::size_t>(part)];
  const Var low = options_.non_linearity((*network.down)(tape, options_.of_sum ? sum : y));
  return autograd::add(sum, autograd::scale((*network.up)(tape, low), options_.scale));
}

}  // namespace sherd::parallel
