#include "nn/layers.h"

#include <gtest/gtest.h>

#include "autograd/ops.h"
#include "support/expect_error.h"
#include "support/numeric_gradient.h"
#include "support/plain_parameters.h"

namespace sherd::nn {
namespace {

using sherd::testing::expect_error;
using tensor::Tensor;
using test::bytes_of;

/// A stack of every layer, regression on top.
class Stack : public Model {
 public:
  explicit Stack(std::int64_t width) {
    embedding_ = add("embedding", std::make_shared<Embedding>(9, width));
    positions_ = add("positions", std::make_shared<LearnedPositions>(5, width));
    layers_ = add("layers", std::make_shared<LayerList>());
    layers_->append(std::make_shared<LayerNorm>(width));
    layers_->append(std::make_shared<Linear>(width, 2 * width));
    layers_->append(std::make_shared<Function>([](const Var& x) { return autograd::glu(x); }));
    layers_->append(std::make_shared<Dropout>(0.25f));
    layers_->append(std::make_shared<RmsNorm>(width));
    layers_->append(
        std::make_shared<Linear>(width, width, LinearOptions{.activation = tensor::Activation::gelu_erf}));
    layers_->append(std::make_shared<Function>(autograd::tanh));
    layers_->append(std::make_shared<Function>(autograd::gelu));
    layers_->append(std::make_shared<Dropout>(0.25f));
    head_ = add("head", std::make_shared<Linear>(width, 9,
                                                 LinearOptions{.bias = false, .tied = embedding_->weight()}));
  }

  std::shared_ptr<Embedding> embedding_;
  std::shared_ptr<LearnedPositions> positions_;
  std::shared_ptr<LayerList> layers_;
  std::shared_ptr<Linear> head_;

 protected:
  Var forward(Tape& tape, const tensor::Batch& batch) override {
    const Var x = (*layers_)(tape, (*positions_)(tape, (*embedding_)(tape, batch.at("ids"))));
    return autograd::mean_squared_error((*head_)(tape, x), batch.at("target"));
  }
};

class Layers : public ::testing::Test {
 protected:
  tensor::Batch batch(DType dtype) {
    return {{"ids", cpu_.ids({3, 5}, 1, 9)}, {"target", cpu_.normal({3, 5, 9}, 2, dtype)}};
  }
  test::Cpu cpu_;
};

TEST_F(Layers, NamesShapesAndDecay) {
  Stack model(6);
  model.assign_names();
  std::vector<std::string> names, kept;
  for (const auto& p : model.parameters()) {
    names.push_back(p->name + p->shape.str());
    if (!p->decay) kept.push_back(p->name);
  }
  EXPECT_EQ(names, (std::vector<std::string>{
                       "embedding.weight[9, 6]", "positions.weight[5, 6]", "layers.0.weight[6]",
                       "layers.0.bias[6]", "layers.1.weight[12, 6]", "layers.1.bias[12]",
                       "layers.4.weight[6]", "layers.5.weight[6, 6]", "layers.5.bias[6]"}));
  EXPECT_EQ(kept, (std::vector<std::string>{"layers.0.weight", "layers.0.bias", "layers.1.bias",
                                            "layers.4.weight", "layers.5.bias"}));
  EXPECT_EQ(model.named_parameters().back().first, "head.weight");
  EXPECT_EQ(model.named_parameters().back().second, model.embedding_->weight());
}

TEST_F(Layers, GradientsOfAStackWithDropoutAndATiedWeight) {
  for (const auto recompute : {Recompute::none, Recompute::selective, Recompute::full}) {
    Stack model(6);
    test::PlainParameters parameters(*cpu_.kernels, model, DType::f64);
    const tensor::Batch inputs = batch(DType::f64);
    Tape tape(*cpu_.kernels);
    tape.random = {1, 2};
    tape.recompute = recompute;
    tape.backward(model(tape, inputs));
    for (const auto& p : parameters.all()) {
      const auto numeric =
          test::numeric_gradient({p->value.data<double>(), static_cast<std::size_t>(p->numel())}, [&] {
            Tape::NoGrad pause(tape);
            return *model(tape, inputs).value().data<double>();
          });
      test::expect_close_gradients(cpu_.values(p->grad), numeric, p->name);
    }
  }
}

TEST_F(Layers, DropoutStreamsFollowPathsNotCallOrder) {
  Stack model(6);
  model.assign_names();
  auto& first = dynamic_cast<Dropout&>((*model.layers_)[3]);
  auto& second = dynamic_cast<Dropout&>((*model.layers_)[8]);
  Tape tape(*cpu_.kernels);
  tape.random = {3, 4};
  const Var x = tape.input(cpu_.normal({64}, 1, DType::f32));
  const auto a = bytes_of(first(tape, x).value()), b = bytes_of(second(tape, x).value());
  EXPECT_NE(a, b);
  EXPECT_EQ(bytes_of(second(tape, x).value()), b);
  EXPECT_EQ(bytes_of(first(tape, x).value()), a);
  tape.random = {3, 5};
  EXPECT_NE(bytes_of(first(tape, x).value()), a);
  tape.training = false;
  EXPECT_EQ(bytes_of(first(tape, x).value()), bytes_of(x.value()));
  Dropout nameless(0.5f);
  tape.training = true;
  expect_error(ErrorKind::usage, "assign_names", [&] { nameless(tape, x); });
  expect_error(ErrorKind::usage, "[0, 1)", [] { Dropout(1.0f); });
}

TEST_F(Layers, PartsOfSequencesGetWhatTheirRowsOfTheWholeGet) {
  Stack model(6);
  test::PlainParameters parameters(*cpu_.kernels, model, DType::f32);
  Tape tape(*cpu_.kernels);
  tape.random = {3, 4};
  const Tensor x = cpu_.normal({1, 5, 6}, 1, DType::f32), r = cpu_.normal({1, 5, 6}, 2, DType::f32);
  // Rows 3 and 4, then row 1.
  const auto part_of = [&](const Tensor& of) {
    const Tensor part = Tensor::empty(*cpu_.device, {1, 3, 6}, DType::f32);
    cpu_.kernels->copy(of.range(18, 30), part.range(0, 12));
    cpu_.kernels->copy(of.range(6, 12), part.range(12, 18));
    return part;
  };
  const Var all = tape.input(x), part = tape.input(part_of(x));
  EXPECT_EQ(bytes_of(model.positions_->add_to(tape, part, {.first = 3, .count = 2, .second = 1}).value()),
            bytes_of(part_of((*model.positions_)(tape, all).value())));
  EXPECT_EQ(bytes_of(model.positions_->add_to(tape, all, {}).value()),
            bytes_of((*model.positions_)(tape, all).value()));

  auto& dropout = dynamic_cast<Dropout&>((*model.layers_)[3]);
  const tensor::Slice elements({1, 5, 6}, {{{0, 1}}, {{3, 5}}, {{0, 6}}});
  const Var rows = tape.input(x.range(18, 30).reshape({1, 2, 6})),
            residual = tape.input(r.range(18, 30).reshape({1, 2, 6}));
  EXPECT_EQ(bytes_of(dropout.apply(tape, rows, elements).value()),
            bytes_of(dropout(tape, all).value().range(18, 30)));
  EXPECT_EQ(bytes_of(dropout.add_to(tape, rows, residual, elements).value()),
            bytes_of(dropout.add_to(tape, all, tape.input(r)).value().range(18, 30)));
  tape.training = false;
  EXPECT_EQ(bytes_of(dropout.apply(tape, rows, elements).value()), bytes_of(rows.value()));
}

TEST_F(Layers, InitialValuesAreDrawnAsDeclared) {
  Linear layer(400, 300);
  Linear own(400, 300, {.init = Init::normal(0, 0.5)});
  test::PlainParameters parameters(*cpu_.kernels, layer, DType::f32), others(*cpu_.kernels, own, DType::f32);
  double low = 1, high = -1;
  for (const double w : cpu_.values(layer.weight()->value)) low = std::min(low, w), high = std::max(high, w);
  EXPECT_NEAR(low, -0.05, 1e-4);
  EXPECT_NEAR(high, 0.05, 1e-4);
  double squares = 0;
  for (const double w : cpu_.values(own.weight()->value)) squares += w * w;
  EXPECT_NEAR(std::sqrt(squares / (400 * 300)), 0.5, 0.005);
  for (const double b : cpu_.values(own.bias()->value)) EXPECT_EQ(b, 0.0);
}

/// Has its module's parameters at hand only while the module runs, as sharding does.
class OnlyInside : public autograd::Scope {
 public:
  explicit OnlyInside(const Module& module) : parameters_(module.parameters()) { hide(); }
  void pre_forward(Tape&) override { show(); }
  void post_forward(Tape&) override { hide(); }
  void pre_backward(Tape&) override { show(); }
  void post_backward(Tape&) override { hide(); }
  void pre_weight_gradients(Tape&) override {}
  void gradients_complete(Tape&) override {}
  void show() {
    for (std::size_t i = 0; i < hidden_.size(); ++i) parameters_[i]->value = hidden_[i];
    hidden_.clear();
  }

 private:
  void hide() {
    for (const auto& p : parameters_) hidden_.push_back(p->value), p->value = {};
  }
  std::vector<ParameterPtr> parameters_;
  std::vector<Tensor> hidden_;
};

TEST_F(Layers, BlocksNeedOnlyTheirOwnParametersUnderEveryRecompute) {
  std::vector<std::vector<std::vector<std::byte>>> outcomes;
  for (const bool sharded : {false, true})
    for (const auto recompute : {Recompute::none, Recompute::selective, Recompute::full}) {
      Stack model(6);
      test::PlainParameters parameters(*cpu_.kernels, model, DType::f32);
      if (sharded)
        for (const auto& [name, layer] : model.layers_->children())
          layer->set_scope(std::make_shared<OnlyInside>(*layer));
      Tape tape(*cpu_.kernels);
      tape.random = {1, 2};
      tape.recompute = recompute;
      const Var loss = model(tape, batch(DType::f32));
      tape.backward(loss);
      outcomes.push_back({bytes_of(loss.value())});
      for (const auto& p : parameters.all()) outcomes.back().push_back(bytes_of(p->grad));
    }
  for (const auto& outcome : outcomes) EXPECT_EQ(outcome, outcomes.front());
}

TEST_F(Layers, WrongShapesAreRefused) {
  Embedding table(5, 4);
  expect_error(ErrorKind::usage, "[5, 4]", [&] { Linear(4, 6, {.bias = false, .tied = table.weight()}); });
  expect_error(ErrorKind::usage, "0 to 3", [] { Linear(0, 3); });
}

TEST_F(Layers, OneLayerInTwoPlacesSumsItsGradients) {
  auto shared = std::make_shared<Linear>(6, 6);
  class Twice : public Model {
   public:
    explicit Twice(std::shared_ptr<Linear> layer) {
      auto list = add("blocks", std::make_shared<LayerList>());
      list_ = list;
      list->append(layer);
      list->append(std::make_shared<Function>(autograd::tanh));
      list->append(layer);  // the same block again: one parameter, two names
    }
    std::shared_ptr<LayerList> list_;

   protected:
    Var forward(Tape& tape, const tensor::Batch& batch) override {
      return autograd::mean_squared_error((*list_)(tape, tape.input(batch.at("x"))), batch.at("y"));
    }
  };
  std::vector<std::vector<std::byte>> grads;
  for (const auto recompute : {Recompute::none, Recompute::selective, Recompute::full}) {
    Twice model(shared);
    test::PlainParameters parameters(*cpu_.kernels, model, DType::f64);
    ASSERT_EQ(parameters.all().size(), 2u);
    const tensor::Batch inputs{{"x", cpu_.normal({4, 6}, 1)}, {"y", cpu_.normal({4, 6}, 2)}};
    Tape tape(*cpu_.kernels);
    tape.recompute = recompute;
    tape.backward(model(tape, inputs));
    const auto& weight = shared->weight();
    const auto numeric = test::numeric_gradient({weight->value.data<double>(), 36}, [&] {
      Tape::NoGrad pause(tape);
      return *model(tape, inputs).value().data<double>();
    });
    test::expect_close_gradients(cpu_.values(weight->grad), numeric, "weight");
    grads.push_back(bytes_of(weight->grad));
    shared->bias()->grad_written = weight->grad_written = false;
  }
  EXPECT_EQ(grads[0], grads[1]);
  EXPECT_EQ(grads[0], grads[2]);
}

}  // namespace
}  // namespace sherd::nn
