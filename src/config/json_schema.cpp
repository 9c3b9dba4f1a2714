#include <algorithm>

#include "config/json_tree.h"
#include "config/key_defaults.h"

// The tree of keys as a JSON Schema, for editors.
namespace sherd::config {
namespace {

using Members = std::vector<std::pair<std::string, Node>>;

constexpr const char* draft = "https://json-schema.org/draft/2020-12/schema";
constexpr const char* title = "Configuration of Sherd";
constexpr const char* about =
    "DeepSpeed's keys, and the sections model, data, training, parallel and device. Words are completed as "
    "they are written here; Sherd takes them in any case, and numbers in quotes.";

Node fragment(const std::string& text) {
  Node out;
  require(parse_value(text, out), "not JSON: ", text);
  return out;
}

Node any() {
  return node_of(true);
}

Node array_of(std::vector<Node> items) {
  Node out;
  out.kind = Node::Kind::array, out.items = std::move(items);
  return out;
}

/// `schema`, or null, which means that the key is absent, or "auto".
Node or_absent(Node schema, const KeyInfo& key) {
  std::vector<Node> others;
  if (!key.required) others.emplace_back();
  if (key.takes_auto) others.push_back(node_of("auto"));
  if (others.empty()) return schema;
  if (Node* words = schema.find("enum")) {
    words->items.insert(words->items.end(), others.begin(), others.end());
    return schema;
  }
  if (Node* type = schema.find("type"); type && !key.takes_auto && type->is(Node::Kind::string)) {
    *type = list_of(std::vector<std::string>{type->text, "null"});
    return schema;
  }
  return node_of({{"anyOf", array_of({std::move(schema), node_of({{"enum", array_of(others)}})})}});
}

class Schema {
 public:
  Node whole() const;

 private:
  Node of(const KeyInfo& key, const std::string& path) const;
  Node leaf(const KeyInfo& key, const std::string& path) const;
  Node without_effect(const KeyInfo& key) const;
  Node object(const KeyInfo& section, const std::string& path) const;

  KeyDefaults defaults_;
};

std::string description_of(const KeyInfo& key) {
  const char* nothing = key.effect == Effect::noted ? ". Without effect: " : ". Refused, unless it is off: ";
  return cat(
      key.meaning, key.effect == Effect::effective ? "" : cat(nothing, key.reason),
      key.derived.empty() ? "" : cat(". Default: ", key.derived),
      key.difference.empty() ? "" : cat(key.argument ? ". transformers: " : ". DeepSpeed: ", key.difference));
}

Node Schema::leaf(const KeyInfo& key, const std::string& path) const {
  Node out = or_absent(fragment(key.schema), key);
  KeyInfo placed = key;
  placed.path = path;
  if (const std::string value = defaults_.of(placed); !value.empty())
    out.members.emplace_back("default", fragment(value));
  return out;
}

/// A key or section of DeepSpeed's that sets nothing: which keys it has, and what is accepted.
Node Schema::without_effect(const KeyInfo& key) const {
  Node out = key.schema.empty() ? node_of(Members()) : or_absent(fragment(key.schema), key);
  if (key.below.empty()) return out;
  const Node off = fragment(R"({"enum": [false, null, "auto"]})");
  const bool has_switch = std::any_of(key.below.begin(), key.below.end(),
                                      [](const KeyInfo& below) { return below.name == "enabled"; });
  Members keys;
  for (const KeyInfo& below : key.below) {
    Node rule = any();
    if (key.effect == Effect::refused && below.name == "enabled") rule = off;
    if (key.effect == Effect::refused && !has_switch)
      rule = node_of({{"properties", node_of({{"enabled", off}})}});
    keys.emplace_back(below.name, std::move(rule));
  }
  out.members.emplace_back("properties", node_of(std::move(keys)));
  out.members.emplace_back("additionalProperties", node_of(false));
  return out;
}

Node Schema::of(const KeyInfo& key, const std::string& path) const {
  Node out;
  if (key.effect != Effect::effective) {
    out = without_effect(key);
  } else if (key.is_list) {
    out = or_absent(node_of({{"type", node_of("array")}, {"items", object(key, path)}}), key);
  } else if (key.below.empty()) {
    out = leaf(key, path);
  } else {
    out = object(key, path);
    Node& type = *out.find("type");
    type = key.schema.empty() ? list_of(std::vector<std::string>{"object", "null"})
                              : list_of(std::vector<std::string>{"object", "boolean", "null"});
  }
  if (const std::string text = description_of(key); !text.empty())
    out.members.emplace_back("description", node_of(text));
  if (key.effect != Effect::effective) out.members.emplace_back("deprecated", node_of(true));
  return out;
}

/// Keys that are required: "required", or "anyOf" where another key of the section may stand in place of one.
void put_required(const std::vector<KeyInfo>& keys, Node& out) {
  std::vector<std::string> names;
  for (const KeyInfo& key : keys) {
    if (!key.required || !key.derived.empty()) continue;
    if (key.instead.empty()) {
      names.push_back(key.name);
    } else {
      const auto needs = [](const std::string& name) {
        return node_of({{"required", array_of({node_of(name)})}});
      };
      out.members.emplace_back("anyOf", array_of({needs(key.name), needs(key.instead)}));
    }
  }
  if (!names.empty()) out.members.emplace_back("required", list_of(names));
}

Node Schema::object(const KeyInfo& section, const std::string& path) const {
  Members keys;
  std::vector<Node> by_type;
  for (const KeyInfo& key : section.below) {
    if (key.type.empty()) {
      const Node one = of(key, path.empty() ? key.name : path + "." + key.name);
      keys.emplace_back(key.name, one);
      for (const std::string& alias : key.aliases) keys.emplace_back(alias, one);
      continue;
    }
    if (by_type.empty()) keys.emplace_back(key.name, node_of({{"type", fragment(R"(["object", "null"])")}}));
    const Node named = node_of({{"const", node_of(key.type)}});
    by_type.push_back(node_of(
        {{"if", node_of({{"properties", node_of({{"type", named}})}, {"required", fragment(R"(["type"])")}})},
         {"then", node_of({{"properties",
                            node_of({{key.name, of(key, cat(path, "[", key.type, "].", key.name))}})}})}}));
  }
  Node out = node_of({{"type", node_of("object")},
                      {"properties", node_of(std::move(keys))},
                      {"patternProperties", node_of({{note_pattern, any()}})},
                      {"additionalProperties", node_of(false)}});
  if (!by_type.empty()) out.members.emplace_back("allOf", array_of(std::move(by_type)));
  if (path != "model") put_required(section.below, out);
  return out;
}

Node Schema::whole() const {
  const KeyInfo& all = all_keys();
  Node out = object(all, "");
  out.members.insert(
      out.members.begin(),
      {{"$schema", node_of(draft)}, {"title", node_of(title)}, {"description", node_of(about)}});
  // Weights to begin from bring their own section model.
  Node model = node_of(Members());
  for (const KeyInfo& section : all.below)
    if (section.name == "model") put_required(section.below, model);
  out.members.emplace_back("if", fragment(R"({"properties": {"training": {"required": ["init_from"]}},
                                              "required": ["training"]})"));
  out.members.emplace_back("else", node_of({{"properties", node_of({{"model", std::move(model)}})}}));
  return out;
}

}  // namespace

std::string json_schema() {
  return Schema().whole().json(2) + "\n";
}

}  // namespace sherd::config
