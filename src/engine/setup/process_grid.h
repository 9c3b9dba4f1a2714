#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/process_groups.h"
#include "config/config.h"
#include "engine/distributed.h"
#include "engine/pipeline/stage_layout.h"
#include "nn/module.h"
#include "sharding/parallel/layout.h"
#include "sharding/state.h"

namespace sherd {

/// The groups of ranks that a configuration's section `parallel` asks for. Collective. Throws Error{config}
/// on all ranks where one has another configuration than rank 0, and for sizes that the world cannot hold,
/// naming those that would do.
std::shared_ptr<comm::ProcessGroups> make_groups(const DistributedPtr& dist, const config::Config& config);

/// The ranks with which this one computes one model, for its layers; valid as long as the groups.
parallel::Layout layout_of(comm::ProcessGroups& groups, const config::Config& config);

namespace engine {

struct TokenData;

/// The sizes that a configuration asks for.
comm::GridSizes grid_sizes(const config::Config& config);
/// How many of `ranks` see different data. Throws Error{config} for sizes that they cannot hold.
int data_ranks(const config::Config& config, int ranks);
/// "tensor 2 x context 1 x data 2", and " x pipeline 4" and ", expert 2" where there are any.
std::string describe(const comm::Grid& grid);
std::string describe(std::int64_t tensor, std::int64_t context, std::int64_t data, std::int64_t pipeline,
                     std::int64_t expert);

/// Takes over into `config` the sizes of a grid of the caller's own that it leaves open. Throws Error{config}
/// where it says others, and for a grid that this build cannot train on.
void adopt_grid(config::Config& config, const comm::Grid& grid);

/// The ranks that share the states of a model's parameters. A plain value; refers to the groups.
class StateGroups {
 public:
  /// Collective: makes a group of each set of stages that have a parameter together (a tied one), and, where
  /// ranks share experts out, one of the replicas of these. `ordered`: sums have the order of micro-batches.
  StateGroups(nn::Model& model, const StageLayout& layout, comm::ProcessGroups& groups, bool ordered = true);
  /// The ranks that have the same experts, where expert ranks share them out. Else context and data ranks; of
  /// a parameter that all tensor ranks hold and whose gradient is a sum over these
  /// (Parameter::partial_gradient), tensor ranks too. Replicas of one that several stages have are on all of
  /// these. Of a parameter that this rank's stage has.
  sharding::RankGroups of(const autograd::Parameter& parameter) const;

 private:
  sharding::RankGroups of_expert(const autograd::Parameter& parameter) const;

  const comm::ProcessGroups* groups_;
  bool ordered_;
  /// The replicas of experts that expert ranks share out. Each expert rank finds other experts in use, so
  /// their exchanges match no order that all replicas share.
  comm::Communicator* expert_replicas_ = nullptr;
  std::map<const autograd::Parameter*, comm::Communicator*> over_stages_;  ///< replicas, of shared ones
};

/// Throws Error{config} where experts are to be shared out and the model has none, or has them for another
/// number of ranks; and where `config` asks for an optimizer of whole matrices that tensor and expert ranks
/// would cut.
void require_experts(nn::Model& model, const comm::ProcessGroups& groups, const config::Config& config);

/// Throws Error{config} where several context ranks are to train a model that was built without their layout:
/// each would compute whole sequences, and the sum of their gradients count these as often as there are
/// ranks. That it is not cut for tensor ranks, require_cut() finds.
void require_takes_layout(bool takes_layout, const comm::ProcessGroups& groups);

/// How the model lies on the ranks of a pipeline. Throws Error{config} on all ranks where it cannot
/// (make_stage_layout()), or where one of them cuts it at other parts, or has other parameters in these, than
/// rank 0. Collective where `others_exist`; else this rank looks at its own model.
StageLayout agree_on_stages(nn::Model& model, const config::Config& config, const comm::ProcessGroups& groups,
                            const Distributed& dist, bool others_exist);

/// Throws Error{config} on all ranks where a model is not cut for as many tensor ranks as there are: a
/// parameter is whole on all of them, or they hold slices of it, of one shape, that together are all. Names
/// the model's parameters. Collective where `others_exist`; else this rank looks at its own model.
void require_cut(nn::Module& model, const comm::ProcessGroups& groups, const Distributed& dist,
                 bool others_exist);

/// Facts that must be alike on all ranks: names, as an error would call them, and values.
using Facts = std::vector<std::pair<std::string, std::string>>;

/// Collective: one small all-gather where all is alike. Throws an Error of this kind on every rank where one
/// has other facts than rank 0, naming that rank and the first fact: processes that were started one by one
/// train silently wrong then, or wait for each other until a deadline. `kind`: another than config where
/// machines may see a shared folder otherwise for a moment.
void require_same(const Facts& facts, const Distributed& dist, ErrorKind kind = ErrorKind::config);

/// The same of a configuration, but for what machines may differ in: folders, threads, limits.
void require_same_setup(const config::Config& config, const Distributed& dist);
/// The same of what was read of a dataset.
void require_same_data(const TokenData& data, const Distributed& dist);

}  // namespace engine
}  // namespace sherd
