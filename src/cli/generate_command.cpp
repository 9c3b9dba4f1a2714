#include <limits>
#include <optional>

#include "base/excerpt.h"
#include "cli/command_line.h"
#include "cli/generate_request.h"
#include "cli/program.h"
#include "cli/prompts_file.h"

namespace sherd::cli {
namespace {

/// The options of the command.
CommandLine command_line() {
  CommandLine line(
      "generate", "Continues texts with a trained model.",
      cat("--checkpoint D (--prompt T | --prompts FILE [--output FILE] [--batch-size N]) [--max-tokens N] "
          "[--temperature X] [--top-k K] [--top-p P] [--repetition-penalty X] [--stop TEXT]... [--seed S] ",
          inference_synopsis));
  line.value("prompt", "T", "the text to continue; empty: from the beginning of a document")
      .value("prompts", "FILE", "texts to continue: a line each, or of a .jsonl the \"prompt\" of each line")
      .value("output", "FILE", "lines of JSON with prompt, completion, tokens and finish; not given: stdout")
      .value("batch-size", "N", "texts that are under way at once", "8")
      .value("max-tokens", "N", "at most this many tokens", "100")
      .value("temperature", "X", "0 takes the likeliest token, 1 samples the model's distribution", "0.8")
      .value("top-k", "K", "sample among the K likeliest tokens; 0: all", "40")
      .value("top-p", "P", "and among the likeliest that together have probability P", "1")
      .value("repetition-penalty", "X", "divide the logits of tokens that the text has by this; 1: none", "1")
      .list("stop", "TEXT", "end before this text; may be repeated")
      .value("seed", "S", "of the sampling", "0");
  add_inference_options(line);
  return line;
}

std::vector<std::string> prompts_of(const CommandLine& line) {
  if (line.has("prompts") == line.has("prompt"))
    throw UsageError(line.has("prompt") ? "give --prompt or --prompts, not both"
                                        : "give --prompt T or --prompts FILE: what is to be continued");
  if (line.has("prompts")) return read_prompts(line.text("prompts"));
  for (const char* name : {"output", "batch-size"})
    if (line.has(name)) throw UsageError(cat("--", name, " goes with --prompts FILE"));
  return {line.text("prompt")};
}

models::Sampling sampling_of(const CommandLine& line, const data::Tokenizer& tokenizer) {
  models::Sampling sampling;
  sampling.temperature = line.number("temperature");
  sampling.top_k = static_cast<int>(line.integer("top-k", 0, std::numeric_limits<int>::max()));
  sampling.top_p = line.number("top-p");
  sampling.repetition_penalty = line.number("repetition-penalty");
  sampling.ids = tokenizer.vocab_size();  // published models have rows for more
  sampling.key = RandomKey{static_cast<std::uint64_t>(line.integer("seed", 0)), stable_hash("generate")};
  models::check_sampling(sampling);
  return sampling;
}

}  // namespace

void generate_command(const Arguments& arguments) {
  CommandLine line = command_line();
  if (!line.parse(arguments)) return;
  std::vector<std::string> prompts = prompts_of(line);
  const Inference inference(line);
  Request request{inference,
                  std::move(prompts),
                  line.all("stop"),
                  line.integer("max-tokens", 1),
                  line.integer("batch-size", 1),
                  sampling_of(line, inference.tokenizer())};
  std::optional<CompletionsFile> completions;
  if (line.has("prompts")) request.completions = &completions.emplace(line.text("output"), request.prompts);
  inference.run(
      "Of generation: give --offload nvme --nvme-path DIR (or --offload cpu), a smaller --batch-size, "
      "fewer --max-tokens, or --ranks that share the weights",
      [&](const DistributedPtr& dist) { generate(request, dist); });
}

}  // namespace sherd::cli
