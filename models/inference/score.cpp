#include "models/inference/score.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "autograd/key_cache.h"

namespace sherd::models {
namespace {

/// Batches have rows that are a multiple of this, so that few shapes of products need to be prepared.
constexpr std::int64_t scored_row_step = 32;

using Batch = std::vector<std::size_t>;  ///< indices of texts

/// Rows that a text takes behind so many virtual tokens.
std::int64_t rows_of(const ScoreRequest& text, std::int64_t before) {
  return before + std::ssize(text.tokens) - 1;  // the last token is scored, not read
}

std::int64_t width_of(std::int64_t rows, std::int64_t seq_length) {
  return std::min((rows + scored_row_step - 1) / scored_row_step * scored_row_step, seq_length);
}

/// Texts that are the same count once, as the first of them. The longest first, so that a model that does not
/// fit fails at once.
std::vector<Batch> batches_of(std::span<const ScoreRequest> texts, std::span<const std::size_t> first_alike,
                              std::int64_t most_rows, const GptConfig& model) {
  const std::int64_t before = model.adapter.virtual_tokens();
  Batch order;
  for (std::size_t i = 0; i < texts.size(); ++i)
    if (first_alike[i] == i) order.push_back(i);
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return texts[a].tokens.size() > texts[b].tokens.size();
  });
  std::vector<Batch> out;
  std::int64_t width = 0;
  for (const std::size_t text : order) {
    if (out.empty() || (std::ssize(out.back()) + 1) * width > most_rows) {
      out.emplace_back();
      width = width_of(rows_of(texts[text], before), model.seq_length);
    }
    out.back().push_back(text);
  }
  return out;
}

/// For each text the number of the first that is the same: equal choices score equally, to the bit, whatever
/// rows of a product they would fall on.
std::vector<std::size_t> first_alike(std::span<const ScoreRequest> texts) {
  std::vector<std::size_t> order(texts.size()), out(texts.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    const auto compared = texts[a] <=> texts[b];
    return compared != 0 ? compared < 0 : a < b;
  });
  for (std::size_t i = 0; i < order.size(); ++i)
    out[order[i]] = i > 0 && texts[order[i]] == texts[order[i - 1]] ? out[order[i - 1]] : order[i];
  return out;
}

void check(std::span<const ScoreRequest> texts, std::int64_t max_text) {
  for (const ScoreRequest& text : texts) {
    const std::int64_t tokens = std::ssize(text.tokens);
    require(tokens >= 2 && tokens <= max_text + 1, "a text to score has 2 to ", max_text + 1, " tokens, not ",
            tokens);
    require(text.first >= 1 && text.first < tokens, "of a text of ", tokens,
            " tokens those from 1 on can be scored, not from ", text.first);
    require(text.counted.empty() || std::ssize(text.counted) == tokens - text.first, "a text says of ",
            text.counted.size(), " tokens whether they count, and ", tokens - text.first, " are scored");
  }
}

/// One label of a pass.
struct Label {
  std::size_t text;
  std::int32_t row, id;
};

class Scorer {
 public:
  Scorer(Gpt& model, const RunPass& run, std::span<const ScoreRequest> texts)
      : model_(model), run_(run), texts_(texts), prompt_(model.config().prompt()) {}

  /// Adds to `scores`, where given.
  void score(const Batch& batch, std::vector<Score>* scores) {
    const std::int64_t width =
        width_of(rows_of(texts_[batch.front()], std::ssize(prompt_)), model_.config().seq_length);
    std::vector<std::int32_t> ids(batch.size() * static_cast<std::size_t>(width), 0);
    std::vector<autograd::KeyCache::Rows> places;
    std::vector<Label> labels;
    for (const std::size_t index : batch) {
      const ScoreRequest& text = texts_[index];
      const std::int64_t place = std::ssize(places), begin = place * width + std::ssize(prompt_);
      std::copy(prompt_.begin(), prompt_.end(), ids.begin() + place * width);
      std::copy(text.tokens.begin(), text.tokens.end() - 1, ids.begin() + begin);
      places.push_back({place, 0, rows_of(text, std::ssize(prompt_))});
      for (std::int64_t i = text.first; i < std::ssize(text.tokens); ++i)
        if (text.counted.empty() || text.counted[static_cast<std::size_t>(i - text.first)])
          labels.push_back(
              {index, static_cast<std::int32_t>(begin + i - 1), text.tokens[static_cast<std::size_t>(i)]});
    }
    if (labels.empty()) labels.push_back({batch.front(), 0, 0}), scores = nullptr;
    const tensor::Tensor parts = pass(ids, std::move(places), width, labels);
    if (scores) add(parts, labels, *scores);
  }

 private:
  tensor::Tensor pass(const std::vector<std::int32_t>& ids, std::vector<autograd::KeyCache::Rows> places,
                      std::int64_t width, const std::vector<Label>& labels) {
    std::vector<std::int32_t> rows, wanted;
    for (const Label& label : labels) rows.push_back(label.row), wanted.push_back(label.id);
    const std::int64_t texts = std::ssize(places), n = std::ssize(labels);
    tensor::Tensor out;
    run_([&](Tape& tape) {
      // A pass over whole texts stores keys that nobody reads; with a cache no expert's capacity drops
      // tokens, by which a text's score would depend on the texts beside it.
      autograd::KeyCache cache(texts, width);
      const autograd::WithKeyCache reads(tape, cache);
      cache.begin(tape.device(), std::move(places), width);
      const auto of = [&](const tensor::Shape& shape, const std::vector<std::int32_t>& values) {
        return tensor::Tensor::of<std::int32_t>(tape.device(), shape, values);
      };
      const tensor::Tensor parts =
          model_.label_scores(tape, of({texts, width}, ids), of({n}, rows), of({n}, wanted));
      const tensor::Tensor wide = tape.empty(parts.shape(), DType::f64);
      tape.kernels().copy(parts, wide);
      out = tensor::to_host(tape.device(), wide);
    });
    return out;
  }

  /// The scores that the parts of the vocabulary give together.
  static void add(const tensor::Tensor& found, const std::vector<Label>& labels, std::vector<Score>& scores) {
    const std::int64_t parts = found.shape()[1], n = found.shape()[2];
    const double* lse = found.data<double>();
    const double *logit = lse + parts * n, *most = logit + parts * n;
    for (std::int64_t i = 0; i < n; ++i) {
      double top = lse[i], sum = 0, own = 0, best = most[i];
      for (std::int64_t p = 0; p < parts; ++p) {
        top = std::max(top, lse[p * n + i]), best = std::max(best, most[p * n + i]);
        own += logit[p * n + i];
      }
      for (std::int64_t p = 0; p < parts; ++p) sum += std::exp(lse[p * n + i] - top);
      if (!std::isfinite(top) || !std::isfinite(sum) || !std::isfinite(own))
        fail(ErrorKind::numerics,
             "the model gives a token no finite score: its weights are not finite, or "
             "its dtype is too narrow");
      Score& score = scores[labels[static_cast<std::size_t>(i)].text];
      score.log_likelihood += own - (top + std::log(sum));
      score.greedy = score.greedy && own >= best;
      ++score.tokens;
    }
  }

  Gpt& model_;
  const RunPass& run_;
  std::span<const ScoreRequest> texts_;
  std::vector<std::int32_t> prompt_;  ///< virtual tokens in front of each text
};

}  // namespace

std::vector<ScoreRequest> score_windows(std::span<const std::int32_t> tokens, std::int64_t first,
                                        std::int64_t seq_length, const std::vector<bool>& counted) {
  require(first >= 1 && first < std::ssize(tokens), "of ", tokens.size(),
          " tokens those from 1 on can be scored, not from ", first);
  std::vector<ScoreRequest> out;
  const std::int64_t end = std::ssize(tokens);
  // A long context's part before more than a window's tokens leaves room for half of them.
  const std::int64_t beside_context = std::max(seq_length + 1 - first, (seq_length + 1) / 2);
  for (std::int64_t next = first; next < end;) {
    const std::int64_t room = next == first && end - first > seq_length ? beside_context : seq_length;
    const std::int64_t stop = std::min(end, next + room),
                       begin = std::max<std::int64_t>(0, stop - seq_length - 1);
    ScoreRequest window{{tokens.begin() + begin, tokens.begin() + stop}, next - begin, {}};
    if (!counted.empty())
      window.counted.assign(counted.begin() + (next - first), counted.begin() + (stop - first));
    out.push_back(std::move(window));
    next = stop;
  }
  return out;
}

std::vector<Score> score_texts(Gpt& model, const RunPass& run, std::span<const ScoreRequest> texts,
                               std::int64_t most_rows, ScoreShare share) {
  check(texts, model.config().max_text());
  std::vector<Score> scores(texts.size());
  const std::vector<std::size_t> alike = first_alike(texts);
  const std::vector<Batch> batches = batches_of(texts, alike, most_rows, model.config());
  Scorer scorer(model, run, texts);
  const auto ranks = static_cast<std::size_t>(share.ranks), rank = static_cast<std::size_t>(share.rank);
  for (std::size_t round = 0; round < batches.size(); round += ranks) {
    const bool own = round + rank < batches.size();
    // A rank without a batch of its own repeats one, so that the others find its share of the weights.
    scorer.score(own ? batches[round + rank] : batches.back(), own ? &scores : nullptr);
  }
  for (std::size_t i = 0; i < texts.size(); ++i) scores[i] = scores[alike[i]];
  return scores;
}

}  // namespace sherd::models
