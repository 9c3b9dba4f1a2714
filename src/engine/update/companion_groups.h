#pragma once

#include "config/config.h"
#include "nn/module.h"

namespace sherd::engine {

/// `optimizer` where its section and groups keep what their rule takes alone. Muon takes the matrices of
/// blocks: 2-dimensional weights that a block (nn::Module::mark_block()) is the first to declare. 8-bit AdamW
/// takes parameters of 4096 elements and more that are no tables (Parameter::is_table). Before each of them
/// comes a group of the rest, which optim::beside() updates; that of the section comes last. A group of the
/// section's type from which nothing is taken is such a rest as a whole, and the rate that it gives is that
/// of its parameters. The same where all rules take everything, and where nothing is left to do.
///
/// Throws Error{config} where Muon has no such matrix: a group that is of this type in a section of another,
/// or the section and all of its type; and Error{usage} for a parameter whose packed tensors are not its
/// first rows, each once.
config::Optimizer with_companions(config::Optimizer optimizer, nn::Module& model);

}  // namespace sherd::engine
