#include <tuple>

#include "base/text/pattern.h"
#include "config/sections/tables.h"

namespace sherd::config {
namespace {

constexpr const char* recompute_path = "training.recompute";
constexpr SameValue stages{"parallel.pipeline", "pipeline.stages",
                           "the ranks that hold the stages of one model"};
constexpr SameValue partition{"parallel.partition_method", "pipeline.partition", "how parts go to stages"};

const std::vector<std::string> schedules = {"auto", "accumulate",  "layered",    "gpipe",
                                            "1f1b", "interleaved", "zero_bubble"};
const std::vector<std::string> partitions = {"best", "parameters", "uniform", "type:REGEX"};

constexpr const char* uncut = "no effect: the model is not cut into stages (parallel.pipeline)";

bool is_whole(const Config& config) {
  return config.parallel.pipeline == 1 && config.parallel.virtual_stages == 1;
}

std::string why_idle_schedule(const Config& config) {
  const Schedule schedule = config.parallel.schedule;
  const bool of_stages =
      schedule != Schedule::automatic && schedule != Schedule::accumulate && schedule != Schedule::layered;
  if (of_stages && is_whole(config))
    return "of stages, and the model is not cut into any: set parallel.pipeline to their number";
  if (schedule == Schedule::interleaved && config.parallel.virtual_stages == 1)
    return "interleaved with one chunk per stage is 1f1b: set parallel.virtual_stages above 1";
  return "";
}

std::string partition_of(const Value& value) {
  constexpr std::string_view type = "type:";
  const std::string& text = value.text();
  if (!text.starts_with(type)) return partitions[value.choice(partitions)];
  try {
    std::ignore = CaselessPattern(text.substr(type.size()));
  } catch (const Error&) {
    value.error(value.node.brief(),
                " holds no regular expression after \"type:\"; write one that the classes ",
                "of parts match, such as \"type:block\"");
  }
  return text;
}

/// A key that takes partitions.
template <class T>
Key<T> of_partitions(Key<T> key) {
  std::move(key).one_of(partitions);
  key.schema =
      R"({"anyOf": [{"enum": ["best", "parameters", "uniform"]}, {"type": "string", "pattern": "^type:"}]})";
  return key;
}

Key<Config> stages_key() {
  return custom<Config>("stages", "2",
                        [](Config& config, const Value& value) {
                          if (value.node.is_text("auto"))
                            return value.note("\"auto\" leaves it to parallel.pipeline");
                          const int size =
                              static_cast<int>(value.integer(1, std::numeric_limits<int>::max()));
                          if (size == 1) return value.note("off");
                          set(config.parallel.pipeline, stages, size, value);
                        })
      .takes({integers(1).words + ", or \"auto\"",
              R"({"anyOf": [{"type": "integer", "minimum": 1}, {"const": "auto"}]})"})
      .means("`parallel.pipeline`; 1: off, auto: leaves it to that",
             "makes no use of it: its PipelineModule is given `num_stages`", by("`parallel.pipeline`"));
}

/// DeepSpeed recomputes runs of that many layers from their input; here each block from its own.
Key<Config> interval_key() {
  const auto read = [](Config& config, const Value& value) {
    const std::int64_t interval = value.integer(0);
    if (interval == 0) return value.note("off");
    if (interval > 1) value.note("each block recomputes from its own input, as with 1");
    if (value.context.given.contains(recompute_path) && config.training.recompute != Recompute::full)
      value.error(interval, " means that blocks are recomputed whole, and ", recompute_path,
                  " says otherwise; keep one of them");
    if (value.context.given.insert(recompute_path).second)
      value.context.given_as[recompute_path] = value.path;
    config.training.recompute = Recompute::full;
  };
  return custom<Config>("activation_checkpoint_interval", "1", read)
      .takes(integers(0))
      .means("above 0: `training.recompute` full, here for every model",
             "recomputes runs of so many layers; here each block from its own input",
             by("0: as `training.recompute` says"));
}

Table<Config> pipeline_table() {
  const auto read_partition = [](Config& config, const Value& value) {
    set(config.parallel.partition_method, partition, partition_of(value), value);
  };
  Table<Config> table{
      Auto::is_a_value,
      {stages_key(),
       of_partitions(custom<Config>("partition", "\"uniform\"", read_partition))
           .means("`parallel.partition_method`",
                  "makes no use of it: its PipelineModule is given `partition_method`, parameters by default",
                  also("partition_method"), idle(is_whole, uncut), by("`parallel.partition_method`")),
       interval_key()}};
  append(table.keys, foreign_keys<Config>("pipeline"));
  return table;
}

}  // namespace

std::vector<Key<Parallel>> schedule_keys() {
  using P = Parallel;
  return {integer("pipeline", &P::pipeline, "2", 1)
              .also_as(&P::pipeline, stages)
              .means("ranks that hold the stages of one model", "`pipeline.stages` means the same here"),
          choice("schedule", &P::schedule, schedules, "\"gpipe\"")
              .means("order of a step's micro-batches. accumulate and layered run without a pipeline, the "
                     "others with one. auto: 1f1b with a pipeline, interleaved with `virtual_stages`; else, "
                     "in `train_batch()` and `sherd train`, layered where parameters would come from other "
                     "ranks, host memory or NVMe again for each of several micro-batches, with full "
                     "recompute of everything and no parameter shared by parts of the model (tied "
                     "embeddings); else accumulate ([offload](offload.md))",
                     "runs 1f1b with a pipeline, else accumulate", idle(why_idle_schedule)),
          integer("virtual_stages", &P::virtual_stages, "2", 1)
              .means("interleaved: runs of parts that each stage holds"),
          integer("micro_batch_group", &P::micro_batch_group, "4", 1)
              .unset(0)
              .means("interleaved: so many micro-batches pass a virtual stage before the next one's turn, at "
                     "least `pipeline`",
                     or_null,
                     idle([](const Config& c) { return c.parallel.virtual_stages == 1; },
                          "no effect without parallel.virtual_stages above 1"),
                     by("`pipeline`")),
          of_partitions(field_key("partition_method", "\"uniform\"", &P::partition_method, partition_of))
              .also_as(&P::partition_method, partition)
              .means("what each stage gets an equal share of: best: parameters that its products multiply "
                     "with; parameters: all, as DeepSpeed counts them; uniform: parts; type:REGEX: parts "
                     "whose class or path matches, case ignored",
                     "`pipeline.partition` means the same here", idle(is_whole, uncut))};
}

Key<Config> pipeline_key() {
  return section<Config>("pipeline", pipeline_table());
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

}  // namespace sherd::config
