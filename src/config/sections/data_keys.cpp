// Section data.
#include <algorithm>

#include "config/sections/tables.h"

namespace sherd::config {
namespace {

Key<Data> split_key() {
  return custom<Data>(
             "split", "[0.9, 0.1]",
             [](Data& data, const Value& value) {
               const auto split = read_numbers(
                   value, 2, "two fractions, training and validation, such as [0.98, 0.02]", 0, 1);
               if (split[0] <= 0) value.error("leaves nothing to train on");
               if (const double sum = split[0] + split[1]; sum > 1 + 1e-9)
                 value.error("the fractions sum to ", sum, ", more than 1");
               data.split = {split[0], split[1]};
             },
             [](const Data& data) { return list_of(data.split); })
      .takes(numbers("two numbers from 0 to 1", 2, 0, 1))
      .means("fractions for training and validation, of sum 1 at most; [1, 0] leaves validation out");
}

void check_tokenizer(Data& data, const Value& value) {
  const std::string& name = data.tokenizer;
  const bool model =
      (name.starts_with("spm:") && name.size() > 4) || (name.starts_with("hf:") && name.size() > 3);
  if (!name.empty() && name != "byte" && !model)
    value.error(value.node.brief(), " is no tokenizer; use \"byte\", \"spm:MODEL_FILE\" or \"hf:PATH\"");
}

Table<DataSource> source_table() {
  using T = DataSource;
  return {Auto::is_a_value,
          {text("path", &T::path, "").means("prefix of the dataset", Concerns::machine, required),
           real("weight", &T::weight, "", 0).unset(0.0).means("share of the samples, of any sum"),
           text("task", &T::task, "").unset("").means("one of `training.adapter.tasks`")},
          [](T& source, const Given& given, const Value& value) {
            if (source.path.empty())
              value.error("needs \"path\", the dataset prefix that `sherd prepare` wrote");
            if (given.contains("weight") && source.weight == 0)
              value.error("a weight of 0 would never be drawn from; leave the source out");
          }};
}

void check_sources(Data& data, const Value& value) {
  if (data.sources.empty()) value.error("needs at least one source, such as {\"path\": \"corpus/a\"}");
  const auto weighted = [](const DataSource& source) { return source.weight > 0; };
  if (std::any_of(data.sources.begin(), data.sources.end(), weighted) &&
      !std::all_of(data.sources.begin(), data.sources.end(), weighted))
    value.error(
        "some sources have a \"weight\" and some have not; give one to all, or to none (each has then that "
        "of its tokens)");
}

/// One source without a task is written as a path.
bool is_path(const Data& data) {
  return data.sources.size() == 1 && data.sources[0].task.empty();
}

Key<Data> path_key() {
  return custom<Data>(
             "path", "\"corpus/other\"",
             [](Data& data, const Value& value) {
               data.sources = {{value.text(), 0, ""}};
             },
             [](const Data& data) { return node_of(data.sources.at(0).path); })
      .where(is_path)
      .takes({"string", R"({"type": "string"})"})
      .means("prefix of the dataset that `sherd prepare` wrote: `PREFIX.bin`, `.idx`", Concerns::machine,
             instead_of("sources"));
}

void check_data(const Data& data, const Given& given, const Value& section) {
  if (given.contains("path") && given.contains("sources"))
    section.error("has \"path\" and \"sources\"; name all datasets in \"sources\"");
  if (data.sources.empty() || data.sources[0].path.empty())
    section.error("needs \"path\", the dataset prefix that `sherd prepare` wrote");
}

Table<Data> data_table() {
  using T = Data;
  return {Auto::is_a_value,
          {path_key(),
           list("sources", &T::sources,
                R"([{"path": "corpus/a", "weight": 3}, {"path": "corpus/b", "weight": 1}])", source_table())
               .then(check_sources)
               .where([](const T& data) { return !is_path(data); })
               .means("in place of `path`: datasets of one tokenizer, as `{\"path\": PREFIX, \"weight\": "
                      "W}`; samples come from each by weight, in the same order on any number of ranks "
                      "([more](config.md#datasources)). With `training.adapter.tasks` also `\"task\": NAME`",
                      by("`path` alone")),
           split_key(),
           text("tokenizer", &T::tokenizer, "\"byte\"")
               .then(check_tokenizer)
               .means("`byte`, `spm:MODEL_FILE` or `hf:PATH` (a `tokenizer.json`)", Concerns::run,
                      by("the one recorded beside the dataset")),
           integer("seed", &T::seed, "7", 0).means("of the shuffle"),
           boolean("shuffle", &T::shuffle).means("documents and samples, anew in every epoch"),
           choice("packing", &T::packing, {"stream", "documents"}, "\"documents\"")
               .means("how documents become samples: `stream`, behind each other and cut where a sample "
                      "ends, or `documents`, whole ones that do not see each other, with positions that "
                      "begin anew ([more](data.md#samples))")},
          check_data};
}

}  // namespace

Key<Config> data_key() {
  return section("data", &Config::data, data_table());
}

void check_packing(const Config& config, const Value& file) {
  const bool pairs = config.model && config.model->pairs_texts();
  if ((config.objective() == Objective::classification || pairs) && config.parallel.context > 1)
    Value{*file.node.find("parallel"), "parallel.context", file.context}.error(
        config.parallel.context, " ranks hold parts of sequences, and ",
        pairs ? "pairs of texts" : "texts with labels",
        " are kept apart on ranks that have whole ones: set it to 1");
  if (!config.data || config.data->packing != SamplePacking::documents) return;
  const Node* data = file.node.find("data");
  if (config.model && config.model->has_encoder())
    Value{*data, "data.packing", file.context}.error(
        "\"documents\" lie behind each other in a sample, and one of an encoder and a decoder has one text: "
        "take \"stream\"");
  if (pairs)
    Value{*data, "data.packing", file.context}.error(
        "\"documents\" lie behind each other in a sample, and one of model.head \"pretraining\" has a pair "
        "of "
        "texts: leave it out");
  if (config.parallel.context <= 1) return;
  Value{*data, "data.packing", file.context}.error(
      "\"documents\" are kept apart on ranks that have whole sequences, and parallel.context is ",
      config.parallel.context, "; take \"stream\", or set parallel.context to 1");
}

}  // namespace sherd::config
