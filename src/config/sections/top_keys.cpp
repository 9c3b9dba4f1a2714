#include "config/sections/tables.h"

namespace sherd::config {
namespace {

std::vector<Key<Config>> batch_keys() {
  using B = Batch;
  std::vector<Key<B>> keys = {
      integer("train_batch_size", &B::train_batch_size, "64", 1)
          .unset(0)
          .means("samples per optimizer step, of all data-parallel ranks",
                 by("the product of the next two and of the data-parallel ranks")),
      integer("train_micro_batch_size_per_gpu", &B::micro_batch_size, "4", 1)
          .unset(0)
          .means("samples per forward of a rank",
                 by("what `train_batch_size` leaves; one of the two is needed")),
      integer("gradient_accumulation_steps", &B::gradient_accumulation_steps, "8", 1)
          .unset(0)
          .means("micro-batches per optimizer step", by("what `train_batch_size` leaves, or 1")),
      boolean("dataloader_drop_last", &B::drop_last)
          .means("leave out what an epoch of training data given to `initialize()` has behind its last whole "
                 "batch; packed tokens (`data`) are endless and have no such")};
  std::vector<Key<Config>> out;
  for (const Key<B>& key : keys) out.push_back(inside(&Config::batch, key).with(Auto::to_default));
  return out;
}

Table<Monitor> monitor_table() {
  return {
      Auto::to_default,
      {boolean("enabled", &Monitor::enabled)
           .means("write every step's scalars, from rank 0",
                  "writes `train_loss`, `lr`, `loss_scale` and times; `lr` is the next step's, and a resumed "
                  "run repeats steps"),
       text("output_path", &Monitor::output_path, "\"logs\"")
           .means("folder of the files; empty: the one in which the run was started", Concerns::machine),
       text("job_name", &Monitor::job_name, "\"run\"").means("folder in `output_path` that gets the files")}};
}

Key<Config> monitor_key(const char* name, Monitor Config::*field) {
  return section(name, field, monitor_table())
      .with(unless_default, idle([field](const Config& config) {
              return !(config.*field).enabled ? "not enabled, no effect"
                     : config.model
                         ? ""
                         : "`sherd train` writes it; a program of its own does with engine::Monitors";
            }));
}

std::vector<Key<Config>> run_keys() {
  using C = Config;
  const auto in_log_lines = [](bool C::*field) {
    return idle([field](const C& c) {
      return c.*field && c.steps_per_print == 0 ? "no effect without steps_per_print" : "";
    });
  };
  return {
      real("gradient_clipping", &C::gradient_clipping, "0.5")
          .means("largest global L2 norm of the gradients, by which they are scaled down; 0 or less: off",
                 "0.16: off by default", idle([](const C& c) { return c.gradient_clipping <= 0; }, "off"),
                 Auto::to_default),
      section<C>("checkpoint", {Auto::is_a_value, foreign_keys<C>("checkpoint")}),
      integer("steps_per_print", &C::steps_per_print, "10", 0)
          .means("optimizer steps between the engine's log lines; 0: none", Auto::to_default, Concerns::run),
      boolean("wall_clock_breakdown", &C::wall_clock_breakdown)
          .means("times of forward, backward and step in those lines", in_log_lines(&C::wall_clock_breakdown),
                 Auto::to_default, Concerns::run),
      boolean("memory_breakdown", &C::memory_breakdown)
          .means("memory by tier and category in those lines", in_log_lines(&C::memory_breakdown),
                 Auto::to_default, Concerns::run),
      boolean("dump_state", &C::dump_state)
          .means("log the whole configuration when the engine starts", Auto::to_default, Concerns::run),
      monitor_key("tensorboard", &C::tensorboard),
      monitor_key("csv_monitor", &C::csv_monitor),
      choice("log_level", &C::log_level, {"debug", "info", "warning", "error"}, "\"debug\"")
          .means("the least that is logged", Concerns::machine, by("as the program set it: info"))};
}

Table<Config> make_top_table() {
  Table<Config> table{Auto::is_a_value, batch_keys()};
  table.keys.push_back(optimizer_key());
  table.keys.push_back(scheduler_key());
  append(table.keys, precision_keys());
  table.keys.push_back(zero_key());
  append(table.keys, tier_keys());
  append(table.keys, run_keys());
  table.keys.push_back(model_key());
  table.keys.push_back(data_key());
  table.keys.push_back(training_key());
  table.keys.push_back(parallel_key());
  table.keys.push_back(device_key());
  append(table.keys, foreign_keys<Config>(""));
  append(table.keys, deepspeed_parallel_keys());
  return table;
}

void add_leaves(const KeyInfo& section, const std::string& prefix, std::optional<Concerns> concerns,
                std::vector<KeyInfo>& out) {
  for (const KeyInfo& key : section.below) {
    const std::string path =
        key.type.empty() ? join(prefix, key.name) : cat(prefix, "[", key.type, "].", key.name);
    const auto who = key.concerns ? key.concerns : concerns;
    if (key.is_section()) {
      add_leaves(key, path, who, out);
    } else {
      out.push_back(key);
      out.back().path = path, out.back().concerns = who;
    }
  }
}

/// Adds the keys of what a table wrote.
void add_settings(const Node& node, const std::string& path, Concerns concerns, std::vector<Setting>& out) {
  if (node.key && node.key->concerns) concerns = *node.key->concerns;
  if (node.is(Node::Kind::object)) {
    for (const auto& [name, value] : node.members) add_settings(value, join(path, name), concerns, out);
  } else if (!node.items.empty() && node.items[0].is(Node::Kind::object)) {
    for (std::size_t i = 0; i < node.items.size(); ++i)
      add_settings(node.items[i], cat(path, "[", i, "]"), concerns, out);
  } else {
    out.push_back({path, node.json(), concerns, node.key && node.key->decides_parameters});
  }
}

}  // namespace

const Table<Config>& top_table() {
  static const Table<Config> table = make_top_table();
  return table;
}

const KeyInfo& all_keys() {
  static const KeyInfo whole{.name = "", .below = infos(top_table())};
  return whole;
}

const std::vector<KeyInfo>& known_keys() {
  static const std::vector<KeyInfo> keys = [] {
    std::vector<KeyInfo> out;
    add_leaves(all_keys(), "", {}, out);
    return out;
  }();
  return keys;
}

std::string dump(const Config& config) {
  return written(top_table(), config).json(2);
}

std::vector<Setting> settings(const Config& config) {
  std::vector<Setting> out;
  add_settings(written(top_table(), config), "", Concerns::training, out);
  return out;
}

std::map<std::string, std::string> every_value(const Config& config) {
  std::vector<Setting> all;
  add_settings(written(top_table(), config, Selection::whole), "", Concerns::training, all);
  std::map<std::string, std::string> out;
  for (const Setting& setting : all) out[setting.key] = setting.value;
  return out;
}

std::string section_of(const Model& model) {
  static const Table<Moe> table = moe_table();
  Node out = written(model_table(), model);
  // Defaults of keys that may have no effect go, as the parser would note these.
  if (Node* moe = out.find("moe"))
    std::erase_if(moe->members, [defaults = written(table, Moe())](const auto& member) {
      return (member.first == "drop" || member.first == "aux_loss_type" ||
              member.first == "shared_expert_gate") &&
             member.second == *defaults.find(member.first);
    });
  return node_of({{"model", std::move(out)}}).json(2);
}

std::string section_of(const Adapter& adapter) {
  return node_of({{"training", node_of({{"adapter", written(adapter_table(), adapter)}})}}).json(2);
}

}  // namespace sherd::config
