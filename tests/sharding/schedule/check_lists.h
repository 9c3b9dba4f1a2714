#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "base/error.h"
#include "sharding/schedule/schedules.h"

namespace sherd::sharding {

using Op = Instruction::Op;
using Lists = std::vector<std::vector<Instruction>>;

inline std::string text(const Instruction& i) {
  return cat("op ", static_cast<int>(i.op), " of micro-batch ", i.micro_batch, " on chunk ", i.chunk);
}

inline ScheduleShape shape_of(int stages, std::int64_t micro_batches, int chunks = 1,
                              std::int64_t group = 0) {
  ScheduleShape shape;
  shape.stages = stages;
  shape.micro_batches = micro_batches;
  shape.chunks = chunks;
  shape.group = group;
  return shape;
}

/// The lists of all stages.
inline Lists lists_of(config::Schedule schedule, ScheduleShape shape) {
  Lists lists;
  for (shape.stage = 0; shape.stage < shape.stages; ++shape.stage)
    lists.push_back(make_schedule(schedule, shape));
  return lists;
}

/// Reads one stage's list and holds it against what every schedule must do.
class ListCheck {
 public:
  /// `most`: passes that may be in flight, from their forward to their last gradient.
  ListCheck(const ScheduleShape& shape, std::int64_t most)
      : shape_(shape),
        travels_(shape.stages > 1),
        most_(most),
        passes_(static_cast<std::size_t>(shape.chunks * shape.micro_batches)),
        backward_(static_cast<std::size_t>(shape.chunks)),
        weights_(backward_) {}

  /// The first violation; empty: none.
  std::string run(const std::vector<Instruction>& list) {
    for (const Instruction& i : list) {
      expect(!updated_, i, "comes after the update");
      if (i.micro_batch >= 0) read(i);
      if (!wrong_.empty()) return cat("stage ", shape_.stage, ": ", wrong_);
    }
    if (done_ != shape_.chunks * shape_.micro_batches) return "not all micro-batches are done";
    return updated_ && counted_ == shape_.micro_batches ? "" : "the step is not ended";
  }
  /// Passes that were in flight.
  std::int64_t largest() const { return largest_; }

 private:
  /// The instructions done for one micro-batch on one chunk.
  struct Pass {
    bool input = false, forward = false, sent = false;
    bool output_gradient = false, backward = false, returned = false, done = false;
  };

  void expect(bool holds, const Instruction& i, const char* why) {
    if (!holds && wrong_.empty()) wrong_ = cat(text(i), ": ", why);
  }
  Pass& pass(std::int64_t m, int c) { return passes_[static_cast<std::size_t>(m * shape_.chunks + c)]; }
  bool first(int c) const { return shape_.stage == 0 && c == 0; }
  bool last(int c) const { return shape_.stage + 1 == shape_.stages && c + 1 == shape_.chunks; }
  bool from_elsewhere(int c) const { return travels_ && !first(c); }
  bool to_elsewhere(int c) const { return travels_ && !last(c); }

  void read(const Instruction& i) {
    Pass& p = pass(i.micro_batch, i.chunk);
    switch (i.op) {
      case Op::forward:
        return read_forward(i, p);
      case Op::backward:
      case Op::backward_input:
        return read_backward(i, p);
      case Op::weight_gradients:
        expect(p.backward && !p.done, i, "nothing was put off");
        return end(i, p);
      case Op::receive_activation:
        return once(i, p.input, from_elsewhere(i.chunk) && !p.forward);
      case Op::receive_gradient:
        return once(i, p.output_gradient, to_elsewhere(i.chunk) && p.forward && !p.backward);
      case Op::send_activation:
        return once(i, p.sent, p.forward && to_elsewhere(i.chunk));
      case Op::send_gradient:
        return once(i, p.returned, p.backward && from_elsewhere(i.chunk));
      default:
        return read_step(i);
    }
  }

  void once(const Instruction& i, bool& done, bool makes_sense) {
    expect(makes_sense && !done, i, "makes no sense here");
    done = true;
  }

  void read_forward(const Instruction& i, Pass& p) {
    expect(!p.forward, i, "runs twice");
    expect(p.input || !from_elsewhere(i.chunk), i, "has no input");
    expect(travels_ || i.chunk == 0 || pass(i.micro_batch, i.chunk - 1).forward, i, "has no input");
    p.forward = true;
    expect(++in_flight_ <= most_, i, "is one too many in flight");
    largest_ = std::max(largest_, in_flight_);
  }

  void read_backward(const Instruction& i, Pass& p) {
    expect(p.forward && !p.backward, i, "has no forward");
    expect((p.sent && p.output_gradient) || !to_elsewhere(i.chunk), i, "has no gradient to begin from");
    expect(travels_ || last(i.chunk) || pass(i.micro_batch, i.chunk + 1).backward, i,
           "has no gradient to begin from");
    expect(backward_[static_cast<std::size_t>(i.chunk)]++ == i.micro_batch, i, "is out of turn");
    expect(i.micro_batch + 1 < shape_.micro_batches || (shared_ && begun_ == shape_.early_update), i,
           "may complete gradients before the update can take them");
    p.backward = true;
    if (i.op == Op::backward) end(i, p);
  }

  void end(const Instruction& i, Pass& p) {
    expect(weights_[static_cast<std::size_t>(i.chunk)]++ == i.micro_batch, i, "is out of turn");
    expect(i.op == Op::backward || p.returned || !from_elsewhere(i.chunk), i,
           "keeps the stage before waiting");
    p.done = true;
    ++done_;
    --in_flight_;
  }

  void read_step(const Instruction& i) {
    switch (i.op) {
      case Op::share_loss:
        expect(!shared_ && passes_.back().forward, i, "not all losses are known");
        shared_ = true;
        return;
      case Op::begin_update:
        return once(i, begun_, shared_ && shape_.early_update);
      case Op::count:
        return expect(counted_++ == i.micro_batch && pass(i.micro_batch, 0).done, i, "is not done");
      case Op::reduce:
        reduced_ = done_ == shape_.chunks * (i.micro_batch + 1);
        return;
      case Op::update:
        return once(i, updated_, reduced_);
      default:
        return expect(false, i, "has a micro-batch");
    }
  }

  ScheduleShape shape_;
  bool travels_;
  std::int64_t most_, largest_ = 0, in_flight_ = 0, done_ = 0, counted_ = 0;
  std::vector<Pass> passes_;
  std::vector<std::int64_t> backward_, weights_;  ///< by chunk: the micro-batch whose turn it is
  bool shared_ = false, begun_ = false, reduced_ = false, updated_ = false;
  std::string wrong_;
};

/// Runs lists where a send ends once the receiver has posted its receive. Of one kind, to one stage, at most
/// `room` sends may be under way; the next one holds its stage up.
class Rendezvous {
 public:
  Rendezvous(const Lists& lists, std::int64_t room)
      : lists_(lists),
        room_(static_cast<std::size_t>(room)),
        stages_(lists.size()),
        next_(stages_),
        activations_(stages_),
        gradients_(stages_) {
    for (const Instruction& i : lists.front()) chunks_ = std::max(chunks_, i.chunk + 1);
  }

  /// Empty where all stages come to their end, and both sides of each transfer name the same value.
  std::string run() {
    for (bool moved = true; moved;) {
      moved = false;
      for (std::size_t s = 0; s < stages_; ++s)
        for (; next_[s] < lists_[s].size() && wrong_.empty() && execute(s, lists_[s][next_[s]]); ++next_[s])
          moved = true;
    }
    for (std::size_t s = 0; s < stages_ && wrong_.empty(); ++s)
      if (next_[s] < lists_[s].size())
        return cat("stage ", s, " waits for ever at ", text(lists_[s][next_[s]]));
    return wrong_;
  }

 private:
  /// The messages of one kind that one stage receives.
  struct Channel {
    std::vector<Instruction> sent, received;
    std::size_t taken = 0;
  };

  bool execute(std::size_t s, const Instruction& i) {
    switch (i.op) {
      case Op::receive_activation:
        activations_[s].received.push_back(i);
        return true;
      case Op::receive_gradient:
        gradients_[s].received.push_back(i);
        return true;
      case Op::send_activation:
        return send(activations_[(s + 1) % stages_], i, s + 1 == stages_ ? i.chunk + 1 : i.chunk);
      case Op::send_gradient:
        return send(gradients_[(s + stages_ - 1) % stages_], i, s == 0 ? i.chunk - 1 : i.chunk);
      case Op::forward:
        return (s == 0 && i.chunk == 0) || take(activations_[s]);
      case Op::backward:
      case Op::backward_input:
        return (s + 1 == stages_ && i.chunk + 1 == chunks_) || take(gradients_[s]);
      default:
        return true;
    }
  }

  bool send(Channel& to, const Instruction& i, int chunk) {
    if (to.received.size() + room_ <= to.sent.size()) return false;
    to.sent.push_back(i);
    to.sent.back().chunk = chunk;
    return true;
  }

  bool take(Channel& from) {
    if (stages_ == 1) return true;
    if (from.taken == from.sent.size()) return false;
    const Instruction &a = from.sent[from.taken], &b = from.received.at(from.taken);
    if (a.micro_batch != b.micro_batch || a.chunk != b.chunk) wrong_ = cat(text(a), " meets ", text(b));
    ++from.taken;
    return true;
  }

  const Lists& lists_;
  std::size_t room_, stages_;
  int chunks_ = 0;
  std::vector<std::size_t> next_;
  std::vector<Channel> activations_, gradients_;
  std::string wrong_;
};

}  // namespace sherd::sharding
