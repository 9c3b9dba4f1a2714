#pragma once

#include <optional>
#include <string>
#include <vector>

#include "nn/layered_model.h"

namespace sherd::sharding {

using autograd::ParameterPtr;

/// A block with the parameters that it is the first to declare, and those that it borrows. What is outside of
/// blocks belongs to the root, or, of an nn::LayeredModel, to the part that has it, but for a part that is
/// one block.
struct BlockParameters {
  nn::Module* block = nullptr;        ///< or the root; null for a part
  std::optional<std::size_t> part{};  ///< the model's part; none for a block or the root
  std::vector<ParameterPtr> owned{};
  /// For each parameter that it borrows: the block (an index of the list) that stores it.
  std::vector<std::size_t> lenders{};
};

/// Parameter ownership: every parameter of the model belongs to the innermost block around the place where it
/// is declared first. In the order of declaration, the root first.
std::vector<BlockParameters> assign_parameters(nn::Module& model);

/// "root", the path of a block, or the paths of a part's modules that have parameters, as "norm + head".
std::string name_of(const BlockParameters& block, nn::Module& model);

/// Holds every parameter of the model: two that store one parameter would overwrite each other's.
class Claim {
 public:
  /// Throws Error{usage}, and holds nothing, where another claim holds one of the parameters.
  explicit Claim(const nn::Module* model);
  ~Claim() { release(); }
  Claim(const Claim&) = delete;
  Claim& operator=(const Claim&) = delete;

 private:
  void release();
  std::vector<ParameterPtr> held_;
};

}  // namespace sherd::sharding
