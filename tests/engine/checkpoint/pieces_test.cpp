#include "engine/checkpoint/pieces.h"

#include <gtest/gtest.h>

#include <random>

#include "engine/checkpoint/sample_manifest.h"
#include "support/expect_error.h"
#include "support/temp_folder.h"

namespace sherd::engine {
namespace {

using sherd::testing::expect_error;
using sherd::testing::TempFolder;
using tensor::Range;
using tensor::Shape;
using tensor::Slice;
using tensor::Tensor;

class RandomPieces {
 public:
  explicit RandomPieces(unsigned seed) : random_(seed) {}
  std::int64_t number(std::int64_t least, std::int64_t most) {
    return std::uniform_int_distribution<std::int64_t>(least, most)(random_);
  }
  Slice slice(const Shape& logical) {
    Slice::Blocks blocks;
    for (const std::int64_t extent : logical.dims()) {
      std::int64_t ends[4];
      for (std::int64_t& end : ends) end = number(0, extent);
      std::sort(ends, ends + 4);
      blocks.push_back(number(0, 2) == 0 ? std::vector<Range>{{0, extent}}
                                         : std::vector<Range>{{ends[0], ends[1]}, {ends[2], ends[3]}});
    }
    return Slice(logical, blocks);
  }
  PieceRecord piece(const Shape& logical) {
    PieceRecord out{slice(logical), {}};
    out.elements.begin = number(0, out.slice.numel());
    out.elements.end = number(out.elements.begin, out.slice.numel());
    return out;
  }

 private:
  std::mt19937 random_;
};

/// Logical indices of local elements, one by one.
std::vector<std::int64_t> logical_of(const Slice& slice) {
  std::vector<std::int64_t> out;
  slice.for_each_run(0, slice.numel(), [&](std::int64_t, std::int64_t logical, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) out.push_back(logical + i);
  });
  return out;
}

/// Files whose elements are their logical indices; what is read is what was asked for, and what is missing is
/// told.
TEST(Pieces, AnySliceIsReadFromWhateverFilesHoldIt) {
  const auto device = device::make_cpu_device(1);
  RandomPieces random(7);
  int complete = 0, incomplete = 0;
  for (int round = 0; round < 150; ++round) {
    TempFolder folder;
    const Shape logical{random.number(1, 6), random.number(1, 6), random.number(1, 6)};
    std::vector<SafetensorsFile> files;
    PieceIndex index;
    std::vector<bool> there(static_cast<std::size_t>(logical.numel()));
    for (int i = 0; i < 6; ++i) {  // overlapping ones, and one of all in every other round
      const PieceRecord piece = i == 5 && round % 2 == 0
                                    ? PieceRecord{Slice::whole(logical), {0, logical.numel()}}
                                    : random.piece(logical);
      const std::vector<std::int64_t> elements = logical_of(piece.slice);
      Tensor values = Tensor::zeros(*device, {piece.elements.size()}, DType::f32);
      for (std::int64_t k = 0; k < values.numel(); ++k) {
        const std::int64_t at = elements[static_cast<std::size_t>(piece.elements.begin + k)];
        values.data<float>()[k] = static_cast<float>(at);
        there[static_cast<std::size_t>(at)] = true;
      }
      const auto path = folder / std::to_string(i);
      SafetensorsWriter writer(path, {{"fp32.w", DType::f32, {values.numel()}}});
      writer.write("fp32.w", 0, values);
      writer.finish();
      index.add("fp32.w", files.size(), piece);
      files.emplace_back(path);
    }
    for (int request = 0; request < 20; ++request) {
      const PieceRecord wanted = random.piece(logical);
      const std::vector<std::int64_t> elements = logical_of(wanted.slice);
      const auto [begin, end] = std::pair(wanted.elements.begin, wanted.elements.end);
      std::int64_t first_missing = begin;
      while (first_missing < end &&
             there[static_cast<std::size_t>(elements[static_cast<std::size_t>(first_missing)])])
        ++first_missing;
      Tensor to = Tensor::zeros(*device, {end - begin}, DType::f32);
      std::vector<int> times(static_cast<std::size_t>(end - begin));
      const std::int64_t missing = index.for_each_part(
          "fp32.w", wanted.slice, begin, end, [&](std::size_t file, std::span<const FileRun> runs) {
            read_runs(files[file], "fp32.w", runs, begin, to);
            for (const FileRun& run : runs)
              for (std::int64_t i = 0; i < run.count; ++i)
                ++times[static_cast<std::size_t>(run.local - begin + i)];
          });
      ASSERT_EQ(missing, first_missing) << wanted.slice.str();
      for (std::int64_t k = begin; k < end; ++k) {
        const std::int64_t at = elements[static_cast<std::size_t>(k)];
        const bool is_there = there[static_cast<std::size_t>(at)];
        ASSERT_EQ(times[static_cast<std::size_t>(k - begin)], is_there ? 1 : 0)
            << wanted.slice.str() << " at " << k;
        if (is_there) {
          ASSERT_EQ(to.data<float>()[k - begin], static_cast<float>(at)) << wanted.slice.str();
        }
      }
      (missing == end ? complete : incomplete) += begin < end;
    }
  }
  EXPECT_GT(complete, 300);
  EXPECT_GT(incomplete, 300);
}

/// Runs with wide gaps between them are read one by one, near ones together; both are right.
TEST(Pieces, RunsNearAndFarAreReadToTheirPlaces) {
  const auto device = device::make_cpu_device(1);
  TempFolder folder;
  const std::int64_t numel = 3'000'000;
  Tensor values = Tensor::zeros(*device, {numel}, DType::f32);
  for (std::int64_t i = 0; i < numel; ++i) values.data<float>()[i] = static_cast<float>(i);
  SafetensorsWriter writer(folder / "f", {{"w", DType::f32, {numel}}});
  writer.write("w", 0, values);
  writer.finish();
  const SafetensorsFile file(folder / "f");
  std::vector<FileRun> runs;
  std::int64_t local = 100, in_file = 3;
  for (const std::int64_t gap : {1, 5, 70'000, 16'384, 16'385, 1'200'000, 2, 1'100'000}) {
    runs.push_back({local, in_file, 200});
    local += 200, in_file += 200 + gap;
  }
  const Tensor to = Tensor::zeros(*device, {local - 100}, DType::f32);
  read_runs(file, "w", runs, 100, to);
  for (const FileRun& run : runs)
    for (std::int64_t i = 0; i < run.count; ++i)
      ASSERT_EQ(to.data<float>()[run.local - 100 + i], static_cast<float>(run.in_file + i));
}

TEST(Pieces, ARecordComesBackAsItWasWritten) {
  Manifest manifest;
  manifest.shapes = {{"w", {8, 6}}, {"scalar", {}}};
  const PieceRecord written{Slice({8, 6}, {{{0, 2}, {4, 6}}, {{0, 6}}}), {12, 20}};
  EXPECT_EQ(written.to_json(), R"({"shape":[8,6],"slice":[[[0,2],[4,6]],[[0,6]]],"begin":12})");
  const PieceRecord read = PieceRecord::parse(written.to_json(), manifest, "w", 8);
  EXPECT_EQ(read.slice, written.slice);
  EXPECT_EQ(read.elements, written.elements);
  const PieceRecord scalar{Slice(), {0, 1}};
  EXPECT_EQ(PieceRecord::parse(scalar.to_json(), manifest, "scalar", 1).slice, Slice());
  // Blocks of 8 bits count by bytes, and the last block of a slice may be shorter.
  manifest.shapes["long"] = {200};
  const auto blocks = [&](std::int64_t begin, std::int64_t bytes) {
    const PieceRecord record{Slice::whole({200}), {begin, begin}};
    return PieceRecord::parse(record.to_json(), manifest, "long", bytes, DType::u8).elements;
  };
  EXPECT_EQ(blocks(64, 68), (tensor::Range{64, 128}));
  EXPECT_EQ(blocks(128, 2 * 68), (tensor::Range{128, 200}));
  EXPECT_EQ(blocks(0, 4 * 68), (tensor::Range{0, 200}));
  expect_error(ErrorKind::data, "are more than its slice", [&] { blocks(0, 5 * 68); });
  expect_error(ErrorKind::data, "are no blocks of int8", [&] { blocks(32, 68); });
  expect_error(ErrorKind::data, "are no blocks of int8", [&] { blocks(0, 64); });
  const auto refused = [&](const std::string& text, const std::string& why, std::int64_t numel = 8) {
    expect_error(ErrorKind::data, why, [&] { PieceRecord::parse(text, manifest, "w", numel); });
  };
  refused(written.to_json(), "are more than its slice, [0:2+4:6, 0:6] of [8, 6], has", 13);
  refused(R"({"shape":[8,7],"slice":[[[0,2]],[[0,6]]],"begin":0})",
          "its shape is not [8, 6] as in the manifest");
  refused(R"({"shape":[8,6],"slice":[[[0,9]],[[0,6]]],"begin":0})", "blocks of a slice ascend within 8");
  refused(R"({"shape":[8,6],"slice":[[[0,8]]],"begin":0})", "has blocks of 1 dimensions");
  refused(R"({"shape":[8,6],"slice":[[[0,8,9]],[[0,6]]],"begin":0})", "a block is not two numbers");
  refused(R"({"shape":[8,6],"slice":[[[0,8]],[[0,6]]],"begin":-1})", "begin is -1");
  refused("12", "it is not an object");
  expect_error(ErrorKind::data, "knows no parameter of that name",
               [&] { PieceRecord::parse(written.to_json(), manifest, "v", 8); });
}

/// Bytes are copied only where both sides have the same blocks; the last may be shorter in both.
TEST(Pieces, WholeBlocksAreTold) {
  const auto whole = [](std::vector<FileRun> runs, std::int64_t begin, std::int64_t end) {
    return are_blocks(StoredFormat::nf4, runs, begin, end);
  };
  EXPECT_TRUE(whole({{128, 0, 64, 640}, {192, 512, 128, 640}}, 128, 1000));
  EXPECT_FALSE(whole({{160, 0, 64, 640}}, 128, 1000)) << "begins within a block of those asked for";
  EXPECT_FALSE(whole({{128, 32, 64, 640}}, 128, 1000)) << "begins within a block of the file";
  EXPECT_FALSE(whole({{128, 0, 32, 640}}, 128, 1000)) << "ends within a block";
  EXPECT_TRUE(whole({{128, 64, 96, 160}}, 128, 224)) << "the end of both";
  EXPECT_FALSE(whole({{128, 64, 96, 320}}, 128, 224)) << "the file goes on in the block";
  EXPECT_FALSE(whole({{128, 64, 96, 160}}, 128, 256)) << "more is asked for of the block";
  EXPECT_FALSE(are_blocks(StoredFormat::nf4_double, std::vector<FileRun>{{0, 0, 64, 32768}}, 0, 32768));
}

}  // namespace
}  // namespace sherd::engine
