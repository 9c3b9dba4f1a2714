#pragma once

#include "engine/initialize.h"
#include "support/cut_model.h"

/// Runs of the model of support/cut_model.h over ranks of any layout.
namespace sherd::test {

/// Ranks by axis.
struct Sizes {
  int tensor, context, data;
  bool sequence_parallel = true;
  int stages = 1;
  int ranks() const { return tensor * context * data * stages; }
  std::string text() const {
    return cat("t", tensor, "c", context, "d", data, sequence_parallel ? "" : "_plain",
               stages > 1 ? cat("p", stages) : "");
  }
};

/// One setting.
struct Spec {
  Sizes sizes{};
  int stage = 0, shard = 0, accumulation = 1;
  double clipping = 0;
  std::string zero{};  ///< more keys of its section
  std::string recompute = "none", moments = "fp32", schedule = "auto";
  int virtual_stages = 1;
  std::string optimizer = R"("type": "SGD", "params": {"lr": 0.1})";

  config::Config config() const {
    return config::parse_text(cat(
        R"({"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": )", accumulation,
        R"(, "gradient_clipping": )", clipping, R"(, "optimizer": {)", optimizer,
        R"(}, "training": {"seed": 5, "recompute": ")", recompute, R"(", "moments_dtype": ")", moments,
        R"("}, "zero_optimization": {"stage": )", stage, R"(, "stage3_param_persistence_threshold": 4)",
        zero.empty() ? "" : ", ", zero, R"(}, "parallel": {"tensor": )", sizes.tensor, R"(, "context": )",
        sizes.context, R"(, "pipeline": )", sizes.stages, R"(, "virtual_stages": )", virtual_stages,
        R"(, "schedule": ")", schedule, R"(", "sequence_parallel": )",
        sizes.sequence_parallel ? "true" : "false", shard ? cat(R"(, "shard_size": )", shard) : "", "}}"));
  }
};

/// Rank 0's report of a run, and all states at its end.
struct Outcome {
  std::vector<double> losses, norms;
  LogicalStates states;
  bool operator==(const Outcome&) const = default;
};

/// Builds the model for initialize().
inline std::shared_ptr<nn::Model> cut_model(const parallel::Layout& layout) {
  return std::make_shared<cut::Model>(layout);
}

/// Runs `body` in an engine on every rank of the run's layout; returns all states at the end.
inline LogicalStates on_all(const Spec& run, const std::function<void(Engine&)>& body) {
  LogicalStateCollector states;
  launch_ranks(run.sizes.ranks(), [&](DistributedPtr dist) {
    const auto made = initialize({.dist = dist, .model = cut_model, .config = run.config()});
    body(*made.engine);
    states.add(*made.engine);
  });
  return states.take();
}

/// Steps [from, to); rank 0 adds what they report to `out`.
inline void train(Engine& engine, int from, int to, Outcome* out = nullptr) {
  for (int step = from; step < to; ++step) {
    int micro = 0;
    engine.train_batch(
        [&] { return cut::batch(engine.device(), step, micro++, engine.data_ranks().rank()); });
    if (!out || engine.dist().rank() != 0) continue;
    out->losses.push_back(engine.last_step().loss);
    out->norms.push_back(engine.last_step().grad_norm);
  }
}

/// A run from the start.
inline Outcome outcome_of(const Spec& run, int steps = 4) {
  Outcome out;
  out.states = on_all(run, [&](Engine& engine) { train(engine, 0, steps, &out); });
  return out;
}

/// fp32 weights are those of the computation in double, to rounding.
inline void expect_near(const LogicalStates& states, const cut::Weights& expected) {
  for (const auto& [name, values] : cut::weights_of(states)) {
    ASSERT_EQ(values.size(), expected.at(name).size()) << name;
    for (std::size_t i = 0; i < values.size(); ++i)
      EXPECT_NEAR(values[i], expected.at(name)[i], 2e-6) << name;
  }
}

}  // namespace sherd::test
