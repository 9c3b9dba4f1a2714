#include "config/sections/tables.h"

namespace sherd::config {
namespace {

constexpr SameValue tensor_size{"parallel.tensor", "tensor_parallel.autotp_size",
                                "the ranks that hold slices of the same layers"};
constexpr SameValue context_size{"parallel.context", "sequence_parallel_size",
                                 "the ranks that hold pieces of the same sequences"};
constexpr SameValue shard_size{"parallel.shard_size", "zero_optimization.mics_shard_size",
                               "the ranks that share states"};
constexpr const char* context_method = "parallel.context_method";
constexpr std::int64_t most_ranks = std::numeric_limits<int>::max();

/// How layers and sequences are shared.
std::vector<Key<Parallel>> layer_keys() {
  using P = Parallel;
  return {
      integer("tensor", &P::tensor, "2", 1)
          .also_as(&P::tensor, tensor_size)
          .means("ranks that hold slices of the same layers", "`tensor_parallel.autotp_size` means the same"),
      boolean("sequence_parallel", &P::sequence_parallel)
          .means("with `tensor` above 1: norms, dropout and residuals work on a part of the sequence on each "
                 "of these ranks",
                 Concerns::training, idle([](const Config& c) -> std::string {
                   if (!c.parallel.sequence_parallel) return "";
                   if (c.parallel.tensor == 1) return "no effect without parallel.tensor above 1";
                   return c.model && c.model->has_encoder()
                              ? "no effect: tensor ranks have whole sequences of an encoder and a decoder"
                              : "";
                 })),
      integer("context", &P::context, "2", 1)
          .also_as(&P::context, context_size)
          .means("ranks that hold pieces of the same sequences",
                 "`sequence_parallel_size` means the same, with `context_method` ulysses"),
      choice("context_method", &P::context_method, {"ring", "ulysses"}, "\"ulysses\"")
          .then([](P&, const Value& value) { value.context.given.insert(context_method); })
          .means("how these attend to each other: ring passes keys and values around, ulysses exchanges "
                 "heads for tokens",
                 idle([](const Config& c) { return c.parallel.context == 1; },
                      "no effect without parallel.context above 1"),
                 Concerns::training),
      integer("expert", &P::expert, "2", 1)
          .means(
              "ranks that share out the experts of a layer, and exchange tokens instead of their parameters; "
              "divides `context` × data, and the number of experts ([mixture of experts](moe.md))")};
}

/// How replicas agree.
std::vector<Key<Parallel>> replica_keys() {
  using P = Parallel;
  return {
      integer("shard_size", &P::shard_size, "2", 1)
          .also_as(&P::shard_size, shard_size)
          .unset(0)
          .means("ranks that share states, context ranks among them; each such group holds a replica (hybrid "
                 "sharding). A multiple of `context`, and of `expert`, that divides `context` × data",
                 "`zero_optimization.mics_shard_size` means the same", or_null, Concerns::training,
                 by("all; with a 1-bit optimizer at stage 0 none but context ranks")),
      choice("reduction", &P::reduction, {"ordered", "native"}, "\"native\"")
          .means("ordered: sums in rank order in fp32, with the same bits everywhere; native: the backend's "
                 "own reduce-scatter and all-reduce where it has them, and one rank accumulates in place: "
                 "faster, and the bits are not promised",
                 "sums as NCCL does", Concerns::training),
      real("timeout_seconds", &P::timeout_seconds, "30", 0, infinity, true)
          .means("deadline of every wait for another rank, a GPU or a drive; while ranks meet, a minute at "
                 "least. Of ranks in programs of your own it is what `launch()` was given "
                 "(`CommOptions::timeout_seconds`)",
                 Concerns::machine)};
}

Table<Parallel> parallel_table() {
  Table<Parallel> table{Auto::is_a_value, layer_keys()};
  append(table.keys, schedule_keys());
  append(table.keys, replica_keys());
  append(table.keys, foreign_keys<Parallel>("parallel"));
  return table;
}

/// A size of DeepSpeed's: 0 and 1 switch it off, which leaves the word to Sherd's own key.
Key<Config> tensor_size_key(const char* name) {
  return custom<Config>(name, "2",
                        [](Config& config, const Value& value) {
                          const std::int64_t size = value.integer(0, most_ranks);
                          if (size <= 1) return value.note("off");
                          set(config.parallel.tensor, tensor_size, static_cast<int>(size), value);
                        })
      .takes(integers(0))
      .with(by("`parallel.tensor`"));
}

Table<Config> tensor_parallel_table() {
  Table<Config> tp{Auto::is_a_value, {tensor_size_key("tp_size").means("the same as `autotp_size`")}};
  append(tp.keys, foreign_keys<Config>("tensor_parallel.tp"));
  Table<Config> table;
  for (const char* name : {"autotp_size", "tp_size"})
    table.keys.push_back(tensor_size_key(name).means(
        "`parallel.tensor`; 0 and 1: off",
        "cuts public models' layers by itself; here layers say how they are cut"));
  table.keys.push_back(section<Config>("tp", std::move(tp)).with(also("tensor_parallel")));
  append(table.keys, foreign_keys<Config>("tensor_parallel"));
  return table;
}

Key<Config> sequence_parallel_size_key() {
  return custom<Config>("sequence_parallel_size", "2",
                        [](Config& config, const Value& value) {
                          const int size = static_cast<int>(value.integer(1, most_ranks));
                          if (size == 1) return value.note("off");
                          set(config.parallel.context, context_size, size, value);
                          if (!value.context.given.contains(context_method))
                            config.parallel.context_method = ContextMethod::ulysses;
                        })
      .takes(integers(1))
      .means("`parallel.context`, with `context_method` ulysses unless that is given; 1: off",
             "loaders give each rank its piece; here whole sequences, which the model cuts",
             by("`parallel.context`"));
}

}  // namespace

Key<Config> parallel_key() {
  return section("parallel", &Config::parallel, parallel_table()).with(Concerns::run);
}

std::vector<Key<Config>> deepspeed_parallel_keys() {
  return {section<Config>("tensor_parallel", tensor_parallel_table()), sequence_parallel_size_key(),
          pipeline_key()};
}

Key<Config> mics_shard_size_key() {
  return custom<Config>("mics_shard_size", "4",
                        [](Config& config, const Value& value) {
                          const std::int64_t size = value.integer();
                          if (size <= 0) return value.note("off");
                          set(config.parallel.shard_size, shard_size, size, value);
                        })
      .takes(integers())
      .means("`parallel.shard_size` (MiCS), at stages 1 to 3; 0 or less: off", by("off"));
}

}  // namespace sherd::config
