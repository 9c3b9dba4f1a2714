#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>

#include "cli/command_line.h"
#include "cli/inference/inference_model.h"
#include "data/tokenizer.h"

// The common part of commands that run a trained model: which checkpoint, where, on how many ranks.

namespace sherd::cli {

/// How the usage line names the options of add_inference_options().
inline constexpr const char* inference_synopsis =
    "[--tag TAG] [--adapter DIR] [--task NAME] [--device T] [--offload cpu|nvme] [--nvme-path DIR] "
    "[--base-format F] [--device-memory SIZE] "
    "[--set parallel.tensor=N] [--set parallel.pipeline=N] [--ranks N]";

/// Declares --checkpoint, --tag, --adapter, --task, --device, --offload, --nvme-path, --base-format,
/// --device-memory, --ranks and --set.
void add_inference_options(CommandLine& line);

/// Which of an adapter's prompts is that of `task`, as --task names it; 0 where there is one, and `task` is
/// empty or its name. Throws UsageError with a list of those that there are.
std::int64_t prompt_index(const config::Adapter& adapter, const std::string& task);

/// The ids of a text as the model saw documents begin: with the token that stands in front of all, where the
/// text itself has none, or for an empty text behind the end of another. At least one.
std::vector<std::int32_t> prompt_of(const data::Tokenizer& tokenizer, const std::string& text);

/// Throws Error{data} that says `where` an id has no row in the model, naming the token.
void require_rows(std::span<const std::int32_t> ids, const data::Tokenizer& tokenizer, std::int64_t rows,
                  const std::string& where);

/// The checkpoint that a command line names, whose files are as they were written, and how it runs.
class Inference {
 public:
  /// Throws UsageError and Error{config} for options that do not fit, Error{io} and Error{data} for a
  /// checkpoint that is not there, damaged or without a tokenizer.
  explicit Inference(const CommandLine& line);

  const engine::CheckpointReader& reader() const { return reader_; }
  const data::Tokenizer& tokenizer() const { return *tokenizer_; }
  const config::Config& config() const { return config_; }  ///< as prepare_for_inference() made it

  /// Runs `body` on every rank, on threads of this process. `advice`: what to do where memory does not
  /// suffice.
  void run(const std::string& advice, const std::function<void(const DistributedPtr&)>& body) const;

 private:
  WeightsPlace place_;
  engine::CheckpointReader reader_;
  std::shared_ptr<const data::Tokenizer> tokenizer_;
  config::Config config_;
  int ranks_;
};

}  // namespace sherd::cli
