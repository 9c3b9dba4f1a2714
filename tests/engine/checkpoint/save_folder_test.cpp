#include "engine/checkpoint/save_folder.h"
#include "engine/checkpoint/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/syscall.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <set>

#include "base/error.h"
#include "base/log.h"
#include "engine/checkpoint/sample_manifest.h"
#include "support/expect_error.h"
#include "support/forbid.h"
#include "support/other_process.h"
#include "support/temp_folder.h"

namespace sherd::engine {
namespace {

namespace fs = std::filesystem;
using sherd::testing::expect_error;
using sherd::testing::expect_in_child;
using sherd::testing::OtherProcess;
using sherd::testing::read_text;
using sherd::testing::TempFolder;
using sherd::testing::write_text;
using ::testing::ContainsRegex;

class SaveFolderTest : public ::testing::Test {
 protected:
  void make(const std::string& name, std::int64_t ordinal = 0) {
    fs::create_directories(folder / name);
    Manifest manifest = sample_manifest();
    manifest.ordinal = ordinal;
    write_text(folder / name / "manifest.json", manifest.to_json());
  }
  std::set<std::string> names() const {
    std::set<std::string> out;
    for (const auto& entry : fs::directory_iterator(folder.path())) out.insert(entry.path().filename());
    return out;
  }
  TempFolder folder;
};

using Names = std::set<std::string>;

TEST_F(SaveFolderTest, TwoRunsCannotSaveInOneFolder) {
  OtherProcess other([&] { return SaveFolder(folder.path()); });
  make("global_step3.0123456789abcdef.partial");
  expect_error(ErrorKind::io,
               cat("'", folder.path().string(), "' is in use by process ", other.pid(), " on host"),
               [&] { SaveFolder{folder.path()}; });
  expect_error(ErrorKind::io, "training.save_dir", [&] { SaveFolder{folder.path()}; });
  EXPECT_TRUE(names().contains("global_step3.0123456789abcdef.partial")) << "of the run that lives";
  other.kill();
  { const SaveFolder after(folder.path()); }
  EXPECT_EQ(names(), Names{});
}

TEST_F(SaveFolderTest, WhatDeadRunsLeftGoesAndAllElseStays) {
  const Names kept{"global_step1",
                   "global_step2.0123456789abcdeg.partial",
                   "notes.partial",
                   "mine.removed",
                   "latest",
                   ".0123456789abcdef.partial",
                   "global_stepx.partial"};
  for (const std::string& name : kept) make(name);
  for (const char* name : {"global_step2.0123456789abcdef.partial", "best.model.0123456789abcdef.partial",
                           "global_step1.fedcba9876543210.removed"})
    make(name);
  write_text(folder / "file.0123456789abcdef.partial", "not a folder");
  { const SaveFolder mine(folder.path()); }
  Names left = kept;
  left.insert("file.0123456789abcdef.partial");
  EXPECT_EQ(names(), left);
}

TEST_F(SaveFolderTest, PublishesUnderTheTagAndMovesLatest) {
  const SaveFolder mine(folder.path());
  for (const char* id : {"0000000000000001", "0000000000000002"}) {
    const fs::path partial = partial_folder(folder.path(), "a", id);
    fs::create_directory(partial);
    Manifest manifest = sample_manifest();
    manifest.save_id = id;
    write_text(partial / "manifest.json", manifest.to_json());
    mine.publish(partial, "a");
    EXPECT_EQ(read_text(folder / "a" / "manifest.json"), manifest.to_json());
    EXPECT_EQ(read_text(folder / "latest"), "a\n");
    EXPECT_EQ(names(), (Names{".sherd.lock", "a", "latest"}));
  }
}

TEST_F(SaveFolderTest, PublishesInThePlaceOfACheckpointOrNothingAlone) {
  const SaveFolder mine(folder.path());
  const fs::path partial = partial_folder(folder.path(), "a", "0000000000000001");
  const auto publish = [&] {
    fs::create_directory(partial);
    write_text(partial / "manifest.json", sample_manifest().to_json());
    mine.publish(partial, "a");
  };
  const auto expect_refused = [&] {
    expect_error(ErrorKind::io, cat("'", (folder / "a").string(), "' is no checkpoint"), publish);
    EXPECT_TRUE(fs::exists(partial));
  };
  write_text(folder / "a", "a file");
  expect_refused();
  EXPECT_EQ(read_text(folder / "a"), "a file");
  fs::remove(folder / "a");
  fs::create_directory(folder / "a");
  publish();
  for (const int format : {1, 2, 5}) {
    const std::string older = in_format(sample_manifest().to_json(), format);
    write_text(folder / "a" / "manifest.json", older.substr(0, older.size() / 2));  // damaged, and still ours
    publish();
    EXPECT_EQ(read_text(folder / "a" / "manifest.json"), sample_manifest().to_json());
  }
  write_text(folder / "a" / "manifest.json", R"({"format": "another program's"})");
  expect_refused();
  fs::remove(folder / "a" / "manifest.json");
  write_text(folder / "a" / "mine", "a file");
  expect_refused();
  EXPECT_EQ(read_text(folder / "a" / "mine"), "a file");
}

TEST_F(SaveFolderTest, KeepsWhatWasSavedLast) {
  make("global_step9", 1), make("global_step2", 2), make("global_step3", 3), make("global_step4", 4),
      make("best", 1);
  make("global_step5.0123456789abcdef.partial", 1);
  fs::create_directory(folder / "global_step1");  // not a checkpoint: nothing is known of it
  make("global_steps_compared", 9);
  write_text(folder / "global_steps_compared/manifest.json", "{}");  // of another program
  remove_old_checkpoints(folder.path(), 2, "global_step4");
  EXPECT_EQ(names(), (Names{"best", "global_step1", "global_step3", "global_step4",
                            "global_step5.0123456789abcdef.partial", "global_steps_compared"}));
  remove_old_checkpoints(folder.path(), 1, "global_step3");  // the newest is never removed, whatever it tells
  EXPECT_EQ(names(), (Names{"best", "global_step1", "global_step3", "global_step5.0123456789abcdef.partial",
                            "global_steps_compared"}));
}

/// A copy has other times, or all the same; of what tells no order nothing else is known than the step.
TEST_F(SaveFolderTest, KeepsTheHighestStepsOfWhatTellsNoOrder) {
  const auto now = fs::file_time_type::clock::now();
  for (int step = 8; step <= 13; ++step) {
    make(cat("global_step", step));
    fs::last_write_time(folder / cat("global_step", step) / "manifest.json",
                        now + std::chrono::hours(step % 2 == 0 ? step : -step));
  }
  make("global_step1", 1);
  EXPECT_EQ(engine::next_ordinal(folder.path()), 2);
  remove_old_checkpoints(folder.path(), 4, "global_step13");
  EXPECT_EQ(names(), (Names{"global_step1", "global_step11", "global_step12", "global_step13"}));
}

/// In a child process, where the kernel refuses to remove files, or to rename them.
TEST_F(SaveFolderTest, WhatCannotBeRemovedIsAWarning) {
  const auto after_forbidding = [&](std::initializer_list<unsigned> calls) {
    set_log_level(LogLevel::info);  // an engine of another test may have left another
    for (const unsigned call : calls)
      if (!sherd::testing::forbid(call, EPERM)) sherd::testing::cannot_test();
    remove_old_checkpoints(folder.path(), 1, "global_step2");
    std::_Exit(0);
  };
  make("global_step1", 1), make("global_step2", 2);
  const auto warned = ContainsRegex("cannot remove.*the run goes on");
  expect_in_child([&] { after_forbidding({SYS_rename, SYS_renameat, SYS_renameat2}); }, warned);
  EXPECT_EQ(names(), (Names{"global_step1", "global_step2"}));
  expect_in_child([&] { after_forbidding({SYS_unlink, SYS_unlinkat, SYS_rmdir}); }, warned);
  if (IsSkipped()) return;
  EXPECT_EQ(names().size(), 2u) << "it must not keep its name";
  { const SaveFolder next(folder.path()); }
  EXPECT_EQ(names(), (Names{"global_step2"}));
}

TEST(SaveTag, IsAPlainFileName) {
  for (const char* good : {"global_step1", "a", "best model", "a.partial", "1"})
    EXPECT_NO_THROW(require_good_tag(good));
  for (const char* bad :
       {"", ".", "..", ".hidden", "a/b", "a\nb", "a ", "latest", "a.0123456789abcdef.partial"})
    expect_error(ErrorKind::usage, "a checkpoint cannot be called", [&] { require_good_tag(bad); });
  EXPECT_NE(new_save_id(), new_save_id());
}

}  // namespace
}  // namespace sherd::engine
