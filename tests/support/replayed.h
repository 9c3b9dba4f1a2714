#pragma once

#include <cmath>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "autograd/ops.h"
#include "nn/layers.h"
#include "support/equality.h"
#include "support/places.h"
#include "support/reference_file.h"

/// Runs of the engine that scripts/references/make_engine_reference.py had plain PyTorch replay.
namespace sherd::test::replay {

using tensor::Tensor;
using Weights = std::map<std::string, std::vector<float>>;

constexpr std::int64_t vocab = 11, hidden = 6, ffn = 7, rows = 8, seq = 4;
constexpr int most_micro_batches = 12, data_steps = 8;
/// Multiplies the loss of a micro-batch whose fp16 gradients must overflow.
constexpr double loud = 1 << 24;
inline const std::string reference_folder = SHERD_SOURCE_DIR "/tests/engine/reference/";

/// Step and micro-batch of the world.
using Place = std::pair<int, int>;

/// A line of runs.txt or groups.txt.
struct ReferenceRun {
  int index = 0;
  std::string name;
  int ranks = 1;
  bool tied = false, frozen = false;
  std::string unused;            ///< none, never, or sometimes: how often the block `extra` is left out
  std::set<Place> loud, poison;  ///< micro-batches with a loss, or a gradient, beyond all bounds
  std::string config;            ///< JSON

  bool has(const std::string& word) const { return name.find("_" + word + "_") != std::string::npos; }
};

inline void PrintTo(const ReferenceRun& run, std::ostream* to) {
  *to << run.name;
}

inline std::set<Place> read_places(const std::string& list) {
  std::set<Place> out;
  if (list == "-") return out;
  std::istringstream items(list);
  for (std::string item; std::getline(items, item, ',');)
    out.insert({std::stoi(item), std::stoi(item.substr(item.find(':') + 1))});
  return out;
}

/// The runs of `stem`.txt.
inline std::vector<ReferenceRun> read_runs(const std::string& stem) {
  const std::string path = reference_folder + stem + ".txt";
  std::ifstream file(path);
  require(file.is_open(), "cannot open ", path, ": scripts/references/make_engine_reference.py makes it");
  std::vector<ReferenceRun> out;
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with('#')) continue;
    ReferenceRun run;
    std::string loud_places, poison_places;
    std::istringstream fields(line);
    fields >> run.name >> run.ranks >> run.tied >> run.frozen >> run.unused >> loud_places >> poison_places >>
        run.config;
    require(!fields.fail(), path, ": \"", line.substr(0, 60), "\" is no run");
    run.index = static_cast<int>(out.size());
    run.loud = read_places(loud_places), run.poison = read_places(poison_places);
    out.push_back(std::move(run));
  }
  return out;
}

/// The model of the script: an MLP, plain blocks of which one may be frozen, one may share another's weight,
/// and one may be left out; a head that may share the embedding's table.
class Replayed : public nn::Model {
 public:
  explicit Replayed(const ReferenceRun& run) : run_(run) {
    embed_ = add("embed", std::make_shared<nn::Embedding>(vocab, hidden));
    fixed_ = block("fixed", hidden, hidden);
    if (run.frozen) fixed_->freeze();
    norm_ = add("norm", std::make_shared<nn::LayerNorm>(hidden));
    up_ = block("up", hidden, ffn, {.activation = tensor::Activation::gelu_tanh});
    down_ = block("down", ffn, hidden);
    left_ = block("left", hidden, hidden);
    right_ = block("right", hidden, hidden, tied_to(left_->weight()));
    if (run.unused != "none") extra_ = block("extra", hidden, hidden);
    if (extra_ && run.tied) extra_->mark_block(false);  // left out of a unit that is in use
    head_ = add("head", std::make_shared<nn::Linear>(hidden, vocab, tied_to(embed_->weight())));
  }

 protected:
  nn::Var forward(nn::Tape& tape, const tensor::Batch& batch) override {
    const auto plus_tanh = [&](const nn::Var& x, nn::Linear& layer) {
      return autograd::add(x, autograd::tanh(layer(tape, x)));
    };
    nn::Var x = autograd::add((*embed_)(tape, batch.at("tokens")), tape.input(batch.at("noise")));
    if (batch.contains("poison")) x = poisoned(tape, x);
    x = plus_tanh(x, *fixed_);
    x = autograd::add(x, (*down_)(tape, (*up_)(tape, (*norm_)(tape, x))));
    x = autograd::tanh((*left_)(tape, x));
    x = plus_tanh(x, *right_);
    if (run_.unused == "sometimes" && batch.contains("deep")) x = plus_tanh(x, *extra_);
    const nn::Var loss = autograd::cross_entropy((*head_)(tape, x), batch.at("labels"));
    return batch.contains("loud") ? autograd::scale(loss, loud) : loss;
  }

 private:
  std::shared_ptr<nn::Linear> block(const std::string& name, std::int64_t in, std::int64_t out,
                                    nn::LinearOptions options = {}) {
    auto layer = add(name, std::make_shared<nn::Linear>(in, out, options));
    layer->mark_block();
    return layer;
  }
  nn::LinearOptions tied_to(const nn::ParameterPtr& weight) const {
    nn::LinearOptions options;
    if (run_.tied) options.tied = weight;
    return options;
  }
  /// x, with infinity for a gradient.
  static nn::Var poisoned(nn::Tape& tape, const nn::Var& x) {
    return tape.record(x.value(), {x}, [to = x.grad_ref()](nn::Tape& backward, Tensor dy) {
      const std::vector<float> infinite(static_cast<std::size_t>(dy.numel()),
                                        std::numeric_limits<float>::infinity());
      const Tensor wide = Tensor::of<float>(backward.device(), dy.shape(), infinite);
      const Tensor narrow = Tensor::empty(backward.device(), dy.shape(), dy.dtype());
      backward.kernels().copy(wide, narrow);
      backward.accumulate(to, narrow);
    });
  }

  const ReferenceRun run_;
  std::shared_ptr<nn::Embedding> embed_;
  std::shared_ptr<nn::LayerNorm> norm_;
  std::shared_ptr<nn::Linear> fixed_, up_, down_, left_, right_, extra_, head_;
};

/// The file that the script wrote beside the runs of `stem`.txt.
class Reference {
 public:
  explicit Reference(const std::string& stem)
      : file_(read_reference(reference_folder + stem + ".safetensors")) {}

  /// [steps, 5]: loss, gradient norm (NaN: skipped), learning rate, loss scale, whether the step was applied.
  std::vector<double> trace(const ReferenceRun& run) const {
    return file_.at(run.name + ".trace").values<double>();
  }
  /// [steps, groups]: the rate of every parameter group; empty where the script wrote none.
  std::vector<double> rates(const ReferenceRun& run) const {
    const auto found = file_.find(run.name + ".rates");
    return found == file_.end() ? std::vector<double>() : found->second.values<double>();
  }
  /// By how far the parameters moved, in the order of their names.
  std::vector<float> moved(const ReferenceRun& run) const {
    return file_.at(run.name + ".moved").values<float>();
  }
  std::vector<float> initial(const std::string& parameter) const {
    return file_.at("init." + parameter).values<float>();
  }

  /// Longer runs see the data again.
  tensor::Batch batch(device::Device& device, const ReferenceRun& run, int step, int accumulated,
                      int rank) const {
    step %= data_steps;
    const int micro_batch = accumulated * run.ranks + rank;
    tensor::Batch out{{"tokens", slice<std::int32_t>(device, "tokens", {rows, seq}, step, micro_batch)},
                      {"labels", slice<std::int32_t>(device, "labels", {rows, seq}, step, micro_batch)},
                      {"noise", slice<float>(device, "noise", {rows, seq, hidden}, step, micro_batch)}};
    const auto mark = [&](const std::string& name, bool holds) {
      if (holds) out[name] = out.at("tokens");
    };
    mark("deep", (step + accumulated) % 3 == 0);
    mark("loud", run.loud.contains({step, micro_batch}));
    mark("poison", run.poison.contains({step, micro_batch}));
    return out;
  }

 private:
  template <class T>
  Tensor slice(device::Device& device, const std::string& name, const tensor::Shape& shape, int step,
               int at) const {
    const std::vector<T> all = file_.at(name).values<T>();
    const auto size = static_cast<std::size_t>(shape.numel());
    const std::size_t first = static_cast<std::size_t>(step * most_micro_batches + at) * size;
    return Tensor::of<T>(device, shape, std::span<const T>(all).subspan(first, size));
  }

  std::map<std::string, ReferenceTensor> file_;
};

/// Gives every parameter the value that the replay began with.
inline void set_weights(Engine& engine, const Reference& reference) {
  for (const auto& unit : engine.sharded().units())
    for (const auto& segment : unit->segments()) {
      const std::int64_t begin = segment->parameters().begin(), end = segment->parameters().end();
      std::vector<float> values(static_cast<std::size_t>(end - begin));
      for (const sharding::Piece& piece : segment->layout().pieces(begin, end)) {
        const std::vector<float> from = reference.initial(segment->layout().parameters()[piece.slot]->name);
        std::copy_n(from.begin() + piece.parameter_begin, piece.count,
                    values.begin() + (piece.flat_begin - begin));
      }
      segment->write_values(begin, Tensor::of<float>(engine.device(), {end - begin}, values));
    }
}

struct Outcome {
  std::vector<engine::StepReport> reports;
  Weights weights;
};

/// Trains under the run's configuration with `overrides` to it.
inline Outcome train(const ReferenceRun& run, const Reference& reference,
                     const std::vector<std::string>& overrides) {
  const config::Config config = config::parse_text(run.config, run.name, overrides);
  const std::size_t steps = reference.trace(run).size() / 5;
  Outcome out;
  launch_ranks(run.ranks, [&](DistributedPtr dist) {
    Engine engine(dist, std::make_shared<Replayed>(run), config);
    set_weights(engine, reference);
    std::vector<engine::StepReport> reports;
    for (int step = 0; step < static_cast<int>(steps); ++step) {
      int accumulated = 0;
      reports.push_back(engine.train_batch(
          [&] { return reference.batch(engine.device(), run, step, accumulated++, dist->rank()); }));
    }
    RunResult result;
    collect_weights(engine, result);
    if (dist->rank() != 0) return;
    out.reports = std::move(reports);
    for (const auto& [name, bytes] : result.masters) {
      out.weights[name].resize(bytes.size() / sizeof(float));
      std::memcpy(out.weights[name].data(), bytes.data(), bytes.size());
    }
  });
  return out;
}

inline bool near(double got, double want, double tolerance) {
  return std::abs(got - want) <= tolerance * std::abs(want);
}

/// The first rate of a group that differs from the replay's, of which `rates` has as many for every step.
inline std::optional<std::string> compare_rates(const std::vector<engine::StepReport>& got,
                                                const std::vector<double>& rates) {
  for (std::size_t i = 0, at = 0; i < got.size() && !rates.empty(); ++i) {
    if (got[i].lr.size() * got.size() != rates.size()) return cat("there are ", got[i].lr.size(), " rates");
    for (const double lr : got[i].lr)
      if (const double want = rates[at++]; !near(lr, want, 1e-12))
        return cat("step ", i + 1, ": one of the rates is ", lr, " and not ", want);
  }
  return std::nullopt;
}

/// The first difference from the replay's steps; nothing where all agree.
inline std::optional<std::string> compare_steps(const std::vector<engine::StepReport>& got,
                                                const std::vector<double>& trace, double tolerance) {
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double *want = &trace[5 * i], exact = 0, rate_tolerance = 1e-6;
    const engine::StepReport& report = got[i];
    const struct {
      const char* name;
      double got, want, tolerance;
    } quantities[] = {{"loss scale", report.loss_scale, want[3], exact},
                      {"applied", static_cast<double>(report.applied), want[4], exact},
                      {"learning rate", report.lr.at(0), want[2], rate_tolerance},
                      {"loss", report.loss, want[0], tolerance},
                      {"gradient norm", report.grad_norm, want[1], tolerance}};
    for (const auto& q : quantities)
      if (!std::isnan(q.want) && !near(q.got, q.want, q.tolerance))
        return cat("step ", i + 1, ": ", q.name, " is ", q.got, " and not ", q.want);
  }
  return std::nullopt;
}

inline double norm(const std::vector<double>& x) {
  return std::sqrt(std::inner_product(x.begin(), x.end(), x.begin(), 0.0));
}

/// The first parameter that did not move as the replay's did; nothing where all did. In fp32 within 1e-5 of
/// its own movement or of an average parameter's, whichever is more; else within 5e-3 of the movement of all.
/// One that stayed there must stay here.
inline std::optional<std::string> compare_weights(const ReferenceRun& run, const Reference& reference,
                                                  const Weights& got) {
  const std::vector<float> moved = reference.moved(run);
  const double all = norm({moved.begin(), moved.end()});
  std::vector<double> errors;
  std::size_t at = 0;
  for (const auto& [name, weights] : got) {
    const std::vector<float> initial = reference.initial(name);
    std::vector<double> movement, error;
    for (std::size_t i = 0; i < weights.size(); ++i) {
      movement.push_back(moved.at(at++));
      error.push_back(static_cast<double>(weights[i]) - initial.at(i) - movement.back());
    }
    errors.insert(errors.end(), error.begin(), error.end());
    const double own = norm(movement), average = all / std::sqrt(static_cast<double>(got.size()));
    const double allowed = own == 0 ? 0 : run.has("fp32") ? 1e-5 * std::max(own, average) : 5e-3 * all;
    if (!(norm(error) <= allowed)) return cat(name, " is off by ", norm(error), " after moving by ", own);
  }
  if (at != moved.size()) return cat("the model has ", at, " weights and not ", moved.size());
  if (!run.has("fp32") && !(norm(errors) <= 5e-3 * all))
    return cat("the weights are off by ", norm(errors), " after moving by ", all);
  return std::nullopt;
}

}  // namespace sherd::test::replay
