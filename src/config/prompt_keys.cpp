// Keys of training.adapter that prompts have.
#include <algorithm>
#include <cctype>

#include "config/tables.h"

namespace sherd::config {
namespace {

void read_name(PromptTask& task, const Value& value) {
  task.name = value.text();
  const bool plain = std::all_of(task.name.begin(), task.name.end(), [](unsigned char c) {
    return std::isalnum(c) != 0 || c == '_' || c == '-';
  });
  if (task.name.empty() || !plain)
    value.error("a task's name is of letters, digits, '_' and '-', not ", value.node.brief());
}

Table<PromptTask> task_table() {
  using T = PromptTask;
  Table<T> table;
  table.keys.push_back(custom<T>("name", "", read_name));
  table.keys.push_back(text("init_text", &T::init_text, ""));
  return table;
}

void read_tasks(PromptKeys& prompt, const Value& list) {
  list.expect(Node::Kind::array);
  prompt.tasks.clear();
  if (std::ssize(list.node.items) > most_tasks) list.error("there may be ", most_tasks, " tasks at most");
  for (std::size_t i = 0; i < list.node.items.size(); ++i)
    list.context.attempt([&] {
      const Value value{list.node.items[i], cat(list.path, "[", i, "]"), list.context};
      PromptTask task;
      const Given given = read_section(task_table(), task, value);
      if (!given.contains("name")) value.error("needs \"name\", by which data.sources and --task call it");
      if (prompt.find(task.name) >= 0) value.error("a second task is called ", task.name);
      prompt.tasks.push_back(std::move(task));
    });
}

/// Whether each prompt has a text to begin as.
bool all_have_text(const PromptKeys& prompt) {
  return !prompt.init_text.empty() ||
         (!prompt.tasks.empty() &&
          std::all_of(prompt.tasks.begin(), prompt.tasks.end(),
                      [](const PromptTask& task) { return !task.init_text.empty(); }));
}

}  // namespace

std::vector<Key<PromptKeys>> prompt_keys() {
  using P = PromptKeys;
  std::vector<Key<P>> keys;
  keys.push_back(
      integer("virtual_tokens", &P::virtual_tokens, "5", 1, most_virtual_tokens).alias("num_virtual_tokens"));
  keys.push_back(choice("init", &P::init, {"random", "sample_vocab", "text"}, "\"sample_vocab\"")
                     .alias("prompt_tuning_init"));
  keys.push_back(text("init_text", &P::init_text, "\"Say what is felt:\"").alias("prompt_tuning_init_text"));
  keys.push_back(
      custom<P>("tasks", R"([{"name": "a"}, {"name": "b"}])", read_tasks).takes("list of objects"));
  keys.push_back(integer("encoder_hidden_size", &P::encoder_hidden_size, "64", 1, most_hidden));
  keys.push_back(refused<P>("encoder_reparameterization_type", "\"LSTM\"",
                            "of PEFT's two networks Sherd has its default, MLP",
                            [](const Value& value) { return value.node.is_text("MLP"); }));
  return keys;
}

bool has_prompt_key(AdapterType type, const std::string& key) {
  if (key == "init" || key == "init_text") return type == AdapterType::prompt_tuning;
  if (key.starts_with("encoder_")) return type == AdapterType::p_tuning;
  return true;
}

namespace {
/// The first task that has no text.
std::string without_text(const PromptKeys& prompt) {
  for (const PromptTask& task : prompt.tasks)
    if (task.init_text.empty()) return task.name;
  return {};
}
}  // namespace

void finish_prompt(Adapter& adapter, const Given& given, const Value& section) {
  PromptKeys& prompt = adapter.prompt;
  if (adapter.type == AdapterType::p_tuning) {
    prompt.init = PromptInit::random, prompt.init_text.clear();
    for (PromptTask& task : prompt.tasks) task.init_text.clear();
    return;
  }
  prompt.encoder_hidden_size = 0;
  const bool text = all_have_text(prompt);
  if (text && !given.contains("init")) prompt.init = PromptInit::text;
  if (prompt.init == PromptInit::text && !text)
    section.error("init is \"text\", and there is no \"init_text\"",
                  prompt.tasks.empty() ? "" : " for each task");
  const bool any = !prompt.init_text.empty() ||
                   std::any_of(prompt.tasks.begin(), prompt.tasks.end(),
                               [](const PromptTask& task) { return !task.init_text.empty(); });
  if (any && prompt.init != PromptInit::text)
    section.error("gives \"init_text\", and ",
                  text ? "init is not \"text\": take one of them away"
                       : cat("the task ", without_text(prompt), " has none: give each task one, or none"));
}

namespace {

void check_sources(const Config& config, const Value& data) {
  const PromptKeys& prompt = config.training.adapter.prompt;
  const bool tasks = config.training.adapter.has_prompt() && !prompt.tasks.empty();
  for (std::size_t i = 0; i < config.data->sources.size(); ++i) {
    const std::string& task = config.data->sources[i].task;
    const Node* sources = data.node.find("sources");
    const Node* named = sources && i < sources->items.size() ? sources->items[i].find("task") : nullptr;
    const Value value{named ? *named : data.node, cat("data.sources[", i, "].task"), data.context};
    if (!tasks && task.empty()) continue;
    if (!tasks) value.error("names the task '", task, "', and training.adapter.tasks names none");
    if (task.empty())
      value.error("is missing: training.adapter.tasks are ", prompt.task_names(),
                  ", and each of data.sources is of one of them");
    if (prompt.find(task) < 0) value.error("no task is called '", task, "'; there are ", prompt.task_names());
  }
  for (const PromptTask& task : prompt.tasks)
    if (tasks && std::none_of(config.data->sources.begin(), config.data->sources.end(),
                              [&](const DataSource& source) { return source.task == task.name; }))
      data.context.note("training.adapter.tasks",
                        cat("none of data.sources is of ", task.name, ", whose prompt learns nothing"));
}

}  // namespace

void check_prompt(const Config& config, const Value& file) {
  const Adapter& adapter = config.training.adapter;
  if (config.model && adapter.has_prompt() && adapter.prompt.virtual_tokens >= config.model->seq_length) {
    const Node* section = file.node.find("training")->find("adapter");
    const Node* given = section->find("virtual_tokens");
    Value{given ? *given : *section, "training.adapter.virtual_tokens", file.context}.error(
        "is ", adapter.prompt.virtual_tokens, ", and model.seq_length, ", config.model->seq_length,
        ", counts them and leaves no token of text: give fewer, or a longer sequence");
  }
  if (config.data && config.model) check_sources(config, {*file.node.find("data"), "data", file.context});
}

std::int64_t PromptKeys::prompts() const {
  return std::max<std::int64_t>(1, std::ssize(tasks));
}

std::string PromptKeys::task_names() const {
  std::string out;
  for (const PromptTask& task : tasks) out += cat(out.empty() ? "" : ", ", task.name);
  return out;
}

std::int64_t PromptKeys::find(const std::string& task) const {
  for (std::size_t i = 0; i < tasks.size(); ++i)
    if (tasks[i].name == task) return static_cast<std::int64_t>(i);
  return -1;
}

std::int64_t first_virtual_id(const PromptKeys& keys, std::int64_t vocabulary, std::int64_t multiple,
                              std::int64_t prompt) {
  return (vocabulary + multiple - 1) / multiple * multiple + prompt * keys.virtual_tokens;
}

}  // namespace sherd::config
