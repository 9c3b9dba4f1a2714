#pragma once

#include <memory>

#include "nn/layers.h"
#include "sharding/parallel/layout.h"

// Bottleneck adapters: small networks between the parts of a block and the stream, trained beside a model
// whose own weights stay as they are.
namespace sherd::parallel {

using autograd::Tape;
using autograd::Var;

struct BottleneckOptions {
  std::int64_t width = 0;                      ///< width of the stream
  std::int64_t size = 0;                       ///< features within
  Var (*non_linearity)(const Var&) = nullptr;  ///< between its two products
  double scale = 1;
  bool attention = true, mlp = true;  ///< behind which parts of a block
  bool of_sum = false;  ///< it reads the stream that the part was added to, not what the part gave
};

/// scale·(W_up·f(W_down·z + b_down) + b_up), added to the stream behind attention and behind the feed-forward
/// part (Houlsby et al. 2019, "Parameter-efficient transfer learning for NLP"), or behind one of them
/// (Pfeiffer et al. 2020, "MAD-X"). Parts: "attention_down", "attention_up", "mlp_down" and "mlp_up", with
/// "weight" and "bias"; what leads down is normal(0, 0.02) at first, all else zero.
///
/// All ranks of a layout have all of it, and each computes its part of the stream. Cut over tensor ranks as
/// the layers are, it would have them exchange the stream's rows once more in each direction, which costs
/// more than these products do.
class Bottlenecks : public nn::Module {
 public:
  enum class BlockPart : std::uint8_t { attention, mlp };
  Bottlenecks(const BottleneckOptions& options, const Layout& layout);
  /// The stream behind a part that has an adapter. `sum`: x plus the part's output y.
  Var add_to(Tape& tape, BlockPart part, const Var& sum, const Var& y);
  bool has(BlockPart part) const { return networks_[static_cast<std::size_t>(part)].down != nullptr; }

 private:
  struct Network {
    std::shared_ptr<nn::Linear> down, up;
  };
  BottleneckOptions options_;
  Network networks_[2];
};

}  // namespace sherd::parallel
