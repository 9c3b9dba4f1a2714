// What a Gpt finds for whole texts, and learns by.
#include <algorithm>
#include <utility>

#include "autograd/ops.h"
#include "models/batch_entries.h"
#include "models/gpt.h"
#include "sharding/parallel/collectives.h"
#include "sharding/parallel/sequence.h"
#include "sharding/parallel/text_loss.h"

namespace sherd::models {
namespace {

/// Integers of a batch that the processor reads.
std::vector<std::int64_t> integers(const tensor::Batch& batch, const char* name) {
  const Tensor& values = entry(batch, name);
  return {values.data<std::int32_t>(), values.data<std::int32_t>() + values.numel()};
}

/// A target: its row among all of the batch, and the text it is of.
struct TextTarget {
  std::int64_t row, text;
};

/// Where each text ends among all rows of a batch: its documents, else its sequences.
std::vector<std::int64_t> ends_of_texts(const tensor::Batch& batch) {
  if (batch.contains("documents")) {
    std::vector<std::int64_t> bounds = integers(batch, "documents");
    bounds.erase(bounds.begin());
    return bounds;
  }
  const tensor::Shape& shape = entry(batch, "tokens").shape();
  std::vector<std::int64_t> out;
  for (std::int64_t b = 1; b <= shape[0]; ++b) out.push_back(b * shape[1]);
  return out;
}

std::vector<TextTarget> targets_of(const tensor::Batch& batch, const std::vector<std::int64_t>& ends) {
  std::vector<TextTarget> out;
  std::int64_t text = 0;
  for (const std::int64_t row : integers(batch, "targets")) {
    while (text < std::ssize(ends) && ends[static_cast<std::size_t>(text)] <= row) ++text;
    if (row < 0 || text == std::ssize(ends))
      fail(ErrorKind::data, "'targets' names row ", row, " of ", ends.empty() ? 0 : ends.back());
    out.push_back({row, text});
  }
  return out;
}

/// Targets of each text that count whole: as many as the shorter of its pair has.
std::vector<std::int64_t> shared_targets(const std::vector<TextTarget>& targets,
                                         const std::vector<std::int64_t>& sides) {
  std::vector<std::int64_t> count(sides.size());
  for (const TextTarget& target : targets) ++count[static_cast<std::size_t>(target.text)];
  for (std::size_t i = 0; i + 1 < count.size(); ++i)
    if (sides[i] > 0 && sides[i + 1] < 0) count[i] = count[i + 1] = std::min(count[i], count[i + 1]);
  return count;
}

/// Runs over targets alone, one behind the other.
std::vector<parallel::TextRows> runs_of_targets(const std::vector<TextTarget>& targets,
                                                const std::vector<std::int64_t>& shared, double tail) {
  std::vector<parallel::TextRows> out;
  std::vector<std::int64_t> seen(shared.size());
  for (std::int64_t i = 0; i < std::ssize(targets); ++i) {
    const auto text = static_cast<std::size_t>(targets[static_cast<std::size_t>(i)].text);
    const double weight = seen[text]++ < shared[text] ? 1 : tail;
    if (out.empty() || out.back().text != static_cast<std::int32_t>(text) || out.back().weight != weight)
      out.push_back({i, i, static_cast<std::int32_t>(text), weight});
    out.back().end = i + 1;
  }
  return out;
}

/// The same over all rows: a run ends where the next one's first target is.
std::vector<parallel::TextRows> runs_of_rows(std::vector<parallel::TextRows> runs,
                                             const std::vector<TextTarget>& targets, std::int64_t rows) {
  const auto row = [&](std::int64_t target) { return targets[static_cast<std::size_t>(target)].row; };
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const std::int64_t begin = i == 0 ? 0 : runs[i - 1].end;
    runs[i].end = i + 1 < runs.size() ? row(runs[i + 1].begin) : rows;
    runs[i].begin = begin;
  }
  if (runs.empty()) runs.push_back({0, rows, 0, 1});
  return runs;
}

/// Rows of sequences of which this rank has parts.
std::vector<parallel::TextRows> runs_of_parts(std::int64_t batch, std::int64_t rows) {
  std::vector<parallel::TextRows> out;
  for (std::int64_t b = 0; b < batch; ++b)
    out.push_back({b * rows, (b + 1) * rows, static_cast<std::int32_t>(b), 1});
  return out;
}

}  // namespace

struct Gpt::Texts {
  Var rows;  ///< [batch, rows, hidden]
  Tensor labels;
  std::vector<parallel::TextRows> runs;
  std::int64_t texts = 0;
};

Gpt::Texts Gpt::texts_of(Tape& tape, const Var& x, const tensor::Batch& batch) {
  const Tensor &labels = entry(batch, "labels"), &sides = entry(batch, "sides");
  if (labels.shape() != entry(batch, "tokens").shape())
    fail(ErrorKind::data, "labels ", labels.shape().str(), " do not match tokens ",
         entry(batch, "tokens").shape().str());
  require(!config_.has_encoder(), "preferences are learned by decoders");
  Texts out{{}, {}, {}, sides.numel()};
  const bool meta = tape.device().kind() == device::Kind::meta;
  std::vector<TextTarget> targets;
  std::vector<parallel::TextRows> runs;
  if (!meta && layout_.context_size() == 1) {
    const std::vector<std::int64_t> ends = ends_of_texts(batch);
    if (std::ssize(ends) != out.texts)
      fail(ErrorKind::data, "'sides' tells of ", out.texts, " texts, of which there are ", ends.size());
    targets = targets_of(batch, ends);
    runs = runs_of_targets(targets, shared_targets(targets, integers(batch, "sides")),
                           text_loss_ ? text_loss_->tail_weight() : 1);
  }
  if (const Tensor few = few_targets(tape, batch)) {
    const std::int64_t width = x.shape().back(), n = few.numel();
    const Var picked = autograd::take_rows(autograd::reshape(x, {labels.numel(), width}), few);
    out.rows = normed(tape, autograd::reshape(picked, {1, n, width}));
    out.labels = labels_at(tape, labels, few);
    out.runs = meta ? std::vector<parallel::TextRows>{{0, n, 0, 1}} : std::move(runs);
    return out;
  }
  out.rows = normed(tape, x);
  out.labels = parallel::inner_part(tape.kernels(), labels, layout_);
  out.runs = meta || layout_.context_size() > 1 ? runs_of_parts(out.labels.shape()[0], out.labels.shape()[1])
                                                : runs_of_rows(std::move(runs), targets, labels.numel());
  if (meta)
    for (parallel::TextRows& run : out.runs) run.text = 0;
  return out;
}

Var Gpt::rewards(Tape& tape, const Var& x, const tensor::Batch& batch) {
  const std::int64_t texts = entry(batch, "sides").numel(), width = x.shape().back();
  std::vector<std::int32_t> last(static_cast<std::size_t>(texts), 0);
  if (tape.device().kind() != device::Kind::meta)
    for (const TextTarget& target : targets_of(batch, ends_of_texts(batch)))
      last[static_cast<std::size_t>(target.text)] = static_cast<std::int32_t>(target.row);
  const Tensor rows = Tensor::of<std::int32_t>(tape.device(), {texts}, last);
  const auto scores_of = [&](const Var& stream) {
    return parallel::gather((*head_)(tape, normed(tape, stream)), 2, layout_.tensor);
  };
  if (layout_.context_size() == 1 && !layout_.cuts_stream()) {
    const Var picked = autograd::take_rows(autograd::reshape(x, {x.value().numel() / width, width}), rows);
    const Var all = scores_of(autograd::reshape(picked, {1, texts, width}));
    return autograd::reshape(all, {texts, all.shape().back()});
  }
  const Var all = parallel::gather_sequence(scores_of(x), layout_);
  const std::int64_t columns = all.shape().back();
  return autograd::take_rows(autograd::reshape(all, {all.value().numel() / columns, columns}), rows);
}

Var Gpt::text_loss(Tape& tape, const Var& x, const tensor::Batch& batch) {
  require(text_loss_ != nullptr,
          "a batch whose texts have sides, and no loss that reads these: set_text_loss()");
  if (config_.gives_rewards())
    return parallel::score_loss(rewards(tape, x, batch),
                                [&](const nn::TextScores& scores, nn::TextGradients& gradients) {
                                  return (*text_loss_)(batch, scores, gradients);
                                });
  const Texts texts = texts_of(tape, x, batch);
  return parallel::vocab_text_loss(
      texts.rows, vocabulary(tape), texts.labels, texts.runs, texts.texts,
      [&](const nn::TextScores& scores, nn::TextGradients& gradients) {
        return (*text_loss_)(batch, scores, gradients);
      },
      layout_);
}

nn::TextScores Gpt::text_scores(Tape& tape, const tensor::Batch& batch, bool without_adapter) {
  Tape::NoGrad pause(tape);
  const autograd::Replaced<bool> off(tape.without_adapters, without_adapter);
  const auto texts = static_cast<std::size_t>(entry(batch, "sides").numel());
  const auto head = [&](const Var& x) {
    if (config_.gives_rewards()) {
      const Var found = rewards(tape, x, batch);
      const Tensor here = tape.on_host(found.value(), DType::f64);
      std::vector<double> all(3 * texts, 0.0);
      if (tape.device().kind() != device::Kind::meta)
        for (std::size_t i = 0; i < texts; ++i)
          all[i] = all[texts + i] = here.data<double>()[i * static_cast<std::size_t>(found.shape().back())];
      return tape.input(Tensor::of<double>(tape.device(), {3, std::ssize(all) / 3}, all));
    }
    const Texts found = texts_of(tape, x, batch);
    const nn::TextScores scores = parallel::vocab_text_scores(found.rows, vocabulary(tape), found.labels,
                                                              found.runs, found.texts, layout_);
    std::vector<double> all = scores.log_prob;
    all.insert(all.end(), scores.weighted.begin(), scores.weighted.end());
    all.insert(all.end(), scores.targets.begin(), scores.targets.end());
    return tape.input(Tensor::of<double>(tape.device(), {3, found.texts}, all));
  };
  const KeepDtypes keep(tape);
  const Tensor all = tensor::to_host(tape.device(), scores(tape, batch, head).value());
  nn::TextScores out;
  out.log_prob.resize(texts), out.weighted.resize(texts), out.targets.resize(texts);
  if (tape.device().kind() == device::Kind::meta) return out;
  for (std::size_t i = 0; i < texts; ++i) {
    out.log_prob[i] = all.data<double>()[i], out.weighted[i] = all.data<double>()[texts + i];
    out.targets[i] = static_cast<std::int64_t>(all.data<double>()[2 * texts + i]);
  }
  return out;
}

}  // namespace sherd::models
