#pragma once

#include "autograd/ops.h"
#include "sharding/parallel/layout.h"

// Attention over tensor- and context-parallel ranks. Ranks of one tensor group have heads of their own, those
// of one context group tokens of their own; all call alike.
namespace sherd::parallel {

using autograd::Var;

/// The heads that this tensor rank computes, of all of `whole`: heads/t, with kv_heads/t key-value heads, or
/// with the one that they share where there are fewer than ranks. Throws Error{config} that says which
/// numbers of ranks would do, where these do not share the heads evenly, or context ranks (Ulysses) do not
/// share those.
tensor::Attention rank_heads(tensor::Attention whole, const Layout& layout);

/// Where there are fewer key-value heads than tensor ranks, gives each rank the columns of its heads and of
/// the key-value head that they need, as Megatron-LM does: qkv [batch, rows, width/t], an even cut of the
/// packed columns of `whole`, is all-gathered along its columns and becomes [batch, rows, (heads/t +
/// 2)·head_dim], packed as rank_heads() says. The gradient is reduce-scattered: ranks that share a key-value
/// head each find a part of its gradient. With as many key-value heads as ranks or more, qkv itself. Throws
/// what rank_heads() throws.
Var exchange_heads(const Var& qkv, const tensor::Attention& whole, const Layout& layout);

/// Self-attention over whole sequences, of which each context rank has a part. As autograd::attention(), with
/// this rank's heads and tokens: qkv [batch, rows, (heads + 2·kv_heads)·head_dim], rows at
/// layout.inner_positions(rows), gives [batch, rows, heads·head_dim]. geometry.heads and kv_heads are this
/// tensor rank's, as many on each; geometry.scores is filled in here, so that dropout draws the mask of one
/// rank's attention. sinks: undefined, or those of this tensor rank's heads. Over one context rank this is
/// autograd::attention(), of the tape's documents where it has some; over several these throw Error{config}.
///
/// With the ring (sharding/parallel/ring.h) any number of heads will do. With Ulysses (Jacobs et al. 2023)
/// two all-to-alls, of qkv and of the result, give each rank whole sequences of heads/c heads and back, and
/// two more their gradients; throws Error{config} where the ranks cannot share the key-value heads evenly.
///
/// Keeps what autograd::attention() keeps; under selective recompute the result is made again in backward,
/// with the exchanges that this takes, on all ranks at the same place. Throws Error{comm} as communicators
/// do.
Var attention(const Var& qkv, tensor::Attention geometry, const Layout& layout, const Var& sinks = {});

}  // namespace sherd::parallel
