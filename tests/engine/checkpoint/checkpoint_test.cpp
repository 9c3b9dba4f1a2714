// A folder of checkpoints gone wrong: other runs, damage, failures of one rank, files of older
// versions.
#include "engine/checkpoint/checkpoint.h"

#include <gtest/gtest.h>
#include <sys/syscall.h>

#include <cerrno>
#include <functional>
#include <set>
#include <thread>

#include "engine/checkpoint/sample_manifest.h"
#include "engine/checkpoint/save_folder.h"
#include "engine/checkpoint/two_ranks.h"
#include "engine/initialize.h"
#include "support/equality.h"
#include "support/expect_error.h"
#include "support/forbid.h"
#include "support/odd_models.h"
#include "support/other_process.h"
#include "support/temp_folder.h"

namespace sherd::test {
namespace {

namespace fs = std::filesystem;
using engine::CheckpointReader;
using engine::Manifest;
using sherd::testing::expect_error;
using sherd::testing::OtherProcess;
using sherd::testing::read_text;
using sherd::testing::TempFolder;
using sherd::testing::write_text;

void save_in(const fs::path& folder) {
  on_two_ranks([&](Engine& engine) {
    engine.train_batch([&] { return odd_batch(engine, 0); });
    engine.save_checkpoint(folder.string(), "one", {{"data_position", "28"}});
  });
}

double next_loss(const fs::path& folder) {
  double loss = 0;
  on_two_ranks([&](Engine& engine) {
    engine.load_checkpoint(folder.string());
    const double got = engine.train_batch([&] { return odd_batch(engine, 1); }).loss;
    if (engine.dist().rank() == 0) loss = got;
  });
  return loss;
}

TEST(CheckpointFaults, AChangedManifestIsRefusedByItsName) {
  TempFolder folder;
  save_in(folder.path());
  const fs::path manifest = folder / "one/manifest.json";
  const std::string good = read_text(manifest);
  for (const auto& [part, other] : std::vector<std::pair<std::string, std::string>>{
           {"\"data_position\": \"28\"", "\"data_position\": \"29\""},
           {"\"global_steps\": 1", "\"global_steps\": 0"},
           {"\"optimizer_steps\": 1", "\"optimizer_steps\": 18446744073709551615"},
           {"\"skipped_steps\": 0", "\"skipped_steps\": -1"},
           {"\"skipped_steps\": 0", "\"skipped_steps\": 0,\n \"skipped_steps\": 0"}}) {
    std::string bad = good;
    ASSERT_NE(bad.find(part), std::string::npos) << part;
    write_text(manifest, bad.replace(bad.find(part), part.size(), other));
    expect_error(ErrorKind::data, manifest.string(), [&] { next_loss(folder.path()); });
  }
  write_text(manifest, good);
  EXPECT_GT(next_loss(folder.path()), 0);
  write_text(folder / "latest", "../one\n");
  expect_error(ErrorKind::data, (folder / "latest").string(), [&] { next_loss(folder.path()); });
}

/// Its checksums are those of its files, as where two runs wrote into one folder.
TEST(CheckpointFaults, RanksOfDifferentSavesAreNotTakenForOneCheckpoint) {
  TempFolder folder;
  save_in(folder / "a");
  save_in(folder / "b");
  const fs::path mixed = folder / "a/one", stray = mixed / "rank_00001.safetensors";
  fs::copy_file(folder / "b/one/rank_00001.safetensors", stray, fs::copy_options::overwrite_existing);
  Manifest manifest = Manifest::from_json(read_text(mixed / "manifest.json"), "m");
  manifest.files.at("rank_00001.safetensors") = engine::checksum_file(stray);
  write_text(mixed / "manifest.json", manifest.to_json());
  expect_error(ErrorKind::data,
               cat("'", stray.string(), "' and the manifest beside it were not saved together"),
               [&] { next_loss(folder / "a"); });
}

TEST(CheckpointFaults, AFolderThatAnotherRunSavesInIsRefusedOnAllRanks) {
  TempFolder folder;
  OtherProcess other([&] { return engine::SaveFolder(folder.path()); });
  on_two_ranks([&](Engine& engine) {
    engine.train_batch([&] { return odd_batch(engine, 0); });
    const std::string who = cat("in use by process ", other.pid(), " on host");
    expect_error(ErrorKind::io, who, [&] { engine.save_checkpoint(folder.path().string()); });
    expect_error(ErrorKind::io, who, [&] { engine.claim_save_folder(folder.path().string()); });
    engine.train_batch([&] { return odd_batch(engine, 1); });  // the ranks can go on
    if (engine.dist().rank() == 0) other.kill();
    engine.dist().world().barrier();
    engine.save_checkpoint(folder.path().string());
  });
  EXPECT_EQ(names_in(folder.path()), (std::set<std::string>{"global_step2", "latest"}));
}

/// As where a run's data lie in its save_dir, and a tag is called like them.
TEST(CheckpointFaults, AFolderThatIsNoCheckpointIsRefusedOnAllRanksBeforeAnythingIsWritten) {
  TempFolder folder;
  fs::create_directories(folder / "runs/data");
  write_text(folder / "runs/data/corpus", "mine");
  write_text(folder / "runs/data/manifest.json", "{}");
  write_text(folder / "runs/notes", "mine");
  const auto before = names_in(folder / "runs");
  on_two_ranks([&](Engine& engine) {
    engine.train_batch([&] { return odd_batch(engine, 0); });
    for (const char* tag : {"data", "notes"}) {
      const std::string who = engine.dist().rank() == 1 ? "rank 0 failed: " : "";
      expect_error(ErrorKind::io, cat(who, "'", (folder / "runs").string(), "/", tag, "' is no checkpoint"),
                   [&] { engine.save_checkpoint((folder / "runs").string(), tag); });
      EXPECT_EQ(names_in(folder / "runs"), before) << "not even the lock";
      engine.dist().world().barrier();
    }
    engine.save_checkpoint((folder / "runs").string(), "model");  // the ranks can go on
  });
  EXPECT_EQ(read_text(folder / "runs/data/corpus"), "mine");
  EXPECT_EQ(read_text(folder / "runs/notes"), "mine");
}

/// As where each machine has a disk of its own: what rank 0 makes is not there for the other.
TEST(CheckpointFaults, AFolderThatARankDoesNotShareIsToldToAll) {
  TempFolder folder;
  on_two_ranks([&](Engine& engine) {
    const int rank = engine.dist().rank();
    const fs::path disk = folder / cat("disk", rank);
    fs::create_directory(disk);
    expect_error(
        ErrorKind::io,
        cat(rank == 0 ? "rank 1 failed: " : "", "rank 0 made the folder '", (folder / "disk1").string()),
        [&] { engine.save_checkpoint(disk.string(), "one"); });
    expect_error(ErrorKind::io, "training.save_dir) that all machines share",
                 [&] { engine.save_checkpoint(disk.string(), "one"); });
    engine.dist().world().barrier();
    EXPECT_EQ(names_in(disk), rank == 0 ? std::set<std::string>{".sherd.lock"} : std::set<std::string>{});
    engine.save_checkpoint((folder / "disk0").string(), "one");  // the ranks can go on
  });
}

TEST(CheckpointFaults, AnEngineHoldsTheFolderThatItSavedInLast) {
  TempFolder folder;
  launch_ranks(1, [&](DistributedPtr dist) {
    Engine first(dist, std::make_shared<Odd>(), odd_config(0)),
        second(dist, std::make_shared<Odd>(), odd_config(0));
    first.save_checkpoint((folder / "a").string());
    expect_error(ErrorKind::io, "is in use by another engine of this process",
                 [&] { second.save_checkpoint((folder / "a").string()); });
    first.save_checkpoint((folder / "b").string());
    second.save_checkpoint((folder / "a").string());
    fs::remove_all(folder / "a");
    second.save_checkpoint((folder / "a").string());
    EXPECT_TRUE(fs::exists(folder / "a/.sherd.lock")) << "taken again after others removed it";
  });
  EXPECT_FALSE(fs::exists(folder / "a/.sherd.lock"));
  EXPECT_FALSE(fs::exists(folder / "b/.sherd.lock"));
}

/// A rank's thread is forbidden a system call for good, so the ranks run on threads that end.
TEST(CheckpointFaults, AFailureOfOneRankIsToldToAllAndLeavesNothing) {
  TempFolder folder;
  for (const int failing : {0, 1}) {
    bool forbidden = true;
    const auto body = [&](Engine& engine) {
      const int rank = engine.dist().rank();
      engine.train_batch([&] { return odd_batch(engine, 0); });
      if (rank == failing) forbidden = sherd::testing::forbid(SYS_fsync, EIO);
      engine.dist().world().barrier();
      if (!forbidden) return;
      expect_error(ErrorKind::io,
                   rank == failing ? "cannot sync" : cat("rank ", failing, " failed: cannot sync"),
                   [&] { engine.save_checkpoint(folder.path().string()); });
      engine.train_batch([&] { return odd_batch(engine, 1); });  // the ranks can go on
    };
    std::thread([&] { on_two_ranks(body); }).join();
    if (!forbidden) GTEST_SKIP() << sherd::testing::cannot_forbid;
    EXPECT_EQ(names_in(folder.path()), std::set<std::string>{});
  }
}

TEST(CheckpointFaults, DamageOnOneRankIsToldToAll) {
  TempFolder folder;
  save_in(folder.path());
  const fs::path file = folder / "one/rank_00001.safetensors";
  std::string content = read_text(file);
  content[content.size() - 3] = static_cast<char>(content[content.size() - 3] ^ 1);
  write_text(file, content);
  on_two_ranks([&](Engine& engine) {
    const std::string who = engine.dist().rank() == 0 ? "rank 1 failed: " : "";
    expect_error(ErrorKind::data, cat(who, file.string(), " is damaged"),
                 [&] { engine.load_checkpoint(folder.path().string()); });
    engine.train_batch([&] { return odd_batch(engine, 0); });
  });
}

}  // namespace
}  // namespace sherd::test
