// Chat templates against what transformers' own environment makes of them;
// scripts/references/make_jinja_reference.py made the reference and says how to give it others.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <nlohmann/json.hpp>

#include "data/jinja/template.h"
#include "support/expect_error.h"
#include "support/places.h"
#include "support/temp_folder.h"

namespace sherd::data::jinja {
namespace {

using Json = nlohmann::ordered_json;
using testing::expect_error;

Value value_of(const Json& json) {
  if (json.is_null()) return None{};
  if (json.is_boolean()) return json.get<bool>();
  if (json.is_number_integer()) return json.get<std::int64_t>();
  if (json.is_number()) return json.get<double>();
  if (json.is_string()) return json.get<std::string>();
  if (json.is_array()) {
    List items;
    for (const Json& item : json) items.push_back(value_of(item));
    return Value::list(std::move(items));
  }
  Dict items;
  for (const auto& [key, item] : json.items()) items.emplace_back(key, value_of(item));
  return Value::dict(std::move(items));
}

std::string rendered(const std::string& text, const Dict& names = {}) {
  return Template(text).render(names);
}

void expect_case(const Json& one, const Json& names) {
  SCOPED_TRACE(one.value("name", one.at("template").get<std::string>().substr(0, 200)));
  const Dict given = value_of(names).mapping().items;
  const auto run = [&] { return rendered(one.at("template").get<std::string>(), given); };
  if (one.contains("error")) {
    EXPECT_THROW(run(), Error) << one.at("error");
    return;
  }
  std::string got;
  ASSERT_NO_THROW(got = run());
  EXPECT_EQ(got, one.at("text").get<std::string>());
}

TEST(Jinja, WritesWhatTransformersWrites) {
  const Json all = Json::parse(
      testing::read_text(std::filesystem::path(SHERD_SOURCE_DIR) / "tests/data/reference/jinja.json"));
  for (const Json& one : all.at("cases")) expect_case(one, all.at("names"));
  EXPECT_GT(all.at("cases").size(), 300U);
  if (const char* more = std::getenv("SHERD_JINJA_CASES"))
    for (const Json& one : Json::parse(testing::read_text(more))) expect_case(one, one.at("names"));
}

TEST(Jinja, MarksWhatIsGenerated) {
  const Template made(
      "{% for m in [1, 2] %}q{{ m }}{% generation %}a{{ m }}{% endgeneration %};{% endfor %}");
  EXPECT_TRUE(made.marks_answers());
  EXPECT_FALSE(Template("{{ 1 }}").marks_answers());
  std::vector<Generated> parts;
  const std::string text = made.render({}, &parts);
  EXPECT_EQ(text, "q1a1;q2a2;");
  ASSERT_EQ(parts.size(), 2U);
  EXPECT_EQ(text.substr(parts[1].begin, parts[1].end - parts[1].begin), "a2");
}

TEST(Jinja, ErrorsNameLineAndCause) {
  const auto fails = [](const std::string& text, const std::string& part) {
    expect_error(ErrorKind::data, part, [&] { rendered(text, {{"x", std::int64_t{1}}}); });
  };
  fails("a\nb {{ y.z }}", "line 2: 'y' is undefined");
  fails("{% for a in [1] %}\n{{ raise_exception('Only ' ~ a) }}{% endfor %}", "line 2: Only 1");
  fails("\n\n{% include 'a' %}", "line 3: Sherd does not know the statement 'include' of Jinja");
  fails("{{ x | wordwrap }}", "Sherd does not know the filter 'wordwrap' of Jinja; there are abs, attr");
  fails("{{ x is filter }}", "Sherd does not know the test 'filter' of Jinja; there are !=");
  fails("{% if x %}\n{% for a in [x] %}", "line 2: the block that begins here has no 'endfor'");
  fails("{{ x.y() }}", "'y' is 'y', which is undefined, and is called");
  fails("{{ x + 'a' }}", "+ does not take an integer and a string");
  fails("{{ [x].append(2) }}", "append() is not allowed");
  fails("{{ 'a }}", "line 1: the string that begins here has no end");
  fails("{{ x $ 1 }}", "'$' is no part of an expression");
  fails("{{ x", "what begins here with '{{' has no end");
}

/// Nothing that a file holds takes the machine with it.
TEST(Jinja, TemplatesThatDoNotEndAreErrors) {
  const auto fails = [](const std::string& text, const std::string& part) {
    expect_error(ErrorKind::data, part, [&] { rendered(text); });
  };
  fails("{{ " + std::string(100000, '(') + "1" + std::string(100000, ')') + " }}", "too deep");
  fails("{{ " + std::string(100000, '-') + "1 }}", "too deep");
  std::string blocks;
  for (int i = 0; i < 10000; ++i) blocks += "{% if 1 %}";
  fails(blocks, "too deep");
  fails("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "more than 200 calls lie within each other");
  fails("{{ range(1000000000) }}", "more than a million items");
  fails("{{ 'a' * 100000000000 }}", "repeated beyond 256 MiB");
  fails("{% set n = namespace(s='aaaaaaaa') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
        "a text has more than 256 MiB");
  fails("{% for i in range(1000000) %}{{ range(1000000) | length }}{% endfor %}", "does not end");
  fails("{% set r = range(1000000) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
        "does not end");
  fails("{{ 9223372036854775807 }}", "beyond 64 bits");
  fails("{{ 999999999999999999 * 999999999999999999 }}", "an integer is beyond 64 bits");
  fails("{% set d = {} %}{% set n = namespace(a=d) %}{% set n.a = n %}{{ n.a | tojson }}",
        "in more than 100 others");
}

/// A macro sees the names around the place where it was made, also behind the end of that place.
TEST(Jinja, MacrosOutliveTheirPlace) {
  EXPECT_EQ(rendered("{% set n = namespace() %}{% for a in [1, 2] %}{% macro f() %}{{ a }}{% endmacro %}"
                     "{% set n.f = f %}{% endfor %}{{ n.f() }}"),
            "2");
}

TEST(Jinja, TheDateIsOfThisMachine) {
  EXPECT_EQ(rendered("{{ strftime_now('%Y') }}").size(), 4U);
}

}  // namespace
}  // namespace sherd::data::jinja
