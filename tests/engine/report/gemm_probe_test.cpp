#include "engine/report/gemm_probe.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <vector>

#include "support/temp_folder.h"

namespace sherd::engine {
namespace {

namespace fs = std::filesystem;
using sherd::testing::read_text;
using sherd::testing::TempFolder;
using sherd::testing::write_text;

std::vector<fs::path> probe_files_in(const fs::path& folder) {
  return {fs::directory_iterator(folder), fs::directory_iterator()};
}

TEST(GemmProbe, MeasuresOnceAndRemembers) {
  TempFolder folder;
  const GemmProbe probe{.seconds = 0.01, .cache_folder = folder / "made/when/needed", .rounds = 1};
  const GemmRate first = gemm_rate(1, DType::f32, probe);
  EXPECT_FALSE(first.cached);
  EXPECT_GT(first.flops_per_second, 1e6);
  const GemmRate second = gemm_rate(1, DType::f32, probe);
  EXPECT_TRUE(second.cached);
  EXPECT_EQ(second.flops_per_second, first.flops_per_second);
  EXPECT_FALSE(gemm_rate(2, DType::f32, probe).cached);   // another number of threads
  EXPECT_FALSE(gemm_rate(1, DType::bf16, probe).cached);  // another dtype
  EXPECT_EQ(probe_files_in(*probe.cache_folder).size(), 3u);
}

TEST(GemmProbe, MeasuresAgainWhenTheCacheIsDamaged) {
  TempFolder folder;
  const GemmProbe probe{.seconds = 0.001, .cache_folder = folder.path(), .rounds = 1};
  gemm_rate(1, DType::f32, probe);
  const fs::path file = probe_files_in(folder.path()).at(0);
  const std::string good = read_text(file);
  std::string other_machine = good, negative = good;
  other_machine.replace(other_machine.find("1 threads"), 9, "9 threads");
  negative.insert(negative.find("second\":") + 8, "-");
  for (const std::string& damaged : {std::string(), std::string("{"), good.substr(0, good.size() / 2),
                                     std::string("[1]"), other_machine, negative}) {
    write_text(file, damaged);
    EXPECT_FALSE(gemm_rate(1, DType::f32, probe).cached) << damaged;
    EXPECT_TRUE(gemm_rate(1, DType::f32, probe).cached) << "not mended: " << damaged;
  }
}

/// A cache of one rate, which is then said to be another.
class KeptRate : public ::testing::Test {
 protected:
  KeptRate() { gemm_rate(1, DType::f32, probe); }
  void keep(const std::string& rate) {
    const fs::path file = probe_files_in(folder.path()).at(0);
    std::string content = read_text(file);
    const std::string name = "\"flops_per_second\":";
    const std::size_t begin = content.find(name) + name.size();
    content.replace(begin, content.find(',', begin) - begin, rate);
    write_text(file, content);
  }
  double rate(const GemmProbe& how) { return gemm_rate(1, DType::f32, how).flops_per_second; }

  TempFolder folder;
  GemmProbe probe{.seconds = 0.001, .cache_folder = folder.path(), .rounds = 1};
};

TEST_F(KeptRate, RefreshingKeepsTheFaster) {
  GemmProbe refresh = probe;
  refresh.refresh = true;
  keep("1e30");
  EXPECT_EQ(rate(refresh), 1e30);
  keep("1.0");
  EXPECT_EQ(rate(probe), 1.0);
  EXPECT_GT(rate(refresh), 1e6);
  EXPECT_GT(rate(probe), 1e6);
}

TEST_F(KeptRate, IsTheFastestOfSeveralCalls) {
  keep("1.0");  // as on a busy machine
  GemmProbe three = probe;
  three.rounds = 3;
  EXPECT_GT(rate(three), 1e6);  // the second measurement
  keep("1.0");
  EXPECT_GT(rate(three), 1e6);  // the third
  keep("1.0");
  EXPECT_EQ(rate(three), 1.0) << "measured more often than it was asked to";
}

TEST_F(KeptRate, NeverStaysBelowWhatARunReached) {
  GemmProbe after_a_run = probe;
  after_a_run.reached = 2;
  keep("1.0");
  EXPECT_GT(rate(after_a_run), 1e6) << "not measured again";
  after_a_run.reached = 1e30;  // more than any measurement of today
  EXPECT_EQ(rate(after_a_run), 1e30);
  EXPECT_EQ(rate(probe), 1e30) << "not kept";
  after_a_run.reached = 1e29;
  EXPECT_EQ(rate(after_a_run), 1e30);
}

TEST(GemmProbe, DoesWithoutACacheItCannotUse) {
  TempFolder folder;
  write_text(folder / "file", "");
  const GemmProbe blocked{.seconds = 0.001, .cache_folder = folder / "file"};
  EXPECT_GT(gemm_rate(1, DType::f32, blocked).flops_per_second, 0);
  EXPECT_FALSE(gemm_rate(1, DType::f32, blocked).cached);
  EXPECT_FALSE(gemm_rate(1, DType::f32, {.seconds = 0.001, .cache_folder = std::nullopt}).cached);
}

/// Sets or (null) unsets a variable, and puts the old value back.
class ScopedEnvironment {
 public:
  ScopedEnvironment(const char* name, const char* value) : name_(name) {
    if (const char* before = std::getenv(name)) before_ = before;
    set(value);
  }
  ~ScopedEnvironment() { set(before_ ? before_->c_str() : nullptr); }

 private:
  void set(const char* value) { value ? ::setenv(name_, value, 1) : ::unsetenv(name_); }
  const char* name_;
  std::optional<std::string> before_;
};

TEST(GemmProbe, CacheFolderFollowsTheEnvironment) {
  ScopedEnvironment cache("XDG_CACHE_HOME", "/c"), home("HOME", "/h");
  EXPECT_EQ(default_cache_folder(), fs::path("/c/sherd"));
  ScopedEnvironment relative("XDG_CACHE_HOME", "not/absolute");
  EXPECT_EQ(default_cache_folder(), fs::path("/h/.cache/sherd"));
  ScopedEnvironment no_cache("XDG_CACHE_HOME", nullptr);
  EXPECT_EQ(default_cache_folder(), fs::path("/h/.cache/sherd"));
  ScopedEnvironment no_home("HOME", nullptr);
  EXPECT_EQ(default_cache_folder(), std::nullopt);
}

}  // namespace
}  // namespace sherd::engine
