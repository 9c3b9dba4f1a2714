#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>

#include "comm/process_groups.h"
#include "engine/pipeline/stage_layout.h"
#include "nn/layered_model.h"

namespace sherd::engine {

/// One direction in which the stages of a pipeline pass values on: a ring of ranks, each of which receives
/// from one neighbour and sends to the other. Transfers are under way beside the rank's thread, which waits
/// where it needs a value. Used from that thread.
///
/// Values carry no name: they are matched by order, and both neighbours list them in one. All values of a
/// chunk have one shape within a step, which travels ahead of the first.
class StageChannel {
 public:
  /// Which value of the step: micro-batch, and the chunk of this rank that gives or takes it.
  using Key = std::pair<std::int64_t, int>;

  /// `what`: the name of the values in errors and labels, "activation". `group`: the channel's own, so that
  /// nothing else delays it; it and the device must outlive this. `absent`: the form of values that come for
  /// a chunk of this rank, on a meta device, to which no neighbour tells it.
  StageChannel(const char* what, device::Device& device, comm::Communicator& group, int from, int to,
               std::function<ValueForm(int chunk)> absent)
      : what_(what), device_(device), group_(group), from_(from), to_(to), absent_(std::move(absent)) {}
  /// Waits for what is under way.
  ~StageChannel() { abandon(); }
  StageChannel(const StageChannel&) = delete;
  StageChannel& operator=(const StageChannel&) = delete;

  /// The value begins to go; its memory is kept until it has gone. Throws Error{usage} for one of another
  /// shape or dtype than the chunk's first one of this step.
  void send(const Key& key, const tensor::Tensor& value);
  /// The next value begins to come, or does so once its shape has come.
  void receive(const Key& key);
  /// The value that receive() was called for; waits for it.
  tensor::Tensor take(const Key& key);
  /// Waits until all that was sent has gone: the next value is the first of a step.
  void finish();
  /// Forgets all, after an exception; waits for what is under way, or until that has failed.
  void abandon() noexcept;

 private:
  struct Arrival {
    Key key;
    tensor::Tensor header;   ///< that comes first, where the chunk's form is not known
    tensor::Tensor value{};  ///< defined once it is on its way
    bool asked = false;      ///< for the header
    comm::Work work{};       ///< the header's receive, then the value's
  };
  struct Departure {
    tensor::Tensor value;
    comm::Work work;
  };
  void begin_arrivals(const Key* needed);
  void collect_departures();
  comm::CallOptions options(const Key& key, bool header) const;

  const char* what_;
  device::Device& device_;
  comm::Communicator& group_;
  int from_, to_;
  std::function<ValueForm(int chunk)> absent_;
  std::map<int, ValueForm> sent_, received_;  ///< by chunk, of this step
  std::set<int> announced_;                   ///< chunks whose form has come or will
  std::deque<Arrival> arrivals_;
  std::deque<Departure> departures_;
};

/// Connects a stage of a pipeline with its neighbours: activations go up from stage to stage, and from the
/// last to the first, which has the next chunk; gradients come down. Two communicators, so that neither waits
/// for the other.
class StageLink {
 public:
  /// Between the ranks of the pipeline's group, which hold the stages of one model in order. All must outlive
  /// this. Collective over these ranks.
  StageLink(device::Device& device, const StageLayout& layout, comm::ProcessGroups& groups);

  int stages() const { return pipeline_.size(); }
  StageChannel& activations() { return activations_; }
  StageChannel& gradients() { return gradients_; }
  /// After the last transfer of a step.
  void finish();
  /// After an exception in the middle of a step: breaks `pipeline`, so that the other stages, whom nothing
  /// reaches any more, stop waiting and say why.
  void abandon(const std::string& reason) noexcept;

 private:
  comm::Communicator& pipeline_;
  StageChannel activations_, gradients_;
};

/// Runs a model whole over the stages of a pipeline, for evaluation and generation: one stage after the
/// other. Used from the rank's thread.
class ModelStages final : public nn::Stages {
 public:
  /// `group`: the ranks that hold the stages, in order. Takes the model's place for stages until it goes;
  /// all must outlive it.
  ModelStages(nn::LayeredModel& model, const StageLayout& layout, comm::Communicator& group);
  ~ModelStages() override;
  ModelStages(const ModelStages&) = delete;
  ModelStages& operator=(const ModelStages&) = delete;

  bool has(std::size_t part) const override { return layout_.stage_of(part) == layout_.stage; }
  autograd::Var cross(autograd::Tape& tape, std::size_t part, const autograd::Var& x) override;
  tensor::Tensor from_last(autograd::Tape& tape, const tensor::Tensor& value) override;

 private:
  nn::LayeredModel& model_;
  const StageLayout& layout_;
  comm::Communicator& group_;
};

}  // namespace sherd::engine
