#pragma once

// This room has the tape and the operations on it, each with its gradient beside it.
//
// To change, look at:
// - add an operation: docs/recipes.md, "An operation, a layer"; elementwise.cpp is the shortest
// - recompute, and what backward keeps: Saved, tape.cpp
// - products of linear layers and their gradients, in FP8 too: linear_products.h
// - gradients of what repeats: broadcast_gradient(), gradients.cpp; gradients by source rank (experts):
//   write_by_source() beside it
// - what generation keeps of texts, positions of texts that go on: key_cache.h, asked by attention(),
//   rotary() and add_positions()
// - rows of experts: expert_rows.cpp; adapters of products: low_rank.cpp; norms of heads: head_norm.cpp
// - parameters that are stored together and published apart: Packing, parameter.h

#include <cstdint>
#include <deque>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <source_location>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "autograd/parameter.h"
#include "base/choices.h"
#include "base/random.h"
#include "tensor/kernels.h"

namespace sherd::autograd {

using tensor::Documents;
using tensor::Shape;
using tensor::Tensor;
class KeyCache;
class Tape;
class Var;

/// Gives a value another content while it lives.
template <class T>
class Replaced {
 public:
  Replaced(T& value, T now) : value_(value), before_(std::exchange(value, now)) {}
  ~Replaced() { value_ = before_; }
  Replaced(const Replaced&) = delete;
  Replaced& operator=(const Replaced&) = delete;

 private:
  T& value_;
  const T before_;
};

/// Where the gradient of one value gathers during backward. Held by the closures of its consumers, so that
/// they need not keep the value itself alive.
struct GradSlot {
  Tensor grad;
  ParameterPtr parameter;  ///< set for parameters: their gradient goes to parameter->grad instead
  Shape shape;             ///< the value's and the gradient's; not set for parameters
  DType dtype = DType::f32;
};
using GradRef = std::shared_ptr<GradSlot>;  ///< null: no gradient wanted

/// A value made again on demand; see Saved.
struct Remake;

/// A value computed on a tape: copying shares it. Valid until the tape is cleared.
class Var {
 public:
  Var() = default;
  bool defined() const { return state_ != nullptr; }
  const Tensor& value() const;
  // Neither shape() nor dtype() dequantises a parameter that is kept in few bits.
  const Shape& shape() const;
  DType dtype() const;
  Tape& tape() const;
  bool requires_grad() const { return state_ && state_->slot != nullptr; }
  /// The parameter that it is; null where it is none.
  ParameterPtr parameter() const { return state_ ? state_->parameter : nullptr; }
  /// The blocks of a parameter that is kept in few bits, for whoever reads these; null of others.
  const StoredValue* stored() const;
  /// Saving it costs no memory: a lease has it, it can be made again, or somebody keeps its storage.
  bool kept_by_others() const {
    return state_ && (state_->parameter || state_->remake || !state_->value.storage().unique());
  }
  /// Where this value's gradient goes; null when none is wanted.
  GradRef grad_ref() const { return state_ ? state_->slot : nullptr; }
  /// Lets go of the value, where only its gradient is still wanted.
  void drop_value() const {
    if (state_) state_->value = {};
  }
  /// Makes whoever saves this value from here on keep it, even where selective recompute could make it again.
  /// Blocks do this to their outputs: a recipe may read parameters that only their own backward has at hand.
  void pin() const {
    if (state_) state_->remake = nullptr;
  }
  /// The gradient after Tape::backward, for leaves made by Tape::variable; undefined when none arrived.
  const Tensor& grad() const;

 private:
  struct State {
    Tape* tape = nullptr;
    /// Undefined for parameters, but for what was made of blocks, which goes with the last copy of the Var.
    Tensor value;
    ParameterPtr parameter;
    GradRef slot;
    std::shared_ptr<Remake> remake;
    static constexpr std::uint64_t leaf = 0, unrecorded = ~std::uint64_t{0};
    std::uint64_t pass = leaf;  ///< the tape's pass that recorded it; leaves outlast passes
  };
  explicit Var(std::shared_ptr<State> state) : state_(std::move(state)) {}
  std::shared_ptr<State> state_;
  friend class Tape;
  friend class Saved;
};

/// A value that backward will read. Keeps it alive, except that a parameter is read from its lease at that
/// time (one in few bits is made of its blocks again), and that a value with a recipe (see Tape::record) is
/// made again under selective recompute.
class Saved {
 public:
  Saved() = default;
  Saved(const Var& var);  // NOLINT(google-explicit-constructor): closures capture `Saved(x)` or just `x`
  explicit Saved(Tensor tensor) : tensor_(std::move(tensor)) {}
  /// The value. Throws Error{usage} for a parameter whose unit is not gathered.
  Tensor get(Tape& tape) const;
  bool defined() const { return tensor_.defined() || parameter_ || remake_; }
  /// Whether the value is a parameter, which is read by way of a lease.
  bool is_parameter() const { return parameter_ != nullptr; }

 private:
  Tensor tensor_;
  ParameterPtr parameter_;
  std::shared_ptr<Remake> remake_;
};

/// Told when a block of the model is about to run and has run, in both directions, and on which tape. The
/// sharding room implements it to take and drop leases and to send gradients off; the tape calls it from the
/// rank's thread. A block that is used several times in one forward is entered and left as often, and its
/// backward calls mirror that.
class Scope {
 public:
  virtual ~Scope() = default;
  /// The block is going to run, behind others that were announced: its parameters may begin to come.
  virtual void announce(Tape&) {}
  /// Where tape.recording(), backward calls will follow.
  virtual void pre_forward(Tape& tape) = 0;
  virtual void post_forward(Tape& tape) = 0;
  virtual void pre_backward(Tape& tape) = 0;
  /// The gradients of the block's inputs are there; nothing reads its parameters any more.
  virtual void post_backward(Tape& tape) = 0;
  /// Weight gradients that backward has put off are about to be computed.
  virtual void pre_weight_gradients(Tape& tape) = 0;
  /// The gradients of the block's parameters are there, too, put off or not.
  virtual void gradients_complete(Tape& tape) = 0;
};

/// An output of what a tape recorded, and the gradient that reaches it from outside: of its shape and dtype.
struct OutputGradient {
  Var output;
  Tensor gradient;
};

/// When the gradients of weights are computed that nothing later in backward needs: as backward passes, or in
/// continue_weight_gradients(), so that a pipeline's next stage gets its gradients first (Qi et al. 2024,
/// "Zero bubble pipeline parallelism"). Those of products are; a table that is tied to a product gets its two
/// gradients in the other order then, which in 16 bits may round elsewhere.
enum class WeightGradients : std::uint8_t { now, later };

/// Where recompute_later() saves its inputs, if neither on the device nor in the host tier.
class SavedInputs {
 public:
  /// Brings a value back into the device's memory; called once at most. Lets go of it with its last copy.
  using Restore = std::function<Tensor()>;
  virtual ~SavedInputs() = default;
  /// Saves a copy of `value`, whose own memory is free on return.
  virtual Restore save(const Tensor& value) = 0;
};

/// Gradient of one recorded operation: receives the gradient of its output and passes gradients on to its
/// inputs.
using BackwardFn = std::function<void(Tape&, Tensor dy)>;
/// Makes an operation's output again from what it saved.
using RemakeFn = std::function<Tensor(Tape&)>;

/// Records what a forward pass does and runs it backwards. One tape per rank, used from its thread, for one
/// micro-batch at a time.
class Tape {
 public:
  explicit Tape(tensor::Kernels& kernels) : kernels_(kernels) {}
  Tape(const Tape&) = delete;
  Tape& operator=(const Tape&) = delete;

  tensor::Kernels& kernels() const { return kernels_; }
  device::Device& device() const { return kernels_.device(); }

  // ---- settings for the coming micro-batch ----
  bool training = true;  ///< dropout is active
  Recompute recompute = Recompute::none;
  bool saved_inputs_in_host = false;    ///< recompute_later() saves them in the host tier (cpu_checkpointing)
  SavedInputs* saved_inputs = nullptr;  ///< where it saves them instead; outlives what is recorded
  RandomKey random;                     ///< stream keyed by seed, step, micro-batch and rank role
  double loss_seed = 1;                 ///< d loss of the backward to come, for losses that operations add
  /// Documents of the micro-batch that do not see each other; null: each of its rows is one text.
  std::shared_ptr<const Documents> documents;
  /// Which rows of the micro-batch's sequences, which lie behind each other, hold no token but fill their
  /// sequence up: routers leave them out. Null: all hold one.
  std::shared_ptr<const std::vector<bool>> filling;
  /// For an encoder in front of a decoder: how many of each sequence's encoder rows, the first ones, hold
  /// tokens; null: all of them do.
  std::shared_ptr<const std::vector<std::int32_t>> source_lengths;
  /// Whether layers compute as they did without their adapters.
  bool without_adapters = false;
  /// A text's values do not depend on those beside it: experts drop no token.
  bool texts_apart = false;
  /// The keys of the texts that passes continue (autograd/key_cache.h); null: they continue none. Not while
  /// recording.
  KeyCache* key_cache = nullptr;
  std::optional<DType> input_dtype;  ///< the dtype of floating inputs; not set: each keeps its own
  /// Hears of each product of a linear layer before it runs: its weight, and its inputs [.., inputs].
  std::function<void(const Parameter& weight, const Tensor& x)> watch_linear;

  // ---- leaves ----
  /// A value that takes no gradient. Floating values are converted to input_dtype, integers stay what they
  /// are.
  Var input(Tensor value);
  Var variable(Tensor value);  ///< collects a gradient
  /// One that is kept in few bits is made of its blocks where its value is read, once for all copies of the
  /// Var, and goes with the last of them.
  Var parameter(const ParameterPtr& parameter);
  /// The values of such a parameter.
  Tensor made_of_blocks(const Parameter& parameter) const;

  // ---- for operations ----
  bool recording() const { return recording_; }
  /// The output of an operation on `inputs`. When recording and any input wants a gradient, `backward` will
  /// be called with the output's gradient. `remake`, when given, lets selective recompute drop the output
  /// after forward. `where` names the operation in errors: the function that calls this. Throws
  /// Error{usage} for an input that wants a gradient and was recorded in an earlier pass, where none can go
  /// any more.
  Var record(Tensor value, std::initializer_list<Var> inputs, BackwardFn backward, RemakeFn remake = nullptr,
             std::source_location where = std::source_location::current()) {
    return record(std::move(value), std::span(inputs.begin(), inputs.size()), std::move(backward),
                  std::move(remake), where);
  }
  Var record(Tensor value, std::span<const Var> inputs, BackwardFn backward, RemakeFn remake = nullptr,
             std::source_location where = std::source_location::current());
  /// Adds `grad` to what `ref` has gathered. Takes the handle: a first gradient is not copied. Throws
  /// Error{usage} naming the operation whose backward runs unless `grad` has the value's shape and dtype; a
  /// parameter's may have any floating dtype.
  void accumulate(const GradRef& ref, Tensor grad);
  /// Takes out what `ref` has gathered, for a kernel that adds to it where it lies; accumulate() gives it
  /// back. Undefined where nothing has been gathered, where somebody else reads it too, and for a parameter.
  Tensor take_gathered(const GradRef& ref);
  /// Runs `compute`, which writes the gradient of `weight` and nothing else: at once, or where backward puts
  /// weight gradients off and `weight` is a parameter, in continue_weight_gradients(). It owns what it reads,
  /// and reads no parameter.
  void weight_gradient(const GradRef& weight, std::function<void(Tape&)> compute);
  /// Lets a kernel write a gradient where it belongs: write(destination, accumulate). Checks as accumulate()
  /// does.
  void write_grad(const GradRef& ref, const Shape& shape, DType dtype,
                  const std::function<void(const Tensor&, bool)>& write);
  /// Lets a kernel fold a parameter's gradient into the sum over micro-batches, write(destination,
  /// accumulate, rounding), where the parameter has a sum (Parameter::grad_sum) and this operation alone uses
  /// it in the pass. False where it has to go through write_grad(). Checks as accumulate() does.
  bool fold_grad(const GradRef& ref, const Shape& shape, DType dtype,
                 const std::function<void(const Tensor&, bool, DType)>& write);
  /// Activation memory of this tape's device.
  Tensor empty(const Shape& shape, DType dtype) const { return Tensor::empty(device(), shape, dtype); }
  /// x in that dtype; x itself where it has it or is undefined.
  Tensor converted(const Tensor& x, DType dtype) const;
  /// A copy of x in that dtype, which the processor can read.
  Tensor on_host(const Tensor& x, DType dtype) const;

  // ---- blocks ----
  void enter(const std::shared_ptr<Scope>& scope);
  void leave(const std::shared_ptr<Scope>& scope);
  /// Runs `body` and saves its inputs alone; backward runs it again (Chen et al. 2016, "Training deep nets
  /// with sublinear memory cost"). Parameters used inside are read under whatever lease holds then. Without
  /// recording, just runs it.
  Var recompute_later(const std::vector<Var>& inputs,
                      const std::function<Var(Tape&, const std::vector<Var>&)>& body);

  // ---- backward ----
  /// Runs the tape backwards from the scalar `loss`, with d loss = `seed`, and leaves it empty. Throws
  /// Error{usage}, before anything runs, for a loss of another tape, of an earlier pass, or computed without
  /// recording.
  void backward(const Var& loss, double seed = 1.0);
  /// The same from the gradients of any outputs, as a pipeline's stage gets them from the next one.
  void backward(const std::vector<OutputGradient>& outputs);
  /// backward() in parts: between two of them the caller does what the gradients complete so far allow.
  /// Throws what backward() throws. No outputs at all: nothing on the tape takes a gradient, and only blocks
  /// end.
  void begin_backward(const Var& loss, double seed, WeightGradients when = WeightGradients::now);
  void begin_backward(const std::vector<OutputGradient>& outputs,
                      WeightGradients when = WeightGradients::now);
  /// Runs on until a block's backward has ended; false once nothing is left.
  bool continue_backward();
  /// Computes the weight gradients that backward has put off, of one block; false once nothing is left.
  bool continue_weight_gradients();

  /// A tensor of the device that operations of a pass share, and that `make` makes once a pass. `what`: the
  /// kind of value, and then all that it depends on.
  Tensor shared_value(const std::vector<std::int64_t>& what, const std::function<Tensor()>& make);
  /// At the end of a pass that was not recorded.
  void drop_shared_values() { shared_values_.clear(); }

  /// Drops everything recorded: what comes is another pass.
  void clear();
  std::size_t size() const { return nodes_.size(); }

  /// While it lives, nothing is recorded.
  struct NoGrad : Replaced<bool> {
    explicit NoGrad(Tape& tape) : Replaced(tape.recording_, false) {}
  };

 private:
  std::vector<std::pair<std::vector<std::int64_t>, Tensor>> shared_values_;
  struct RecordedOperation {
    GradRef output;  // null for block markers
    BackwardFn backward;
    std::shared_ptr<Scope> scope;
    bool entering = false;            // the marker pushed by enter(): post_backward
    std::source_location where = {};  // who recorded the operation
  };
  /// A block whose backward runs, and the weight gradients that it has put off.
  struct Deferred {
    std::shared_ptr<Scope> scope;
    std::vector<std::function<void(Tape&)>> compute;
  };
  Var constant(Tensor value);
  std::string running() const;
  void count_uses(std::span<const Var> inputs);
  void check_gradient(const GradSlot& slot, const Shape& shape, DType dtype) const;
  Var leaf(Tensor value, GradRef slot);
  void require_gradient_arrives(const Var& input) const;
  Tensor moved(const Tensor& value, device::Tier tier) const;
  std::function<Tensor(Tape&)> save_input(const Var& input);
  void start(const std::vector<OutputGradient>& outputs, WeightGradients when);
  void require_output(const Var& output, const char* what) const;
  void run_back_to(std::size_t mark);
  bool run_last();
  void leave_block(const std::shared_ptr<Scope>& scope);

  tensor::Kernels& kernels_;
  std::vector<RecordedOperation> nodes_;
  std::uint64_t pass_ = 1;   ///< the pass that nodes_ holds
  std::uint64_t begun_ = 0;  ///< the pass whose backward began last
  bool recording_ = true;
  /// Operations of the forward pass that use a parameter, recorded or not.
  std::unordered_map<const Parameter*, int> uses_;
  WeightGradients when_ = WeightGradients::now;  ///< how the backward under way treats them
  std::vector<Deferred> entered_;                ///< blocks whose backward runs, the innermost last
  std::deque<Deferred> deferred_;                ///< blocks whose weight gradients are to come
  const RecordedOperation* running_ = nullptr;   // whose backward runs
};

}  // namespace sherd::autograd
