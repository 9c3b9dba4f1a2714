#include "engine/setup/process_grid.h"

#include <algorithm>
#include <climits>
#include <span>

#include "base/random.h"
#include "comm/gather.h"
#include "engine/token_data.h"
#include "optim/description.h"

namespace sherd {

using comm::Axis;

std::shared_ptr<comm::ProcessGroups> make_groups(const DistributedPtr& dist, const config::Config& config) {
  require(dist != nullptr, "groups need ranks");
  engine::require_same_setup(config, *dist);
  struct Owned {
    DistributedPtr dist;  ///< whose world the groups refer to
    comm::ProcessGroups groups;
  };
  const comm::Grid grid(dist->world_size(), engine::grid_sizes(config));
  auto owned = std::make_shared<Owned>(dist, comm::ProcessGroups(dist->world(), grid));
  return {owned, &owned->groups};
}

parallel::Layout layout_of(comm::ProcessGroups& groups, const config::Config& config) {
  const auto several = [&](Axis axis) {
    return groups.grid().size(axis) > 1 ? &groups.group(axis) : nullptr;
  };
  parallel::Layout layout;
  layout.tensor = several(Axis::tensor);
  layout.context = several(Axis::context);
  layout.groups = &groups;
  layout.sequence_parallel = config.parallel.sequence_parallel;
  layout.context_method = config.parallel.context_method;
  return layout;
}

namespace engine {

comm::GridSizes grid_sizes(const config::Config& config) {
  const config::Parallel& parallel = config.parallel;
  return {.tensor = parallel.tensor,
          .context = parallel.context,
          .pipeline = parallel.pipeline,
          .expert = parallel.expert,
          .shard = static_cast<int>(std::min<std::int64_t>(parallel.shard_size, INT_MAX))};
}

int data_ranks(const config::Config& config, int ranks) {
  return comm::Grid(ranks, grid_sizes(config)).size(Axis::data);
}

std::string describe(std::int64_t tensor, std::int64_t context, std::int64_t data, std::int64_t pipeline,
                     std::int64_t expert) {
  return cat("tensor ", tensor, " x context ", context, " x data ", data,
             pipeline > 1 ? cat(" x pipeline ", pipeline) : "", expert > 1 ? cat(", expert ", expert) : "");
}

std::string describe(const comm::Grid& grid) {
  return describe(grid.size(Axis::tensor), grid.size(Axis::context), grid.size(Axis::data),
                  grid.size(Axis::pipeline), grid.size(Axis::expert));
}

namespace {

/// `size` is the configuration's, of which `open` leaves it to the grid.
template <class I>
void adopt(I& size, I open, int of_grid, const char* key) {
  if (size == open) size = static_cast<I>(of_grid);
  if (size != of_grid)
    fail(ErrorKind::config, key, " is ", size, ", and the groups that the program brings have ", of_grid,
         ": leave the key out, or make them alike");
}

}  // namespace

void adopt_grid(config::Config& config, const comm::Grid& grid) {
  config::Parallel& parallel = config.parallel;
  adopt(parallel.tensor, 1, grid.size(Axis::tensor), "parallel.tensor");
  adopt(parallel.context, 1, grid.size(Axis::context), "parallel.context");
  adopt(parallel.pipeline, 1, grid.size(Axis::pipeline), "parallel.pipeline");
  adopt(parallel.expert, 1, grid.size(Axis::expert), "parallel.expert");
  const int shard = grid.size(Axis::shard), all = grid.size(Axis::context) * grid.size(Axis::data);
  if (parallel.shard_size == 0 && shard == all) return;  // follows the ranks of each run
  adopt(parallel.shard_size, std::int64_t{0}, shard, "parallel.shard_size");
}

StateGroups::StateGroups(nn::Model& model, const StageLayout& layout, comm::ProcessGroups& groups,
                         bool ordered)
    : groups_(&groups), ordered_(ordered) {
  const bool apart = groups.grid().size(Axis::expert) > 1 && groups.grid().size(Axis::expert_replica) > 1;
  expert_replicas_ = apart ? &groups.apart(Axis::expert_replica) : &groups.group(Axis::expert_replica);
  if (layout.stages == 1) return;
  const auto stages_of = stages_of_parameters(model, layout);
  for (const autograd::ParameterPtr& parameter : model.parameters())  // in one order on all ranks
    if (const std::vector<int>& stages = stages_of.at(parameter.get()); stages.size() > 1)
      over_stages_[parameter.get()] = groups.replicas_on(stages);
}

sharding::RankGroups StateGroups::of_expert(const autograd::Parameter& parameter) const {
  const bool copied = parameter.logical_slice().is_whole();
  sharding::RankGroups out(groups_->group(Axis::expert_shard), expert_replicas_,
                           copied ? &groups_->group(Axis::tensor) : nullptr);
  if (ordered_) out.sources = groups_->grid().size(Axis::expert);
  return out;
}

sharding::RankGroups StateGroups::of(const autograd::Parameter& parameter) const {
  if (parameter.expert_rank >= 0) return of_expert(parameter);
  const auto shared = over_stages_.find(&parameter);
  const bool copied = !parameter.partial_gradient && parameter.logical_slice().is_whole();
  sharding::RankGroups out(groups_->group(parameter.partial_gradient ? Axis::tensor_shard : Axis::shard),
                           shared == over_stages_.end() ? &groups_->group(Axis::replica) : shared->second,
                           copied ? &groups_->group(Axis::tensor) : nullptr);
  if (!parameter.logical_slice().is_whole()) out.whole = &groups_->group(Axis::tensor_shard);
  out.over_stages = shared != over_stages_.end();
  return out;
}

namespace {

/// A rank's model as a pipeline sees it, for comparing.
struct PipelineView {
  std::uint64_t cut = 0;    ///< which parts form chunks
  std::uint64_t parts = 0;  ///< names and logical shapes of their parameters
};

PipelineView view_of(nn::Model& model, const StageLayout& layout) {
  std::string cut, parts;
  for (const sharding::Chunk& chunk : layout.chunks) cut += cat(chunk.begin, ' ', chunk.end, '\n');
  const auto stages_of = stages_of_parameters(model, layout);
  for (const autograd::ParameterPtr& parameter : model.parameters()) {
    parts += cat(parameter->name, ' ', parameter->logical_slice().logical().str());
    for (const int stage : stages_of.at(parameter.get())) parts += cat(' ', stage);
  }
  return {stable_hash(cut), stable_hash(parts)};
}

}  // namespace

StageLayout agree_on_stages(nn::Model& model, const config::Config& config, const comm::ProcessGroups& groups,
                            const Distributed& dist, bool others_exist) {
  const auto look = [&] {
    return make_stage_layout(model, config.parallel, groups.grid().coordinate(Axis::pipeline, dist.rank()));
  };
  if (!others_exist || groups.grid().size(Axis::pipeline) == 1) return look();
  StageLayout layout;
  const auto views = comm::gather_results(dist.world(), "stages of the model", [&] {
    layout = look();
    return view_of(model, layout);
  });
  for (std::size_t rank = 0; rank < views.size(); ++rank)
    if (views[rank].cut != views[0].cut || views[rank].parts != views[0].parts)
      fail(ErrorKind::config, "rank ", rank, " has ",
           views[rank].cut == views[0].cut ? "other parameters in the stages of its model"
                                           : "its model cut into stages at other parts",
           " than rank 0: all ranks build the same model, with all of its parts");
  return layout;
}

namespace {

/// A tensor rank's model, for comparing.
struct ModelSlices {
  std::uint64_t shapes = 0;  ///< hash of all names, local and logical shapes
  std::uint64_t slices = 0;  ///< hash of the slices of parameters that are cut
};

ModelSlices slices_of(nn::Module& model, int tensor_size) {
  std::string shapes, slices;
  for (const autograd::ParameterPtr& parameter : model.parameters()) {
    const tensor::Slice slice = parameter->logical_slice();
    shapes += cat(parameter->name, ' ', slice.shape().str(), ' ', slice.logical().str(), ' ',
                  parameter->partial_gradient ? "partial" : "", '\n');
    if (slice.is_whole()) continue;
    if (parameter->partial_gradient)
      fail(ErrorKind::config, "parameter '", parameter->name,
           "' is cut and has a partial gradient: only what all tensor ranks hold can have one");
    if (slice.numel() * tensor_size != slice.logical().numel())
      fail(ErrorKind::config, "parameter '", parameter->name, "' is ", slice.str(),
           " on this rank, of which ", tensor_size,
           " tensor ranks do not make the whole: build the model with the layout of the engine's groups");
    slices += cat(parameter->name, ' ', slice.str(), '\n');
  }
  if (slices.empty())
    fail(
        ErrorKind::config, "parallel.tensor is ", tensor_size,
        ", and no parameter of the model is cut: build it with the layout that initialize() gives, {.model = "
        "[](const parallel::Layout& layout) { ... }}, of layers that take it (sharding/parallel/)");
  return {stable_hash(shapes), stable_hash(slices)};
}

}  // namespace

void require_experts(nn::Model& model, const comm::ProcessGroups& groups, const config::Config& config) {
  const int ranks = groups.grid().size(Axis::expert);
  int highest = -1;
  bool cut = false;
  for (const autograd::ParameterPtr& parameter : model.parameters()) {
    highest = std::max(highest, parameter->expert_rank);
    cut |= parameter->expert_rank >= 0 && !parameter->logical_slice().is_whole();
  }
  if (ranks == 1 && highest < 0) return;
  if (highest < 0)
    fail(ErrorKind::config, "parallel.expert is ", ranks,
         ", and the model has no experts to share out: build it with the layout that initialize() gives, of "
         "layers that take it (parallel::Moe), or ask for model.moe");
  if (highest + 1 != ranks)
    fail(ErrorKind::config, "parallel.expert is ", ranks, ", and the model's experts are shared out among ",
         highest + 1, " ranks: build it with the layout of the engine's groups");
  const auto takes_matrices = [](const config::OptimizerRule& rule) {
    return optim::takes_matrices(optim::describe(rule));
  };
  const config::Optimizer& optimizer = config.optimizer;
  if (cut && (takes_matrices(optimizer) ||
              std::any_of(optimizer.groups.begin(), optimizer.groups.end(), takes_matrices)))
    fail(ErrorKind::config, "optimizer: Muon takes whole matrices, and those of experts are cut by ",
         groups.grid().size(Axis::tensor), " tensor ranks and shared out among ", ranks,
         " expert ranks: set parallel.tensor or parallel.expert to 1, or give 'blocks.*.experts.*' AdamW in "
         "optimizer.groups");
}

void require_takes_layout(bool takes_layout, const comm::ProcessGroups& groups) {
  const int ranks = groups.grid().size(Axis::context);
  if (takes_layout || ranks == 1) return;
  fail(ErrorKind::config, "parallel.context is ", ranks,
       ", and the model was built without the layout of the ranks that share its sequences: give "
       "initialize() a "
       "function that builds it, {.model = [](const parallel::Layout& layout) { ... }}, of layers that take "
       "the layout (sharding/parallel/), or the groups that it was built with, {.grid = ...}");
}

void require_cut(nn::Module& model, const comm::ProcessGroups& groups, const Distributed& dist,
                 bool others_exist) {
  const int size = groups.grid().size(Axis::tensor);
  if (size == 1) return;
  model.assign_names();
  if (!others_exist) {
    slices_of(model, size);
    return;
  }
  const auto by_rank =
      comm::gather_results(dist.world(), "slices of the model", [&] { return slices_of(model, size); });
  const auto tensor_rank = [&](std::size_t rank) {
    return groups.grid().coordinate(Axis::tensor, static_cast<int>(rank));
  };
  for (std::size_t rank = 0; rank < by_rank.size(); ++rank) {
    if (by_rank[rank].shapes != by_rank[0].shapes)
      fail(ErrorKind::config, "rank ", rank,
           " has other parameters than rank 0, or cuts them otherwise: "
           "tensor ranks hold equal parts of the same model");
    // Ranks below `size` are the tensor ranks of one model, one of each.
    for (std::size_t other = 0; other < std::min(rank, static_cast<std::size_t>(size)); ++other)
      if ((by_rank[rank].slices == by_rank[other].slices) != (tensor_rank(rank) == tensor_rank(other)))
        fail(ErrorKind::config, "ranks ", other, " and ", rank, " hold ",
             tensor_rank(rank) == tensor_rank(other) ? "other" : "the same",
             " slices of the model, and their places among the tensor ranks are ", tensor_rank(other),
             " and ", tensor_rank(rank), ": each builds its own with the layout of its own groups");
  }
}

namespace {

/// A rank's facts in two numbers.
struct Digest {
  std::uint64_t names = 0, values = 0;
  bool operator==(const Digest&) const = default;
};

[[noreturn]] void differs(ErrorKind kind, std::size_t rank, const std::string& what) {
  fail(kind, "rank ", rank, " was started with another ", what,
       " than rank 0: start all ranks with the same ",
       "configuration and data (old files on one of the machines?)");
}

}  // namespace

void require_same(const Facts& facts, const Distributed& dist, ErrorKind kind) {
  if (dist.world_size() == 1) return;
  std::string names, values;
  std::vector<std::uint64_t> hashes;
  for (const auto& [name, value] : facts) {
    names += name + '\n', values += value + '\n';
    hashes.push_back(stable_hash(value));
  }
  const Digest mine{stable_hash(names), stable_hash(values)};
  const std::vector<Digest> digests = comm::gather_records(dist.world(), mine, "configuration");
  if (std::count(digests.begin(), digests.end(), digests[0]) == dist.world_size()) return;
  for (std::size_t rank = 1; rank < digests.size(); ++rank)
    if (digests[rank].names != digests[0].names) differs(kind, rank, "set of keys");
  const auto all = comm::gather_records(dist.world(), std::span<const std::uint64_t>(hashes),
                                        "values of the configuration");
  for (std::size_t i = hashes.size(); i < all.size(); ++i)
    if (const std::size_t fact = i % hashes.size(); all[i] != all[fact])
      differs(kind, i / hashes.size(), cat(facts[fact].first, " (here ", facts[fact].second, ")"));
}

void require_same_setup(const config::Config& config, const Distributed& dist) {
  Facts facts;
  for (config::Setting& setting : config::settings(config))
    if (setting.concerns != config::Concerns::machine)
      facts.emplace_back(std::move(setting.key), std::move(setting.value));
  require_same(facts, dist);
}

void require_same_data(const TokenData& data, const Distributed& dist) {
  require_same(
      {{"vocabulary of the data", std::to_string(data.vocab_size)},
       {"fingerprint of the tokens", std::to_string(data.fingerprint)},
       {"number of training tokens", std::to_string(data.train->tokens())},
       {"number of validation tokens", std::to_string(data.validation ? data.validation->tokens() : 0)}},
      dist);
}

}  // namespace engine
}  // namespace sherd
