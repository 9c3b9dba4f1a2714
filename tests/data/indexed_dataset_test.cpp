#include "data/indexed_dataset.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <csignal>
#include <cstring>
#include <filesystem>

#include "data/dataset_builder.h"
#include "data/dataset_info.h"
#include "data_test_support.h"
#include "support/expect_error.h"
#include "support/temp_folder.h"

namespace sherd::data {
namespace {

using testing::expect_error;
using testing::read_text;
using testing::TempFolder;
using testing::write_text;

template <class T>
void put(std::string& to, T value) {
  to.append(reinterpret_cast<const char*>(&value), sizeof value);
}

/// Two documents, [5, 6, 7] [8] and [9, 10], as bytes assembled by hand.
template <class Token>
std::string hand_made_bin() {
  std::string bytes;
  for (int id = 5; id <= 10; ++id) put(bytes, static_cast<Token>(id));
  return bytes;
}

std::string hand_made_index(std::uint8_t code, std::int64_t width) {
  std::string bytes("MMIDIDX\0\0", 9);
  put(bytes, std::uint64_t{1});
  put(bytes, code);
  put(bytes, std::uint64_t{3});
  put(bytes, std::uint64_t{3});
  for (const std::int32_t length : {3, 1, 2}) put(bytes, length);
  for (const std::int64_t token : {0, 3, 4}) put(bytes, token * width);
  for (const std::int64_t document : {0, 2, 3}) put(bytes, document);
  return bytes;
}

struct HandMade {
  TempFolder folder;
  std::string prefix = (folder / "d").string();
  std::string bin = hand_made_bin<std::uint16_t>(), index = hand_made_index(8, 2);

  std::shared_ptr<const IndexedDataset> open() const {
    write_text(bin_path(prefix), bin);
    write_text(index_path(prefix), index);
    return IndexedDataset::open(prefix);
  }
  void expect_data_error(const std::string& part) const {
    expect_error(ErrorKind::data, part, [&] { open(); });
  }
};

const std::vector<std::int32_t> hand_made_tokens{5, 6, 7, 8, 9, 10};

TEST(DatasetBuilder, WritesTheBytesOfTheFormat) {
  HandMade expected;
  for (const auto& [vocab, code, width] : {std::tuple{65499, 8, 2}, std::tuple{65500, 4, 4}}) {
    DatasetBuilder builder(expected.prefix, vocab);
    builder.add(std::vector<std::int32_t>{5, 6, 7}, false);
    builder.add(std::vector<std::int32_t>{8});
    builder.add(std::vector<std::int32_t>{9, 10});
    const DatasetCounts counts = builder.finish();
    EXPECT_EQ(counts.tokens, 6);
    EXPECT_EQ(counts.sequences, 3);
    EXPECT_EQ(counts.documents, 2);
    EXPECT_EQ(read_text(index_path(expected.prefix)),
              hand_made_index(static_cast<std::uint8_t>(code), width));
    EXPECT_EQ(read_text(bin_path(expected.prefix)),
              width == 2 ? hand_made_bin<std::uint16_t>() : hand_made_bin<std::int32_t>());
  }
}

TEST(DatasetBuilder, LeavesNothingBehindWhenItIsNotFinished) {
  TempFolder folder;
  {
    DatasetBuilder builder((folder / "d").string(), 100);
    builder.add(std::vector<std::int32_t>(100000, 7));
    expect_error(ErrorKind::data, "cannot add token 100", [&] {
      builder.add(std::vector<std::int32_t>{1, 100});
    });
    expect_error(ErrorKind::data, "cannot add token -1", [&] { builder.add(std::vector<std::int32_t>{-1}); });
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(DatasetBuilder, KeepsTheOldDatasetUntilTheNewOneIsWhole) {
  HandMade old;
  old.open();
  {
    DatasetBuilder abandoned(old.prefix, 100);
    abandoned.add(std::vector<std::int32_t>{1});
  }
  EXPECT_EQ(read_all(*IndexedDataset::open(old.prefix)), hand_made_tokens);
  DatasetBuilder builder(old.prefix, 100);
  builder.add(std::vector<std::int32_t>{1, 2});
  builder.finish([&] { EXPECT_FALSE(std::filesystem::exists(index_path(old.prefix))); });
  EXPECT_EQ(read_all(*IndexedDataset::open(old.prefix)), (std::vector<std::int32_t>{1, 2}));
}

TEST(DatasetBuilder, RefusesOpenDocumentsAndImpossibleFolders) {
  TempFolder folder;
  DatasetBuilder builder((folder / "d").string(), 100);
  builder.add(std::vector<std::int32_t>{1}, false);
  expect_error(ErrorKind::usage, "inside a document", [&] { builder.finish(); });
  sherd::testing::write_text(folder / "file", "");
  expect_error(ErrorKind::io, "cannot be made", [&] { DatasetBuilder((folder / "file/d").string(), 100); });
  expect_error(ErrorKind::usage, "names no file",
               [&] { DatasetBuilder((folder.path().string() + "/"), 100); });
}

TEST(DatasetBuilder, ReportsAFullDisk) {
  // A limit on the file size stands for a full disk: the write fails half-way in the same place.
  TempFolder folder;
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit small = before;
  small.rlim_cur = 1 << 20;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  {
    DatasetBuilder builder((folder / "d").string(), 100000);
    expect_error(ErrorKind::io, "d.bin", [&] { builder.add(std::vector<std::int32_t>(3'000'000, 7)); });
  }
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(DatasetBuilder, StreamsMoreThanItsBuffersHold) {
  TempFolder folder;
  std::vector<std::int32_t> lengths;
  for (int i = 0; i < 150000; ++i) lengths.push_back(i % 40);
  const std::string prefix = (folder / "d").string();
  DatasetBuilder builder(prefix, 256);
  std::vector<std::int32_t> expected;
  for (const std::int32_t length : lengths) {
    const std::vector<std::int32_t> tokens(static_cast<std::size_t>(length),
                                           static_cast<std::int32_t>(expected.size() % 251));
    expected.insert(expected.end(), tokens.begin(), tokens.end());
    builder.add(tokens);
  }
  builder.finish();
  const auto dataset = IndexedDataset::open(prefix);
  EXPECT_EQ(dataset->sequences(), 150000);
  EXPECT_EQ(dataset->documents(), 150000);
  EXPECT_EQ(read_all(*dataset), expected);
}

TEST(IndexedDataset, ReadsEveryIntegerType) {
  HandMade files;
  const auto expect_same = [&](std::uint8_t code, std::int64_t width, std::string bin) {
    files.bin = std::move(bin);
    files.index = hand_made_index(code, width);
    const auto dataset = files.open();
    EXPECT_EQ(read_all(*dataset), hand_made_tokens) << int{code};
    EXPECT_EQ(dataset->documents(), 2);
    EXPECT_EQ(dataset->document_begin(1), 2);
    std::int32_t middle = 0;
    dataset->read(0, 1, std::span(&middle, 1));
    EXPECT_EQ(middle, 6);
  };
  expect_same(1, 1, hand_made_bin<std::uint8_t>());
  expect_same(2, 1, hand_made_bin<std::int8_t>());
  expect_same(3, 2, hand_made_bin<std::int16_t>());
  expect_same(4, 4, hand_made_bin<std::int32_t>());
  expect_same(5, 8, hand_made_bin<std::int64_t>());
  expect_same(8, 2, hand_made_bin<std::uint16_t>());
}

TEST(IndexedDataset, AcceptsModes) {
  HandMade files;
  files.index.append(3, '\1');
  EXPECT_EQ(read_all(*files.open()), hand_made_tokens);
}

TEST(IndexedDataset, NamesMissingFiles) {
  TempFolder folder;
  expect_error(ErrorKind::io, "d.idx' does not exist",
               [&] { IndexedDataset::open((folder / "d").string()); });
  expect_error(ErrorKind::io, "folder", [&] { IndexedDataset::open((folder / "no/d").string()); });
  HandMade files;
  files.open();
  std::filesystem::remove(bin_path(files.prefix));
  expect_error(ErrorKind::io, "d.bin' does not exist", [&] { IndexedDataset::open(files.prefix); });
}

TEST(IndexedDataset, RefusesEveryTruncationOfTheIndex) {
  const HandMade whole;
  for (std::size_t size = 0; size < whole.index.size(); ++size) {
    HandMade files;
    files.index.resize(size);
    files.expect_data_error("d.idx");
  }
}

TEST(IndexedDataset, RefusesEveryTruncationOfTheTokens) {
  const HandMade whole;
  for (std::size_t size = 0; size < whole.bin.size(); ++size) {
    HandMade files;
    files.bin.resize(size);
    files.expect_data_error("truncated");
  }
}

TEST(IndexedDataset, RefusesDamage) {
  const auto damaged = [](std::size_t at, auto value, const std::string& part) {
    HandMade files;
    std::memcpy(files.index.data() + at, &value, sizeof value);
    files.expect_data_error(part);
  };
  damaged(3, 'x', "does not begin with MMIDIDX");
  damaged(9, std::uint64_t{2}, "format version 2");
  damaged(17, std::uint8_t{7}, "dtype code 7 (floating point)");
  damaged(17, std::uint8_t{0}, "dtype code 0");
  damaged(17, std::uint8_t{9}, "dtype code 9");
  damaged(18, std::uint64_t{4}, "does not fit the 4 sequences");
  damaged(18, ~std::uint64_t{0}, "does not fit");
  damaged(26, std::uint64_t{0}, "does not fit");
  damaged(26, ~std::uint64_t{0}, "does not fit");
  damaged(34, std::int32_t{-1}, "has the length -1");
  damaged(34, std::int32_t{2000000000}, "begins at byte 6, but those before it end at byte 4000000000");
  damaged(34 + 8, std::int32_t{3}, "d.bin' has 12 bytes, but the 3 sequences of");
  damaged(46, std::int64_t{1}, "begins at byte 1");
  damaged(46, std::int64_t{-2}, "begins at byte -2");
  damaged(70, std::int64_t{1}, "not at 0");
  damaged(78, std::int64_t{4}, "before the one in front");
  damaged(86, std::int64_t{2}, "end at sequence 2 of 3");
  EXPECT_EQ(HandMade().index.size(), 94u);
}

TEST(IndexedDataset, RefusesTokensThatTheIndexDoesNotTellOf) {
  HandMade files;
  put(files.bin, std::uint16_t{11});
  files.expect_data_error("d.bin' has 14 bytes, but the 3 sequences of");
  files.expect_data_error("take 12 (6 tokens of 2 bytes): it is too long");
  files.bin.resize(10);
  files.expect_data_error("d.bin' has 10 bytes, but the 3 sequences of");
}

TEST(IndexedDataset, RefusesSequencesThatOverlapOrLeaveAGap) {
  const auto with_pointers = [](std::array<std::int64_t, 3> pointers, const std::string& part) {
    HandMade files;
    std::memcpy(files.index.data() + 46, pointers.data(), sizeof pointers);
    files.expect_data_error(part);
    files.expect_data_error("d.idx'");
  };
  with_pointers({0, 4, 8}, "sequence 1 begins at byte 4, but those before it end at byte 6: they overlap");
  with_pointers({0, 6, 0}, "sequence 2 begins at byte 0, but those before it end at byte 8");
  with_pointers({0, 8, 10}, "sequence 1 begins at byte 8, but those before it end at byte 6");
  with_pointers({6, 8, 0}, "sequence 0 begins at byte 6, but those before it end at byte 0");
}

TEST(IndexedDataset, RefusesADescriptionOfAnotherDataset) {
  const DatasetInfo right{"byte", 257, 256, "uint16", 6, 3, 2, 4, 1.5};
  const auto described = [](const DatasetInfo& info) {
    HandMade files;
    write_dataset_info(files.prefix, info);
    return files.open()->tokens();
  };
  EXPECT_EQ(described(right), 6);
  const auto expect = [&](auto DatasetInfo::*member, auto value, const std::string& part) {
    DatasetInfo wrong = right;
    wrong.*member = value;
    expect_error(ErrorKind::data, "d.json' belong to different datasets: " + part, [&] { described(wrong); });
  };
  expect(&DatasetInfo::tokens, 7, "6 and 7 tokens");
  expect(&DatasetInfo::sequences, 2, "3 and 2 sequences");
  expect(&DatasetInfo::documents, 3, "2 and 3 documents");
  expect(&DatasetInfo::token_type, "int32", "uint16 and int32 as the type of tokens");
}

TEST(IndexedDataset, NamesTheFileThatIsCutWhileInUse) {
  HandMade files;
  const auto dataset = files.open();
  std::filesystem::resize_file(bin_path(files.prefix), 8);
  std::vector<std::int32_t> tokens(2);
  dataset->read(0, 0, tokens);
  EXPECT_EQ(tokens, (std::vector<std::int32_t>{5, 6}));
  expect_error(ErrorKind::data,
               "d.bin' was cut while in use: it had 12 bytes when it was opened, and has 8 now",
               [&] { dataset->read(2, 0, tokens); });
  dataset->will_need(2, 0, 2);
  std::filesystem::resize_file(index_path(files.prefix), 0);
  EXPECT_EQ(dataset->length(0), 3);
  expect_error(ErrorKind::data, "d.idx' was cut while in use", [&] { dataset->document_begin(1); });
}

TEST(IndexedDataset, RefusesPipesAndFolders) {
  HandMade files;
  files.open();
  std::filesystem::remove(bin_path(files.prefix));
  ASSERT_EQ(::mkfifo(bin_path(files.prefix).c_str(), 0600), 0);
  expect_error(ErrorKind::io, "d.bin': it is not a regular file",
               [&] { IndexedDataset::open(files.prefix); });
  std::filesystem::remove(bin_path(files.prefix));
  std::filesystem::create_directory(bin_path(files.prefix));
  expect_error(ErrorKind::io, "d.bin': it is not a regular file",
               [&] { IndexedDataset::open(files.prefix); });
}

TEST(IndexedDataset, ReadsSequencesLongerThanABlock) {
  TempFolder folder;
  const auto dataset = counting_dataset(folder, {7, 50000, 3}, 100000);
  std::vector<std::int32_t> tokens(40000);
  dataset->read(1, 9999, tokens);
  for (std::size_t i = 0; i < tokens.size(); ++i) ASSERT_EQ(tokens[i], static_cast<std::int32_t>(i) + 10006);
}

TEST(IndexedDataset, NamesTheTokenBeyondTheVocabulary) {
  HandMade files;
  const auto dataset = files.open();
  dataset->check_all_ids(11);
  expect_error(ErrorKind::data, "token 1 of sequence 2 is 10, beyond the vocabulary of 10",
               [&] { dataset->check_all_ids(10); });
  files.bin = hand_made_bin<std::int32_t>();
  files.index = hand_made_index(4, 4);
  const std::int32_t negative = -3;
  std::memcpy(files.bin.data() + 12, &negative, 4);
  expect_error(ErrorKind::data, "token 0 of sequence 1 is -3", [&] { files.open()->check_all_ids(1 << 30); });
}

TEST(IndexedDataset, RefusesReadsOutsideASequence) {
  HandMade files;
  const auto dataset = files.open();
  std::vector<std::int32_t> two(2);
  expect_error(ErrorKind::usage, "of a sequence of 1", [&] { dataset->read(1, 0, two); });
  expect_error(ErrorKind::usage, "sequence 3 of 3", [&] { dataset->read(3, 0, two); });
}

}  // namespace
}  // namespace sherd::data
