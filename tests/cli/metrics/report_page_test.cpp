#include "cli/metrics/report_page.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "cli/train_fixture.h"

namespace sherd::cli {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

Metrics example(int steps = 60) {
  Metrics out;
  for (int step = 1; step <= steps; ++step)
    out.add(step, {{"loss", 4.0 - 0.01 * step},
                   {"lr", 1e-3},
                   {"grad_norm", 1.5},
                   {"step_ms", step < 5 ? 900.0 : 20.0},
                   {"tokens", 512.0 * step},
                   {"tokens_per_s", 25'600},
                   {"mem.device_peak", 3 << 20},
                   {"mem.nvme_peak", 0},
                   {"comm.all_gather_bytes", 4096},
                   {"ranks.compute_ms", 15}});
  return out;
}

TEST(ReportPage, ShowsWhatThereIsAndNothingElse) {
  const std::string page = report_page(example(), {.title = "Run a"});
  for (const char* text :
       {"<!DOCTYPE html>", "<html lang=\"en\">", "<title>Run a</title>", "<h1>Run a</h1>",
        "aria-label=\"Loss\"", "aria-label=\"Tokens per second\"", "aria-label=\"Gradient norm\"",
        "aria-label=\"Learning rate\"", "aria-label=\"Memory of rank 0\"",
        "aria-label=\"Parts of a step, mean of ranks\"", "aria-label=\"Sent to other ranks in a step\"",
        "prefers-color-scheme: dark", "@media print", "<th scope=\"row\">Tokens</th><td>30.7k</td>",
        "<td>20 ms (median of the last steps)</td>", "3.40, lowest 3.40 at step 60", "all-gather 4.00 KiB"})
    EXPECT_THAT(page, HasSubstr(text));
  for (const char* text :
       {"Rewards", "Experts", "Samples", "Configuration", "NVMe 0", "Loss scale", "nan", "inf "})
    EXPECT_THAT(page, Not(HasSubstr(text)));
}

TEST(ReportPage, NeedsNothingFromElsewhere) {
  std::string page = report_page(example(), {.title = "Run", .config = "{}", .samples = {{"a", "b"}}});
  for (const char* name : {"http://www.w3.org/2000/svg"})  // names a language, and is not loaded
    for (std::size_t at; (at = page.find(name)) != std::string::npos;)
      page.erase(at, std::string(name).size());
  for (const char* text : {"http:", "https:", "src=", "href=", "url(", "@import", "<link", "<img", "<iframe"})
    EXPECT_THAT(page, Not(HasSubstr(text)));
  EXPECT_THAT(page, HasSubstr("default-src 'none'"));
}

TEST(ReportPage, TextOfFilesStaysText) {
  const std::string evil = "<script>alert(1)</script>\" onload=\"x & \xff\x01";
  ReportContent content{
      .title = evil, .facts = {{evil, evil}}, .config = evil, .samples = {{evil, evil}}, .remarks = {evil}};
  content.last_line = R"({"moe":{"layers":["<b>"],"tokens":[[1,3]],"imbalance":[1.5],"dropped":[0]}})";
  Metrics metrics = example();
  metrics.add(61, {{"metrics." + evil, 1}});
  const std::string page = report_page(metrics, content);
  EXPECT_THAT(page, Not(HasSubstr("<script>alert")));
  EXPECT_THAT(page, Not(HasSubstr("<b>")));
  EXPECT_THAT(page, Not(HasSubstr("\" onload")));
  EXPECT_THAT(page, Not(HasSubstr("\xff")));
  EXPECT_THAT(page, Not(HasSubstr("\x01")));
  EXPECT_GE(count(page, "&lt;script&gt;alert(1)&lt;/script&gt;&quot; onload=&quot;x &amp; "), 8u);
  EXPECT_EQ(count(page, "<script>"), 1u);
  EXPECT_THAT(page,
              HasSubstr("<th scope=\"row\">&lt;b&gt;</th><td>25%</td><td>75%</td><td>1.50</td><td>0%</td>"));
}

TEST(ReportPage, StaysSmallForLongRuns) {
  EXPECT_LT(report_page(example(200'000), {.title = "long"}).size(), 600'000u);
}

class Report : public Train {
 protected:
  std::string page() const { return read_text(folder_ / "r.html"); }
  std::string path(const char* name) const { return (folder_ / name).string(); }
};

TEST_F(Report, TellsOfARunWithItsConfigurationAndMachine) {
  ASSERT_EQ(
      sherd(train({"--ranks", "2", "--metrics", path("m.jsonl"), "--set", "training.eval_interval=3"})).code,
      0);
  write_text(
      folder_ / "run" / "samples.jsonl",
      "{\"prompt\":\"Once\",\"completion\":\" <script>upon</script>\",\"tokens\":4}\n{\"prompt\":\"ha");
  const Outcome made =
      sherd({"report", path("run"), "--metrics", path("m.jsonl"), "--output", path("r.html")});
  ASSERT_EQ(made.code, 0) << made.err;
  for (const char* text :
       {"validation ", "&quot;hidden_size&quot;: 32", "Newest checkpoint", "global_step6, by 2 ranks",
        "computed in bf16", "byte, ", "<th scope=\"row\">Sherd</th>", "local(2)",
        "<pre class=\"prompt\">Once</pre><pre> &lt;script&gt;upon&lt;/script&gt;</pre>"})
    EXPECT_THAT(page(), HasSubstr(text));
  // Without a metrics file: by the run's own record.
  ASSERT_EQ(sherd({"report", path("run"), "--output", path("r.html")}).code, 0);
  EXPECT_THAT(page(), HasSubstr("There is no metrics file beside the run"));
  EXPECT_THAT(page(), HasSubstr("aria-label=\"Gradient norm\""));
  EXPECT_THAT(page(), Not(HasSubstr("aria-label=\"Tokens per second\"")));
  // The metrics file alone.
  ASSERT_EQ(sherd({"report", path("m.jsonl"), "--output", path("r.html"), "--title", "Mine"}).code, 0);
  EXPECT_THAT(page(), HasSubstr("<h1>Mine</h1>"));
  EXPECT_THAT(page(), Not(HasSubstr("Configuration")));
}

TEST_F(Report, SaysInOneLineWhatIsWrong) {
  const auto refuses = [&](const std::vector<std::string>& words, int code, const char* text) {
    std::vector<std::string> all{"report", "--output", path("r.html")};
    all.insert(all.end(), words.begin(), words.end());
    const Outcome outcome = sherd(all);
    EXPECT_EQ(outcome.code, code) << outcome.err;
    EXPECT_THAT(outcome.err, HasSubstr(text));
    EXPECT_EQ(count(outcome.err, "\n"), 1u) << outcome.err;
    EXPECT_FALSE(std::filesystem::exists(folder_ / "r.html"));
  };
  write_text(folder_ / "empty", ""), write_text(folder_ / "binary", std::string("\0\1\2\n", 4));
  refuses({path("none")}, 1, "No such file");
  refuses({path("empty")}, 1, "holds no step yet");
  refuses({path("binary")}, 1, "line 1 of");
  refuses({folder_.path().string()}, 1, "name the file that `sherd train --metrics` wrote with --metrics");
  refuses({}, 2, "give one RUN");
  refuses({path("empty"), "--metrics", path("empty")}, 2, "is no folder");
  std::filesystem::create_directories(folder_ / "bad" / "global_step1");
  write_text(folder_ / "bad" / "metrics.jsonl", "{\"step\":1,\"loss\":1}\n");
  write_text(folder_ / "bad" / "latest", "global_step1"),
      write_text(folder_ / "bad" / "global_step1" / "manifest.json", "{}");
  refuses({path("bad")}, 1, "manifest.json");
}

}  // namespace
}  // namespace sherd::cli
