// Keys of training.adapter that bottleneck adapters have.
#include <algorithm>
#include <cctype>
#include <cmath>

#include "base/text/excerpt.h"
#include "config/sections/tables.h"

namespace sherd::config {
namespace {

using B = BottleneckKeys;

/// AdapterHub's names, in the order of NonLinearity.
const std::vector<std::string> non_linearities{"swish", "relu", "gelu", "gelu_new", "tanh"};
const Synonyms same_non_linearities{{"silu", "swish"}};

}  // namespace

std::vector<Key<BottleneckKeys>> bottleneck_keys() {
  std::vector<Key<B>> keys = {
      boolean("mh_adapter", &B::attention).means("`bottleneck` adapters behind attention"),
      boolean("output_adapter", &B::mlp).means("`bottleneck` adapters behind the feed-forward part"),
      choice("non_linearity", &B::non_linearity, non_linearities, "\"relu\"", same_non_linearities)
          .means("within; `gelu_new` is the tanh approximation of `gelu`", Concerns::training),
      real("scaling", &B::scale, "4")
          .means("what a `bottleneck` gives is multiplied by it", Concerns::training),
      boolean("original_ln_before", &B::of_sum)
          .means("a `bottleneck` reads the stream that its part of the block was added to, not what the part "
                 "gave",
                 Concerns::training),
      text("name", &B::name, "\"task\"").means("what AdapterHub's files call the adapter"),
      integer("bottleneck_size", &B::size, "64", 1, most_hidden)
          .unset(0)
          .means("features in a `bottleneck`", by("`model.hidden_size` / `reduction_factor`")),
      real("reduction_factor", &B::reduction_factor, "8", 0, infinity, true)
          .means("the model's width divided by it is that of a `bottleneck`'s network")};
  keys.back().left_out = [](const B& bottleneck) { return bottleneck.size > 0; };
  append(keys, foreign_keys<B>("training.adapter", "bottleneck"));
  return keys;
}

void finish_bottleneck(const B& keys, const Given& given, const Value& section) {
  if (!keys.attention && !keys.mlp)
    section.error("has neither \"mh_adapter\" nor \"output_adapter\": one of them must be true");
  if (given.contains("bottleneck_size") && given.contains("reduction_factor"))
    section.error("gives both \"bottleneck_size\" and \"reduction_factor\": take one of them away");
  const bool plain = std::none_of(keys.name.begin(), keys.name.end(),
                                  [](unsigned char c) { return c == '.' || std::iscntrl(c) != 0; });
  if (keys.name.empty() || !plain)
    section.error("the adapter's \"name\" is a part of tensors' names, and has no '.', not ",
                  excerpt(keys.name));
}

/// hidden // factor as Python has it: of the exact quotient.
std::int64_t BottleneckKeys::width(std::int64_t hidden) const {
  if (size > 0) return size;
  const auto all = static_cast<double>(hidden);
  const double part = (all - std::fmod(all, reduction_factor)) / reduction_factor;
  return std::max<std::int64_t>(1, std::llround(part));
}

void read_bottleneck(BottleneckKeys& keys, const Value& section, const std::vector<const char*>& needed) {
  Table<B> table;
  table.keys = bottleneck_keys();
  const Given given = read_section(table, keys, section);
  for (const char* key : needed)
    if (!given.contains(key)) section.error("needs \"", key, "\"");
  finish_bottleneck(keys, given, section);
}

bool has_bottleneck_key(const std::string& name) {
  const std::vector<Key<B>> keys = bottleneck_keys();
  return std::any_of(keys.begin(), keys.end(), [&](const Key<B>& key) { return key.name == name; });
}

std::string_view name_of(NonLinearity kind) {
  return non_linearities[static_cast<std::size_t>(kind)];
}

}  // namespace sherd::config
