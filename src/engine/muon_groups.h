#pragma once

#include "config/config.h"
#include "nn/module.h"

namespace sherd::engine {

/// `optimizer` where its section and groups of type Muon keep the matrices of blocks alone: 2-dimensional
/// weights that a block (nn::Module::mark_block()) is the first to declare. Before each of them comes a group
/// of the rest, embeddings, norms, biases and the head, which optim::beside_muon() updates; that of the
/// section comes last. The same without Muon, and where nothing is left to do.
///
/// Throws Error{config} where one of them has no such matrix, or tensor ranks cut one, and Error{usage} for a
/// parameter whose `matrices` are not its rows, each once.
config::Optimizer with_muon_groups(config::Optimizer optimizer, nn::Module& model);

}  // namespace sherd::engine
