// Models cut over tensor and context ranks against the same model on one rank, which reference_test.cpp holds
// against PyTorch.
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <mutex>

#include "autograd/key_cache.h"
#include "comm/dry/dry_world.h"
#include "support/cut.h"
#include "support/expect_error.h"
#include "support/logical_gradients.h"
#include "support/tiny_gpt.h"
#include "support/vectors.h"

namespace sherd::models {
namespace {

using parallel::Layout;
using tensor::Tensor;
using test::Cut, test::norm;
using Values = std::vector<double>;

/// GPT-2's style; what is cut over four ranks has no other factor of two to spare.
GptConfig gpt2() {
  GptConfig o;
  o.vocab_size = 91, o.pad_vocab_to_multiple_of = 4, o.seq_length = 48, o.hidden_size = 20, o.num_layers = 2,
  o.num_heads = 4;
  o.ffn_hidden_size = 44, o.init_std = 0.2;
  return test::with_dropout(o);
}

/// Llama's, with grouped queries; over four ranks there are fewer key-value heads than ranks.
GptConfig llama() {
  GptConfig o = GptConfig::of_family("llama");
  o.vocab_size = 45, o.pad_vocab_to_multiple_of = 4, o.seq_length = 48, o.hidden_size = 20, o.num_layers = 2,
  o.num_heads = 8;
  o.num_kv_heads = 2, o.head_dim = 6, o.ffn_hidden_size = 28, o.init_std = 0.2;
  return test::with_dropout(o);
}

/// Latent attention, of queries too.
GptConfig latents() {
  GptConfig o = llama();
  o.num_kv_heads = o.head_dim = 0;
  o.mla = {
      .kv_lora_rank = 8, .q_lora_rank = 10, .qk_nope_head_dim = 6, .qk_rope_head_dim = 4, .v_head_dim = 7};
  return o;
}

/// Linear attention and gated attention in turns; context ranks do not share the former.
GptConfig hybrid() {
  GptConfig o = llama();
  o.layer_types = {config::LayerType::linear_attention, config::LayerType::full_attention};
  o.linear_attention = {
      .num_key_heads = 4, .num_value_heads = 8, .key_head_dim = 6, .value_head_dim = 5, .conv_kernel_dim = 4};
  o.attention_gate = true;
  return o;
}

/// Experts of which each token takes both, so that rounding chooses no others, and a dense part beside them.
GptConfig with_beside(GptConfig o) {
  o.moe.experts = 2, o.moe.top_k = 2, o.moe.norm_topk = false, o.moe.jitter = 0.1;
  test::set_losses(o.moe, {.balance = 0.3, .z = 0.1, .kind = BalanceLoss::first_choices});
  if (o.norm == config::Norm::rmsnorm)
    o.moe.shared_experts = 1, o.moe.shared_expert_gate = true;
  else
    o.moe.use_residual = true;
  return o;
}

/// Results of a micro-batch: logits of the whole sequence, loss, and the logical gradients.
struct Outcome {
  Values logits;
  double loss = 0;
  std::map<std::string, Values> gradients;
};

class ParallelModel {
 public:
  ParallelModel(GptConfig options, DType dtype, Recompute recompute = Recompute::none)
      : options_(std::move(options)), dtype_(dtype), recompute_(recompute) {}

  Outcome run(const Cut& cut) {
    Outcome out;
    std::mutex mutex;
    test::LogicalGradients gradients;
    comm::run_local(cut.ranks(), {.timeout_seconds = 60}, [&](comm::Communicator& world) {
      comm::ProcessGroups groups(world, cut.grid());
      run_rank(cut.layout(groups), out, gradients, mutex);
    });
    out.gradients = gradients.take();
    return out;
  }

 private:
  void run_rank(const Layout& layout, Outcome& out, test::LogicalGradients& gradients,
                std::mutex& mutex) const {
    test::Cpu cpu(1);
    Gpt model(options_, layout);
    const test::PlainParameters parameters(*cpu.kernels, model, dtype_);
    tensor::Batch batch = test::tiny_batch(cpu, options_, 2, options_.seq_length);
    for (int i = 0; i < 20; ++i) batch["labels"].data<std::int32_t>()[3 * i] = -100;  // unevenly over ranks
    autograd::Tape tape(*cpu.kernels);
    tape.random = {5, 6};
    tape.recompute = recompute_;
    const auto logits = cpu.values(model.logits(tape, batch["tokens"]).value());
    tape.clear();
    const autograd::Var loss = model(tape, batch);
    const double value = cpu.values(loss.value())[0];
    tape.backward(loss);
    gradients.add(cpu, parameters, layout);
    const std::lock_guard lock(mutex);
    if (out.logits.empty()) out.logits = logits, out.loss = value;  // of the first rank to come
    EXPECT_EQ(logits, out.logits) << "ranks have different logits";
    EXPECT_EQ(value, out.loss) << "ranks have different losses";
  }

  GptConfig options_;
  DType dtype_;
  Recompute recompute_;
};

double distance(const Values& a, const Values& b) {
  EXPECT_EQ(a.size(), b.size());
  Values difference = a;
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) difference[i] -= b[i];
  return norm(difference) / norm(b);
}

void expect_close(const Outcome& got, const Outcome& want, double tolerance) {
  EXPECT_LE(distance(got.logits, want.logits), tolerance);
  EXPECT_NEAR(got.loss, want.loss, tolerance * want.loss);
  ASSERT_EQ(got.gradients.size(), want.gradients.size());
  for (const auto& [name, gradient] : want.gradients) {
    ASSERT_GT(norm(gradient), 0) << name;
    EXPECT_LE(distance(got.gradients.at(name), gradient), tolerance) << name;
  }
}

class Cuts : public ::testing::TestWithParam<Cut> {
 protected:
  /// Ulysses takes whole key-value heads, and no context ranks linear attention.
  bool fits(const GptConfig& o) const {
    if (o.any_linear() && GetParam().context > 1) return false;
    const int kv_heads = o.num_kv_heads == 0 ? o.num_heads : o.num_kv_heads;
    const int own = std::max(1, kv_heads / GetParam().tensor);
    return GetParam().method == ContextMethod::ring || GetParam().context == 1 ||
           own % GetParam().context == 0;
  }
};

TEST_P(Cuts, GiveWhatOneRankGives) {
  static std::map<std::pair<int, DType>, Outcome> of_one_rank;
  int at = 0;
  for (const GptConfig& o :
       {gpt2(), llama(), latents(), hybrid(), with_beside(gpt2()), with_beside(llama())}) {
    ++at;
    if (!fits(o)) continue;
    SCOPED_TRACE(cat(o.norm == config::Norm::rmsnorm ? "llama" : "gpt2",
                     o.mla.kv_lora_rank > 0 ? " with latents"
                     : o.any_linear()       ? " with linear attention"
                                            : "",
                     o.moe.experts > 0 ? " with experts" : ""));
    for (const auto& [dtype, tolerance] :
         {std::pair{DType::f64, 1e-11}, {DType::f32, 1e-5}, {DType::bf16, 6e-2}}) {
      SCOPED_TRACE(name_of(dtype));
      ParallelModel model(o, dtype);
      Outcome& want = of_one_rank[{at, dtype}];
      if (want.logits.empty()) want = model.run({});
      // The gradient of what weighs two parts against each other is a small rest of large sums.
      const bool cancels = o.moe.use_residual && dtype == DType::bf16;
      expect_close(model.run(GetParam()), want, cancels ? 0.2 : tolerance);
    }
  }
}

/// Texts that continue: each rank keeps the keys of its heads.
TEST_P(Cuts, ContinueTextsAsOneRankDoes) {
  const Cut cut = GetParam();
  if (cut.context > 1) GTEST_SKIP() << "single tokens cannot be cut";
  for (const GptConfig& o : {gpt2(), llama(), latents(), hybrid()}) {
    if (!fits(o)) continue;
    constexpr std::int64_t seq = 7, prompt = 4;
    test::Cpu cpu(1);
    Gpt alone(o);
    const test::PlainParameters parameters(*cpu.kernels, alone, DType::f64);
    const Tensor text = cpu.ids({2, seq}, 3, static_cast<std::int32_t>(o.vocab_size));
    autograd::Tape tape(*cpu.kernels);
    tape.training = false;
    const Values want = cpu.values(alone.logits(tape, text).value());
    comm::run_local(cut.tensor, {.timeout_seconds = 60}, [&](comm::Communicator& world) {
      const comm::ProcessGroups groups(world, comm::Grid(world.size(), {.tensor = cut.tensor}));
      const Layout layout{&groups.group(comm::Axis::tensor), nullptr, false};
      test::Cpu mine(1);
      Gpt model(o, layout);
      const test::PlainParameters held(*mine.kernels, model, DType::f64);
      autograd::Tape own(*mine.kernels);
      own.training = false;
      autograd::KeyCache cache(2, seq);
      own.key_cache = &cache;
      for (std::int64_t at = 0; at < seq; at = at == 0 ? prompt : at + 1) {
        const std::int64_t rows = at == 0 ? prompt : 1;
        const Tensor ids = Tensor::empty(*mine.device, {2, rows}, DType::i32);
        mine.kernels->copy_rows({text, at, seq}, {ids, 0, rows}, 2, rows);
        cache.begin(*mine.device, {{0, at, rows}, {1, at, rows}}, rows);
        const Values got = mine.values(model.next_logits(own, ids));
        const std::size_t scores = got.size() / 2;
        for (std::size_t i = 0; i < got.size(); ++i)
          ASSERT_NEAR(
              got[i],
              want[(i / scores * seq + static_cast<std::size_t>(at + rows - 1)) * scores + i % scores], 1e-9)
              << at;
      }
    });
  }
}

TEST_P(Cuts, RecomputeTheSameBits) {
  for (const GptConfig& o : {gpt2(), llama(), latents(), hybrid()}) {
    if (!fits(o)) continue;
    SCOPED_TRACE(o.norm == config::Norm::rmsnorm ? "llama" : "gpt2");
    const Outcome want = ParallelModel(o, DType::f32).run(GetParam());
    for (const auto recompute : {Recompute::selective, Recompute::full}) {
      const Outcome got = ParallelModel(o, DType::f32, recompute).run(GetParam());
      EXPECT_EQ(got.loss, want.loss);
      EXPECT_EQ(got.gradients, want.gradients);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Over, Cuts,
                         ::testing::Values(Cut{2}, Cut{2, 1, false}, Cut{4}, Cut{4, 1, false}, Cut{1, 2},
                                           Cut{1, 4}, Cut{1, 2, true, ContextMethod::ulysses},
                                           Cut{1, 4, true, ContextMethod::ulysses}, Cut{2, 2},
                                           Cut{2, 2, false}, Cut{2, 2, true, ContextMethod::ulysses},
                                           Cut{2, 4}, Cut{4, 2}),
                         [](const auto& test) { return test.param.str(); });

TEST(ParallelModels, ThatCannotBeCutAreConfigErrors) {
  const auto refuses = [](const std::string& part, const Cut& cut,
                          const std::function<void(GptConfig&)>& change) {
    GptConfig o = gpt2();
    change(o);
    const auto tensor = comm::make_dry_world(0, cut.tensor), context = comm::make_dry_world(0, cut.context);
    testing::expect_error(ErrorKind::config, part, [&] {
      Gpt model(o, {tensor.get(), context.get(), cut.sequence, cut.method});
    });
  };
  refuses("3 tensor ranks cannot share 4 heads", {3},
          [](GptConfig& o) { o.pad_vocab_to_multiple_of = 3, o.ffn_hidden_size = 45; });
  refuses("width of 42 cannot be cut over 4 tensor ranks: make model.ffn_hidden_size a multiple of 4", {4},
          [](GptConfig& o) { o.ffn_hidden_size = 42; });
  refuses("context ranks cannot share a sequence of which linear_attention keeps states", {1, 2},
          [](GptConfig& o) { o = hybrid(); });
  refuses("6 key heads of linear_attention cannot be cut over 4 tensor ranks", {4}, [](GptConfig& o) {
    o = hybrid();
    o.linear_attention.num_key_heads = 6, o.linear_attention.num_value_heads = 12;
  });
  refuses("model.seq_length a multiple of 2", {2}, [](GptConfig& o) { o.seq_length = 47; });
  refuses("model.seq_length a multiple of 8", {1, 4}, [](GptConfig& o) { o.seq_length = 12; });
  refuses("padded to 90 ids", {4}, [](GptConfig& o) { o.pad_vocab_to_multiple_of = 2, o.vocab_size = 90; });
}

}  // namespace
}  // namespace sherd::models
