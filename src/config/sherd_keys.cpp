#include "config/tables.h"

namespace sherd::config {
namespace {

std::vector<Text> training_texts() {
  return {
      {"steps",
       "optimizer steps of the whole run, those before `--resume` included; `sherd train` needs it here or "
       "as "
       "`--steps`"},
      {"seed", "of initial weights and dropout"},
      {"eval_interval", "steps between evaluations on the validation split; 0: only at the end"},
      {"eval_steps", "batches of `train_batch_size` samples per evaluation",
       "of Trainer's keys this is another: its `eval_steps` is `eval_interval` here"},
      {"init_from",
       "folder of weights to begin with: Hugging Face's files, or checkpoints (of the latest, or one's own "
       "folder, "
       "the weights alone); empty: none. It brings the `model` section, over which the file's own keys are "
       "laid "
       "([Hugging Face](hugging_face.md)). `--resume` reads `save_dir` instead"},
      {"save_dir", "folder of checkpoints; empty: nothing is saved"},
      {"save_async",
       "write checkpoints while training goes on; false: training waits. The last one it waits for in any "
       "case "
       "([more](config.md#writing-while-training))"},
      {"keep_best",
       "also save after each evaluation that finds a lower validation loss than all before, and keep that "
       "checkpoint beside the `keep_last` newest ones; `DIR/best` names it, as `DIR/latest` names the "
       "newest, and so do `--tag best` and `sherd generate "
       "--checkpoint DIR/best`. Needs `save_dir`, `eval_interval` and validation data. Lightning's "
       "`save_top_k=1`"},
      {"patience",
       "stop after so many evaluations in a row without a validation loss lower than all before, with a "
       "checkpoint as at the end; 0: never. A resumed run counts on; an evaluation that gives NaN counts as "
       "well. Needs `eval_interval` "
       "and validation data"},
      {"save_interval", "steps between checkpoints; 0: only at the end (and when a signal stops the run)"},
      {"keep_last", "`global_stepN` checkpoints to keep, the oldest going first; 0: all"},
      {"max_skipped_steps",
       "end with an error at so many steps in a row that changed nothing, as their gradients overflowed or "
       "none of their tokens was a target; 0: never"},
      {"loss_average",
       "what the loss of a step, and its gradient, are the mean of: all tokens of the global batch that are "
       "targets "
       "(labels but -100), or the means of its micro-batches. They differ where micro-batches have different "
       "numbers "
       "of targets. Programs without a `model` section have the second",
       "DeepSpeed takes the mean of means; transformers' Trainer, from 4.46 on, the mean over tokens"},
      {"recompute",
       "what backward makes again: selective drops attention's output, norms and activations, full all but "
       "the inputs of blocks",
       "`pipeline.activation_checkpoint_interval` above 0 means full, here for every model"},
      derived("recompute_blocks", "all",
              "only the first so many blocks of each pipeline stage recompute, as Megatron-LM's "
              "`recompute_num_layers` with method `block` (all chunks of a stage count as one; without a "
              "pipeline: "
              "blocks of the model). More than there are: all"),
      derived(
          "recompute_micro_batches", "all",
          "only so many of the micro-batches that the fullest pipeline stage has in flight recompute; the "
          "others keep everything. Stages with fewer in flight keep as many, so that later ones recompute "
          "less, "
          "or nothing. With `layered` all micro-batches of a step are in flight, with `accumulate` one "
          "([more](parallel.md#recompute-of-a-part))"),
      {"split_masters",
       "bf16: the optimizer keeps of each fp32 master only the 16 bits that the parameter lacks, to the same "
       "bits; "
       "false keeps whole masters"},
      {"moments_dtype",
       "type of the optimizer's moments; bf16: half the bytes, rounded stochastically, the same way in every "
       "run"},
      {"log_interval", "steps between lines of progress where the output is no terminal; 0: each has one"},
  };
}

Table<Training> training_table() {
  using T = Training;
  Table<T> table;
  table.keys.push_back(integer("steps", &T::steps, "100", 0));
  table.keys.push_back(integer("seed", &T::seed, "7", 0));
  table.keys.push_back(integer("eval_interval", &T::eval_interval, "50", 0));
  table.keys.push_back(integer("eval_steps", &T::eval_steps, "5", 1));
  table.keys.push_back(text("init_from", &T::init_from, "\"models/a\""));
  table.keys.push_back(text("save_dir", &T::save_dir, "\"runs/a\""));
  table.keys.push_back(integer("save_interval", &T::save_interval, "50", 0));
  table.keys.push_back(integer("keep_last", &T::keep_last, "2", 0));
  table.keys.push_back(boolean("save_async", &T::save_async));
  table.keys.push_back(boolean("keep_best", &T::keep_best));
  table.keys.push_back(integer("patience", &T::patience, "3", 0));
  table.keys.push_back(integer("max_skipped_steps", &T::max_skipped_steps, "10", 0));
  table.keys.push_back(
      custom<T>("loss_average", "\"micro_batches\"", [](Training& training, const Value& value) {
        training.loss_average = static_cast<LossAverage>(value.choice({"tokens", "micro_batches"}));
      }).one_of({"tokens", "micro_batches"}));
  table.keys.push_back(
      custom<T>("recompute", "\"full\"", read_recompute).one_of({"none", "selective", "full"}));
  table.keys.push_back(integer("recompute_blocks", &T::recompute_blocks, "2", 0));
  table.keys.push_back(integer("recompute_micro_batches", &T::recompute_micro_batches, "2", 0));
  table.keys.push_back(boolean("split_masters", &T::split_masters));
  table.keys.push_back(
      custom<T>("moments_dtype", "\"bf16\"", [](Training& training, const Value& value) {
        training.moments_dtype = value.choice({"fp32", "bf16"}) == 0 ? DType::f32 : DType::bf16;
      }).one_of({"fp32", "bf16"}));
  table.keys.push_back(integer("log_interval", &T::log_interval, "1", 0));
  describe(table.keys, training_texts());
  table.keys.push_back(adapter_key());
  append(table.keys, trainer_keys());
  return table;
}

void read_training(Config& config, const Value& section) {
  const Given given = read_section(training_table(), config.training, section);
  if (config.training.save_dir.empty())
    for (const char* name : {"save_interval", "keep_last", "save_async", "keep_best"})
      if (given.contains(name))
        section.context.note(join(section.path, name), "no effect without training.save_dir");
  const char* by_loss = config.training.keep_best      ? "keep_best"
                        : config.training.patience > 0 ? "patience"
                                                       : nullptr;
  if (by_loss && config.training.eval_interval == 0)
    section.error(by_loss, " goes by the validation loss: set eval_interval, the steps between evaluations");
}

}  // namespace

std::vector<Key<Config>> sherd_keys() {
  std::vector<Key<Config>> keys;
  keys.push_back(model_key());
  keys.push_back(data_key());
  keys.push_back(custom<Config>("training", "", read_training));
  keys.back().list = [](const std::string& prefix, std::vector<KeyInfo>& out) {
    list_keys(training_table(), prefix, out);
  };
  keys.push_back(parallel_key());
  keys.push_back(device_key());
  return keys;
}

}  // namespace sherd::config
