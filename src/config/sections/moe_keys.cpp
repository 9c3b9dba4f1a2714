#include "config/sections/tables.h"

// Section `model.moe`.
namespace sherd::config {
namespace {

/// Which experts a token takes.
std::vector<Key<Moe>> routing_keys() {
  using T = Moe;
  return {
      integer("experts", &T::experts, "4", 1, most_experts)
          .means("of each block that has any", shapes, required),
      integer("top_k", &T::top_k, "3", 1, most_experts).means("experts of a token"),
      integer("ffn_hidden_size", &T::ffn_hidden_size, "24", 1, most_ffn_hidden)
          .means("inner width of an expert", shapes, by("the model's")),
      integer("every", &T::every, "2", 1, most_layers)
          .means("one block in so many has experts, counted behind the first dense ones; others have the MLP",
                 shapes),
      integer("first_dense", &T::first_dense, "1", 0, most_layers)
          .means("blocks at the start that have none", shapes),
      integer("shared_experts", &T::shared_experts, "1", 0, most_experts)
          .means("an MLP of so many experts' width beside them, which all tokens take; its output is added",
                 shapes),
      choice("router", &T::router, {"softmax", "softmax_topk", "sigmoid"}, "\"sigmoid\"")
          .means("scores, from logits in fp32: softmax over all experts; softmax_topk over those chosen; "
                 "sigmoid of each by itself"),
      boolean("norm_topk", &T::norm_topk)
          .means("a token's weights add up to 1", by("true; with `top_k` 1 false")),
      real("routed_scaling_factor", &T::routed_scaling_factor, "2.5", 0, infinity, true)
          .means("multiplies the weights"),
      integer("groups", &T::groups, "2", 1, 64)
          .means("experts lie in so many equal groups, of which a token takes the best few (DeepSeek-V3)"),
      integer("top_groups", &T::top_groups, "2", 1, 64).means("groups of which a token takes experts"),
      real("capacity_factor", &T::capacity_factor, "1.25", 0)
          .means("an expert takes at most ⌈tokens · `top_k` / `experts` · this⌉ choices of a micro-batch; "
                 "others are dropped, and add nothing to their token. Evaluations too. 0: all",
                 "has `min_capacity` 4, and another factor for evaluations"),
      choice("drop", &T::drop, {"weight", "position"}, "\"position\"")
          .means("which go: weight: those of the lowest weights; position: second choices before first ones, "
                 "later tokens before earlier ones",
                 idle([](const Config& c) { return c.model->moe.capacity_factor == 0; },
                      "no effect: without capacity_factor nothing is dropped"))};
}

/// Losses that keep experts evenly loaded, and the parts beside them.
std::vector<Key<Moe>> balance_keys() {
  using T = Moe;
  return {
      real("aux_loss", &T::aux_loss, "0.1", 0)
          .means("factor of the balance loss, which keeps experts evenly loaded; 0: none"),
      choice("aux_loss_type", &T::aux_loss_type, {"switch", "gshard", "hf"}, "\"gshard\"")
          .means(
              "switch: of each layer E/(k·T²)·Σ nᵢ·Σₜ P(t, i); gshard: of first choices alone, E/T²·Σ nᵢ·Σₜ "
              "P(t, i), DeepSpeed's `l_aux` with two experts per token; hf: of all layers together, E·Σ "
              "(n̄ᵢ/T)·(P̄ᵢ/T), as Hugging Face's Mixtral has it: without 1/k, so that an even load has k. It "
              "evens out the layers' sum, and a single layer less. Not hf with `parallel.pipeline`",
              idle([](const Config& c) { return c.model->moe.aux_loss == 0; }, "no effect: aux_loss is 0")),
      real("z_loss", &T::z_loss, "1e-3", 0)
          .means("factor of the mean of (log Σ exp logits)², which keeps logits small; ST-MoE takes 1e-3"),
      boolean("router_bias", &T::router_bias)
          .means("the router's logits have a bias that is trained (GPT-OSS)", shapes),
      boolean("correction_bias", &T::correction_bias)
          .means(
              "a bias per expert, in the choice alone, which no gradient moves (`e_score_correction_bias`); "
              "`bias_update` implies it"),
      real("bias_update", &T::bias_update, "1e-3", 0, 1)
          .means("that bias moves by this with each step: up where the expert had less than the mean, down "
                 "where it had more; 0: it stays (DeepSeek-V3 takes 1e-3, and `aux_loss` 0 or little)",
                 idle(
                     [](const Config& c) {
                       return c.model->moe.bias_update > 0 && c.training.adapter.type != AdapterType::none;
                     },
                     "no effect: with an adapter routers stay as they are")),
      real("jitter", &T::jitter, "1e-2", 0, 0.99)
          .means("in training, what the router reads is multiplied by numbers of [1 − jitter, 1 + jitter] "
                 "(Switch takes 1e-2)",
                 "`noisy_gate_policy` Jitter is 0.01 here; RSample is not offered"),
      boolean("shared_expert_gate", &T::shared_expert_gate)
          .means("the output of `shared_experts` is multiplied by sigmoid(x·w), as in Qwen2-MoE",
                 idle([](const Config& c) { return c.model->moe.shared_experts == 0; },
                      "no effect: there are no shared_experts"),
                 shapes),
      boolean("use_residual", &T::use_residual)
          .means("an MLP of the model's own width beside the experts; a softmax of a linear layer of x "
                 "weighs the two (DeepSpeed's Residual-MoE). Not with `shared_experts`",
                 shapes)};
}

}  // namespace

Table<Moe> moe_table() {
  Table<Moe> table{Auto::is_a_value, routing_keys()};
  append(table.keys, balance_keys());
  return table;
}

void finish_moe(Moe& moe, const Value& section) {
  const auto given = [&](const char* name) {
    const Node* node = section.node.find(name);
    return node && !node->is(Node::Kind::null);
  };
  if (!given("experts")) section.error("needs \"experts\"");
  if (!given("norm_topk")) moe.norm_topk = moe.top_k > 1;
  if (moe.experts % moe.groups != 0)
    section.error("groups ", moe.groups, " does not divide ", moe.experts, " experts");
  if (moe.top_groups > moe.groups)
    section.error("top_groups ", moe.top_groups, " is more than there are groups, ", moe.groups);
  if (const std::int64_t open = moe.experts / moe.groups * moe.top_groups; moe.top_k > open)
    section.error("top_k ", moe.top_k, " is more than the ", open, " experts that a token can take",
                  moe.groups == 1 ? "" : cat(" in ", moe.top_groups, " of ", moe.groups, " groups"));
  if (moe.top_k == 1 && (moe.norm_topk || moe.router == RouterScores::softmax_of_chosen))
    section.error("top_k 1 with ", moe.norm_topk ? "norm_topk" : "router \"softmax_topk\"",
                  ": the weight of a token's only expert would always be the same, and the router learn "
                  "nothing; set router to \"softmax\" or \"sigmoid\", and norm_topk to false");
}

void check_moe(const Config& config, const Value& file) {
  if (!config.model || config.model->moe.experts == 0) return;
  if (config.model->moe.aux_loss_type != BalanceLoss::pooled || config.parallel.pipeline <= 1) return;
  const Node* model = file.node.find("model");
  const Node* moe = model ? model->find("moe") : nullptr;
  Value{moe ? *moe : file.node, "model.moe.aux_loss_type", file.context}.error(
      "\"hf\" is a loss of all layers together, and with parallel.pipeline ", config.parallel.pipeline,
      " a stage knows its own alone; take \"switch\" or \"gshard\", or set parallel.pipeline to 1");
}

}  // namespace sherd::config
