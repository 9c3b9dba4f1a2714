// `sherd info --flight-recorder`: files written here by hand, as the format says, and a run that is asked.
#include "cli/flight_report.h"

#include <signal.h>

#include <nlohmann/json.hpp>

#include "cli/train_fixture.h"
#include "support/expect_error.h"

namespace sherd::cli {
namespace {

namespace fs = std::filesystem;
using sherd::testing::expect_error;
using ::testing::Not;

std::string call(int sequence, const std::string& kind, const std::string& label, int bytes,
                 const std::string& state, const std::string& more = "") {
  return cat(R"({"number":)", sequence, R"(,"group":0,"sequence":)", sequence, R"(,"kind":")", kind,
             R"(","label":")", label, R"(","bytes":)", bytes, R"(,"state":")", state,
             R"(","issued_us":1000000,"begun_us":2000000)", more, "}");
}

class FlightReport : public ::testing::Test {
 protected:
  void write(int rank, int issued, int finished, const std::vector<std::string>& calls, int world = 3,
             double seconds_ago = 0, double began_ago = 1000, const std::string& reason = "SIGUSR2") {
    std::string text;
    for (const std::string& one : calls) text += (text.empty() ? "" : ",") + one;
    write_text(folder_ / cat("flight_recorder_rank_", rank, ".json"),
               cat(R"({"format":"sherd flight recorder","version":1,"rank":)", rank, R"(,"world_size":)",
                   world, R"(,"reason":")", reason, R"(","began_us":)", moment(began_ago), R"(,"wall_us":)",
                   moment(seconds_ago), R"(,"steady_us":9000000,"groups":[{"id":"world",)",
                   R"x("name":"tcp(3)","purpose":"data","ranks":[0,1,2],"issued":)x", issued,
                   R"(,"finished":)", finished, R"(}],"calls":[)", text, "]}"));
  }
  static std::int64_t moment(double seconds_ago) {
    return 1700000000000000 - static_cast<std::int64_t>(seconds_ago * 1e6);
  }
  std::string report() { return flight_report({folder_.path().string()}); }
  TempFolder folder_;
};

TEST_F(FlightReport, NamesWhoIsBehindAndWhoWaitsInWhat) {
  const std::string seven = call(7, "all_reduce", "loss", 4, "done", R"(,"ended_us":2000001)");
  const std::string eight =
      call(8, "all_gather", "blocks.3", 2048, "under way", R"(,"missing":[2],"missing_count":1)");
  write(0, 9, 7, {seven, eight, call(9, "all_reduce", "next", 4, "issued")});
  write(1, 8, 7, {seven, eight});
  write(2, 7, 7, {seven});
  const std::string text = report();
  EXPECT_THAT(text, HasSubstr("flight recorders of ranks 0-2 of 3\n"));
  EXPECT_THAT(text, HasSubstr("world (data), tcp(3)\n"));
  EXPECT_THAT(text, HasSubstr("the last call that all finished: 7 all_reduce of 4 B \"loss\"\n"));
  EXPECT_THAT(text, HasSubstr("ranks 0, 1: in 8 all_gather of 2.00 KiB \"blocks.3\", waits for rank 2\n"));
  EXPECT_THAT(text, HasSubstr("rank 2: behind: has finished 7 and not yet called 8\n"));
  EXPECT_THAT(text, HasSubstr("the longest wait is 7.0s"));
  EXPECT_THAT(text, Not(HasSubstr("mismatch")));
}

/// A rank that answered an earlier signal and hangs now, and files of a start with more ranks.
TEST_F(FlightReport, FilesOfAnotherTimeAreLeftOut) {
  const std::string eight = call(8, "all_gather", "blocks.3", 2048, "under way");
  write(0, 8, 7, {eight}), write(2, 8, 7, {eight}, 3, 1.5);
  write(1, 3, 3, {}, 3, 4.5);
  write(3, 8, 8, {}, 4, 900);
  const std::string text = report();
  EXPECT_THAT(text, HasSubstr("flight recorders of ranks 0, 2 of 3\nno file of rank 1"));
  EXPECT_THAT(text, HasSubstr("left out: the file of rank 1, of an earlier signal, 4.5s before the newest"));
  EXPECT_THAT(text, HasSubstr("left out: the file of rank 3, of a start with 4 ranks\n"));
  EXPECT_THAT(text, Not(HasSubstr("behind")));
}

/// A rank that hangs since the world began again has left what it wrote as another had failed.
TEST_F(FlightReport, FilesOfAnEarlierStartAreLeftOut) {
  write(0, 8, 7, {}, 3, 0, 60), write(1, 8, 7, {}, 3, 1, 59.5);
  write(2, 3, 2, {call(3, "all_reduce", "x", 4, "failed")}, 3, 61, 300, "rank 1 is dead");
  const std::string text = report();
  EXPECT_THAT(text, HasSubstr("flight recorders of ranks 0, 1 of 3\nno file of rank 2"));
  EXPECT_THAT(text,
              HasSubstr("left out: the file of rank 2, of an earlier start: nothing has come from there"));
  EXPECT_THAT(text, Not(HasSubstr("is dead")));
}

TEST_F(FlightReport, TheLastCallOfAllIsThatOfTheRankFurthestBehind) {
  write(0, 5, 5, {});
  write(1, 4, 4, {});
  write(2, 3, 3, {});
  const std::string text = report();
  EXPECT_THAT(text, HasSubstr("the last call that all finished: 3\n"));
  EXPECT_THAT(text, HasSubstr("rank 1: behind: has finished 4 and not yet called 5\n"));
  EXPECT_THAT(text, HasSubstr("rank 2: behind: has finished 3 and not yet called 4\n"));
}

TEST_F(FlightReport, NamesRanksWithoutAFile) {
  write(0, 8, 7, {call(8, "barrier", "", 0, "under way", R"(,"missing":[1,2],"missing_count":5)")});
  const std::string text = report();
  EXPECT_THAT(text, HasSubstr("no file of ranks 1, 2: "));
  EXPECT_THAT(text,
              HasSubstr("rank 0: in 8 barrier, waits for ranks 1, 2 and 3 more\n  ranks 1, 2: no file"));
}

TEST_F(FlightReport, NamesTheFirstCallThatDiffers) {
  write(0, 2, 0, {call(1, "all_to_all", "x", 8, "done"), call(2, "all_reduce", "x", 8, "failed")});
  write(1, 2, 0, {call(1, "all_to_all", "x", 16, "done"), call(2, "all_reduce", "x", 4, "failed")});
  write(2, 2, 0, {call(1, "all_to_all", "x", 8, "done"), call(2, "all_reduce", "x", 8, "failed")});
  EXPECT_THAT(report(), HasSubstr("mismatch: rank 1 called 2 all_reduce of 4 B \"x\"; ranks 0, 2 called "
                                  "2 all_reduce of 8 B \"x\"\n"));
}

TEST_F(FlightReport, TellsOfTransfersWhatTheOtherEndSays) {
  write(0, 0, 0, {call(3, "receive", "a", 8, "under way", R"(,"peer":1)")});
  write(1, 0, 0,
        {call(2, "send", "a", 8, "done", R"(,"peer":0,"ended_us":3000000)"),
         call(3, "receive", "the other way", 8, "done", R"(,"peer":0,"ended_us":3000000)"),
         call(4, "receive", "b", 8, "issued", R"(,"peer":2)"),
         call(5, "send", "c", 8, "under way", R"(,"peer":2)")});
  write(2, 0, 0, {call(5, "receive", "c", 16, "failed", R"(,"peer":1,"ended_us":4500000)")});
  const std::string text = report();
  EXPECT_THAT(text,
              HasSubstr("rank 0: 3 receive of 8 B from rank 1 \"a\", 7.0s: rank 1 has not called send\n"));
  EXPECT_THAT(text,
              HasSubstr("rank 1: 5 send of 8 B to rank 2 \"c\", 7.0s: mismatch: rank 2 called 5 receive"));
  EXPECT_THAT(text, HasSubstr("rank 2: failed 5 receive of 16 B from rank 1 \"c\", 2.5s: mismatch: "));
  EXPECT_THAT(text, Not(HasSubstr("\"b\"")));
}

TEST_F(FlightReport, RefusesOtherFiles) {
  expect_error(ErrorKind::io, "there is no flight_recorder_rank_*.json", [&] { report(); });
  write_text(folder_ / "flight_recorder_rank_0.json", "{}");
  expect_error(ErrorKind::data, "cannot be read as a flight recorder", [&] { report(); });
  write(0, 0, 0, {});
  fs::copy_file(folder_ / "flight_recorder_rank_0.json", folder_ / "again");
  expect_error(ErrorKind::data, "it is of rank 0, as is", [&] {
    flight_report({(folder_ / "flight_recorder_rank_0.json").string(), (folder_ / "again").string()});
  });
}

/// Two ranks in one process go on; a rank that was stopped is named by the other's file.
TEST_F(Train, SigUsr2WritesEachRanksCallsAndTheRunGoesOn) {
  std::vector<std::string> endless =
      train({"--ranks", "2", "--steps", "1000000", "--metrics", (folder_ / "m.jsonl").string()});
  for (const char* set : {"training.log_interval=1000000", "training.keep_last=1"})
    endless.insert(endless.end(), {"--set", set});
  const pid_t child = start(endless, "train.err");
  wait_for("m.jsonl", "\"step\":");
  kill(child, SIGUSR2);
  wait_for("train.err", "flight recorder: the last calls");
  const std::size_t steps = count(read_text(folder_ / "m.jsonl"), "\"step\":");
  wait_for("m.jsonl", "\"step\":", steps + 3);
  kill(child, SIGTERM);
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(WEXITSTATUS(status), 143) << read_text(folder_ / "train.err");
  for (int rank = 0; rank < 2; ++rank) {
    const auto json =
        nlohmann::json::parse(read_text(folder_ / cat("run/flight_recorder_rank_", rank, ".json")));
    EXPECT_EQ(json["rank"], rank);
    EXPECT_EQ(json["reason"], "SIGUSR2");
    EXPECT_GT(json["calls"].size(), 10u);
  }
  const Outcome read = sherd({"info", "--flight-recorder", (folder_ / "run").string()});
  EXPECT_EQ(read.code, 0) << read.err;
  EXPECT_THAT(read.out, HasSubstr("flight recorders of ranks 0, 1 of 2\n"));
}

TEST_F(Train, ALateRankIsNamedByTheFileOfTheOther) {
  const std::string files = (folder_ / "flights").string(), noted = (folder_ / "rank").string();
  fs::create_directory(files);
#if defined(__SANITIZE_THREAD__)
  constexpr int deadline = 20;  // with it a rank may come to the first call so much later than another
#else
  constexpr int deadline = 2;
#endif
  const std::string line =
      joined(train({"--steps", "1000000", "--metrics", (folder_ / "m.jsonl").string(), "--set",
                    cat("parallel.timeout_seconds=", deadline), "--set", "training.log_interval=1000000"}));
  const pid_t child =
      start_line(cat("SHERD_FLIGHT_RECORDER=", files, " ", SHERD_SOURCE_DIR,
                     "/tests/support/launch.sh 2 sh -c 'echo $$ > ", noted, "$RANK; exec \"$@\"' sh ", line),
                 "train.err");
  wait_for("m.jsonl", "\"step\":");
  const pid_t late = noted_process("rank1");
  kill(late, SIGSTOP);
  wait_for("train.err", "error: ");
  kill(late, SIGKILL);
  waitpid(child, nullptr, 0);
  const std::string text = flight_report({files});
  EXPECT_THAT(text, HasSubstr("flight recorders of rank 0 of 2\nno file of rank 1")) << text;
  EXPECT_THAT(text, HasSubstr("waits for rank 1")) << text;
}

}  // namespace
}  // namespace sherd::cli
