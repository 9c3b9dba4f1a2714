// Local checkpoints that cannot be made, are cut off or come damaged: the one before stays, and ranks go on.
#include <bit>

#include "engine/checkpoint/background_save.h"
#include "engine/checkpoint/local/peer_copies.h"
#include "engine/checkpoint/local_machines.h"
#include "support/expect_error.h"

namespace sherd::test {
namespace {

namespace fs = std::filesystem;
using engine::CheckpointReader;
using engine::SaveOptions;
using sherd::testing::expect_error;

class LocalFailures : public LocalMachines {};

TEST_F(LocalFailures, OfAnotherRunAreNotTaken) {
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

TEST_F(LocalFailures, ThatCannotBeMadeIsAWarningAndTheOneBeforeStays) {
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
TEST_F(LocalFailures, ThatOneMachineCannotPublishLeavesTheOneBefore) {
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
TEST_F(LocalFailures, WithoutMemoryOnOneRankIsAWarning) {
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
TEST_F(LocalFailures, ACrashWhileOneIsPublishedLeavesOneThatIsWhole) {
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
  for (const int published : {1, 2, 5, 6, 7}) {  // by which machines, as bits; any two have all files
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
        expect_newest(engine, "new");
        return;
      }
      const auto loaded = engine.load_newest_checkpoint(run().string());
      ASSERT_TRUE(loaded.has_value()) << published;
      EXPECT_EQ(loaded->client.at("tag"),
                std::popcount(static_cast<unsigned>(published)) == 1 ? "old" : "new")
          << published;
      EXPECT_TRUE(loaded->local && engine.global_steps() == (loaded->client.at("tag") == "new" ? 2 : 1));
    });
    for (int m = 0; m < 3; ++m)
      for (const std::string& name : names_in(local(m))) EXPECT_FALSE(name.ends_with(".partial")) << name;
  }
}

TEST_F(LocalFailures, ThatIsDueDuringAnotherSaveIsLeftForLater) {
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
TEST_F(LocalFailures, ACopyThatComesDamagedIsNotKept) {
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

TEST_F(LocalFailures, FrozenParametersAreWrittenAnewWhenWeightsAreLoaded) {
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

TEST_F(LocalFailures, ThatAreGivenUpAreToldFromTheRunsCheckpoints) {
  const auto said_of = [&](bool local) {
    engine::SaveAct act;
    act.tag = "global_step3", act.partial = folder_ / "nowhere";
    if (local) act.write = [](auto&&...) { fail(ErrorKind::io, "no room"); };
    ::testing::internal::CaptureStderr();
    engine::BackgroundSave(std::move(act), 5);
    return ::testing::internal::GetCapturedStderr();
  };
  const std::string given_up = "checkpoint global_step3 was being written and is given up: ";
  EXPECT_NE(said_of(true).find(cat("warning: local ", given_up, "no room")), std::string::npos);
  EXPECT_NE(said_of(false).find(cat("warning: ", given_up, "cannot create")), std::string::npos);
}

/// A rank that gives up alone, between two exchanges, is not waited for.
TEST_F(LocalFailures, CopiesEndOnAllRanksWhereOneGivesUp) {
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
