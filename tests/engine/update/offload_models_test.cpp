// Frozen, tied and left-out parameters, and leases, with states off the device.
#include <gtest/gtest.h>

#include "support/equality.h"
#include "support/expect_error.h"
#include "support/odd_models.h"
#include "support/temp_folder.h"

namespace sherd::test {
namespace {

using tensor::Tensor;

class OffloadedModels : public ::testing::TestWithParam<std::string> {
 protected:
  /// Keys of zero_optimization that put parameters and optimizer into the tier.
  std::string everything() const {
    const std::string on =
        cat(R"({"device": ")", GetParam(), R"(", "nvme_path": ")", folder_.path().string(), "\"");
    return cat(R"("offload_optimizer": )", on, R"(}, "offload_param": )", on, R"(, "max_in_cpu": 0})");
  }
  static std::vector<float> read(Engine& engine, const Odd& model, int layer) {
    const auto lease = engine.sharded().gather(*model.layer(layer).weight());
    const Tensor& value = model.layer(layer).weight()->value;
    return {value.data<float>(), value.data<float>() + value.numel()};
  }

  sherd::testing::TempFolder folder_;
};

INSTANTIATE_TEST_SUITE_P(Tiers, OffloadedModels, ::testing::Values("cpu", "nvme"));

TEST_P(OffloadedModels, TiedFrozenAndUnusedParametersTrainAsOnTheDevice) {
  const auto losses = [](bool freeze, bool skip, const std::string& more, const std::string& zero) {
    std::vector<double> out;
    launch_ranks(2, [&](DistributedPtr dist) {
      Engine engine(dist, std::make_shared<Odd>(freeze, skip), odd_config(3, more, zero));
      for (int step = 0; step < 5; ++step) {
        const auto& report = engine.train_batch([&] { return odd_batch(engine, step); });
        if (dist->rank() == 0) out.insert(out.end(), {report.loss, report.grad_norm});
      }
    });
    return out;
  };
  for (const bool freeze : {false, true})
    for (const bool skip : {false, true})
      for (const char* more : {"", R"(, "training": {"recompute": "full"})"})
        EXPECT_EQ(losses(freeze, skip, more, everything()), losses(freeze, skip, more, ""))
            << "frozen " << freeze << ", left out " << skip << more;
}

TEST_P(OffloadedModels, FrozenParametersKeepTheirValues) {
  launch_ranks(2, [&](DistributedPtr dist) {
    auto model = std::make_shared<Odd>(true);
    Engine engine(dist, model, odd_config(3, "", everything()));
    const auto frozen = read(engine, *model, 0), trained = read(engine, *model, 1);
    for (int step = 0; step < 3; ++step) engine.train_batch([&] { return odd_batch(engine, step); });
    EXPECT_EQ(read(engine, *model, 0), frozen);
    EXPECT_NE(read(engine, *model, 1), trained);
    EXPECT_FALSE(model->layer(0).weight()->value.defined()) << "no lease, no value";
  });
}

TEST_P(OffloadedModels, ALeaseMayNotOutliveTheValuesItRead) {
  launch_ranks(1, [&](DistributedPtr dist) {
    auto model = std::make_shared<Odd>();
    Engine engine(dist, model, odd_config(3, "", everything()));
    const auto before = read(engine, *model, 0);
    {
      const auto lease = engine.sharded().gather(*model->layer(0).weight());
      sherd::testing::expect_error(ErrorKind::usage, "'layer0'",
                                   [&] { engine.train_batch([&] { return odd_batch(engine, 0); }); });
    }
    engine.step();  // nothing had counted
    EXPECT_EQ(engine.global_steps(), 1);
    EXPECT_NE(read(engine, *model, 0), before);
  });
}

}  // namespace
}  // namespace sherd::test
