#pragma once

#include <string>
#include <vector>

#include "autograd/tape.h"
#include "comm/communicator.h"

// Collectives on the tape: forward and gradient, along any dimension `dim` (negative ones count from the end)
// of floating tensors that lie alike on all ranks of `group`. With no group, or one of one rank, each gives
// back its input and records nothing. Backward exchanges as forward did: all ranks must use a result, or
// none, and their inputs must all take gradients, or none.
//
// Which gradient is right depends on what ranks do with a result. Where they compute *the same* with what
// they all have, each finds the whole gradient of it, and takes its own; where they compute *different*
// things, the gradient is the sum of what they find. Sums run in rank order, in fp32 for 16-bit tensors, and
// round once: all ranks get the same bits. `label` names the call in errors.
//
// All throw Error{usage} naming the tensor, the dimension and the ranks where an extent does not divide, and
// Error{comm} where ranks do not come or call other things.
namespace sherd::parallel {

using autograd::Tape;
using autograd::Var;
using comm::Communicator;

/// x, which all ranks have, for what is different on each; the gradient is all-reduced. Megatron-LM's f
/// (Shoeybi et al. 2019), copy_to_tensor_model_parallel_region.
Var copy_to(const Var& x, Communicator* group, const std::string& label = {});

/// The sum of all ranks' x, with which they compute the same; the gradient passes through. Megatron-LM's g,
/// reduce_from_tensor_model_parallel_region. Where ranks compute different things with the sum, as with
/// PyTorch's functional all_reduce, write copy_to(all_reduce(x, group), group).
Var all_reduce(const Var& x, Communicator* group, const std::string& label = {});

/// All ranks' x, in rank order along `dim`, with which they compute different things; the gradient is
/// reduce-scattered. PyTorch's all_gather_tensor_autograd; what contrastive losses need.
Var all_gather(const Var& x, int dim, Communicator* group, const std::string& label = {});

/// All ranks' x, in rank order along `dim`, with which they compute the same; the gradient is this rank's own
/// part. Megatron-LM's gather_from_tensor_model_parallel_region.
Var gather(const Var& x, int dim, Communicator* group, const std::string& label = {});

/// This rank's part along `dim` of the sum of all ranks' x; the gradient is all-gathered. PyTorch's
/// reduce_scatter_tensor_autograd.
Var reduce_scatter(const Var& x, int dim, Communicator* group, const std::string& label = {});

/// Part r of x along `split_dim` goes to rank r; what comes lies in rank order along `gather_dim`. The
/// gradient goes the other way. PyTorch's all_to_all_single_autograd; between heads and sequence, Ulysses'
/// (Jacobs et al. 2023).
Var all_to_all(const Var& x, int split_dim, int gather_dim, Communicator* group,
               const std::string& label = {});

/// The first send[0] rows of x, [Σ send, width], go to rank 0, and so on; what comes, receive[r] rows from
/// rank r, lies in rank order. The gradient goes the other way. PyTorch's all_to_all_single_autograd with
/// split sizes; what experts' tokens take. Ranks' counts must fit each other.
Var all_to_all_rows(const Var& x, const std::vector<std::int64_t>& send,
                    const std::vector<std::int64_t>& receive, Communicator* group,
                    const std::string& label = {});

}  // namespace sherd::parallel
