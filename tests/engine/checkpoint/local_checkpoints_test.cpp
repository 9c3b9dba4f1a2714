// Local checkpoints: ranks as threads, each "machine" a folder of its own. What comes back is held against a
// checkpoint of files that was saved at the same moment, whose tensors an oracle puts together.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <fstream>

#include "base/crc32c.h"
#include "base/files.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/format.h"
#include "engine/checkpoint/peer_copies.h"
#include "engine/checkpoint/two_ranks.h"
#include "engine/initialize.h"
#include "support/equality.h"
#include "support/expect_error.h"
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

class LocalCheckpointsTest : public ::testing::Test {
 protected:
  LocalCheckpointsTest() {
    spec_.stage = 2, spec_.ranks = 4, spec_.accumulate_in = "fp32", spec_.layers = 2, spec_.rows = 1;
  }
  /// Runs on `ranks` ranks of `machines` machines, the first of which is number `first`.
  void on_machines(int ranks, int machines, const std::function<void(Engine&)>& body, bool anew = false,
                   int first = 0) {
    RunSpec spec = spec_;
    spec.ranks = ranks;
    launch_ranks(ranks, [&](const DistributedPtr& dist) {
      const auto engine = make_engine(dist, spec);
      engine->set_checkpoint_files({{"words", "of the caller"}});
      engine->claim_save_folder(run().string());
      engine->claim_local_folder(run().string(), machine(first + dist->rank() * machines / ranks).string(),
                                 anew);
      body(*engine);
    });
  }
  fs::path run() const { return folder_ / "run"; }
  fs::path machine(int number) const { return folder_ / cat("machine", number); }
  /// The folder of the run there.
  fs::path local(int number) const {
    for (const auto& entry : fs::directory_iterator(machine(number))) return entry.path();
    return {};
  }
  /// The checkpoint of that step there; an empty path: none.
  fs::path saved(int number, int step) const {
    for (const auto& entry : fs::directory_iterator(local(number)))
      if (entry.path().stem() == cat("global_step", step)) return entry.path();
    return {};
  }
  /// What lies there, without the ids of acts of saving.
  std::set<std::string> steps_in(int number) const {
    std::set<std::string> out;
    for (const std::string& name : names_in(local(number))) out.insert(name.substr(0, name.find('.')));
    EXPECT_EQ(out.size(), names_in(local(number)).size());
    return out;
  }
  /// Each file there is as its manifest says.
  void expect_whole_files(int number, int step) const {
    const fs::path folder = saved(number, step);
    const auto manifest =
        engine::Manifest::from_json(sherd::read_file(folder / "manifest.json"), folder / "manifest.json");
    for (const std::string& name : names_in(folder))
      EXPECT_TRUE(name == "manifest.json" || engine::checksum_file(folder / name) == manifest.files.at(name))
          << name;
  }
  static void step(Engine& engine, int count = 1) {
    for (int i = 0; i < count; ++i)
      engine.train_batch([&] {
        return synthetic_batch(engine.device(), 1, 24, 101, engine.global_steps(), 0, engine.dist().rank());
      });
  }
  /// Saves locally, and what is the same under TAG.
  void save_both(Engine& engine, const std::string& tag, bool async) {
    engine.save_checkpoint((folder_ / "expected").string(), tag);
    EXPECT_TRUE(engine.save_local_checkpoint(SaveOptions{.client = {{"tag", tag}}, .async = async}));
    engine.finish_save();
  }
  /// Goes on from the newest, and expects what was saved under TAG.
  void expect_newest(Engine& engine, const std::string& tag, bool local = true) {
    const auto loaded = engine.load_newest_checkpoint(run().string());
    ASSERT_TRUE(loaded.has_value());
    EXPECT_EQ(loaded->local, local);
    EXPECT_EQ(loaded->client.at("tag"), tag);
    engine.save_checkpoint((folder_ / "found").string(), tag);
    if (engine.dist().rank() != 0) return;
    EXPECT_TRUE(whole_tensors(folder_ / "found" / tag) == whole_tensors(folder_ / "expected" / tag));
    const auto expected = CheckpointReader(folder_ / "expected" / tag).manifest();
    EXPECT_EQ(engine.global_steps(), expected.global_steps);
  }
  static void flip_last_byte(const fs::path& path) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(-1, std::ios::end);
    const char last = static_cast<char>(file.get());
    file.seekp(-1, std::ios::end).put(static_cast<char>(last ^ 1));
  }

  TempFolder folder_;
  RunSpec spec_;
};

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
      3, 3, [&](Engine& engine) { step(engine), save_both(engine, "one", true); }, true);
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

/// What stands for no room: a folder where a file is to be.
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

TEST_F(LocalCheckpointsTest, OfAnotherRunAreNotTaken) {
  const auto nothing = [&](Engine& engine) {
    EXPECT_FALSE(engine.load_newest_checkpoint(run().string()).has_value());
  };
  on_machines(
      2, 2, [&](Engine& engine) { step(engine), save_both(engine, "one", true); }, true);
  fs::remove_all(run());
  on_machines(2, 2, nothing);
  EXPECT_TRUE(names_in(local(0)).empty()) << "and make no place for them";
  on_machines(
      2, 2, [&](Engine& engine) { step(engine), save_both(engine, "again", true); }, true);
  on_machines(2, 2, nothing, true);
  on_machines(2, 2, [&](Engine& engine) {
    step(engine), save_both(engine, "last", true);
    engine.remove_local_checkpoints();
  });
  EXPECT_TRUE(names_in(machine(0)).empty() && names_in(machine(1)).empty());
}

TEST_F(LocalCheckpointsTest, ThatCannotBeMadeIsAWarningAndTheOneBeforeStays) {
  on_machines(
      2, 2,
      [&](Engine& engine) {
        step(engine), save_both(engine, "one", true);
        step(engine);
        engine.dist().world().barrier();
        const fs::path gone = local(1), aside = gone.string() + ".aside";
        if (engine.dist().rank() == 0) fs::rename(gone, aside);
        engine.dist().world().barrier();
        for (const bool async : {false, true}) {
          EXPECT_TRUE(engine.save_local_checkpoint(SaveOptions{.async = async}));
          step(engine);
          engine.finish_save();
        }
        engine.dist().world().barrier();
        if (engine.dist().rank() == 0) fs::remove_all(gone), fs::rename(aside, gone);
        engine.dist().world().barrier();
        EXPECT_EQ(steps_in(0), std::set<std::string>{"global_step1"});
      },
      true);
  on_machines(2, 2, [&](Engine& engine) { expect_newest(engine, "one"); });
}

/// Where one machine cannot complete it no other removes the one before, and training goes on.
TEST_F(LocalCheckpointsTest, ThatOneMachineCannotPublishLeavesTheOneBefore) {
  on_machines(
      2, 2,
      [&](Engine& engine) {
        step(engine), save_both(engine, "one", true);
        step(engine);
        EXPECT_TRUE(engine.save_local_checkpoint(SaveOptions{.async = true}));
        const auto in_the_way = [&] {  // of the manifest, which comes last
          for (const auto& entry : fs::directory_iterator(local(1)))
            if (entry.path().extension() == ".partial")
              fs::create_directories(entry.path() / "manifest.json/x");
        };
        if (engine.dist().rank() == 1) in_the_way();
        engine.dist().world().barrier();
        engine.finish_save();
        engine.dist().world().barrier();
        EXPECT_TRUE(!saved(0, 1).empty() && !saved(1, 1).empty());
        EXPECT_EQ(steps_in(1), std::set<std::string>{"global_step1"}) << "nothing stays of what failed";
        engine.dist().world().barrier();
        step(engine), save_both(engine, "three", true);
        engine.dist().world().barrier();
        EXPECT_EQ(steps_in(0), std::set<std::string>{"global_step3"});
      },
      true);
  on_machines(2, 2, [&](Engine& engine) { expect_newest(engine, "three"); });
}

/// One rank alone has no memory for copies; all go on, and later ones are made.
TEST_F(LocalCheckpointsTest, WithoutMemoryOnOneRankIsAWarning) {
  on_machines(
      2, 2,
      [&](Engine& engine) {
        step(engine);
        device::Ledger& ledger = engine.device().ledger();
        for (const bool async : {false, true}) {
          if (engine.dist().rank() == 1)
            ledger.set_limit(device::Tier::host, ledger.current(device::Tier::host) + 1);
          EXPECT_TRUE(engine.save_local_checkpoint(SaveOptions{.async = async}));
          engine.finish_save();
          ledger.set_limit(device::Tier::host, 0);
          engine.dist().world().barrier();
          EXPECT_EQ(names_in(local(0)), std::set<std::string>{});
        }
        const auto before = ledger.current(device::Tier::host);
        save_both(engine, "one", false);
        EXPECT_GT(ledger.current(device::Tier::host), before) << "buffers are charged";
      },
      true);
  on_machines(2, 2, [&](Engine& engine) { expect_newest(engine, "one"); });
}

/// The processes end while some machines have published the second one, and others not yet.
TEST_F(LocalCheckpointsTest, ACrashWhileOneIsPublishedLeavesOneThatIsWhole) {
  const auto keep = [&](const std::string& under) {
    for (int m = 0; m < 3; ++m) fs::copy(machine(m), folder_ / under / cat(m), fs::copy_options::recursive);
  };
  fs::create_directories(folder_ / "old"), fs::create_directories(folder_ / "new");
  on_machines(
      3, 3,
      [&](Engine& engine) {
        step(engine), save_both(engine, "old", true);
        engine.dist().world().barrier();
        if (engine.dist().rank() == 0) keep("old");
        engine.dist().world().barrier();
        step(engine), save_both(engine, "new", true);
      },
      true);
  keep("new");
  for (const int published : {1, 2, 5, 7}) {  // by which machines, as bits
    for (int m = 0; m < 3; ++m) {
      fs::remove_all(machine(m));
      fs::copy(folder_ / "old" / cat(m), machine(m), fs::copy_options::recursive);
      fs::copy(folder_ / "new" / cat(m), machine(m), fs::copy_options::recursive);
      for (const auto& entry : fs::directory_iterator(local(m)))
        if ((published & 1 << m) == 0 &&
            fs::exists(folder_ / "new" / cat(m) / local(m).filename() / entry.path().filename()))
          fs::rename(entry.path(), entry.path().string() + ".partial");
    }
    on_machines(3, 3, [&](Engine& engine) {
      const engine::LocalFolder folder(engine.dist().world(), machine(engine.dist().rank()), run(), false);
      if (published == 7) {
        ASSERT_EQ(folder.checkpoints().size(), 2u);
        EXPECT_EQ(folder.checkpoints()[0].manifest.global_steps, 2);
        expect_newest(engine, "new");
        return;
      }
      const auto loaded = engine.load_newest_checkpoint(run().string());
      ASSERT_TRUE(loaded.has_value()) << published;
      EXPECT_TRUE(loaded->local && engine.global_steps() == (loaded->client.at("tag") == "new" ? 2 : 1));
    });
    for (int m = 0; m < 3; ++m)
      for (const std::string& name : names_in(local(m))) EXPECT_FALSE(name.ends_with(".partial")) << name;
  }
}

TEST_F(LocalCheckpointsTest, ThatIsDueDuringAnotherSaveIsLeftForLater) {
  on_machines(
      2, 2,
      [&](Engine& engine) {
        step(engine);
        engine.save_checkpoint(run().string(), SaveOptions{.tag = "file", .async = true});
        EXPECT_FALSE(engine.save_local_checkpoint({}));
        engine.finish_save();
        EXPECT_TRUE(engine.save_local_checkpoint({}));
      },
      true);
}

/// A file of frozen parameters that changed unnoticed on its way to who keeps it: his copy would be none.
TEST_F(LocalCheckpointsTest, ACopyThatComesDamagedIsNotKept) {
  spec_.adapter = R"("type": "lora", "r": 4)";
  on_machines(
      2, 2,
      [&](Engine& engine) {
        step(engine), save_both(engine, "one", true);
        step(engine);
        engine.dist().world().barrier();
        const std::string frozen = engine::frozen_file(0);
        if (engine.dist().rank() == 0) {
          const auto time = fs::last_write_time(saved(0, 1) / frozen);
          flip_last_byte(saved(0, 1) / frozen);
          fs::last_write_time(saved(0, 1) / frozen, time);
          fs::remove(saved(1, 1) / frozen);
        }
        engine.dist().world().barrier();
        for (const bool async : {false, true}) {
          EXPECT_TRUE(engine.save_local_checkpoint(SaveOptions{.async = async}));
          engine.finish_save();
          engine.dist().world().barrier();
          EXPECT_EQ(steps_in(0), std::set<std::string>{"global_step1"});
        }
        if (engine.dist().rank() == 0) flip_last_byte(saved(0, 1) / frozen);
        engine.dist().world().barrier();
        save_both(engine, "two", true);
      },
      true);
  on_machines(2, 2, [&](Engine& engine) { expect_newest(engine, "two"); });
}

TEST_F(LocalCheckpointsTest, FrozenParametersAreWrittenAnewWhenWeightsAreLoaded) {
  struct Halves final : nn::WeightSource {
    void check(const std::vector<nn::ParameterPtr>&) const override {}
    void read(const std::string&, const tensor::Slice&, std::int64_t, const tensor::Tensor& to) override {
      for (std::int64_t i = 0; i < to.numel(); ++i) to.data<bf16>()[i] = bf16(0.5f);
    }
    bool has(const std::string& name) const override { return name == "blocks.1.mlp.up.weight"; }
  } halves;
  spec_.adapter = R"("type": "lora", "r": 4)";
  on_machines(
      2, 2,
      [&](Engine& engine) {
        save_both(engine, "drawn", true);
        engine.load_weights(halves);
        save_both(engine, "loaded", true);
      },
      true);
  fs::remove_all(machine(0));
  on_machines(2, 2, [&](Engine& engine) { expect_newest(engine, "loaded"); });
}

/// A rank that gives up alone, between two exchanges, is not waited for.
TEST_F(LocalCheckpointsTest, CopiesEndOnAllRanksWhereOneGivesUp) {
  const auto begin = std::chrono::steady_clock::now();
  on_machines(3, 3, [&](Engine& engine) {
    const int rank = engine.dist().rank();
    const engine::LocalFolder folder(engine.dist().world(), machine(rank), run(), false);
    engine::PeerCopies copies(folder, engine.dist().world(), engine.device());
    engine::SaveAct act;
    act.rank = rank, act.ranks = 3, act.partial = folder.path();
    const auto gives_up = [rank] {
      if (rank == 1) fail(ErrorKind::interrupted, "given up");
    };
    const auto kind = rank == 1 ? ErrorKind::interrupted : ErrorKind::comm;
    expect_error(kind, "given up", [&] { copies.write(act, {std::vector<FileChecksum>(3), {}}, gives_up); });
  });
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20)) << "of a deadline of 60";
}

}  // namespace
}  // namespace sherd::test
