#pragma once

#include <string>
#include <vector>

#include "sharding/parallel/layout.h"

namespace sherd::parallel {

/// Which part of a tensor of shape `logical` this rank holds whose dimension `dim` the tensor-parallel ranks
/// cut: the rank-th part of each of `blocks`, which add up to that dimension; of one block where there are
/// none. Throws Error{config}, naming `what` they cut, where the ranks do not divide a block, and
/// Error{usage} for blocks that do not add up.
tensor::Slice tensor_slice(const std::string& what, const tensor::Shape& logical, int dim,
                           const Layout& layout, std::vector<std::int64_t> blocks = {});

}  // namespace sherd::parallel
