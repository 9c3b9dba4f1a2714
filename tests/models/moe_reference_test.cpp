// Tiny models with experts, and DeepSeek-V3's router, with Hugging Face's weights against what its
// transformers says; scripts/references/make_moe_reference.py made the files and says what they hold.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <numeric>

#include "autograd/ops.h"
#include "comm/process_groups.h"
#include "models/gpt.h"
#include "support/hugging_face/hugging_face_dict.h"
#include "support/logical_gradients.h"
#include "support/places.h"
#include "support/reference_file.h"
#include "support/tiny_gpt.h"
#include "support/vectors.h"

namespace sherd::models {
namespace {

using autograd::Var;
using tensor::Tensor;
using test::largest, test::minus, test::norm;
using Values = std::vector<double>;

/// `whole`: the norm of all that belongs to these values, next to which they may be small.
void expect_alike(const Values& got, const Values& want, double tolerance, double whole = 0) {
  ASSERT_EQ(got.size(), want.size());
  const Values difference = minus(got, want);
  EXPECT_LE(norm(difference), tolerance * std::max(norm(want), 1e-3 * whole));
  EXPECT_LE(largest(difference), tolerance * std::max(largest(want), 1.0));
}

/// fp64 shows what the files round, to fp32.
struct Precision {
  DType dtype;
  double tolerance;
};
constexpr Precision precisions[] = {{DType::f32, 1e-5}, {DType::f64, 1e-7}};

class File {
 public:
  explicit File(const std::string& name)
      : tensors_(test::read_reference(SHERD_SOURCE_DIR "/tests/models/reference/" + name + ".safetensors")) {}

  const test::ReferenceTensor& at(const std::string& name) const {
    const auto found = tensors_.find(name);
    require(found != tensors_.end(), "the file has no '", name, "'");
    return found->second;
  }
  Values values(const std::string& name) const {
    const test::ReferenceTensor& stored = at(name);
    if (stored.dtype == DType::i32) return widened(stored.values<std::int32_t>());
    return widened(stored.values<float>());
  }
  /// Values of several tensors, one behind the other.
  Values values(const std::string& prefix, const std::vector<std::string>& names) const {
    Values out;
    for (const std::string& name : names) {
      const Values more = values(prefix + name);
      out.insert(out.end(), more.begin(), more.end());
    }
    return out;
  }
  Tensor load(test::Cpu& cpu, const std::string& name) const {
    const test::ReferenceTensor& stored = at(name);
    Tensor out = Tensor::empty(*cpu.device, stored.shape, stored.dtype);
    tensor::copy_from_host(*cpu.device, out, stored.bytes.data(), stored.bytes.size());
    return out;
  }
  HostTensorSource source(const std::string& prefix) const {
    return [this, prefix](const std::string& name) -> std::optional<HostTensor> {
      const auto found = tensors_.find(prefix + name);
      if (found == tensors_.end()) return std::nullopt;
      return HostTensor{found->second.shape, found->second.dtype, found->second.bytes};
    };
  }

 private:
  template <class T>
  static Values widened(const std::vector<T>& x) {
    return {x.begin(), x.end()};
  }

  std::map<std::string, test::ReferenceTensor> tensors_;
};

/// This rank's part of a parameter.
void set(test::Cpu& cpu, const autograd::Parameter& p, const Values& whole) {
  Values local(static_cast<std::size_t>(p.numel()));
  p.logical_slice().for_each_run(0, p.numel(), [&](std::int64_t to, std::int64_t from, std::int64_t n) {
    std::copy_n(whole.begin() + from, n, local.begin() + to);
  });
  cpu.kernels->copy(Tensor::of<double>(*cpu.device, p.shape, local), p.value);
}

/// An expert without tokens gets no gradient.
Values gradient(test::Cpu& cpu, const autograd::Parameter& p) {
  return p.grad_written ? cpu.values(p.grad) : Values(static_cast<std::size_t>(p.numel()));
}

/// How many share a model, and its data.
struct Ranks {
  int tensor = 1, context = 1, data = 1;
  int expert = 1;  ///< ranks of context x data that share experts

  int all() const { return tensor * context * data; }
  std::string str() const {
    return cat("tensor ", tensor, ", context ", context, ", data ", data, ", expert ", expert);
  }
};

class MoeReference : public ::testing::TestWithParam<std::string> {
 protected:
  MoeReference() : mixtral_(GetParam() == "mixtral"), file_(GetParam()) {
    options_ = GptConfig::of_family("llama");
    GptConfig& o = options_;
    o.hidden_size = 24, o.num_heads = 4, o.num_kv_heads = 2, o.seq_length = 32;
    o.moe.aux_loss = 0;
    if (mixtral_) {
      o.vocab_size = 37, o.num_layers = 2, o.norm_epsilon = 1e-5, o.rotary_base = 1e6;
      o.ffn_hidden_size = 14, o.moe.experts = 4, o.moe.top_k = 2;
    } else {
      o.vocab_size = 43, o.num_layers = 3, o.norm_epsilon = 1e-6, o.ffn_hidden_size = 20;
      o.moe.ffn_hidden_size = 12, o.moe.experts = 8, o.moe.every = 2;
      o.moe.top_k = 3;
    }
    o = o.resolved();
  }

  /// The whole of a parameter, or with a prefix of its gradient.
  Values of_parameter(const std::string& parameter, const std::string& prefix = "") const {
    GptConfig published = options_;
    published.qk_norm = !mixtral_;  // Qwen3-MoE's class has those norms
    const HostTensor host = from_dict(HuggingFaceLayout(published), parameter, file_.source(prefix));
    test::Cpu cpu(1);
    const Tensor out = Tensor::empty(*cpu.device, host.shape, host.dtype);
    tensor::copy_from_host(*cpu.device, out, host.bytes.data(), host.bytes.size());
    return cpu.values(out);
  }
  void load_weights(test::Cpu& cpu, const test::PlainParameters& parameters) const {
    for (const auto& p : parameters.all()) set(cpu, *p, of_parameter(p->name));
  }
  void expect_gradients(const std::map<std::string, Values>& got, const std::string& prefix,
                        double tolerance) const {
    std::map<std::string, Values> want;
    double whole = 0;
    for (const auto& [name, values] : got) {
      want[name] = of_parameter(name, prefix);
      whole = std::hypot(whole, norm(want[name]));
    }
    EXPECT_GT(whole, 0.1);
    for (const auto& [name, values] : got) {
      SCOPED_TRACE(prefix + name);
      expect_alike(values, want[name], tolerance, whole);
    }
  }
  /// Parameters whose gradients are in the file, of each layer. Of a single layer the balance loss of
  /// transformers is k times Switch's.
  parallel::RouterLosses router_losses() const {
    if (mixtral_) return {.balance = 0.02, .z = 0.001};
    return {.balance = 0.02 * options_.moe.top_k};
  }
  static parallel::RouterLosses pooled() { return {.balance = 0.02, .kind = BalanceLoss::pooled}; }
  std::string with_router_losses() const { return mixtral_ ? "grad_layers." : "grad."; }
  /// The gradients of a pass by one rank.
  std::map<std::string, Values> gradients(DType dtype, Recompute recompute) {
    Gpt model(options_);
    const test::PlainParameters parameters(*cpu_.kernels, model, dtype);
    load_weights(cpu_, parameters);
    autograd::Tape tape(*cpu_.kernels);
    tape.recompute = recompute;
    tape.backward(model(tape, batch()));
    std::map<std::string, Values> out;
    for (const auto& p : parameters.all()) out[p->name] = gradient(cpu_, *p);
    return out;
  }
  tensor::Batch batch() {
    return {{"tokens", file_.load(cpu_, "tokens")}, {"labels", file_.load(cpu_, "labels")}};
  }
  /// The columns of logits that are tokens.
  Values scores(test::Cpu& cpu, const Tensor& logits) const {
    const Values all = cpu.values(logits);
    const std::int64_t rows = logits.shape().rows(), padded = options_.padded_vocab();
    Values out;
    for (std::int64_t row = 0; row < rows; ++row)
      out.insert(out.end(), all.begin() + row * padded, all.begin() + row * padded + options_.vocab_size);
    return out;
  }
  /// The sequences of one of several data ranks.
  tensor::Batch batch(test::Cpu& cpu, int rank, int ranks) const {
    tensor::Batch out;
    for (const char* name : {"tokens", "labels"}) {
      const Tensor all = file_.load(cpu, name);
      const std::int64_t rows = all.shape()[0] / ranks, seq = all.shape()[1];
      out[name] = all.range(rank * rows * seq, (rank + 1) * rows * seq).reshape({rows, seq});
    }
    return out;
  }
  /// The gradients of a pass that ranks share; of data ranks, which have as many labels, their mean.
  std::map<std::string, Values> gradients_over(const Ranks& ranks) const {
    test::LogicalGradients gradients;
    comm::run_local(ranks.all(), {.timeout_seconds = 60}, [&](comm::Communicator& world) {
      const comm::Grid grid(world.size(),
                            {.tensor = ranks.tensor, .context = ranks.context, .expert = ranks.expert});
      comm::ProcessGroups groups(world, grid);
      const comm::Communicator& data = groups.group(comm::Axis::data);
      parallel::Layout layout{&groups.group(comm::Axis::tensor), &groups.group(comm::Axis::context)};
      layout.groups = &groups;
      test::Cpu cpu(1);
      Gpt model(options_, layout);
      const test::PlainParameters parameters(*cpu.kernels, model, DType::f32);
      load_weights(cpu, parameters);
      autograd::Tape tape(*cpu.kernels);
      const tensor::Batch mine = batch(cpu, data.rank(), data.size());
      const Values all = file_.values("logits");
      const std::ptrdiff_t share = std::ssize(all) / data.size();
      expect_alike(scores(cpu, model.logits(tape, mine.at("tokens")).value()),
                   {all.begin() + data.rank() * share, all.begin() + (data.rank() + 1) * share}, 1e-5);
      tape.clear();
      tape.backward(model(tape, mine));
      for (const auto& p : parameters.all()) {
        if (p->grad_written) continue;
        cpu.kernels->fill(p->grad, 0);  // an expert without tokens, or of another rank
        p->grad_written = true;
      }
      gradients.add(cpu, parameters, layout);
    });
    std::map<std::string, Values> out = gradients.take();
    for (auto& [name, values] : out)
      for (double& v : values) v /= ranks.data;
    return out;
  }

  test::Cpu cpu_;
  bool mixtral_;
  File file_;
  GptConfig options_;
};

TEST_P(MoeReference, LogitsAndLoss) {
  for (const auto& [dtype, tolerance] : precisions) {
    SCOPED_TRACE(name_of(dtype));
    Gpt model(options_);
    const test::PlainParameters parameters(*cpu_.kernels, model, dtype);
    load_weights(cpu_, parameters);
    autograd::Tape tape(*cpu_.kernels);
    expect_alike(scores(cpu_, model.logits(tape, file_.load(cpu_, "tokens")).value()), file_.values("logits"),
                 tolerance);
    tape.clear();
    expect_alike(cpu_.values(model(tape, batch()).value()), file_.values("lm_loss"), tolerance);

    if (mixtral_) continue;  // whose weights always add up to 1
    GptConfig raw = options_;
    raw.moe.norm_topk = false;
    Gpt other(raw);
    const test::PlainParameters same(*cpu_.kernels, other, dtype);
    load_weights(cpu_, same);
    tape.clear();
    expect_alike(scores(cpu_, other.logits(tape, file_.load(cpu_, "tokens")).value()),
                 file_.values("logits_raw"), tolerance);
  }
}

TEST_P(MoeReference, EveryGradient) {
  for (const auto& [dtype, tolerance] : precisions)
    for (const auto recompute : {Recompute::none, Recompute::selective, Recompute::full}) {
      SCOPED_TRACE(name_of(dtype));
      expect_gradients(gradients(dtype, recompute), "grad_lm.", tolerance);
    }
}

TEST_P(MoeReference, EveryGradientWithRouterLosses) {
  test::set_losses(options_.moe, router_losses());
  const std::string prefix = with_router_losses(), router = "blocks.1.mlp.router.weight";
  EXPECT_GT(norm(minus(of_parameter(router, prefix), of_parameter(router, "grad_lm."))),
            1e-2 * norm(of_parameter(router, prefix)));
  for (const auto& [dtype, tolerance] : precisions)
    for (const auto recompute : {Recompute::none, Recompute::full}) {
      SCOPED_TRACE(name_of(dtype));
      expect_gradients(gradients(dtype, recompute), prefix, tolerance);
    }
}

TEST_P(MoeReference, TotalsOfRouters) {
  for (const auto& [dtype, tolerance] : precisions) {
    SCOPED_TRACE(name_of(dtype));
    Gpt model(options_);
    const test::PlainParameters parameters(*cpu_.kernels, model, dtype);
    load_weights(cpu_, parameters);
    autograd::Tape tape(*cpu_.kernels);
    tape.backward(model(tape, batch()));
    Values balance, z, counts;
    model.for_each([&](nn::Module& module) {
      auto* layer = dynamic_cast<parallel::Moe*>(&module);
      if (!layer) return;
      const parallel::RoutingTotals totals = layer->take_totals();
      balance.push_back(totals.balance), z.push_back(totals.z);
      counts.insert(counts.end(), totals.per_expert.begin(), totals.per_expert.end());
      EXPECT_EQ(totals.dropped, 0);
    });
    EXPECT_EQ(counts, file_.values("layer_counts"));
    expect_alike(balance, file_.values("layer_balance"), tolerance);
    expect_alike(z, file_.values("layer_z"), tolerance);
  }
}

/// The loss of all layers together, as the models of transformers have it.
TEST_P(MoeReference, EveryGradientWithThePooledLoss) {
  test::set_losses(options_.moe, pooled());
  for (const auto& [dtype, tolerance] : precisions)
    for (const auto recompute : {Recompute::none, Recompute::full}) {
      SCOPED_TRACE(name_of(dtype));
      expect_gradients(gradients(dtype, recompute), "grad.", tolerance);
    }
}

TEST_P(MoeReference, PooledLoss) {
  test::set_losses(options_.moe, pooled());
  for (const auto& [dtype, tolerance] : precisions) {
    SCOPED_TRACE(name_of(dtype));
    Gpt model(options_);
    const test::PlainParameters parameters(*cpu_.kernels, model, dtype);
    load_weights(cpu_, parameters);
    autograd::Tape tape(*cpu_.kernels);
    tape.backward(model(tape, batch()));
    const auto layers = parallel::layers_of_experts(model);
    double sum = 0;
    for (const auto& [path, layer] : layers) sum += layer->take_totals().balance;
    expect_alike({sum / static_cast<double>(layers.size())}, file_.values("aux_loss"), tolerance);
  }
}

/// The same numbers where ranks share the model.
TEST_P(MoeReference, EveryGradientOverRanks) {
  for (const Ranks& ranks : {Ranks{.tensor = 2},
                             {.context = 2},
                             {.tensor = 2, .context = 2},
                             {.data = 2, .expert = 2},
                             {.context = 2, .expert = 2},
                             {.tensor = 2, .data = 2, .expert = 2},
                             {.context = 2, .data = 2, .expert = 2},
                             {.context = 2, .data = 2, .expert = 4}}) {
    SCOPED_TRACE(ranks.str());
    expect_gradients(gradients_over(ranks), "grad_lm.", 1e-5);
  }
}

/// Losses are those of all tokens of a micro-batch, and count once.
TEST_P(MoeReference, EveryGradientWithRouterLossesOverRanks) {
  for (const Ranks& ranks :
       {Ranks{.tensor = 2}, {.context = 2}, {.tensor = 2, .context = 2}, {.context = 2, .expert = 2}}) {
    SCOPED_TRACE(ranks.str());
    test::set_losses(options_.moe, router_losses());
    expect_gradients(gradients_over(ranks), with_router_losses(), 1e-5);
    test::set_losses(options_.moe, pooled());
    expect_gradients(gradients_over(ranks), "grad.", 1e-5);
  }
}

INSTANTIATE_TEST_SUITE_P(Models, MoeReference, ::testing::Values("mixtral", "qwen3_moe"),
                         [](const auto& test) { return test.param; });

class DeepSeekMoeReference : public ::testing::Test {
 protected:
  static constexpr int k = 4;
  static parallel::MoeOptions options() {
    parallel::MoeOptions o;
    o.hidden = 32, o.ffn_hidden = 12, o.experts = 16, o.gated = true;
    o.routing = {.top_k = k,
                 .scores = RouterScores::sigmoid,
                 .normalize = true,
                 .scale = 2.5,
                 .groups = 4,
                 .top_groups = 2};
    o.bias_update = 1e-3;
    return o;
  }
  Tensor load(const std::string& name, DType dtype) { return cpu_.convert(file_.load(cpu_, name), dtype); }
  /// [gate; up]
  Tensor load_both(const std::string& at, DType dtype) {
    const Tensor gate = load(at + "gate_proj.weight", dtype), up = load(at + "up_proj.weight", dtype);
    const std::int64_t rows = gate.shape()[0], width = gate.shape()[1];
    const Tensor out = Tensor::empty(*cpu_.device, {2 * rows, width}, dtype);
    cpu_.kernels->copy(gate, out.range(0, rows * width).reshape(gate.shape()));
    cpu_.kernels->copy(up, out.range(rows * width, 2 * rows * width).reshape(up.shape()));
    return out;
  }
  /// The tensors that make up a parameter of the layer.
  static std::vector<std::string> tensors(const std::string& parameter) {
    if (parameter == "router.weight") return {"gate.weight"};
    const std::string at = parameter.substr(0, parameter.find('.', std::strlen("experts.")) + 1);
    if (parameter.ends_with(".up.weight")) return {at + "gate_proj.weight", at + "up_proj.weight"};
    return {at + "down_proj.weight"};
  }
  void load_weights(parallel::Moe& layer, const test::PlainParameters& parameters) {
    for (const auto& p : parameters.all()) set(cpu_, *p, file_.values("", tensors(p->name)));
    layer.restore(file_.at("gate.e_score_correction_bias").values<float>());
  }

  test::Cpu cpu_;
  File file_{"deepseek_v3_router"};
};

TEST_F(DeepSeekMoeReference, ChoiceAndWeights) {
  for (const auto& [dtype, tolerance] : precisions) {
    SCOPED_TRACE(name_of(dtype));
    autograd::Tape tape(*cpu_.kernels);
    const Var rows = tape.input(load("input", dtype).reshape({22, 32}));
    const autograd::Routed routed =
        autograd::route(autograd::router_logits(rows, tape.input(load("gate.weight", dtype))),
                        load("gate.e_score_correction_bias", dtype), options().routing);
    const Values weights = cpu_.values(routed.weights.value());
    std::vector<std::pair<std::int32_t, double>> choices;
    for (std::size_t i = 0; i < weights.size(); ++i) choices.emplace_back(routed.chosen[i], weights[i]);
    for (auto token = choices.begin(); token != choices.end(); token += k) std::sort(token, token + k);
    Values chosen, sorted_weights;
    for (const auto& [expert, weight] : choices) chosen.push_back(expert), sorted_weights.push_back(weight);
    EXPECT_EQ(chosen, file_.values("chosen"));
    expect_alike(sorted_weights, file_.values("chosen_weights"), tolerance);
    EXPECT_EQ(routed.per_expert[5], 0);
  }
}

TEST_F(DeepSeekMoeReference, OutputAndEveryGradient) {
  for (const auto& [dtype, tolerance] : precisions) {
    SCOPED_TRACE(name_of(dtype));
    parallel::Moe layer(options());
    const test::PlainParameters parameters(*cpu_.kernels, layer, dtype);
    load_weights(layer, parameters);
    autograd::Tape tape(*cpu_.kernels);
    const Var input = tape.variable(load("input", dtype)),
              up = tape.variable(load_both("shared_experts.", dtype)),
              down = tape.variable(load("shared_experts.down_proj.weight", dtype));
    const Var shared = autograd::linear(autograd::glu(autograd::linear(input, up)), down);
    const Var output = autograd::add(layer(tape, input), shared);
    expect_alike(cpu_.values(output.value()), file_.values("output"), tolerance);

    tape.backward({{output, load("output_gradient", dtype)}});
    const auto expect_gradient = [&](const Values& got, const std::vector<std::string>& names) {
      SCOPED_TRACE(names.front());
      expect_alike(got, file_.values("grad.", names), tolerance);
    };
    expect_gradient(cpu_.values(input.grad()), {"input"});
    expect_gradient(cpu_.values(up.grad()),
                    {"shared_experts.gate_proj.weight", "shared_experts.up_proj.weight"});
    expect_gradient(cpu_.values(down.grad()), {"shared_experts.down_proj.weight"});
    for (const auto& p : parameters.all()) expect_gradient(gradient(cpu_, *p), tensors(p->name));
  }
}

/// Alone: the layer's result takes no gradient.
TEST_F(DeepSeekMoeReference, ZLoss) {
  parallel::MoeOptions with_loss = options();
  with_loss.losses.z = 1;
  for (const auto& [dtype, tolerance] : precisions) {
    SCOPED_TRACE(name_of(dtype));
    parallel::Moe layer(with_loss);
    const test::PlainParameters parameters(*cpu_.kernels, layer, dtype);
    load_weights(layer, parameters);
    const nn::ParameterPtr router = parameters.find("router.weight");
    autograd::Tape tape(*cpu_.kernels);
    const Var input = tape.variable(load("input", dtype)), output = layer(tape, input);
    expect_alike({layer.take_totals().z}, file_.values("z_loss"), tolerance);
    tape.backward({{output, Tensor::zeros(*cpu_.device, output.shape(), dtype)}});
    expect_alike(cpu_.values(input.grad()), file_.values("grad_z.input"), tolerance);
    expect_alike(cpu_.values(router->grad), file_.values("grad_z.gate.weight"), tolerance);
  }
}

}  // namespace
}  // namespace sherd::models
