#include "models/compressed/calibration.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/error.h"
#include "models/compressed/gptq.h"
#include "nn/step_state.h"

namespace sherd::models {
namespace {

using tensor::Tensor;

/// Rows that a pass takes at once, unless a sequence has more.
constexpr std::int64_t rows_of_pass = 2048;
/// Inputs of a layer by which its outputs' error is told.
constexpr std::int64_t sampled_rows = 256;

Tensor as_rows(const Tensor& x) {
  return x.reshape({x.shape().rows(), x.shape().back()});
}

void restore_step_states(nn::Module& model, const std::map<std::string, std::vector<float>>& states) {
  model.for_each([&](nn::Module& module) {
    auto* state = dynamic_cast<nn::StepState*>(&module);
    if (const auto found = states.find(module.path()); state && found != states.end())
      state->restore(found->second);
  });
}

/// Copies the rows of a parameter that a published tensor has; others may be another parameter's.
void copy_rows(const CompressedMatrix& whole, const PublishedParameter& where, std::size_t tensor,
               CompressedMatrix& to) {
  const std::int64_t columns = whole.columns, groups = whole.groups();
  to.rows = where.tensors[tensor].shape[0], to.columns = columns, to.group = whole.group;
  to.input_scale = whole.input_scale;
  to.codes.resize(static_cast<std::size_t>(to.rows * columns));
  to.scales.resize(static_cast<std::size_t>(to.rows * groups));
  for (const PublishedParameter::RowRun& run : where.rows) {
    if (run.tensor != static_cast<int>(tensor)) continue;
    std::copy_n(whole.codes.begin() + run.row * columns, run.rows * columns,
                to.codes.begin() + run.tensor_row * columns);
    std::copy_n(whole.scales.begin() + run.row * groups, run.rows * groups,
                to.scales.begin() + run.tensor_row * groups);
  }
}

}  // namespace

Calibration::Calibration(const GptConfig& options, const HuggingFaceLayout& layout, nn::WeightSource& weights,
                         device::Device& device, const CompressedScheme& scheme,
                         const CalibrationTexts& texts, std::function<void(double, double)> told)
    : layout_(layout),
      weights_(weights),
      device_(device),
      scheme_(scheme),
      told_(std::move(told)),
      kernels_(tensor::make_kernels(device)),
      model_(options),
      tape_(*kernels_) {
  if (!options.causal || options.has_encoder())
    fail(ErrorKind::config,
         "calibration runs decoders alone, and this model reads whole texts at once; export "
         "it with --format nf4, fp4 or int8");
  require(texts.sequences > 0 && std::ssize(texts.tokens) == texts.sequences * texts.length,
          "calibration: ", texts.tokens.size(), " tokens for ", texts.sequences, " sequences of ",
          texts.length);
  for (const std::int32_t id : texts.tokens)
    if (id < 0 || id >= options.vocab_size)
      fail(ErrorKind::data, "the texts for calibration use token ", id, ", and the model has ids 0 to ",
           options.vocab_size - 1, ": prepare them with the model's own tokenizer");
  model_.assign_names();
  restore_step_states(model_, weights.step_states());
  for (const nn::ParameterPtr& weight : model_.linear_weights()) linear_[weight->name] = weight;
  tape_.training = false;
  tape_.texts_apart = true;
  const std::int64_t together = std::max<std::int64_t>(1, rows_of_pass / texts.length);
  for (std::int64_t begin = 0; begin < texts.sequences; begin += together) {
    const std::int64_t n = std::min(together, texts.sequences - begin);
    const std::span ids = std::span(texts.tokens)
                              .subspan(static_cast<std::size_t>(begin * texts.length),
                                       static_cast<std::size_t>(n * texts.length));
    batches_.push_back({{"tokens", Tensor::of<std::int32_t>(device, {n, texts.length}, ids)}});
  }
  states_.resize(batches_.size());
}

Calibration::~Calibration() = default;

Calibration::Matrix Calibration::take(const std::string& tensor) {
  // The last part is the head, which stays as it is.
  while (!made_.contains(tensor) && next_part_ + 1 < model_.parts()) {
    made_.clear();
    run_part(next_part_++);
  }
  const auto found = made_.find(tensor);
  require(found != made_.end(), tensor, " was asked of a calibration out of order");
  Made made = std::move(found->second);
  made_.erase(found);
  return {std::move(made.compressed), made.whole > 0 ? std::sqrt(made.lost / made.whole) : -1};
}

void Calibration::load(std::size_t part) {
  for (const auto& module : model_.modules(part))
    for (const nn::ParameterPtr& parameter : module->parameters()) {
      parameter->trainable = false;
      parameter->value = Tensor::on_host(device_, parameter->shape, DType::f32, device::Category::parameters);
      weights_.read(parameter->name, parameter->logical_slice(), 0, parameter->value);
    }
}

void Calibration::run_part(std::size_t part) {
  load(part);
  std::vector<nn::ParameterPtr> layers;
  for (const auto& module : model_.modules(part))
    for (const nn::ParameterPtr& parameter : module->parameters())
      if (linear_.contains(parameter->name)) layers.push_back(parameter);
  if (!layers.empty()) {
    tape_.watch_linear = [this](const autograd::Parameter& weight, const Tensor& x) { watch(weight, x); };
    pass(part, false);
    tape_.watch_linear = nullptr;
    for (const nn::ParameterPtr& weight : layers) compress(weight);
    inputs_.clear();
  }
  pass(part, true);
  for (const auto& module : model_.modules(part))
    for (const nn::ParameterPtr& parameter : module->parameters()) parameter->value = {};
}

/// All batches through a part; `keeps`: what it gives them is what the next part takes.
void Calibration::pass(std::size_t part, bool keeps) {
  const autograd::Tape::NoGrad no_grad(tape_);
  for (std::size_t i = 0; i < batches_.size(); ++i) {
    const Var x = states_[i] ? tape_.input(states_[i]) : Var();
    const Var y = model_.run(tape_, part, part + 1, x, part == 0 ? batches_[i] : tensor::Batch());
    if (keeps) states_[i] = y.value();
    tape_.drop_shared_values();
    const double parts = static_cast<double>(model_.parts()) - 2;  // blocks are passed twice
    if (told_) told_(++passes_, static_cast<double>(batches_.size()) * (2 * parts + 1));
  }
}

void Calibration::watch(const autograd::Parameter& weight, const Tensor& x) {
  if (!linear_.contains(weight.name) || x.numel() == 0) return;
  Inputs& inputs = inputs_[weight.name];
  const Tensor rows = as_rows(x);
  const std::int64_t count = rows.shape()[0], columns = rows.shape()[1];
  const float* values = rows.data<float>();
  bool finite = true;
  for (std::int64_t i = 0; i < rows.numel(); ++i) {
    finite = finite && std::isfinite(values[i]);
    inputs.largest = std::max(inputs.largest, std::abs(values[i]));
  }
  if (!finite)
    fail(ErrorKind::data, "an input of ", weight.name,
         " in calibration is infinite or no number: the model's weights are not finite, or its activations "
         "overflow on these texts; see its loss on them by `sherd evaluate --data`, and export an earlier "
         "checkpoint (--tag), or without --calibrate");
  const std::int64_t left = sampled_rows - std::ssize(inputs.samples) / columns,
                     of_batch = std::max<std::int64_t>(1, sampled_rows / std::ssize(batches_)),
                     taken = std::min({count, of_batch, left});
  for (std::int64_t i = 0; i < taken; ++i) {
    const float* row = values + i * count / taken * columns;
    inputs.samples.insert(inputs.samples.end(), row, row + columns);
  }
  if (scheme_.kind != CompressedKind::int4) return;
  const bool first = !inputs.hessian;
  if (first) inputs.hessian = Tensor::on_host(device_, {columns, columns}, DType::f32);
  kernels_->matmul({.a = rows, .b = rows, .c = inputs.hessian, .trans_a = true, .accumulate = !first});
}

/// The scale of a layer's inputs. One of an expert that had none is its neighbours' largest.
float Calibration::input_scale(const std::string& weight) const {
  const auto own = inputs_.find(weight);
  float largest = own != inputs_.end() ? own->second.largest : 0;
  const std::string kind = weight.substr(weight.rfind('.', weight.rfind('.') - 1));  // ".up.weight"
  if (largest == 0 && is_of_expert(weight))
    for (const auto& [name, inputs] : inputs_)
      if (is_of_expert(name) && name.ends_with(kind)) largest = std::max(largest, inputs.largest);
  return compressed_scale(scheme_, largest);
}

CompressedMatrix Calibration::compressed(const nn::ParameterPtr& weight, Inputs& inputs) {
  const std::int64_t rows = weight->shape[0], columns = weight->shape[1];
  const std::span<const float> values(weight->value.data<float>(), static_cast<std::size_t>(weight->numel()));
  CompressedMatrix out = inputs.hessian ? gptq(scheme_, weight->name, values, rows, inputs.hessian, *kernels_)
                                        : round_to_nearest(scheme_, weight->name, values, rows, columns);
  inputs.hessian = {};
  if (scheme_.static_inputs) out.input_scale = input_scale(weight->name);
  return out;
}

/// Compresses a layer; its weight becomes what the codes stand for.
void Calibration::compress(const nn::ParameterPtr& weight) {
  Inputs& inputs = inputs_[weight->name];
  if (inputs.samples.empty()) ++unseen_;
  const CompressedMatrix made = compressed(weight, inputs);
  const auto errors = row_errors(*weight, made, inputs);
  decompress(scheme_.kind, made,
             std::span(weight->value.data<float>(), static_cast<std::size_t>(weight->numel())));
  share_out(weight->name, made, errors);
  inputs.samples = {};
}

/// For each output, squares summed over the samples: its change by rounding, and itself.
std::vector<std::pair<double, double>> Calibration::row_errors(const autograd::Parameter& weight,
                                                               const CompressedMatrix& made,
                                                               const Inputs& inputs) {
  std::vector<std::pair<double, double>> out(static_cast<std::size_t>(made.rows));
  const std::int64_t samples = std::ssize(inputs.samples) / made.columns;
  if (samples == 0) return {};
  const Tensor x = Tensor::of<float>(device_, {samples, made.columns}, std::span(inputs.samples));
  const Tensor plain = Tensor::on_host(device_, {samples, made.rows}, DType::f32),
               rounded = Tensor::on_host(device_, plain.shape(), DType::f32),
               stand_for = Tensor::on_host(device_, weight.shape, DType::f32);
  kernels_->matmul({.a = x, .b = weight.value, .c = plain, .trans_b = true});
  if (scheme_.rounds_inputs())
    round_inputs(scheme_, made.input_scale, std::span(x.data<float>(), inputs.samples.size()), made.columns);
  decompress(scheme_.kind, made, std::span(stand_for.data<float>(), made.codes.size()));
  kernels_->matmul({.a = x, .b = stand_for, .c = rounded, .trans_b = true});
  for (std::int64_t i = 0; i < samples; ++i)
    for (std::int64_t row = 0; row < made.rows; ++row) {
      const double value = plain.data<float>()[i * made.rows + row],
                   away = rounded.data<float>()[i * made.rows + row] - value;
      auto& [lost, whole] = out[static_cast<std::size_t>(row)];
      lost += away * away, whole += value * value;
    }
  return out;
}

void Calibration::share_out(const std::string& weight, const CompressedMatrix& whole,
                            const std::vector<std::pair<double, double>>& row_errors) {
  const PublishedParameter where = layout_.published(weight);
  for (std::size_t i = 0; i < where.tensors.size(); ++i)
    copy_rows(whole, where, i, made_[where.tensors[i].name].compressed);
  for (const PublishedParameter::RowRun& run : where.rows)
    for (std::int64_t row = run.row; row < run.row + run.rows && !row_errors.empty(); ++row) {
      const auto& [lost, all] = row_errors[static_cast<std::size_t>(row)];
      Made& made = made_[where.tensors[static_cast<std::size_t>(run.tensor)].name];
      made.lost += lost, made.whole += all;
    }
}

}  // namespace sherd::models
