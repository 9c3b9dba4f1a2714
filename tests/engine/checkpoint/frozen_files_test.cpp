// Checkpoints of runs that leave parameters as they are: what these hold is written once, and each checkpoint
// is whole by itself.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include <cerrno>
#include <fstream>
#include <set>
#include <thread>

#include "base/log.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/format.h"
#include "engine/checkpoint/weights.h"
#include "engine/checkpoint/writer.h"
#include "support/equality.h"
#include "support/expect_error.h"
#include "support/forbid.h"
#include "support/temp_folder.h"
#include "support/whole_tensors.h"

namespace sherd::test {
namespace {

namespace fs = std::filesystem;
using engine::CheckpointReader;
using engine::SaveOptions;
using sherd::testing::expect_error;
using sherd::testing::TempFolder;
using sherd::testing::whole_tensors;

struct stat stat_of(const fs::path& path) {
  struct stat out {};
  EXPECT_EQ(::stat(path.c_str(), &out), 0) << path;
  return out;
}

ino_t inode(const fs::path& checkpoint, int rank = 0) {
  return stat_of(checkpoint / engine::frozen_file(rank)).st_ino;
}

/// Bytes that this process has given to write(2) and its like.
std::uint64_t written() {
  std::ifstream io("/proc/self/io");
  std::string key;
  for (std::uint64_t value = 0; io >> key >> value;)
    if (key == "wchar:") return value;
  ADD_FAILURE() << "no wchar in /proc/self/io";
  return 0;
}

void verify(const fs::path& checkpoint) {
  const CheckpointReader reader(checkpoint);
  reader.verify_all();
}

class FrozenFiles : public ::testing::Test {
 protected:
  FrozenFiles() {
    spec_.stage = 3, spec_.adapter = R"("type": "lora", "rank": 2)", spec_.layers = 4, spec_.hidden = 64;
    spec_.dropout = 0;
  }
  fs::path place(const std::string& tag) const { return folder_ / tag; }
  void on_ranks(const RunSpec& spec, const std::function<void(Engine&)>& body) const {
    launch_ranks(spec.ranks, [&](DistributedPtr dist) { body(*make_engine(dist, spec)); });
  }
  void on_ranks(const std::function<void(Engine&)>& body) const { on_ranks(spec_, body); }
  static void step(Engine& engine) {
    const std::int64_t at = engine.global_steps();
    engine.train_batch([&] { return synthetic_batch(engine.device(), 2, 24, 101, at, 0, 0); });
  }
  void save(Engine& engine, const std::string& tag, bool async = false) const {
    engine.save_checkpoint(folder_.path().string(), SaveOptions{.tag = tag, .async = async});
  }
  void load(Engine& engine, const std::string& tag) const {
    engine.load_checkpoint(folder_.path().string(), tag);
  }
  /// Two checkpoints hold the same of what does not train, and other adapters.
  void expect_same_base(const std::string& a, const std::string& b) const {
    const auto one = whole_tensors(place(a)), other = whole_tensors(place(b));
    ASSERT_EQ(one.size(), other.size());
    int frozen = 0;
    for (const auto& [name, bytes] : one) {
      if (!name.starts_with("frozen.")) continue;
      ++frozen;
      EXPECT_TRUE(other.at(name) == bytes) << name;
    }
    EXPECT_GT(frozen, 4);
  }

  TempFolder folder_;
  RunSpec spec_;
};

/// With memory of the host and blocks in 8 bits as with bf16 on the device, while training waits or not.
TEST_F(FrozenFiles, AreWrittenByTheFirstSaveAndLinkedByTheNext) {
  for (const bool async : {false, true}) {
    RunSpec s = spec_;
    if (async) s.adapter += R"(, "base_dtype": "int8")", s.offload_param = "cpu";
    const std::string first = cat("first", async), second = cat("second", async), third = cat("third", async);
    std::uint64_t before = 0, after = 0;
    on_ranks(s, [&](Engine& engine) {
      step(engine);
      save(engine, first, async);
      step(engine);
      engine.finish_save();
      engine.dist().world().barrier();
      if (engine.dist().rank() == 0) before = written();
      engine.dist().world().barrier();
      save(engine, second, async);
      engine.finish_save();
      engine.dist().world().barrier();
      if (engine.dist().rank() == 0) after = written();
      step(engine);
      save(engine, third, !async);
    });
    std::uint64_t base = 0, others = 0;
    for (const auto& entry : fs::directory_iterator(place(second)))
      (entry.path().string().ends_with(".frozen.safetensors") ? base : others) += entry.file_size();
    EXPECT_GE(after - before, others) << "the counter counts";
    EXPECT_LT(after - before, others + 4096);
    EXPECT_GT(base, others) << "the base is what is large";
    for (int rank = 0; rank < s.ranks; ++rank) {
      EXPECT_EQ(inode(place(second), rank), inode(place(first), rank));
      EXPECT_EQ(inode(place(third), rank), inode(place(first), rank));
      EXPECT_EQ(stat_of(place(third) / engine::frozen_file(rank)).st_nlink, 3u);
    }
    for (const std::string& tag : {first, second, third}) verify(place(tag));
    expect_same_base(first, third);
    const CheckpointReader a(place(first)), b(place(second));
    EXPECT_EQ(a.manifest().frozen_id, a.manifest().save_id);
    EXPECT_EQ(b.manifest().frozen_id, a.manifest().save_id);
    EXPECT_FALSE(whole_tensors(place(first)) == whole_tensors(place(second))) << "the adapter has moved on";
  }
}

/// Restarted twice, from checkpoints of which one is a copy elsewhere, to the bits of a run without a stop.
TEST_F(FrozenFiles, AreLinkedOverRestarts) {
  std::vector<double> expected, losses;
  const auto run = [&](Engine& engine, int until, std::vector<double>& into) {
    while (engine.global_steps() < until) {
      const std::int64_t at = engine.global_steps();
      const double loss =
          engine.train_batch([&] { return synthetic_batch(engine.device(), 2, 24, 101, at, 0, 0); }).loss;
      if (engine.dist().rank() == 0) into.push_back(loss);
    }
  };
  on_ranks([&](Engine& engine) { run(engine, 6, expected), save(engine, "whole"); });
  on_ranks([&](Engine& engine) { run(engine, 2, losses), save(engine, "a"); });
  on_ranks([&](Engine& engine) {
    load(engine, "a");
    save(engine, "again", true);
    run(engine, 4, losses), save(engine, "b");
  });
  on_ranks([&](Engine& engine) {
    load(engine, "b");
    run(engine, 6, losses), save(engine, "c");
  });
  EXPECT_EQ(losses, expected);
  for (const char* tag : {"again", "b", "c"})
    for (int rank = 0; rank < spec_.ranks; ++rank)
      EXPECT_EQ(inode(place(tag), rank), inode(place("a"), rank));
  EXPECT_TRUE(whole_tensors(place("c")) == whole_tensors(place("whole")));
  EXPECT_NE(inode(place("c")), inode(place("whole")));

  fs::create_directory(folder_ / "elsewhere");
  fs::copy(place("b"), folder_ / "elsewhere" / "b", fs::copy_options::recursive);
  for (const char* tag : {"a", "again", "b", "whole"}) fs::remove_all(place(tag));
  verify(place("c"));
  on_ranks([&](Engine& engine) {
    engine.load_checkpoint((folder_ / "elsewhere").string(), "b");
    save(engine, "d");
  });
  EXPECT_EQ(inode(place("d")), inode(folder_ / "elsewhere" / "b"));
  EXPECT_NE(inode(place("d")), inode(place("c")));
}

TEST_F(FrozenFiles, StayWhenOldCheckpointsGo) {
  ino_t first = 0;
  on_ranks([&](Engine& engine) {
    for (int i = 0; i < 4; ++i) {
      step(engine);
      engine.save_checkpoint(folder_.path().string(), SaveOptions{.async = i % 2 == 1, .keep_last = 1});
      engine.finish_save();
      engine.dist().world().barrier();
      if (i == 0 && engine.dist().rank() == 0) first = inode(place("global_step1"));
    }
    // The last one goes by hand: there is nothing to link to, and the same tag is saved again.
    engine.dist().world().barrier();
    if (engine.dist().rank() == 0) {
      EXPECT_EQ(inode(place("global_step4")), first);
      EXPECT_EQ(stat_of(place("global_step4") / engine::frozen_file(0)).st_nlink, 1u);
      verify(place("global_step4"));
      fs::remove_all(place("global_step4"));
    }
    engine.dist().world().barrier();
    for (int i = 0; i < 2; ++i) save(engine, "global_step4");
  });
  verify(place("global_step4"));
  EXPECT_EQ(stat_of(place("global_step4") / engine::frozen_file(0)).st_nlink, 1u);
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder_.path())) names.insert(entry.path().filename());
  EXPECT_EQ(names, (std::set<std::string>{"global_step4", "latest"}));
}

/// Another layout cuts them elsewhere; converted, they are read and go on.
TEST_F(FrozenFiles, AreWrittenAnewInAnotherLayout) {
  on_ranks([&](Engine& engine) { step(engine), save(engine, "two"); });
  const auto saved = whole_tensors(place("two"));
  RunSpec three = spec_, pipeline = spec_;
  three.ranks = 3, pipeline.pipeline = 2;
  for (const RunSpec& s : {three, pipeline}) {
    on_ranks(s, [&](Engine& engine) {
      load(engine, "two");
      save(engine, "other");
      save(engine, "next", true);
    });
    EXPECT_TRUE(whole_tensors(place("other")) == saved);
    const CheckpointReader two(place("two")), other(place("other"));
    EXPECT_NE(other.manifest().frozen_id, two.manifest().frozen_id);
    for (int rank = 0; rank < s.ranks; ++rank) {
      EXPECT_EQ(inode(place("next"), rank), inode(place("other"), rank));
      if (rank < 2) {
        EXPECT_NE(inode(place("other"), rank), inode(place("two"), rank));
      }
    }
  }
  const auto device = device::make_cpu_device(1);
  engine::copy_checkpoint(CheckpointReader(place("two")), folder_ / "copies", "c", 3, false, *device);
  verify(folder_ / "copies" / "c");
  EXPECT_TRUE(whole_tensors(folder_ / "copies" / "c") == saved);
  EXPECT_TRUE(fs::exists(folder_ / "copies" / "c" / engine::frozen_file(2)));
  on_ranks([&](Engine& engine) {
    engine.load_checkpoint((folder_ / "copies").string());
    save(engine, "back");
  });
  EXPECT_TRUE(whole_tensors(place("back")) == saved);
}

/// The first and the last of four stages have no adapter: a save beside training writes nothing of them.
TEST_F(FrozenFiles, MayBeAllThatARankHas) {
  RunSpec s = spec_;
  s.layers = 2, s.stage = 1, s.ranks = s.pipeline = 4, s.partition = "uniform", s.accumulation = 4;
  on_ranks(s, [&](Engine& engine) {
    step(engine);
    save(engine, "a", true);
    step(engine);
    save(engine, "b", true);
  });
  verify(place("b"));
  for (int rank = 0; rank < 4; ++rank) EXPECT_EQ(inode(place("b"), rank), inode(place("a"), rank));
  EXPECT_TRUE(tensor::SafetensorsFile(place("b") / engine::rank_file(3)).entries().empty());
  expect_same_base("a", "b");
}

TEST_F(FrozenFiles, AreWrittenAnewWhenWeightsAreLoaded) {
  struct Halves final : nn::WeightSource {
    void check(const std::vector<nn::ParameterPtr>&) const override {}
    void read(const std::string&, const tensor::Slice&, std::int64_t, const tensor::Tensor& to) override {
      for (std::int64_t i = 0; i < to.numel(); ++i) to.data<bf16>()[i] = bf16(0.5f);
    }
    bool has(const std::string& name) const override { return name == "blocks.2.mlp.up.weight"; }
  } halves;
  on_ranks([&](Engine& engine) {
    save(engine, "drawn");
    engine.load_weights(halves);
    save(engine, "loaded");
  });
  EXPECT_NE(inode(place("loaded")), inode(place("drawn")));
  const auto drawn = whole_tensors(place("drawn")), loaded = whole_tensors(place("loaded"));
  for (const auto& [name, bytes] : loaded)
    EXPECT_EQ(bytes == drawn.at(name), name != "frozen.blocks.2.mlp.up.weight") << name;
  verify(place("loaded"));
}

/// A file that something has written to is no base for the next checkpoint.
TEST_F(FrozenFiles, AreNotLinkedToAfterAChangeFromOutside) {
  on_ranks([&](Engine& engine) {
    save(engine, "a");
    engine.dist().world().barrier();
    if (engine.dist().rank() == 1) {
      const fs::path file = place("a") / engine::frozen_file(1);
      const auto size = static_cast<std::streamoff>(fs::file_size(file));
      std::fstream(file, std::ios::in | std::ios::out | std::ios::binary).seekp(size - 1).put('\x55');
    }
    engine.dist().world().barrier();
    save(engine, "b");
  });
  EXPECT_EQ(inode(place("b"), 0), inode(place("a"), 0));
  EXPECT_NE(inode(place("b"), 1), inode(place("a"), 1));
  verify(place("b"));
  const std::string said = cat(engine::frozen_file(1), " is damaged");
  expect_error(ErrorKind::data, said, [&] { verify(place("a")); });
  expect_error(ErrorKind::data, said, [&] { on_ranks([&](Engine& engine) { load(engine, "a"); }); });
  on_ranks([&](Engine& engine) { load(engine, "b"); });
}

/// As on a file system without links: every checkpoint has files of its own, of the same bytes.
TEST_F(FrozenFiles, AreWrittenWhereALinkIsRefused) {
  set_log_level(LogLevel::info);
  bool forbidden = true;
  std::string said;
  std::thread([&] {
    on_ranks([&](Engine& engine) {
      save(engine, "a");
      if (engine.dist().rank() == 1) forbidden = sherd::testing::forbid(SYS_linkat, EXDEV);
      engine.dist().world().barrier();
      if (!forbidden) return;
      if (engine.dist().rank() == 0) ::testing::internal::CaptureStderr();
      engine.dist().world().barrier();
      save(engine, "b", true);
      save(engine, "c");
      engine.dist().world().barrier();
      if (engine.dist().rank() == 0) said = ::testing::internal::GetCapturedStderr();
    });
  }).join();
  if (!forbidden) GTEST_SKIP() << sherd::testing::cannot_forbid;
  const std::set<ino_t> inodes{inode(place("a"), 1), inode(place("b"), 1), inode(place("c"), 1)};
  EXPECT_EQ(inodes.size(), 3u);
  EXPECT_EQ(inode(place("c"), 0), inode(place("a"), 0)) << "of the rank that may";
  const CheckpointReader a(place("a")), c(place("c"));
  for (int rank = 0; rank < 2; ++rank)
    EXPECT_EQ(a.manifest().files.at(engine::frozen_file(rank)),
              c.manifest().files.at(engine::frozen_file(rank)));
  verify(place("b")), verify(place("c"));
  const auto at = said.find("written with each checkpoint");
  ASSERT_NE(at, std::string::npos) << said;
  EXPECT_EQ(said.find("written with each checkpoint", at + 1), std::string::npos) << "said once";
}

/// One of another run, of the same name and layout, is not taken for this one's.
TEST_F(FrozenFiles, OfAnotherRunAreRefused) {
  on_ranks([&](Engine& engine) { save(engine, "a"); });
  on_ranks([&](Engine& engine) { save(engine, "b"); });
  fs::copy_file(place("a") / engine::frozen_file(0), place("b") / engine::frozen_file(0),
                fs::copy_options::overwrite_existing);
  expect_error(ErrorKind::data, "were not saved together", [&] { CheckpointReader{place("b")}; });
  fs::remove(place("b") / engine::frozen_file(0));
  expect_error(ErrorKind::io, engine::frozen_file(0), [&] { CheckpointReader{place("b")}; });
}

/// Checkpoints of before have all tensors in one file of a rank.
TEST_F(FrozenFiles, AreNotNeededInOlderCheckpoints) {
  on_ranks([&](Engine& engine) { step(engine), save(engine, "new"); });
  engine::Manifest manifest = CheckpointReader(place("new")).manifest();
  fs::create_directory(place("old"));
  on_ranks([&](Engine& engine) {
    load(engine, "new");
    const int rank = engine.dist().rank();
    auto all = engine::live_tensors(engine.sharded(), engine.device(), engine::FilePart::trained);
    for (auto& tensor : engine::live_tensors(engine.sharded(), engine.device(), engine::FilePart::frozen))
      all.push_back(std::move(tensor));
    engine::write_rank_file(place("old") / engine::rank_file(rank), {std::move(all), {}}, manifest.save_id);
  });
  for (int rank = 0; rank < 2; ++rank) {
    manifest.files.erase(engine::frozen_file(rank));
    manifest.files[engine::rank_file(rank)] = engine::checksum_file(place("old") / engine::rank_file(rank));
  }
  manifest.frozen_id.clear();
  testing::write_text(place("old") / "manifest.json", manifest.to_json());
  on_ranks([&](Engine& engine) {
    load(engine, "old");
    save(engine, "next");
  });
  verify(place("next"));
  EXPECT_TRUE(whole_tensors(place("next")) == whole_tensors(place("new")));
  EXPECT_TRUE(fs::exists(place("next") / engine::frozen_file(1)));
}

}  // namespace
}  // namespace sherd::test
