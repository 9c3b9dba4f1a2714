// Checkpoints that are written beside training: the same bytes, the same training, the same errors.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/syscall.h>

#include <cerrno>
#include <functional>
#include <map>
#include <set>
#include <thread>

#include "base/log.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/two_ranks.h"
#include "engine/initialize.h"
#include "support/equality.h"
#include "support/expect_error.h"
#include "support/forbid.h"
#include "support/odd_models.h"
#include "support/temp_folder.h"

namespace sherd::test {
namespace {

namespace fs = std::filesystem;
using engine::CheckpointReader;
using engine::SaveOptions;
using sherd::testing::expect_error;
using sherd::testing::read_text;
using sherd::testing::TempFolder;

/// The files of a checkpoint by name, without what each act of saving has for itself: its id, and in the
/// manifest its number, and the checksums of files that contain the id.
std::map<std::string, std::string> contents(const fs::path& folder) {
  const engine::Manifest manifest = CheckpointReader(folder).manifest();
  std::map<std::string, std::string> out;
  for (const std::string& name : names_in(folder)) {
    std::string text = read_text(folder / name);
    for (std::size_t at = text.find(manifest.save_id); at != std::string::npos;
         at = text.find(manifest.save_id, at))
      text.replace(at, manifest.save_id.size(), 16, 'x');
    if (name == "manifest.json") {
      CheckpointReader reader(folder);
      for (const auto& [file, sum] : manifest.files) reader.verify(file);
      for (const std::string key : {"\"crc32c\": ", "\"ordinal\": "})
        for (std::size_t at = 0; (at = text.find(key, at)) != std::string::npos; at += key.size())
          text.erase(at + key.size(),
                     text.find_first_not_of("0123456789", at + key.size()) - at - key.size());
    }
    out[name] = std::move(text);
  }
  return out;
}

/// The tier and the use of a run's states decide how they are copied.
struct SaveCase {
  std::string name;
  std::function<void(RunSpec&)> change;
};

class AsyncSave : public ::testing::TestWithParam<SaveCase> {
 protected:
  RunSpec spec() const {
    RunSpec out;
    out.stage = 3, out.ranks = 2, out.steps = 6;
    out.nvme_path = (folder_ / "swap").string();
    fs::create_directories(folder_ / "swap");
    GetParam().change(out);
    return out;
  }
  std::string folder(const char* name) const { return (folder_ / name).string(); }
  TempFolder folder_;
};

TEST_P(AsyncSave, HasTheBytesOfASaveThatWaitsAndLeavesTrainingAsItIs) {
  RunSpec plain = spec(), saving = spec();
  const RunResult expected = train_local(plain);
  saving.between_steps = [&](Engine& engine) {
    const std::string tag = cat("of", engine.global_steps());
    if (engine.global_steps() % 2 == 0) engine.save_checkpoint(folder("waits"), tag);
    engine.save_checkpoint(folder("beside"), SaveOptions{.tag = tag, .async = true});
    EXPECT_TRUE(engine.save_under_way());
  };
  EXPECT_EQ(train_local(saving).bits(), expected.bits());
  EXPECT_EQ(read_text(folder_ / "beside/latest"), cat("of", saving.steps - 1, "\n"));
  int compared = 0;
  for (const std::string& tag : names_in(folder_ / "waits")) {
    if (tag == "latest") continue;
    const auto waited = contents(folder_ / "waits" / tag), beside = contents(folder_ / "beside" / tag);
    ASSERT_EQ(waited.size(), beside.size());
    for (const auto& [name, text] : waited) EXPECT_TRUE(beside.at(name) == text) << tag << "/" << name;
    ++compared;
  }
  EXPECT_EQ(compared, saving.steps / 2);
  std::set<std::string> whole{"latest"};
  for (int step = 0; step < saving.steps; ++step) whole.insert(cat("of", step));
  EXPECT_EQ(names_in(folder_ / "beside"), whole);
}

INSTANTIATE_TEST_SUITE_P(
    Placements, AsyncSave,
    ::testing::Values(
        SaveCase{"OnTheDevice", [](RunSpec&) {}},
        SaveCase{"WholeMasters", [](RunSpec& s) { s.split_masters = false; }},
        SaveCase{"Fp32", [](RunSpec& s) { s.dtype = "fp32", s.stage = 1; }},
        SaveCase{"InTheHost", [](RunSpec& s) { s.offload_optimizer = s.offload_param = "cpu"; }},
        SaveCase{"OptimizerOnNvme", [](RunSpec& s) { s.offload_optimizer = "nvme", s.sub_group = 2000; }},
        SaveCase{"EverythingOnNvme",
                 [](RunSpec& s) {
                   s.offload_optimizer = s.offload_param = "nvme",
                   s.offload_param_extra = R"(, "max_in_cpu": 0)";
                 }},
        SaveCase{"EarlyUpdatesOnNvme",
                 [](RunSpec& s) {
                   s.offload_optimizer = "nvme", s.clipping = 0, s.check_overflow = false, s.sub_group = 2000;
                 }},
        SaveCase{"LateUpdatesOnNvme",
                 [](RunSpec& s) {
                   s.offload_optimizer = s.offload_param = "nvme", s.schedule = "layered", s.accumulation = 2;
                 }},
        SaveCase{"EightBits",
                 [](RunSpec& s) { s.optimizer = R"("type": "AdamW8bit", "params": {"lr": 0.003})"; }},
        SaveCase{"EightBitsOnNvme",
                 [](RunSpec& s) {
                   s.optimizer = R"("type": "AdamW8bit", "params": {"lr": 0.003})",
                   s.offload_optimizer = "nvme";
                 }}),
    [](const auto& test) { return test.param.name; });

const SaveOptions async{.async = true};

TEST(AsyncSaves, AreFinishedByTheEndOfTheEngine) {
  TempFolder folder;
  on_two_ranks([&](Engine& engine) {
    engine.train_batch([&] { return odd_batch(engine, 0); });
    engine.save_checkpoint(folder.path().string(), async);
  });
  EXPECT_EQ(names_in(folder.path()), (std::set<std::string>{"global_step1", "latest"}));
  on_two_ranks([&](Engine& engine) {
    engine.load_checkpoint(folder.path().string());
    EXPECT_EQ(engine.global_steps(), 1);
  });
}

TEST(AsyncSaves, AreFinishedBeforeTheNextAndBeforeLoading) {
  TempFolder folder;
  on_two_ranks([&](Engine& engine) {
    for (int step = 0; step < 4; ++step) {
      engine.train_batch([&] { return odd_batch(engine, step); });
      engine.save_checkpoint(folder.path().string(), async);
    }
    engine.load_checkpoint(folder.path().string());
    EXPECT_EQ(engine.global_steps(), 4);
    EXPECT_FALSE(engine.save_under_way());
    engine.save_checkpoint(folder.path().string(), SaveOptions{.tag = "a", .async = true});
    engine.finish_save();
    EXPECT_FALSE(engine.save_under_way());
    if (engine.dist().rank() == 0) {
      EXPECT_EQ(read_text(folder / "latest"), "a\n");
    }
    engine.finish_save();  // of which there is none
  });
}

TEST(AsyncSaves, KeepAsManyAsTheyAreTold) {
  TempFolder folder;
  on_two_ranks([&](Engine& engine) {
    for (int step = 0; step < 5; ++step) {
      engine.train_batch([&] { return odd_batch(engine, step); });
      engine.save_checkpoint(folder.path().string(),
                             SaveOptions{.async = step % 2 == 0, .best = step == 1, .keep_last = 2});
    }
    engine.finish_save();
    engine.dist().world().barrier();
    engine.load_checkpoint(folder.path().string(), "best");
    EXPECT_EQ(engine.global_steps(), 2);
  });
  EXPECT_EQ(names_in(folder.path()),
            (std::set<std::string>{"global_step2", "global_step4", "global_step5", "latest", "best"}));
  EXPECT_EQ(engine::checkpoint_folder(folder / "best"), folder / "global_step2");
  EXPECT_EQ(engine::checkpoint_folder(folder.path(), "best"), folder / "global_step2");
  EXPECT_EQ(engine::checkpoint_folder(folder / "latest"), folder / "global_step5");
}

/// A rank's thread is forbidden a system call for good, so the ranks run on threads that end.
TEST(AsyncSaves, AFailureOfOneRankIsToldToAllWhereTheNextStepBeginsAndLeavesNothing) {
  TempFolder folder;
  for (const int failing : {0, 1}) {
    bool forbidden = true;
    const auto body = [&](Engine& engine) {
      const int rank = engine.dist().rank();
      engine.train_batch([&] { return odd_batch(engine, 0); });
      if (rank == failing) forbidden = sherd::testing::forbid(SYS_fsync, EIO);
      engine.dist().world().barrier();
      if (!forbidden) return;
      const std::string said =
          rank == failing ? "cannot sync" : cat("rank ", failing, " failed: cannot sync");
      engine.save_checkpoint(folder.path().string(), async);
      int steps = 1;
      expect_error(ErrorKind::io, said, [&] {
        for (; steps < 100'000; ++steps) engine.train_batch([&] { return odd_batch(engine, 1); });
      });
      EXPECT_EQ(engine.global_steps(), steps) << "the step that threw has not begun";
      EXPECT_FALSE(engine.save_under_way());
      engine.train_batch([&] { return odd_batch(engine, 1); });  // the ranks can go on
      engine.save_checkpoint(folder.path().string(), async);
      expect_error(ErrorKind::io, said, [&] { engine.finish_save(); });
      engine.save_checkpoint(folder.path().string(), async);
      expect_error(ErrorKind::io, said, [&] { engine.save_checkpoint(folder.path().string(), "next"); });
      engine.train_batch([&] { return odd_batch(engine, 1); });
      engine.save_checkpoint(folder.path().string(), async);  // its error is a warning
    };
    std::thread([&] { on_two_ranks(body); }).join();
    if (!forbidden) GTEST_SKIP() << sherd::testing::cannot_forbid;
    EXPECT_EQ(names_in(folder.path()), std::set<std::string>());
  }
}

TEST(AsyncSaves, WhatAManifestCannotHoldIsAnErrorAtOnce) {
  TempFolder folder;
  on_two_ranks([&](Engine& engine) {
    expect_error(ErrorKind::usage, "UTF-8", [&] {
      engine.save_checkpoint(folder.path().string(), SaveOptions{.client = {{"x", "\xff"}}, .async = true});
    });
    EXPECT_FALSE(engine.save_under_way());
    engine.train_batch([&] { return odd_batch(engine, 1); });
  });
  EXPECT_EQ(names_in(folder.path()), std::set<std::string>());
}

TEST(AsyncSaves, CopyOnceWithinTheHostsMemoryOrWait) {
  set_log_level(LogLevel::info);  // other tests of the process may have set another
  TempFolder folder;
  std::uint64_t copied = 0, before = 0;
  const auto save_twice = [&](std::uint64_t limit, bool fits) {
    launch_ranks(1, [&](DistributedPtr dist) {
      config::Config config = odd_config(0);
      config.device.host_memory_limit = limit;
      Engine engine(dist, std::make_shared<Odd>(), config);
      engine.train_batch([&] { return odd_batch(engine, 0); });
      const device::Ledger& ledger = engine.device().ledger();
      before = ledger.peak(device::Tier::host);
      ::testing::internal::CaptureStderr();
      for (const char* tag : {"a", "b"}) {
        engine.save_checkpoint(folder.path().string(), SaveOptions{.tag = tag, .async = true});
        EXPECT_EQ(engine.save_under_way(), fits);
      }
      const std::string said = ::testing::internal::GetCapturedStderr();
      const auto at = said.find("written while training waits");
      EXPECT_EQ(at != std::string::npos, !fits) << said;
      EXPECT_EQ(said.find("written while training waits", at + 1), std::string::npos) << "said once";
      engine.finish_save();
      if (fits) copied = ledger.current(device::Tier::host, device::Category::checkpoint);
      EXPECT_EQ(ledger.current(device::Tier::host, device::Category::checkpoint), fits ? copied : 0);
    });
    EXPECT_EQ(names_in(folder.path()), (std::set<std::string>{"a", "b", "latest"}));
  };
  save_twice(0, true);
  ASSERT_GT(copied, 0u);
  save_twice(before + copied, true);
  save_twice(before + copied - 1, false);
}

}  // namespace
}  // namespace sherd::test
