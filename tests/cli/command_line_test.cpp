#include "cli/command_line.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace sherd::cli {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::internal::CaptureStdout;
using ::testing::internal::GetCapturedStdout;

CommandLine example() {
  CommandLine line("train", "Trains.", "--config F...");
  line.list("config", "F", "files")
      .value("steps", "N", "how many", "7")
      .value("lr", "X", "rate")
      .flag("resume", "go on");
  line.list("set", "A=B", "overrides").rest_to("config");
  return line;
}

void expect_usage_error(
    const std::vector<std::string>& arguments, const std::string& part,
    void (*use)(const CommandLine&) = [](const CommandLine&) {}) {
  CommandLine line = example();
  try {
    line.parse(arguments);
    use(line);
    ADD_FAILURE() << "no error";
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), HasSubstr(part));
    EXPECT_THAT(error.what(), HasSubstr("See 'sherd train --help'"));
  }
}

TEST(CommandLine, ReadsEveryKind) {
  CommandLine line = example();
  ASSERT_TRUE(line.parse({"--config", "a,b.json", "c.json", "--resume", "--set", "x.y=[1,2]", "--set=z=3",
                          "d.json", "--lr=-1e-3"}));
  EXPECT_THAT(line.all("config"), ElementsAre("a,b.json", "c.json", "d.json"));
  EXPECT_THAT(line.all("set"), ElementsAre("x.y=[1,2]", "z=3"));
  EXPECT_TRUE(line.has("resume"));
  EXPECT_EQ(line.integer("steps", 1), 7);
  EXPECT_FALSE(line.has("steps"));
  EXPECT_EQ(line.number("lr"), -1e-3);
}

TEST(CommandLine, ArgumentsMayBeLong) {
  const std::string x(1'000'000, 'x');
  CommandLine line = example();
  ASSERT_TRUE(line.parse({"--set=a=" + x, "--lr", x, x}));
  EXPECT_THAT(line.all("set"), ElementsAre("a=" + x));
  EXPECT_EQ(line.text("lr"), x);
  EXPECT_THAT(line.all("config"), ElementsAre(x));
}

TEST(CommandLine, DefaultsAndAbsence) {
  CommandLine line = example();
  ASSERT_TRUE(line.parse({}));
  EXPECT_FALSE(line.has("resume"));
  EXPECT_EQ(line.text("lr"), "");
  EXPECT_TRUE(line.all("config").empty());
}

TEST(CommandLine, AmountsHaveUnits) {
  CommandLine line = example();
  ASSERT_TRUE(line.parse({"--steps", "3,2k,1M,4GiB", "--lr", "50M"}));
  EXPECT_THAT(line.amounts("steps", 3, 1024), ElementsAre(3, 2048, 1 << 20, std::int64_t{4} << 30));
  EXPECT_EQ(line.amount("lr", 1, 1000), 50'000'000);
  for (const char* wrong :
       {"k", "1.5k", "2x", "2kk", "2ki", "9999999T", "99999999999999999999", ",1", "1,,2", ""})
    expect_usage_error({"--steps", wrong}, "--steps",
                       [](const CommandLine& l) { l.amounts("steps", 0, 1024); });
  expect_usage_error({"--steps", "1k,2"}, "at least 3, not 2",
                     [](const CommandLine& l) { l.amounts("steps", 3, 1024); });
  expect_usage_error({"--steps", "1,2"}, "--steps takes one number, not '1,2'",
                     [](const CommandLine& l) { l.amount("steps", 0, 1024); });
}

TEST(CommandLine, MistakesAreNamed) {
  expect_usage_error({"--stesp", "3"}, "unknown option '--stesp'; did you mean '--steps'? See");
  expect_usage_error(
      {"--bogus"},
      "unknown option '--bogus'; known are --config, --steps, --lr, --resume, --set, --quiet, --help. See");
  expect_usage_error({"--stesp=3"}, "unknown option '--stesp'; did you mean '--steps'?");
  expect_usage_error({"-confg", "x"},
                     "unknown option '-confg'; options have two dashes: did you mean '--config'?");
  expect_usage_error({"a.json", "-x"}, "unknown option '-x'; options have two dashes: known are --config, ");
  expect_usage_error({"--steps"}, "steps");
  expect_usage_error({"--steps", "3x"}, "--steps takes a whole number, not '3x'",
                     [](const CommandLine& line) { line.integer("steps", 0); });
  expect_usage_error({"--steps", "0"}, "at least 1",
                     [](const CommandLine& line) { line.integer("steps", 1); });
  expect_usage_error({"--steps", "65"}, "--steps must be at most 64, not 65",
                     [](const CommandLine& line) { line.integer("steps", 1, 64); });
  expect_usage_error({"--steps", "99999999999999999999"}, "whole number",
                     [](const CommandLine& line) { line.integer("steps", 1); });
  expect_usage_error({"--lr", "nan"}, "takes a number", [](const CommandLine& line) { line.number("lr"); });
  expect_usage_error({}, "--lr is missing", [](const CommandLine& line) { line.required("lr"); });
}

TEST(CommandLine, ValuesMayBeginWithADash) {
  CommandLine line = example();
  ASSERT_TRUE(line.parse({"--set", "-x", "--lr", "-1"}));
  EXPECT_THAT(line.all("set"), ElementsAre("-x"));
  EXPECT_EQ(line.number("lr"), -1);
  expect_usage_error({"--set", "-x", "--resume", "-y"}, "y");
}

TEST(CommandLine, AProgramMayFollow) {
  CommandLine line = example();
  line.program_follows();
  ASSERT_TRUE(line.parse({"--steps", "3", "--", "program", "--steps", "--", "x"}));
  EXPECT_EQ(line.integer("steps", 1), 3);
  EXPECT_THAT(line.program(), ElementsAre("program", "--steps", "--", "x"));
}

TEST(CommandLine, HelpListsEveryOption) {
  CommandLine line = example();
  CaptureStdout();
  const bool run = line.parse({"-h"});
  const std::string help = GetCapturedStdout();
  EXPECT_FALSE(run);
  for (const char* option :
       {"--config F", "--steps N", "--lr X", "--resume", "--set A=B", "--quiet", "-h, --help", "default: 7"})
    EXPECT_THAT(help, HasSubstr(option));
}

}  // namespace
}  // namespace sherd::cli
