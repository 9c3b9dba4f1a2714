// Training on a device that does everything as late as it may: the bits of the processor's, and no wait that
// nobody needs.
#include "engine/step/flights.h"

#include <gtest/gtest.h>

#include <optional>

#include "engine/step/step_loss.h"
#include "models/gpt.h"
#include "support/equality.h"
#include "support/expect_error.h"
#include "support/gpu/lazy_kernels.h"
#include "support/odd_models.h"
#include "support/temp_folder.h"

namespace sherd::test {
namespace {

using sherd::testing::LazyCudaDevice;
using sherd::testing::LazyKernels;
using tensor::Tensor;

TEST(StepLoss, waits_for_the_losses_and_for_nothing_later) {
  LazyCudaDevice gpu;
  comm::run_local(1, comm::CommOptions{}, [&](comm::Communicator& alone) {
    engine::StepLoss losses(gpu, alone, alone);
    const Tensor loss = Tensor::empty(gpu, {1}, DType::f32);
    for (int i = 0; i < 12; ++i) {  // more than it has room for at first
      gpu.submit(gpu.compute_stream(), [at = loss.data<float>(), i] { *at = static_cast<float>(i * i); });
      losses.add(loss);
    }
    losses.share();
    bool later = false;
    gpu.submit(gpu.compute_stream(), [&] { later = true; });
    EXPECT_EQ(losses.mean().value, 506.0 / 12);
    EXPECT_EQ(losses.mean().value, 506.0 / 12);
    EXPECT_FALSE(later);
    losses.clear();
    losses.add(loss);
    EXPECT_EQ(losses.mean().value, 121.0);
  });
}

TEST(RunAhead, lets_a_few_micro_batches_wait_and_no_more_in_any_order) {
  for (const int chunks : {1, 3}) {
    LazyCudaDevice gpu;
    engine::RunAhead run_ahead(gpu);
    const int most = 2 * chunks * static_cast<int>(engine::RunAhead::most);
    int done = 0;
    for (int i = 0; i < 3 * most; ++i) {
      run_ahead.begin(chunks);
      gpu.submit(gpu.compute_stream(), [&] { ++done; });
      run_ahead.end();
      EXPECT_EQ(done, std::max(0, i + 1 - most)) << i;
    }
  }
}

struct LazySetting {
  const char* name;
  std::function<void(RunSpec&)> set;
  std::optional<bool> early = false;  ///< updates begin in backward; nothing: where reads are fast enough
};
void PrintTo(const LazySetting& setting, std::ostream* out) {
  *out << setting.name;
}

class LazyTraining : public ::testing::TestWithParam<LazySetting> {};

RunSpec offloaded() {
  RunSpec spec;
  spec.ranks = 1, spec.steps = 6, spec.stage = 2, spec.accumulation = 3;
  spec.offload_optimizer = "cpu";
  spec.layers = 5;  // no multiple of the buffers that take turns
  return spec;
}

TEST_P(LazyTraining, has_the_bits_of_the_processor) {
  sherd::testing::TempFolder folder;
  RunSpec spec = offloaded();
  spec.nvme_path = spec.directory = folder.path();
  GetParam().set(spec);
  const RunResult expected = train_local(spec);
  spec.lazy = true;
  for (const bool graphs : {false, true}) {
    spec.graphs = graphs;
    const RunResult result = train_local(spec);
    EXPECT_EQ(result.losses, expected.losses) << graphs;
    EXPECT_TRUE(result.bits() == expected.bits()) << graphs;
    EXPECT_EQ(result.early_updates.back() > 0, GetParam().early.value_or(result.early_updates.back() > 0));
    EXPECT_EQ(result.graphs.back().launches > 0, graphs);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Settings, LazyTraining,
    ::testing::Values(
        LazySetting{"stage_2", [](RunSpec&) {}},
        LazySetting{"one_micro_batch", [](RunSpec& s) { s.accumulation = 1; }},
        LazySetting{"many_micro_batches", [](RunSpec& s) { s.accumulation = 9, s.steps = 3; }},
        LazySetting{"stage_1", [](RunSpec& s) { s.stage = 1; }},
        LazySetting{"parameters_in_host",
                    [](RunSpec& s) { s.stage = 3, s.offload_param = "cpu", s.prefetch = 20'000; }},
        LazySetting{"separate_masters", [](RunSpec& s) { s.split_masters = false; }},
        LazySetting{"fp16", [](RunSpec& s) { s.dtype = "fp16"; }},
        LazySetting{"fp32_llama", [](RunSpec& s) { s.dtype = "fp32", s.llama = true, s.tied = false; }},
        LazySetting{"recompute", [](RunSpec& s) { s.recompute = "full", s.cpu_checkpointing = true; }},
        LazySetting{"resumed", [](RunSpec& s) { s.resume_at = 3; }},
        LazySetting{"optimizer_on_nvme",
                    [](RunSpec& s) { s.offload_optimizer = "nvme", s.sub_group = 8192; }},
        LazySetting{"early", [](RunSpec& s) { s.clipping = 0, s.check_overflow = false; }, true},
        LazySetting{"early_from_nvme",
                    [](RunSpec& s) {
                      s.clipping = 0, s.check_overflow = false, s.offload_optimizer = "nvme",
                      s.sub_group = 8192;
                    },
                    std::nullopt}),
    [](const auto& tested) { return tested.param.name; });

/// Addresses and kernels come again from step to step, so blocks' passes run as graphs; what is left is a few
/// works at the seams.
TEST(GraphsOfAGpu, steady_steps_run_as_graphs) {
  for (const char* optimizer : {"none", "cpu"})
    for (const int stage : {0, 2, 3})
      for (const int accumulation : {1, 4}) {
        if (stage == 0 && optimizer != std::string("none")) continue;
        RunSpec spec = offloaded();
        spec.steps = 12, spec.stage = stage, spec.accumulation = accumulation,
        spec.offload_optimizer = optimizer;
        spec.lazy = spec.graphs = true;
        const RunResult result = train_local(spec);
        SCOPED_TRACE(cat("stage ", stage, ", optimizer on ", optimizer, ", micro-batches ", accumulation));
        ASSERT_EQ(result.graphs.size(), 12u);
        const device::GraphCounts &then = result.graphs[9], &now = result.graphs[11];
        EXPECT_EQ(now.graphs, then.graphs) << "none is made any more";
        const std::uint64_t in_graphs = now.works_in_graphs - then.works_in_graphs;
        EXPECT_GT(in_graphs, 9 * (now.works_apart - then.works_apart));
      }
}

/// One rank's engine on a lazy device.
struct Lazy {
  Lazy(const DistributedPtr& dist, const RunSpec& spec) : gpu(std::make_shared<LazyCudaDevice>()) {
    const config::Config config = config::parse_text(spec.config());
    auto own = std::make_unique<LazyKernels>(*gpu);
    kernels = own.get();
    engine = std::make_unique<Engine>(dist, std::make_shared<models::Gpt>(models::gpt_config(config, 101)),
                                      config, gpu, std::move(own));
  }
  tensor::Batch batch(int step, int micro) { return synthetic_batch(*gpu, 2, 24, 101, step, micro, 0); }
  void micro_batch(int step, int micro) {
    engine->backward(engine->forward(batch(step, micro)));
    engine->step();
  }
  std::shared_ptr<LazyCudaDevice> gpu;
  LazyKernels* kernels;
  std::unique_ptr<Engine> engine;
};

TEST(RunAheadOfAGpu, a_step_waits_once_and_its_micro_batches_never) {
  for (const char* place : {"cpu", "nvme"})
    launch_ranks(1, [&](DistributedPtr dist) {
      sherd::testing::TempFolder folder;
      RunSpec spec = offloaded();
      spec.offload_optimizer = place, spec.nvme_path = folder.path();
      Lazy lazy(dist, spec);
      for (int step = 0; step < 4; ++step) {
        lazy.gpu->synchronize();
        const int waits = lazy.gpu->synchronized(), ran = lazy.kernels->ran();
        for (int micro = 0; micro < 2; ++micro) lazy.micro_batch(step, micro);
        EXPECT_EQ(lazy.kernels->ran(), ran) << "something waited for the device in a micro-batch";
        lazy.micro_batch(step, 2);
        EXPECT_EQ(lazy.gpu->synchronized(), waits + 1) << "the norm is read";
      }
      EXPECT_EQ(lazy.engine->global_steps(), 4);
    });
}

TEST(RunAheadOfAGpu, wrong_data_is_named_by_the_step_which_is_then_dropped) {
  const auto run = [](bool stumble, bool early) {
    std::vector<double> losses;
    launch_ranks(1, [&](DistributedPtr dist) {
      RunSpec spec = offloaded();
      if (early) spec.clipping = 0, spec.check_overflow = false;
      Lazy lazy(dist, spec);
      lazy.engine->train_batch([&, micro = 0]() mutable { return lazy.batch(0, micro++); });
      if (stumble) {
        std::vector<std::int32_t> tokens(48, 3);
        tokens[7] = 1000;
        tensor::Batch bad = lazy.batch(1, 0);
        bad["tokens"] = Tensor::of<std::int32_t>(*lazy.gpu, {2, 24}, tokens);
        lazy.engine->backward(lazy.engine->forward(bad));
        lazy.engine->step();
        lazy.micro_batch(1, 1);
        const auto loss = lazy.engine->forward(lazy.batch(1, 2));
        sherd::testing::expect_error(ErrorKind::data, "1000", [&] {
          lazy.engine->backward(loss);
          lazy.engine->step();
        });
        EXPECT_EQ(lazy.engine->global_steps(), 1);
        if (early) return;
      }
      for (int step = 1; step < 3; ++step)
        losses.push_back(
            lazy.engine->train_batch([&, micro = 0]() mutable { return lazy.batch(step, micro++); }).loss);
    });
    return losses;
  };
  EXPECT_EQ(run(true, false), run(false, false));
  run(true, true);
}

TEST(RunAheadOfAGpu, loading_forgets_what_was_wrong_before) {
  launch_ranks(1, [](DistributedPtr dist) {
    sherd::testing::TempFolder folder;
    Lazy lazy(dist, offloaded());
    lazy.engine->train_batch([&, micro = 0]() mutable { return lazy.batch(0, micro++); });
    lazy.engine->save_checkpoint(folder.path());
    tensor::Batch bad = lazy.batch(1, 0);
    bad["labels"] = Tensor::of<std::int32_t>(*lazy.gpu, {2, 24}, std::vector<std::int32_t>(48, -7));
    const auto loss = lazy.engine->forward(bad);
    sherd::testing::expect_error(ErrorKind::data, "-7", [&] { Engine::item(loss); });
    lazy.engine->backward(loss);
    lazy.engine->load_checkpoint(folder.path());
    lazy.engine->train_batch([&, micro = 0]() mutable { return lazy.batch(1, micro++); });
    EXPECT_EQ(lazy.engine->global_steps(), 2);
  });
}

/// The second of three steps does without a block: its gradient then is zero, not what the first step left.
TEST(RunAheadOfAGpu, a_block_that_a_step_skips_has_no_gradient) {
  const auto losses = [](bool lazy, const char* precision) {
    std::vector<double> out;
    launch_ranks(1, [&](DistributedPtr dist) {
      const config::Config config = odd_config(2, precision, R"("offload_optimizer": {"device": "cpu"})");
      const auto gpu = std::make_shared<LazyCudaDevice>();
      Engine engine(dist, std::make_shared<Sometimes>(), config, lazy ? gpu : nullptr,
                    lazy ? std::make_unique<LazyKernels>(*gpu) : nullptr);
      for (int step = 0; step < 4; ++step)
        out.push_back(engine
                          .train_batch([&] {
                            tensor::Batch batch = odd_batch(engine, step);
                            if (step != 1) batch["deep"] = batch["x"];
                            return batch;
                          })
                          .loss);
    });
    return out;
  };
  for (const char* precision :
       {R"(, "bf16": {"enabled": true})",
        R"(, "gradient_clipping": 0, "bf16": {"enabled": true, "check_grad_overflow": false})"})
    EXPECT_EQ(losses(true, precision), losses(false, precision)) << precision;
}

TEST(RunAheadOfAGpu, a_nan_loss_begins_no_update) {
  launch_ranks(1, [](DistributedPtr dist) {
    RunSpec spec = offloaded();
    spec.clipping = 0, spec.check_overflow = false;  // it would begin in backward
    Lazy lazy(dist, spec);
    lazy.engine->train_batch([&, micro = 0]() mutable { return lazy.batch(0, micro++); });
    const Tensor& weight = lazy.engine->sharded().trainable_segments().front()->parameters().tensor();
    lazy.kernels->fill(weight, std::numeric_limits<double>::quiet_NaN());
    sherd::testing::expect_error(ErrorKind::numerics, "nan at step 2: nothing was updated", [&] {
      lazy.engine->train_batch([&, micro = 0]() mutable { return lazy.batch(1, micro++); });
    });
    EXPECT_EQ(lazy.engine->optimizer()->steps(), 1);
  });
}

TEST(RunAheadOfAGpu, the_last_update_is_looked_at_by_whoever_asks) {
  launch_ranks(1, [](DistributedPtr dist) {
    RunSpec spec = offloaded();
    spec.stage = 0, spec.offload_optimizer = "none";  // what is updated beside a GPU is looked at at once
    Lazy lazy(dist, spec);
    const auto step = [&](int number) {
      lazy.engine->train_batch([&, micro = 0]() mutable { return lazy.batch(number, micro++); });
    };
    step(0);
    lazy.engine->synchronize();
    lazy.engine->optimizer()->set_lr(1e300);
    step(1);
    EXPECT_EQ(lazy.engine->global_steps(), 2) << "the step itself does not wait for its update";
    sherd::testing::expect_error(ErrorKind::numerics, "step 2 has made a weight NaN or infinite",
                                 [&] { lazy.engine->synchronize(); });
    sherd::testing::expect_error(ErrorKind::usage, "load_checkpoint()",
                                 [&] { lazy.engine->forward(lazy.batch(2, 0)); });
  });
}

}  // namespace
}  // namespace sherd::test
