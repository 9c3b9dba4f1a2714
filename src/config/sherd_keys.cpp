#include "config/tables.h"

namespace sherd::config {
namespace {

const std::vector<std::string> model_types = {"gpt2", "llama"};

// ---- model ----

Table<Model> model_table() {
  using T = Model;
  Table<T> table;
  std::vector<Key<T>>& keys = table.keys;
  keys.push_back(choice("type", &T::type, model_types, "\"llama\""));
  keys.push_back(integer("vocab_size", &T::vocab_size, "50257", 0, most_vocabulary));
  keys.push_back(integer("pad_vocab_to_multiple_of", &T::pad_vocab_to_multiple_of, "64", 1, 1 << 20));
  keys.push_back(integer("seq_length", &T::seq_length, "64", 1, most_positions));
  keys.push_back(integer("hidden_size", &T::hidden_size, "48", 1, most_hidden));
  keys.push_back(integer("num_layers", &T::num_layers, "3", 1, most_layers));
  keys.push_back(integer("num_heads", &T::num_heads, "2", 1, most_heads));
  keys.push_back(integer("num_kv_heads", &T::num_kv_heads, "2", 1, most_heads));
  keys.push_back(integer("ffn_hidden_size", &T::ffn_hidden_size, "100", 1, most_ffn_hidden));
  keys.push_back(choice("position", &T::position, {"learned", "rotary"}, "\"rotary\""));
  keys.push_back(real("rotary_base", &T::rotary_base, "5e5", 1, infinity, true));
  keys.push_back(choice("norm", &T::norm, {"layernorm", "rmsnorm"}, "\"rmsnorm\""));
  keys.push_back(real("norm_epsilon", &T::norm_epsilon, "1e-6", 0, infinity, true));
  keys.push_back(choice("activation", &T::activation, {"gelu_tanh", "gelu", "swiglu"}, "\"swiglu\""));
  keys.push_back(real("dropout", &T::dropout, "0.2", 0, 0.99));
  keys.push_back(real("attention_dropout", &T::attention_dropout, "0.2", 0, 0.99));
  keys.push_back(real("embedding_dropout", &T::embedding_dropout, "0.2", 0, 0.99));
  keys.push_back(boolean("tie_embeddings", &T::tie_embeddings));
  keys.push_back(boolean("bias", &T::bias));
  keys.push_back(real("init_std", &T::init_std, "0.01", 0, infinity, true));
  keys.push_back(moe_key());
  return table;
}

void set_type_defaults(Model& model) {
  const bool llama = model.type == ModelType::llama;
  model.position = llama ? Positions::rotary : Positions::learned;
  model.norm = llama ? Norm::rmsnorm : Norm::layernorm;
  model.activation = llama ? FfnActivation::swiglu : FfnActivation::gelu_tanh;
  model.dropout = llama ? 0 : 0.1;
  model.tie_embeddings = model.bias = !llama;
}

std::int64_t default_ffn(const Model& model) {
  if (model.type == ModelType::gpt2) return 4 * model.hidden_size;
  return (8 * model.hidden_size / 3 + 63) / 64 * 64;
}

void fill_and_check(Model& model, const Given& given, const Value& section) {
  for (const char* name : {"seq_length", "hidden_size", "num_layers", "num_heads"})
    if (!given.contains(name)) section.error("needs \"", name, "\"");
  if (!given.contains("num_kv_heads")) model.num_kv_heads = model.num_heads;
  if (!given.contains("ffn_hidden_size")) model.ffn_hidden_size = default_ffn(model);
  if (!given.contains("attention_dropout")) model.attention_dropout = model.dropout;
  if (!given.contains("embedding_dropout")) model.embedding_dropout = model.dropout;
  if (model.hidden_size % model.num_heads != 0)
    section.error("hidden_size ", model.hidden_size, " is not a multiple of num_heads ", model.num_heads);
  if (model.num_heads % model.num_kv_heads != 0)
    section.error("num_heads ", model.num_heads, " is not a multiple of num_kv_heads ", model.num_kv_heads);
  if (model.position == Positions::rotary && model.head_dim() % 2 != 0)
    section.error("rotary positions need an even head size, not hidden_size/num_heads = ", model.head_dim());
  if (given.contains("rotary_base") && model.position != Positions::rotary)
    section.context.note(join(section.path, "rotary_base"), "no effect with learned positions");
  if (const auto moe = given.find("moe"); moe != given.end())
    finish_moe(model.moe, model, {*moe->second, join(section.path, "moe"), section.context});
}

void read_model(Config& config, const Value& section) {
  section.expect(Node::Kind::object);
  Model model;
  if (const Node* type = section.node.find("type"); type && !type->is(Node::Kind::null))
    model.type =
        static_cast<ModelType>(Value{*type, join(section.path, "type"), section.context}.choice(model_types));
  set_type_defaults(model);
  const Given given = read_section(model_table(), model, section);
  fill_and_check(model, given, section);
  config.model = model;
}

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
  table.keys.push_back(text("save_dir", &T::save_dir, "\"runs/a\""));
  table.keys.push_back(integer("save_interval", &T::save_interval, "50", 0));
  table.keys.push_back(integer("keep_last", &T::keep_last, "2", 0));
  table.keys.push_back(custom<T>("recompute", "\"full\"", read_recompute));
  table.keys.push_back(integer("recompute_blocks", &T::recompute_blocks, "2", 0));
  table.keys.push_back(integer("recompute_micro_batches", &T::recompute_micro_batches, "2", 0));
  table.keys.push_back(boolean("split_masters", &T::split_masters));
  table.keys.push_back(custom<T>("moments_dtype", "\"bf16\"", [](Training& training, const Value& value) {
    training.moments_dtype = value.choice({"fp32", "bf16"}) == 0 ? DType::f32 : DType::bf16;
  }));
  table.keys.push_back(integer("log_interval", &T::log_interval, "1", 0));
  return table;
}

void read_training(Config& config, const Value& section) {
  const Given given = read_section(training_table(), config.training, section);
  if (config.training.save_dir.empty())
    for (const char* name : {"save_interval", "keep_last"})
      if (given.contains(name))
        section.context.note(join(section.path, name), "no effect without training.save_dir");
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
  keys.push_back(with_list(custom<Config>("model", "", read_model), model_table));
  keys.push_back(with_list(custom<Config>("data", "", read_data), data_table));
  keys.push_back(with_list(custom<Config>("training", "", read_training), training_table));
  keys.push_back(parallel_key());
  keys.push_back(device_key());
  return keys;
}

std::string_view name_of(ModelType type) {
  return type == ModelType::llama ? "llama" : "gpt2";
}
std::string_view name_of(Positions positions) {
  return positions == Positions::rotary ? "rotary" : "learned";
}
std::string_view name_of(Norm norm) {
  return norm == Norm::rmsnorm ? "rmsnorm" : "layernorm";
}

std::string_view name_of(FfnActivation activation) {
  switch (activation) {
    case FfnActivation::gelu_tanh:
      return "gelu_tanh";
    case FfnActivation::gelu:
      return "gelu";
    case FfnActivation::swiglu:
      break;
  }
  return "swiglu";
}

}  // namespace sherd::config
