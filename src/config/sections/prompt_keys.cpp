// Keys of training.adapter that prompts have.
#include <algorithm>
#include <cctype>

#include "base/text/excerpt.h"

#include "config/sections/tables.h"

namespace sherd::config {
namespace {

void check_name(PromptTask& task, const Value& value) {
  const bool plain = std::all_of(task.name.begin(), task.name.end(), [](unsigned char c) {
    return std::isalnum(c) != 0 || c == '_' || c == '-';
  });
  if (task.name.empty() || !plain)
    value.error("a task's name is of letters, digits, '_' and '-', not ", value.node.brief());
}

Table<PromptTask> task_table() {
  using T = PromptTask;
  return {Auto::is_a_value,
          {text("name", &T::name, "").then(check_name).means("by which `task` calls it", required),
           text("init_text", &T::init_text, "").unset("").means("in place of the section's")},
          [](T&, const Given& given, const Value& value) {
            if (!given.contains("name"))
              value.error("needs \"name\", by which data.sources and --task call it");
          }};
}

void check_tasks(PromptKeys& prompt, const Value& list) {
  if (std::ssize(prompt.tasks) > most_tasks) list.error("there may be ", most_tasks, " tasks at most");
  for (std::size_t i = 0; i < prompt.tasks.size(); ++i)
    if (const std::string& name = prompt.tasks[i].name; std::cmp_not_equal(prompt.find(name), i))
      list.item(i).error("a second task is called ", name);
}

/// The first task that has no text of its own.
std::string without_text(const PromptKeys& prompt) {
  for (const PromptTask& task : prompt.tasks)
    if (task.init_text.empty()) return task.name;
  return {};
}

/// Whether each prompt has a text to begin as.
bool all_have_text(const PromptKeys& prompt) {
  return !prompt.init_text.empty() || (!prompt.tasks.empty() && without_text(prompt).empty());
}

void check_tasks_of_sources(const Config& config, const Value& data) {
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

std::vector<Key<PromptKeys>> prompt_keys() {
  using P = PromptKeys;
  return {integer("virtual_tokens", &P::virtual_tokens, "5", 1, most_virtual_tokens)
              .means("of each prompt, which stands in front of every text: `model.seq_length` counts them",
                     also("num_virtual_tokens")),
          choice("init", &P::init, {"random", "sample_vocab", "text"}, "\"sample_vocab\"")
              .means("of the prompt's vectors: `random`, normal(0, 1); `sample_vocab`, those of ids that "
                     "`seed` draws; `text`, those of `init_text`",
                     also("prompt_tuning_init")),
          text("init_text", &P::init_text, "\"Say what is felt:\"")
              .means("its tokens' vectors, repeated or cut to `virtual_tokens`, are the prompt's at first",
                     also("prompt_tuning_init_text")),
          integer("encoder_hidden_size", &P::encoder_hidden_size, "64", 1, most_hidden)
              .unset(0)
              .means("width within the network of `p_tuning`", by("`model.hidden_size`")),
          list("tasks", &P::tasks, R"([{"name": "a"}, {"name": "b"}])", task_table())
              .then(check_tasks)
              .means("prompts of their own for several tasks, over one frozen model: `{\"name\": NAME, "
                     "\"init_text\": TEXT}`; each of `data.sources` names its `task`",
                     unless_default)};
}

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

void check_prompt(const Config& config, const Value& file) {
  const Adapter& adapter = config.training.adapter;
  if (config.model && adapter.has_prompt() && adapter.prompt.virtual_tokens >= config.model->seq_length)
    file.at("training")
        .at("adapter")
        .at("virtual_tokens")
        .error("is ", adapter.prompt.virtual_tokens, ", and model.seq_length, ", config.model->seq_length,
               ", counts them and leaves no token of text: give fewer, or a longer sequence");
  if (config.data && config.model) check_tasks_of_sources(config, file.at("data"));
}

std::int64_t PromptKeys::prompts() const {
  return std::max<std::int64_t>(1, std::ssize(tasks));
}

std::string PromptKeys::task_names() const {
  return joined_text(tasks, ", ", &PromptTask::name);
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
