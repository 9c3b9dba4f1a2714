#include "sharding/schedule/simulate.h"

#include <algorithm>
#include <numeric>
#include <optional>

#include "base/error.h"

namespace sherd::sharding {
namespace {

using Op = Instruction::Op;

bool is_activation(Op op) {
  return op == Op::receive_activation || op == Op::send_activation;
}

/// Values of one kind that come to one stage from its one neighbour, in order.
class Channel {
 public:
  void send(double when, double seconds, const Instruction& what) { sent_.push_back({when, seconds, what}); }
  void receive(double when, const Instruction& what) { received_.push_back({when, 0, what}); }

  /// When the value of the next computation that needs one is there; nothing while that is not known.
  std::optional<double> next() {
    require(taken_ < received_.size(), "a computation needs a value that its stage does not receive");
    if (taken_ == sent_.size()) return std::nullopt;
    const PostedTransfer &from = sent_[taken_], &to = received_[taken_];
    require(from.what.micro_batch == to.what.micro_batch && from.what.chunk == to.what.chunk, "micro-batch ",
            from.what.micro_batch, " of chunk ", from.what.chunk, " was sent where micro-batch ",
            to.what.micro_batch, " of chunk ", to.what.chunk, " is received");
    ++taken_;
    return free_ = std::max({from.when, to.when, free_}) + from.seconds;
  }

 private:
  struct PostedTransfer {
    double when, seconds;
    Instruction what;  ///< the chunk is the receiver's
  };
  std::vector<PostedTransfer> sent_, received_;
  std::size_t taken_ = 0;
  double free_ = 0;
};

struct SimulatedStage {
  std::size_t next = 0;  ///< instruction
  double now = 0, computing = 0, waiting = 0;
  double beside = 0;   ///< the end of what runs beside the list
  double fetched = 0;  ///< the last gather's end
  Channel activations, gradients;
};

class Simulation {
 public:
  Simulation(const std::vector<std::vector<Instruction>>& lists, const TimeOfInstruction& time)
      : lists_(lists), time_(time), stages_(lists.size()), parameters_(lists.size()) {}

  SimulatedStep run() {
    for (bool moved = true; moved;) {
      moved = false;
      for (std::size_t s = 0; s < stages_.size(); ++s)
        while (stages_[s].next < lists_[s].size() && execute(s, lists_[s][stages_[s].next])) {
          ++stages_[s].next;
          moved = true;
        }
    }
    SimulatedStep step;
    for (std::size_t s = 0; s < stages_.size(); ++s) {
      if (stages_[s].next < lists_[s].size()) fail_stuck(s);
      step.seconds = std::max(step.seconds, stages_[s].now);
      step.computing.push_back(stages_[s].computing);
      step.waiting.push_back(stages_[s].waiting);
    }
    return step;
  }

 private:
  /// False where the stage has to wait for what no other one has sent yet.
  bool execute(std::size_t s, const Instruction& i) {
    SimulatedStage& stage = stages_[s];
    const InstructionTime time = time_(static_cast<int>(s), i);
    const double seconds = time.seconds;
    switch (i.op) {
      case Op::gather:
        stage.fetched = std::max(stage.fetched, stage.now) + seconds;
        at(parameters_[s], i.chunk) = stage.fetched;
        return true;
      case Op::receive_activation:
      case Op::receive_gradient:
        (is_activation(i.op) ? stage.activations : stage.gradients).receive(stage.now, i);
        return true;
      case Op::send_activation:
      case Op::send_gradient:
        send(s, i, seconds);
        return true;
      case Op::forward:
      case Op::backward:
      case Op::backward_input:
        if (!wait_for_input(s, i)) return false;
        [[fallthrough]];
      case Op::weight_gradients:
        compute(stage, std::max(stage.now, at(parameters_[s], i.chunk)), time);
        return true;
      case Op::reduce: {
        const double end = std::max(stage.now, stage.beside) + seconds;
        stage.waiting += end - stage.now;
        stage.now = end;
        return true;
      }
      default:
        stage.now += seconds;
        return true;
    }
  }

  static void compute(SimulatedStage& stage, double begin, const InstructionTime& time) {
    stage.now = begin + time.seconds;
    stage.computing += time.seconds;
    if (time.beside > 0)
      stage.beside = std::max(std::max(stage.beside, begin + time.handed_over_at) + time.beside,
                              stage.now + time.behind);
  }

  /// The chunk's number in the model tells whether its input comes from elsewhere.
  bool wait_for_input(std::size_t s, const Instruction& i) {
    if (stages_.size() == 1) return true;
    const bool forward = i.op == Op::forward;
    if (forward ? s == 0 && i.chunk == 0 : s + 1 == stages_.size() && i.chunk + 1 == chunks()) return true;
    SimulatedStage& stage = stages_[s];
    const std::optional<double> there = (forward ? stage.activations : stage.gradients).next();
    if (there) stage.now = std::max(stage.now, *there);
    return there.has_value();
  }

  void send(std::size_t s, Instruction i, double seconds) {
    const std::size_t count = stages_.size();
    const double now = stages_[s].now;
    if (is_activation(i.op)) {
      if (s + 1 == count) ++i.chunk;
      stages_[(s + 1) % count].activations.send(now, seconds, i);
    } else {
      if (s == 0) --i.chunk;
      stages_[(s + count - 1) % count].gradients.send(now, seconds, i);
    }
  }

  int chunks() {
    if (chunks_ == 0)
      for (const Instruction& i : lists_.front()) chunks_ = std::max(chunks_, i.chunk + 1);
    return chunks_;
  }

  static double& at(std::vector<double>& values, int chunk) {
    if (values.size() <= static_cast<std::size_t>(chunk)) values.resize(static_cast<std::size_t>(chunk) + 1);
    return values[static_cast<std::size_t>(chunk)];
  }

  [[noreturn]] void fail_stuck(std::size_t s) const {
    const Instruction& i = lists_[s][stages_[s].next];
    fail(ErrorKind::usage, "the schedule waits for ever: stage ", s, " for the input of ",
         i.op == Op::forward ? "forward" : "backward", " of micro-batch ", i.micro_batch, " on chunk ",
         i.chunk);
  }

  const std::vector<std::vector<Instruction>>& lists_;
  const TimeOfInstruction& time_;
  std::vector<SimulatedStage> stages_;
  std::vector<std::vector<double>> parameters_;  ///< by stage and chunk: when they have come
  int chunks_ = 0;
};

}  // namespace

double SimulatedStep::bubble() const {
  const double computed = std::accumulate(computing.begin(), computing.end(), 0.0);
  return computed > 0 ? seconds * static_cast<double>(computing.size()) / computed - 1 : 0;
}

SimulatedStep simulate(const std::vector<std::vector<Instruction>>& lists, const TimeOfInstruction& time) {
  return Simulation(lists, time).run();
}

}  // namespace sherd::sharding
