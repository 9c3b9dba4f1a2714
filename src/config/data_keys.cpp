// Section data.
#include <algorithm>

#include "config/tables.h"

namespace sherd::config {
namespace {

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
  const bool model =
      (name.starts_with("spm:") && name.size() > 4) || (name.starts_with("hf:") && name.size() > 3);
  if (!name.empty() && name != "byte" && !model)
    value.error(value.node.brief(), " is no tokenizer; use \"byte\", \"spm:MODEL_FILE\" or \"hf:PATH\"");
  data.tokenizer = name;
}

Table<DataSource> source_table() {
  using T = DataSource;
  Table<T> table;
  table.keys.push_back(text("path", &T::path, ""));
  table.keys.push_back(real("weight", &T::weight, "", 0));
  table.keys.push_back(text("task", &T::task, ""));
  return table;
}

void read_source(Data& data, const Value& value) {
  value.expect(Node::Kind::object);
  DataSource source;
  const Given given = read_section(source_table(), source, value);
  if (source.path.empty()) value.error("needs \"path\", the dataset prefix that `sherd prepare` wrote");
  if (given.contains("weight") && source.weight == 0)
    value.error("a weight of 0 would never be drawn from; leave the source out");
  data.sources.push_back(std::move(source));
}

void read_sources(Data& data, const Value& list) {
  list.expect(Node::Kind::array);
  data.sources.clear();  // a `path` beside the list is told of by itself
  if (list.node.items.empty()) list.error("needs at least one source, such as {\"path\": \"corpus/a\"}");
  for (std::size_t i = 0; i < list.node.items.size(); ++i)
    list.context.attempt([&] {
      read_source(data, {list.node.items[i], cat(list.path, "[", i, "]"), list.context});
    });
  const auto weighted = [](const DataSource& source) { return source.weight > 0; };
  if (std::any_of(data.sources.begin(), data.sources.end(), weighted) &&
      !std::all_of(data.sources.begin(), data.sources.end(), weighted))
    list.error(
        "some sources have a \"weight\" and some have not; give one to all, or to none (each has then that "
        "of its tokens)");
}

Table<Data> data_table() {
  using T = Data;
  Table<T> table;
  table.keys.push_back(custom<T>("path", "\"corpus/other\"", [](Data& data, const Value& value) {
                         data.sources = {{value.text(), 0, ""}};
                       }).takes("string"));
  table.keys.push_back(custom<T>("sources",
                                 R"([{"path": "corpus/a", "weight": 3}, {"path": "corpus/b", "weight": 1}])",
                                 read_sources)
                           .takes("list of objects"));
  table.keys.push_back(custom<T>("split", "[0.9, 0.1]", read_split).takes("two numbers from 0 to 1"));
  table.keys.push_back(custom<T>("tokenizer", "\"byte\"", read_tokenizer).takes("string"));
  table.keys.push_back(integer("seed", &T::seed, "7", 0));
  table.keys.push_back(boolean("shuffle", &T::shuffle));
  table.keys.push_back(custom<T>("packing", "\"documents\"", [](Data& data, const Value& value) {
                         data.packing = static_cast<Packing>(value.choice({"stream", "documents"}));
                       }).one_of({"stream", "documents"}));
  describe(
      table.keys,
      {required("path", "prefix of the dataset that `sherd prepare` wrote: `PREFIX.bin`, `.idx`"),
       derived(
           "sources", "`path` alone",
           "in place of `path`: datasets of one tokenizer, as `{\"path\": PREFIX, \"weight\": W}`; samples "
           "come "
           "from each by weight, in the same order on any number of ranks ([more](config.md#datasources)). "
           "With `training.adapter.tasks` also `\"task\": NAME`"),
       {"split", "fractions for training and validation, of sum 1 at most; [1, 0] leaves validation out"},
       derived("tokenizer", "the one recorded beside the dataset",
               "`byte`, `spm:MODEL_FILE` or `hf:PATH` (a `tokenizer.json`)"),
       {"seed", "of the shuffle"},
       {"shuffle", "documents and samples, anew in every epoch"},
       {"packing",
        "how documents become samples: `stream`, behind each other and cut where a sample ends, or "
        "`documents`, whole "
        "ones that do not see each other, with positions that begin anew ([more](data.md#samples))"}});
  return table;
}

void read_data(Config& config, const Value& section) {
  Data data;
  const Given given = read_section(data_table(), data, section);
  if (given.contains("path") && given.contains("sources"))
    section.error("has \"path\" and \"sources\"; name all datasets in \"sources\"");
  if (data.sources.empty() || data.sources[0].path.empty())
    section.error("needs \"path\", the dataset prefix that `sherd prepare` wrote");
  config.data = data;
}

}  // namespace

Key<Config> data_key() {
  Key<Config> key = custom<Config>("data", "", read_data);
  key.list = [](const std::string& prefix, std::vector<KeyInfo>& out) {
    list_keys(data_table(), prefix, out);
  };
  return key;
}

void check_packing(const Config& config, const Value& file) {
  if (!config.data || config.data->packing != Packing::documents || config.parallel.context <= 1) return;
  const Node* data = file.node.find("data");
  Value{*data, "data.packing", file.context}.error(
      "\"documents\" are kept apart on ranks that have whole sequences, and parallel.context is ",
      config.parallel.context, "; take \"stream\", or set parallel.context to 1");
}

}  // namespace sherd::config
