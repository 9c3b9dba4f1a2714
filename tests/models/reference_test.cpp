// Tiny models with PyTorch's weights against what PyTorch says; scripts/make_reference.py made the files.
#include <gtest/gtest.h>

#include <cmath>

#include "models/hugging_face.h"
#include "optim/update_rule.h"
#include "support/places.h"
#include "support/reference_file.h"
#include "support/tiny_gpt.h"

namespace sherd::models {
namespace {

using tensor::Tensor;

GptOptions options_of(const std::string& kind) {
  GptOptions o;
  if (kind == "gpt2") {
    o.vocab_size = 97, o.max_seq = 24, o.hidden = 48, o.layers = 2, o.heads = 4;
  } else {
    o = GptOptions::llama();
    o.vocab_size = 101, o.max_seq = 32, o.hidden = 48, o.layers = 2, o.heads = 6, o.kv_heads = 2,
    o.ffn_hidden = 80;
    o.norm_eps = 1e-6;
  }
  return o;
}

double norm(const std::vector<double>& x) {
  double squares = 0;
  for (const double v : x) squares += v * v;
  return std::sqrt(squares);
}

std::vector<double> minus(std::vector<double> a, const std::vector<double>& b) {
  for (std::size_t i = 0; i < a.size(); ++i) a[i] -= b[i];
  return a;
}

double largest(const std::vector<double>& x) {
  double out = 0;
  for (const double v : x) out = std::max(out, std::abs(v));
  return out;
}

class Reference : public ::testing::TestWithParam<std::string> {
 protected:
  Reference()
      : options_(options_of(GetParam()).resolved()),
        file_(test::read_reference(SHERD_SOURCE_DIR "/tests/models/reference/" + GetParam() +
                                   ".safetensors")) {}

  HostTensorSource source(const std::string& prefix = "") const {
    return [this, prefix](const std::string& name) -> std::optional<HostTensor> {
      const auto found = file_.find(prefix + name);
      if (found == file_.end()) return std::nullopt;
      return HostTensor{found->second.shape, found->second.dtype, found->second.bytes};
    };
  }
  Tensor load(const std::string& name) {
    const test::ReferenceTensor& stored = file_.at(name);
    Tensor out = Tensor::empty(*cpu_.device, stored.shape, stored.dtype);
    tensor::copy_from_host(*cpu_.device, out, stored.bytes.data(), stored.bytes.size());
    return out;
  }
  Tensor translated(const std::string& parameter, const HostTensorSource& from) {
    const HostTensor host = HuggingFaceLayout(options_).from(parameter, from);
    Tensor out = Tensor::empty(*cpu_.device, host.shape, host.dtype);
    tensor::copy_from_host(*cpu_.device, out, host.bytes.data(), host.bytes.size());
    return out;
  }
  void load_weights(const test::PlainParameters& parameters) {
    for (const auto& p : parameters.all()) cpu_.kernels->copy(translated(p->name, source()), p->value);
  }
  /// The columns of logits that are tokens.
  std::vector<double> without_padding(const Tensor& logits) {
    const std::vector<double> all = cpu_.values(logits);
    std::vector<double> out;
    const auto padded = static_cast<std::size_t>(options_.padded_vocab());
    for (std::size_t row = 0; row * padded < all.size(); ++row)
      out.insert(out.end(), all.begin() + static_cast<std::ptrdiff_t>(row * padded),
                 all.begin() + static_cast<std::ptrdiff_t>(row * padded) + options_.vocab_size);
    return out;
  }
  tensor::Batch batch() { return {{"tokens", load("tokens")}, {"labels", load("labels")}}; }

  test::Cpu cpu_;
  GptOptions options_;
  std::map<std::string, test::ReferenceTensor> file_;
};

TEST_P(Reference, LogitsAndLoss) {
  const std::vector<double> want = cpu_.values(load("logits"));
  const double want_loss = cpu_.values(load("loss"))[0];
  for (const auto& [dtype, tolerance] : {std::pair{DType::f32, 1e-5}, {DType::bf16, 2e-2}}) {
    SCOPED_TRACE(name_of(dtype));
    Gpt model(options_);
    test::PlainParameters parameters(*cpu_.kernels, model, dtype);
    load_weights(parameters);
    autograd::Tape tape(*cpu_.kernels);
    const std::vector<double> difference =
        minus(without_padding(model.logits(tape, load("tokens")).value()), want);
    EXPECT_LE(largest(difference), tolerance * largest(want));
    EXPECT_LE(norm(difference), tolerance * norm(want));
    const double loss = cpu_.values(model(tape, batch()).value())[0];
    EXPECT_LE(std::abs(loss - want_loss), tolerance * want_loss) << loss << " " << want_loss;
  }
}

TEST_P(Reference, EveryGradient) {
  for (const auto recompute : {autograd::Recompute::none, autograd::Recompute::full}) {
    Gpt model(options_);
    test::PlainParameters parameters(*cpu_.kernels, model, DType::f32);
    load_weights(parameters);
    autograd::Tape tape(*cpu_.kernels);
    tape.recompute = recompute;
    tape.backward(model(tape, batch()));
    double everything = 0;
    for (const auto& p : parameters.all())
      everything = std::hypot(everything, norm(cpu_.values(translated(p->name, source("grad.")))));
    EXPECT_GT(everything, 0.1);
    for (const auto& p : parameters.all()) {
      const std::vector<double> want = cpu_.values(translated(p->name, source("grad.")));
      EXPECT_LE(norm(minus(cpu_.values(p->grad), want)), 1e-5 * std::max(norm(want), 1e-3 * everything))
          << p->name;
    }
  }
}

TEST_P(Reference, TenAdamWSteps) {
  const std::vector<double> want = cpu_.values(load("adamw_losses"));
  ASSERT_EQ(want.size(), 11u);
  Gpt model(options_);
  test::PlainParameters parameters(*cpu_.kernels, model, DType::f32);
  load_weights(parameters);
  optim::Hyper hyper;  // as in scripts/make_reference.py
  hyper.lr = 1e-3, hyper.beta1 = 0.9, hyper.beta2 = 0.95, hyper.eps = 1e-8, hyper.weight_decay = 0.1;
  std::vector<std::array<Tensor, 2>> moments;
  for (const auto& p : parameters.all()) {
    moments.push_back({});
    for (Tensor& moment : moments.back()) moment = Tensor::zeros(*cpu_.device, p->shape, DType::f32);
  }
  const tensor::Batch inputs = batch();
  for (std::int64_t step = 1; step <= 11; ++step) {
    autograd::Tape tape(*cpu_.kernels);
    const Var loss = model(tape, inputs);
    const double got = cpu_.values(loss.value())[0], wanted = want[static_cast<std::size_t>(step - 1)];
    EXPECT_LE(std::abs(got - wanted), 1e-5 * wanted)
        << "before step " << step << ": " << got << " " << wanted;
    parameters.zero_grad();
    tape.backward(loss);
    for (std::size_t i = 0; i < parameters.all().size(); ++i) {
      const auto& p = parameters.all()[i];
      EXPECT_TRUE(optim::update({.master = p->value.data<float>(),
                                 .grad = p->grad.raw(),
                                 .moments = {moments[i][0].data<float>(), moments[i][1].data<float>()},
                                 .n = p->numel(),
                                 .decay = p->decay},
                                hyper, step, cpu_.device->arena()));
    }
  }
}

TEST_P(Reference, WeightsSurviveTheWayBack) {
  const HuggingFaceLayout layout(options_);
  Gpt model(options_);
  model.assign_names();
  std::size_t weights = 0;
  for (const auto& p : model.parameters()) {
    for (const auto& [name, tensor] : layout.to(p->name, layout.from(p->name, source()))) {
      ++weights;
      ASSERT_TRUE(file_.contains(name)) << name;
      EXPECT_EQ(tensor.shape, file_.at(name).shape) << name;
      EXPECT_EQ(tensor.bytes, file_.at(name).bytes) << name;
    }
  }
  EXPECT_EQ(2 * weights + 5,
            file_.size());  // each has a gradient; tokens, labels, logits, loss, adamw_losses
}

INSTANTIATE_TEST_SUITE_P(Models, Reference, ::testing::Values("gpt2", "llama"),
                         [](const auto& test) { return test.param; });

}  // namespace
}  // namespace sherd::models
