#include "cli/inference/classification.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "base/text/excerpt.h"
#include "data/dataset_info.h"
#include "data/packing/packing.h"
#include "models/inference/embed.h"

namespace sherd::cli {
namespace {

double share(std::int64_t part, std::int64_t of) {
  return of == 0 ? 0 : static_cast<double>(part) / static_cast<double>(of);
}

struct LabelledTexts {
  std::vector<std::vector<std::int32_t>> texts, types;
  std::vector<std::size_t> labels;
};

/// Texts as training sees them: cut where they are longer than the model takes.
LabelledTexts texts_of(const data::IndexedDataset& dataset, std::size_t limit, const config::Model& model,
                       std::int32_t end) {
  LabelledTexts out;
  const auto all = static_cast<std::size_t>(dataset.sequences());
  for (std::size_t i = 0; i < (limit > 0 ? std::min(limit, all) : all); ++i) {
    const auto sequence = static_cast<std::int64_t>(i);
    std::vector<std::int32_t> ids(static_cast<std::size_t>(dataset.length(sequence)));
    dataset.read(sequence, 0, ids);
    if (ids.size() < 2 || ids.back() < 0 || static_cast<std::size_t>(ids.back()) >= model.labels.size())
      fail(ErrorKind::data, dataset.prefix(), ": document ", i, " has no text, or no label below ",
           model.labels.size());
    out.labels.push_back(static_cast<std::size_t>(ids.back()));
    ids.pop_back();
    data::cut_text(ids, model.seq_length, end);
    out.types.push_back(data::types_of_parts(ids, end));
    out.texts.push_back(std::move(ids));
  }
  return out;
}

std::string table(const ConfusionMatrix& found, double loss, const std::vector<std::string>& labels) {
  char text[160];
  std::snprintf(text, sizeof text, "texts %lld  loss %.4f  accuracy %.4f  macro F1 %.4f\n",
                static_cast<long long>(found.texts()), loss, found.accuracy(), found.macro_f1());
  std::string out = text;
  std::size_t width = 5;
  for (const std::string& label : labels) width = std::max(width, label.size());
  out += cat("label", std::string(width - 5, ' '), "  precision     recall         F1     texts\n");
  for (std::size_t i = 0; i < labels.size(); ++i) {
    std::snprintf(text, sizeof text, "  %9.4f  %9.4f  %9.4f  %8lld\n", found.precision(i), found.recall(i),
                  found.f1(i), static_cast<long long>(found.texts_of(i)));
    out += labels[i] + std::string(width - labels[i].size(), ' ') + text;
  }
  return out;
}

std::string object(const ConfusionMatrix& found, double loss, const std::vector<std::string>& labels) {
  nlohmann::ordered_json out{{"texts", found.texts()},
                             {"loss", loss},
                             {"accuracy", found.accuracy()},
                             {"macro_f1", found.macro_f1()}};
  for (std::size_t i = 0; i < labels.size(); ++i)
    out["labels"][labels[i]] = {{"precision", found.precision(i)},
                                {"recall", found.recall(i)},
                                {"f1", found.f1(i)},
                                {"texts", found.texts_of(i)}};
  return out.dump(2) + "\n";
}

}  // namespace

std::int64_t ConfusionMatrix::texts() const {
  std::int64_t sum = 0;
  for (const std::int64_t each : counts_) sum += each;
  return sum;
}
std::int64_t ConfusionMatrix::texts_of(std::size_t label) const {
  std::int64_t sum = 0;
  for (std::size_t i = 0; i < classes_; ++i) sum += count(label, i);
  return sum;
}
std::int64_t ConfusionMatrix::given(std::size_t label) const {
  std::int64_t sum = 0;
  for (std::size_t i = 0; i < classes_; ++i) sum += count(i, label);
  return sum;
}
double ConfusionMatrix::accuracy() const {
  std::int64_t right = 0;
  for (std::size_t i = 0; i < classes_; ++i) right += count(i, i);
  return share(right, texts());
}
double ConfusionMatrix::precision(std::size_t label) const {
  return share(count(label, label), given(label));
}
double ConfusionMatrix::recall(std::size_t label) const {
  return share(count(label, label), texts_of(label));
}
double ConfusionMatrix::f1(std::size_t label) const {
  return share(2 * count(label, label), texts_of(label) + given(label));
}
double ConfusionMatrix::macro_f1() const {
  double sum = 0;
  int classes = 0;
  for (std::size_t i = 0; i < classes_; ++i)
    if (texts_of(i) + given(i) > 0) sum += f1(i), ++classes;
  return classes == 0 ? 0 : sum / classes;
}

std::string classification_report(const Inference& from, const data::IndexedDataset& dataset,
                                  std::size_t limit, std::int64_t batch, bool json) {
  const config::Model& model = *from.config().model;
  const auto info = data::read_dataset_info(dataset.prefix());
  if (!info || info->labels != model.labels)
    fail(ErrorKind::config, dataset.prefix(),
         " has other labels than the model, or none: prepare it with `sherd prepare --labels`, as the data "
         "of its "
         "training");
  const LabelledTexts asked = texts_of(dataset, limit, model, info->end_of_document);
  ConfusionMatrix found(model.labels.size());
  double loss = 0;
  from.run("Of classification: give --offload cpu, a smaller --batch-size, or --ranks that share the weights",
           [&](const DistributedPtr& dist) {
             InferenceModel on(from.reader(), from.config(), dist);
             models::classify_texts(
                 on.model(), on.run(), asked.texts, asked.types, batch,
                 [&](std::size_t text, std::span<const double> probabilities) {
                   if (dist->rank() != 0) return;
                   const auto likeliest = std::max_element(probabilities.begin(), probabilities.end());
                   found.add(asked.labels[text], static_cast<std::size_t>(likeliest - probabilities.begin()));
                   loss -= std::log(probabilities[asked.labels[text]]);
                 });
           });
  loss = found.texts() == 0 ? 0 : loss / static_cast<double>(found.texts());
  return json ? object(found, loss, model.labels) : table(found, loss, model.labels);
}

}  // namespace sherd::cli
