#include "cli/inference/classification.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "base/text/excerpt.h"
#include "data/dataset_info.h"
#include "data/packing/packing.h"
#include "engine/report/progress.h"
#include "models/inference/embed.h"

namespace sherd::cli {
namespace {

using Labels = std::vector<std::string>;

struct LabelledTexts {
  std::vector<std::vector<std::int32_t>> texts, types;
  std::vector<std::vector<std::int32_t>> classes;  ///< of each text, or of its tokens; below 0: none
};

/// Texts as training sees them: cut where they are longer than the model takes.
LabelledTexts texts_of(const data::IndexedDataset& dataset, std::size_t limit, const config::Model& model,
                       std::int32_t end) {
  LabelledTexts out;
  const auto targets = model.labels_tokens() ? data::Targets::token_classes : data::Targets::classes;
  const auto all = static_cast<std::size_t>(dataset.sequences());
  for (std::size_t i = 0; i < (limit > 0 ? std::min(limit, all) : all); ++i) {
    const auto sequence = static_cast<std::int64_t>(i);
    const std::int64_t tokens = data::text_tokens(dataset.length(sequence), targets);
    std::vector<std::int32_t> ids(static_cast<std::size_t>(std::max<std::int64_t>(0, tokens)));
    dataset.read(sequence, 0, ids);
    data::cut_text(ids, model.seq_length, end);
    std::vector<std::int32_t> classes(model.labels_tokens() ? ids.size() : 1);
    if (!ids.empty() && model.labels_tokens())
      data::read_token_classes(dataset, sequence, classes);
    else if (!ids.empty())
      dataset.read(sequence, tokens, classes);
    const auto most = std::max_element(classes.begin(), classes.end());
    if (ids.empty())
      fail(ErrorKind::data, dataset.prefix(), ": document ", i, " has no text: prepare the dataset again");
    if (*most >= std::ssize(model.labels))
      fail(ErrorKind::data, dataset.prefix(), ": document ", i, " has the label ", *most,
           ", and the model has ", model.labels.size(), ": prepare the dataset with the model's labels");
    out.types.push_back(data::types_of_parts(ids, end));
    out.texts.push_back(std::move(ids)), out.classes.push_back(std::move(classes));
  }
  return out;
}

/// Texts or their tokens as they were given labels.
struct Judged {
  Judged(const config::Model& of, const LabelledTexts& asked)
      : model(of), texts(asked), matrix(model.labels.size()) {
    of_entities = model.labels_tokens() && are_of_entities(model.labels);
  }

  void add(std::size_t text, std::span<const double> probabilities) {
    const std::vector<std::int32_t>& classes = texts.classes[text];
    const std::size_t labels = model.labels.size();
    Labels are, given;
    for (std::size_t i = 0; i < classes.size(); ++i) {
      if (classes[i] < 0) continue;
      const std::span<const double> of = probabilities.subspan(i * labels, labels);
      const auto is = static_cast<std::size_t>(classes[i]);
      const auto found = static_cast<std::size_t>(std::max_element(of.begin(), of.end()) - of.begin());
      matrix.add(is, found);
      loss -= std::log(of[is]);
      if (of_entities) are.push_back(model.labels[is]), given.push_back(model.labels[found]);
    }
    entities.add(are, given);
  }

  const char* unit() const { return model.labels_tokens() ? "tokens" : "texts"; }
  double mean_loss() const { return loss / static_cast<double>(matrix.counted()); }

  const config::Model& model;
  const LabelledTexts& texts;
  ConfusionMatrix matrix;
  EntityScores entities;
  bool of_entities = false;
  double loss = 0;
};

/// Names with their figures, below a line of what these are.
std::string rows_of(const char* name, const std::vector<std::pair<std::string, FoundCounts>>& rows,
                    const char* unit) {
  char text[160];
  std::size_t width = std::string_view(name).size();
  for (const auto& [label, counts] : rows) width = std::max(width, label.size());
  const auto padded = [&](const std::string& label) {
    return label + std::string(width - label.size(), ' ');
  };
  std::snprintf(text, sizeof text, "  precision     recall         F1  %8s\n", unit);
  std::string out = padded(name) + text;
  for (const auto& [label, found] : rows) {
    std::snprintf(text, sizeof text, "  %9.4f  %9.4f  %9.4f  %8lld\n", found.precision(), found.recall(),
                  found.f1(), static_cast<long long>(found.there));
    out += padded(label) + text;
  }
  return out;
}

std::string table(const Judged& found) {
  char text[160];
  std::snprintf(text, sizeof text, "%s %lld  loss %.4f  accuracy %.4f  macro F1 %.4f\n", found.unit(),
                static_cast<long long>(found.matrix.counted()), found.mean_loss(), found.matrix.accuracy(),
                found.matrix.macro_f1());
  std::string out = text;
  std::vector<std::pair<std::string, FoundCounts>> rows;
  for (std::size_t i = 0; i < found.model.labels.size(); ++i)
    rows.emplace_back(found.model.labels[i], found.matrix.of(i));
  out += rows_of("label", rows, found.unit());
  if (!found.of_entities) return out;
  rows.assign(found.entities.by_type().begin(), found.entities.by_type().end());
  rows.emplace_back("all", found.entities.all());
  return out + rows_of("entity", rows, "entities");
}

nlohmann::ordered_json object_of(const FoundCounts& found, const char* unit) {
  return {
      {"precision", found.precision()}, {"recall", found.recall()}, {"f1", found.f1()}, {unit, found.there}};
}

std::string object(const Judged& found) {
  nlohmann::ordered_json out{{found.unit(), found.matrix.counted()},
                             {"loss", found.mean_loss()},
                             {"accuracy", found.matrix.accuracy()},
                             {"macro_f1", found.matrix.macro_f1()}};
  for (std::size_t i = 0; i < found.model.labels.size(); ++i)
    out["labels"][found.model.labels[i]] = object_of(found.matrix.of(i), found.unit());
  if (found.of_entities) {
    out["entities"] = object_of(found.entities.all(), "entities");
    for (const auto& [type, counts] : found.entities.by_type())
      out["entities"]["types"][type] = object_of(counts, "entities");
  }
  return out.dump(2) + "\n";
}

}  // namespace

std::int64_t ConfusionMatrix::counted() const {
  std::int64_t sum = 0;
  for (const std::int64_t each : counts_) sum += each;
  return sum;
}
double ConfusionMatrix::accuracy() const {
  std::int64_t right = 0;
  for (std::size_t i = 0; i < classes_; ++i) right += count(i, i);
  return FoundCounts::share(right, counted());
}
FoundCounts ConfusionMatrix::of(std::size_t label) const {
  FoundCounts out{count(label, label), 0, 0};
  for (std::size_t i = 0; i < classes_; ++i) out.there += count(label, i), out.given += count(i, label);
  return out;
}
double ConfusionMatrix::macro_f1() const {
  double sum = 0;
  int classes = 0;
  for (std::size_t i = 0; i < classes_; ++i)
    if (const FoundCounts found = of(i); found.there + found.given > 0) sum += found.f1(), ++classes;
  return classes == 0 ? 0 : sum / classes;
}

std::string classification_report(const Inference& from, const data::IndexedDataset& dataset,
                                  std::size_t limit, std::int64_t batch, bool json) {
  const config::Model& model = *from.config().model;
  const auto info = data::read_dataset_info(dataset.prefix());
  if (!info || info->labels != model.labels || info->labels_of_tokens != model.labels_tokens())
    fail(ErrorKind::config, dataset.prefix(), " has other labels than the model's, which are of ",
         model.labels_tokens() ? "tokens" : "texts",
         ", or none: prepare it with `sherd prepare --labels`, as the data of its training");
  const LabelledTexts asked = texts_of(dataset, limit, model, info->end_of_document);
  Judged found(model, asked);
  engine::WorkBar bar(STDERR_FILENO);  // rank 0's
  std::size_t through = 0;
  from.run("Of classification: give --offload cpu, a smaller --batch-size, or --ranks that share the weights",
           [&](const DistributedPtr& dist) {
             InferenceModel on(from.reader(), from.config(), dist);
             models::classify_texts(on.model(), on.run(), asked.texts, asked.types, batch,
                                    [&](std::size_t text, std::span<const double> probabilities) {
                                      if (dist->rank() != 0) return;
                                      found.add(text, probabilities);
                                      bar.show({.title = "evaluating",
                                                .done = static_cast<double>(++through),
                                                .total = static_cast<double>(asked.texts.size()),
                                                .unit = "texts"});
                                    });
           });
  bar.clear();
  if (found.matrix.counted() == 0)
    fail(ErrorKind::data, "none of the ", found.unit(), " of ", dataset.prefix(),
         " has a label, so that nothing can be judged: prepare texts with labels");
  return json ? object(found) : table(found);
}

}  // namespace sherd::cli
