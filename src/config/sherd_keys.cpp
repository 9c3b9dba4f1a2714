#include "config/tables.h"

namespace sherd::config {
namespace {

// ---- data ----

void read_split(Data& data, const Value& value) {
  const std::vector<Node>& items = value.node.items;
  if (!value.node.is(Node::Kind::array) || items.size() != 2)
    value.error("must be a list of two fractions, training and validation, such as [0.98, 0.02], not ",
                value.node.brief());
  for (std::size_t i = 0; i < 2; ++i)
    data.split[i] = Value{items[i], cat(value.path, "[", i, "]"), value.context}.real(0, 1);
  const double sum = data.split[0] + data.split[1];
  if (data.split[0] <= 0) value.error("leaves nothing to train on");
  if (sum > 1 + 1e-9) value.error("the fractions sum to ", sum, ", more than 1");
}

void read_tokenizer(Data& data, const Value& value) {
  const std::string& name = value.text();
  const bool model = name.starts_with("spm:") && name.size() > 4;
  if (!name.empty() && name != "byte" && !model)
    value.error(value.node.brief(), " is no tokenizer; use \"byte\" or \"spm:MODEL_FILE\"");
  data.tokenizer = name;
}

Table<Data> data_table() {
  using T = Data;
  Table<T> table;
  table.keys.push_back(text("path", &T::path, "\"corpus/other\""));
  table.keys.push_back(custom<T>("split", "[0.9, 0.1]", read_split));
  table.keys.push_back(custom<T>("tokenizer", "\"byte\"", read_tokenizer));
  table.keys.push_back(integer("seed", &T::seed, "7", 0));
  table.keys.push_back(boolean("shuffle", &T::shuffle));
  return table;
}

void read_data(Config& config, const Value& section) {
  Data data;
  read_section(data_table(), data, section);
  if (data.path.empty()) section.error("needs \"path\", the dataset prefix that `sherd prepare` wrote");
  config.data = data;
}

// ---- training ----

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
  table.keys.push_back(custom<T>("recompute", "\"full\"", read_recompute));
  table.keys.push_back(integer("recompute_blocks", &T::recompute_blocks, "2", 0));
  table.keys.push_back(integer("recompute_micro_batches", &T::recompute_micro_batches, "2", 0));
  table.keys.push_back(boolean("split_masters", &T::split_masters));
  table.keys.push_back(custom<T>("moments_dtype", "\"bf16\"", [](Training& training, const Value& value) {
    training.moments_dtype = value.choice({"fp32", "bf16"}) == 0 ? DType::f32 : DType::bf16;
  }));
  table.keys.push_back(integer("log_interval", &T::log_interval, "1", 0));
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

template <class T>
Key<Config> with_list(Key<Config> key, Table<T> (*table)()) {
  key.list = [table](const std::string& prefix, std::vector<KeyInfo>& out) {
    list_keys(table(), prefix, out);
  };
  return key;
}

}  // namespace

std::vector<Key<Config>> sherd_keys() {
  std::vector<Key<Config>> keys;
  keys.push_back(model_key());
  keys.push_back(with_list(custom<Config>("data", "", read_data), data_table));
  keys.push_back(with_list(custom<Config>("training", "", read_training), training_table));
  keys.push_back(parallel_key());
  keys.push_back(device_key());
  return keys;
}

}  // namespace sherd::config
