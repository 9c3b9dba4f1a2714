// One rank's GPT-2 step (forward, backward, clipping, AdamW) and where its time goes; the peer of
// bench/gpt2_pytorch.py. Prints one JSON object.
#include <algorithm>
#include <cstdio>
#include <numeric>

#include "bench/programs/options.h"
#include "bench/programs/serving.h"
#include "bench/programs/timed_kernels.h"
#include "bench/suite/rounds.h"
#include "models/gpt.h"
#include "optim/update_rule.h"
#include "support/plain_parameters.h"

namespace {

using namespace sherd;

struct Gpt2Settings {
  std::string mode = "bf16", recompute = "none";
  int threads = 2, steps = 3, warmup = 1, heads = 12;
  std::int64_t batch = 4, seq = 512, layers = 12, hidden = 768, vocab = 50257, vocab_multiple = 128;
  float dropout = 0;
  models::GptConfig options;
};

Gpt2Settings parse(int argc, char** argv) {
  Gpt2Settings s;
  bench::Options(
      "bench_gpt2_step",
      "[--mode fp32|bf16] [--style gpt2|llama] [--recompute none|selective|full] [--threads 2] [--steps 3]\n"
      "  [--warmup 1] [--batch 4] [--seq 512] [--layers 12] [--hidden 768] [--heads 12] [--vocab 50257]\n"
      "  [--vocab-multiple 128] [--dropout 0]")
      .value("mode", s.mode)
      .value("style",
             [&](const std::string& text) {
               require(text == "gpt2" || text == "llama", "--style takes gpt2 or llama, not '", text, "'");
               s.options = text == "llama" ? models::GptConfig::of_family("llama") : models::GptConfig();
             })
      .value("recompute", s.recompute)
      .value("threads", s.threads)
      .value("steps", s.steps)
      .value("warmup", s.warmup)
      .value("batch", s.batch)
      .value("seq", s.seq)
      .value("layers", s.layers)
      .value("hidden", s.hidden)
      .value("heads", s.heads)
      .value("vocab", s.vocab)
      .value("vocab-multiple", s.vocab_multiple)
      .value("dropout", s.dropout)
      .parse(argc, argv);
  require(parse_dtype(s.mode).has_value() && s.steps > 0,
          "--mode must be fp32 or bf16, and --steps positive");
  s.options.vocab_size = s.vocab, s.options.pad_vocab_to_multiple_of = s.vocab_multiple,
  s.options.seq_length = s.seq;
  s.options.hidden_size = s.hidden, s.options.num_layers = s.layers, s.options.num_heads = s.heads;
  s.options.embedding_dropout = s.options.attention_dropout = s.options.dropout = s.dropout;
  return s;
}

Recompute recompute_of(const std::string& name) {
  if (name == "selective") return Recompute::selective;
  require(name == "none" || name == "full", "--recompute takes none, selective or full");
  return name == "full" ? Recompute::full : Recompute::none;
}

/// AdamW on fp32 masters after clipping to norm 1, as the peer has it.
class AdamOptimizer {
 public:
  AdamOptimizer(tensor::Kernels& kernels, const std::vector<nn::ParameterPtr>& parameters)
      : kernels_(kernels), parameters_(parameters) {
    hyper_.lr = 1e-4, hyper_.weight_decay = 0.01;
    for (const auto& p : parameters_) {
      AdamState state;
      for (tensor::Tensor* moment : {&state.m, &state.v})
        *moment = tensor::Tensor::zeros(kernels.device(), p->shape, DType::f32, device::Category::optimizer);
      if (p->value.dtype() != DType::f32) {
        state.master =
            tensor::Tensor::empty(kernels.device(), p->shape, DType::f32, device::Category::optimizer);
        kernels.copy(p->value, state.master);
      }
      states_.push_back(state);
    }
  }

  void step() {
    tensor::ExactSum squares;
    for (const auto& p : parameters_) kernels_.sum_of_squares(p->grad, squares);
    const double factor = optim::clip_factor(std::sqrt(squares.value()), 1.0);
    ++count_;
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      const auto& p = parameters_[i];
      const AdamState& state = states_[i];
      optim::SpanUpdate span{.master = (state.master ? state.master : p->value).data<float>(),
                             .grad = p->grad.raw(),
                             .grad_dtype = p->grad.dtype(),
                             .moments = {state.m.data<float>(), state.v.data<float>()},
                             .n = p->numel(),
                             .grad_factor = factor,
                             .decay = p->decay};
      if (state.master) span.param = p->value.raw(), span.param_dtype = p->value.dtype();
      if (!optim::update(span, hyper_, count_, kernels_.device().arena()))
        fail(ErrorKind::numerics, "'", p->name, "' is no longer finite after step ", count_);
    }
  }

 private:
  struct AdamState {
    tensor::Tensor master, m, v;
  };
  tensor::Kernels& kernels_;
  const std::vector<nn::ParameterPtr>& parameters_;
  std::vector<AdamState> states_;
  optim::Hyper hyper_;
  std::int64_t count_ = 0;
};

void run(const Gpt2Settings& s) {
  test::Cpu cpu(s.threads);
  bench::TimedKernels kernels(*cpu.kernels);
  models::Gpt model(s.options);
  test::PlainParameters parameters(kernels, model, *parse_dtype(s.mode));
  const auto vocab = static_cast<std::int32_t>(s.options.vocab_size);
  const tensor::Batch batch{{"tokens", cpu.ids({s.batch, s.seq}, 1, vocab)},
                            {"labels", cpu.ids({s.batch, s.seq}, 2, vocab)}};
  AdamOptimizer optimizer(kernels, parameters.all());
  std::vector<double> times, forward;
  double optimizing = 0;
  double loss = 0;
  for (int step = 0; step < s.warmup + s.steps; ++step) {
    if (step == s.warmup) kernels.reset();
    autograd::Tape tape(kernels);
    tape.recompute = recompute_of(s.recompute);
    tape.random = {1, static_cast<std::uint64_t>(step)};
    autograd::Var out;
    double half = 0, update = 0;
    const double whole = bench::seconds_of([&] {
      half = bench::seconds_of([&] {
        out = model(tape, batch);
        loss = *out.value().data<float>();
      });
      tape.backward(out);
      update = bench::seconds_of([&] { optimizer.step(), parameters.zero_grad(); });
    });
    if (step >= s.warmup) times.push_back(whole), forward.push_back(half), optimizing += update;
  }
  const double median = bench::median(times), tokens = static_cast<double>(s.batch * s.seq), steps = s.steps;
  const double total = std::accumulate(times.begin(), times.end(), 0.0);
  const double gemm = kernels.seconds(tensor::KernelFamily::gemm);
  std::printf(
      "{\"peer\": \"sherd\", \"mode\": \"%s\", \"recompute\": \"%s\", \"step_s\": %.4f, \"best_s\": %.4f, "
      "\"forward_s\": %.4f, \"optimizer_s\": %.4f, \"tokens_per_s\": %.1f, \"loss\": %.5f, \"gemm_share\": "
      "%.3f, "
      "\"gemm_gflops\": %.0f, \"model_gflops\": %.0f, \"activation_peak_mib\": %.0f, \"seconds_per_step\": {",
      s.mode.c_str(), s.recompute.c_str(), median, *std::min_element(times.begin(), times.end()),
      bench::median(forward), optimizing / steps, tokens / median, loss, gemm / total,
      kernels.gemm_flops() / gemm / 1e9,
      models::flops_per_token(s.options, s.seq, models::AttentionFlops::causal_half) * tokens / median / 1e9,
      static_cast<double>(cpu.device->ledger().peak(device::Tier::device, device::Category::activations)) /
          (1 << 20));
  double known = 0;
  for (std::size_t i = 0; i < tensor::kernel_families.size(); ++i) {
    const double seconds = kernels.seconds(static_cast<tensor::KernelFamily>(i));
    known += seconds;
    std::printf("\"%s\": %.4f, ", tensor::kernel_families[i].data(), seconds / steps);
  }
  // The optimizer's pass over its spans is no kernel; its norm is (reduction).
  std::printf("\"other\": %.4f}}\n", (total - known) / steps);
}

}  // namespace

int main(int argc, char** argv) {
  return bench::guarded("bench_gpt2_step", [&] { run(parse(argc, argv)); });
}
