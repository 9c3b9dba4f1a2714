#include "engine/report/fp8_report.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>

#include "base/log.h"
#include "base/text/excerpt.h"
#include "comm/gather.h"
#include "engine/report/report.h"
#include "engine/setup/fp8_layers.h"

namespace sherd::engine {
namespace {

using autograd::LinearProduct;
using tensor::Tensor;

/// The layer that a weight counts to: one for all experts of a block.
std::string reported_layer(const autograd::Parameter& weight) {
  std::string name = layer_of(weight.name);
  constexpr std::string_view experts = ".experts.";
  if (const auto at = name.find(experts); at != std::string::npos) {
    const auto number = at + experts.size();
    name.replace(number, name.find('.', number) - number, "*");
  }
  return name;
}

double squares(tensor::Kernels& kernels, const Tensor& x) {
  tensor::ExactSum sum;
  kernels.sum_of_squares(x, sum);
  return sum.value();
}

/// Runs the model with some of its layers in FP8.
class Fp8Probe {
 public:
  Fp8Probe(Engine& engine, const std::vector<tensor::Batch>& batches) : engine_(engine), batches_(batches) {
    for (const nn::ParameterPtr& weight : engine.fp8().weights()) {
      const std::string name = reported_layer(*weight);
      auto at = std::find(names_.begin(), names_.end(), name);
      if (at == names_.end()) at = names_.insert(at, name);
      layers_.resize(names_.size());
      layers_[static_cast<std::size_t>(at - names_.begin())].push_back(weight);
      settings_ = weight->fp8;
    }
  }
  ~Fp8Probe() {
    engine_.fp8().set_compare(nullptr);
    engine_.set_gradient_accumulation_boundary({});
    put([](std::size_t) { return true; });
  }

  const std::vector<std::string>& names() const { return names_; }

  /// The mean loss, without dropout, with those layers in FP8 for which `in_fp8` holds.
  template <class Which>
  double loss(const Which& in_fp8) {
    put(in_fp8);
    std::size_t next = 0;
    return engine_.eval_batches([&]() -> tensor::Batch { return batches_[next++]; }, std::ssize(batches_));
  }

  /// Relative errors by layer and kind of product, over all ranks. Runs backward.
  std::vector<std::array<double, 3>> errors() {
    sums_.assign(6 * names_.size(), 0);
    std::map<const autograd::Parameter*, std::size_t> numbers;
    for (std::size_t i = 0; i < layers_.size(); ++i)
      for (const nn::ParameterPtr& weight : layers_[i]) numbers[weight.get()] = i;
    engine_.fp8().set_compare([&](autograd::Tape& tape, const autograd::Parameter& weight, LinearProduct kind,
                                  tensor::Matmul fp8, tensor::Matmul plain) {
      add(tape, 6 * numbers.at(&weight) + 2 * static_cast<std::size_t>(kind), std::move(fp8),
          std::move(plain));
    });
    run([](std::size_t) { return true; });
    engine_.drop_step();
    engine_.fp8().set_compare(nullptr);
    comm::reduce_values(engine_.dist().world(), engine_.device(), std::span(sums_), "errors of FP8");
    std::vector<std::array<double, 3>> out(names_.size());
    for (std::size_t i = 0; i < sums_.size() / 2; ++i)
      out[i / 3][i % 3] = std::sqrt(sums_[2 * i] / sums_[2 * i + 1]);
    return out;
  }

  /// The gradients that others are compared with.
  void keep_gradients_in_bf16() {
    run([](std::size_t) { return false; });
    engine_.sharded().finish_gradients();
    for (const sharding::Segment* segment : engine_.sharded().trainable_segments())
      kept_.push_back(copy_of(*segment));
    engine_.drop_step();
  }
  /// How far all of them are from those, over all ranks, with those layers in FP8 for which `in_fp8` holds.
  template <class Which>
  double gradient_change(const Which& in_fp8) {
    run(in_fp8);
    engine_.sharded().finish_gradients();
    std::array<double, 2> sums{};
    std::size_t next = 0;
    for (const sharding::Segment* segment : engine_.sharded().trainable_segments()) {
      const Tensor& before = kept_[next++];
      const Tensor change = copy_of(*segment);
      engine_.kernels().subtract(change, before, change);
      sums[0] += squares(engine_.kernels(), change), sums[1] += squares(engine_.kernels(), before);
    }
    engine_.drop_step();
    comm::reduce_values(engine_.dist().world(), engine_.device(), std::span<double>(sums),
                        "gradients in FP8");
    return std::sqrt(sums[0] / sums[1]);
  }

 private:
  /// All micro-batches forward and backward.
  template <class Which>
  void run(const Which& in_fp8) {
    put(in_fp8);
    engine_.train();
    engine_.set_gradient_accumulation_boundary(false);
    for (const tensor::Batch& batch : batches_) {
      engine_.backward(engine_.forward(batch));
      engine_.step();
    }
  }

  Tensor copy_of(const sharding::Segment& segment) {
    const Tensor& from = segment.gradients().tensor();
    Tensor to = Tensor::empty(engine_.device(), {from.numel()}, from.dtype(), device::Category::workspace);
    engine_.kernels().copy(from, to);
    return to;
  }

  template <class Which>
  void put(const Which& in_fp8) {
    for (std::size_t i = 0; i < layers_.size(); ++i)
      for (const nn::ParameterPtr& weight : layers_[i]) weight->fp8 = in_fp8(i) ? settings_ : nullptr;
  }

  /// Adds the squares of what FP8 changes, and of the product.
  void add(autograd::Tape& tape, std::size_t at, tensor::Matmul fp8, tensor::Matmul plain) {
    tensor::Kernels& kernels = tape.kernels();
    fp8.c = tape.empty({fp8.fp8_a.rows, fp8.fp8_b.rows}, DType::f32);
    plain.c = tape.empty(fp8.c.shape(), DType::f32);
    kernels.matmul(fp8), kernels.matmul(plain);
    kernels.subtract(fp8.c, plain.c, fp8.c);
    sums_[at] += squares(kernels, fp8.c), sums_[at + 1] += squares(kernels, plain.c);
  }

  Engine& engine_;
  const std::vector<tensor::Batch>& batches_;
  std::vector<std::string> names_;
  std::vector<std::vector<nn::ParameterPtr>> layers_;
  std::shared_ptr<const autograd::Fp8Layer> settings_;
  std::vector<double> sums_;
  std::vector<Tensor> kept_;
};

}  // namespace

bool Fp8Bounds::hold(const Fp8LayerErrors& layer) const {
  // A layer that never ran has no errors, which are NaN.
  const auto within = [this](double e) { return std::isnan(e) || e <= error; };
  return within(layer.output) && within(layer.input_gradient) && within(layer.weight_gradient) &&
         layer.gradient <= gradient && layer.loss <= loss;
}

Fp8Report measure_fp8(Engine& engine, const std::vector<tensor::Batch>& batches) {
  const config::Config& config = engine.config();
  if (!engine.fp8().enabled() || config.fp8.gathers())
    fail(ErrorKind::config, "what FP8 costs is measured with fp8.enabled true and fp8.gather false");
  if (engine.schedule() != config::Schedule::accumulate)
    fail(ErrorKind::config,
         "what FP8 costs is measured one micro-batch after the other: set parallel.pipeline to 1 and "
         "parallel.schedule to \"accumulate\"");
  Fp8Probe probe(engine, batches);
  if (engine.dist().rank() == 0)
    log_info("measuring ", counted(std::ssize(probe.names()), "layer"), ": of each, passes over ",
             std::ssize(batches), " x 3 micro-batches of this rank");
  const Fp8Bounds bounds;
  Fp8Report out;
  out.loss_in_bf16 = probe.loss([](std::size_t) { return false; });
  out.loss_in_fp8 = probe.loss([](std::size_t) { return true; });
  probe.keep_gradients_in_bf16();
  for (std::size_t i = 0; i < probe.names().size(); ++i) {
    const auto alone = [i](std::size_t k) { return k == i; };
    out.layers.push_back({.layer = probe.names()[i],
                          .gradient = probe.gradient_change(alone),
                          .loss = std::abs(probe.loss(alone) - out.loss_in_bf16)});
  }
  const std::vector<std::array<double, 3>> errors = probe.errors();
  for (std::size_t i = 0; i < errors.size(); ++i) {
    const auto& [output, input_gradient, weight_gradient] = errors[i];
    out.layers[i].output = output, out.layers[i].input_gradient = input_gradient;
    out.layers[i].weight_gradient = weight_gradient;
  }

  std::vector<bool> excluded;
  for (const Fp8LayerErrors& layer : out.layers) excluded.push_back(!bounds.hold(layer));
  const auto loss_with_excluded = [&] { return probe.loss([&](std::size_t i) { return !excluded[i]; }); };
  out.loss_with_excluded = loss_with_excluded();
  while (!(std::abs(out.loss_with_excluded - out.loss_in_bf16) <= bounds.loss)) {
    std::size_t worst = excluded.size();
    for (std::size_t i = 0; i < excluded.size(); ++i)
      if (!excluded[i] && (worst == excluded.size() || out.layers[i].loss > out.layers[worst].loss))
        worst = i;
    if (worst == excluded.size()) break;
    excluded[worst] = true;
    out.loss_with_excluded = loss_with_excluded();
  }
  for (std::size_t i = 0; i < excluded.size(); ++i)
    if (excluded[i]) out.exclude.push_back(out.layers[i].layer);
  return out;
}

std::string fp8_table(const Fp8Report& report, const Fp8Bounds& bounds) {
  std::vector<std::vector<std::string>> rows{
      {"layer in FP8", "output", "input gradient", "weight gradient", "all gradients", "loss", ""}};
  const auto share = [](double error) { return std::isnan(error) ? "-" : printed("%.2f %%", 100 * error); };
  const auto is_excluded = [&](const std::string& layer) {
    return std::find(report.exclude.begin(), report.exclude.end(), layer) != report.exclude.end();
  };
  for (const Fp8LayerErrors& layer : report.layers)
    rows.push_back({layer.layer, share(layer.output), share(layer.input_gradient),
                    share(layer.weight_gradient), share(layer.gradient), printed("%.5f", layer.loss),
                    is_excluded(layer.layer) ? "loses" : ""});
  std::string out = format_table(rows);
  out += cat("\nloss ", printed("%.5f", report.loss_in_bf16), " in bf16, ",
             printed("%.5f", report.loss_in_fp8), " with all of them in FP8");
  if (report.exclude.empty())
    return out + cat("\nno layer loses more than ", printed("%g", 100 * bounds.error), " % of a product, ",
                     printed("%g", 100 * bounds.gradient), " % of all gradients or ",
                     printed("%g", bounds.loss), " nats: nothing is to be excluded\n");
  std::string list;
  for (const std::string& layer : report.exclude) list += cat(list.empty() ? "\"" : ", \"", layer, '"');
  return out + cat(", ", printed("%.5f", report.loss_with_excluded), " without those that lose\n",
                   "\"exclude\": [", list, "]\n");
}

}  // namespace sherd::engine
