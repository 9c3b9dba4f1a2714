#include <algorithm>

#include "config/sections/tables.h"

// Section `training`.
namespace sherd::config {
namespace {

constexpr const char* recompute = "training.recompute";

// In the order of the enum.
const std::vector<std::string> objectives{"auto",  "next_token", "mlm", "classification",
                                          "spans", "seq2seq",    "dpo", "orpo",
                                          "simpo", "cpo",        "kto", "reward"};

void check_training(Training& training, const Given& given, const Value& section) {
  for (const char* key : {"base_format", "base_double_quant"})
    if (const Node* adapter = section.node.find("adapter");
        given.contains(key) && adapter && (adapter->find(key) || adapter->find("base_dtype")))
      section.error(key, " is in training.adapter, too: keep that one");
  if (training.adapter.type == AdapterType::none) training.adapter = {};
  const LoraKeys& lora = training.adapter.lora;
  const char* of_weights = lora.dora                    ? "use_dora begins with the magnitudes of weights"
                           : takes_from_base(lora.init) ? "init_lora_weights begins with parts of weights"
                           : !lora.token_indices.empty()
                               ? "trainable_token_indices begins with rows of weights"
                               : nullptr;
  if (of_weights && training.init_from.empty() && training.adapter.init_from.empty())
    section.error("adapter.", of_weights, ": give init_from, the weights to begin with");
  if (!training.adapter.save_base && training.init_from.empty())
    section.error("adapter.save_base is false, and checkpoints would name the files of init_from: give it");
  drop_idle_double(training.adapter, section, "training.base_double_quant");
  if (training.sparsity.prunes() && training.adapter.type != AdapterType::none)
    section.error(
        "sparsity prunes weights that train, and beside an adapter they do not: leave out one of the two. An "
        "adapter can begin from the checkpoint of a run that pruned them (init_from)");
  const char* by_loss = training.keep_best ? "keep_best" : training.patience > 0 ? "patience" : nullptr;
  if (by_loss && training.eval_interval == 0)
    section.error(by_loss, " goes by the validation loss: set eval_interval, the steps between evaluations");
}

/// DeepSpeed's pipeline.activation_checkpoint_interval may give it too.
Key<Training> recompute_key() {
  Key<Training> key = choice("recompute", &Training::recompute, {"none", "selective", "full"}, "\"full\"");
  key.read = [read = key.read](Training& training, const Value& value) {
    Training asked;
    read(asked, value);
    Context& context = value.context;
    context.given_as.erase(recompute);
    if (context.given.contains(recompute) && asked.recompute != training.recompute)
      value.error("\"full\" is what pipeline.activation_checkpoint_interval means, and this is ",
                  value.node.brief(), "; keep one of them");
    context.given.insert(recompute);
    training.recompute = asked.recompute;
  };
  return std::move(key).means(
      "what backward makes again: selective drops attention's output, norms and activations, full all but "
      "the inputs of blocks",
      "`pipeline.activation_checkpoint_interval` above 0 means full, here for every model");
}

bool saves_nothing(const Config& config) {
  return config.training.save_dir.empty();
}
constexpr const char* not_saved = "no effect without training.save_dir";

bool masks_nothing(const Config& config) {
  return config.objective() != Objective::mlm;
}
constexpr const char* not_masked = "no effect: the objective is not mlm";
bool cuts_nothing(const Config& config) {
  return config.objective() != Objective::spans;
}
constexpr const char* not_cut = "no effect: the objective is not spans";

bool recomputes_nothing(const Config& config) {
  return config.training.recompute == Recompute::none;
}
constexpr const char* not_recomputed = "no effect without training.recompute selective or full";

std::string why_all_recompute(const Config& config) {
  if (recomputes_nothing(config)) return not_recomputed;
  const bool one_at_a_time = config.parallel.pipeline == 1 && config.parallel.virtual_stages == 1 &&
                             config.parallel.schedule != Schedule::layered;
  return one_at_a_time && config.training.recompute_micro_batches > 0
             ? "no effect above 0: without a pipeline or schedule \"layered\" one micro-batch is in flight"
             : "";
}

std::string why_whole_masters(const Config& config) {
  if (config.precision.compute == DType::bf16) return "";
  return cat("no effect: the model computes in ", sherd::name_of(config.precision.compute), ", not in bf16");
}

bool keeps_no_moments(const Config& config) {
  const auto keeps = [](const OptimizerRule& rule) { return rule.keeps_states(); };
  return !keeps(config.optimizer) &&
         std::none_of(config.optimizer.groups.begin(), config.optimizer.groups.end(), keeps);
}

/// How long a run is, what it begins from, and what it saves.
std::vector<Key<Training>> course_keys() {
  using T = Training;
  return {
      integer("steps", &T::steps, "100", 0)
          .means("optimizer steps of the whole run, those before `--resume` included; `sherd train` needs it "
                 "here or as `--steps`"),
      integer("seed", &T::seed, "7", 0).means("of initial weights and dropout", Concerns::training),
      integer("eval_interval", &T::eval_interval, "50", 0)
          .means("steps between evaluations on the validation split; 0: only at the end",
                 idle([](const Config& c) { return c.data && c.data->split[1] == 0; },
                      "no effect: data.split leaves nothing for validation")),
      integer("eval_steps", &T::eval_steps, "5", 1)
          .means("batches of `train_batch_size` samples per evaluation",
                 "of Trainer's keys this is another: its `eval_steps` is `eval_interval` here"),
      text("init_from", &T::init_from, "\"models/a\"")
          .means("folder of weights to begin with: Hugging Face's files, or checkpoints (of the latest, or "
                 "one's own folder, the weights alone); empty: none. It brings the `model` section, over "
                 "which the file's own keys are laid ([Hugging Face](hugging_face.md)). `--resume` reads "
                 "`save_dir` instead"),
      text("save_dir", &T::save_dir, "\"runs/a\"")
          .means("folder of checkpoints; empty: nothing is saved", Concerns::machine),
      integer("save_interval", &T::save_interval, "50", 0)
          .means("steps between checkpoints; 0: only at the end (and when a signal stops the run)",
                 idle(saves_nothing, not_saved)),
      integer("local_save_interval", &T::local_save_interval, "10", 0)
          .means("steps between local checkpoints: each machine keeps its ranks' states in a folder of its "
                 "own, and a copy of another machine's, so that a run that lost a process or a machine goes "
                 "on from there ([more](clusters.md#local-checkpoints)); 0: none",
                 idle(saves_nothing, not_saved)),
      text("local_save_dir", &T::local_save_dir, "\"/mnt/nvme\"")
          .means("folder of local checkpoints on each machine: in memory, as it is by default, or on a drive "
                 "of its own",
                 Concerns::machine,
                 idle([](const Config& c) { return c.training.local_save_interval == 0; },
                      "no effect without training.local_save_interval")),
      integer("keep_last", &T::keep_last, "2", 0)
          .means("`global_stepN` checkpoints to keep, the oldest going first; 0: all",
                 idle(saves_nothing, not_saved)),
      boolean("save_async", &T::save_async)
          .means("write checkpoints while training goes on; false: training waits. The last one it waits for "
                 "in any case ([more](config.md#writing-while-training))",
                 idle(saves_nothing, not_saved)),
      boolean("keep_best", &T::keep_best)
          .means(
              "also save after each evaluation that finds a lower validation loss than all before, and keep "
              "that checkpoint beside the `keep_last` newest ones; `DIR/best` names it, as `DIR/latest` "
              "names the newest, and so do `--tag best` and `sherd generate --checkpoint DIR/best`. Needs "
              "`save_dir`, `eval_interval` and validation data. Lightning's `save_top_k=1`",
              idle(saves_nothing, not_saved)),
      integer("patience", &T::patience, "3", 0)
          .means("stop after so many evaluations in a row without a validation loss lower than all before, "
                 "with a checkpoint as at the end; 0: never. A resumed run counts on; an evaluation that "
                 "gives NaN counts as well. Needs `eval_interval` and validation data"),
      integer("max_skipped_steps", &T::max_skipped_steps, "10", 0)
          .means("end with an error at so many steps in a row that changed nothing, as their gradients "
                 "overflowed or none of their tokens was a target; 0: never")};
}

/// How a step computes.
std::vector<Key<Training>> step_keys() {
  using T = Training;
  return {
      choice("objective", &T::objective, objectives, "\"next_token\"")
          .means("what is learned of a text: `next_token`, each token from those before it, by models with "
                 "`causal`; `mlm`, tokens that are masked from all others, by models without "
                 "([more](data.md#masked-tokens)); `classification`, its label or those of its tokens, "
                 "by models with such a head ([more](data.md#classification)); `spans`, what was cut out of "
                 "a text, and `seq2seq`, the "
                 "answer to a prompt, by models with an `encoder` ([more](data.md#spans)); `dpo`, `orpo`, "
                 "`simpo`, `cpo` and `kto`, which answers people prefer, and `reward`, a score for that "
                 "([preferences](preferences.md)). auto: which of the first five the model can"),
      real("mlm_probability", &T::mlm_probability, "0.3", 0.001, 0.999)
          .means("mlm: the share of tokens that are targets; of these 80 % are masked, 10 % another token, "
                 "10 % stay",
                 idle(masks_nothing, not_masked)),
      boolean("whole_word_mask", &T::whole_word_mask)
          .means("mlm: the tokens of a word are targets together, or none of them is",
                 idle(masks_nothing, not_masked)),
      real("span_density", &T::span_density, "0.2", 0.001, 0.999)
          .means("spans: the share of tokens that are cut out", idle(cuts_nothing, not_cut)),
      real("span_length", &T::span_length, "4", 1, 1000)
          .means("spans: tokens that are cut out together, on average", idle(cuts_nothing, not_cut)),
      choice("loss_average", &T::loss_average, {"tokens", "micro_batches"}, "\"micro_batches\"")
          .means(
              "what the loss of a step, and its gradient, are the mean of: all tokens of the global batch "
              "that are targets (labels but -100), or the means of its micro-batches. They differ where "
              "micro-batches have different numbers of targets. Programs without a `model` section have the "
              "second",
              "DeepSpeed takes the mean of means; transformers' Trainer, from 4.46 on, the mean over tokens",
              Concerns::training),
      recompute_key(),
      integer("recompute_blocks", &T::recompute_blocks, "2", 0)
          .unset(-1)
          .means("only the first so many blocks of each pipeline stage recompute, as Megatron-LM's "
                 "`recompute_num_layers` with method `block` (all chunks of a stage count as one; without a "
                 "pipeline: blocks of the model). More than there are: all",
                 idle(recomputes_nothing, not_recomputed), or_null, by("all")),
      integer("recompute_micro_batches", &T::recompute_micro_batches, "2", 0)
          .unset(-1)
          .means("only so many of the micro-batches that the fullest pipeline stage has in flight recompute; "
                 "the others keep everything. Stages with fewer in flight keep as many, so that later ones "
                 "recompute less, or nothing. With `layered` all micro-batches of a step are in flight, with "
                 "`accumulate` one ([more](parallel.md#recompute-of-a-part))",
                 idle(why_all_recompute), or_null, by("all")),
      boolean("split_masters", &T::split_masters)
          .means("bf16: the optimizer keeps of each fp32 master only the 16 bits that the parameter lacks, "
                 "to the same bits; false keeps whole masters",
                 idle(why_whole_masters)),
      word<T>(
          "moments_dtype", {"fp32", "bf16"}, "\"bf16\"",
          [](const T& t) { return t.moments_dtype == DType::bf16 ? 1 : 0; },
          [](T& t, int index) { t.moments_dtype = index == 0 ? DType::f32 : DType::bf16; })
          .means("type of the optimizer's moments; bf16: half the bytes, rounded stochastically, the same "
                 "way in every run",
                 idle(keeps_no_moments, "no effect: SGD without momentum keeps no moments"),
                 Concerns::training),
      integer("log_interval", &T::log_interval, "1", 0)
          .means("steps between lines of progress where the output is no terminal; 0: each has one")};
}

Key<Sparsity> weight_patterns(const char* name, const char* example,
                              std::vector<std::string> Sparsity::*field) {
  return custom<Sparsity>(
             name, example,
             [field](Sparsity& sparsity, const Value& value) {
               sparsity.*field = read_patterns(value, "\"blocks.*.mlp.*\"");
             },
             [field](const Sparsity& sparsity) { return list_of(sparsity.*field); })
      .takes({"string, or list of strings", R"({"type": ["string", "array"], "items": {"type": "string"}})"});
}

Key<Training> sparsity_key() {
  const auto unused = [] {
    return idle([](const Config& c) { return !c.training.sparsity.prunes(); },
                "no effect: training.sparsity.pattern is none");
  };
  return section(
             "sparsity", &Training::sparsity,
             Table<Sparsity>{
                 Auto::to_default,
                 {choice("pattern", &Sparsity::pattern, {"none", "2:4"}, "\"2:4\"")
                      .means("which weights of linear layers are zero from the first step on, and stay so: "
                             "`2:4`, of each four neighbours along an output's inputs the two of least "
                             "magnitude ([more](sparsity.md))",
                             "DeepSpeed's `compression_training` has masks of other shapes",
                             Concerns::training),
                  weight_patterns("targets", "[\"blocks.*.mlp.*\"]", &Sparsity::targets)
                      .means("patterns of full names of the weights, among those of linear layers of blocks "
                             "and experts (`*` matches dots too)",
                             Concerns::training, unused()),
                  weight_patterns("exclude", "[\"blocks.0.*\"]", &Sparsity::exclude)
                      .means("patterns of those among them that stay dense", Concerns::training, unused())}})
      .with(unless_default);
}

Table<Training> training_table() {
  Table<Training> table{Auto::is_a_value, course_keys(), check_training};
  append(table.keys, step_keys());
  table.keys.push_back(adapter_key());
  table.keys.push_back(preference_key());
  table.keys.push_back(sparsity_key());
  for (const Key<Adapter>& key : base_keys()) {
    Key<Training> same = inside(&Training::adapter, key);
    same.write = {}, same.matters = {}, same.aliases.clear();
    table.keys.push_back(std::move(same).means(
        cat("as `training.adapter.", key.name, "`"), by("`training.adapter`'s"),
        idle([](const Config& c) { return c.training.adapter.type == AdapterType::none; },
             "no effect: without training.adapter the model's own weights are trained")));
  }
  append(table.keys, trainer_keys());
  return table;
}

}  // namespace

std::string_view name_of(Objective objective) {
  return objectives.at(static_cast<std::size_t>(objective));
}

void check_objective(const Config& config, const Value& file) {
  if (!config.model) return;
  const Objective objective = config.training.objective;
  const Node* training = file.node.find("training");
  const Node* given = training ? training->find("objective") : nullptr;
  const Node* model = file.node.find("model");
  const Value at{given ? *given : *model, "training.objective", file.context};
  const bool writes_spans =
      config.objective() == Objective::spans || config.objective() == Objective::seq2seq;
  if (writes_spans != config.model->has_encoder())
    at.error(config.model->has_encoder()
                 ? "a model with an encoder learns \"spans\" or \"seq2seq\": take one of them"
                 : "\"spans\" and \"seq2seq\" are learned by models with an encoder: add the section "
                   "model.encoder, or take another objective");
  if (objective == Objective::mlm && config.model->causal)
    at.error(
        "\"mlm\" is learned from tokens on both sides, and model.causal is true: set it to false, or take "
        "\"next_token\"");
  if (objective == Objective::next_token && !config.model->causal)
    at.error("\"next_token\" would be seen, as model.causal is false: set it to true, or take \"mlm\"");
  if (config.learns_preferences() && !config.model->causal)
    at.error("\"", name_of(objective),
             "\" is learned by models that write, and model.causal is false: set it to true, or take another "
             "objective");
  if ((objective == Objective::reward) != config.model->gives_rewards())
    at.error("objective \"reward\" and model.head \"reward\" go together: set both, or neither");
  const std::vector<std::string>& saved = config.training.adapter.modules_to_save;
  const bool saves_head = std::any_of(saved.begin(), saved.end(),
                                      [](const std::string& name) { return name.ends_with("score"); });
  if (config.model->gives_rewards() && config.training.adapter.type != AdapterType::none && !saves_head)
    Value{*training->find("adapter"), "training.adapter", file.context}.error(
        "would leave the head that gives rewards as it is: add \"modules_to_save\": [\"score\"]");
  if (objective != Objective::automatic &&
      (objective == Objective::classification) != config.model->classifies())
    at.error(
        "\"classification\" and model.head \"sequence_classification\" or \"token_classification\" go "
        "together: "
        "set both, or neither");
  if (config.model->classifies() && config.training.adapter.type != AdapterType::none)
    Value{*training->find("adapter"), "training.adapter", file.context}.error(
        "would leave the layers that score labels as they are: train a classifier whole, without "
        "training.adapter");
  if (config.model->pairs_texts() && config.training.adapter.type != AdapterType::none)
    Value{*training->find("adapter"), "training.adapter", file.context}.error(
        "would leave the layers that score pairs of texts as they are: train model.head \"pretraining\" "
        "whole, or "
        "set it to \"mlm\"");
  if (!config.model->causal && config.training.adapter.has_prompt())
    Value{*training->find("adapter"), "training.adapter.type", file.context}.error(
        "virtual tokens are for models that write behind their text, and model.causal is false: take another "
        "type");
}

Key<Config> training_key() {
  return section("training", &Config::training, training_table()).with(Concerns::run);
}

}  // namespace sherd::config
