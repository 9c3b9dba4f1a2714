#include "cli/inference/preference_report.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>
#include <ostream>

#include "base/log.h"
#include "base/text/excerpt.h"
#include "cli/inference/inference_model.h"
#include "engine/report/progress.h"
#include "models/inference/rewards.h"
#include "models/inference/score.h"

namespace sherd::cli {
namespace {

using Ids = std::vector<std::int32_t>;

/// The answers to be scored: of each document the chosen and the rejected one, or one of them.
struct Answers {
  std::vector<models::ScoreRequest> requests;  ///< whole texts, where rewards are asked for
  std::vector<std::array<std::optional<std::size_t>, 2>> documents;
  std::int64_t cut = 0;
};

Answers answers_of(const data::IndexedDataset& dataset, std::size_t limit, std::int64_t most, bool whole,
                   std::int64_t vocabulary) {
  Answers out;
  const std::int64_t all = dataset.documents(),
                     documents = limit > 0 ? std::min(all, static_cast<std::int64_t>(limit)) : all;
  for (std::int64_t d = 0; d < documents; ++d) {
    std::array<std::optional<std::size_t>, 2> document;
    for (std::size_t side = 0; side < 2; ++side) {
      const std::int64_t sequence = dataset.document_begin(d) + static_cast<std::int64_t>(side);
      Ids ids(static_cast<std::size_t>(dataset.length(sequence)));
      std::vector<std::uint8_t> targets(ids.size());
      dataset.read(sequence, 0, ids), dataset.read_mask(sequence, 0, targets);
      dataset.check_ids(ids, sequence, 0, vocabulary);
      const std::int64_t kept = std::min(std::ssize(ids), whole ? most : most + 1);
      out.cut += kept < std::ssize(ids);
      ids.resize(static_cast<std::size_t>(kept)), targets.resize(ids.size());
      const auto first = std::find(targets.begin() + std::min<std::int64_t>(1, kept), targets.end(), 1);
      if (first == targets.end()) continue;  // not there, or without room for an answer
      document[side] = out.requests.size();
      const std::int64_t from = first - targets.begin();
      out.requests.push_back({std::move(ids), from, std::vector<bool>(first, targets.end())});
    }
    out.documents.push_back(document);
  }
  return out;
}

/// A mean that grows.
struct Mean {
  double sum = 0;
  std::int64_t count = 0;
  void add(double value) { sum += value, ++count; }
  double value() const { return count == 0 ? 0 : sum / static_cast<double>(count); }
};

struct Report {
  bool rewards = false;
  Mean chosen, rejected, margin, above, above_by_token;

  std::vector<std::pair<std::string, double>> figures() const {
    const std::string of = rewards ? "rewards/" : "logps/";
    std::vector<std::pair<std::string, double>> out;
    if (above.count > 0) out.emplace_back("accuracy", above.value());
    if (above.count > 0 && !rewards) out.emplace_back("accuracy_by_token", above_by_token.value());
    if (chosen.count > 0) out.emplace_back(of + "chosen", chosen.value());
    if (rejected.count > 0) out.emplace_back(of + "rejected", rejected.value());
    if (above.count > 0) out.emplace_back(of + "margins", margin.value());
    return out;
  }
};

}  // namespace

std::string preference_report(const Inference& from, const data::IndexedDataset& dataset, std::size_t limit,
                              std::int64_t most_rows, bool json, std::ostream* details) {
  const config::Model& model = *from.config().model;
  Report report;
  report.rewards = model.gives_rewards();
  const Answers asked =
      answers_of(dataset, limit, model.seq_length - from.config().training.adapter.virtual_tokens(),
                 report.rewards, from.tokenizer().vocab_size());
  if (asked.requests.empty()) fail(ErrorKind::data, dataset.prefix(), " has no answer to score");
  if (asked.cut > 0)
    log_warning(counted(asked.cut, "answer"), asked.cut == 1 ? " does" : " do",
                " not fit the model's seq_length: their ends are left out");
  std::vector<double> found(asked.requests.size());
  std::vector<std::int64_t> tokens(found.size(), 1);
  engine::WorkBar bar(STDERR_FILENO);  // rank 0's
  from.run("Of evaluation: give --offload cpu, fewer --batch-tokens, or --ranks that share the weights",
           [&](const DistributedPtr& dist) {
             InferenceModel on(from.reader(), from.config(), dist);
             std::vector<double> mine;
             std::vector<std::int64_t> counts(found.size(), 1);
             const auto told = [&](std::size_t through) {
               if (dist->rank() == 0)
                 bar.show({.title = "evaluating",
                           .done = static_cast<double>(through),
                           .total = static_cast<double>(found.size()),
                           .unit = "answers"});
             };
             if (report.rewards) {
               std::vector<Ids> texts;
               std::size_t longest = 1;
               for (const models::ScoreRequest& request : asked.requests)
                 texts.push_back(request.tokens), longest = std::max(longest, request.tokens.size());
               mine = models::reward_texts(on.model(), on.run(), texts,
                                           most_rows / static_cast<std::int64_t>(longest), told);
             } else {
               mine.resize(found.size());
               const auto scores =
                   models::score_texts(on.model(), on.run(), asked.requests, most_rows, {}, told);
               for (std::size_t i = 0; i < mine.size(); ++i)
                 mine[i] = scores[i].log_likelihood, counts[i] = scores[i].tokens;
             }
             if (dist->rank() == 0) found = std::move(mine), tokens = std::move(counts);
           });
  bar.clear();
  for (std::size_t d = 0; d < asked.documents.size(); ++d) {
    const auto& [chosen, rejected] = asked.documents[d];
    if (chosen) report.chosen.add(found[*chosen]);
    if (rejected) report.rejected.add(found[*rejected]);
    if (chosen && rejected) {
      const auto by_token = [&](std::size_t i) { return found[i] / static_cast<double>(tokens[i]); };
      report.margin.add(found[*chosen] - found[*rejected]);
      report.above.add(found[*chosen] > found[*rejected] ? 1 : 0);
      report.above_by_token.add(by_token(*chosen) > by_token(*rejected) ? 1 : 0);
    }
    if (!details) continue;
    nlohmann::ordered_json line{{"document", d}};
    for (const auto& [name, at] : {std::pair("chosen", chosen), std::pair("rejected", rejected)})
      if (at) {
        line[name] = found[*at];
        if (!report.rewards) line[std::string(name) + "_tokens"] = tokens[*at];
      }
    *details << line.dump() << '\n';
    if (!*details) fail(ErrorKind::io, "writing the --output file failed: is the disk full?");
  }
  nlohmann::ordered_json object{{"pairs", report.above.count}, {"answers", asked.requests.size()}};
  std::string table = cat(dataset.prefix(), ": ", counted(report.above.count, "pair"), ", ",
                          counted(std::ssize(asked.requests), "answer"), "\n");
  for (const auto& [name, value] : report.figures()) {
    char text[80];
    std::snprintf(text, sizeof text, "%-18s %12.4f\n", name.c_str(), value);
    table += text, object[name] = value;
  }
  return json ? object.dump(2) + "\n" : table;
}

}  // namespace sherd::cli
