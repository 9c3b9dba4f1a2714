#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <regex>
#include <sstream>

#include "config/json_tree.h"
#include "config/key_bases.h"
#include "config/keys.h"
#include "config/support.h"
#include "support/places.h"

// The JSON Schema of configuration files, held against a validator of its own: what the parser takes it
// admits, and what it refuses is an error to the parser, too. (Python's jsonschema 4.26 finds the same of the
// files below.)
namespace sherd::config {
namespace {

using Json = nlohmann::json;

/// The part of JSON Schema, draft 2020-12, that the schema uses. Other keywords are failures.
class Validator {
 public:
  /// Tells what is wrong with `value`, a line each.
  std::vector<std::string> errors(const Json& schema, const Json& value, const std::string& path) {
    errors_.clear();
    check(schema, value, path);
    return errors_;
  }

 private:
  bool admits(const Json& schema, const Json& value) { return Validator().errors(schema, value, "").empty(); }

  void check(const Json& schema, const Json& value, const std::string& path) {
    if (schema.is_boolean()) return expect(schema.get<bool>(), path, "is not allowed");
    for (const auto& [word, rule] : schema.items())
      expect(keyword(word, rule, schema, value, path), path, word + ": " + value.dump().substr(0, 60));
  }

  bool keyword(const std::string& word, const Json& rule, const Json& schema, const Json& value,
               const std::string& path) {
    const auto number = [&](auto holds) {
      return !value.is_number() || holds(value.get<double>(), rule.get<double>());
    };
    const auto size = [&](auto holds) {
      return !value.is_array() || holds(value.size(), rule.get<std::size_t>());
    };
    const auto any = [&](const Json& other) { return admits(other, value); };
    if (word == "type") return is_of(rule, value);
    if (word == "enum") return std::find(rule.begin(), rule.end(), value) != rule.end();
    if (word == "const") return value == rule;
    if (word == "not") return !admits(rule, value);
    if (word == "anyOf") return std::any_of(rule.begin(), rule.end(), any);
    if (word == "allOf") {
      for (const Json& one : rule) check(one, value, path);
      return true;
    }
    if (word == "if") {
      const char* next = admits(rule, value) ? "then" : "else";
      if (schema.contains(next)) check(schema[next], value, path);
      return true;
    }
    if (word == "minimum") return number(std::greater_equal<>());
    if (word == "maximum") return number(std::less_equal<>());
    if (word == "exclusiveMinimum") return number(std::greater<>());
    if (word == "exclusiveMaximum") return number(std::less<>());
    if (word == "multipleOf") return number([](double a, double b) { return std::fmod(a, b) == 0; });
    if (word == "minItems") return size(std::greater_equal<>());
    if (word == "maxItems") return size(std::less_equal<>());
    if (word == "minLength")
      return !value.is_string() || value.get<std::string>().size() >= rule.get<std::size_t>();
    if (word == "pattern")
      return !value.is_string() ||
             std::regex_search(value.get<std::string>(), std::regex(rule.get<std::string>()));
    if (word == "required")
      return !value.is_object() || std::all_of(rule.begin(), rule.end(), [&](const Json& name) {
        return value.contains(name.get<std::string>());
      });
    if (word == "properties") return properties(schema, value, path);
    if (word == "items") {
      for (std::size_t i = 0; value.is_array() && i < value.size(); ++i)
        check(rule, value[i], path + "[" + std::to_string(i) + "]");
      return true;
    }
    const std::vector<std::string> without_rule = {"$schema",
                                                   "title",
                                                   "description",
                                                   "default",
                                                   "deprecated",
                                                   "then",
                                                   "else",
                                                   "patternProperties",
                                                   "additionalProperties"};
    return std::find(without_rule.begin(), without_rule.end(), word) != without_rule.end();
  }

  static bool is_of(const Json& types, const Json& value) {
    if (types.is_array())
      return std::any_of(types.begin(), types.end(), [&](const Json& type) { return is_of(type, value); });
    const std::string type = types.get<std::string>();
    if (type == "integer") return value.is_number() && std::floor(value.get<double>()) == value.get<double>();
    return (type == "null" && value.is_null()) || (type == "boolean" && value.is_boolean()) ||
           (type == "number" && value.is_number()) || (type == "string" && value.is_string()) ||
           (type == "array" && value.is_array()) || (type == "object" && value.is_object());
  }

  /// With additionalProperties false beside them, all others but those of a pattern are errors.
  bool properties(const Json& schema, const Json& value, const std::string& path) {
    if (!value.is_object()) return true;
    for (const auto& [name, inner] : value.items()) {
      const std::string place = path.empty() ? name : path + "." + name;
      if (schema["properties"].contains(name)) {
        check(schema["properties"][name], inner, place);
        continue;
      }
      bool matched = !schema.contains("additionalProperties");
      if (schema.contains("patternProperties"))
        for (const auto& [pattern, rule] : schema["patternProperties"].items())
          matched = matched || std::regex_search(name, std::regex(pattern));
      expect(matched, place, "is no key");
    }
    return true;
  }

  void expect(bool good, const std::string& path, const std::string& what) {
    if (!good) errors_.push_back(path + ": " + what);
  }

  std::vector<std::string> errors_;
};

const Json& schema() {
  static const Json all = Json::parse(json_schema());
  return all;
}

std::vector<std::string> errors_in(const std::string& text, const std::vector<std::string>& overrides = {}) {
  Node tree = parse_tree(text, "run.json");
  for (const std::string& assignment : overrides) apply_override(tree, assignment);
  return Validator().errors(schema(), Json::parse(tree.json()), "");
}

std::string text_of(const std::filesystem::path& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

TEST(Schema, AdmitsEveryExampleInConfigs) {
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(SHERD_SOURCE_DIR "/configs")) {
    if (entry.path().extension() != ".json") continue;
    ++files;
    EXPECT_THAT(errors_in(text_of(entry.path())), ::testing::IsEmpty()) << entry.path();
    EXPECT_THAT(errors_in(dump(parse_text(text_of(entry.path())))), ::testing::IsEmpty()) << entry.path();
  }
  EXPECT_GE(files, 10);
}

// Each key is tried where the parser's own tests try it.
TEST(Schema, HasEveryKeyWithItsValues) {
  for (const KeyInfo& key : known_keys()) {
    const std::string base = base_for(key.path), set = plain(key.path) + "=" + key.example;
    SCOPED_TRACE(set);
    if (key.effect == Effect::refused) {
      EXPECT_THAT(errors_in(base, {set}), ::testing::Not(::testing::IsEmpty()));
      continue;
    }
    EXPECT_THAT(errors_in(base, {set}), ::testing::IsEmpty());
    EXPECT_THAT(errors_in(dump(parse_text(base, "run.json", {set}))), ::testing::IsEmpty());
    EXPECT_THAT(errors_in(base, {plain(key.path) + "y=1"}), ::testing::Not(::testing::IsEmpty()));
    const auto wrong = errors_in(base, {plain(key.path) + "=[[[]]]"});
    EXPECT_TRUE(key.values == "anything" || key.effect == Effect::noted || !wrong.empty());
  }
}

TEST(Schema, DescribesEveryKey) {
  const Json& stage = schema()["properties"]["zero_optimization"]["properties"]["stage"];
  EXPECT_EQ(stage["default"], 0);
  EXPECT_EQ(stage["anyOf"][0]["minimum"], 0);
  EXPECT_EQ(stage["anyOf"][0]["maximum"], 3);
  const std::string text = json_schema();
  for (const KeyInfo& key : known_keys())
    EXPECT_NE(text.find(Json(key.meaning).dump().substr(1, key.meaning.size() / 2)), std::string::npos)
        << key.path;
}

TEST(Schema, RefusesWhatTheParserRefuses) {
  for (const char* text :
       {R"({"zero_optimization": {"stage": 4}})", R"({"zero_optimization": {"stage": 1.5}})",
        R"({"zero_optimization": {"stge": 1}})", R"({"model": {"seq_length": 8}})",
        R"({"data": {"shuffle": true}})", R"({"data": {"sources": [{"weight": 1}]}})",
        R"({"optimizer": {"type": "Lion", "params": {"eps": 1e-8}}})", R"({"optimizer": {"type": "Rprop"}})",
        R"({"optimizer": {"type": "Adam", "params": {"betas": [0.9, 1]}}})",
        R"({"optimizer": {"type": "Adam", "groups": [{"match": "a", "lrr": 1}]}})",
        R"({"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1}}})",
        R"({"amp": {"enabled": true}})", R"({"training": {"adapter": {"rank": 4}}})",
        R"({"aio": {"block_size": 5000}})", R"({"device": {"host_memory_limit": true}})"}) {
    EXPECT_NE(error_of(text), "") << text;
    EXPECT_THAT(errors_in(text), ::testing::Not(::testing::IsEmpty())) << text;
  }
}

TEST(Schema, AdmitsNotesAndFormsOfSections) {
  for (const char* text :
       {R"({"$schema": "sherd.schema.json", "_note": 1, "model": {"comment": "x", "seq_length": 8,
           "hidden_size": 8, "num_layers": 1, "num_heads": 1}})",
        R"({"zero_optimization": true, "optimizer": null})", R"({"wandb": {"enabled": true, "team": "a"}})",
        R"({"data": {"sources": [{"path": "a", "weight": 1}]}, "amp": {"enabled": false}})",
        R"({"optimizer": {"type": "Adam", "params": {"lr": "auto"}, "groups": [{"match": "a", "eps": 1}]}})",
        R"({"training": {"init_from": "models/a"}, "model": {"seq_length": 8}})"}) {
    EXPECT_THAT(errors_in(text), ::testing::IsEmpty()) << text;
    EXPECT_TRUE(error_of(text).empty() || std::string(text).find("init_from") != std::string::npos)
        << error_of(text);
  }
}

}  // namespace
}  // namespace sherd::config
