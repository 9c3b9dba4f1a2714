#include "sharding/parallel/collectives.h"

#include <numeric>

#include "sharding/parallel/exchanges.h"

namespace sherd::parallel {

using autograd::Saved;

namespace {

/// Options of the forward call and of its gradient's.
struct Calls {
  comm::CallOptions forward, backward;
  Calls(const char* operation, const std::string& label) {
    forward.label = label.empty() ? operation : label;
    backward.label = forward.label + " gradient";
  }
};

Tensor copied(Tape& tape, const Tensor& x) {
  Tensor out = tape.empty(x.shape(), x.dtype());
  tape.kernels().copy(x, out);
  return out;
}

}  // namespace

Var copy_to(const Var& x, Communicator* group, const std::string& label) {
  if (alone(group)) return x;
  return x.tape().record(
      x.value(), {x},
      [dx = x.grad_ref(), group, calls = Calls("copy_to", label)](Tape& t, Tensor dy) {
        if (!dy.storage().unique()) dy = copied(t, dy);  // somebody else reads it too
        t.accumulate(dx, begin_all_reduce(*group, dy, calls.backward).wait());
      },
      [kept = Saved(x)](Tape& t) { return kept.get(t); });
}

Var all_reduce(const Var& x, Communicator* group, const std::string& label) {
  if (alone(group)) return x;
  Tape& tape = x.tape();
  Tensor sum = begin_all_reduce(*group, copied(tape, x.value()), Calls("all_reduce", label).forward).wait();
  return tape.record(std::move(sum), {x},
                     [dx = x.grad_ref()](Tape& t, Tensor dy) { t.accumulate(dx, std::move(dy)); });
}

Var all_gather(const Var& x, int dim, Communicator* group, const std::string& label) {
  if (alone(group)) return x;
  Tape& tape = x.tape();
  const Calls calls("all_gather", label);
  Tensor full = begin_all_gather(tape.kernels(), *group, x.value(), dim, calls.forward).wait();
  return tape.record(std::move(full), {x}, [dx = x.grad_ref(), dim, group, calls](Tape& t, const Tensor& dy) {
    t.accumulate(dx, begin_reduce_scatter(t.kernels(), *group, dy, dim, calls.backward).wait());
  });
}

Var gather(const Var& x, int dim, Communicator* group, const std::string& label) {
  if (alone(group)) return x;
  Tape& tape = x.tape();
  const Calls calls("gather", label);
  Tensor full = begin_all_gather(tape.kernels(), *group, x.value(), dim, calls.forward).wait();
  return tape.record(std::move(full), {x}, [dx = x.grad_ref(), dim, group, calls](Tape& t, const Tensor& dy) {
    t.accumulate(dx, own_part(t.kernels(), *group, dy, dim, calls.backward.label));
  });
}

Var reduce_scatter(const Var& x, int dim, Communicator* group, const std::string& label) {
  if (alone(group)) return x;
  Tape& tape = x.tape();
  const Calls calls("reduce_scatter", label);
  Tensor part = begin_reduce_scatter(tape.kernels(), *group, x.value(), dim, calls.forward).wait();
  return tape.record(std::move(part), {x}, [dx = x.grad_ref(), dim, group, calls](Tape& t, const Tensor& dy) {
    t.accumulate(dx, begin_all_gather(t.kernels(), *group, dy, dim, calls.backward).wait());
  });
}

Var all_to_all(const Var& x, int split_dim, int gather_dim, Communicator* group, const std::string& label) {
  if (alone(group)) return x;
  Tape& tape = x.tape();
  const Calls calls("all_to_all", label);
  Tensor out = all_to_all(tape.kernels(), *group, x.value(), split_dim, gather_dim, calls.forward);
  return tape.record(std::move(out), {x},
                     [dx = x.grad_ref(), split_dim, gather_dim, group, calls](Tape& t, const Tensor& dy) {
                       t.accumulate(
                           dx, all_to_all(t.kernels(), *group, dy, gather_dim, split_dim, calls.backward));
                     });
}

namespace {

/// Rows on their way by counts of rows.
Tensor move_rows(Tape& tape, const Tensor& x, const std::vector<std::int64_t>& send,
                 const std::vector<std::int64_t>& receive, Communicator& group,
                 const comm::CallOptions& options) {
  const std::int64_t width = x.shape()[1];
  std::vector<std::int64_t> in, out;
  std::int64_t rows = 0;
  for (const std::int64_t n : send) in.push_back(n * width);
  for (const std::int64_t n : receive) out.push_back(n * width), rows += n;
  Tensor moved = tape.empty({rows, width}, x.dtype());
  group.all_to_all(x, moved, in, out, options).wait();
  return moved;
}

}  // namespace

Var all_to_all_rows(const Var& x, const std::vector<std::int64_t>& send,
                    const std::vector<std::int64_t>& receive, Communicator* group, const std::string& label) {
  if (alone(group)) return x;
  Tape& tape = x.tape();
  const Calls calls("all_to_all_rows", label);
  require(x.shape().rank() == 2 && std::ssize(send) == group->size() && send.size() == receive.size() &&
              std::accumulate(send.begin(), send.end(), std::int64_t{0}) == x.shape()[0],
          calls.forward.label, ": rows of ", x.shape().str(), " cannot go to ", group->size(),
          " ranks by their counts");
  return tape.record(move_rows(tape, x.value(), send, receive, *group, calls.forward), {x},
                     [dx = x.grad_ref(), send, receive, group, calls](Tape& t, const Tensor& dy) {
                       t.accumulate(dx, move_rows(t, dy, receive, send, *group, calls.backward));
                     });
}

}  // namespace sherd::parallel
