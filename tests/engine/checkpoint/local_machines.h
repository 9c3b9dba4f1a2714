#pragma once

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <fstream>

#include "base/crc32c.h"
#include "base/files.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/format.h"
#include "engine/checkpoint/two_ranks.h"
#include "engine/initialize.h"
#include "support/equality.h"
#include "support/temp_folder.h"
#include "support/whole_tensors.h"

namespace sherd::test {

/// Ranks as threads, each "machine" a folder of its own. What comes back is held against a checkpoint of
/// files that was saved at the same moment, whose tensors an oracle puts together.
class LocalMachines : public ::testing::Test {
 protected:
  LocalMachines() {
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
  std::filesystem::path run() const { return folder_ / "run"; }
  std::filesystem::path machine(int number) const { return folder_ / cat("machine", number); }
  /// The folder of the run there.
  std::filesystem::path local(int number) const {
    for (const auto& entry : std::filesystem::directory_iterator(machine(number))) return entry.path();
    return {};
  }
  /// The checkpoint of that step there; an empty path: none.
  std::filesystem::path saved(int number, int step) const {
    for (const auto& entry : std::filesystem::directory_iterator(local(number)))
      if (entry.path().stem() == cat("global_step", step)) return entry.path();
    return {};
  }
  /// The names of what lies there, without the ids of acts of saving.
  std::set<std::string> steps_in(int number) const {
    std::set<std::string> out;
    for (const std::string& name : names_in(local(number))) out.insert(name.substr(0, name.find('.')));
    EXPECT_EQ(out.size(), names_in(local(number)).size());
    return out;
  }
  /// Each file there is as its manifest says.
  void expect_whole_files(int number, int step) const {
    const std::filesystem::path folder = saved(number, step);
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
    EXPECT_TRUE(engine.save_local_checkpoint(engine::SaveOptions{.client = {{"tag", tag}}, .async = async}));
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
    EXPECT_TRUE(sherd::testing::whole_tensors(folder_ / "found" / tag) ==
                sherd::testing::whole_tensors(folder_ / "expected" / tag));
    const auto expected = engine::CheckpointReader(folder_ / "expected" / tag).manifest();
    EXPECT_EQ(engine.global_steps(), expected.global_steps);
  }
  static void flip_last_byte(const std::filesystem::path& path) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(-1, std::ios::end);
    const char last = static_cast<char>(file.get());
    file.seekp(-1, std::ios::end).put(static_cast<char>(last ^ 1));
  }

  sherd::testing::TempFolder folder_;
  RunSpec spec_;
};

}  // namespace sherd::test
