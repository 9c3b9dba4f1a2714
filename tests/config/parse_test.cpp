#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>
#include <tuple>

#include "config/support.h"
#include "support/places.h"
#include "support/temp_folder.h"

namespace sherd::config {
namespace {

const std::string configs = std::string(SHERD_SOURCE_DIR) + "/configs/";

TEST(Parse, AcceptsCommentsTrailingCommasAndIntegralFloats) {
  const Config config = parse_text(R"(// first line
{
  "train_batch_size": 64, /* a block,
  comment */ "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8,}, # as HJSON has them, "quoted" or not
  #"zero_optimization": {"stage": 3},
  "data": {"path": "a//b # /* no comment */ \"x\"",},  // last
})");
  EXPECT_EQ(config.batch.train_batch_size, 64);
  EXPECT_EQ(config.zero.reduce_bucket_size, 500'000'000);
  EXPECT_EQ(config.data->sources.at(0).path, "a//b # /* no comment */ \"x\"");
}

TEST(Parse, SaysWhatHjsonIs) {
  const std::string hint = "a key without quotes is HJSON";
  EXPECT_NE(error_of("{\n  train_batch_size: 4\n}").find(hint), std::string::npos);
  EXPECT_NE(error_of("{train_batch_size : 4}").find(hint), std::string::npos);
  EXPECT_NE(error_of("{\"fp16\": {},\n  zero_optimization: {}}").find("run.json:2:"), std::string::npos);
  EXPECT_EQ(error_of("{\"train_batch_size\": four}").find(hint), std::string::npos);
}

TEST(Parse, DefaultsFollowDeepSpeed19) {
  const Config config = parse_text("{}");
  EXPECT_EQ(config.gradient_clipping, 1.0);
  EXPECT_EQ(config.zero.stage, 0);
  EXPECT_FALSE(config.zero.overlap_comm);
  EXPECT_EQ(config.zero.prefetch_bucket_size, 50'000'000);
  EXPECT_EQ(config.zero.param_persistence_threshold, 100'000);
  EXPECT_EQ(config.zero.offload_optimizer.buffer_count, 4);
  EXPECT_EQ(config.precision.compute, DType::f32);
  EXPECT_EQ(config.precision.communication_dtype(), DType::f32);
  EXPECT_FALSE(config.optimizer.given);
  EXPECT_TRUE(has_note(config, "optimizer: not given; AdamW with lr 0.001"));
}

TEST(Parse, OverlapCommDefaultsToTrueOnlyAtStage3) {
  for (int stage = 0; stage <= 3; ++stage)
    for (const char* overlap : {"", ", \"overlap_comm\": null", ", \"overlap_comm\": \"auto\""})
      EXPECT_EQ(
          parse_text(cat("{\"zero_optimization\": {\"stage\": ", stage, overlap, "}}")).zero.overlap_comm,
          stage == 3);
  EXPECT_FALSE(parse_text(R"({"zero_optimization": {"stage": 3, "overlap_comm": false}})").zero.overlap_comm);
  EXPECT_TRUE(parse_text(R"({"zero_optimization": {"stage": 1, "overlap_comm": true}})").zero.overlap_comm);
}

TEST(Parse, AutoFollowsItsSection) {
  const Config config = parse_text(R"({
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": 4, "gradient_clipping": "auto",
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}})");
  EXPECT_EQ(config.batch.train_batch_size, 0);
  EXPECT_EQ(config.gradient_clipping, 1.0);
  EXPECT_EQ(config.zero.reduce_bucket_size, 500'000'000);
  EXPECT_TRUE(has_note(config, "zero_optimization.reduce_bucket_size: \"auto\" takes the default"));
  EXPECT_TRUE(has_note(parse_text(R"({"steps_per_print": "auto"})"), "steps_per_print: \"auto\""));
}

TEST(Parse, NumbersAndBooleansMayStandInQuotes) {
  const Config config = parse_text(R"({"fp16": {"enabled": "true"}, "gradient_accumulation_steps": "8",
      "optimizer": {"type": "Muon", "params": {"muon_lr": "2e-2", "lr": "1e-3"}}})");
  EXPECT_EQ(config.precision.compute, DType::f16);
  EXPECT_EQ(config.batch.gradient_accumulation_steps, 8);
  EXPECT_EQ(config.optimizer.lr, 0.02);
  EXPECT_EQ(config.optimizer.as<MuonOptions>().adam_lr, 1e-3);
  EXPECT_TRUE(has_note(config, "gradient_accumulation_steps: \"8\" is taken for 8, without quotes"));
  EXPECT_EQ(parse_text(R"({"bf16": {"enabled": "True"}, "fp16": {"enabled": "False"}})").precision.compute,
            DType::bf16);
}

TEST(Parse, DeepSpeedFilesMaySayWhatChangesNothing) {
  const Config config = parse_text(R"({"zero_optimization": {"stage": 2, "load_from_fp32_weights": false,
      "ignore_unused_parameters": false, "sub_group_size": 0, "offload_param": {"device": "cpu"}},
      "fp16": {"enabled": true, "opt_level": "O2", "type": "fp16"}, "bf16": {"loss_scale": 0}, "flops_profiler": {"enabled": true},
      "wandb": {"enabled": true}, "checkpoint": {"use_node_local_storage": true},
      "compression_training": {"sparse_pruning": {"shared_parameters": {"enabled": false}}},
      "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}},
      "optimizer": {"type": "Adam", "params": {"torch_adam": "torch_impl"}}})");
  Zero zero;
  zero.stage = 2;
  EXPECT_TRUE(config.zero == zero);
  EXPECT_EQ(std::get<Warmup>(config.scheduler).warmup_num_steps, 1);
  EXPECT_EQ(config.optimizer.weight_decay, 0.01);
  for (const char* key : {"zero_optimization.load_from_fp32_weights", "zero_optimization.sub_group_size: 0,",
                          "zero_optimization.offload_param: no effect at stage 2", "fp16.opt_level",
                          "bf16.loss_scale: bf16 has no loss scale", "flops_profiler: `sherd train`",
                          "wandb: ", "checkpoint.use_node_local_storage", "compression_training: disabled",
                          "scheduler.params.warmup_num_steps: 0 means 2"})
    EXPECT_TRUE(has_note(config, key)) << key;
  EXPECT_NE(error_of(R"({"compression_training": {"layer_reduction": {"enabled": true}}})"), "");
  EXPECT_NE(error_of(R"({"fp16": {"enabled": true, "type": "bfloat16"}})").find("GPT-NeoX"),
            std::string::npos);
}

TEST(Parse, AdamIsAdamWUnlessToldOtherwise) {
  const auto decoupled = [](const std::string& body) {
    return parse_text("{\"optimizer\": " + body + "}").optimizer.decoupled_decay();
  };
  EXPECT_TRUE(decoupled(R"({"type": "Adam"})"));
  EXPECT_FALSE(decoupled(R"({"type": "adam", "params": {"adam_w_mode": false}})"));
  EXPECT_TRUE(decoupled(R"({"type": "AdamW", "params": {"adam_w_mode": false}})"));
  EXPECT_FALSE(decoupled(R"({"type": "SGD"})"));
  const auto decay = [](const std::string& params) {
    return parse_text(R"({"optimizer": {"type": "Adam", "params": )" + params + "}}").optimizer.weight_decay;
  };
  EXPECT_EQ(decay("{}"), 0);
  EXPECT_EQ(decay(R"({"torch_adam": true})"), 0.01);
  EXPECT_EQ(decay(R"({"torch_adam": true, "weight_decay": 0.2})"), 0.2);
  EXPECT_EQ(decay(R"({"torch_adam": true, "adam_w_mode": false})"), 0);
}

TEST(Parse, SchedulerDefaults) {
  const auto warmup = [](const std::string& body) {
    return std::get<Warmup>(parse_text("{\"scheduler\": " + body + "}").scheduler);
  };
  EXPECT_EQ(warmup(R"({"type": "WarmupLR"})").warmup_max_lr, std::nullopt);
  EXPECT_EQ(warmup(R"({"type": "WarmupDecayLR", "params": {"total_num_steps": 9000}})").warmup_max_lr, 0.001);
  EXPECT_EQ(warmup(R"({"type": "WarmupDecayLR", "params": {"total_num_steps": 9000, "warmup_max_lr": null}})")
                .warmup_max_lr,
            std::nullopt);
  const auto cycle = std::get<OneCycle>(parse_text(R"({"scheduler": {"type": "OneCycle", "params": {
      "cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_first_step_size": 7, "cycle_first_stair_count": 3}}})")
                                            .scheduler);
  EXPECT_EQ(cycle.cycle_second_step_size, 7);
  EXPECT_EQ(cycle.cycle_second_stair_count, 3);
  EXPECT_TRUE(
      has_note(parse_text(R"({"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 10}}})"),
               "scheduler: total_num_steps 10 is less than warmup_num_steps 1000: behind the warmup the rate "
               "is 0.0001 of the optimizer's at once"));
  EXPECT_TRUE(
      has_note(parse_text(R"({"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 10,
                              "warmup_min_lr": 0.25}}})"),
               "scheduler: total_num_steps 10 is less than warmup_num_steps 1000: behind the warmup the rate "
               "is 0.25 at once"));
  const auto short_of = [](const char* type, int steps) {
    return parse_text(cat(R"({"training": {"steps": )", steps, R"(}, "scheduler": {"type": ")", type,
                          R"(", "params": {"total_num_steps": 70, "warmup_num_steps": 5}}})"));
  };
  for (const char* type : {"WarmupDecayLR", "WarmupCosineLR", "linear", "cosine"}) {
    EXPECT_TRUE(has_note(short_of(type, 100),
                         "scheduler: total_num_steps 70 is less than training.steps 100: "
                         "for the last 30 steps the rate is "))
        << type;
    EXPECT_FALSE(has_note(short_of(type, 70), "scheduler:")) << type;
  }
}

TEST(Parse, DisabledSectionsPassWithANote) {
  const Config config =
      parse_text(R"({"amp": {"enabled": false, "opt_level": "O1"}, "tensorboard": {"enabled": false},
      "elasticity": {}, "compile": {"deepcompile": false}, "tensor_parallel": {"autotp_size": 1},
      "sparse_attention": null, "compression_training": {}, "prescale_gradients": false,
      "pipeline": {"stages": 1}, "zero_optimization": {"stage": 1, "mics_shard_size": -1,
      "zero_hpz_partition_size": 1, "offload_param": {"device": "none", "pin_memory": true}}})");
  for (const char* start :
       {"amp: disabled", "elasticity: disabled", "compile: there is no graph compiler",
        "tensor_parallel.autotp_size: off", "compression_training: disabled",
        "prescale_gradients: ", "pipeline.stages: off", "zero_optimization.mics_shard_size: off",
        "zero_optimization.zero_hpz_partition_size: off",
        "zero_optimization.offload_param.pin_memory: no effect with device \"none\""})
    EXPECT_TRUE(has_note(config, start)) << start;
}

TEST(Parse, DeepSpeedsParallelSizesAreSherds) {
  const auto parallel = [](const std::string& text) { return parse_text(text).parallel; };
  EXPECT_EQ(parallel(R"({"tensor_parallel": {"autotp_size": 4}})").tensor, 4);
  EXPECT_EQ(parallel(R"({"tensor_parallel": {"tp": {"tp_size": 2}}, "parallel": {"tensor": 2}})").tensor, 2);
  EXPECT_EQ(parallel(R"({"tensor_parallel": {"autotp_size": 0}, "parallel": {"tensor": 2}})").tensor, 2);
  const Parallel ulysses = parallel(R"({"sequence_parallel_size": 2})");
  EXPECT_EQ(ulysses.context, 2);
  EXPECT_EQ(ulysses.context_method, ContextMethod::ulysses);
  EXPECT_EQ(parallel(R"({"sequence_parallel_size": 1, "parallel": {"context": 2}})").context, 2);
  EXPECT_EQ(parallel(R"({"parallel": {"context": 2}})").context_method, ContextMethod::ring);
  for (const char* text : {R"({"parallel": {"context_method": "ring"}, "sequence_parallel_size": 2})",
                           R"({"sequence_parallel_size": 2, "parallel": {"context_method": "ring"}})"}) {
    EXPECT_EQ(parallel(text).context_method, ContextMethod::ring) << text;
    EXPECT_EQ(parallel(text).context, 2) << text;
  }
  EXPECT_TRUE(parallel("{}").sequence_parallel);
}

TEST(Parse, ParallelKeysWithoutTheirRanksAreNoted) {
  const std::string method = "parallel.context_method: no effect without parallel.context above 1";
  const std::string sequence = "parallel.sequence_parallel: no effect without parallel.tensor above 1";
  const Config idle = parse_text(R"({"parallel": {"context_method": "ring", "sequence_parallel": true}})");
  EXPECT_TRUE(has_note(idle, method));
  EXPECT_TRUE(has_note(idle, sequence));
  const Config used = parse_text(R"({"parallel": {"context_method": "ring", "context": 2}})");
  EXPECT_FALSE(has_note(used, method));
  EXPECT_FALSE(has_note(used, sequence));
  EXPECT_FALSE(has_note(parse_text(R"({"parallel": {"sequence_parallel": false}})"), sequence));
}

TEST(Parse, Stage3KeysBelowStage3AreNoted) {
  const Config config = parse_text(R"({"zero_optimization": {"stage": 2, "stage3_max_reuse_distance": 5}})");
  EXPECT_TRUE(has_note(config, "zero_optimization.stage3_max_reuse_distance: no effect at stage 2"));
}

TEST(Parse, AliasesReachTheSameFields) {
  EXPECT_EQ(
      parse_text(R"({"zero_optimization": {"stage": 3, "max_live_parameters": 7}})").zero.max_live_parameters,
      7);
  EXPECT_EQ(parse_text(R"({"bfloat16": {"enabled": true}})").precision.compute, DType::bf16);
  EXPECT_TRUE(
      has_note(parse_text(R"({"zero_optimization": {"stage3_gather_fp16_weights_on_model_save": true}})"),
               "zero_optimization.stage3_gather_fp16_weights_on_model_save: checkpoints hold"));
  EXPECT_TRUE(
      has_note(parse_text(R"({"seq_parallel_comm_data_type": "fp32"})"), "seq_parallel_comm_data_type: "));
  EXPECT_EQ(parse_text(R"({"zero_optimization": true})").zero.stage, 1);
}

TEST(Parse, ModelTypeChoosesDefaults) {
  const auto model = [](const std::string& type) {
    return *parse_text(R"({"model": {"type": ")" + type +
                       R"(", "seq_length": 8, "hidden_size": 96, "num_layers": 2, "num_heads": 4}})")
                .model;
  };
  const Model gpt = model("gpt2"), llama = model("llama");
  EXPECT_EQ(gpt.ffn_hidden_size, 384);
  EXPECT_EQ(gpt.attention_dropout, 0.1);
  EXPECT_TRUE(gpt.bias && gpt.tie_embeddings);
  EXPECT_EQ(llama.ffn_hidden_size, 256);
  EXPECT_EQ(llama.num_kv_heads, 4);
  EXPECT_EQ(llama.activation, FfnActivation::swiglu);
  EXPECT_EQ(llama.norm, Norm::rmsnorm);
  EXPECT_EQ(llama.position, PositionType::rotary);
  EXPECT_FALSE(llama.bias || llama.tie_embeddings);
  EXPECT_EQ(llama.padded_vocab(50257), 50304);
}

TEST(Parse, MemorySizesTakeUnits) {
  const auto limit = [](const std::string& value) {
    return parse_text("{\"device\": {\"device_memory_limit\": " + value + "}}").device.device_memory_limit;
  };
  EXPECT_EQ(limit("4096"), 4096u);
  EXPECT_EQ(limit("\"512MiB\""), 512u << 20);
  EXPECT_EQ(limit("\"1.5 GB\""), 1'500'000'000u);
}

TEST(Parse, NotesToReadersAreLeftOut) {
  const Config plain =
      parse_text(R"({"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
                                      "amp": {"enabled": false}, "compression_training": {}})");
  const Config noted =
      parse_text(R"({"_comment": "by hand", "comment": ["a", "list"], "//": "one", "//": "and another",
      "zero_optimization": {"_why": {"memory": "is short"}, "stage": 2, "// stage": 3},
      "optimizer": {"comment": null, "type": "AdamW", "params": {"_lr_before": 0.3, "lr": 0.1}},
      "amp": {"_": 1, "enabled": false}, "compression_training": {"_": {}}})",
                 "run.json", {"_x.y=1", "training.comment=hello"});
  EXPECT_TRUE(noted == plain);
  EXPECT_EQ(noted.notes, plain.notes);
  EXPECT_NE(error_of(R"({"comments": 1})"), "");
  EXPECT_NE(error_of(R"({"stage_": 1})"), "");
}

TEST(ParseFiles, LaterFilesAddAndOverride) {
  testing::TempFolder folder;
  const auto write = [&](const char* name, const char* text) {
    const std::string path = (folder.path() / name).string();
    std::ofstream(path) << text;
    return path;
  };
  const std::string first =
      write("a.json",
            "{\"train_batch_size\": 8, \"optimizer\": {\"type\": \"AdamW\", \"params\": "
            "{\"lr\": 0.1, \"eps\": 1e-6}}}");
  const std::string second =
      write("b.json", "{\"optimizer\": {\"params\": {\"lr\": 0.2}}, \"steps_per_print\": 3}");
  const Config config = parse_files({first, second}, {"steps_per_print=4", "training.save_dir=runs/x"});
  EXPECT_EQ(config.optimizer.lr, 0.2);
  EXPECT_EQ(config.optimizer.as<AdamOptions>().eps, 1e-6);
  EXPECT_EQ(config.steps_per_print, 4);
  EXPECT_EQ(config.training.save_dir, "runs/x");

  // Parameters of another type do not leak into the later file's optimizer.
  const std::string third =
      write("c.json", "{\"optimizer\": {\"type\": \"SGD\", \"params\": {\"momentum\": 0.9}}}");
  EXPECT_EQ(parse_files({first, third}).optimizer.as<SgdOptions>().momentum, 0.9);
  EXPECT_EQ(parse_files({first}, {"optimizer.type=Adam"}).optimizer.lr, 0.1);

  const std::string bad = write("d.json", "{\n\n\"steps_per_print\": -1}");
  try {
    parse_files({first, bad});
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()), bad + ":3: steps_per_print: must be an integer >= 0, not -1");
  }
}

TEST(ParseFiles, MissingFileIsNamed) {
  try {
    parse_files({"/nowhere/x.json"});
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::io);
    EXPECT_THAT(error.what(), ::testing::HasSubstr("/nowhere/x.json"));
  }
}

TEST(Notes, SayWhenAKeyCannotMatterInThisRun) {
  const std::string data = R"("data": {"path": "p", "split": [1, 0]}, "training": {"eval_interval": 5})";
  const Config idle = parse_text(cat(R"({"wall_clock_breakdown": true, "memory_breakdown": true, )", data,
                                     R"(, "device": {"host_memory_limit": "1GB"}})"));
  for (const char* key :
       {"wall_clock_breakdown", "memory_breakdown", "training.eval_interval", "device.host_memory_limit"})
    EXPECT_TRUE(has_note(idle, key)) << key;
  const Config busy =
      parse_text(R"({"steps_per_print": 1, "wall_clock_breakdown": true, "memory_breakdown": true,
                                     "data": {"path": "p"}, "training": {"eval_interval": 5}})");
  for (const char* key : {"wall_clock_breakdown", "memory_breakdown", "training.eval_interval"})
    EXPECT_FALSE(has_note(busy, key)) << key;
}

TEST(Notes, SayWhichKeysOfGpusCannotMatter) {
  const auto notes_of = [](const std::string& device, const std::string& rest = "") {
    return parse_text(cat(R"({"device": {)", device, "}", rest, "}")).notes;
  };
  const auto about = [](const std::string& key) {
    return ::testing::Contains(::testing::StartsWith("device." + key));
  };
  const std::string all =
      R"("tf32": true, "fused_gelu": true, "deterministic_attention": false, "cuda_graphs": true, "peak_tflops": 500)";
  const auto on_cpu = notes_of(R"("type": "cpu", )" + all);
  for (const char* key : {"tf32", "fused_gelu", "deterministic_attention", "cuda_graphs", "peak_tflops"})
    EXPECT_THAT(on_cpu, about(cat(key, ": no effect: device.type is \"cpu\"")));

  const std::string bf16 = R"(, "bf16": {"enabled": true})";
  const auto in_bf16 = notes_of(all, bf16);
  EXPECT_THAT(in_bf16, about("tf32: no effect: the model computes in bf16"));
  for (const char* key : {"fused_gelu", "deterministic_attention", "peak_tflops"})
    EXPECT_THAT(in_bf16, ::testing::Not(about(key)));
  const auto in_fp32 = notes_of(all);
  EXPECT_THAT(in_fp32, about("fused_gelu: no effect: the model computes in fp32"));
  EXPECT_THAT(in_fp32, about("deterministic_attention: no effect: the model computes in fp32"));
  EXPECT_THAT(in_fp32, ::testing::Not(about("tf32")));

  const std::string llama =
      R"(, "model": {"type": "llama", "seq_length": 8, "hidden_size": 64, "num_layers": 1, "num_heads": 2, )"
      R"("attention_dropout": 0.1})";
  EXPECT_THAT(notes_of(all, bf16 + llama), about("fused_gelu: no effect: model.activation is \"swiglu\""));
  EXPECT_THAT(notes_of(all, bf16 + llama),
              about("deterministic_attention: no effect: model.attention_dropout is on"));
  EXPECT_THAT(notes_of(R"("type": "cpu", "peak_tflops": "auto", "tf32": null)"),
              ::testing::Not(::testing::Contains(::testing::HasSubstr("no effect"))));
}

TEST(ConfigFiles, PublishedExampleRunsAsItStands) {
  const Config config =
      parse_files({configs + "zero3_fp16_reference.json", configs + "gpt2_tiny_model.json"});
  EXPECT_EQ(config.zero.stage, 3);
  EXPECT_EQ(config.zero.prefetch_bucket_size, 10'000'000);
  EXPECT_EQ(config.zero.max_live_parameters, 1'000'000'000);
  EXPECT_EQ(config.precision.compute, DType::f16);
  EXPECT_TRUE(config.precision.fp16.dynamic());
  EXPECT_EQ(config.precision.fp16.initial_scale(), 65536);
  EXPECT_EQ(resolve_batch(config, 2), (Batch{64, 32, 1}));
  EXPECT_TRUE(config.wall_clock_breakdown);
  EXPECT_EQ(config.model->hidden_size, 128);
  EXPECT_THAT(config.notes,
              ::testing::UnorderedElementsAre(
                  "zero_optimization.contiguous_gradients: always on in Sherd",
                  "zero_allow_untested_optimizer: every optimizer of this build is tested with ZeRO",
                  "optimizer: not given; AdamW with lr 0.001 unless the caller brings an optimizer"));
}

TEST(ConfigFiles, OffloadFilesDifferOnlyInWhereStatesLive) {
  const auto read = [](const char* name) {
    return parse_files({cat(configs, "gpt2_small_", name, ".json")});
  };
  const Config on_device = read("on_device");
  using enum OffloadDevice;
  const std::vector<std::tuple<const char*, OffloadDevice, OffloadDevice>> files = {
      {"on_device", none, none},
      {"optimizer_on_host", none, cpu},
      {"optimizer_on_nvme", none, nvme},
      {"everything_on_nvme", nvme, nvme}};
  for (const auto& [name, parameters, optimizer] : files) {
    SCOPED_TRACE(name);
    Config config = read(name);
    EXPECT_EQ(config.zero.offload_param.device, parameters);
    EXPECT_EQ(config.zero.offload_optimizer.device, optimizer);
    EXPECT_EQ(config.training.cpu_checkpointing, parameters == nvme);
    EXPECT_EQ(config.parallel.schedule, parameters == nvme ? Schedule::layered : Schedule::automatic);
    EXPECT_THAT(config.notes, ::testing::IsEmpty());
    config.zero.offload_param = on_device.zero.offload_param;
    config.zero.offload_optimizer = on_device.zero.offload_optimizer;
    config.zero.sub_group_size = on_device.zero.sub_group_size;
    config.aio = on_device.aio;
    config.parallel.schedule = on_device.parallel.schedule;
    config.training.cpu_checkpointing = false;
    config.training.recompute = Recompute::none;
    config.training.save_dir = on_device.training.save_dir;
    EXPECT_TRUE(config == on_device);
  }
}

TEST(ConfigFiles, EveryFileLoads) {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(configs)) {
    if (entry.path().extension() != ".json") continue;
    SCOPED_TRACE(entry.path());
    Config config;
    ASSERT_NO_THROW(config = parse_files({entry.path().string()}));
    EXPECT_TRUE(parse_text(dump(config)) == config);
    for (int ranks : {1, 2, 4}) {
      if (config.batch == Batch{}) continue;
      EXPECT_NO_THROW(resolve_batch(config, ranks));
    }
    ++count;
  }
  EXPECT_GE(count, 12);
  for (int stage = 0; stage <= 3; ++stage)
    EXPECT_EQ(parse_files({cat(configs, "gpt2_small_zero", stage, ".json")}).zero.stage, stage);
}

TEST(Fp8, StandsBesideBf16) {
  const std::string bf16 = R"({"bf16": {"enabled": true}, "fp8": {"enabled": true)";
  const Config config = parse_text(bf16 + R"(, "recipe": "rowwise", "exclude": "head*"}})");
  EXPECT_EQ(config.fp8.recipe, Fp8RecipeName::rowwise);
  EXPECT_EQ(config.fp8.exclude, std::vector<std::string>{"head*"});
  EXPECT_FALSE(config.fp8.gathers()) << "a row's scale is no column's";
  EXPECT_TRUE(parse_text(bf16 + "}}").fp8.gathers());
  EXPECT_FALSE(parse_text(bf16 + R"(, "gather": false}})").fp8.gathers());
  EXPECT_THAT(parse_text(bf16 + R"(, "recipe": "rowwise", "gather": true}})").notes,
              ::testing::Contains(::testing::HasSubstr("fp8.gather: no effect with the recipe rowwise")));
  EXPECT_THAT(error_of(R"({"fp8": {"enabled": true}})"), ::testing::HasSubstr("add \"bf16\""));
  EXPECT_THAT(error_of(bf16 + R"(, "recipe": "delayed"}})"), ::testing::HasSubstr("blockwise"));
  EXPECT_THAT(error_of(bf16 + R"(, "exclude": [""]}})"), ::testing::HasSubstr("must be a pattern"));
  EXPECT_EQ(error_of(R"({"fp8": {"enabled": false}})"), "");
}

}  // namespace
}  // namespace sherd::config
