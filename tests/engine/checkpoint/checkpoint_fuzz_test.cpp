// Whatever disks, editors and other programs make of a checkpoint's files: an Error that names the file, or
// what was saved.
#include <gtest/gtest.h>

#include <cstring>

#include "engine/checkpoint.h"
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

TEST(CheckpointFuzz, AnOldManifestIsRefusedOrWithinItsRanges) {
  Mutator mutator(2);
  const std::string good = manifest_of_format_1();
  for (int round = fuzz_rounds(20'000); round > 0; --round) {
    try {
      const Manifest read = Manifest::from_json(mutator.mutate(good), "/d/manifest.json");
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

/// Two ranks that share "fp32.w", one of which has "fp32.v" too.
class CheckpointFiles : public ::testing::Test {
 protected:
  CheckpointFiles() {
    Manifest manifest = sample_manifest();
    manifest.shapes = {{"w", {8}}, {"v", {3}}};
    for (int rank = 0; rank < 2; ++rank) {
      std::vector<SafetensorsSpec> specs{{"fp32.w", DType::f32, {4}}};
      std::map<std::string, std::string> begins{{"fp32.w", std::to_string(4 * rank)},
                                                {save_id_key, manifest.save_id}};
      if (rank == 1) specs.push_back({"fp32.v", DType::f32, {3}}), begins["fp32.v"] = "0";
      SafetensorsWriter writer(folder / rank_file(rank), specs, begins);
      writer.write("fp32.w", 0, values({4}, rank));
      if (rank == 1) writer.write("fp32.v", 0, values({3}, 2));
      writer.finish();
      manifest.files[rank_file(rank)] = checksum_file(folder / rank_file(rank));
    }
    write_text(folder / "manifest.json", manifest.to_json());
  }
  tensor::Tensor values(tensor::Shape shape, int seed) {
    tensor::Tensor out = tensor::Tensor::zeros(*device, shape, DType::f32);
    for (std::int64_t i = 0; i < out.numel(); ++i) out.data<float>()[i] = static_cast<float>(10 * seed + i);
    return out;
  }
  /// All of both parameters.
  std::vector<float> content() {
    const CheckpointReader reader(folder.path());
    for (const auto& [file, checksum] : reader.manifest().files) reader.verify(file);
    const tensor::Tensor all = tensor::Tensor::zeros(*device, {11}, DType::f32);
    reader.read("fp32", "w", 0, all.range(0, 8));
    reader.read("fp32", "v", 0, all.range(8, 11));
    return {all.data<float>(), all.data<float>() + 11};
  }
  TempFolder folder;
  std::shared_ptr<device::Device> device = device::make_cpu_device(1);
};

TEST_F(CheckpointFiles, AreRefusedOrHoldWhatWasSaved) {
  Mutator mutator(3);
  const std::vector<float> expected = content();
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
