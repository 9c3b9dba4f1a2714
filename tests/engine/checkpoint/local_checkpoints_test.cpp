// Local checkpoints: what machines keep, and what comes back after the loss of some.
#include "engine/checkpoint/local/peer_copies.h"
#include "engine/checkpoint/local_machines.h"
#include "engine/estimate/estimate.h"
#include "models/gpt.h"

namespace sherd::test {
namespace {

namespace fs = std::filesystem;
using engine::CheckpointReader;
using engine::SaveOptions;

class LocalCheckpointsTest : public LocalMachines {};

TEST_F(LocalCheckpointsTest, KeepsEachRanksFileOnTwoMachinesAndTheOlderOneUntilThen) {
  for (const bool async : {false, true}) {
    on_machines(
        4, 2,
        [&](Engine& engine) {
          step(engine);
          save_both(engine, "one", async);
          engine.dist().world().barrier();
          for (int m = 0; m < 2; ++m) {
            EXPECT_EQ(steps_in(m), std::set<std::string>{"global_step1"});
            EXPECT_EQ(names_in(saved(m, 1)).size(), 6u) << "four ranks', a small one and the manifest";
            EXPECT_NO_THROW(CheckpointReader(saved(m, 1)).verify_all());
          }
          engine.dist().world().barrier();
          step(engine);
          save_both(engine, "two", async);
          engine.dist().world().barrier();
          for (int m = 0; m < 2; ++m) EXPECT_EQ(steps_in(m), std::set<std::string>{"global_step2"});
          const std::set<std::string> before = names_in(local(0));
          engine.dist().world().barrier();
          save_both(engine, "of the same step", async);
          engine.dist().world().barrier();
          EXPECT_EQ(steps_in(0), std::set<std::string>{"global_step2"});
          EXPECT_NE(names_in(local(0)), before);
        },
        true);
    EXPECT_EQ(fs::status(local(0)).permissions() & fs::perms::others_all, fs::perms::none);
  }
}

TEST_F(LocalCheckpointsTest, ThreeMachinesKeepTheirOwnAndTheOneBefore) {
  on_machines(
      3, 3,
      [&](Engine& engine) {
        step(engine), save_both(engine, "one", true);
        const auto groups = engine.dist().world().flight_recorder()->record().groups;
        EXPECT_EQ(std::ranges::count(groups, "copies of local checkpoints", &comm::RecordedGroup::purpose),
                  1);
      },
      true);
  for (int m = 0; m < 3; ++m) {
    const std::set<std::string> names = names_in(saved(m, 1));
    EXPECT_TRUE(names.contains(engine::rank_file(m)) && names.contains(engine::rank_file((m + 2) % 3)));
    EXPECT_FALSE(names.contains(engine::rank_file((m + 1) % 3)));
  }
}

struct Loss {
  const char* name;
  std::vector<int> lost;  ///< machines
  int ranks, machines, first;
};
class LossOfMachines : public LocalCheckpointsTest, public ::testing::WithParamInterface<Loss> {};

TEST_P(LossOfMachines, GoesOnWithWhatOthersHave) {
  on_machines(
      6, 3, [&](Engine& engine) { step(engine, 2), save_both(engine, "two", true); }, true);
  for (const int m : GetParam().lost) fs::remove_all(machine(m));
  on_machines(
      GetParam().ranks, GetParam().machines,
      [&](Engine& engine) {
        expect_newest(engine, "two");
        engine.dist().world().barrier();
        for (int m = 0; m < GetParam().machines; ++m) expect_whole_files(GetParam().first + m, 2);
        engine.dist().world().barrier();
        step(engine);  // one more, and another machine may go
        save_both(engine, "three", true);
        engine.dist().world().barrier();
      },
      false, GetParam().first);
  fs::remove_all(machine(GetParam().first));
  on_machines(
      GetParam().ranks, GetParam().machines, [&](Engine& engine) { expect_newest(engine, "three"); }, false,
      GetParam().first);
}

INSTANTIATE_TEST_SUITE_P(All, LossOfMachines,
                         ::testing::Values(Loss{"None", {}, 6, 3, 0}, Loss{"First", {0}, 6, 3, 0},
                                           Loss{"Last", {2}, 6, 3, 0},
                                           Loss{"MiddleAndASpareComes", {0}, 6, 3, 1},
                                           Loss{"OneAndFewerGoOn", {2}, 4, 2, 0}),
                         [](const auto& loss) { return loss.param.name; });

TEST_F(LocalCheckpointsTest, WithFrozenParametersOnNvmeCopiesThemOnce) {
  spec_.adapter = R"("type": "lora", "r": 4)", spec_.offload_optimizer = "nvme", spec_.stage = 2;
  spec_.nvme_path = (folder_ / "swap").string();
  fs::create_directories(spec_.nvme_path);
  const auto inode = [&](int m, int step, int rank) {
    struct stat found {};
    const fs::path path = saved(m, step) / engine::frozen_file(rank);
    EXPECT_EQ(::stat(path.c_str(), &found), 0) << path;
    return found.st_ino;
  };
  std::vector<ino_t> before;
  on_machines(
      2, 2,
      [&](Engine& engine) {
        step(engine);
        save_both(engine, "one", true);
        engine.dist().world().barrier();
        if (engine.dist().rank() == 0)
          for (int i = 0; i < 4; ++i) before.push_back(inode(i / 2, 1, i % 2));
        engine.dist().world().barrier();
        step(engine);
        save_both(engine, "two", true);
      },
      true);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(inode(i / 2, 2, i % 2), before[static_cast<std::size_t>(i)]);
  fs::remove_all(machine(0));
  on_machines(2, 2, [&](Engine& engine) {
    expect_newest(engine, "two");
    step(engine);
    save_both(engine, "three", true);
  });
  for (const int i : {2, 3})
    EXPECT_EQ(inode(1, 3, i % 2), before[static_cast<std::size_t>(i)]) << "what was there needs no copy";
  fs::remove_all(machine(1));
  on_machines(2, 2, [&](Engine& engine) { expect_newest(engine, "three"); });
}

/// The bytes of tensors in a safetensors file, which is a length, a head and these.
std::uint64_t tensor_bytes(const fs::path& path) {
  std::uint64_t head = 0;
  std::ifstream(path, std::ios::binary).read(reinterpret_cast<char*>(&head), sizeof head);
  return fs::file_size(path) - sizeof head - head;
}

TEST_F(LocalCheckpointsTest, TakeWhatTheEstimateTells) {
  spec_.adapter = R"("type": "lora", "r": 4)";
  config::Config config = config::parse_text(spec_.config());
  config.training.save_dir = "run", config.training.local_save_interval = 1;
  const auto model = [&](const parallel::Layout& layout) {
    return std::make_shared<models::Gpt>(models::gpt_config(config, 101), layout);
  };
  const auto batch = [&](device::Device& device) { return synthetic_batch(device, 1, 24, 101, 0, 0, 0); };
  std::uint64_t estimated = 0;  // of all ranks, which hold a little more or less than each other
  for (int rank = 0; rank < 4; ++rank)
    estimated += engine::estimate(config, model, batch, {.ranks = 4, .local_ranks = 2, .rank = rank})
                     .local_checkpoints;
  on_machines(
      4, 2, [&](Engine& engine) { step(engine), save_both(engine, "one", true); }, true);
  std::uint64_t once = 0, twice = 0;  // the next one has links to what is frozen
  for (int rank = 0; rank < 4; ++rank) {
    once += tensor_bytes(saved(0, 1) / engine::frozen_file(rank));
    twice += tensor_bytes(saved(0, 1) / engine::rank_file(rank));
  }
  EXPECT_GT(once, twice);
  EXPECT_EQ(estimated, 2 * (once + 2 * twice)) << "on two machines";
}

TEST_F(LocalCheckpointsTest, TakesTheNewestOfWhatIsWhole) {
  const auto save_file = [&](Engine& engine, const std::string& tag) {
    engine.save_checkpoint((folder_ / "expected").string(), tag);
    engine.save_checkpoint(run().string(), cat("global_step", engine.global_steps()), {{"tag", tag}});
  };
  on_machines(
      2, 2,
      [&](Engine& engine) {
        step(engine), save_file(engine, "one");
        step(engine), save_both(engine, "two", false);
      },
      true);
  on_machines(2, 2, [&](Engine& engine) { expect_newest(engine, "two"); });
  // The same file damaged on one machine comes from the other, and is whole again.
  const std::string rank0 = engine::rank_file(0);
  flip_last_byte(saved(0, 2) / rank0), flip_last_byte(saved(1, 2) / "words");
  on_machines(2, 2, [&](Engine& engine) { expect_newest(engine, "two"); });
  // On both machines it is no checkpoint any more, and the older one of files is what there is.
  for (int m = 0; m < 2; ++m) EXPECT_NO_THROW(CheckpointReader(saved(m, 2)).verify_all());
  flip_last_byte(saved(0, 2) / rank0), flip_last_byte(saved(1, 2) / rank0);
  on_machines(2, 2, [&](Engine& engine) { expect_newest(engine, "one", false); });
  flip_last_byte(saved(0, 2) / rank0), flip_last_byte(saved(1, 2) / rank0);
  on_machines(2, 2, [&](Engine& engine) {
    expect_newest(engine, "two");
    step(engine), save_file(engine, "three");
  });
  on_machines(2, 2, [&](Engine& engine) { expect_newest(engine, "three", false); });
}

TEST_F(LocalCheckpointsTest, MayHaveFilesOfSeveralChunks) {
  spec_.hidden = 192;
  const auto save = [](Engine& engine) { engine.save_local_checkpoint({}); };
  on_machines(2, 2, save, true);
  for (int m = 0; m < 2; ++m) expect_whole_files(m, 0);
  const fs::path file = saved(0, 0) / engine::rank_file(0);
  EXPECT_GT(fs::file_size(file), engine::file_chunk);
  fs::remove(file);
  on_machines(2, 2, [&](Engine& engine) { EXPECT_TRUE(engine.load_newest_checkpoint(run().string())); });
  EXPECT_TRUE(fs::exists(file));
  expect_whole_files(0, 0);
}

/// A folder where a file is to be stands for a machine without room.
TEST_F(LocalCheckpointsTest, ThatAMachineHasNoRoomForIsPassedOver) {
  on_machines(
      3, 3,
      [&](Engine& engine) {
        step(engine);
        engine.save_checkpoint((folder_ / "expected").string(), "one");
        engine.save_checkpoint(run().string(), "global_step1", {{"tag", "one"}});
        step(engine), save_both(engine, "two", true);
      },
      true);
  std::string name;
  for (const auto& entry : fs::directory_iterator(local(0))) name = entry.path().filename();
  const fs::path place = local(0) / name / engine::rank_file(1);  // which the two others have
  fs::create_directories(place / "full");
  on_machines(3, 3, [&](Engine& engine) { expect_newest(engine, "one", false); });
  fs::remove_all(place);
  on_machines(3, 3, [&](Engine& engine) { expect_newest(engine, "two"); });
}

}  // namespace
}  // namespace sherd::test
