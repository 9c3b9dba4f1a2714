#include <regex>
#include <tuple>

#include "config/tables.h"

namespace sherd::config {
namespace {

constexpr const char* recompute = "training.recompute";
constexpr Twin stages{"parallel.pipeline", "pipeline.stages", "the ranks that hold the stages of one model"};
constexpr Twin partition{"parallel.partition_method", "pipeline.partition", "how parts go to stages"};

const std::vector<std::string> schedules = {"auto", "accumulate",  "layered",    "gpipe",
                                            "1f1b", "interleaved", "zero_bubble"};

const std::vector<std::string> partitions = {"best", "parameters", "uniform", "type:REGEX"};
const std::vector<std::string> recomputes = {"none", "selective", "full"};  // in the order of Recompute

std::string partition_of(const Value& value) {
  constexpr std::string_view type = "type:";
  const std::string& text = value.text();
  if (!text.starts_with(type)) return partitions[value.choice(partitions)];
  try {
    if (text.size() == type.size()) throw std::regex_error(std::regex_constants::error_brack);
    std::ignore = std::regex(text.substr(type.size()), std::regex::ECMAScript | std::regex::icase);
  } catch (const std::regex_error&) {
    value.error(value.node.brief(),
                " holds no regular expression after \"type:\"; write one that the classes ",
                "of parts match, such as \"type:block\"");
  }
  return text;
}

void read_partition(Config& config, const Value& value) {
  set(config.parallel.partition_method, partition, partition_of(value), value);
}

/// DeepSpeed recomputes runs of that many layers from their input; here each block from its own.
void read_interval(Config& config, const Value& value) {
  const std::int64_t interval = value.integer(0);
  if (interval == 0) return value.note("off");
  if (interval > 1) value.note("each block recomputes from its own input, as with 1");
  if (value.context.given.contains(recompute) && config.training.recompute != Recompute::full)
    value.error(interval, " means that blocks are recomputed whole, and ", recompute,
                " says otherwise; keep one of them");
  if (value.context.given.insert(recompute).second) value.context.given_as[recompute] = value.path;
  config.training.recompute = Recompute::full;
}

std::vector<Text> pipeline_texts() {
  return {
      derived("stages", "`parallel.pipeline`", "`parallel.pipeline`; 1: off, auto: leaves it to that",
              "makes no use of it: its PipelineModule is given `num_stages`"),
      derived("partition", "`parallel.partition_method`", "`parallel.partition_method`",
              "makes no use of it: its PipelineModule is given `partition_method`, parameters by default"),
      derived("activation_checkpoint_interval", "0: as `training.recompute` says",
              "above 0: `training.recompute` full, here for every model",
              "recomputes runs of so many layers; here each block from its own input"),
      {"seed_layers", "seed initial values by layer"},
      {"pipe_partitioned", "cut what stages send over tensor ranks"},
      {"grad_partitioned", "cut the gradients that they send over tensor ranks"},
      {"use_reentrant", "PyTorch's older recompute"}};
}

Table<Config> pipeline_table() {
  Table<Config> table;
  table.keys.push_back(custom<Config>("stages", "2", [](Config& config, const Value& value) {
                         if (value.node.is_text("auto"))
                           return value.note("\"auto\" leaves it to parallel.pipeline");
                         const int size = static_cast<int>(value.integer(1, std::numeric_limits<int>::max()));
                         if (size == 1) return value.note("off");
                         set(config.parallel.pipeline, stages, size, value);
                       }).takes(integers(1) + ", or \"auto\""));
  table.keys.push_back(custom<Config>("partition", "\"uniform\"", read_partition)
                           .alias("partition_method")
                           .one_of(partitions));
  table.keys.push_back(
      custom<Config>("activation_checkpoint_interval", "1", read_interval).takes(integers(0)));
  table.keys.push_back(noted<Config>("seed_layers", Holds::boolean,
                                     "initial values go by a parameter's name, the same in every cut"));
  for (const char* name : {"pipe_partitioned", "grad_partitioned"})
    table.keys.push_back(
        noted<Config>(name, Holds::boolean,
                      "tensor ranks send what they have: their part, with parallel.sequence_parallel"));
  table.keys.push_back(noted<Config>("use_reentrant", Holds::boolean, "concerns PyTorch's recompute"));
  describe(table.keys, pipeline_texts());
  return table;
}

}  // namespace

std::vector<Key<Parallel>> schedule_keys() {
  std::vector<Key<Parallel>> keys;
  keys.push_back(custom<Parallel>("pipeline", "2", [](Parallel& parallel, const Value& value) {
                   set(parallel.pipeline, stages,
                       static_cast<int>(value.integer(1, std::numeric_limits<int>::max())), value);
                 }).takes(integers(1)));
  keys.push_back(choice("schedule", &Parallel::schedule, schedules, "\"gpipe\""));
  keys.push_back(integer("virtual_stages", &Parallel::virtual_stages, "2", 1));
  keys.push_back(integer("micro_batch_group", &Parallel::micro_batch_group, "4", 1));
  keys.push_back(
      custom<Parallel>("partition_method", "\"uniform\"", [](Parallel& parallel, const Value& value) {
        set(parallel.partition_method, partition, partition_of(value), value);
      }).one_of(partitions));
  describe(
      keys,
      {{"pipeline", "ranks that hold the stages of one model", "`pipeline.stages` means the same here"},
       {"schedule",
        "order of a step's micro-batches. accumulate and layered run without a pipeline, the others with "
        "one. auto: "
        "1f1b with a pipeline, interleaved with `virtual_stages`; else, in `train_batch()` and `sherd "
        "train`, "
        "layered where parameters would come from other ranks, host memory or NVMe again for each of several "
        "micro-batches, with full recompute of everything and no parameter shared by parts of the model "
        "(tied "
        "embeddings); else accumulate ([offload](offload.md))",
        "runs 1f1b with a pipeline, else accumulate"},
       {"virtual_stages", "interleaved: runs of parts that each stage holds"},
       derived("micro_batch_group", "`pipeline`",
               "interleaved: so many micro-batches pass a virtual stage before the next one's turn, at least "
               "`pipeline`"),
       {"partition_method",
        "what each stage gets an equal share of: best: parameters that its products multiply with; "
        "parameters: all, "
        "as DeepSpeed counts them; uniform: parts; type:REGEX: parts whose class or path matches, case "
        "ignored",
        "`pipeline.partition` means the same here"}});
  return keys;
}

Key<Config> pipeline_key() {
  const Table<Config> table = pipeline_table();
  Key<Config> key = custom<Config>(
      "pipeline", "{}", [table](Config& config, const Value& value) { read_section(table, config, value); });
  key.list = [table](const std::string& prefix, std::vector<KeyInfo>& out) { list_keys(table, prefix, out); };
  return key;
}

void read_recompute(Training& training, const Value& value) {
  const auto asked = static_cast<Recompute>(value.choice(recomputes));
  value.context.given_as.erase(recompute);
  if (value.context.given.contains(recompute) && asked != training.recompute)
    value.error("\"full\" is what pipeline.activation_checkpoint_interval means, and this is ",
                value.node.brief(), "; keep one of them");
  value.context.given.insert(recompute);
  training.recompute = asked;
}

std::string_view name_of(Schedule schedule) {
  return schedules[static_cast<std::size_t>(schedule)];
}

void check_schedule(const Parallel& parallel, const Value& file) {
  const auto error = [&](const char* key, const auto&... what) {
    const Node* section = file.node.find("parallel");
    const Node* node = section ? section->find(key) : nullptr;
    Value{node ? *node : file.node, join("parallel", key), file.context}.error(what...);
  };
  const Schedule schedule = parallel.schedule;
  if (parallel.pipeline > 1 && (schedule == Schedule::layered || schedule == Schedule::accumulate))
    error("schedule", "\"", name_of(schedule),
          "\" runs the whole model on every rank, and parallel.pipeline is ", parallel.pipeline,
          "; take one of auto, gpipe, 1f1b, interleaved and zero_bubble, or set parallel.pipeline to 1");
  const bool interleaves =
      schedule == Schedule::interleaved || (schedule == Schedule::automatic && parallel.pipeline > 1);
  if (parallel.virtual_stages > 1 && !interleaves)
    error("virtual_stages", parallel.virtual_stages, " needs parallel.schedule \"interleaved\", not \"",
          name_of(schedule), "\"",
          schedule == Schedule::automatic ? ", or parallel.pipeline above 1" : "; or set it to 1");
  if (parallel.micro_batch_group > 0 && parallel.micro_batch_group < parallel.pipeline &&
      parallel.virtual_stages > 1)
    error("micro_batch_group", "must be at least parallel.pipeline, ", parallel.pipeline, ", not ",
          parallel.micro_batch_group, "; without the key it is");
}

void note_idle_schedule(const Config& config, const Given& given, Context& context) {
  const auto note = [&](const char* section, const char* key, bool idle, const char* reason) {
    const auto found = given.find(section);
    const Node* node = found == given.end() ? nullptr : found->second->find(key);
    if (idle && node && !node->is(Node::Kind::null)) context.note(join(section, key), reason);
  };
  const Parallel& parallel = config.parallel;
  const char* uncut = "no effect: the model is not cut into stages (parallel.pipeline)";
  const bool cut = parallel.pipeline > 1 || parallel.virtual_stages > 1;
  note("parallel", "partition_method", !cut, uncut);
  note("pipeline", "partition", !cut, uncut);
  note("pipeline", "partition_method", !cut, uncut);
  const Schedule schedule = parallel.schedule;
  const bool of_stages =
      schedule != Schedule::automatic && schedule != Schedule::accumulate && schedule != Schedule::layered;
  note("parallel", "schedule", of_stages && !cut,
       "of stages, and the model is not cut into any: set parallel.pipeline to their number");
  note("parallel", "schedule",
       schedule == Schedule::interleaved && parallel.pipeline > 1 && parallel.virtual_stages == 1,
       "interleaved with one chunk per stage is 1f1b: set parallel.virtual_stages above 1");
  note("parallel", "micro_batch_group", parallel.virtual_stages == 1,
       "no effect without parallel.virtual_stages above 1");
  const Training& training = config.training;
  for (const char* key : {"recompute_blocks", "recompute_micro_batches"})
    note("training", key, training.recompute == Recompute::none,
         "no effect without training.recompute selective or full");
  note("training", "recompute_micro_batches",
       training.recompute != Recompute::none && training.recompute_micro_batches > 0 && !cut &&
           parallel.schedule != Schedule::layered,
       "no effect above 0: without a pipeline or schedule \"layered\" one micro-batch is in flight");
}

}  // namespace sherd::config
