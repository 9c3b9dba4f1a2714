#include "config/tables.h"

namespace sherd::config {
namespace {

std::vector<Key<Config>> batch_keys() {
  std::vector<Key<Config>> keys;
  keys.push_back(inside(&Config::batch, integer("train_batch_size", &Batch::train_batch_size, "64", 1)));
  keys.push_back(
      inside(&Config::batch, integer("train_micro_batch_size_per_gpu", &Batch::micro_batch_size, "4", 1)));
  keys.push_back(inside(&Config::batch,
                        integer("gradient_accumulation_steps", &Batch::gradient_accumulation_steps, "8", 1)));
  keys.push_back(inside(&Config::batch, boolean("dataloader_drop_last", &Batch::drop_last)));
  for (Key<Config>& key : keys) key.auto_rule = Auto::to_default;
  describe(
      keys,
      {derived("train_batch_size", "the product of the next two and of the data-parallel ranks",
               "samples per optimizer step, of all data-parallel ranks"),
       derived("train_micro_batch_size_per_gpu", "what `train_batch_size` leaves; one of the two is needed",
               "samples per forward of a rank"),
       derived("gradient_accumulation_steps", "what `train_batch_size` leaves, or 1",
               "micro-batches per optimizer step"),
       {"dataloader_drop_last",
        "leave out what an epoch of training data given to `initialize()` has behind its last whole "
        "batch; packed tokens (`data`) are endless and have no such"}});
  return keys;
}

constexpr const char* one_tag = "all ranks write into the one folder that the tag names, so they must agree";

Key<Config> log_level_key() {
  static const std::vector<std::string> levels = {"debug", "info", "warning", "error"};
  return custom<Config>("log_level", "\"debug\"",
                        [](Config& config, const Value& value) {
                          config.log_level = static_cast<LogLevel>(value.choice(levels));
                        })
      .one_of(levels);
}

struct Nothing {};

Table<Nothing> checkpoint_table() {
  using T = Nothing;
  Table<T> table;
  static const std::vector<std::string> checks = {"Ignore", "Warn", "Fail"};
  Key<T> validation = custom<T>("tag_validation", "\"Fail\"", [](T&, const Value& value) {
                        value.choice(checks);
                        value.note(one_tag);
                      }).one_of(checks);
  validation.effect = Effect::noted, validation.reason = one_tag;
  table.keys.push_back(std::move(validation));
  table.keys.push_back(noted<T>("load_universal", Holds::boolean,
                                "every checkpoint of Sherd's loads into every layout of ranks"));
  table.keys.push_back(noted<T>("use_node_local_storage", Holds::boolean,
                                "all ranks write into training.save_dir, which machines have to share"));
  table.keys.push_back(noted<T>("parallel_write", Holds::anything, "ranks always write in parallel"));
  table.keys.push_back(noted<T>("checkpoint_serialization", Holds::boolean, "checkpoints are safetensors"));
  table.keys.push_back(refused<T>("writer", "{\"type\": \"FAST\"}", "checkpoints have one writer", is_empty));
  describe(table.keys, {{"tag_validation", "what to do where ranks save under different tags"},
                        {"load_universal", "load DeepSpeed's universal checkpoints"},
                        {"use_node_local_storage", "each machine saves on a drive of its own"},
                        {"parallel_write", "which ranks write together"},
                        {"checkpoint_serialization", "how PyTorch writes its files"},
                        {"writer", "DeepSpeed's own writers of files, such as FAST"}});
  return table;
}

Table<Monitor> monitor_table() {
  Table<Monitor> table{
      Auto::to_default,
      {boolean("enabled", &Monitor::enabled), text("output_path", &Monitor::output_path, "\"logs\""),
       text("job_name", &Monitor::job_name, "\"run\"")}};
  describe(table.keys, {{"enabled", "write every step's scalars, from rank 0",
                         "writes `train_loss`, `lr`, `loss_scale` and times; `lr` is the next step's, and a "
                         "resumed run repeats steps"},
                        {"output_path", "folder of the files; empty: the one in which the run was started"},
                        {"job_name", "folder in `output_path` that gets the files"}});
  return table;
}

std::vector<Text> run_texts() {
  return {
      {"gradient_clipping",
       "largest global L2 norm of the gradients, by which they are scaled down; 0 or less: off",
       "0.16: off by default"},
      {"steps_per_print", "optimizer steps between the engine's log lines; 0: none"},
      {"wall_clock_breakdown", "times of forward, backward and step in those lines"},
      {"memory_breakdown", "memory by tier and category in those lines"},
      {"dump_state", "log the whole configuration when the engine starts"},
      derived("log_level", "as the program set it: info", "the least that is logged"),
  };
}

std::vector<Key<Config>> run_keys() {
  std::vector<Key<Config>> keys;
  keys.push_back(real("gradient_clipping", &Config::gradient_clipping, "0.5").with_auto(Auto::to_default));
  Key<Config> checkpoint = custom<Config>("checkpoint", "", [](Config&, const Value& value) {
    Nothing nothing;
    read_section(checkpoint_table(), nothing, value);
  });
  checkpoint.list = [](const std::string& prefix, std::vector<KeyInfo>& out) {
    list_keys(checkpoint_table(), prefix, out);
  };
  keys.push_back(std::move(checkpoint));
  const std::size_t reports = keys.size();
  keys.push_back(integer("steps_per_print", &Config::steps_per_print, "10", 0));
  keys.push_back(boolean("wall_clock_breakdown", &Config::wall_clock_breakdown));
  keys.push_back(boolean("memory_breakdown", &Config::memory_breakdown));
  keys.push_back(boolean("dump_state", &Config::dump_state));
  for (std::size_t i = reports; i < keys.size(); ++i) keys[i].auto_rule = Auto::to_default;
  keys.push_back(section("tensorboard", &Config::tensorboard, monitor_table()));
  keys.push_back(section("csv_monitor", &Config::csv_monitor, monitor_table()));
  keys.push_back(log_level_key());
  describe(keys, run_texts());
  return keys;
}

Table<Config> make_top_table() {
  Table<Config> table{Auto::is_a_value, batch_keys()};
  table.keys.push_back(optimizer_key());
  table.keys.push_back(scheduler_key());
  append(table.keys, precision_keys());
  table.keys.push_back(zero_key());
  append(table.keys, tier_keys());
  append(table.keys, run_keys());
  append(table.keys, sherd_keys());
  append(table.keys, foreign_keys());
  return table;
}

}  // namespace

const Table<Config>& top_table() {
  static const Table<Config> table = make_top_table();
  return table;
}

std::vector<KeyInfo> known_keys() {
  std::vector<KeyInfo> keys;
  list_keys(top_table(), "", keys);
  return keys;
}

}  // namespace sherd::config
