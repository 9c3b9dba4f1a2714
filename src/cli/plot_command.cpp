#include "cli/command_line.h"
#include "cli/plot.h"
#include "cli/program.h"

namespace sherd::cli {

void plot_command(const Arguments& arguments) {
  CommandLine line("plot", "Draws the training and validation losses of a metrics file.",
                   "--metrics F.jsonl --output F.svg [--unigram-entropy NATS] [--title TEXT]");
  line.value("metrics", "F.jsonl", "what `sherd train --metrics` wrote")
      .value("output", "F.svg", "where the picture goes")
      .value("unigram-entropy", "NATS", "draw a line at this loss")
      .value("title", "TEXT", "text above the picture", "Loss");
  if (!line.parse(arguments)) return;
  PlotOptions options{.title = line.text("title"), .unigram_entropy = std::nullopt};
  if (line.has("unigram-entropy")) options.unigram_entropy = line.number("unigram-entropy");
  plot_metrics(line.required("metrics"), line.required("output"), options);
}

}  // namespace sherd::cli
