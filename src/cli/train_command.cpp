#include <filesystem>
#include <utility>

#include "cli/command_line.h"
#include "cli/config_files.h"
#include "cli/program.h"
#include "cli/train.h"

namespace sherd::cli {

void train_command(const Arguments& arguments) {
  CommandLine line("train",
                   "Trains the model that a configuration describes. SIGINT (Ctrl-C), SIGTERM, SIGHUP and "
                   "SIGUSR1 (srun --signal=USR1@60) stop it after a step, saved and reported as at its end, "
                   "with exit code 130, 143, 129 and 138.",
                   "--config F... [--ranks N] [--set a.b.c=V]... [--steps N] [--metrics F.jsonl] [--plot "
                   "F.svg] [--trace F.json] [--resume | --resume-or-start]");
  line.list("config", "F", "DeepSpeed-style JSON; later files add sections and override keys")
      .value("ranks", "N",
             "local ranks in this process, by default 1; mpirun, srun and torchrun bring their own")
      .list("set", "a.b.c=V", "override one key, as zero_optimization.stage=3")
      .value("steps", "N", "optimizer steps of the whole run; the same as --set training.steps=N")
      .value("metrics", "F.jsonl", "write one JSON object per optimizer step")
      .value("plot", "F.svg", "draw the losses when done; needs --metrics")
      .value("trace", "F.json", "write what each rank did when, for ui.perfetto.dev, and report shares of it")
      .flag("resume", "go on from the latest checkpoint in training.save_dir")
      .flag("resume-or-start",
            "as --resume where there is a checkpoint, else begin: one command for every start")
      .value("tag", "TAG", "with --resume: from this checkpoint instead of the latest")
      .rest_to("config");
  if (!line.parse(arguments)) return;
  if (line.all("config").empty()) throw UsageError("no --config given. See 'sherd train --help'");
  if (line.has("plot") && !line.has("metrics"))
    throw UsageError("--plot draws what --metrics wrote: give both");
  if (line.has("tag") && !line.has("resume") && !line.has("resume-or-start"))
    throw UsageError("--tag names a checkpoint to --resume from: give both");
  if (line.has("resume") && line.has("resume-or-start"))
    throw UsageError(
        "--resume needs a checkpoint, and --resume-or-start begins without one: give one of them");
  for (const char* output : {"metrics", "plot", "trace"})
    for (const std::string& config : line.all("config"))
      if (std::error_code absent; std::filesystem::equivalent(line.text(output), config, absent))
        throw UsageError(cat("--", output, " names the file of --config, which would be lost"));
  ConfigFiles files{line.all("config"), line.all("set"), line.has("resume") || line.has("resume-or-start")};
  if (line.has("steps"))
    files.overrides.push_back("training.steps=" + std::to_string(line.integer("steps", 1)));
  TrainRequest request;
  request.reparse = [files](const std::vector<std::string>& more) { return files.parse(more); };
  if (line.has("ranks")) request.ranks = static_cast<int>(line.integer("ranks", 1, 1024));
  request.metrics = line.text("metrics");
  request.plot = line.text("plot");
  request.trace = line.text("trace");
  request.resume = line.has("resume");
  request.resume_or_start = line.has("resume-or-start");
  request.resume_tag = line.text("tag");
  int signal = 0;
  files.in_their_words([&] { signal = train(std::move(request)); });
  if (signal != 0) throw Finding{stopped_by(signal)};
}

}  // namespace sherd::cli
