// Counts what a transformer layer of GPT-2's style exchanges and holds, and compares it with formulas. Two
// models are measured that differ by one layer: embedding, head and loss drop out.
//
// Symbols are the papers': sequence s, micro-batch b, hidden size h, heads a; t tensor and c context ranks.
// A rank has s/c tokens of a sequence, n = s·b/c in all.
#include <gtest/gtest.h>

#include <mutex>

#include "support/cut.h"
#include "support/tiny_gpt.h"

namespace sherd::models {
namespace {

using comm::Traffic;
using device::Tier;
using test::Cut;
using Bytes = std::uint64_t;

constexpr Bytes s = 32, b = 2, h = 48, a = 8;

/// Bytes of one rank: of one layer, in what follows.
struct Counts {
  struct Pass {
    Traffic tensor, context;
  };
  Pass forward, backward;
  Bytes held = 0;  ///< between forward and backward
  Bytes peak = 0;  ///< largest of the whole step
};

GptConfig options(std::int64_t layers) {
  GptConfig o;
  o.vocab_size = 40, o.pad_vocab_to_multiple_of = 8, o.seq_length = s, o.hidden_size = h, o.num_heads = a,
  o.num_layers = layers;
  return test::with_dropout(o);
}

Traffic difference(const Traffic& x, const Traffic& y) {
  return {.all_reduce = x.all_reduce - y.all_reduce,
          .all_gather = x.all_gather - y.all_gather,
          .reduce_scatter = x.reduce_scatter - y.reduce_scatter,
          .all_to_all = x.all_to_all - y.all_to_all,
          .broadcast = x.broadcast - y.broadcast,
          .p2p = x.p2p - y.p2p,
          .scalars = x.scalars - y.scalars,
          .between_machines = x.between_machines - y.between_machines};
}
Counts::Pass difference(const Counts::Pass& x, const Counts::Pass& y) {
  return {difference(x.tensor, y.tensor), difference(x.context, y.context)};
}

class Measurement {
 public:
  Measurement(const Cut& cut, DType dtype, Recompute recompute)
      : cut_(cut), dtype_(dtype), recompute_(recompute) {}

  /// One more layer adds this on each rank.
  std::vector<Counts> layer() const {
    std::vector<Counts> less = step(2), more = step(3);
    for (std::size_t r = 0; r < more.size(); ++r) {
      Counts& layer = more[r];
      layer.forward = difference(layer.forward, less[r].forward);
      layer.backward = difference(layer.backward, less[r].backward);
      layer.held -= less[r].held, layer.peak -= less[r].peak;
    }
    return more;
  }

 private:
  std::vector<Counts> step(std::int64_t layers) const {
    std::vector<Counts> out(static_cast<std::size_t>(cut_.ranks()));
    comm::run_local(cut_.ranks(), {.timeout_seconds = 60}, [&](comm::Communicator& world) {
      comm::ProcessGroups groups(world, cut_.grid());
      out[static_cast<std::size_t>(world.rank())] = rank_step(layers, groups);
    });
    return out;
  }
  Counts rank_step(std::int64_t layers, comm::ProcessGroups& groups) const {
    test::Cpu cpu(1);
    const device::Ledger& ledger = cpu.device->ledger();
    Gpt model(options(layers), cut_.layout(groups));
    const test::PlainParameters parameters(*cpu.kernels, model, dtype_);
    const tensor::Batch batch = test::tiny_batch(cpu, model.config(), b, s);
    const Bytes before = ledger.current(Tier::device);
    groups.reset_traffic();
    autograd::Tape tape(*cpu.kernels);
    tape.random = {5, 6};
    tape.recompute = recompute_;
    const autograd::Var loss = model(tape, batch);
    Counts out;
    out.forward = take(groups), out.held = ledger.current(Tier::device) - before;
    tape.backward(loss);
    out.backward = take(groups);
    out.peak = ledger.peak(Tier::device) - before;
    return out;
  }
  static Counts::Pass take(comm::ProcessGroups& groups) {
    const Counts::Pass out{groups.group(comm::Axis::tensor).traffic(),
                           groups.group(comm::Axis::context).traffic()};
    Bytes all = 0;
    for (const auto& group : groups.traffic()) all += group.traffic.payload();
    EXPECT_EQ(out.tensor.payload() + out.context.payload(), all) << "another group carried something";
    groups.reset_traffic();
    return out;
  }

  Cut cut_;
  DType dtype_;
  Recompute recompute_;
};

/// The papers' formula.
class Formulas {
 public:
  Formulas(const Cut& cut, DType dtype, Recompute recompute)
      : t_(static_cast<Bytes>(cut.tensor)),
        c_(static_cast<Bytes>(cut.context)),
        n_(s * b / c_),
        width_(size_of(dtype)),
        sequence_(cut.sequence && t_ > 1),
        ring_(cut.method == ContextMethod::ring),
        recompute_(recompute) {}

  Counts layer() const {
    Counts out;
    out.forward = {tensor_forward(), context_forward()};
    out.backward = {tensor_backward(), context_backward()};
    out.held = out.peak = held();
    return out;
  }

 private:
  /// Elements that a rank sends in a collective over t ranks on n·h elements.
  Bytes part() const { return n_ * h / t_ * (t_ - 1) * width_; }
  /// Keys, or values, or queries, of a rank's tokens and heads: elements.
  Bytes block() const { return n_ * h / t_; }

  /// Shoeybi et al. 2019, "Megatron-LM", section 3: an all-reduce of n·h after attention and one after the
  /// MLP. An all-reduce is a reduce-scatter and an all-gather, which is how Korthikanti et al. 2022
  /// ("Reducing Activation Recomputation in Large Transformer Models", section 4.2.2) cut it: gathers before
  /// the column-parallel layers, reduce-scatters after the row-parallel ones.
  Traffic tensor_forward() const {
    Traffic out;
    if (sequence_)
      out.all_gather = out.reduce_scatter = 2 * part();
    else
      out.all_reduce = 2 * 2 * part();
    return out;
  }
  /// The conjugates of these; and with sequence parallelism the input of column-parallel layers, of which
  /// ranks keep their own rows, is gathered again for the weight gradients (the same, section 4.2.2). Norms
  /// and activations that selective recompute makes again need nobody else; full recompute runs forward
  /// again.
  Traffic tensor_backward() const {
    Traffic out;
    if (sequence_)
      out.all_gather = (2 + 2) * part(), out.reduce_scatter = 2 * part();
    else
      out.all_reduce = 2 * 2 * part();
    if (recompute_ == Recompute::full) out.add(tensor_forward());
    return out;
  }

  /// Liu et al. 2023, "Ring Attention with Blockwise Transformers", section 3: keys and values visit the c −
  /// 1 other ranks. Jacobs et al. 2023, "DeepSpeed Ulysses", section 3: all-to-alls of queries, keys,
  /// values and the output, of which each rank keeps 1/c; the first three packed into one here.
  Traffic context_forward() const {
    Traffic out;
    if (ring_)
      out.p2p = (c_ - 1) * 2 * block() * width_;
    else
      out.all_to_all = (3 + 1) * sent_to_heads();
    return out;
  }
  /// The ring: keys and values again, and their gradients in fp32, which end where they belong after c hops.
  /// Ulysses: the gradients of what forward exchanged. Selective recompute runs attention again: in the ring
  /// keys and values go around once more, of Ulysses the output is exchanged again, as its inputs are kept.
  Traffic context_backward() const {
    Traffic out;
    if (c_ == 1) return out;
    if (ring_)
      out.p2p = (c_ - 1) * 2 * block() * width_ + c_ * 2 * block() * 4;
    else
      out.all_to_all = (3 + 1) * sent_to_heads() + (recompute_ == Recompute::selective ? sent_to_heads() : 0);
    if (recompute_ == Recompute::full || (recompute_ == Recompute::selective && ring_))
      out.add(context_forward());
    return out;
  }
  Bytes sent_to_heads() const { return block() / c_ * (c_ - 1) * width_; }

  /// Korthikanti et al. 2022, sections 4.1 and 4.2, by what it is of; below it is held against their sums.
  Bytes held() const {
    const Bytes stream = sequence_ ? n_ / t_ : n_;  // tokens between the layers that tensor ranks share
    const Bytes statistics = 2 * 2 * 4 * stream;    // of two norms, mean and 1/σ in fp32
    const Bytes sums = 4 * n_ * a / t_;             // attention's log-sum-exp by query and head, in fp32
    const bool again = recompute_ == Recompute::selective;
    const Bytes norms = 2 + (again ? 0 : 2);  // inputs; and outputs, which column-parallel layers read
    const Bytes wide = 3 + 4 +                // queries, keys and values; GeLU's input
                       (again ? 0 : 4 + 1);   // and its output; attention's output
    // Ulysses keeps attention's output twice: by heads for attention's backward, by tokens for what follows.
    const Bytes twice = c_ > 1 && !ring_ && !again ? 1 : 0;
    if (recompute_ == Recompute::full) return stream * h * width_;
    return (norms * stream * h + (wide + twice) * block()) * width_ + statistics + sums;
  }

  Bytes t_, c_, n_, width_;
  bool sequence_, ring_;
  Recompute recompute_;
};

void expect_equal(const Traffic& got, const Traffic& want, const char* where) {
  SCOPED_TRACE(where);
  EXPECT_EQ(got.all_reduce, want.all_reduce);
  EXPECT_EQ(got.all_gather, want.all_gather);
  EXPECT_EQ(got.reduce_scatter, want.reduce_scatter);
  EXPECT_EQ(got.all_to_all, want.all_to_all);
  EXPECT_EQ(got.p2p, want.p2p);
  EXPECT_EQ(got.broadcast + got.scalars, 0u);
}

class Counted : public ::testing::TestWithParam<Cut> {};

TEST_P(Counted, AsTheFormulasSay) {
  for (const auto recompute : {Recompute::none, Recompute::selective, Recompute::full})
    for (const DType dtype : {DType::bf16, DType::f32}) {
      SCOPED_TRACE(cat("recompute ", static_cast<int>(recompute), " in ", name_of(dtype)));
      const Counts want = Formulas(GetParam(), dtype, recompute).layer();
      for (const Counts& got : Measurement(GetParam(), dtype, recompute).layer()) {
        expect_equal(got.forward.tensor, want.forward.tensor, "forward, tensor ranks");
        expect_equal(got.backward.tensor, want.backward.tensor, "backward, tensor ranks");
        expect_equal(got.forward.context, want.forward.context, "forward, context ranks");
        expect_equal(got.backward.context, want.backward.context, "backward, context ranks");
        EXPECT_EQ(got.held, want.held);
        EXPECT_EQ(got.peak, want.peak) << "what a layer holds, backward did not let go";
      }
    }
}

INSTANTIATE_TEST_SUITE_P(Over, Counted,
                         ::testing::Values(Cut{}, Cut{2}, Cut{2, 1, false}, Cut{4}, Cut{4, 1, false},
                                           Cut{1, 2}, Cut{1, 4}, Cut{1, 2, true, ContextMethod::ulysses},
                                           Cut{1, 4, true, ContextMethod::ulysses}, Cut{2, 2},
                                           Cut{2, 2, false}, Cut{2, 2, true, ContextMethod::ulysses},
                                           Cut{2, 4}, Cut{4, 2}),
                         [](const auto& test) { return test.param.str(); });

Bytes held(const Cut& cut, Recompute recompute) {
  return Measurement(cut, DType::bf16, recompute).layer().front().held;
}

/// Korthikanti et al. 2022, table 2, at 16 bits: s·b·h·(34 + 5·a·s/h) on one rank, of which
/// tensor parallelism leaves 10 + 24/t + 5·a·s/(h·t) and with sequence parallelism all is cut by t. Not held
/// here: 5·a·s²·b of scores, which attention makes again from 4 bytes by query and head, and masks of
/// dropout, of a byte for each of 2·s·b·h elements, which come again from counters. Published without, small:
/// statistics of two norms, 16 bytes by token.
TEST(CountedBytes, AreThePublishedOnesLessWhatIsMadeAgain) {
  for (const Bytes t : {1, 2, 4}) {
    const int ranks = static_cast<int>(t);
    const Bytes own = 4 * s * b * a / t;
    EXPECT_EQ(held({ranks, 1, true}, Recompute::none),
              s * b * h * 34 / t - 2 * s * b * h / t + 16 * s * b / t + own);
    EXPECT_EQ(held({ranks, 1, false}, Recompute::none),
              s * b * h * (10 + 24 / t) - 2 * s * b * h + 16 * s * b + own);
    EXPECT_EQ(held({ranks, 1, true}, Recompute::full), 2 * s * b * h / t);
  }
}

/// Nothing is left that ranks hold alike.
TEST(CountedBytes, AreCutByAllRanks) {
  for (const auto recompute : {Recompute::none, Recompute::selective, Recompute::full}) {
    const Bytes alone = held({}, recompute);
    for (const Cut& cut : {Cut{2}, Cut{4}, Cut{1, 2}, Cut{1, 4}, Cut{2, 2}, Cut{4, 2}})
      EXPECT_EQ(held(cut, recompute) * static_cast<Bytes>(cut.ranks()), alone) << cut.str();
  }
}

}  // namespace
}  // namespace sherd::models
