#include "models/inference/score.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "autograd/key_cache.h"
#include "sharding/parallel/text_loss.h"

namespace sherd::models {
namespace {

/// Batches have rows that are a multiple of this, so that few shapes of products need to be prepared.
constexpr std::int64_t scored_row_step = 32;

using Batch = std::vector<std::size_t>;  ///< indices of texts

/// Rows of a text, or of a batch of them: an encoder's, and those that are scored, or lead to these.
struct RowsOfText {
  std::int64_t source = 0, own = 0;
  std::int64_t all() const { return source + own; }
};

RowsOfText rows_of(const ScoreRequest& text, const GptConfig& model) {
  const std::int64_t tokens = std::ssize(text.tokens);
  // A decoder begins with a token of its own; the last token is scored, not read.
  if (model.has_encoder()) return {text.first, tokens - text.first};
  return {0, model.adapter.virtual_tokens() + tokens - 1};
}

/// Rows that hold any of the texts.
RowsOfText width_of(std::span<const ScoreRequest> texts, const Batch& batch, const GptConfig& model) {
  RowsOfText out;
  for (const std::size_t text : batch) {
    const RowsOfText rows = rows_of(texts[text], model);
    out.source = std::max(out.source, rows.source), out.own = std::max(out.own, rows.own);
  }
  const auto stepped = [](std::int64_t rows, std::int64_t most) {
    return std::min((rows + scored_row_step - 1) / scored_row_step * scored_row_step, most);
  };
  out.own = stepped(out.own, model.has_encoder() ? model.target_length() : model.seq_length);
  out.source = stepped(out.source, model.encoder.seq_length);
  return out;
}

/// Texts that are the same count once, as the first of them. The longest first, so that a model that does not
/// fit fails at once.
std::vector<Batch> batches_of(std::span<const ScoreRequest> texts, std::span<const std::size_t> first_alike,
                              std::int64_t most_rows, const GptConfig& model) {
  Batch order;
  for (std::size_t i = 0; i < texts.size(); ++i)
    if (first_alike[i] == i) order.push_back(i);
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    const RowsOfText one = rows_of(texts[a], model), other = rows_of(texts[b], model);
    return std::pair(one.source, one.own) > std::pair(other.source, other.own);
  });
  std::vector<Batch> out;
  for (const std::size_t text : order) {
    if (!out.empty()) {
      out.back().push_back(text);
      if (std::ssize(out.back()) * width_of(texts, out.back(), model).all() <= most_rows) continue;
      out.back().pop_back();
    }
    if (out.empty() || !out.back().empty()) out.emplace_back();
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

void check(std::span<const ScoreRequest> texts, const GptConfig& model) {
  for (const ScoreRequest& text : texts) {
    const std::int64_t tokens = std::ssize(text.tokens), most = model.max_text() + 1;
    if (model.has_encoder())
      require(text.first <= model.encoder.seq_length && tokens - text.first <= model.target_length(),
              "a text of ", text.first, " tokens and ", tokens - text.first,
              " behind them to score, where the encoder takes ", model.encoder.seq_length,
              " and the decoder ", model.target_length());
    else
      require(tokens >= 2 && tokens <= most, "a text to score has 2 to ", most, " tokens, not ", tokens);
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
      : model_(model), run_(run), texts_(texts), prompt_(model.config().prompt()) {
    if (model.config().has_encoder())
      prompt_ = {static_cast<std::int32_t>(model.config().decoder_start_token_id)};
  }

  /// Adds to `scores`, where given.
  void score(const Batch& batch, std::vector<Score>* scores) {
    const GptConfig& config = model_.config();
    const RowsOfText width = width_of(texts_, batch, config);
    std::vector<std::int32_t> ids(batch.size() * static_cast<std::size_t>(width.all()), 0);
    std::vector<autograd::KeyCache::Rows> places;
    std::vector<Label> labels;
    for (const std::size_t index : batch) {
      const ScoreRequest& text = texts_[index];
      const std::int64_t place = std::ssize(places), source = config.has_encoder() ? text.first : 0;
      const auto at = ids.begin() + place * width.all();
      std::copy(text.tokens.begin(), text.tokens.begin() + source, at);
      const auto own = std::copy(prompt_.begin(), prompt_.end(), at + width.source);
      std::copy(text.tokens.begin() + source, text.tokens.end() - 1, own);
      places.push_back({place, 0, rows_of(text, config).own, source});
      // The row in front of the first of these tokens.
      const std::int64_t before = own - ids.begin() - source - 1;
      for (std::int64_t i = text.first; i < std::ssize(text.tokens); ++i)
        if (text.counted.empty() || text.counted[static_cast<std::size_t>(i - text.first)])
          labels.push_back(
              {index, static_cast<std::int32_t>(before + i), text.tokens[static_cast<std::size_t>(i)]});
    }
    if (labels.empty()) labels.push_back({batch.front(), 0, 0}), scores = nullptr;
    const tensor::Tensor parts = pass(ids, std::move(places), width, labels);
    if (scores) add(parts, labels, *scores);
  }

 private:
  tensor::Tensor pass(const std::vector<std::int32_t>& ids, std::vector<autograd::KeyCache::Rows> places,
                      RowsOfText width, const std::vector<Label>& labels) {
    std::vector<std::int32_t> rows, wanted;
    for (const Label& label : labels) rows.push_back(label.row), wanted.push_back(label.id);
    const std::int64_t texts = std::ssize(places), n = std::ssize(labels);
    tensor::Tensor out;
    run_([&](Tape& tape) {
      // A pass over whole texts stores keys that nobody reads; with a cache no expert's capacity drops
      // tokens, by which a text's score would depend on the texts beside it.
      autograd::KeyCache cache(texts, width.own);
      const autograd::WithKeyCache reads(tape, cache);
      cache.begin(tape.device(), std::move(places), width.own, width.source);
      const auto of = [&](const tensor::Shape& shape, const std::vector<std::int32_t>& values) {
        return tensor::Tensor::of<std::int32_t>(tape.device(), shape, values);
      };
      out = tape.on_host(
          model_.label_scores(tape, of({texts, width.all()}, ids), of({n}, rows), of({n}, wanted)),
          DType::f64);
    });
    return out;
  }

  /// The scores that the parts of the vocabulary give together.
  static void add(const tensor::Tensor& found, const std::vector<Label>& labels, std::vector<Score>& scores) {
    const std::int64_t parts = found.shape()[1], n = found.shape()[2];
    const double* lse = found.data<double>();
    const double *logit = lse + parts * n, *most = logit + parts * n;
    for (std::int64_t i = 0; i < n; ++i) {
      double own = 0, best = most[i];
      for (std::int64_t p = 0; p < parts; ++p)
        own += logit[p * n + i], best = std::max(best, most[p * n + i]);
      Score& score = scores[labels[static_cast<std::size_t>(i)].text];
      score.log_likelihood += parallel::log_probability(lse + i, logit + i, parts, n);
      score.greedy = score.greedy && own >= best;
      ++score.tokens;
    }
  }

  Gpt& model_;
  const RunPass& run_;
  std::span<const ScoreRequest> texts_;
  std::vector<std::int32_t> prompt_;  ///< virtual tokens in front of each text, or what a decoder begins with
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
                               std::int64_t most_rows, ScoreShare share,
                               const std::function<void(std::size_t)>& told) {
  check(texts, model.config());
  std::vector<Score> scores(texts.size());
  const std::vector<std::size_t> alike = first_alike(texts);
  const std::vector<Batch> batches = batches_of(texts, alike, most_rows, model.config());
  Scorer scorer(model, run, texts);
  const auto ranks = static_cast<std::size_t>(share.ranks), rank = static_cast<std::size_t>(share.rank);
  std::size_t through = 0;
  for (std::size_t round = 0; round < batches.size(); round += ranks) {
    const bool own = round + rank < batches.size();
    // A rank without a batch of its own repeats one, so that the others find its share of the weights.
    scorer.score(own ? batches[round + rank] : batches.back(), own ? &scores : nullptr);
    for (std::size_t i = round; i < std::min(round + ranks, batches.size()); ++i)
      through += batches[i].size();
    if (told) told(through);
  }
  for (std::size_t i = 0; i < texts.size(); ++i) scores[i] = scores[alike[i]];
  return scores;
}

}  // namespace sherd::models
