// Compares what `sherd estimate` says with the memory in which the processes of `sherd train` reside.
#include <nlohmann/json.hpp>

#include "cli/train_fixture.h"
#include "support/resident_memory.h"

namespace sherd::cli {
namespace {

class Resident : public Train {
 protected:
  /// Trains with configs/demo.json and `keys` until all that a run takes has been taken, and holds the
  /// estimate against what was resident. `processes`: ranks are processes as torchrun starts them; else
  /// threads.
  void expect_estimated(int ranks, bool processes, std::vector<std::string> keys) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    GTEST_SKIP() << "sanitizers take several times as much memory as the program";
#endif
    keys.insert(keys.end(), {"data.path=" + prefix(), "data.split=[0.8,0.2]", "train_batch_size=8",
                             "model.vocab_size=8000", "training.eval_interval=2", "training.eval_steps=1",
                             "device.type=cpu", "device.threads_per_rank=1", "parallel.timeout_seconds=60"});
    std::vector<std::string> options{"--config", SHERD_SOURCE_DIR "/configs/demo.json"};
    for (const std::string& key : keys) options.insert(options.end(), {"--set", key});

    std::vector<std::string> estimate{"estimate", "--gpus", std::to_string(ranks), "--json"};
    estimate.insert(estimate.end(), options.begin(), options.end());
    const Outcome told = sherd(estimate);
    ASSERT_EQ(told.code, 0) << told.err;
    const auto resident = nlohmann::json::parse(told.out).at("resident");
    const double held = ranks * resident.at("held").get<double>();
    const double itself = (processes ? ranks : 1) * resident.at("process_itself").get<double>();

    measure_apart();  // which takes memory, too
    std::vector<std::string> train{"train", "--steps", "2"};
    if (!processes) train.insert(train.end(), {"--ranks", std::to_string(ranks)});
    train.insert(train.end(), options.begin(), options.end());
    std::uint64_t most = 0;
    const pid_t run = start_line(processes ? launched(ranks, train) : joined(train), "train.err");
    const int status = sherd::testing::wait_and_weigh(run, SHERD_PROGRAM, most);
    ASSERT_EQ(status, 0) << read_text(folder_ / "train.err");
    const auto taken = static_cast<double>(most);
    EXPECT_LE(0.95 * taken, held + itself) << "more is resident than was told";
    EXPECT_GE(1.03 * taken, held) << "less is resident than was told";
  }
};

TEST_F(Resident, TheDemoOnTwoRanks) {
  expect_estimated(2, false, {});
}

TEST_F(Resident, EverythingOnNvme) {
  const std::string folder = (folder_ / "swap").string();
  expect_estimated(
      2, false,
      {"zero_optimization.offload_optimizer.device=nvme", "zero_optimization.offload_param.device=nvme",
       "zero_optimization.offload_optimizer.nvme_path=" + folder,
       "zero_optimization.offload_param.nvme_path=" + folder,
       "zero_optimization.offload_param.buffer_size=4e6", "zero_optimization.offload_param.max_in_cpu=0",
       "zero_optimization.sub_group_size=2e6", "training.recompute=full"});
}

TEST_F(Resident, SavesBesideTraining) {
  const std::string folder = (folder_ / "saved").string();
  expect_estimated(2, false, {"training.save_dir=" + folder, "training.save_interval=1"});
}

TEST_F(Resident, SavesBesideTrainingOfWhatIsOnNvme) {
  const std::string folder = (folder_ / "swap").string();
  expect_estimated(
      2, false,
      {"training.save_dir=" + (folder_ / "saved").string(), "training.save_interval=1",
       "zero_optimization.offload_optimizer.device=nvme",
       "zero_optimization.offload_optimizer.nvme_path=" + folder, "zero_optimization.sub_group_size=2e6"});
}

TEST_F(Resident, FourProcesses) {
  expect_estimated(4, true, {});
}

}  // namespace
}  // namespace sherd::cli
