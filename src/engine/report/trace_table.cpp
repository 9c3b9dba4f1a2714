#include <algorithm>

#include "base/text/excerpt.h"
#include "engine/report/report.h"
#include "engine/report/trace.h"

namespace sherd::engine {
namespace {

std::string percent(double part, double whole) {
  return printed("%.1f %%", whole > 0 ? 100 * part / whole : 0);
}

}  // namespace

std::string trace_table(const std::vector<TraceTotals>& ranks, int stages) {
  TraceTotals sum;
  for (const TraceTotals& rank : ranks) {
    sum.steps += rank.steps, sum.computing += rank.computing;
    sum.stages += rank.stages, sum.storage += rank.storage;
    sum.io += rank.io, sum.hidden_io += rank.hidden_io;
    sum.step_count += rank.step_count;
    sum.whole = sum.whole && rank.whole;
    for (std::size_t op = 0; op < sum.instructions.size(); ++op)
      sum.instructions[op] += rank.instructions[op];
  }
  if (sum.step_count == 0) return "";
  std::vector<std::vector<std::string>> rows = {{"instruction", "ms per step", "share"}};
  const auto add = [&](std::string name, double seconds) {
    rows.push_back({std::move(name), printed("%.2f", seconds * 1e3 / static_cast<double>(sum.step_count)),
                    percent(seconds, sum.steps)});
  };
  for (std::size_t op = 0; op < sum.instructions.size(); ++op)
    if (sum.instructions[op] > 0)
      add(std::string(sharding::name_of(static_cast<sharding::Instruction::Op>(op))), sum.instructions[op]);
  if (sum.stages > 0) add("waits for stages", sum.stages);
  if (sum.storage > 0) add("waits for NVMe", sum.storage);
  std::string text = format_table(rows);
  if (stages > 1)
    text += cat("bubble: ", percent(sum.steps - sum.computing, sum.computing),
                " of the time that ranks compute (updates and reductions count to it)\n");
  if (sum.io > 0)
    text += cat("NVMe was busy ", percent(sum.io, sum.steps), " of the steps' time, ",
                percent(sum.hidden_io, sum.io), " of that beside computing\n");
  if (!sum.whole) text += cat("the trace was full after ", counted(ranks.front().step_count, "step"), "\n");
  return text;
}

}  // namespace sherd::engine
