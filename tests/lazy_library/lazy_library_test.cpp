#include "device/cuda/lazy_library.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "lazy_library/look.h"

namespace sherd::device::cuda {
namespace {

using sherd::testing::BrokenLibrary;
using sherd::testing::mapped;
using sherd::testing::refusal;
using ::testing::AllOf;
using ::testing::HasSubstr;

using Function = LazyFunction<int(int)>;

LazyLibrary::Names names(const char* folder = SHERD_STAND_IN_FOLDER, int major = 3) {
  return {.title = "The stand-in",
          .stem = "sherd_stand_in",
          .major = major,
          .folder = folder,
          .package = "a stand-in"};
}

// The first test of this file, as nothing here unloads a library.
TEST(LazyLibrary, IsLoadedByTheFirstCallFromWhateverThread) {
  LazyLibrary library(names());
  Function twice(library, "sherd_stand_in_twice");
  EXPECT_FALSE(mapped("libsherd_stand_in.so.3"));
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) threads.emplace_back([&twice, i] { EXPECT_EQ(twice(i), 2 * i); });
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(mapped("libsherd_stand_in.so.3"));
}

TEST(LazyLibrary, ThatIsMissingIsNamedWithTheNextStep) {
  LazyLibrary library(names("/nonexistent", 4));
  Function twice(library, "sherd_stand_in_twice");
  for (int attempt = 0; attempt < 2; ++attempt)
    EXPECT_THAT(refusal([&] { twice(1); }),
                AllOf(HasSubstr("The stand-in cannot be loaded: libsherd_stand_in.so.4: cannot open"),
                      HasSubstr("install a stand-in"), HasSubstr("LD_LIBRARY_PATH")));
}

/// Found as it is loaded, not as the function is called for the first time.
TEST(LazyLibrary, OfAnotherVersionIsNamedWithTheFunctionThatItLacks) {
  LazyLibrary library(names());
  Function twice(library, "sherd_stand_in_twice"), newer(library, "sherd_stand_in_newer");
  EXPECT_THAT(
      refusal([&] { twice(1); }),
      AllOf(HasSubstr("libsherd_stand_in.so.3 has no function sherd_stand_in_newer"), HasSubstr("install")));
}

TEST(LazyLibrary, IsLookedForInTheFoldersOfTheEnvironmentFirst) {
  LazyLibrary library(names());
  Function twice(library, "sherd_stand_in_twice");
  {
    const BrokenLibrary broken("libsherd_stand_in.so.3");
    EXPECT_THAT(refusal([&] { twice(1); }), HasSubstr(broken.path()));
  }
  EXPECT_EQ(twice(1), 2) << "after an error the next call tries again";
}

}  // namespace
}  // namespace sherd::device::cuda
