// The file of `sherd train --trace`: each rank's list of instructions, step after step; none of a run that
// fails.
#include <filesystem>
#include <nlohmann/json.hpp>
#include <tuple>

#include "sharding/schedule/schedules.h"
#include "train_fixture.h"

namespace sherd::cli {
namespace {

using Row = std::tuple<std::string, std::int64_t, int>;  ///< name, micro-batch, chunk

class Traced : public Train {
 protected:
  /// Two steps of four micro-batches over two stages.
  std::vector<std::string> arguments() const {
    std::vector<std::string> out = train({"--ranks", "2", "--steps", "2", "--trace", file().string()});
    for (const char* key : {"parallel.pipeline=2", "parallel.schedule=zero_bubble",
                            "train_micro_batch_size_per_gpu=1", "training.save_dir="})
      out.insert(out.end(), {"--set", key});
    return out;
  }
  std::filesystem::path file() const { return folder_ / "trace.json"; }
  std::vector<std::string> files() const {
    std::vector<std::string> out;
    for (const auto& entry : std::filesystem::directory_iterator(folder_.path()))
      if (const std::string name = entry.path().filename().string(); name.find("trace") != std::string::npos)
        out.push_back(name);
    return out;
  }
};

TEST_F(Traced, APipelinesFileHasEveryInstructionOfEachRankOnce) {
  const Outcome run = sherd(arguments());
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_THAT(run.out, HasSubstr("bubble"));
  std::map<int, std::vector<Row>> found;
  std::map<int, double> ends;
  const nlohmann::json trace = nlohmann::json::parse(read_text(file()));
  for (const auto& event : trace.at("traceEvents")) {
    const int rank = event.at("pid");
    EXPECT_TRUE(rank == 0 || rank == 1) << event;
    const std::string phase = event.at("ph");
    EXPECT_TRUE(phase == "X" || phase == "M") << "nothing is on NVMe: " << event;
    if (phase == "X") {
      EXPECT_GE(event.at("dur").get<double>(), 0) << event;
    }
    if (event.value("cat", "") != "instruction") continue;
    EXPECT_EQ(phase, "X");
    const double begin = event.at("ts");
    // A double holds microseconds since 1970 in steps of 0.25.
    EXPECT_GE(begin + 0.75, ends[rank]) << "one after the other: " << event;
    ends[rank] = begin + event.at("dur").get<double>();
    found[rank].emplace_back(event.at("name"), event.at("args").at("micro_batch"),
                             event.at("args").at("chunk"));
  }
  for (int rank = 0; rank < 2; ++rank) {
    std::vector<Row> expected;
    for (int step = 0; step < 2; ++step)
      for (const auto& i : sharding::zero_bubble({.stages = 2, .stage = rank, .micro_batches = 4}))
        expected.emplace_back(sharding::name_of(i.op), i.micro_batch, i.chunk);
    EXPECT_EQ(found[rank], expected) << "rank " << rank;
  }
  EXPECT_EQ(files(), std::vector<std::string>{"trace.json"});
}

TEST_F(Traced, ARunThatFailsLeavesNoneAndKeepsTheOneBefore) {
  std::vector<std::string> failing = arguments();
  for (const char* key : {"optimizer.params.lr=1e30", "training.steps=6", "bf16.enabled=false"})
    failing.insert(failing.end(), {"--set", key});
  for (const char* before : {"", "of a run before"}) {
    if (*before) write_text(file(), before);
    const Outcome run = sherd(failing);
    EXPECT_NE(run.code, 0);
    EXPECT_THAT(run.err, HasSubstr("nothing was updated"));
    if (*before) {
      EXPECT_EQ(read_text(file()), before);
      EXPECT_EQ(files(), std::vector<std::string>{"trace.json"});
    } else {
      EXPECT_EQ(files(), std::vector<std::string>());
    }
  }
}

}  // namespace
}  // namespace sherd::cli
