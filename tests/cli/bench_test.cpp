// `sherd bench` as a person meets it, at sizes too small to mean anything.
#include <signal.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "cli/program.h"
#include "cli/train_fixture.h"

namespace sherd::cli {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::StartsWith;

class Bench : public ::testing::Test {
 protected:
  static Outcome bench(const std::vector<std::string>& arguments) {
    Arguments all{"bench"};
    all.insert(all.end(), arguments.begin(), arguments.end());
    ::testing::internal::CaptureStdout();
    ::testing::internal::CaptureStderr();
    const int code = run_program(all);
    std::string out = ::testing::internal::GetCapturedStdout();
    return {code, std::move(out), ::testing::internal::GetCapturedStderr()};
  }

  /// One line on stderr with `part`, nothing on stdout, and this exit code.
  static void expect_failure(const std::vector<std::string>& arguments, int code, const std::string& part) {
    const Outcome outcome = bench(arguments);
    EXPECT_EQ(outcome.code, code) << outcome.out;
    EXPECT_THAT(outcome.err, StartsWith("sherd: error: "));
    EXPECT_THAT(outcome.err, HasSubstr(part));
    EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << outcome.err;
    EXPECT_EQ(outcome.out, "");
  }

  /// Runs with --json and checks what all benchmarks promise; `rate` is the key of their rates.
  static nlohmann::json measured(std::vector<std::string> arguments, const std::string& rate) {
    arguments.insert(arguments.end(), {"--json", "--rounds", "2"});
    const Outcome outcome = bench(arguments);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return checked(outcome.out, arguments[0], rate);
  }
  static nlohmann::json checked(const std::string& text, const std::string& name, const std::string& rate) {
    EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1) << text;
    nlohmann::json report = nlohmann::json::parse(text, nullptr, false);
    EXPECT_TRUE(report.is_object()) << text;
    EXPECT_EQ(report.value("bench", ""), name);
    EXPECT_NE(report.value("limit", ""), "");
    EXPECT_TRUE(report.contains("notes"));
    EXPECT_EQ(report.value("rounds", 0), 2);
    EXPECT_FALSE(report["cases"].empty());
    EXPECT_GE(report.value("cpu_share_of_others", -1.0), 0.0);
    EXPECT_LE(report.value("cpu_share_of_others", 2.0), 1.0);
    for (const auto& row : report["cases"]) {
      EXPECT_NE(row.value("case", ""), "");
      for (const std::string& key :
           {std::string("median_ms"), rate, "limit_" + rate, std::string("of_limit")})
        EXPECT_GT(row.value(key, 0.0), 0.0) << key << " of " << row;
    }
    return report;
  }
  static std::vector<std::string> cases(const nlohmann::json& report) {
    std::vector<std::string> names;
    for (const auto& row : report["cases"]) names.push_back(row["case"]);
    return names;
  }

  TempFolder folder_;
};

TEST_F(Bench, Adam) {
  const auto report = measured({"adam", "--parameters", "100k", "--threads", "2"}, "gb_per_s");
  EXPECT_EQ(report["parameters"], 99968);  // whole runs of 64
  EXPECT_EQ(report["threads"], 2);
  EXPECT_THAT(cases(report), ElementsAre("limit", "fused", "fused_grad16", "split", "split_moments16",
                                         "split_moments8", "path", "path_split", "path_moments16",
                                         "path_moments8", "one_bit_pack", "one_bit_update"));
  EXPECT_EQ(report["cases"][0]["of_limit"], 1.0);
  EXPECT_EQ(report["cases"][1]["bytes_per_parameter"], 30);
  EXPECT_EQ(report["cases"][4]["bytes_per_parameter"], 18);
  for (const auto& row : report["cases"]) {
    // gb_per_s, gparam_per_s and median_ms tell of one time.
    const double seconds = row["median_ms"].get<double>() * 1e-3;
    EXPECT_NEAR(row["gparam_per_s"].get<double>() * seconds, 99968e-9, 1e-3 * 99968e-9) << row;
    EXPECT_NEAR(row["gb_per_s"].get<double>() * seconds, 99968e-9 * row["bytes_per_parameter"].get<double>(),
                1e-5)
        << row;
  }
}

TEST_F(Bench, Nvme) {
  const auto report = measured({"nvme", "--path", folder_.path().string(), "--bytes", "1M", "--block-size",
                                "16k,64KiB", "--queue-depth", "2"},
                               "gb_per_s");
  EXPECT_THAT(cases(report), ElementsAre("read", "write", "mixed", "read", "write", "mixed"));
  EXPECT_EQ(report["cases"][0]["block_size"], 16384);
  EXPECT_EQ(report["cases"][5]["block_size"], 65536);
  EXPECT_EQ(report["cases"][5]["queue_depth"], 2);
  EXPECT_THAT(report["notes"].dump(), HasSubstr("block_size"));  // the better of the two
  EXPECT_TRUE(std::filesystem::is_empty(folder_.path()));

  const auto threads =
      measured({"nvme", "--path", folder_.path().string(), "--bytes", "128k", "--block-size", "64k",
                "--queue-depth", "40", "--backend", "auto,threads", "--threads", "2,3"},
               "gb_per_s");
  ASSERT_EQ(threads["cases"].size(), 9u);  // auto has no threads to vary, unless it fell back to some
  EXPECT_THAT(threads["cases"][3]["backend"].get<std::string>(), StartsWith("threads"));
  EXPECT_EQ(threads["cases"][3]["thread_count"], 2);
  EXPECT_EQ(threads["cases"][6]["thread_count"], 3);
}

TEST_F(Bench, CommOverLocalRanks) {
  const auto report = measured({"comm", "--ranks", "3", "--mib", "1"}, "gb_per_s");
  EXPECT_EQ(report["backend"], "local");
  EXPECT_EQ(report["ranks"], 3);
  EXPECT_EQ(report["bytes"], (1 << 20) / 12 * 12);
  EXPECT_GT(report["barrier_us"].get<double>(), 0.0);
  EXPECT_THAT(cases(report), ElementsAre("all_reduce", "reduce_scatter", "all_gather", "send"));
  const auto bus_by_rate = [&](int row) {
    return report["cases"][row]["bus_gb_per_s"].get<double>() /
           report["cases"][row]["gb_per_s"].get<double>();
  };
  EXPECT_NEAR(bus_by_rate(0), 4.0 / 3, 1e-3);
  EXPECT_NEAR(bus_by_rate(1), 2.0 / 3, 1e-3);
}

TEST_F(Bench, Gemm) {
  const auto report = measured({"gemm", "--tokens", "32", "--hidden", "64", "--vocab", "100"}, "gflop_per_s");
  const auto names = cases(report);
  EXPECT_EQ(names.size(), 38u);  // two dtypes, five layers in three products each, attention in two by two
  for (const char* name :
       {"bf16 qkv forward", "fp32 head dw", "fp32 up dx", "bf16 attention dropout backward"})
    EXPECT_THAT(names, Contains(name));
  EXPECT_EQ(report["cases"][1]["shape"], "32x64x64 NN");
  // One thread, by its CPU time.
  const auto one = measured({"gemm", "--tokens", "32", "--hidden", "64", "--vocab", "100", "--threads", "1",
                             "--only", "bf16 down f"},
                            "gflop_per_s");
  EXPECT_THAT(cases(one), ElementsAre("bf16 down forward"));
  EXPECT_EQ(one["cases"][0]["shape"], "32x64x256 NT");
}

TEST_F(Bench, PrintsATableForPeople) {
  const Outcome outcome = bench({"adam", "--parameters", "64", "--rounds", "1"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  for (const char* part : {"64 parameters", "Gparam/s", "of limit", "split masters", "limit: "})
    EXPECT_THAT(outcome.out, HasSubstr(part));
}

TEST_F(Bench, HelpNamesEveryBenchmark) {
  const Outcome all = bench({"--help"});
  EXPECT_EQ(all.code, 0);
  for (const char* name : {"adam", "nvme", "comm", "gemm"}) {
    EXPECT_THAT(all.out, HasSubstr(std::string("\n  ") + name + " "));
    const Outcome help = bench({name, "--help"});
    EXPECT_EQ(help.code, 0) << help.err;
    EXPECT_THAT(help.out, HasSubstr(std::string("sherd bench ") + name));
    EXPECT_THAT(help.out, HasSubstr("--json"));
  }
}

TEST_F(Bench, WrongCommandLinesEndWithTwo) {
  expect_failure({}, 2, "bench what?");
  expect_failure({"adm"}, 2, "did you mean 'adam'?");
  expect_failure({"adam", "--parameters", "63"}, 2, "at least 64");
  expect_failure({"adam", "--parameters", "5x"}, 2, "not '5x'");
  expect_failure({"adam", "--parameters", "64,128"}, 2, "takes one number");
  expect_failure({"adam", "--rounds", "0"}, 2, "--rounds must be at least 1");
  expect_failure({"nvme"}, 2, "--path is missing");
  expect_failure({"nvme", "--path", ".", "--backend", "aio"}, 2, "io_uring and threads, not 'aio'");
  expect_failure({"nvme", "--path", ".", "--bytes", "1M", "--block-size", "1M"}, 2, "at least twice");
  expect_failure({"nvme", "--path", ".", "--queue-dept", "8"}, 2, "did you mean '--queue-depth'?");
  expect_failure({"comm", "--ranks", "1"}, 2, "at least 2");
  expect_failure({"gemm", "--only", "convolution"}, 2, "no product's name holds 'convolution'");
}

TEST_F(Bench, WhatTheMachineLacksEndsWithOne) {
  const std::string missing = (folder_ / "missing").string();
  expect_failure({"nvme", "--path", missing}, 1, "'" + missing + "' is not a folder");
  expect_failure({"nvme", "--path", folder_.path().string(), "--bytes", "8000000G"}, 1,
                 "with --bytes, or another disk");
  expect_failure({"nvme", "--path", folder_.path().string(), "--bytes", "16M", "--block-size", "6000"}, 2,
                 "4096");
  expect_failure({"nvme", "--path", folder_.path().string(), "--queue-depth", "9000000000000000000"}, 2,
                 "1 to 4096");
  expect_failure({"nvme", "--path", folder_.path().string(), "--backend", "threads", "--threads", "1000"}, 2,
                 "1 to 256");
  EXPECT_TRUE(std::filesystem::is_empty(folder_.path()));
  expect_failure({"adam", "--parameters", "100000G"}, 1, "Choose fewer --parameters");
  expect_failure({"adam", "--parameters", "9000000000000000000"}, 1, "Choose fewer --parameters");
  expect_failure({"comm", "--mib", "1000000000"}, 1, "Choose less with --mib");
  expect_failure({"gemm", "--tokens", "1000000G"}, 1, "Choose fewer --tokens");
}

/// The program itself, for what a test process cannot do.
class BenchProgram : public Train {};

TEST_F(BenchProgram, CommUnderMpirunTakesItsRanks) {
  if (!SHERD_TEST_MPI) GTEST_SKIP() << "built without MPI";
  const Outcome outcome =
      sherd_mpi(2, {"bench", "comm", "--ranks", "7", "--mib", "1", "--rounds", "2", "--json"});
  EXPECT_EQ(count(outcome.err, "exit code 0"), 2u) << outcome.err;
  const auto report = nlohmann::json::parse(outcome.out, nullptr, false);
  ASSERT_TRUE(report.is_object()) << outcome.out;
  EXPECT_EQ(report["backend"], "mpi");
  EXPECT_EQ(report["ranks"], 2);
  EXPECT_EQ(report["cases"].size(), 8u);
  EXPECT_EQ(report["cases"][1]["case"], "all_reduce_staged");
  for (const auto& row : report["cases"]) EXPECT_GT(row["of_limit"].get<double>(), 0.0) << row;
}

TEST_F(BenchProgram, AnInterruptedOneLeavesNothingBehind) {
  const std::filesystem::path disk = folder_ / "disk";
  std::filesystem::create_directory(disk);
  const pid_t child = start({"bench", "nvme", "--path", disk.string(), "--bytes", "1M", "--block-size", "64k",
                             "--rounds", "1000000"},
                            "bench.err");
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!std::filesystem::exists(disk / "sherd-bench/sherd-swap/rank_00000.swap") &&
         std::chrono::steady_clock::now() < limit)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_FALSE(std::filesystem::is_empty(disk));
  kill(child, SIGINT);
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 130) << status;
  EXPECT_THAT(read_text(folder_ / "bench.err"), HasSubstr("interrupted"));
  EXPECT_TRUE(std::filesystem::is_empty(disk));
}

}  // namespace
}  // namespace sherd::cli
