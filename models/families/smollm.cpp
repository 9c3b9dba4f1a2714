#include "models/families/family.h"

// SmolLM3: Llama of which one layer in four has no rotary positions.
namespace sherd::models {
namespace {

using M = config::Model;
using config::Node;
using config::Value;

/// 0 for each layer without rotary positions, which must be the last of each so many.
JsonKey no_rope_layers() {
  const auto read = [](Published& p, const Value& value) {
    value.expect(Node::Kind::array);
    std::int64_t layers = 0, interval = 0;
    for (std::size_t i = 0; i < value.node.items.size(); ++i) {
      ++layers;
      const bool none = value.item(i).integer(0, 1) == 0;
      if (none && interval == 0) interval = layers;
      if (none != (interval > 0 && layers % interval == 0))
        value.error(
            "is not supported: layers without rotary positions must be each n-th one, as in [1, 1, 0, 1, 1, "
            "0]");
    }
    p.listed_no_rope_interval = interval, p.no_rope_layers = layers;
  };
  const auto write = [](const Published& p) {
    std::vector<std::int64_t> out;
    for (std::int64_t i = 0; i < p.model.num_layers; ++i) out.push_back(p.model.rotates(i) ? 1 : 0);
    return config::list_of(out);
  };
  return config::custom<Published>("no_rope_layers", "", read, write);
}

/// Which no_rope_layers goes before, wherever it stands.
JsonKey interval_key() {
  const auto interval = [](const Published& p) {
    return p.model.no_rope_layer_interval > 0 ? config::node_of(p.model.no_rope_layer_interval) : Node();
  };
  return whole("no_rope_layer_interval", &M::no_rope_layer_interval, 1, config::most_layers)
      .written(interval);
}

}  // namespace

Family smollm3() {
  return {
      .name = "smollm3",
      .architecture = "SmolLM3ForCausalLM",
      .class_defaults =
          [](Published& p) {
            set_sizes(p.model, {128256, 2048, 11008, 36, 16, 4, 32768});
            p.use_sliding_window = false;
          },
      .keys = joined(decoder_sizes(), no_biases(true, true), rope_keys(), window_keys(),
                     JsonKeys{no_rope_layers(), interval_key(),
                              only("use_sliding_window", config::is_false,
                                   "layers with a window are not supported in this family"),
                              idle("max_window_layers")}),
      .has = {"no_rope_layer_interval"},
      .gguf = {
          .architecture = "smollm3", .pairs = true, .lacks = [](const M& m) -> std::optional<std::string> {
            if (m.no_rope_layer_interval != 4) return "model.no_rope_layer_interval that is not 4";
            return std::nullopt;
          }}};
}

}  // namespace sherd::models
