#include <algorithm>
#include <random>

#include "base/text/excerpt.h"
#include "tests/engine/compositions/composition.h"

namespace sherd::test {
namespace {

constexpr int most_ranks = 8, heads = 4;

/// std's distributions differ between libraries.
class Dice {
 public:
  explicit Dice(std::uint64_t seed) : random_(seed) {}
  std::size_t below(std::size_t count) { return random_() % count; }
  bool chance(std::size_t percent) { return below(100) < percent; }
  template <class T>
  T pick(std::initializer_list<T> values) {
    return *(values.begin() + below(values.size()));
  }
  const char* pick(std::initializer_list<const char*> values) { return pick<const char*>(values); }

 private:
  std::mt19937_64 random_;
};

// ---- the problem ----

std::string draw_experts(Dice& dice) {
  const int experts = dice.pick({4, 8}), top_k = dice.pick({1, 2, 2});
  std::string out = cat(R"("experts": )", experts, R"(, "top_k": )", top_k, R"(, "ffn_hidden_size": )",
                        dice.pick({32, 48}));
  out +=
      cat(R"(, "router": ")",
          top_k == 1 ? dice.pick({"softmax", "sigmoid"}) : dice.pick({"softmax", "softmax_topk", "sigmoid"}),
          '"');
  if (dice.chance(60))
    out += cat(R"(, "aux_loss": 0.02, "aux_loss_type": ")", dice.pick({"switch", "gshard", "hf"}), '"');
  if (dice.chance(30)) out += R"(, "z_loss": 1e-3)";
  if (dice.chance(30)) out += R"(, "bias_update": 0.05)";
  if (dice.chance(30))
    out += cat(R"(, "capacity_factor": 0.75, "drop": ")", dice.pick({"weight", "position"}), '"');
  if (dice.chance(20)) out += dice.pick({R"(, "shared_experts": 1)", R"(, "use_residual": true)"});
  if (dice.chance(20)) out += dice.pick({R"(, "every": 2)", R"(, "first_dense": 1)"});
  if (dice.chance(20)) out += R"(, "jitter": 0.01)";
  if (dice.chance(20)) out += R"(, "groups": 2)";
  return out;
}

std::string draw_adapter(Dice& dice, bool llama) {
  return dice.pick(
      {R"("type": "lora", "rank": 4, "targets": "all-linear", "dropout": 0.1)",
       R"("type": "lora", "rank": 2)", R"("type": "ia3")", R"("type": "bottleneck", "reduction_factor": 5)",
       R"("type": "prompt_tuning", "virtual_tokens": 3, "tasks": [{"name": "a"}, {"name": "b"}])",
       llama ? R"("type": "p_tuning", "virtual_tokens": 4, "encoder_hidden_size": 20)"
             : R"("type": "bottleneck", "bottleneck_size": 7, "non_linearity": "relu")"});
}

std::string draw_optimizer(Dice& dice) {
  const char* type = dice.pick({"AdamW", "AdamW", "AdamW", "SGD", "Lion", "Adagrad", "Lamb", "NVLamb", "LARS",
                                "Muon", "AdamW8bit", "OneBitAdam", "OneBitLamb"});
  const std::string name = type;
  const double rate = name == "SGD" ? 0.05 : name == "LARS" ? 1 : name == "Lion" ? 0.0005 : 0.003;
  return cat(R"("type": ")", type, R"(", "params": {"lr": )", rate, R"(, "weight_decay": )",
             dice.pick({0.0, 0.1}), name == "SGD" ? R"(, "momentum": 0.9)" : "",
             name.starts_with("OneBit") ? R"(, "freeze_step": 2})" : "}");
}

RunSpec draw_problem(Dice& dice) {
  RunSpec p;
  p.dtype = dice.pick({"fp32", "fp32", "bf16", "bf16", "fp16"});
  if (p.dtype != "fp32" && dice.chance(70)) p.accumulate_in = "fp32";
  if (dice.chance(10)) p.communicate_in = dice.pick({"fp32", p.dtype == "fp16" ? "fp16" : "bf16"});
  p.llama = dice.chance(50), p.tied = dice.chance(50);
  p.hidden = dice.pick({32, 48}), p.layers = dice.pick({2, 3, 4});
  p.rows = dice.pick({1, 2}), p.seq = dice.pick({8, 16, 16});
  p.kv_heads = dice.pick({1, 2, 4});
  p.dropout = dice.pick({0.0, 0.1});
  p.clipping = dice.pick({0.0, 0.1, 0.5, 10.0});
  p.check_overflow = p.dtype != "bf16" || dice.chance(60);
  p.loss_scale_window = 2;
  p.ragged = dice.chance(30);
  p.steps = dice.pick({3, 4, 5});
  if (dice.chance(30))
    p.moe = draw_experts(dice);
  else if (dice.chance(20))
    p.adapter = draw_adapter(dice, p.llama);
  else if (dice.chance(25))
    p.sparsity = dice.pick({R"("pattern": "2:4")", R"("pattern": "2:4", "targets": "*.mlp.*")"});
  if (!p.llama && !p.adapter.empty()) p.kv_heads = heads;  // no public family shares them
  p.optimizer = draw_optimizer(dice);
  if (!takes_rule(p, "AdamW8bit") && !takes_rule(p, "OneBit") && dice.chance(15)) p.moments = "bf16";
  if (p.adapter.empty() && dice.chance(15))
    p.groups =
        R"([{"match": "*norm*", "type": "AdamW", "lr": 0.01}, {"match": "blocks.1.*", "type": "SGD", "lr": 0.05, "momentum": 0.9}])";
  return p;
}

// ---- the layout ----

/// Ranks by axis, which fit the problem and each other.
void draw_ranks(Dice& dice, RunSpec& s, int micro_batches) {
  const bool whole_matrices = !s.moe.empty() && takes_rule(s, "Muon");
  const bool over_all_layers = s.moe.find("\"hf\"") != std::string::npos;  // of which a stage knows its own
  const auto fits = [&](int data) {
    const int heads_each = std::max(1, s.kv_heads / s.tensor);
    return s.ranks <= most_ranks && micro_batches % data == 0 && s.pipeline <= s.layers + 2 &&
           s.seq % (2 * s.tensor * s.context) == 0 && !(whole_matrices && s.tensor > 1) &&
           !(over_all_layers && s.pipeline > 1) &&
           (s.context == 1 || s.context_method == "ring" || heads_each % s.context == 0);
  };
  int data = 0;
  do {
    s.tensor = dice.pick({1, 1, 1, 2, 4}), s.context = dice.pick({1, 1, 1, 2, 4});
    s.pipeline = dice.pick({1, 1, 2, 3, 4}), data = dice.pick({1, 1, 2, 2, 3, 4, 4, 6, 8});
    s.context_method = dice.pick({"ring", "ulysses"});
    s.ranks = s.tensor * s.context * s.pipeline * data;
  } while (!fits(data));
  s.sequence_parallel = dice.chance(60);
  s.accumulation = micro_batches / data;
  const int shared = data * s.context;
  s.expert = 1, s.shard_size = 0;
  if (!s.moe.empty() && dice.chance(75))
    for (const int expert : {4, 2})
      if (shared % expert == 0 && (s.expert == 1 || dice.chance(50))) s.expert = expert;
  if (dice.chance(takes_rule(s, "OneBit") ? 80 : 45))
    for (int size = shared; size >= 1; --size)
      if (shared % size == 0 && size % s.context == 0 && size % s.expert == 0 &&
          (s.shard_size == 0 || dice.chance(60)))
        s.shard_size = size;
  if (s.shard_size == 0 && takes_rule(s, "OneBit")) s.shard_size = shared;
}

void draw_schedule(Dice& dice, RunSpec& s) {
  s.schedule = s.partition = "", s.virtual_stages = 1, s.micro_batch_group = 0;
  if (s.pipeline == 1) {
    s.schedule = dice.pick({"", "accumulate", "layered"});
  } else {
    const bool interleaves = 2 * s.pipeline <= s.layers + 2 && s.accumulation % s.pipeline == 0;
    s.schedule =
        interleaves && dice.chance(50) ? "interleaved" : dice.pick({"", "1f1b", "gpipe", "zero_bubble"});
    if (s.schedule == "interleaved") s.virtual_stages = 2;
    if (s.schedule == "interleaved" && dice.chance(30)) s.micro_batch_group = s.accumulation;
    s.partition = dice.pick({"", "uniform", "parameters"});
  }
}

void draw_tiers(Dice& dice, RunSpec& s) {
  s.offload_param = s.offload_optimizer = "none";
  if (s.stage >= 1) s.offload_optimizer = dice.pick({"none", "none", "cpu", "nvme"});
  if (s.stage == 3) s.offload_param = dice.pick({"none", "none", "cpu", "nvme"});
  s.offload_param_extra = s.offload_extra = s.aio = "";
  if (s.offload_param == "nvme" && dice.chance(60)) s.offload_param_extra = R"(, "max_in_cpu": 0)";
  if (s.stage == 3 && s.offload_optimizer != "none" && dice.chance(20)) s.offload_extra = R"(, "ratio": 0.5)";
  const bool drive = s.offload_param == "nvme" || s.offload_optimizer == "nvme";
  s.sub_group = drive && dice.chance(50) ? 4096 : 1'000'000'000;
  if (drive && dice.chance(30)) s.aio = dice.pick({R"("backend": "threads")", R"("checksums": true)"});
  s.recompute = dice.pick({"none", "none", "selective", "full"});
  s.recompute_blocks = s.recompute != "none" && dice.chance(20) ? 1 : -1;
  s.recompute_micro_batches = s.recompute != "none" && dice.chance(20) ? 1 : -1;
  s.cpu_checkpointing = s.recompute == "full" && dice.chance(30);
  s.nvme_checkpointing = s.recompute == "full" && drive && !s.cpu_checkpointing && dice.chance(30);
  s.split_masters = dice.chance(70);
}

/// Draws the settings of the traffic of parameters and gradients.
void draw_traffic(Dice& dice, RunSpec& s) {
  s.bucket = dice.pick({500L, 2304L, 20'000L, 500'000'000L});
  s.overlap = dice.chance(60);
  s.reduction = dice.chance(10) ? "native" : "";
  s.prefetch = s.stage == 3 ? dice.pick({0L, 5000L, 50'000'000L}) : 0;
  s.persistence = s.stage == 3 ? dice.pick({0L, 100L}) : 0;
  s.max_live = s.stage == 3 && dice.chance(30) ? 20'000 : 1'000'000'000;
  s.max_reuse = s.stage == 3 ? dice.pick({0L, 1'000'000'000L}) : 0;
}

/// Over ranks that are drawn by now.
RunSpec draw_layout(Dice& dice, RunSpec s) {
  draw_schedule(dice, s);
  s.stage = dice.pick({0, 1, 2, 2, 3, 3, 3});
  if (takes_rule(s, "OneBit")) s.stage = std::max(1, s.stage);
  draw_tiers(dice, s);
  draw_traffic(dice, s);
  s.threads = dice.pick({1, 1, 1, 2, 3});
  return s;
}

}  // namespace

Composition draw_composition(std::uint64_t seed) {
  Dice dice(seed);
  RunSpec problem = draw_problem(dice);
  const int micro_batches = dice.pick({1, 2, 4, 4, 6, 8});
  Composition out;
  out.seed = seed;
  draw_ranks(dice, problem, micro_batches);
  out.first = draw_layout(dice, problem);
  // The values that replicas exchange compressed depend on how many there are.
  if (!takes_rule(problem, "OneBit")) draw_ranks(dice, problem, micro_batches);
  out.second = draw_layout(dice, problem);
  out.middle = 1 + static_cast<int>(dice.below(static_cast<std::size_t>(problem.steps - 1)));
  return out;
}

std::string Composition::text() const {
  return cat("SHERD_FUZZ_SEED=", seed, " SHERD_FUZZ_CASES=1, ", middle, " of ", first.steps, " steps on ",
             counted(first.ranks, "rank"), ":\n", first.config(), "\nthen on ", counted(second.ranks, "rank"),
             ":\n", second.config(), '\n');
}

}  // namespace sherd::test
