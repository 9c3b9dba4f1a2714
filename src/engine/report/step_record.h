#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "engine/report/metrics.h"

namespace sherd {
class Engine;
}

namespace sherd::engine {

/// The program, machine and libraries that a run computes with: bits are promised where all are the same
/// (docs/guarantees.md).
struct RunFacts {
  std::string version;          ///< Sherd's
  std::string device;           ///< "cpu", or the GPU's name
  std::string instruction_set;  ///< the processor's, with how it multiplies bf16: "avx512, bf16 on tiles"
  std::string libraries;        ///< that compute: of matrix products, on GPUs cuDNN
  int threads = 0;              ///< compute threads of rank 0
  int ranks = 0;
  std::string world;             ///< how these meet: "local(4)"
  std::int64_t micro_batch = 0;  ///< samples; where it is not given it follows from the number of ranks

  /// The facts of this rank's run.
  static RunFacts of(const Engine& engine);
};

/// The record of a run's steps in the folder of its checkpoints, DIR/steps.jsonl, for `sherd verify`. A line
/// of JSON per step, with its loss and gradient norm to the bit, and one wherever the run was started, with
/// the number of the step before. Steps that run again replace what was there, as in a metrics file. For
/// rank 0.
class StepRecord {
 public:
  /// A run that begins or goes on behind step `steps_before`, from a checkpoint of it. Throws as
  /// MetricsWriter.
  StepRecord(const std::filesystem::path& folder, std::int64_t steps_before, const RunFacts& facts);

  void write(const StepMetrics& step);
  /// Before a checkpoint is saved: what that holds, the record then tells, whatever becomes of the machine.
  void sync() { lines_.sync(); }
  /// Names this start of the run. Checkpoints have it among their strings, as start_key.
  const std::string& start() const { return start_; }

 private:
  std::string start_;
  MetricsWriter lines_;
};

inline constexpr const char* steps_file = "steps.jsonl";
inline constexpr const char* start_key = "start";

/// The contents of such a file.
struct RecordedSteps {
  struct Start {
    std::string name;
    std::int64_t steps_before = 0;
    RunFacts facts;
  };
  struct Step {
    std::int64_t step = 0;
    std::optional<double> loss, grad_norm;  ///< nothing: NaN or infinite
    double loss_scale = 1;
    bool skipped = false;
    std::size_t start = 0;  ///< whose step it is, of `starts`
  };
  std::vector<Start> starts;
  std::vector<Step> steps;

  /// Empty where there is no file. The end of a line that is being written is left out. Throws Error{data}
  /// naming a line that is none of a record.
  static RecordedSteps read(const std::filesystem::path& folder);
  /// Null where it is not recorded.
  const Step* find(std::int64_t step) const;
  /// The steps from `begin` + 1 to `end` that the first so many starts made, and whose lines are gone: they
  /// came behind the record's beginning, and no later start went back to replace them.
  std::vector<std::int64_t> lost(std::int64_t begin, std::int64_t end, std::size_t first_starts) const;
};

}  // namespace sherd::engine
