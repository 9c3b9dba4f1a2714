#include "sharding/schedule/step_list.h"

namespace sherd::sharding {
namespace {

using Op = Instruction::Op;

bool is_backward(Op op) {
  return op == Op::backward || op == Op::backward_input;
}

class StepList {
 public:
  StepList(const ScheduleShape& shape, const ComputeOrder& order, Gathers gathers)
      : shape_(shape),
        order_(order),
        gathers_(gathers),
        seen_(static_cast<std::size_t>(shape.chunks)),
        held_(seen_) {
    list_.reserve(4 * order.size() + 8);
  }

  std::vector<Instruction> make() && {
    for (std::size_t i = 0; i < order_.size(); ++i) {
      prepare_chunks(i);
      if (i == 0) receive(order_[0]);
      const Instruction* next = i + 1 < order_.size() ? &order_[i + 1] : nullptr;
      const bool returns = next && next->micro_batch == order_[i].micro_batch &&
                           next->chunk == order_[i].chunk && order_[i].op == Op::forward;
      if (next && !returns) receive(*next);
      begin_end_of_step(order_[i]);
      list_.push_back(order_[i]);
      send(order_[i]);
      if (returns) receive(*next);
      if (gathers_ == Gathers::by_chunk && ends_run(i)) release(i);
      count(order_[i]);
    }
    add(Op::reduce, last(), 0);
    add(Op::update, last(), 0);
    return std::move(list_);
  }

 private:
  void add(Op op, std::int64_t micro_batch, int chunk) { list_.push_back({op, micro_batch, chunk}); }
  std::int64_t last() const { return shape_.micro_batches - 1; }
  bool is_first(int chunk) const { return chunk == 0 && shape_.stage == 0; }
  bool is_last(int chunk) const { return chunk == shape_.chunks - 1 && shape_.stage == shape_.stages - 1; }

  /// order_[i] is the last that is computed in a row on its chunk.
  bool ends_run(std::size_t i) const {
    return i + 1 == order_.size() || order_[i + 1].chunk != order_[i].chunk;
  }

  /// Behind what is computed in a row on the chunk of order_[i].
  std::size_t run_end(std::size_t i) const {
    while (!ends_run(i)) ++i;
    return i + 1;
  }

  /// Before order_[i]: what parameters need. Where they are gathered those of the next chunk in turn begin to
  /// come with a run, but what has to be updated first only in the middle of it: nobody waits for what of the
  /// update goes on beside its first half, and the second half is for the parameters' way.
  void prepare_chunks(std::size_t i) {
    const bool begins = i == 0 || ends_run(i - 1);
    if (begins) begin_ = i, end_ = run_end(i);
    if (gathers_ == Gathers::by_block) return begins ? update_chunk(order_[i].chunk) : void();
    if (i == 0) gather(order_[0].chunk);
    if (end_ == order_.size()) return;
    const int next = order_[end_].chunk;
    const bool updates = shape_.late_update && !seen_[static_cast<std::size_t>(next)];
    if (i == (updates ? begin_ + (end_ - begin_) / 2 : begin_)) gather(next);
  }

  void gather(int chunk) {
    update_chunk(chunk);
    if (!held_[static_cast<std::size_t>(chunk)]) add(Op::gather, -1, chunk);
    held_[static_cast<std::size_t>(chunk)] = true;
  }

  /// order_[i] is the last in a row. Where the same chunk comes after the next one, it would be gathered
  /// again at once.
  void release(std::size_t i) {
    const std::size_t after_next = i + 1 < order_.size() ? run_end(i + 1) : order_.size();
    if (after_next < order_.size() && order_[after_next].chunk == order_[i].chunk) return;
    add(Op::release, -1, order_[i].chunk);
    held_[static_cast<std::size_t>(order_[i].chunk)] = false;
  }

  void update_chunk(int chunk) {
    if (seen_[static_cast<std::size_t>(chunk)]) return;
    seen_[static_cast<std::size_t>(chunk)] = true;
    if (shape_.late_update) add(Op::update_chunk, -1, chunk);
  }

  void receive(const Instruction& i) {
    if (shape_.stages == 1) return;
    if (i.op == Op::forward && !is_first(i.chunk)) add(Op::receive_activation, i.micro_batch, i.chunk);
    if (is_backward(i.op) && !is_last(i.chunk)) add(Op::receive_gradient, i.micro_batch, i.chunk);
  }

  void send(const Instruction& i) {
    if (shape_.stages == 1) return;
    if (i.op == Op::forward && !is_last(i.chunk)) add(Op::send_activation, i.micro_batch, i.chunk);
    if (is_backward(i.op) && !is_first(i.chunk)) add(Op::send_gradient, i.micro_batch, i.chunk);
  }

  void begin_end_of_step(const Instruction& i) {
    if (!is_backward(i.op) || i.micro_batch != last() || i.chunk != shape_.chunks - 1) return;
    add(Op::share_loss, last(), 0);
    if (shape_.early_update || shape_.late_update) add(Op::begin_update, last(), 0);
  }

  /// The first chunk's gradients are a micro-batch's last work.
  void count(const Instruction& i) {
    if (i.chunk == 0 && (i.op == Op::backward || i.op == Op::weight_gradients))
      add(Op::count, i.micro_batch, 0);
  }

  const ScheduleShape& shape_;
  const ComputeOrder& order_;
  Gathers gathers_;
  std::size_t begin_ = 0, end_ = 0;  ///< bounds of the run on one chunk that is being listed
  std::vector<bool> seen_;           ///< chunks whose parameters were asked for
  std::vector<bool> held_;           ///< chunks that were gathered, and not released
  std::vector<Instruction> list_;
};

}  // namespace

std::vector<Instruction> complete_step(const ScheduleShape& shape, const ComputeOrder& order,
                                       Gathers gathers) {
  return StepList(shape, order, gathers).make();
}

}  // namespace sherd::sharding
