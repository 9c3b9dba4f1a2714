// Whatever disks, editors and other programs make of a checkpoint's files: an Error that names the file, or
// what was saved.
#include <gtest/gtest.h>

#include <cstring>

#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/sample_manifest.h"
#include "support/mutate.h"
#include "support/temp_folder.h"

namespace sherd::engine {
namespace {

using sherd::testing::fuzz_rounds;
using sherd::testing::Mutator;
using sherd::testing::read_text;
using sherd::testing::TempFolder;
using sherd::testing::write_text;

/// Not over the old file: some file systems wait for the disk then.
void replace(const std::filesystem::path& path, const std::string& content) {
  std::filesystem::remove(path);
  write_text(path, content);
}

/// An Error of one line that names `path`; nothing else.
void expect_named(const Error& error, const std::string& path) {
  const std::string what = error.what();
  EXPECT_TRUE(error.kind() == ErrorKind::data || error.kind() == ErrorKind::io) << what;
  EXPECT_NE(what.find(path), std::string::npos) << what;
  EXPECT_EQ(what.find('\n'), std::string::npos) << what;
}

TEST(CheckpointFuzz, AManifestIsRefusedOrTheSame) {
  Mutator mutator(1);
  const std::string good = sample_manifest().to_json();
  int refused = 0;
  for (int round = fuzz_rounds(20'000); round > 0; --round) {
    const std::string text = mutator.mutate(good);
    try {
      EXPECT_EQ(Manifest::from_json(text, "/d/manifest.json").to_json(), good) << text;
    } catch (const Error& error) {
      expect_named(error, "/d/manifest.json");
      ++refused;
    }
  }
  EXPECT_GT(refused, 0);
}

/// With the checksum of what it says.
TEST(CheckpointFuzz, AManifestIsRefusedOrWithinItsRanges) {
  Mutator mutator(2);
  const std::string good = sample_manifest().to_json();
  for (int round = fuzz_rounds(20'000); round > 0; --round) {
    try {
      const Manifest read = Manifest::from_json(sealed(mutator.mutate(good)), "/d/manifest.json");
      EXPECT_GE(read.skipped_steps, 0);
      EXPECT_LE(read.skipped_steps, read.global_steps);
      EXPECT_LE(read.optimizer_steps, read.global_steps);
      EXPECT_LE(read.global_steps, read.micro_steps);
      EXPECT_LE(read.micro_steps, std::int64_t{1} << 53);
    } catch (const Error& error) {
      expect_named(error, "/d/manifest.json");
    }
  }
}

/// Two ranks that share "fp32.w", by columns, one of which has "fp32.v" too.
class CheckpointFiles : public ::testing::Test {
 protected:
  CheckpointFiles() {
    manifest.shapes = {{"w", {2, 4}}, {"v", {3}}};
    for (int rank = 0; rank < 2; ++rank) {
      std::vector<SafetensorsSpec> specs{{"fp32.w", DType::f32, {4}}};
      std::map<std::string, std::string> metadata{{"fp32.w", columns(rank).to_json()},
                                                  {save_id_key, manifest.save_id}};
      if (rank == 1) {
        specs.push_back({"fp32.v", DType::f32, {3}});
        metadata["fp32.v"] = PieceRecord{tensor::Slice::whole({3}), {0, 3}}.to_json();
      }
      SafetensorsWriter writer(folder / rank_file(rank), specs, metadata);
      writer.write("fp32.w", 0, values({4}, rank));
      if (rank == 1) writer.write("fp32.v", 0, values({3}, 2));
      writer.finish();
      manifest.files[rank_file(rank)] = checksum_file(folder / rank_file(rank));
    }
    write_text(folder / "manifest.json", manifest.to_json());
  }
  /// The first and last column, or those between.
  static PieceRecord columns(int rank) {
    using tensor::Range;
    const std::vector<Range> of_rank =
        rank == 0 ? std::vector<Range>{{0, 1}, {3, 4}} : std::vector<Range>{{1, 3}};
    return {tensor::Slice({2, 4}, {{{0, 2}}, of_rank}), {0, 4}};
  }
  tensor::Tensor values(tensor::Shape shape, int seed) {
    tensor::Tensor out = tensor::Tensor::zeros(*device, shape, DType::f32);
    for (std::int64_t i = 0; i < out.numel(); ++i) out.data<float>()[i] = static_cast<float>(10 * seed + i);
    return out;
  }
  /// All of both parameters.
  std::vector<float> content() {
    const CheckpointReader reader(folder.path());
    reader.verify_all();
    const tensor::Tensor all = tensor::Tensor::zeros(*device, {11}, DType::f32);
    reader.read("fp32", "w", tensor::Slice::whole({2, 4}), 0, all.range(0, 8));
    reader.read("fp32", "v", tensor::Slice::whole({3}), 0, all.range(8, 11));
    return {all.data<float>(), all.data<float>() + 11};
  }
  TempFolder folder;
  Manifest manifest = sample_manifest();
  std::shared_ptr<device::Device> device = device::make_cpu_device(1);
};

TEST_F(CheckpointFiles, AreRefusedOrHoldWhatWasSaved) {
  Mutator mutator(3);
  const std::vector<float> expected{0, 10, 11, 1, 2, 12, 13, 3, 20, 21, 22};
  ASSERT_EQ(content(), expected);
  for (const std::string& name : {std::string("manifest.json"), rank_file(0), rank_file(1)}) {
    const std::string good = read_text(folder / name);
    int refused = 0;
    for (int round = fuzz_rounds(1000); round > 0; --round) {
      replace(folder / name, mutator.mutate(good));
      try {
        EXPECT_EQ(content(), expected) << name;
      } catch (const Error& error) {
        expect_named(error, (folder / name).string());
        ++refused;
      }
    }
    EXPECT_GT(refused, 0) << name;
    replace(folder / name, good);
  }
  EXPECT_EQ(content(), expected);
}

/// A file's records of its pieces have no checksum where files are only looked at: each piece that is
/// accepted lies within its parameter.
TEST_F(CheckpointFiles, ARecordOfAPieceIsRefusedOrWithinItsParameter) {
  Mutator mutator(5);
  const std::string good = columns(0).to_json();
  int taken = 0, refused = 0;
  for (int round = fuzz_rounds(20'000); round > 0; --round) {
    const std::string text = mutator.mutate(good);
    try {
      const PieceRecord record = PieceRecord::parse(text, manifest, "w", 4);
      ++taken;
      ASSERT_EQ(record.slice.logical(), (tensor::Shape{2, 4}));
      ASSERT_GE(record.elements.begin, 0);
      ASSERT_EQ(record.elements.size(), 4);
      ASSERT_LE(record.elements.end, record.slice.numel());
      record.slice.for_each_run(record.elements.begin, record.elements.end,
                                [&](std::int64_t, std::int64_t logical, std::int64_t count) {
                                  ASSERT_GE(logical, 0);
                                  ASSERT_LE(logical + count, 8);
                                });
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::data) << error.what();
      ++refused;
    }
  }
  EXPECT_GT(taken, 0);
  EXPECT_GT(refused, 0);
}

/// The same damage in a file, opened without its checksum.
TEST_F(CheckpointFiles, AFileWithADamagedRecordIsRefusedByItsName) {
  const std::string path = (folder / rank_file(0)).string(), good = read_text(path);
  for (const auto& [part, other] : std::vector<std::pair<std::string, std::string>>{{"[3,4]", "[3,5]"},
                                                                                    {"[3,4]", "[0,4]"},
                                                                                    {"[2,4]", "[4,2]"},
                                                                                    {"[2,4]", "[2,-]"},
                                                                                    {"[2,4]", "[24 ]"},
                                                                                    {":0}", ":9}"},
                                                                                    {"slice", "slike"},
                                                                                    {"begin", "begun"},
                                                                                    {"shape", "shade"}}) {
    std::string bad = good;
    const std::size_t at = bad.find(part);
    ASSERT_NE(at, std::string::npos) << part;
    replace(path, bad.replace(at, part.size(), other));
    try {
      const CheckpointReader reader(folder.path());
      ADD_FAILURE() << part << " became " << other;
    } catch (const Error& error) {
      expect_named(error, path);
    }
  }
}

/// The header of a safetensors file has no checksum of its own: what opens must be within the file, whatever
/// it says.
TEST_F(CheckpointFiles, ASafetensorsFileIsRefusedOrReadable) {
  Mutator mutator(4);
  const std::string path = (folder / rank_file(1)).string(), good = read_text(path);
  int opened = 0, refused = 0;
  for (int round = fuzz_rounds(4000); round > 0; --round) {
    replace(path, mutator.mutate(good));
    try {
      const SafetensorsFile file(path);
      ++opened;
      for (const SafetensorsEntry& entry : file.entries()) {
        std::vector<std::byte> bytes(entry.bytes);
        file.read_bytes(entry, 0, bytes);
      }
    } catch (const Error& error) {
      expect_named(error, path);
      ++refused;
    }
  }
  EXPECT_GT(opened, 0);
  EXPECT_GT(refused, 0);
}

}  // namespace
}  // namespace sherd::engine
