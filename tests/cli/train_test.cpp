// `sherd train` and `sherd generate` as a person runs them: the real program, on local ranks and under
// mpirun.
#include <signal.h>

#include <functional>

#include "cli/train_fixture.h"
#include "device/cuda.h"
#include "support/mpirun.h"
#include "support/places.h"

namespace sherd::cli {
namespace {

TEST_F(Train, TrainsSavesAndReports) {
  const Outcome got = sherd(train({"--ranks", "2", "--metrics", (folder_ / "m.jsonl").string(), "--plot",
                                   (folder_ / "loss.svg").string()}));
  EXPECT_EQ(got.code, 0) << got.err;
  EXPECT_THAT(got.out, HasSubstr("parameters"));
  EXPECT_THAT(got.out, HasSubstr("all-gather"));
  EXPECT_THAT(got.out, HasSubstr("unigram entropy"));
  const auto losses = metric("m.jsonl", "loss");
  ASSERT_EQ(losses.size(), 6u);
  EXPECT_LT(std::stod(losses.back()), std::stod(losses.front()));
  EXPECT_EQ(metric("m.jsonl", "val_loss").size(), 1u);
  EXPECT_GT(std::stoll(metric("m.jsonl", "reduce_scatter_bytes").front()), 0);
  EXPECT_TRUE(std::filesystem::exists(folder_ / "run" / "global_step6" / "rank_00001.safetensors"));
  EXPECT_THAT(read_text(folder_ / "loss.svg"), HasSubstr("<svg"));

  const Outcome text = sherd({"generate", "--checkpoint", (folder_ / "run").string(), "--prompt", "The 3",
                              "--max-tokens", "8", "--seed", "1"});
  EXPECT_EQ(text.code, 0) << text.err;
  EXPECT_EQ(text.out.rfind("The 3", 0), 0u) << text.out;

  // Variables that a launcher of something else left behind do not make it wait for others.
  const Outcome alone = shell(
      cat("env RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=1 ",
          joined({"generate", "--checkpoint", (folder_ / "run").string(), "--prompt", "The 3", "--max-tokens",
                  "8", "--seed", "1"})));
  EXPECT_EQ(alone.code, 0) << alone.err;
  EXPECT_EQ(alone.out, text.out);
}

TEST_F(Train, TellsWhatFp8CostsAndTrainsInIt) {
  const std::vector<std::string> fp8 = {"--set", "bf16.enabled=true", "--set", "model.hidden_size=32"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), fp8.begin(), fp8.end());
    return sherd(train(more));
  };
  const Outcome report = with({"--fp8-report", "1", "--ranks", "2"});
  EXPECT_EQ(report.code, 0) << report.err;
  EXPECT_THAT(report.out, HasSubstr("layer in FP8"));
  EXPECT_THAT(report.out, HasSubstr("blocks.0.attention.qkv"));
  EXPECT_THAT(report.out, HasSubstr("nats"));
  EXPECT_FALSE(std::filesystem::exists(folder_ / "run" / "latest"));
  const Outcome both = with({"--fp8-report", "1", "--metrics", (folder_ / "m.jsonl").string()});
  EXPECT_EQ(both.code, 2);
  EXPECT_THAT(both.err, HasSubstr("--fp8-report does not train"));

  const Outcome got = with({"--steps", "2", "--set", "fp8.enabled=true", "--set",
                            "fp8.exclude=blocks.0.mlp.up", "--metrics", (folder_ / "m.jsonl").string()});
  EXPECT_EQ(got.code, 0) << got.err;
  EXPECT_THAT(got.err, HasSubstr("in bf16 as fp8.exclude says: blocks.0.mlp.up"));
  EXPECT_EQ(metric("m.jsonl", "not_finite"), (std::vector<std::string>{"0", "0"}));
  const Outcome wrong =
      with({"--steps", "1", "--set", "fp8.enabled=true", "--set", "fp8.exclude=blocks.0.mlp.upp"});
  EXPECT_EQ(wrong.code, 2);
  EXPECT_THAT(wrong.err, HasSubstr("is 'blocks.0.mlp.up'"));
}

/// A run on the processor neither is linked to CUDA's libraries nor loads them, nor looks for a driver.
TEST_F(Train, LoadsNoLibraryOfGpusForTheProcessor) {
  if (!device::cuda_status().built) GTEST_SKIP() << "this build has no CUDA";
  const Outcome got =
      shell("env LD_DEBUG=files " + joined(train({"--steps", "1", "--set", "device.type=cpu"})));
  ASSERT_EQ(got.code, 0) << got.err;
  EXPECT_THAT(got.err, HasSubstr("file=libtbb"));  // the dynamic linker tells what it maps
  for (const char* library : {"file=libcublas", "file=libcudnn", "file=libnccl", "file=libcuda"})
    EXPECT_EQ(count(got.err, library), 0u) << library;
}

// GPUs are hidden from these tests.
TEST_F(Train, DeviceKeysAreHonouredOrSaidToBeIdle) {
  const Outcome none = sherd(train({"--set", "device.type=cuda"}));
  EXPECT_EQ(none.code, 1);
  EXPECT_EQ(count(none.err, "\n"), 1u) << none.err;
  EXPECT_THAT(none.err, HasSubstr("device.type is \"cuda\", but there is no CUDA device"));
  EXPECT_FALSE(std::filesystem::exists(folder_ / "run"));

  const Outcome trained = sherd(train({"--steps", "2", "--ranks", "2", "--set", "device.fused_gelu=true",
                                       "--set", "device.peak_tflops=300"}));
  ASSERT_EQ(trained.code, 0) << trained.err;
  for (const char* key : {"fused_gelu", "peak_tflops"})
    EXPECT_EQ(count(trained.err, cat("device.", key, ": no effect: there is no GPU here")), 1u)
        << trained.err;

  const auto text = [&](const std::vector<std::string>& more) {
    std::vector<std::string> command{
        "generate", "--checkpoint", (folder_ / "run").string(), "--prompt", "The 3", "--max-tokens", "4"};
    command.insert(command.end(), more.begin(), more.end());
    return sherd(command);
  };
  const Outcome here = text({});
  EXPECT_EQ(here.code, 0) << here.err;
  EXPECT_EQ(text({"--device", "cpu"}).out, here.out);
  EXPECT_EQ(text({"--device", "auto"}).out, here.out);
  EXPECT_THAT(text({"--device", "cuda"}).err, HasSubstr("there is no CUDA device"));
  const Outcome wrong = text({"--device", "tpu"});
  EXPECT_EQ(wrong.code, 2);
  EXPECT_THAT(wrong.err, HasSubstr("--device is auto, cpu or cuda, not 'tpu'"));
}

TEST_F(Train, LocalAndMpiPrintTheSameLosses) {
  if (!SHERD_TEST_MPI) GTEST_SKIP() << "this build has no MPI";
  ASSERT_EQ(sherd(train({"--ranks", "2", "--metrics", (folder_ / "local.jsonl").string()})).code, 0);
  std::filesystem::remove_all(folder_ / "run");
  const Outcome mpi = sherd_mpi(2, train({"--metrics", (folder_ / "mpi.jsonl").string()}));
  ASSERT_EQ(count(mpi.err, "exit code 0\n"), 2u) << mpi.err;
  EXPECT_EQ(metric("mpi.jsonl", "loss"), metric("local.jsonl", "loss"));
  EXPECT_EQ(metric("mpi.jsonl", "grad_norm"), metric("local.jsonl", "grad_norm"));
  EXPECT_EQ(metric("mpi.jsonl", "loss").size(), 6u);
}

/// Also the run that shows races: four ranks of two threads, gathering ahead and reducing on threads of their
/// own.
TEST_F(Train, FourRanksResumeToTheSameLosses) {
  const auto run = [&](const std::string& metrics, std::vector<std::string> more) {
    more.insert(more.end(),
                {"--ranks", "4", "--set", "device.threads_per_rank=2", "--set",
                 "zero_optimization.reduce_bucket_size=20000", "--metrics", (folder_ / metrics).string()});
    return sherd(train(more));
  };
  const Outcome whole = run("whole.jsonl", {});
  ASSERT_EQ(whole.code, 0) << whole.err;
  EXPECT_THAT(whole.err, HasSubstr("in bf16, ZeRO stage 3 over local(4), 2 threads per rank"));
  std::filesystem::remove_all(folder_ / "run");
  const Outcome begun = run("parts.jsonl", {"--steps", "3"});
  ASSERT_EQ(begun.code, 0) << begun.err;
  const Outcome rest = run("parts.jsonl", {"--resume"});
  ASSERT_EQ(rest.code, 0) << rest.err;
  EXPECT_THAT(rest.err, HasSubstr("resumed from"));
  EXPECT_EQ(metric("parts.jsonl", "loss").size(), 6u);
  EXPECT_EQ(metric("parts.jsonl", "loss"), metric("whole.jsonl", "loss"));
  EXPECT_EQ(metric("parts.jsonl", "grad_norm"), metric("whole.jsonl", "grad_norm"));
}

TEST_F(Train, NoStepIsFasterThanTheMachine) {
  measure_apart();
  const auto mfu = [&] {
    EXPECT_EQ(sherd(train({"--steps", "2", "--metrics", (folder_ / "m.jsonl").string(), "--set",
                           "training.save_dir="}))
                  .code,
              0);
    return metric("m.jsonl", "mfu");
  };
  mfu();
  const std::filesystem::directory_iterator caches(folder_ / "sherd");
  const std::filesystem::path cache = caches->path();
  std::string kept = read_text(cache);
  const auto set = [&](std::string_view name, std::string_view value) {
    const auto begin = kept.find(name) + name.size();
    kept = cat(kept.substr(0, begin), value, kept.substr(kept.find_first_of(",}", begin)));
  };
  set("\"flops_per_second\":", "1.0");
  set("\"rounds\":", "9");
  write_text(cache, kept);
  const auto got = mfu();
  ASSERT_EQ(got.size(), 2u);
  for (const std::string& value : got) {
    EXPECT_GT(std::stod(value), 0) << value;
    EXPECT_LE(std::stod(value), 1) << value;
  }
  EXPECT_NE(read_text(cache), kept) << "the next run would be as wrong";
}

TEST_F(Train, ATerminatedRunSavesAndGoesOn) {
  const std::string metrics = (folder_ / "term.jsonl").string();
  const pid_t child = start(train({"--ranks", "2", "--steps", "100000", "--metrics", metrics}), "term.err");
  wait_for("term.jsonl", "\"step\":");
  kill(child, SIGTERM);
  int status = 0;
  waitpid(child, &status, 0);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 143);
  const std::string said = read_text(folder_ / "term.err");
  EXPECT_EQ(count(said, "sherd: stopping after this step, and saving where training.save_dir is set"), 1u)
      << said;
  EXPECT_THAT(said, HasSubstr("go on with --resume"));
  const std::string tag = read_text(folder_ / "run" / "latest");
  const std::string step = tag.substr(tag.find_first_of("0123456789"));
  const Outcome more =
      sherd(train({"--ranks", "2", "--resume", "--steps", std::to_string(std::stoll(step) + 1)}));
  EXPECT_EQ(more.code, 0) << more.err;
}

TEST_F(Train, WithoutAFolderItSaysThatNothingWillBeSaved) {
  const std::string line = "nothing will be saved: training.save_dir is not set";
  const Outcome unsaved = sherd(train({"--steps", "1", "--ranks", "2", "--set", "training.save_dir="}));
  EXPECT_EQ(unsaved.code, 0) << unsaved.err;
  EXPECT_EQ(count(unsaved.err, line), 1u) << unsaved.err;
  EXPECT_FALSE(std::filesystem::exists(folder_ / "run"));
  const Outcome saved = sherd(train({"--steps", "1"}));
  EXPECT_EQ(saved.code, 0) << saved.err;
  EXPECT_EQ(count(saved.err, line), 0u) << saved.err;
}

TEST_F(Train, AStepThatSeesItsDataMoreThanOnceIsTold) {
  const Outcome large = sherd(train({"--steps", "1", "--set", "train_batch_size=4000"}));
  ASSERT_EQ(large.code, 0) << large.err;
  EXPECT_EQ(count(large.err, "more than once"), 1u) << large.err;
  std::filesystem::remove_all(folder_ / "run");
  EXPECT_EQ(count(sherd(train({"--steps", "1"})).err, "more than once"), 0u);
}

/// Smaller than what all ranks take at once, it is looked at all the same, each sample once.
TEST_F(Train, AValidationSplitBelowABatchIsValidated) {
  const auto loss_on = [&](const char* ranks) {
    std::filesystem::remove_all(folder_ / "run");
    const Outcome got =
        sherd(train({"--ranks", ranks, "--steps", "1", "--set", "train_batch_size=400", "--set",
                     "train_micro_batch_size_per_gpu=200", "--metrics", (folder_ / "m.jsonl").string()}));
    EXPECT_EQ(got.code, 0) << got.err;
    EXPECT_EQ(count(got.err, "no validation"), 0u) << got.err;
    const auto losses = metric("m.jsonl", "val_loss");
    return losses.size() == 1 ? losses.front() : "none";
  };
  const std::string alone = loss_on("1");
  EXPECT_GT(std::stod(alone), 0);
  EXPECT_EQ(loss_on("2"), alone);
}

TEST_F(Train, EveryProblemOfAConfigurationIsALine) {
  const Outcome got =
      sherd(train({"--set", "gradient_cliping=1", "--set", "training.steps=-1", "--ranks", "2"}));
  EXPECT_EQ(got.code, 2);
  EXPECT_EQ(count(got.err, "sherd: error: "), 3u) << got.err;
  EXPECT_EQ(count(got.err, "\n"), 3u) << got.err;
  EXPECT_THAT(got.err, HasSubstr("sherd: error: the configuration has 2 problems:\n"));
  EXPECT_THAT(got.err, HasSubstr("\nsherd: error: --set gradient_cliping=1: unknown key"));
  EXPECT_THAT(got.err,
              HasSubstr("\nsherd: error: --set training.steps=-1: training.steps: must be an integer >= 0"));
}

// ---- errors: one line that names cause and next step, non-zero on every rank, and no hang ----

struct Mistake {
  std::string what;
  /// Gives those beyond --config; may damage files first.
  std::function<std::vector<std::string>(const TempFolder&)> arguments;
  std::string says;
  int code = 1;
};

class TrainErrors : public Train, public ::testing::WithParamInterface<int> {};

const std::vector<Mistake>& mistakes() {
  using List = std::vector<std::string>;
  static const std::vector<Mistake> all{
      {"wrong key",
       [](const TempFolder&) {
         return List{"--set", "gradient_cliping=1"};
       },
       "gradient_clipping", 2},
      {"wrong type",
       [](const TempFolder&) {
         return List{"--set", "train_batch_size=many"};
       },
       "train_batch_size", 2},
      {"batch triple",
       [](const TempFolder&) {
         return List{"--set", "train_micro_batch_size_per_gpu=3", "--set", "gradient_accumulation_steps=1"};
       },
       "train_batch_size", 2},
      {"missing dataset",
       [](const TempFolder&) {
         return List{"--set", "data.path=/nonexistent/data"};
       },
       "dataset file '/nonexistent/data.idx' is missing: the folder '/nonexistent' does not exist; data.path "
       "is the prefix "
       "that `sherd prepare --output PREFIX` wrote"},
      {"id beyond the vocabulary",
       [](const TempFolder& f) {
         std::filesystem::remove(f / "data.json");  // as a dataset of another program
         return List{"--set", "model.vocab_size=64"};
       },
       "64"},
      {"truncated dataset",
       [](const TempFolder& f) {
         std::filesystem::resize_file(f / "data.bin", std::filesystem::file_size(f / "data.bin") / 2);
         return List{};
       },
       "data.bin"},
      {"nothing to resume", [](const TempFolder&) { return List{"--resume"}; }, "latest"},
      {"a loss that is NaN",
       [](const TempFolder&) {
         return List{"--set", "model.init_std=1e38", "--set", "bf16.enabled=false"};
       },
       "lower the learning rate"},
  };
  return all;
}

TEST_P(TrainErrors, AreOneClearLine) {
  const Mistake& mistake = mistakes()[static_cast<std::size_t>(GetParam())];
  auto arguments = train(mistake.arguments(folder_));
  if (SHERD_TEST_MPI) {
    const Outcome mpi = sherd_mpi(2, arguments);
    EXPECT_NE(mpi.code, 124) << "hung";
    EXPECT_EQ(count(mpi.err, cat("exit code ", mistake.code, "\n")), 2u) << mpi.err;
    EXPECT_THAT(mpi.err, HasSubstr(mistake.says)) << mistake.what;
    EXPECT_EQ(count(mpi.err, "error: "), 2u) << "one line from each rank\n" << mpi.err;
  }
  arguments.insert(arguments.end(), {"--ranks", "2"});
  const Outcome local = sherd(arguments);
  EXPECT_EQ(local.code, mistake.code) << mistake.what << ": " << local.err;
  EXPECT_EQ(count(local.err, "error: "), 1u) << local.err;
  EXPECT_THAT(local.err, HasSubstr(mistake.says)) << mistake.what;
}

INSTANTIATE_TEST_SUITE_P(All, TrainErrors, ::testing::Range(0, static_cast<int>(mistakes().size())),
                         [](const auto& test) {
                           std::string name = mistakes()[static_cast<std::size_t>(test.param)].what;
                           for (char& c : name)
                             if (c == ' ') c = '_';
                           return name;
                         });

/// Variables in the environment from launchers that do not join the processes they start.
TEST_F(Train, ProcessesThatNothingJoinsDoNotTrainByThemselves) {
  const auto under = [&](const std::string& variables, std::vector<std::string> more = {}) {
    more.insert(more.end(), {"--steps", "1"});
    return shell(cat("env ", testing::of_mpi, variables, ' ', joined(train(more))));
  };
  for (const auto& [variables, advice] :
       {std::pair{"PMI_RANK=0 PMI_SIZE=4", "unset PMI_RANK and PMI_SIZE"},
        {"SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=4", "srun sh -c 'RANK=$SLURM_PROCID"},
        {"PMIX_RANK=3 SLURM_STEP_NUM_TASKS=4", "torchrun"}}) {
    const Outcome refused = under(variables);
    EXPECT_EQ(refused.code, 2) << refused.err;
    std::string seen = variables;
    seen.replace(seen.find(' '), 1, ", ");
    EXPECT_THAT(refused.err, AllOf(HasSubstr(cat("one of 4 ranks (", seen, ")")), HasSubstr("MASTER_ADDR"),
                                   HasSubstr(advice)));
    EXPECT_EQ(count(refused.err, "error: "), 1u) << refused.err;
  }
  // A batch script, one process of one, and what trains nothing.
  const Outcome batch = under("SLURM_NTASKS=4 SLURM_PROCID=0", {"--ranks", "2"});
  EXPECT_EQ(batch.code, 0) << batch.err;
  const Outcome one = under("PMI_RANK=0 PMI_SIZE=1", {"--resume"});
  EXPECT_EQ(one.code, 0) << one.err;
  const Outcome estimate = shell(cat("env PMI_RANK=0 PMI_SIZE=4 SLURM_STEP_NUM_TASKS=4 ",
                                     joined({"estimate", "--config", config(), "--ranks", "2"})));
  EXPECT_EQ(estimate.code, 0) << estimate.err;
}

TEST_F(Train, AnEarlierRunsCheckpointsAreLeftAlone) {
  ASSERT_EQ(sherd(train({"--steps", "2"})).code, 0);
  const Outcome again = sherd(train({"--steps", "1", "--set", "training.keep_last=1"}));
  EXPECT_EQ(again.code, 2);
  EXPECT_EQ(count(again.err, "error: "), 1u) << again.err;
  EXPECT_THAT(again.err, HasSubstr("the newest global_step2: go on with --resume"));
  EXPECT_EQ(read_text(folder_ / "run" / "latest"), "global_step2\n");
  EXPECT_TRUE(std::filesystem::exists(folder_ / "run" / "global_step2"));
  const Outcome resumed = sherd(train({"--steps", "2", "--resume"}));
  EXPECT_EQ(resumed.code, 0) << resumed.err;
  EXPECT_THAT(resumed.err, HasSubstr("nothing is left to do"));
}

TEST_F(Train, AnUnusableSaveDirIsFoundBeforeTheFirstStep) {
  const Outcome got = sherd(train(
      {"--set", cat("training.save_dir=", config(), "/x"), "--metrics", (folder_ / "m.jsonl").string()}));
  EXPECT_EQ(got.code, 1);
  EXPECT_THAT(got.err, HasSubstr("training.save_dir"));
  EXPECT_FALSE(std::filesystem::exists(folder_ / "m.jsonl"));
}

TEST_F(Train, AnotherNumberOfRanksGoesOn) {
  ASSERT_EQ(sherd(train({"--ranks", "2", "--steps", "1"})).code, 0);
  for (const char* ranks : {"4", "1"}) {
    const Outcome got =
        sherd(train({"--ranks", ranks, "--resume", "--steps", ranks == std::string("4") ? "2" : "3"}));
    EXPECT_EQ(got.code, 0) << got.err;
    EXPECT_THAT(got.err, HasSubstr(cat("and it goes on with ", ranks)));
  }
  EXPECT_TRUE(std::filesystem::exists(folder_ / "run" / "global_step3"));
}

TEST_F(Train, AnotherModelOnResumeIsRefusedByItsKeysAndShapes) {
  ASSERT_EQ(sherd(train({"--steps", "1"})).code, 0);
  const Outcome got = sherd(train({"--resume", "--set", "model.hidden_size=48", "--set", "model.dropout=0"}));
  EXPECT_EQ(got.code, 1);
  EXPECT_EQ(count(got.err, "error: "), 1u) << got.err;
  EXPECT_THAT(got.err, HasSubstr("model.hidden_size is 32 there and 48 here"));
  EXPECT_THAT(got.err, HasSubstr("of the parameters "));
  EXPECT_THAT(got.err, HasSubstr(", 32] there and ["));
  const Outcome same = sherd(train({"--resume", "--set", "model.dropout=0"}));
  EXPECT_EQ(same.code, 0) << same.err;
}

TEST_F(Train, ThePublishedExampleRunsAsItStands) {
  write_text(
      folder_ / "model.json",
      cat(R"({"model": {"type": "gpt2", "seq_length": 16, "hidden_size": 32, "num_layers": 2, "num_heads": 2},)",
          R"("data": {"path": ")", prefix(), R"("}, "training": {"steps": 3}})"));
  const Outcome got =
      sherd({"train", "--config", SHERD_SOURCE_DIR "/configs/zero3_fp16_reference.json",
             (folder_ / "model.json").string(), "--ranks", "2", "--metrics", (folder_ / "m.jsonl").string()});
  EXPECT_EQ(got.code, 0) << got.err;
  EXPECT_EQ(metric("m.jsonl", "loss").size(), 3u);
  EXPECT_EQ(metric("m.jsonl", "loss_scale").front(), "65536");
  EXPECT_THAT(got.err, HasSubstr("contiguous_gradients"));
  EXPECT_THAT(got.err, HasSubstr("time (ms) | forward")) << "wall_clock_breakdown";
}

TEST_F(Train, OutputsNeverOverwriteTheDatasetOrEachOther) {
  const std::string tokens = read_text(prefix() + ".bin");
  const std::string figures = (folder_ / "m.jsonl").string();
  for (const std::string& metrics : {prefix() + ".bin", prefix() + ".json"}) {
    const Outcome got = sherd(train({"--steps", "1", "--metrics", metrics}));
    EXPECT_NE(got.code, 0);
    EXPECT_THAT(got.err, HasSubstr("belongs to the dataset that is trained on"));
  }
  EXPECT_EQ(read_text(prefix() + ".bin"), tokens);
  const Outcome same = sherd(train({"--steps", "1", "--metrics", figures, "--plot", figures}));
  EXPECT_NE(same.code, 0);
  EXPECT_THAT(same.err, HasSubstr("name the same file"));
  const std::string configuration = read_text(config());
  for (const char* output : {"--metrics", "--trace"}) {
    const Outcome got = sherd(train({"--steps", "1", output, config()}));
    EXPECT_EQ(got.code, 2) << output;
    EXPECT_THAT(got.err, HasSubstr("names the file of --config, which would be lost"));
  }
  EXPECT_EQ(read_text(config()), configuration);
}

}  // namespace
}  // namespace sherd::cli
