#pragma once

#include <memory>
#include <string>

#include "comm/process_groups.h"
#include "config/config.h"
#include "engine/distributed.h"
#include "nn/module.h"
#include "sharding/parallel/layout.h"
#include "sharding/state.h"

namespace sherd {

/// The groups of ranks that a configuration's section `parallel` asks for. Collective. Throws Error{config}
/// on all ranks where one has another configuration than rank 0, and for sizes that the world cannot hold,
/// naming those that would do.
std::shared_ptr<comm::ProcessGroups> make_groups(const DistributedPtr& dist, const config::Config& config);

/// The ranks with which this one computes one model, for its layers; valid as long as the groups.
parallel::Layout layout_of(const comm::ProcessGroups& groups, const config::Config& config);

namespace engine {

/// The sizes that a configuration asks for.
comm::GridSizes grid_sizes(const config::Config& config);
/// How many of `ranks` see different data. Throws Error{config} for sizes that they cannot hold.
int data_ranks(const config::Config& config, int ranks);
/// "tensor 2 x context 1 x data 2".
std::string describe(const comm::Grid& grid);

/// Takes over into `config` the sizes of a grid of the caller's own that it leaves open. Throws Error{config}
/// where it says others, and for a grid that this build cannot train on.
void adopt_grid(config::Config& config, const comm::Grid& grid);

/// The ranks that share a parameter's states: context and data ranks; of one that all tensor ranks hold and
/// whose gradient is a sum over these (Parameter::partial_gradient), tensor ranks too.
sharding::RankGroups groups_of(const autograd::Parameter& parameter, const comm::ProcessGroups& groups);

/// Throws Error{config} where several context ranks are to train a model that was built without their layout:
/// each would compute whole sequences, and the sum of their gradients count these as often as there are
/// ranks. That it is not cut for tensor ranks, require_cut() finds.
void require_takes_layout(bool takes_layout, const comm::ProcessGroups& groups);

/// Throws Error{config} on all ranks where a model is not cut for as many tensor ranks as there are: a
/// parameter is whole on all of them, or they hold slices of it, of one shape, that together are all. Names
/// the model's parameters. Collective where `others_exist`; else this rank looks at its own model.
void require_cut(nn::Module& model, const comm::ProcessGroups& groups, const Distributed& dist,
                 bool others_exist);

}  // namespace engine
}  // namespace sherd
