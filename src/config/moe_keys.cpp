#include "config/tables.h"

// Section `model.moe`.
namespace sherd::config {
namespace {

std::vector<Text> routing_texts() {
  return {
      required("experts", "of each block that has any"),
      {"top_k", "experts of a token"},
      derived("ffn_hidden_size", "the model's", "inner width of an expert"),
      {"every",
       "each so-manieth block has experts, counted behind the first dense ones; others have the MLP"},
      {"first_dense", "blocks at the start that have none"},
      {"shared_experts",
       "an MLP of so many experts' width beside them, which all tokens take; its output is added"},
      {"shared_expert_gate", "that output is multiplied by sigmoid(x·w) before, as in Qwen2-MoE"},
      {"use_residual",
       "an MLP of the model's own width beside the experts; a softmax of a linear layer of x weighs the two "
       "(DeepSpeed's Residual-MoE). Not with `shared_experts`"},
      {"router",
       "scores, from logits in fp32: softmax over all experts; softmax_topk over those chosen; sigmoid of "
       "each by "
       "itself"},
      derived("norm_topk", "true; with `top_k` 1 false", "a token's weights add up to 1"),
      {"routed_scaling_factor", "multiplies the weights"},
      {"groups", "experts lie in so many equal groups, of which a token takes the best few (DeepSeek-V3)"},
      {"top_groups", "groups of which a token takes experts"},
      {"capacity_factor",
       "an expert takes at most ⌈tokens · `top_k` / `experts` · this⌉ choices of a micro-batch; others are "
       "dropped, "
       "and add nothing to their token. Evaluations too. 0: all",
       "has `min_capacity` 4, and another factor for evaluations"},
      {"drop",
       "which go: weight: those of the lowest weights; position: second choices before first ones, later "
       "tokens "
       "before earlier ones"},
  };
}

std::vector<Text> loss_texts() {
  return {
      {"aux_loss", "factor of the balance loss, which keeps experts evenly loaded; 0: none"},
      {"aux_loss_type",
       "switch: of each layer E/(k·T²)·Σ nᵢ·Σₜ P(t, i); gshard: of first choices alone, E/T²·Σ nᵢ·Σₜ P(t, "
       "i), "
       "DeepSpeed's `l_aux` with two experts per token; hf: of all layers together, E·Σ (n̄ᵢ/T)·(P̄ᵢ/T), as "
       "Hugging "
       "Face's Mixtral has it: without 1/k, so that an even load has k. It evens out the layers' sum, and a "
       "single "
       "layer less. Not hf with `parallel.pipeline`"},
      {"z_loss", "factor of the mean of (log Σ exp logits)², which keeps logits small; ST-MoE takes 1e-3"},
      {"bias_update",
       "a bias per expert, in the choice alone, moves by this with each step: up where the expert had less "
       "than the "
       "mean, down where it had more; 0: off (DeepSeek-V3 takes 1e-3, and `aux_loss` 0 or little)"},
      {"jitter",
       "in training, what the router reads is multiplied by numbers of [1 − jitter, 1 + jitter] (Switch "
       "takes 1e-2)",
       "`noisy_gate_policy` Jitter is 0.01 here; RSample is not offered"},
  };
}

Table<Moe> moe_table() {
  using T = Moe;
  Table<T> table;
  std::vector<Key<T>>& keys = table.keys;
  keys.push_back(integer("experts", &T::experts, "4", 1, most_experts));
  keys.push_back(integer("top_k", &T::top_k, "3", 1, most_experts));
  keys.push_back(integer("ffn_hidden_size", &T::ffn_hidden_size, "24", 1, most_ffn_hidden));
  keys.push_back(integer("every", &T::every, "2", 1, most_layers));
  keys.push_back(integer("first_dense", &T::first_dense, "1", 0, most_layers));
  keys.push_back(integer("shared_experts", &T::shared_experts, "1", 0, most_experts));
  keys.push_back(boolean("shared_expert_gate", &T::shared_expert_gate));
  keys.push_back(boolean("use_residual", &T::use_residual));
  keys.push_back(choice("router", &T::router, {"softmax", "softmax_topk", "sigmoid"}, "\"sigmoid\""));
  keys.push_back(boolean("norm_topk", &T::norm_topk));
  keys.push_back(real("routed_scaling_factor", &T::routed_scaling_factor, "2.5", 0, infinity, true));
  keys.push_back(integer("groups", &T::groups, "2", 1, 64));
  keys.push_back(integer("top_groups", &T::top_groups, "2", 1, 64));
  keys.push_back(real("capacity_factor", &T::capacity_factor, "1.25", 0, infinity));
  keys.push_back(choice("drop", &T::drop, {"weight", "position"}, "\"position\""));
  keys.push_back(real("aux_loss", &T::aux_loss, "0.1", 0, infinity));
  keys.push_back(choice("aux_loss_type", &T::aux_loss_type, {"switch", "gshard", "hf"}, "\"gshard\""));
  keys.push_back(real("z_loss", &T::z_loss, "1e-3", 0, infinity));
  keys.push_back(real("bias_update", &T::bias_update, "1e-3", 0, 1));
  keys.push_back(real("jitter", &T::jitter, "1e-2", 0, 0.99));
  describe(keys, routing_texts());
  describe(keys, loss_texts());
  return table;
}

}  // namespace

Key<Model> moe_key() {
  return section("moe", &Model::moe, moe_table());
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
  const auto note = [&](const char* key, bool idle, const char* reason) {
    if (idle && given(key)) section.context.note(join(section.path, key), reason);
  };
  note("drop", moe.capacity_factor == 0, "no effect: without capacity_factor nothing is dropped");
  note("aux_loss_type", moe.aux_loss == 0, "no effect: aux_loss is 0");
  note("shared_expert_gate", moe.shared_experts == 0, "no effect: there are no shared_experts");
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

std::string_view name_of(RouterScores router) {
  constexpr std::string_view names[] = {"softmax", "softmax_topk", "sigmoid"};
  return names[static_cast<std::size_t>(router)];
}
std::string_view name_of(Drop policy) {
  return policy == Drop::by_position ? "position" : "weight";
}
std::string_view name_of(BalanceLoss loss) {
  constexpr std::string_view names[] = {"switch", "gshard", "hf"};
  return names[static_cast<std::size_t>(loss)];
}

}  // namespace sherd::config
