// Damaged datasets: each is refused by an Error that names one of its files, or gives tokens of the
// vocabulary.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <array>
#include <filesystem>

#include "base/error.h"
#include "data/dataset_info.h"
#include "data_test_support.h"
#include "support/mutate.h"

namespace sherd::data {
namespace {

using testing::Mutator;
using testing::read_text;
using testing::write_text;

constexpr std::int64_t vocab = 300;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool peak_is_ours = false;  // sanitizers keep what is freed, and more of their own
#else
constexpr bool peak_is_ours = true;
#endif

/// Peak of the process, in KiB.
long peak_memory() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss;
}

class DamagedDatasets : public ::testing::Test {
 protected:
  DamagedDatasets() {
    DatasetBuilder builder(prefix_, vocab);
    for (std::int32_t i = 0; i < 40; ++i) builder.add(std::vector<std::int32_t>(i % 9, i), i % 3 != 0);
    builder.add(std::vector<std::int32_t>{299});
    const DatasetCounts& counts = builder.counts();
    builder.finish([&] {
      write_dataset_info(
          prefix_, {"byte", vocab, 256, "uint16", counts.tokens, counts.sequences, counts.documents, 1, 2.5});
    });
    for (std::size_t i = 0; i < suffixes.size(); ++i) whole_[i] = read_text(prefix_ + suffixes[i]);
  }

  /// True when the dataset could be opened and read, false when it was refused.
  bool readable() const {
    try {
      const auto dataset = IndexedDataset::open(prefix_);
      dataset->check_all_ids(vocab);
      EXPECT_EQ(static_cast<std::int64_t>(read_all(*dataset).size()), dataset->tokens());
      for (std::int64_t d = 0; d < dataset->documents(); ++d)
        EXPECT_LE(dataset->document_begin(d), dataset->document_begin(d + 1));
      return true;
    } catch (const Error& error) {
      EXPECT_TRUE(error.kind() == ErrorKind::data) << error.what();
      EXPECT_NE(std::string(error.what()).find(prefix_), std::string::npos) << error.what();
      return false;
    } catch (const std::exception& error) {
      ADD_FAILURE() << "not an Error: " << error.what();
      return false;
    }
  }

  /// In a new file: many file systems write one that is cut and written anew to the disk at once.
  void replace(std::size_t i, const std::string& content) const {
    std::filesystem::remove(prefix_ + suffixes[i]);
    write_text(prefix_ + suffixes[i], content);
  }

  /// Damages the files that `choose` picks out of 0 to 2, many times. Returns how many stayed readable.
  template <class Choose>
  int damage(std::uint64_t seed, int rounds, Choose&& choose) {
    Mutator mutator(seed);
    int readable_ones = 0;
    for (int round = 0; round < rounds && !HasFailure(); ++round) {
      for (std::size_t i = 0; i < suffixes.size(); ++i)
        replace(i, choose(mutator, i) ? mutator.mutate(whole_[i]) : whole_[i]);
      readable_ones += readable();
      EXPECT_FALSE(HasFailure()) << "round " << round << " of seed " << seed;
    }
    return readable_ones;
  }

  static constexpr std::array<const char*, 3> suffixes{".bin", ".idx", ".json"};
  testing::TempFolder folder_;
  std::string prefix_ = (folder_ / "d").string();
  std::array<std::string, 3> whole_;
};

TEST_F(DamagedDatasets, AreRefusedOrRead) {
  const int rounds = testing::fuzz_rounds(700);
  ASSERT_TRUE(readable());
  const long before = peak_memory();
  for (std::size_t file = 0; file < suffixes.size(); ++file) {
    const int read = damage(file + 1, rounds, [&](Mutator&, std::size_t i) { return i == file; });
    EXPECT_LT(read, rounds) << suffixes[file];
    EXPECT_GT(read, 0) << suffixes[file];
  }
  damage(4, rounds, [](Mutator& mutator, std::size_t) { return mutator.pick(2) == 0; });
  if (peak_is_ours) {
    EXPECT_LT(peak_memory() - before, 100 << 10);
  }
}

TEST_F(DamagedDatasets, AreNoticedWhereverTheIndexIsDamaged) {
  // Another number contradicts each wrong one, but for bounds of documents, which may move between others.
  const std::size_t end = index_header_bytes + 12 * 41 + 8;
  for (std::size_t at = 0; at < end; ++at)
    for (const int bit : {1, 128}) {
      std::string index = whole_[1];
      index[at] = static_cast<char>(index[at] ^ bit);
      replace(1, index);
      ASSERT_FALSE(readable()) << "byte " << at;
    }
}

}  // namespace
}  // namespace sherd::data
