#include <gmock/gmock.h>

#include "config/support.h"

namespace sherd::config {
namespace {

Config zero(const std::string& keys, const std::string& others = "") {
  return parse_text(R"({"zero_optimization": {)" + keys + "}" + others + "}");
}

const std::string nvme = R"({"device": "nvme", "nvme_path": "/mnt/drive"})";

TEST(Offload, DefaultsFollowDeepSpeed19ButForThePipeline) {
  const Config config = parse_text("{}");
  EXPECT_EQ(config.zero.sub_group_size, 1'000'000'000);
  for (const Offload* offload : {&config.zero.offload_param, &config.zero.offload_optimizer}) {
    EXPECT_EQ(offload->device, OffloadDevice::none);
    EXPECT_TRUE(offload->pin_memory);
    EXPECT_EQ(offload->ratio, 1.0);
    EXPECT_TRUE(offload->pipeline_read && offload->pipeline_write);
  }
  EXPECT_EQ(config.zero.offload_param.buffer_count, 5);
  EXPECT_EQ(config.zero.offload_param.buffer_size, 100'000'000);
  EXPECT_EQ(config.zero.offload_param.max_in_cpu, 1'000'000'000);
  EXPECT_EQ(config.zero.offload_optimizer.buffer_count, 4);
  EXPECT_EQ(config.aio.backend, Aio::Backend::automatic);
  EXPECT_EQ(config.aio.block_size, 1 << 20);
  EXPECT_EQ(config.aio.queue_depth, 8);
  EXPECT_EQ(config.aio.thread_count, 1);
  EXPECT_FALSE(config.aio.single_submit || config.aio.checksums);
  EXPECT_TRUE(config.aio.overlap_events);
  EXPECT_TRUE(config.training.split_masters);
  EXPECT_EQ(config.training.moments_dtype, DType::f32);
  EXPECT_FALSE(config.training.cpu_checkpointing || config.device.bind_cores);
}

TEST(Offload, BothSectionsReadAllTheirKeys) {
  const Config config = zero(R"("stage": 3, "sub_group_size": 1e6,
      "offload_param": {"device": "NVMe", "nvme_path": "/a", "buffer_count": 6, "buffer_size": 1e7,
                        "max_in_cpu": 0, "pin_memory": false},
      "offload_optimizer": {"device": "nvme", "nvme_path": "/b", "buffer_count": 12, "pipeline_read": true,
                            "pipeline_write": true, "ratio": 0.25, "fast_init": true})");
  const Offload& param = config.zero.offload_param;
  EXPECT_EQ(param.device, OffloadDevice::nvme);
  EXPECT_EQ(param.nvme_path, "/a");
  EXPECT_EQ(param.buffer_count, 6);
  EXPECT_EQ(param.buffer_size, 10'000'000);
  EXPECT_EQ(param.max_in_cpu, 0);
  EXPECT_FALSE(param.pin_memory);
  const Offload& optimizer = config.zero.offload_optimizer;
  EXPECT_EQ(optimizer.device, OffloadDevice::nvme);
  EXPECT_EQ(optimizer.nvme_path, "/b");
  EXPECT_EQ(optimizer.buffer_count, 12);
  EXPECT_TRUE(optimizer.pipeline_read && optimizer.pipeline_write);
  EXPECT_EQ(optimizer.ratio, 0.25);
  EXPECT_EQ(config.zero.sub_group_size, 1'000'000);
  EXPECT_TRUE(parse_text(dump(config)) == config);
  EXPECT_THAT(config.notes,
              ::testing::UnorderedElementsAre(
                  "zero_optimization.offload_param.pin_memory: cannot matter on a CPU device",
                  "zero_optimization.offload_optimizer.fast_init: states are always written straight to "
                  "where they live",
                  ::testing::StartsWith("optimizer: not given")));
}

TEST(Offload, EveryStageTakesTheDevicesThatItMay) {
  for (int stage = 0; stage <= 3; ++stage)
    for (const char* device : {"none", "cpu", "nvme"})
      for (const bool parameters : {false, true}) {
        const std::string text = cat(R"({"zero_optimization": {"stage": )", stage, ", \"",
                                     parameters ? "offload_param" : "offload_optimizer", R"(": {"device": ")",
                                     device, R"(", "nvme_path": "/d"}}})");
        const bool fine = device == std::string("none") || parameters || stage >= 1;
        EXPECT_EQ(error_of(text).empty(), fine) << text;
        if (!parameters || device == std::string("none")) continue;
        // As in DeepSpeed, parameters that are not sharded stay where they are.
        const Config config = parse_text(text);
        EXPECT_EQ(config.zero.offload_param.device == OffloadDevice::none, stage < 3);
        EXPECT_EQ(has_note(config, cat("zero_optimization.offload_param: no effect at stage ", stage)),
                  stage < 3);
      }
}

TEST(Offload, TheOldSwitchesMeanTheSections) {
  const Config optimizer = zero(R"("stage": 2, "cpu_offload": true, "cpu_offload_use_pin_memory": true)");
  EXPECT_EQ(optimizer.zero.offload_optimizer.device, OffloadDevice::cpu);
  EXPECT_EQ(optimizer.zero.offload_param.device, OffloadDevice::none);
  EXPECT_TRUE(
      has_note(optimizer,
               R"(zero_optimization.cpu_offload: deprecated; write "offload_optimizer": {"device": "cpu"})"));
  EXPECT_TRUE(has_note(optimizer, "zero_optimization.cpu_offload_use_pin_memory: deprecated"));
  for (const char* name : {"cpu_offload_param", "cpu_offload_params"})
    EXPECT_EQ(zero(cat(R"("stage": 3, ")", name, "\": true")).zero.offload_param.device, OffloadDevice::cpu);
  const Config off = zero(R"("stage": 2, "cpu_offload": false)");
  EXPECT_TRUE(off.zero == zero(R"("stage": 2)").zero);
  EXPECT_TRUE(has_note(
      off, R"(zero_optimization.cpu_offload: deprecated; write "offload_optimizer": {"device": "no)"));
}

TEST(Offload, IdleKeysAreNotedOnce) {
  const std::string path = "zero_optimization.offload_";
  const auto notes = [](const Config& config) {
    std::vector<std::string> out;
    for (const std::string& note : config.notes)
      if (!note.starts_with("optimizer:")) out.push_back(note);
    return out;
  };
  EXPECT_THAT(notes(zero(R"("stage": 3, "sub_group_size": 1e6,
      "offload_param": {"device": "cpu", "nvme_path": "/a", "buffer_count": 6, "buffer_size": 1e7,
                        "max_in_cpu": 0, "pin_memory": "auto"},
      "offload_optimizer": {"device": "cpu", "nvme_path": null, "buffer_count": 6, "pipeline_read": true,
                            "pipeline_write": false, "ratio": 0.5, "pin_memory": true})",
                         R"(, "aio": {"block_size": 65536, "queue_depth": 32})")),
              ::testing::UnorderedElementsAre(
                  path + R"(param.nvme_path: no effect with device "cpu")",
                  path + R"(param.buffer_count: no effect with device "cpu")",
                  path + R"(param.buffer_size: no effect with device "cpu")",
                  path + R"(param.max_in_cpu: no effect with device "cpu")",
                  path + R"(param.pin_memory: "auto" takes the default)",
                  path + "optimizer.buffer_count: no effect: no state lives on NVMe",
                  path + "optimizer.pipeline_read: no effect: no state lives on NVMe",
                  path + "optimizer.pipeline_write: no effect: no state lives on NVMe",
                  path + "optimizer.pin_memory: cannot matter on a CPU device",
                  "zero_optimization.sub_group_size: no effect: no state lives on NVMe, and elsewhere the "
                  "optimizer works in place",
                  "aio: no effect: no state lives on NVMe"));
  EXPECT_THAT(
      notes(zero(R"("stage": 3, "offload_optimizer": {"ratio": 0.5, "pin_memory": true})")),
      ::testing::UnorderedElementsAre(path + R"(optimizer.ratio: no effect with device "none")",
                                      path + R"(optimizer.pin_memory: no effect with device "none")"));
  // Parameters on NVMe pass through the buffers of the update, wherever the optimizer's states are.
  EXPECT_THAT(
      notes(zero(R"("stage": 3, "sub_group_size": 1e6, "offload_param": )" + nvme +
                     R"(, "offload_optimizer": {"device": "cpu", "buffer_count": 6,
                                  "pipeline_read": true})",
                 R"(, "aio": {"thread_count": 2})")),
      ::testing::ElementsAre(path + "param.max_in_cpu: by default, as DeepSpeed's, the first 1000000000 "
                                    "parameters of each rank stay in host memory; 0 puts all on NVMe"));
}

TEST(Offload, NvmeNeedsABufferOnBothSides) {
  const auto error = [](const std::string& param, const std::string& optimizer) {
    return error_of(
        R"({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/d")" +
        param + "}" + optimizer + "}}");
  };
  EXPECT_THAT(
      error(R"(, "buffer_count": 0)", ""),
      ::testing::HasSubstr("offload_param.buffer_count: must be at least 1 with device \"nvme\", not 0"));
  // Parameters on NVMe pass through the update's buffers as well.
  for (const std::string device : {"none", "cpu"})
    EXPECT_THAT(
        error("", R"(, "offload_optimizer": {"buffer_count": 0, "device": ")" + device + "\"}"),
        ::testing::HasSubstr("offload_optimizer.buffer_count: must be at least 1 with offload_param's device "
                             "\"nvme\", not 0"));
  EXPECT_EQ(zero(R"("stage": 3, "offload_optimizer": {"device": "cpu", "buffer_count": 0})")
                .zero.offload_optimizer.buffer_count,
            0);
}

TEST(Aio, ReadsBothSpellingsAndNotesWhatItsBackendLacks) {
  const auto aio = [](const std::string& keys) {
    return zero(R"("stage": 1, "offload_optimizer": )" + nvme, R"(, "aio": {)" + keys + "}");
  };
  EXPECT_EQ(aio(R"("thread_count": 3)").aio.thread_count, 3);
  EXPECT_EQ(aio(R"("intra_op_parallelism": 3)").aio.thread_count, 3);
  const Config uring =
      aio(R"("backend": "io_uring", "intra_op_parallelism": 3, "single_submit": true, "use_gds": false)");
  EXPECT_EQ(uring.aio.backend, Aio::Backend::io_uring);
  EXPECT_TRUE(has_note(uring, R"(aio.intra_op_parallelism: no effect with backend "io_uring")"));
  EXPECT_FALSE(has_note(uring, "aio.single_submit"));
  EXPECT_TRUE(has_note(uring, "aio.use_gds: off"));
  const Config threads = aio(R"("backend": "threads", "thread_count": 3, "single_submit": true)");
  EXPECT_TRUE(has_note(threads, R"(aio.single_submit: no effect with backend "threads")"));
  EXPECT_FALSE(has_note(threads, "aio.thread_count"));
  EXPECT_FALSE(has_note(threads, "aio:"));
}

TEST(ActivationOffload, MattersOnlyWithFullRecompute) {
  const auto with = [](const std::string& recompute) {
    return parse_text(R"({"activation_checkpointing": {"cpu_checkpointing": true},
                          "device": {"host_memory_limit": "1GB"}, "training": {"recompute": ")" +
                      recompute + "\"}}");
  };
  for (const char* recompute : {"none", "selective"}) {
    const Config idle = with(recompute);
    EXPECT_TRUE(idle.training.cpu_checkpointing);
    EXPECT_TRUE(has_note(idle, "activation_checkpointing.cpu_checkpointing: no effect without"));
    EXPECT_TRUE(has_note(idle, "device.host_memory_limit: no effect: nothing is offloaded"));
  }
  const Config busy = with("full");
  EXPECT_FALSE(has_note(busy, "activation_checkpointing.cpu_checkpointing"));
  EXPECT_FALSE(has_note(busy, "device.host_memory_limit"));
  EXPECT_TRUE(parse_text(dump(busy)) == busy);
  EXPECT_FALSE(has_note(zero(R"("stage": 1, "offload_optimizer": {"device": "cpu"})",
                             R"(, "device": {"host_memory_limit": "1GB"})"),
                        "device.host_memory_limit"));
}

TEST(OptimizerStates, NotesSayWhereTheFormCannotMatter) {
  const auto with = [](const std::string& more, const std::string& training) {
    return parse_text("{" + more + R"("training": {)" + training + "}}");
  };
  const std::string bf16 = R"("bf16": {"enabled": true}, )", fp16 = R"("fp16": {"enabled": true}, )";
  EXPECT_FALSE(with(bf16, R"("split_masters": false)").training.split_masters);
  EXPECT_FALSE(has_note(with(bf16, R"("split_masters": false)"), "training.split_masters"));
  EXPECT_TRUE(has_note(with(fp16, R"("split_masters": true)"),
                       "training.split_masters: no effect: the model computes in fp16, not in bf16"));
  EXPECT_TRUE(has_note(with("", R"("split_masters": false)"),
                       "training.split_masters: no effect: the model computes in fp32, not in bf16"));
  EXPECT_FALSE(has_note(with("", ""), "training.split_masters"));

  const std::string bf16_moments = R"("moments_dtype": "bf16")";
  EXPECT_EQ(with(bf16, bf16_moments).training.moments_dtype, DType::bf16);
  EXPECT_FALSE(has_note(with("", bf16_moments), "training.moments_dtype"));
  const auto sgd = [&](const std::string& params) {
    return with(R"("optimizer": {"type": "SGD", "params": {)" + params + "}}, ", bf16_moments);
  };
  EXPECT_TRUE(has_note(sgd(""), "training.moments_dtype: no effect: SGD without momentum"));
  EXPECT_FALSE(has_note(sgd(R"("momentum": 0.9)"), "training.moments_dtype"));
}

}  // namespace
}  // namespace sherd::config
