#include <gmock/gmock.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <sstream>

#include "config/key_bases.h"
#include "config/keys.h"
#include "config/sections/tables.h"
#include "config/support.h"
#include "support/places.h"

// The page of keys says something of each, and it is so.
namespace sherd::config {
namespace {

using ::testing::HasSubstr;
using Values = std::map<std::string, std::string>;

std::string type_of(const std::string& path) {
  const auto open = path.find('[');
  return open == std::string::npos ? "" : path.substr(open + 1, path.find(']') - open - 1);
}

TEST(KeysPage, EveryKeyHasAText) {
  for (const KeyInfo& key : known_keys()) {
    EXPECT_FALSE(key.meaning.empty())
        << "the key \"" << key.path << "\" has no text: say what it is with means()";
    for (const std::string& text : {key.meaning, key.difference, key.derived}) {
      EXPECT_EQ(text.find('\n'), std::string::npos) << key.path << ": a text is one line";
      EXPECT_FALSE(text.ends_with(".")) << key.path << ": a text has no full stop: " << text;
    }
    EXPECT_FALSE(key.effect == Effect::effective && key.values.empty() && key.choices.empty())
        << key.path << ": say what it takes, with takes() or one_of()";
  }
}

/// The values where only `more` and what is required is given, in the key's own type of optimizer or
/// schedule.
Values values_of(const std::string& type_path, const std::vector<std::string>& more) {
  std::vector<std::string> given;
  for (const KeyInfo& key : known_keys())
    if (key.required && (type_of(key.path).empty() || key.path.starts_with(type_path + "].")))
      given.push_back(plain(key.path) + "=" + key.example);
  for (const char* rope : {"model.rope_scaling", "model.sliding_rope.rope_scaling"})
    given.push_back(cat(rope, ".rope_type=\"yarn\""));
  if (!type_path.empty())
    given.push_back(type_path.substr(0, type_path.find('[')) + ".type=\"" + type_of(type_path + "]") + "\"");
  given.insert(given.end(), more.begin(), more.end());
  return every_value(parse_text("{}", "defaults", given));
}

/// Values other than the default of keys on which defaults of others depend, by section[type.
std::vector<std::string> changes(const std::string& type_path) {
  if (type_path == "scheduler[OneCycle")
    return {"scheduler.params.cycle_first_step_size=7", "scheduler.params.cycle_first_stair_count=3"};
  if (!type_path.empty()) return {"model.dropout=0.25"};
  return {"model.seq_length=32", "model.hidden_size=128", "model.num_heads=4",        "model.dropout=0.25",
          "model.bias=false",    "model.moe.top_k=1",     "zero_optimization.stage=3"};
}

/// The values of a key of `section` in both cases; nothing where dump() has no value.
struct Shown {
  std::string plain, changed;
};

Shown shown_of(const std::string& section, const std::string& path) {
  static std::map<std::string, std::pair<Values, Values>> of_sections;
  if (!of_sections.contains(section))
    of_sections[section] = {values_of(section, {}), values_of(section, changes(section))};
  const auto value = [&](const Values& values) {
    const auto found = values.find(path);
    return found == values.end() || found->second == "null" ? std::string() : found->second;
  };
  return {value(of_sections[section].first), value(of_sections[section].second)};
}

// A key either has one default, which dump() shows, or says in words what it goes by, and does.
TEST(KeysPage, DefaultsAreThoseOfTheParser) {
  for (const KeyInfo& key : known_keys()) {
    if (key.effect != Effect::effective || key.required || key.argument) continue;
    SCOPED_TRACE(key.path);
    const std::string section = key.path.substr(0, type_of(key.path).empty() ? 0 : key.path.find(']'));
    const std::string path = plain(key.path);
    const Shown shown = shown_of(section, path);
    const std::vector<std::string> changed = changes(section);
    const bool is_changed = std::any_of(changed.begin(), changed.end(),
                                        [&](const auto& one) { return one.starts_with(path + "="); });
    if (key.derived.empty()) {
      ASSERT_NE(shown.plain, "") << "has no default that dump() shows: say it with by_default()";
      EXPECT_TRUE(is_changed || shown.plain == shown.changed)
          << shown.plain << ", " << shown.changed << ": depends on other keys: say how with by_default()";
    } else if (!shown.plain.empty() && shown.plain != "\"\"") {
      EXPECT_TRUE(!is_changed && shown.plain != shown.changed)
          << "is always this: leave it to dump(), without by_default()";
    }
  }
}

TEST(KeysPage, RequiredKeysAre) {
  int count = 0;
  for (const KeyInfo& key : known_keys()) {
    if (!key.required) continue;
    ++count;
    SCOPED_TRACE(key.path);
    const std::string path = plain(key.path), name = path.substr(path.rfind('.') + 1);
    EXPECT_THAT(error_of(base_for(key.path), {path + "=null"}), HasSubstr(name));
  }
  EXPECT_GE(count, 10);
}

// Page and error messages have one source for ranges and choices; whoever reads by other means is found here.
TEST(KeysPage, ValuesAreThoseOfTheErrors) {
  for (const KeyInfo& key : known_keys()) {
    if (key.effect != Effect::effective || key.values == "list of objects" ||
        key.values == "list of sections")
      continue;
    SCOPED_TRACE(key.path);
    const bool words = !key.choices.empty();
    const std::string message =
        error_of(base_for(key.path), {plain(key.path) + (words ? "=\"no such word\"" : "=[[]]")});
    for (const std::string& word : key.choices) EXPECT_THAT(message, HasSubstr(word));
    const bool list = key.values.starts_with("two ") || key.values.starts_with("three ");
    const std::string values = key.values.substr(0, key.values.find(','));
    EXPECT_TRUE(words || list || message.find(values) != std::string::npos) << values << " in " << message;
    EXPECT_THAT(message, HasSubstr(plain(key.path)));
  }
}

TEST(KeysPage, ArgumentsOfTheTrainerHaveTheirDefaults) {
  const Config config = parse_text(R"({"training": {"steps": 100, "weight_decay": 0.1}})");
  EXPECT_EQ(config.optimizer.lr, 5e-5);
  EXPECT_EQ(config.batch.micro_batch_size, 8);
  EXPECT_THAT(keys_page(), HasSubstr("| `learning_rate` | number >= 0 | `5e-5` |"));
  EXPECT_THAT(keys_page(), HasSubstr("also `micro_batch_size` | integer >= 1 | `8` |"));
}

TEST(KeysPage, TellsDefaultsByType) {
  const std::string page = keys_page();
  EXPECT_THAT(page, HasSubstr("| `dropout` | number from 0 to 0.99 | gpt2 `0.1`; bert `0.1`; others `0` |"));
  EXPECT_THAT(page, HasSubstr("| `Lion` | `lr` = `0.0001`, `weight_decay` = `0`, `betas` = `[0.9, 0.99]` |"));
  EXPECT_THAT(page, HasSubstr("| `reduce_bucket_size` | integer >= 0 | `5e8` |"));
  EXPECT_EQ(page.find("= ,"), std::string::npos) << "a key of a type has no default";
}

TEST(KeysPage, HasEveryKey) {
  const std::string page = keys_page();
  for (const KeyInfo& key : known_keys()) {
    const bool own_table = key.effect == Effect::effective;
    const std::string path = plain(key.path), name = own_table ? path.substr(path.rfind('.') + 1) : path;
    EXPECT_THAT(page, HasSubstr("| `" + name + "`")) << key.path;
    for (const std::string& alias : key.aliases) EXPECT_THAT(page, HasSubstr("`" + alias + "`"));
    EXPECT_THAT(page, HasSubstr(key.meaning)) << key.path;
  }
}

TEST(KeysPage, IsWhatTheDocumentsHold) {
  std::ostringstream held;
  held << std::ifstream(SHERD_SOURCE_DIR "/docs/keys.md").rdbuf();
  std::istringstream page(keys_page()), document(held.str());
  std::string wanted, found;
  int line = 1;
  while (std::getline(page, wanted) && std::getline(document, found) && wanted == found) ++line;
  EXPECT_TRUE(held.str() == keys_page())
      << "docs/keys.md differs from the tables of keys at line " << line << ":\n  keys: " << wanted
      << "\n  page: " << found << "\nWrite it anew: build/sherd info --keys > docs/keys.md";
}

}  // namespace
}  // namespace sherd::config
