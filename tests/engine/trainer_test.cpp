// A Trainer on a model of one's own: what it saves, resumes, evaluates, tells, and when it stops.
#include "engine/trainer.h"

#include <gtest/gtest.h>
#include <algorithm>
#include <atomic>

#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>

#include "autograd/ops.h"
#include "base/threads.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/initialize.h"
#include "nn/layers.h"
#include "support/expect_error.h"
#include "support/temp_folder.h"

namespace sherd::test {
namespace {

std::mutex sync_mutex;
std::function<void(const std::filesystem::path&)> before_sync;  ///< by sync_mutex

}  // namespace
}  // namespace sherd::test

/// Stands before libc's in this program.
extern "C" int fsync(int descriptor) {
  {
    const std::lock_guard lock(sherd::test::sync_mutex);
    std::error_code unknown;
    if (sherd::test::before_sync)
      sherd::test::before_sync(
          std::filesystem::read_symlink(sherd::cat("/proc/self/fd/", descriptor), unknown));
  }
  return static_cast<int>(::syscall(SYS_fsync, descriptor));
}

namespace sherd::test {
namespace {

using sherd::testing::expect_error;
using sherd::testing::TempFolder;
using tensor::Batch;
using tensor::Tensor;
namespace fs = std::filesystem;

class TrainedLine : public nn::Model {
 public:
  TrainedLine() : linear_(add("linear", std::make_shared<nn::Linear>(1, 1))) {}
  nn::Var predict(nn::Tape& tape, const Batch& batch) { return (*linear_)(tape, tape.input(batch.at("x"))); }

 protected:
  nn::Var forward(nn::Tape& tape, const Batch& batch) override {
    return autograd::mean_squared_error(predict(tape, batch), batch.at("y"));
  }

 private:
  std::shared_ptr<nn::Linear> linear_;
};

/// Points of y = slope·x - 1.
std::shared_ptr<const data::Dataset> points(device::Device& host, float slope, std::int64_t count = 64) {
  std::vector<float> x, y;
  for (std::int64_t i = 0; i < count; ++i)
    x.push_back(static_cast<float>(i) / 32.0f - 1), y.push_back(slope * x.back() - 1);
  return data::make_tensor_dataset(
      {{"x", Tensor::of<float>(host, {count, 1}, x)}, {"y", Tensor::of<float>(host, {count, 1}, y)}});
}

/// The ranks' view of a run.
struct Ran {
  std::int64_t steps = 0;
  int signal = -1;
  double loss = 0;
  std::optional<double> val_loss;
  engine::MetricMeans metrics;
  std::vector<engine::StepMetrics> lines;  ///< rank 0's
};

class TrainerTest : public ::testing::Test {
 protected:
  /// Trains a line on two ranks; it is judged by points of another slope, which it first comes closer to.
  Ran train(const std::string& training, TrainerOptions options = {}, float judged_by = 0.5f,
            std::int64_t held_out = 32) {
    const config::Config config = config::parse_text(
        cat(R"({"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.05}}, "training": {)",
            training, "}}"));
    Ran ran;
    std::mutex mutex;
    launch_ranks(2, [&](DistributedPtr dist) {
      auto made = initialize({.dist = dist,
                              .model = [] { return std::make_shared<TrainedLine>(); },
                              .config = config,
                              .training_data = points(*host_, 2)});
      Engine& engine = *made.engine;
      auto& model = dynamic_cast<TrainedLine&>(engine.module());
      data::SampleLoader validation(points(*host_, judged_by, held_out), engine.loader_rank(),
                                    {.shuffle = false}, engine.device());
      TrainerOptions own = options;
      own.progress = false;
      if (held_out > 0 && judged_by != 0) own.validation = &validation;
      own.metrics = [&](nn::Tape& tape, const Batch& batch, engine::MetricSums& sums) {
        const nn::Var y = model.predict(tape, batch);
        sums.add("loss", model(tape, batch).value());
        sums.add("mean", autograd::sum(y).value(), static_cast<double>(y.value().numel()));
      };
      own.after_step = [&](const engine::StepMetrics& line) {
        if (options.after_step) options.after_step(line);
        const std::lock_guard lock(mutex);
        if (dist->rank() == 0) ran.lines.push_back(line);
      };
      Trainer trainer(engine, *made.loader, own);
      const int signal = trainer.run();
      const std::lock_guard lock(mutex);
      if (dist->rank() != 0) return;
      ran = {engine.global_steps(), signal,   engine.last_step().loss, trainer.validation_loss(),
             trainer.metrics(),     ran.lines};
    });
    return ran;
  }
  std::string save_dir() const { return cat(R"("save_dir": ")", (folder_ / "run").string(), R"(", )"); }

  std::shared_ptr<device::Device> host_ = device::make_cpu_device(1);
  TempFolder folder_;
};

TEST_F(TrainerTest, SyncsTheRecordBeforeACheckpointIsThere) {
  std::int64_t synced = 0;                                  // lines of the record
  std::vector<std::pair<std::int64_t, std::int64_t>> seen;  // step of a manifest, and `synced` then
  {
    const std::lock_guard lock(sync_mutex);
    before_sync = [&](const fs::path& path) {
      if (path == folder_ / "run" / "steps.jsonl") {
        const std::string text = testing::read_text(path);
        synced = std::ranges::count(text, '\n');
      } else if (path.filename().string().starts_with("manifest.json")) {
        const std::string name = path.parent_path().filename().string();
        seen.emplace_back(std::stoll(name.substr(name.find("global_step") + 11)), synced);
      }
    };
  }
  train(save_dir() + cat(R"("steps": 4, "save_interval": 2, "save_async": false, )",
                         R"("local_save_interval": 1, "local_save_dir": ")", (folder_ / "local").string(),
                         R"(")"));
  const std::lock_guard lock(sync_mutex);
  before_sync = nullptr;
  std::set<std::int64_t> steps;
  for (const auto& [step, lines] : seen) {
    steps.insert(step);
    EXPECT_EQ(lines, step + 1) << "with the start of the run, at step " << step;
  }
  EXPECT_EQ(steps, (std::set<std::int64_t>{1, 2, 3, 4}));
}

TEST_F(TrainerTest, TrainsEvaluatesAndTells) {
  const fs::path file = folder_ / "metrics.jsonl";
  const Ran ran = train(R"("steps": 12, "eval_interval": 5)", {.metrics_file = file.string()});
  EXPECT_EQ(ran.steps, 12);
  EXPECT_EQ(ran.signal, 0);
  ASSERT_EQ(ran.lines.size(), 12u);
  ASSERT_TRUE(ran.val_loss.has_value());
  EXPECT_EQ(ran.metrics.size(), 2u);
  EXPECT_EQ(ran.metrics.at("loss"), *ran.val_loss);
  std::ifstream in(file);
  std::string text;
  for (std::int64_t step = 1; step <= 12; ++step) {
    ASSERT_TRUE(std::getline(in, text));
    const auto line = nlohmann::json::parse(text);
    const bool evaluated = step % 5 == 0 || step == 12;
    EXPECT_EQ(line.at("step"), step);
    EXPECT_EQ(line.at("tokens"), 8 * step) << "samples";
    EXPECT_EQ(line.contains("val_loss"), evaluated) << step;
    EXPECT_EQ(line.contains("metrics"), evaluated) << step;
    if (evaluated) {
      EXPECT_EQ(line.at("metrics").at("mean"),
                ran.lines[static_cast<std::size_t>(step - 1)].metrics.at("mean"));
    }
  }
  // The mean prediction of the 32 points in [-1, 0) lies between the mean point's, and where training began.
  EXPECT_LT(ran.metrics.at("mean"), 0);
}

TEST_F(TrainerTest, StopsWhenPatienceIsUsedUpAndKeepsTheBest) {
  const Ran ran = train(save_dir() + R"("steps": 400, "eval_interval": 1, "patience": 3, "keep_best": true)");
  EXPECT_LT(ran.steps, 400);
  std::size_t best = 0;
  for (std::size_t i = 0; i < ran.lines.size(); ++i)
    if (*ran.lines[i].val_loss < *ran.lines[best].val_loss) best = i;
  EXPECT_EQ(best + 4, ran.lines.size()) << "three evaluations after the lowest loss";
  const std::string tag = cat("global_step", best + 1);
  EXPECT_EQ(testing::read_text(folder_ / "run" / "best").substr(0, tag.size()), tag);
  EXPECT_TRUE(fs::exists(folder_ / "run" / tag / "manifest.json"));
  const Ran again = train(
      save_dir() + R"("steps": 400, "eval_interval": 1, "patience": 3, "keep_best": true)", {.resume = true});
  EXPECT_EQ(again.steps, ran.steps) << "nothing is left to do";
}

TEST_F(TrainerTest, GoesOnToTheSameBits) {
  const Ran whole = train(R"("steps": 30, "eval_interval": 7)");
  (void)train(save_dir() + R"("steps": 13, "eval_interval": 7)");
  const Ran rest = train(save_dir() + R"("steps": 30, "eval_interval": 7)", {.resume = true});
  EXPECT_EQ(rest.lines.size(), 17u);
  EXPECT_EQ(rest.loss, whole.loss);
  EXPECT_EQ(rest.val_loss, whole.val_loss);
  EXPECT_EQ(rest.metrics, whole.metrics);
}

TEST_F(TrainerTest, EndsTheStepAndSavesOnASignal) {
  TrainerOptions options;
  std::atomic_flag raised;  // by one of the ranks' threads: a second signal would end the program at once
  options.after_step = [&](const engine::StepMetrics& line) {
    if (line.step == 4 && !raised.test_and_set()) std::raise(SIGTERM);
  };
  const Ran ran = train(save_dir() + R"("steps": 1000)", options);
  struct sigaction after {};
  ::sigaction(SIGTERM, nullptr, &after);
  EXPECT_EQ(after.sa_handler, SIG_DFL) << "what comes after training is stopped as ever";
  EXPECT_EQ(ran.signal, SIGTERM);
  EXPECT_EQ(ran.steps, 4);
  EXPECT_TRUE(fs::exists(folder_ / "run" / "global_step4" / "manifest.json"));
}

/// The process's threads, by number.
std::vector<pid_t> threads() {
  std::vector<pid_t> out;
  for (const auto& entry : fs::directory_iterator("/proc/self/task"))
    out.push_back(std::stoi(entry.path().filename()));
  return out;
}
bool hears(pid_t thread, int signal) {
  std::ifstream in(cat("/proc/self/task/", thread, "/status"));
  for (std::string line; std::getline(in, line);)
    if (line.starts_with("SigBlk:")) return !(std::stoull(line.substr(7), nullptr, 16) >> (signal - 1) & 1);
  return false;  // it has ended
}

std::atomic<int> on_alternate_stack, on_own_stack;
void note_stack(int) {
  stack_t now{};
  ::sigaltstack(nullptr, &now);
  ++(now.ss_flags & SS_ONSTACK ? on_alternate_stack : on_own_stack);
}

/// Ranks, what waits for signals, and the threads of groups, saves and NVMe. One that begins or ends
/// meanwhile has no alternate stack yet, or no more, and the next round finds it otherwise, or gone.
TEST_F(TrainerTest, SignalsFindAlternateStacksInAllThreadsAndRanksAloneHearStopSignals) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "ThreadSanitizer has a thread of its own, and runs handlers later";
#endif
  struct sigaction action {
  }, before{};
  action.sa_handler = note_stack, action.sa_flags = SA_ONSTACK | SA_RESTART;
  ::sigaction(SIGPROF, &action, &before);
  on_alternate_stack = on_own_stack = 0;
  std::size_t seen = 0;
  int hearing = 0;
  std::mutex mutex;
  TrainerOptions options;
  options.after_step = [&](const engine::StepMetrics& line) {
    const std::lock_guard lock(mutex);
    if (line.step != 3 || seen > 0) return;
    for (int round = 0; round == 0 || (on_own_stack > 0 && round < 5); ++round) {
      ::usleep(static_cast<useconds_t>(round) * 20'000);
      on_alternate_stack = on_own_stack = hearing = 0;
      const std::vector<pid_t> all = threads();
      seen = all.size();
      for (const pid_t thread : all) {
        for (const int signal : stop_signals) hearing += hears(thread, signal);
        ::tgkill(::getpid(), thread, SIGPROF);
      }
      const auto answered = [&] { return static_cast<std::size_t>(on_alternate_stack + on_own_stack); };
      for (int waited = 0; answered() < seen && waited < 100; ++waited) ::usleep(1000);
    }
    const int status = std::system("kill -s TERM $$");
    EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM)
        << "a program that is started is stopped as ever";
  };
  const std::string nvme = cat(R"("device": "nvme", "nvme_path": ")", folder_.path().string(), R"(")");
  const Ran ran = train(cat(save_dir(), R"("steps": 4, "save_interval": 1}, "zero_optimization": {"stage": 3,
      "offload_optimizer": {)",
                            nvme, R"(}}, "aio": {"backend": "threads", "thread_count": 2)"),
                        options);
  ::sigaction(SIGPROF, &before, nullptr);
  EXPECT_EQ(ran.steps, 4);
  EXPECT_GE(seen, 6u) << "nothing is looked at";
  EXPECT_EQ(on_own_stack, 0);
  EXPECT_GE(on_alternate_stack, 6);
  EXPECT_GE(hearing, static_cast<int>(stop_signals.size())) << "the thread that calls after_step";
  EXPECT_LE(hearing, 3 * static_cast<int>(stop_signals.size()))
      << "more than what waits and two ranks in calls";
}

TEST_F(TrainerTest, ErrorsNameTheCheckpointToGoOnFrom) {
  TrainerOptions options;
  options.after_step = [](const engine::StepMetrics& line) {
    if (line.step == 5) fail(ErrorKind::data, "a caller's own error");
  };
  expect_error(
      ErrorKind::data, "a caller's own error; go on with TrainerOptions::resume (checkpoint of step 3 in",
      [&] { train(save_dir() + R"("steps": 9, "save_interval": 3, "save_async": false)", options); });
}

/// The files of a local checkpoint but for its manifest, as the machine has them.
std::uint64_t bytes_of_local(const fs::path& local, std::int64_t step) {
  std::uint64_t bytes = 0;
  for (const auto& entry : fs::recursive_directory_iterator(local))
    if (entry.path().parent_path().stem() == cat("global_step", step) &&
        entry.path().filename() != "manifest.json")
      bytes += entry.file_size();
  return bytes;
}

TEST_F(TrainerTest, ErrorsAndMetricsKnowLocalCheckpoints) {
  const fs::path local = folder_ / "local";
  const auto run = [&](int fails_at, const std::string& more, bool resume) {
    TrainerOptions options{.resume = resume};
    options.after_step = [fails_at](const engine::StepMetrics& line) {
      if (line.step == fails_at) fail(ErrorKind::data, "a caller's own error");
    };
    return train(cat(save_dir(), R"("steps": 9, "save_async": false, "local_save_interval": 2,
                                   "local_save_dir": ")",
                     local.string(), "\"", more),
                 options);
  };
  const std::string go_on = "a caller's own error; go on with TrainerOptions::resume (",
                    run_dir = (folder_ / "run").string();
  expect_error(ErrorKind::data, cat(go_on, "local checkpoint of step 2)"), [&] { run(3, "", false); });
  expect_error(ErrorKind::data,
               cat(go_on, "local checkpoint of step 4, else checkpoint of step 3 in ", run_dir,
                   ", or an earlier one with TrainerOptions::resume_tag)"),
               [&] { run(5, R"(, "save_interval": 3)", true); });
  const std::uint64_t bytes = bytes_of_local(local, 4);
  EXPECT_GT(bytes, 0u);
  expect_error(ErrorKind::data, cat(go_on, "checkpoint of step 6 in ", run_dir, ", or an earlier one"),
               [&] { run(7, R"(, "save_interval": 3)", true); });
  fs::remove_all(folder_ / "run" / "global_step6");
  fs::remove(folder_ / "run" / "latest");
  testing::write_text(folder_ / "run" / "latest", "global_step3\n");
  const Ran rest = run(0, R"(, "save_interval": 4)", true);
  ASSERT_EQ(rest.lines.size(), 5u) << "from the local one of step 4";
  const auto expect_told = [&](std::size_t line, std::int64_t in_folder, std::int64_t of_local) {
    EXPECT_EQ(rest.lines[line].saved_step, in_folder) << line;
    EXPECT_EQ(rest.lines[line].local.step, of_local) << line;
  };
  expect_told(0, 3, 4), expect_told(2, 3, 6), expect_told(4, 8, 6);
  EXPECT_EQ(rest.lines[0].local.bytes, bytes);
  EXPECT_EQ(rest.lines[0].local.seconds, 0) << "an earlier start made it";
  EXPECT_GT(rest.lines[2].local.seconds, 0);
  EXPECT_TRUE(fs::is_empty(local));
}

TEST_F(TrainerTest, LeavesTheCheckpointsOfAnotherRunAlone) {
  (void)train(save_dir() + R"("steps": 2)");
  expect_error(ErrorKind::config,
               "holds checkpoints, the newest global_step2: go on with TrainerOptions::resume",
               [&] { train(save_dir() + R"("steps": 3)"); });
  EXPECT_EQ(train(save_dir() + R"("steps": 3)", {.resume = true}).steps, 3);
}

TEST_F(TrainerTest, SaysWhatIsMissing) {
  expect_error(ErrorKind::config, "how long to train is not given: set training.steps",
               [&] { train(R"("eval_interval": 1)"); });
  expect_error(ErrorKind::config,
               "training.patience goes by the validation loss, and there are no validation "
               "data: give TrainerOptions::validation",
               [&] { train(R"("steps": 3, "patience": 2, "eval_interval": 1)", {}, 0); });
  expect_error(ErrorKind::config, "TrainerOptions::resume reads training.save_dir, which is not set",
               [&] { train(R"("steps": 3)", {.resume = true}); });
}

}  // namespace
}  // namespace sherd::test
