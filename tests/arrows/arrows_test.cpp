#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "arrows/include_graph.h"
#include "support/places.h"
#include "support/temp_folder.h"

namespace sherd::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(Arrows, EveryIncludePointsDownAndCudaKeepsToItsFolders) {
  int files = 0;
  const auto violations = check_sources(SHERD_SOURCE_DIR, &files);
  EXPECT_GT(files, 80) << "the sources were not found under " << SHERD_SOURCE_DIR;
  for (const std::string& violation : violations) ADD_FAILURE() << violation;
}

TEST(Arrows, TheTableHasNoCycle) {
  for (const auto& [room, below] : direct_arrows())
    for (const std::string& next : below) {
      ASSERT_TRUE(direct_arrows().contains(next)) << next;
      EXPECT_FALSE(reachable_from(next).contains(room)) << room << " and " << next << " reach each other";
    }
}

TEST(Arrows, EveryRoomOfTheBuildIsInTheTable) {
  for (const auto& entry : fs::directory_iterator(fs::path(SHERD_SOURCE_DIR) / "src"))
    EXPECT_TRUE(!entry.is_directory() || direct_arrows().contains(entry.path().filename().string()))
        << entry.path();
}

/// A small house with one more file in it.
std::vector<std::string> violations_with(const std::string& file, const std::string& text) {
  TempFolder root;
  fs::create_directories(root / "src/base");
  write_text(root / "src/base/error.h", "#pragma once\n#include <string>\n");
  fs::create_directories((root / file).parent_path());
  write_text(root / file, text);
  return check_sources(root.path());
}

TEST(ArrowsTest, GoodFilesPass) {
  EXPECT_THAT(
      violations_with("src/tensor/x.cpp", "#include \"base/error.h\"\n#include <oneapi/dnnl/dnnl.hpp>\n"),
      IsEmpty());
  EXPECT_THAT(
      violations_with("sharding/x.h", "#include \"comm/communicator.h\"\n#include \"tensor/tensor.h\"\n"),
      IsEmpty());
  EXPECT_THAT(violations_with("models/x.h", "#include \"sharding/parallel/layout.h\"\n"), IsEmpty());
  EXPECT_THAT(violations_with("src/comm/mpi/x.cpp", "#include <mpi.h>\n"), IsEmpty());
  EXPECT_THAT(violations_with("examples/x.cpp", "#include <sherd/sherd.h>\n"), IsEmpty());
}

TEST(ArrowsTest, AnUpwardIncludeIsFound) {
  EXPECT_THAT(violations_with("src/base/x.h", "#pragma once\n\n#include \"tensor/tensor.h\"\n"),
              ElementsAre("src/base/x.h:3: tensor/tensor.h: no arrow leads from 'base' to 'tensor'"));
  EXPECT_THAT(violations_with("src/nn/deep/x.cpp", "  #  include   \"comm/communicator.h\" // why not\n"),
              ElementsAre(HasSubstr("src/nn/deep/x.cpp:1:")));
  EXPECT_THAT(violations_with("sharding/parallel/x.cpp", "#include \"sharding/units/unit.h\"\n"),
              ElementsAre(HasSubstr("no arrow leads from 'parallel' to 'sharding'")));
  EXPECT_THAT(violations_with("sharding/x.cpp", "#include \"sharding/parallel/layout.h\"\n"),
              ElementsAre(HasSubstr("no arrow leads from 'sharding' to 'parallel'")));
  EXPECT_THAT(violations_with("src/engine/x.cpp", "#include \"models/gpt.h\"\n"),
              ElementsAre(HasSubstr("no arrow leads from 'engine' to 'models'")));
  EXPECT_THAT(violations_with("optim/x.cpp", "#include \"nn/module.h\"\n"),
              ElementsAre(HasSubstr("optim/x.cpp:1")));
}

TEST(ArrowsTest, AStrayThirdPartyIsFound) {
  EXPECT_THAT(violations_with("src/device/x.cpp", "#include <tbb/parallel_for.h>\n"),
              ElementsAre(HasSubstr("another room")));
  EXPECT_THAT(violations_with("src/base/x.h", "#include <tbb/task_arena.h>\n"),
              ElementsAre(HasSubstr("never in headers")));
  EXPECT_THAT(violations_with("src/comm/local/x.cpp", "#include <mpi.h>\n"),
              ElementsAre(HasSubstr("another room")));
  EXPECT_THAT(violations_with("src/tensor/x.h", "#include <Eigen/Core>\n"),
              ElementsAre(HasSubstr("never in headers")));
  EXPECT_THAT(violations_with("models/x.cpp", "#include <nlohmann/json.hpp>\n"),
              ElementsAre(HasSubstr("another room")));
  EXPECT_THAT(violations_with("src/cli/x.h", "#include <cxxopts.hpp>\n"),
              ElementsAre(HasSubstr("never in headers")));
  EXPECT_THAT(violations_with("src/engine/x.cpp", "#include <sentencepiece_processor.h>\n"),
              ElementsAre(HasSubstr("another room")));
  EXPECT_THAT(violations_with("src/data/x.cpp", "#include <pcre2.h>\n#include <unicode/uchar.h>\n"),
              ElementsAre(HasSubstr("another room"), HasSubstr("another room")));
}

TEST(ArrowsTest, CudaStaysInItsFolders) {
  EXPECT_THAT(violations_with("src/tensor/cuda/x.cu",
                              "#include \"device/cuda/launch.cuh\"\n#include <cuda_bf16.h>\n"),
              IsEmpty());
  EXPECT_THAT(violations_with("optim/cuda/x.cu", "#include \"device/cuda/launch.cuh\"\n"), IsEmpty());
  EXPECT_THAT(violations_with("src/comm/nccl/x.cpp", "#include <nccl.h>\n#include <cuda_runtime_api.h>\n"),
              IsEmpty());
  EXPECT_THAT(violations_with("src/engine/x.cpp", "#include \"device/cuda.h\"\n"), IsEmpty());
  EXPECT_THAT(violations_with("src/tensor/x.cpp", "#include \"tensor/cuda/cuda_kernels.h\"\n"), IsEmpty());
  EXPECT_THAT(violations_with("src/engine/x.cpp", "#include \"device/cuda/driver.h\"\n"),
              ElementsAre(HasSubstr("public headers")));
  EXPECT_THAT(violations_with("src/tensor/x.cpp", "#include \"tensor/cuda/families.cuh\"\n"),
              ElementsAre(HasSubstr("kernels are written in cuda/")));
  EXPECT_THAT(violations_with("src/device/cuda/x.cu", "#include \"tensor/cuda/families.cuh\"\n"),
              ElementsAre(HasSubstr("no arrow")));
  EXPECT_THAT(violations_with("src/device/cuda/x.h", "#include <cuda_runtime_api.h>\n"),
              ElementsAre(HasSubstr("never in headers")));
  EXPECT_THAT(violations_with("src/engine/x.cpp", "#include <nvtx3/nvToolsExt.h>\n"),
              ElementsAre(HasSubstr("another room")));
}

TEST(ArrowsTest, AQuestionWhetherADeviceIsCudasIsFound) {
  const std::string asks = "if (device.kind() == device::Kind::cuda)\n  use(device::as_cuda(device));\n";
  EXPECT_THAT(violations_with("src/engine/x.cpp", asks),
              ElementsAre(HasSubstr("x.cpp:1: Kind::cuda"), HasSubstr("x.cpp:2: as_cuda(")));
  EXPECT_THAT(violations_with("src/tensor/cuda/x.cpp", asks), IsEmpty());
  EXPECT_THAT(violations_with("src/comm/nccl/x.cpp", asks), IsEmpty());
  EXPECT_THAT(violations_with("src/engine/x.cpp", "// as_cuda(device)\n"), IsEmpty());
}

TEST(ArrowsTest, OddPathsAndUnknownRoomsAreFound) {
  EXPECT_THAT(violations_with("src/base/x.cpp", "#include \"error.h\"\n"),
              ElementsAre(HasSubstr("written from the room")));
  EXPECT_THAT(violations_with("src/attic/x.cpp", "#include \"base/error.h\"\n"),
              ElementsAre(HasSubstr("no room")));
}

TEST(ArrowsTest, CommentsAreNotIncludes) {
  EXPECT_THAT(
      violations_with("src/base/x.h", "// #include \"tensor/tensor.h\"\n/* a\n#include <mpi.h>\n*/ int x;\n"),
      IsEmpty());
  EXPECT_THAT(violations_with("src/base/x.h", "/* a */ #include \"tensor/tensor.h\"\n"),
              ElementsAre(HasSubstr(":1:")));
}

}  // namespace
}  // namespace sherd::testing
