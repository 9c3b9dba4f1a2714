// No configuration is too deep, too large or too long. Each such file is refused in a moment, in a few words.
#include <gmock/gmock.h>

#include <chrono>

#include "config/support.h"
#include "support/expect_error.h"
#include "support/temp_folder.h"

namespace sherd::config {
namespace {

using sherd::testing::expect_error;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

std::string repeated(const std::string& part, int times) {
  std::string out;
  for (int i = 0; i < times; ++i) out += part;
  return out;
}

/// An error of this text, in one short line and within a moment.
std::string brief_error_of(const std::string& text, const std::vector<std::string>& overrides = {}) {
  const auto begin = std::chrono::steady_clock::now();
  const std::string error = error_of(text, overrides);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
  EXPECT_NE(error, "");
  EXPECT_LT(error.size(), 1024u);
  EXPECT_THAT(error, Not(HasSubstr("\n")));
  return error;
}

TEST(Limits, NestingIsRefusedWhereItGoesTooDeep) {
  const std::string deep =
      "nested deeper than 64 levels, which no configuration needs; is this another file?";
  EXPECT_EQ(brief_error_of("{\n  \"a\": " + repeated("[", 300'000)), "run.json:2:71: " + deep);
  EXPECT_EQ(brief_error_of(repeated("{\"a\":", 300'000)), "run.json:1:321: " + deep);
  EXPECT_EQ(brief_error_of("{\"a\": " + repeated("[\n", 64) + repeated("]", 64) + "}"),
            "run.json:64:1: " + deep);
  EXPECT_THAT(brief_error_of("{\"a\": " + repeated("[", 63) + repeated("]", 63) + "}"),
              HasSubstr("unknown key \"a\""));
}

TEST(Limits, OverridesAreNoWayAroundThem) {
  EXPECT_THAT(brief_error_of("{}", {repeated("a.", 300'000) + "b=1"}),
              HasSubstr("the key path has more than 64 parts"));
  EXPECT_THAT(brief_error_of("{}", {"zero_optimization.stage=" + repeated("[", 300'000)}),
              HasSubstr("must be an integer from 0 to 3, not \"[[["));
  EXPECT_THAT(brief_error_of("{}", {repeated("a.", 63) + "b=" + repeated("[", 60) + repeated("]", 60)}),
              HasSubstr("unknown key \"a\""));
}

TEST(Limits, SizesAreBounded) {
  EXPECT_THAT(brief_error_of("{\"a\": [" + repeated("0,", 30'000) + "]}"),
              HasSubstr("more than 20000 values"));
  EXPECT_THAT(brief_error_of(std::string(20 << 20, ' ')), HasSubstr("larger than 16 MiB"));
  expect_error(ErrorKind::config, "/dev/zero: larger than 16 MiB", [] { parse_files({"/dev/zero"}); });
}

TEST(Limits, ManyUnknownKeysTakeNoTime) {
  std::string text = "{";
  for (int i = 0; i < 19'000; ++i) text += cat("\"unknown_key_", i, "\": 1,");
  const auto begin = std::chrono::steady_clock::now();
  const std::string error = error_of(text + "}");
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
  EXPECT_THAT(error, EndsWith("and 18970 more"));
}

TEST(Limits, LongTextsAreQuotedInPart) {
  const std::string x(7'000'000, 'x'), quoted = "\"" + x + "\"";
  EXPECT_THAT(brief_error_of("{" + quoted + ": 1}"), HasSubstr("unknown key \"xxxxx"));
  EXPECT_THAT(brief_error_of("{\"zero_optimization\": {" + quoted + ": 1}}"),
              HasSubstr("unknown key \"zero_optimization.xxxxx"));
  EXPECT_THAT(brief_error_of("{" + quoted + ": 1, " + quoted + ": 2}"),
              HasSubstr("is already given on line 1"));
  EXPECT_THAT(brief_error_of("{\"train_batch_size\": " + quoted + "}"),
              HasSubstr("must be an integer >= 1, not \"xxx"));
  EXPECT_THAT(brief_error_of("{\"optimizer\": {\"type\": " + quoted + "}}"), HasSubstr("at most 4096 bytes"));
  EXPECT_THAT(brief_error_of("{\"data\": {\"path\": " + quoted + "}}"),
              HasSubstr("data.path: must be a string of at most"));
  EXPECT_THAT(brief_error_of("{\"device\": {\"host_memory_limit\": " + quoted + "}}"),
              HasSubstr("must be bytes"));
  EXPECT_THAT(brief_error_of("{\"a\": " + x), HasSubstr("not valid JSON"));
  EXPECT_THAT(brief_error_of("{\"a\": \"" + x), HasSubstr("not valid JSON"));
  EXPECT_THAT(brief_error_of("{\"a\": " + std::string(10'000'000, '9') + "}"),
              StartsWith("run.json:1:10000007: not valid JSON: number overflow parsing '9999"));
  EXPECT_THAT(brief_error_of(x), HasSubstr("not valid JSON"));
  EXPECT_THAT(brief_error_of("{}", {x}), HasSubstr("an override has the form"));
  EXPECT_THAT(brief_error_of("{}", {x + "=1"}), HasSubstr("unknown key \"xxx"));
  EXPECT_THAT(brief_error_of("{}", {"train_batch_size=" + x}),
              HasSubstr("must be an integer >= 1, not \"xxx"));
  expect_error(ErrorKind::io, "cannot read the configuration xxx", [&] { parse_files({x}); });
}

TEST(Limits, ControlCharactersAreEscaped) {
  EXPECT_THAT(brief_error_of(R"({"a\u001b[2J\nb": 1})"), HasSubstr("unknown key \"a\\x1b[2J\\nb\""));
  EXPECT_THAT(brief_error_of("{}", {"training.steps=\x1b[2J"}), HasSubstr("--set training.steps=\\x1b[2J: "));
  EXPECT_THAT(brief_error_of("{}", {"training.save_dir=\xff"}), HasSubstr("not valid UTF-8"));
}

TEST(Limits, ModelsAreOfASizeThatCanBeCounted) {
  const auto with = [](const std::string& key, const std::string& value) {
    return error_of(R"({"model": {"seq_length": 8, "hidden_size": 64, "num_layers": 2, "num_heads": 2}})",
                    {"model." + key + "=" + value});
  };
  for (const auto& [key, most] : {std::pair{"num_layers", "2048"},
                                  {"hidden_size", "1048576"},
                                  {"num_heads", "65536"},
                                  {"seq_length", "16777216"},
                                  {"ffn_hidden_size", "4194304"},
                                  {"num_kv_heads", "65536"}})
    for (const char* value : {"1e8", "9223372036854775807"})
      EXPECT_THAT(with(key, value),
                  HasSubstr(cat("model.", key, ": must be an integer from 1 to ", most, ", not ")));
  EXPECT_THAT(with("vocab_size", "1e8"),
              HasSubstr("model.vocab_size: must be an integer from 0 to 16777216, not "));
  EXPECT_EQ(with("num_layers", "2048"), "");
}

}  // namespace
}  // namespace sherd::config
