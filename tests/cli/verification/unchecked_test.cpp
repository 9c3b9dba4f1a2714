// `sherd verify` of runs of which not all can be compared: lines of the record are lost, checkpoints damaged.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "cli/verification/verified_run.h"
#include "data/sample_text.h"

namespace sherd::cli {
namespace {

using ::testing::ContainsRegex;
namespace fs = std::filesystem;

class Unchecked : public VerifiedRun {
 protected:
  /// Changes a bit of the run's file, and returns what was there.
  std::string damage(const std::string& file) const {
    const std::string whole = read_text(run() / file);
    std::string bytes = whole;
    bytes[bytes.size() / 2] ^= 1;
    write_text(run() / file, bytes);
    return whole;
  }
};

TEST_F(Unchecked, NamesStepsWhoseLinesWereLost) {
  ASSERT_NO_FATAL_FAILURE(trained("1"));
  const std::string record = read_text(run() / "steps.jsonl");
  const auto without = [&](std::initializer_list<int> steps) {
    std::string lines = record;
    for (const int step : steps) {
      const std::size_t begin = lines.find(cat("{\"step\":", step, ",\"loss\""));
      lines.erase(begin, lines.find('\n', begin) + 1 - begin);
    }
    write_text(run() / "steps.jsonl", lines);
    return verify();
  };
  const Outcome some = without({3, 4, 6});
  EXPECT_EQ(some.code, 5) << some.out;
  EXPECT_THAT(some.out, HasSubstr("  steps 3, 4 are missing in steps.jsonl, where the run had written what"));
  EXPECT_THAT(some.out, HasSubstr("  step 6 is missing in steps.jsonl"));
  EXPECT_THAT(some.out, HasSubstr("  losses and gradient norms of 2 steps agree to the bit\n"));
  EXPECT_THAT(some.out, HasSubstr("  losses and gradient norms of 1 step agree to the bit\n"));
  EXPECT_EQ(count(some.out, "tensors and what else is saved agree to the bit"), 3u) << some.out;
  EXPECT_EQ(count(some.out, "no losses are recorded"), 0u) << some.out;
  EXPECT_THAT(some.out, HasSubstr("what could be checked of the run agrees, and NOT all of it could be"));
  EXPECT_EQ(verify({"--step", "2"}).code, 0);
  // Progress says whose it is.
  EXPECT_EQ(count(some.err, "step "), 6u) << some.err;
  EXPECT_EQ(count(some.err, "verify: step "), 6u) << some.err;
  // A record that was moved away and begins anew is as it should be.
  fs::remove(run() / "steps.jsonl");
  ASSERT_EQ(sherd(with(train({"--resume", "--steps", "8"}),
                       {"training.save_interval=2", "train_micro_batch_size_per_gpu=1"}))
                .code,
            0);
  const Outcome late = verify();
  EXPECT_EQ(late.code, 0) << late.out;
  EXPECT_EQ(count(late.out, "of 2 steps no losses are recorded in steps.jsonl"), 3u) << late.out;
}

TEST_F(Unchecked, NamesAStartWhoseLineWasLost) {
  ASSERT_NO_FATAL_FAILURE(trained("1"));
  ASSERT_EQ(sherd(with(train({"--resume", "--steps", "8"}),
                       {"training.save_interval=2", "train_micro_batch_size_per_gpu=1"}))
                .code,
            0);
  const std::string record = read_text(run() / "steps.jsonl");
  EXPECT_EQ(verify().code, 0);
  std::string lines = record;
  const std::size_t begin = lines.find("{\"step\":6,\"start\"");
  ASSERT_NE(begin, std::string::npos) << record;
  lines.erase(begin, lines.find('\n', begin) + 1 - begin);
  write_text(run() / "steps.jsonl", lines);
  const Outcome lost = verify();
  EXPECT_EQ(lost.code, 5) << lost.out << lost.err;
  EXPECT_EQ(count(lost.out, "the start of the run that saved "), 1u) << lost.out;
  EXPECT_THAT(lost.out,
              HasSubstr("  the start of the run that saved global_step8 is missing in steps.jsonl"));
  EXPECT_EQ(count(lost.out, "no losses are recorded"), 0u) << lost.out;
  EXPECT_EQ(count(lost.out, "losses and gradient norms of 2 steps agree to the bit"), 3u) << lost.out;
  EXPECT_THAT(lost.out, HasSubstr("what could be checked of the run agrees, and NOT all of it could be"));
  EXPECT_EQ(verify({"--step", "6"}).code, 0);
  // A checkpoint that was removed is no damage: what training.keep_best left is replayed over a start.
  write_text(run() / "steps.jsonl", record);
  fs::remove_all(run() / "global_step6");
  const Outcome over = verify();
  EXPECT_EQ(over.code, 0) << over.out << over.err;
  EXPECT_THAT(over.out, HasSubstr("steps 5 to 8, from global_step4 to global_step8: on "));
}

TEST_F(Unchecked, GoesOnBesideADamagedCheckpoint) {
  ASSERT_NO_FATAL_FAILURE(trained("2", {"training.steps=8"}));
  const auto flip = [&](const std::string& file) {
    std::string bytes = read_text(run() / "global_step4" / file);
    bytes[bytes.size() / 2] ^= 1;
    write_text(run() / "global_step4" / file, bytes);
  };
  const std::string file = "rank_00001.safetensors";
  const auto expect_damage = [&](const std::string& out) {
    EXPECT_THAT(out, ContainsRegex("\nsteps 3 to 4, from global_step2 to global_step4: cannot be checked: "
                                   "[^\n]*global_step4/rank_00001.safetensors is damaged"));
    EXPECT_THAT(out, ContainsRegex("\nsteps 5 to 6, from global_step4 to global_step6: cannot be checked: "
                                   "[^\n]*global_step4/rank_00001.safetensors is damaged"));
    EXPECT_EQ(count(out, "tensors and what else is saved agree to the bit"), 2u) << out;
    EXPECT_EQ(count(out, "and NOT all of it could be"), 1u) << out;
  };
  flip(file);
  const Outcome damaged = verify();
  EXPECT_EQ(damaged.code, 5) << damaged.out << damaged.err;
  expect_damage(damaged.out);
  const Outcome launched = sherd_launched(2, {"verify", run().string()});
  EXPECT_EQ(count(launched.err, "exit code 5\n"), 2u) << launched.out << launched.err;
  expect_damage(launched.out);
  // Nothing is compared where the one interval that is asked for begins at the damaged checkpoint.
  const Outcome nothing = verify({"--step", "6"});
  EXPECT_EQ(nothing.code, 5) << nothing.out << nothing.err;
  EXPECT_EQ(count(nothing.out, "\nNOTHING of the run could be checked, as said above\n"), 1u) << nothing.out;
  EXPECT_EQ(count(nothing.out, "agree"), 0u) << nothing.out;
  flip(file);
  // Without its manifest nothing is known of it, and the way to the next one is replayed.
  flip("manifest.json");
  const Outcome manifest = verify();
  EXPECT_EQ(manifest.code, 5) << manifest.out << manifest.err;
  EXPECT_THAT(manifest.out, ContainsRegex("global_step4 cannot be checked: [^\n]*manifest.json"));
  EXPECT_THAT(manifest.out, HasSubstr("steps 3 to 6, from global_step2 to global_step6: on "));
  EXPECT_EQ(count(manifest.out, "tensors and what else is saved agree to the bit"), 3u) << manifest.out;
  EXPECT_EQ(verify({"--step", "2"}).code, 0);
  const Outcome itself = verify({"--step", "4"});
  EXPECT_EQ(itself.code, 1);
  EXPECT_THAT(itself.err, HasSubstr("; global_step4 cannot be checked: "));
}

TEST_F(Unchecked, ReplaysFromTheBeginningWhereTheFirstManifestIsDamaged) {
  ASSERT_NO_FATAL_FAILURE(trained("1", {"training.steps=8"}));
  const std::string manifest = damage("global_step2/manifest.json");
  const Outcome first = verify();
  EXPECT_EQ(first.code, 5) << first.out << first.err;
  EXPECT_THAT(first.out, HasSubstr("steps 1 to 4, from the beginning to global_step4: on "));
  EXPECT_THAT(first.out, HasSubstr("  losses and gradient norms of 4 steps agree to the bit\n"));
  EXPECT_THAT(first.out, HasSubstr("what could be checked of the run agrees, and NOT all of it could be"));
  // Where others before were removed, that is not the way from one checkpoint to the next.
  write_text(run() / "global_step2/manifest.json", manifest);
  fs::remove_all(run() / "global_step2");
  damage("global_step4/manifest.json");
  const Outcome removed = verify();
  EXPECT_EQ(removed.code, 5) << removed.out << removed.err;
  EXPECT_THAT(removed.out, HasSubstr("checkpoints before global_step6 are not there"));
  EXPECT_EQ(count(removed.out, ": on "), 1u) << removed.out;
  // A run whose only checkpoint is damaged.
  for (const char* step : {"global_step6", "global_step8"}) fs::remove_all(run() / step);
  const Outcome none = verify();
  EXPECT_EQ(none.code, 1) << none.out;
  EXPECT_THAT(none.err, HasSubstr("; global_step4 cannot be checked: "));
}

TEST_F(Unchecked, DoesNotReplayByTheConfigurationOfALaterStart) {
  ASSERT_NO_FATAL_FAILURE(trained("1"));
  ASSERT_EQ(sherd(with(train({"--resume", "--steps", "10"}),
                       {"training.save_interval=2", "train_micro_batch_size_per_gpu=1",
                        "optimizer.params.lr=0.01"}))
                .code,
            0);
  const std::string manifest = damage("global_step6/manifest.json");
  const auto expect_dropped = [&](const Outcome& dropped) {
    EXPECT_EQ(dropped.code, 5) << dropped.out << dropped.err;
    EXPECT_THAT(dropped.out,
                HasSubstr("\nsteps 5 to 8, from global_step4 to global_step8: cannot be checked: a "
                          "checkpoint between cannot be read, and steps.jsonl does not tell"));
    EXPECT_EQ(count(dropped.out, ": on "), 3u) << dropped.out;
    EXPECT_THAT(dropped.out, HasSubstr("what could be checked of the run agrees"));
  };
  expect_dropped(verify());
  const Outcome itself = verify({"--step", "8"});
  EXPECT_EQ(itself.code, 1) << itself.out;
  EXPECT_THAT(itself.err, HasSubstr("steps 5 to 8, from global_step4 to global_step8: cannot be checked"));
  EXPECT_EQ(verify({"--step", "10"}).code, 0);
  fs::rename(run() / "steps.jsonl", folder_ / "moved");
  expect_dropped(verify());
  fs::rename(folder_ / "moved", run() / "steps.jsonl");
  // The start at step 6 is no matter of others: one start made steps 3 to 6, and one 7 to 10.
  write_text(run() / "global_step6/manifest.json", manifest);
  for (const char* step : {"global_step4", "global_step8"}) damage(cat(step, "/manifest.json"));
  const Outcome one = verify();
  EXPECT_EQ(one.code, 5) << one.out;
  EXPECT_THAT(one.out, HasSubstr("steps 3 to 6, from global_step2 to global_step6: on "));
  EXPECT_THAT(one.out, HasSubstr("steps 7 to 10, from global_step6 to global_step10: on "));
  EXPECT_THAT(one.out, HasSubstr("  losses and gradient norms of 4 steps agree to the bit\n"));
}

TEST_F(Unchecked, CallsNothingDamageThatIsNone) {
  ASSERT_NO_FATAL_FAILURE(trained("1"));
  const std::string other = (folder_ / "other").string();
  write_text(other + ".txt", data::sample_text(20000, 1));
  ASSERT_EQ(
      sherd({"prepare", "--input", other + ".txt", "--tokenizer", "spm-train:320", "--output", other}).code,
      0);
  // Files are whole, and what is loaded does not fit to what is here.
  const Outcome tokens = verify({"--step", "4", "--set", "data.path=" + other});
  EXPECT_EQ(tokens.code, 1) << tokens.out << tokens.err;
  EXPECT_THAT(tokens.err, HasSubstr("global_step2 was trained on tokens of "));
  EXPECT_EQ(count(tokens.out, "cannot be checked"), 0u) << tokens.out;
}

}  // namespace
}  // namespace sherd::cli
