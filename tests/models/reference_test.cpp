// Tiny models with PyTorch's weights against what PyTorch says; scripts/references/make_reference.py made the
// files.
#include <gtest/gtest.h>

#include <cmath>

#include "comm/process_groups.h"
#include "optim/update_rule.h"
#include "support/hugging_face/hugging_face_dict.h"
#include "support/logical_gradients.h"
#include "support/places.h"
#include "support/reference_file.h"
#include "support/tiny_gpt.h"
#include "support/vectors.h"

namespace sherd::models {
namespace {

using tensor::Tensor;
using test::largest, test::minus, test::norm;

GptConfig reference_options(const std::string& kind) {
  GptConfig o;
  if (kind == "gpt2") {
    o.vocab_size = 97, o.seq_length = 24, o.hidden_size = 48, o.num_layers = 2, o.num_heads = 4;
  } else {
    o = GptConfig::of_family("llama");
    o.vocab_size = 101, o.seq_length = 32, o.hidden_size = 48, o.num_layers = 2, o.num_heads = 6,
    o.num_kv_heads = 2, o.ffn_hidden_size = 80;
    o.norm_epsilon = 1e-6;
  }
  return o;
}

class Reference : public ::testing::TestWithParam<std::string> {
 protected:
  Reference()
      : options_(reference_options(GetParam()).resolved()),
        file_(test::read_reference(SHERD_SOURCE_DIR "/tests/models/reference/" + GetParam() +
                                   ".safetensors")) {}

  HostTensorSource source(const std::string& prefix = "") const {
    return [this, prefix](const std::string& name) -> std::optional<HostTensor> {
      const auto found = file_.find(prefix + name);
      if (found == file_.end()) return std::nullopt;
      return HostTensor{found->second.shape, found->second.dtype, found->second.bytes};
    };
  }
  Tensor load(const std::string& name) { return read(cpu_, name); }
  Tensor translated(const std::string& parameter, const HostTensorSource& from) {
    const HostTensor host = from_dict(HuggingFaceLayout(options_), parameter, from);
    Tensor out = Tensor::empty(*cpu_.device, host.shape, host.dtype);
    tensor::copy_from_host(*cpu_.device, out, host.bytes.data(), host.bytes.size());
    return out;
  }
  void load_weights(const test::PlainParameters& parameters) {
    for (const auto& p : parameters.all()) cpu_.kernels->copy(translated(p->name, source()), p->value);
  }
  /// The same for the rank of one thread.
  Tensor read(test::Cpu& cpu, const std::string& name) const {
    const test::ReferenceTensor& stored = file_.at(name);
    Tensor out = Tensor::empty(*cpu.device, stored.shape, stored.dtype);
    tensor::copy_from_host(*cpu.device, out, stored.bytes.data(), stored.bytes.size());
    return out;
  }
  /// ids that ranks can cut, with `filler` behind those of the file.
  Tensor lengthened(test::Cpu& cpu, const std::string& name, std::int32_t filler) const {
    const Tensor ids = read(cpu, name);
    const std::int64_t batch = ids.shape()[0], seq = ids.shape()[1], longer = options_.seq_length;
    const Tensor out =
        Tensor::of<std::int32_t>(*cpu.device, {batch, longer},
                                 std::vector<std::int32_t>(static_cast<std::size_t>(batch * longer), filler));
    cpu.kernels->copy_rows({ids, 0, seq}, {out, 0, longer}, batch, seq);
    return out;
  }
  /// The scores of the tokens that are in the file.
  static Tensor shortened(test::Cpu& cpu, const Tensor& logits, std::int64_t seq) {
    const std::int64_t batch = logits.shape()[0], longer = logits.shape()[1], ids = logits.shape()[2];
    Tensor out = Tensor::empty(*cpu.device, {batch, seq, ids}, logits.dtype());
    cpu.kernels->copy_rows({logits, 0, longer * ids}, {out, 0, seq * ids}, batch, seq * ids);
    return out;
  }
  static std::vector<double> host_values(const HostTensor& host) {
    test::Cpu cpu(1);
    const Tensor out = Tensor::empty(*cpu.device, host.shape, host.dtype);
    tensor::copy_from_host(*cpu.device, out, host.bytes.data(), host.bytes.size());
    return cpu.values(out);
  }
  /// The columns of logits that are tokens.
  std::vector<double> without_padding(const Tensor& logits) { return without_padding(cpu_.values(logits)); }
  std::vector<double> without_padding(const std::vector<double>& all) const {
    std::vector<double> out;
    const auto padded = static_cast<std::size_t>(options_.padded_vocab());
    for (std::size_t row = 0; row * padded < all.size(); ++row)
      out.insert(out.end(), all.begin() + static_cast<std::ptrdiff_t>(row * padded),
                 all.begin() + static_cast<std::ptrdiff_t>(row * padded) + options_.vocab_size);
    return out;
  }
  tensor::Batch batch() { return {{"tokens", load("tokens")}, {"labels", load("labels")}}; }

  test::Cpu cpu_;
  GptConfig options_;
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
  for (const auto recompute : {Recompute::none, Recompute::full}) {
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
  optim::Hyper hyper;  // as in scripts/references/make_reference.py
  hyper.lr = 1e-3, hyper.betas()->beta2 = 0.95, hyper.weight_decay = 0.1;
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
    for (const auto& [name, tensor] : to_dict(layout, p->name, from_dict(layout, p->name, source()))) {
      ++weights;
      ASSERT_TRUE(file_.contains(name)) << name;
      EXPECT_EQ(tensor.shape, file_.at(name).shape) << name;
      EXPECT_EQ(tensor.bytes, file_.at(name).bytes) << name;
    }
  }
  EXPECT_EQ(2 * weights + 5,
            file_.size());  // each has a gradient; tokens, labels, logits, loss, adamw_losses
}

/// The same numbers where ranks share the model: what each holds of PyTorch's weights, and finds of its
/// gradients.
TEST_P(Reference, OverTensorAndContextRanks) {
  const std::vector<double> want_logits = cpu_.values(load("logits"));
  const double want_loss = cpu_.values(load("loss"))[0];
  for (const auto& [tensor_ranks, context_ranks] : {std::pair{2, 1}, {1, 2}, {2, 2}}) {
    SCOPED_TRACE(cat("tensor ", tensor_ranks, ", context ", context_ranks));
    test::LogicalGradients gradients;
    comm::run_local(tensor_ranks * context_ranks, {.timeout_seconds = 60}, [&](comm::Communicator& world) {
      const comm::Grid grid(world.size(), {.tensor = tensor_ranks, .context = context_ranks});
      const comm::ProcessGroups groups(world, grid);
      const parallel::Layout layout{&groups.group(comm::Axis::tensor), &groups.group(comm::Axis::context)};
      test::Cpu cpu(1);
      Gpt model(options_, layout);
      const test::PlainParameters parameters(*cpu.kernels, model, DType::f32);
      for (const auto& p : parameters.all()) {
        const std::vector<double> whole =
            host_values(from_dict(HuggingFaceLayout(options_), p->name, source()));
        p->logical_slice().for_each_run(
            0, p->numel(), [&](std::int64_t local, std::int64_t logical, std::int64_t n) {
              for (std::int64_t i = 0; i < n; ++i)
                p->value.data<float>()[local + i] =
                    static_cast<float>(whole[static_cast<std::size_t>(logical + i)]);
            });
      }
      autograd::Tape tape(*cpu.kernels);
      const tensor::Batch batch{{"tokens", lengthened(cpu, "tokens", 0)},
                                {"labels", lengthened(cpu, "labels", -100)}};
      const std::int64_t seq = file_.at("tokens").shape[1];
      const Tensor logits = model.logits(tape, batch.at("tokens")).value();
      const auto scores = without_padding(cpu.values(shortened(cpu, logits, seq)));
      EXPECT_LE(norm(minus(scores, want_logits)), 1e-5 * norm(want_logits));
      tape.clear();
      const autograd::Var loss = model(tape, batch);
      EXPECT_NEAR(cpu.values(loss.value())[0], want_loss, 1e-5 * want_loss);
      tape.backward(loss);
      gradients.add(cpu, parameters, layout);
    });
    double everything = 0;
    std::map<std::string, std::vector<double>> want;
    for (const auto& [name, got] : gradients.take()) {
      want[name] = host_values(from_dict(HuggingFaceLayout(options_), name, source("grad.")));
      everything = std::hypot(everything, norm(want[name]));
      EXPECT_LE(norm(minus(got, want[name])), 1e-5 * std::max(norm(want[name]), 1e-2)) << name;
    }
    EXPECT_GT(everything, 0.1);
  }
}

INSTANTIATE_TEST_SUITE_P(Models, Reference, ::testing::Values("gpt2", "llama"),
                         [](const auto& test) { return test.param; });

}  // namespace
}  // namespace sherd::models
