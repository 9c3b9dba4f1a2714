#include <gmock/gmock.h>

#include "config/support.h"
#include "support/temp_folder.h"

namespace sherd::config {
namespace {

using ::testing::HasSubstr;

Parallel parallel(const std::string& text) {
  return parse_text(text).parallel;
}

TEST(PipelineKeys, DefaultsAreOneStage) {
  const Parallel defaults = parallel("{}");
  EXPECT_EQ(defaults.pipeline, 1);
  EXPECT_EQ(defaults.schedule, Schedule::automatic);
  EXPECT_EQ(defaults.virtual_stages, 1);
  EXPECT_EQ(defaults.micro_batch_group, 0);
  EXPECT_EQ(defaults.partition_method, "best");
}

TEST(PipelineKeys, EveryScheduleHasItsName) {
  const std::vector<std::pair<std::string, Schedule>> names = {{"auto", Schedule::automatic},
                                                               {"accumulate", Schedule::accumulate},
                                                               {"layered", Schedule::layered},
                                                               {"gpipe", Schedule::gpipe},
                                                               {"1F1B", Schedule::one_forward_one_backward},
                                                               {"interleaved", Schedule::interleaved},
                                                               {"zero_bubble", Schedule::zero_bubble}};
  for (const auto& [name, schedule] : names)
    EXPECT_EQ(parallel(R"({"parallel": {"schedule": ")" + name + "\"}}").schedule, schedule) << name;
}

TEST(PipelineKeys, DeepSpeedsSectionMeansTheSame) {
  const Parallel of_both = parallel(R"({"pipeline": {"stages": 4, "partition": "type:Block"}})");
  EXPECT_EQ(of_both.pipeline, 4);
  EXPECT_EQ(of_both.partition_method, "type:Block");
  EXPECT_EQ(parallel(R"({"pipeline": {"stages": "auto"}, "parallel": {"pipeline": 2}})").pipeline, 2);
  EXPECT_EQ(parallel(R"({"parallel": {"pipeline": 2}, "pipeline": {"stages": 1}})").pipeline, 2);
  EXPECT_EQ(parallel(R"({"parallel": {"pipeline": 2}, "pipeline": {"stages": 2}})").pipeline, 2);
  // DeepSpeed's default, and its other name for the key.
  EXPECT_EQ(parallel(R"({"pipeline": {"partition": "best"}})").partition_method, "best");
  EXPECT_EQ(parallel(R"({"pipeline": {"partition_method": "uniform"}})").partition_method, "uniform");

  const auto recompute = [](const std::string& text) { return parse_text(text).training.recompute; };
  EXPECT_EQ(recompute(R"({"pipeline": {"activation_checkpoint_interval": 1}})"), Recompute::full);
  EXPECT_EQ(recompute(R"({"pipeline": {"activation_checkpoint_interval": 0}})"), Recompute::none);
  EXPECT_EQ(recompute(R"({"training": {"recompute": "selective"},
                          "pipeline": {"activation_checkpoint_interval": 0}})"),
            Recompute::selective);
  EXPECT_EQ(recompute(R"({"training": {"recompute": "full"},
                          "pipeline": {"activation_checkpoint_interval": 1}})"),
            Recompute::full);
}

TEST(PipelineKeys, WhatHasNoEffectIsNoted) {
  const auto noted = [](const std::string& text, const std::string& note) {
    EXPECT_TRUE(has_note(parse_text(text), note)) << text;
  };
  noted(R"({"parallel": {"partition_method": "uniform"}})",
        "parallel.partition_method: no effect: the model");
  noted(R"({"pipeline": {"partition": "uniform"}})", "pipeline.partition: no effect: the model is not cut");
  noted(R"({"parallel": {"pipeline": 2, "micro_batch_group": 4}})",
        "parallel.micro_batch_group: no effect without parallel.virtual_stages");
  noted(R"({"parallel": {"schedule": "1f1b"}})",
        "parallel.schedule: of stages, and the model is not cut into any: set parallel.pipeline");
  noted(R"({"parallel": {"pipeline": 2, "schedule": "interleaved"}})",
        "parallel.schedule: interleaved with one chunk per stage is 1f1b: set parallel.virtual_stages");
  noted(R"({"pipeline": {"activation_checkpoint_interval": 3}})",
        "pipeline.activation_checkpoint_interval: each block recomputes from its own input");
  noted(R"({"activation_checkpointing": {"nvme_checkpointing": true}})",
        "activation_checkpointing.nvme_checkpointing: no effect without \"recompute\": \"full\"");

  const Config cut = parse_text(R"({"parallel": {"pipeline": 2, "virtual_stages": 2, "micro_batch_group": 4,
      "partition_method": "uniform"}, "training": {"recompute": "full"}})");
  for (const std::string& note : cut.notes) EXPECT_TRUE(note.starts_with("optimizer")) << note;
}

TEST(PipelineKeys, APartMayRecompute) {
  const auto training = [](const std::string& keys) {
    return parse_text(R"({"parallel": {"pipeline": 2}, "training": {"recompute": "full")" + keys + "}}")
        .training;
  };
  EXPECT_EQ(training("").recompute_blocks, -1);
  EXPECT_EQ(training("").recompute_micro_batches, -1);
  EXPECT_EQ(training(R"(, "recompute_blocks": 3)").recompute_blocks, 3);
  EXPECT_EQ(training(R"(, "recompute_blocks": 0)").recompute_blocks, 0);
  EXPECT_EQ(training(R"(, "recompute_blocks": null)").recompute_blocks, -1);
  EXPECT_EQ(training(R"(, "recompute_micro_batches": 2)").recompute_micro_batches, 2);
  for (const char* key : {"recompute_blocks", "recompute_micro_batches"}) {
    EXPECT_THAT(error_of(cat(R"({"training": {")", key, R"(": -1}})")),
                HasSubstr(cat("training.", key, ": must be an integer >= 0, not -1")));
    EXPECT_TRUE(has_note(parse_text(cat(R"({"training": {")", key, R"(": 1}})")),
                         cat("training.", key, ": no effect without training.recompute")));
  }
  const auto noted = [](const char* part, const char* parallel) {
    return has_note(parse_text(cat(R"({"training": {"recompute": "full", "recompute_micro_batches": )", part,
                                   R"(}, "parallel": {)", parallel, "}}")),
                    "training.recompute_micro_batches: no effect above 0: without a pipeline");
  };
  EXPECT_TRUE(noted("1", ""));
  EXPECT_FALSE(noted("0", ""));
  EXPECT_FALSE(noted("1", R"("pipeline": 2)"));
  EXPECT_FALSE(noted("1", R"("schedule": "layered")"));
}

TEST(PipelineKeys, ActivationsOnNvmeUseItsPathAndItsBuffers) {
  const std::string tail = R"("activation_checkpointing": {"nvme_checkpointing": true},
      "training": {"recompute": "full"}, "aio": {"queue_depth": 8}, "zero_optimization": {"stage": 3)";
  const Config config =
      parse_text("{" + tail + R"(, "offload_param": {"device": "cpu", "nvme_path": "/d"}}})");
  for (const std::string& note : config.notes) EXPECT_TRUE(note.starts_with("optimizer:")) << note;
  EXPECT_THAT(error_of("{" + tail + "}}"), HasSubstr("activation_checkpointing.nvme_checkpointing: needs a "
                                                     "directory on the drive: \"nvme_path\""));
  EXPECT_THAT(error_of(R"({"activation_checkpointing": {"cpu_checkpointing": true,
                                                        "nvme_checkpointing": true}})"),
              HasSubstr("drop this or cpu_checkpointing"));
}

TEST(PipelineKeys, ContradictionsAreErrorsThatSayWhatWouldDo) {
  const auto refused = [](const std::string& text, const std::string& message) {
    EXPECT_THAT(error_of(text), HasSubstr(message));
  };
  refused(R"({"parallel": {"pipeline": 2, "schedule": "layered"}})",
          "run.json:1: parallel.schedule: \"layered\" runs the whole model on every rank, and "
          "parallel.pipeline is 2; take one of auto, gpipe, 1f1b, interleaved and zero_bubble, or set "
          "parallel.pipeline to 1");
  refused(R"({"pipeline": {"stages": 2}, "parallel": {"schedule": "accumulate"}})",
          "parallel.schedule: \"accumulate\" runs the whole model on every rank");
  refused(R"({"pipeline": {"stages": 2}, "parallel": {"schedule": "layered"}})",
          "and pipeline.stages is 2; take one of auto, gpipe, 1f1b, interleaved and zero_bubble, or set "
          "pipeline.stages to 1");
  refused(R"({"parallel": {"virtual_stages": 2}})",
          "parallel.virtual_stages: 2 needs parallel.schedule \"interleaved\", not \"auto\", or "
          "parallel.pipeline above 1");
  refused(R"({"parallel": {"pipeline": 2, "virtual_stages": 2, "schedule": "1f1b"}})",
          "parallel.virtual_stages: 2 needs parallel.schedule \"interleaved\", not \"1f1b\"; or set it to 1");
  refused(R"({"parallel": {"pipeline": 4, "virtual_stages": 2, "micro_batch_group": 2}})",
          "parallel.micro_batch_group: must be at least parallel.pipeline, 4, not 2; without the key it is");
  refused(R"({"parallel": {"partition_method": "type:"}})", "holds no regular expression after \"type:\"");
  refused(R"({"parallel": {"partition_method": "type:(a"}})", "holds no regular expression after \"type:\"");
  refused(R"({"parallel": {"partition_method": "profile"}})",
          "\"profile\" is none of best, parameters, uniform, type:REGEX");
  refused(R"({"parallel": {"pipeline": 0}})", "parallel.pipeline: must be an integer >= 1, not 0");
  refused(R"({"parallel": {"pipeline": 2}, "pipeline": {"stages": 4}})",
          "pipeline.stages: parallel.pipeline and pipeline.stages say the same, the ranks that hold the "
          "stages of one model, but are given as 2 and 4; keep one of them");
  refused(R"({"pipeline": {"partition": "uniform"}, "parallel": {"partition_method": "parameters"}})",
          "are given as uniform and parameters; keep one of them");
  for (const char* text : {R"({"training": {"recompute": "none"},
                               "pipeline": {"activation_checkpoint_interval": 1}})",
                           R"({"pipeline": {"activation_checkpoint_interval": 1},
                               "training": {"recompute": "selective"}})"})
    refused(text, "; keep one of them");
  refused(R"({"pipeline": {"activation_checkpoint_interval": 1}, "training": {"recompute": "selective"}})",
          "training.recompute: \"full\" is what pipeline.activation_checkpoint_interval means");
}

TEST(GivenKeys, AreThoseOfTheFiles) {
  const sherd::testing::TempFolder folder;
  const std::string file = (folder / "c.json").string(), other = (folder / "d.json").string();
  sherd::testing::write_text(folder / "c.json",
                             R"({"train_batch_size": 4, "tensor_parallel": {"tp": {"tp_size": 2}},
      "sequence_parallel_size": 2, "zero_optimization": {"stage": 1, "mics_shard_size": 4},
      "pipeline": {"stages": 1, "partition": "uniform", "activation_checkpoint_interval": 2}})");
  sherd::testing::write_text(folder / "d.json", R"({"parallel": {"tensor": 2}})");
  const std::string text =
      "parallel.tensor 2, parallel.tensors or x.parallel.tensor (parallel.tensor); parallel.context, "
      "--set parallel.shard_size=4 parallel.pipeline parallel.partition_method training.recompute.";
  EXPECT_EQ(
      in_given_keys(text, {file}),
      "tensor_parallel.tp.tp_size 2, parallel.tensors or x.parallel.tensor (tensor_parallel.tp.tp_size); "
      "sequence_parallel_size, --set zero_optimization.mics_shard_size=4 parallel.pipeline "
      "pipeline.partition pipeline.activation_checkpoint_interval.");
  EXPECT_EQ(in_given_keys("parallel.tensor", std::vector{file, other}), "parallel.tensor")
      << "both are given";
  EXPECT_EQ(in_given_keys("parallel.tensor", {other}), "parallel.tensor");
  EXPECT_EQ(in_given_keys("parallel.tensor", {other}, {"tensor_parallel.autotp_size=4"}), "parallel.tensor")
      << "files that contradict each other";
  EXPECT_EQ(in_given_keys("parallel.tensor", {(folder / "none").string()}), "parallel.tensor");
}

}  // namespace
}  // namespace sherd::config
