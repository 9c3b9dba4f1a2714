#include "models/inference/score.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <tuple>
#include <utility>

#include "autograd/key_cache.h"
#include "sharding/parallel/text_loss.h"

namespace sherd::models {
namespace {

/// Batches have rows that are a multiple of this, so that few shapes of products need to be prepared.
constexpr std::int64_t scored_row_step = 32;

/// So many texts are read behind one context whatever rows that takes, as choices of a question are.
constexpr std::int64_t choices_together = 4;

std::int64_t stepped(std::int64_t rows, std::int64_t most) {
  return std::min((rows + scored_row_step - 1) / scored_row_step * scored_row_step, most);
}

/// Indices of texts whose tokens before ScoreRequest::first are alike and read once, or of one text.
using Group = std::vector<std::size_t>;

/// Rows of a group, or the most of each that groups of a batch have: an encoder's, those of the pass that
/// begins texts, and those of the pass that goes on with what each text has behind the alike tokens.
struct GroupRows {
  std::int64_t source = 0, own = 0, behind = 0;
  std::int64_t places = 1;  ///< of the key cache; a batch's are the sum of its groups'
};

/// Rows that a text needs behind the first token that it scores.
std::int64_t rows_behind(const ScoreRequest& text) {
  return std::ssize(text.tokens) - text.first - 1;
}

GroupRows rows_of(std::span<const ScoreRequest> texts, const Group& group, const GptConfig& model) {
  const ScoreRequest& text = texts[group.front()];
  // The last token is scored, not read; a decoder behind an encoder begins with a token of its own.
  if (model.has_encoder()) return {text.first, std::ssize(text.tokens) - text.first, 0};
  if (group.size() == 1) return {0, model.adapter.virtual_tokens() + std::ssize(text.tokens) - 1, 0};
  GroupRows out{0, model.adapter.virtual_tokens() + text.first, 0, 0};
  for (const std::size_t i : group) {
    out.behind = std::max(out.behind, rows_behind(texts[i]));
    out.places += rows_behind(texts[i]) > 0;
  }
  out.places = std::max<std::int64_t>(out.places, 1);
  return out;
}

/// Groups that one pass begins, and a second one goes on with where any has rows behind.
class Batch {
 public:
  Batch(const GptConfig& model, std::int64_t most_rows) : model_(model), most_rows_(most_rows) {}

  /// Whether the group found room.
  bool add(const Group& group, const GroupRows& rows) {
    const GroupRows grown{std::max(rows_.source, rows.source), std::max(rows_.own, rows.own),
                          std::max(rows_.behind, rows.behind),
                          groups_.empty() ? rows.places : rows_.places + rows.places};
    const GroupRows width = width_of(grown);
    // A key cache has room for the whole of each text; positions end where the model's do.
    if (!groups_.empty() && (grown.places * (width.source + width.own + width.behind) > most_rows_ ||
                             (grown.behind > 0 && grown.own + grown.behind > model_.seq_length)))
      return false;
    groups_.push_back(group), rows_ = grown;
    return true;
  }
  const std::vector<Group>& groups() const { return groups_; }
  /// The rows that passes run, and places.
  GroupRows width() const { return width_of(rows_); }
  std::int64_t positions() const { return std::max(width().own, rows_.own + width().behind); }
  std::size_t texts() const {
    std::size_t sum = 0;
    for (const Group& group : groups_) sum += group.size();
    return sum;
  }

 private:
  GroupRows width_of(const GroupRows& rows) const {
    return {stepped(rows.source, model_.encoder.seq_length),
            stepped(rows.own, model_.has_encoder() ? model_.target_length() : model_.seq_length),
            rows.behind > 0 ? stepped(rows.behind, std::max(rows.behind, model_.seq_length - rows.own)) : 0,
            rows.places};
  }

  const GptConfig& model_;
  std::int64_t most_rows_;
  std::vector<Group> groups_;
  GroupRows rows_;
};

/// Groups of a context, of which the last one takes more texts.
struct OpenGroup {
  std::size_t index = 0;
  std::int64_t behind = 0, places = 0;  ///< as GroupRows has them
};

/// Takes a text into the group, or tells that places of the key cache would then have more than `most_rows`
/// rows.
bool take(OpenGroup& open, const ScoreRequest& text, std::int64_t most_rows, const GptConfig& model) {
  const std::int64_t behind = std::max(open.behind, rows_behind(text)),
                     places = open.places + (rows_behind(text) > 0 ? 1 : 0);
  if (places > choices_together &&
      places * (model.adapter.virtual_tokens() + text.first + behind) > most_rows)
    return false;
  open.behind = behind, open.places = places;
  return true;
}

/// The texts that `first_alike` names as themselves, each in a group.
std::vector<Group> groups_of(std::span<const ScoreRequest> texts, std::span<const std::size_t> first_alike,
                             std::int64_t most_rows, const GptConfig& model, SharedContexts contexts) {
  std::vector<Group> out;
  std::map<std::span<const std::int32_t>, OpenGroup, decltype([](auto a, auto b) {
             return std::lexicographical_compare(a.begin(), a.end(), b.begin(), b.end());
           })>
      by_context;
  for (std::size_t i = 0; i < texts.size(); ++i) {
    if (first_alike[i] != i) continue;
    const ScoreRequest& text = texts[i];
    const bool shares =
        contexts == SharedContexts::read_once && !model.has_encoder() && text.first >= least_shared_context;
    if (shares) {
      const std::span context(text.tokens.data(), static_cast<std::size_t>(text.first));
      const auto [found, is_new] = by_context.try_emplace(context);
      OpenGroup& open = found->second;
      if (!is_new && take(open, text, most_rows, model)) {
        out[open.index].push_back(i);
        continue;
      }
      open = {out.size()};
      take(open, text, most_rows, model);
    }
    out.push_back({i});
  }
  return out;
}

/// The longest first, so that a model that does not fit fails at once.
std::vector<Batch> batches_of(std::span<const ScoreRequest> texts, std::vector<Group> groups,
                              std::int64_t most_rows, const GptConfig& model) {
  std::stable_sort(groups.begin(), groups.end(), [&](const Group& a, const Group& b) {
    const GroupRows one = rows_of(texts, a, model), other = rows_of(texts, b, model);
    return std::tuple(one.source, one.own, one.behind) > std::tuple(other.source, other.own, other.behind);
  });
  std::vector<Batch> out;
  for (const Group& group : groups) {
    const GroupRows rows = rows_of(texts, group, model);
    if (!out.empty() && out.back().add(group, rows)) continue;
    out.emplace_back(model, most_rows).add(group, rows);
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

/// Rows of one pass: their tokens, where they lie, and the labels that follow them.
struct PassRows {
  struct Label {
    std::size_t text;
    std::int32_t row, id;
  };

  std::int64_t source = 0, own = 0;  ///< of each sequence
  std::vector<std::int32_t> ids;
  std::vector<autograd::KeyCache::Rows> places;
  std::vector<Label> labels;

  /// Room for another sequence: where its tokens begin.
  std::int64_t begin_sequence() {
    const std::int64_t at = std::ssize(ids);
    ids.resize(ids.size() + static_cast<std::size_t>(source + own), 0);
    return at;
  }
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
    const GroupRows width = batch.width();
    PassRows begun, behind;
    begun.source = width.source, begun.own = width.own, behind.own = width.behind;
    std::vector<std::pair<std::int64_t, std::int64_t>> forks;  // places, from and to
    std::int64_t place = 0;
    for (const Group& group : batch.groups()) {
      const std::int64_t first_place = place++;
      begin(group, first_place, begun);
      bool forked = false;
      for (const std::size_t text : group) {
        if (group.size() == 1 || rows_behind(texts_[text]) == 0) continue;
        const std::int64_t own_place = forked ? place++ : first_place;
        if (forked) forks.emplace_back(first_place, own_place);
        go_on(text, own_place, behind);
        forked = true;
      }
    }
    autograd::KeyCache cache(place, batch.positions());
    run_pass(cache, std::move(begun), {}, scores);
    if (width.behind > 0) run_pass(cache, std::move(behind), forks, scores);
  }

 private:
  bool counts(const ScoreRequest& text, std::int64_t token) const {
    return text.counted.empty() || text.counted[static_cast<std::size_t>(token - text.first)];
  }
  /// Labels for a text's tokens [from, to), of which the first follows the row of that number.
  void label(std::size_t index, std::int64_t from, std::int64_t to, std::int64_t row, PassRows& rows) const {
    const ScoreRequest& text = texts_[index];
    for (std::int64_t i = from; i < to; ++i, ++row)
      if (counts(text, i))
        rows.labels.push_back(
            {index, static_cast<std::int32_t>(row), text.tokens[static_cast<std::size_t>(i)]});
  }

  /// Adds the tokens that a group's texts have alike, or the whole of one text.
  void begin(const Group& group, std::int64_t place, PassRows& rows) const {
    const ScoreRequest& text = texts_[group.front()];
    const std::int64_t source = model_.config().has_encoder() ? text.first : 0,
                       end = group.size() > 1 ? text.first : std::ssize(text.tokens) - 1;
    const auto at = rows.ids.begin() + rows.begin_sequence();
    std::copy(text.tokens.begin(), text.tokens.begin() + source, at);
    const auto own = std::copy(prompt_.begin(), prompt_.end(), at + rows.source);
    std::copy(text.tokens.begin() + source, text.tokens.begin() + end, own);
    rows.places.push_back({place, 0, std::ssize(prompt_) + end - source, source});
    const std::int64_t row = own - rows.ids.begin() + text.first - source - 1;  // in front of its first token
    for (const std::size_t i : group)
      label(i, text.first, group.size() > 1 ? text.first + 1 : std::ssize(text.tokens), row, rows);
  }

  /// Adds the tokens of a text behind the first one that it scores.
  void go_on(std::size_t index, std::int64_t place, PassRows& rows) const {
    const ScoreRequest& text = texts_[index];
    const std::int64_t at = rows.begin_sequence();
    std::copy(text.tokens.begin() + text.first, text.tokens.end() - 1, rows.ids.begin() + at);
    rows.places.push_back({place, std::ssize(prompt_) + text.first, rows_behind(text)});
    label(index, text.first + 1, std::ssize(text.tokens), at, rows);
  }

  /// Adds to `scores`, where given. `forks`: places that begin as copies of others.
  void run_pass(autograd::KeyCache& cache, PassRows rows,
                const std::vector<std::pair<std::int64_t, std::int64_t>>& forks, std::vector<Score>* scores) {
    if (rows.labels.empty()) rows.labels.push_back({0, 0, 0}), scores = nullptr;
    std::vector<std::int32_t> before, wanted;
    for (const PassRows::Label& label : rows.labels) before.push_back(label.row), wanted.push_back(label.id);
    const std::int64_t texts = std::ssize(rows.places), n = std::ssize(rows.labels);
    tensor::Tensor parts;
    run_([&](Tape& tape) {
      // A pass over whole texts stores keys that nobody reads; with a cache no expert's capacity drops
      // tokens, by which a text's score would depend on the texts beside it.
      const autograd::WithKeyCache reads(tape, cache);
      for (const auto& [from, to] : forks) cache.fork(tape.kernels(), from, to);
      cache.begin(tape.device(), std::move(rows.places), rows.own, rows.source);
      const auto of = [&](const tensor::Shape& shape, const std::vector<std::int32_t>& values) {
        return tensor::Tensor::of<std::int32_t>(tape.device(), shape, values);
      };
      parts = tape.on_host(model_.label_scores(tape, of({texts, rows.source + rows.own}, rows.ids),
                                               of({n}, before), of({n}, wanted)),
                           DType::f64);
    });
    if (scores) add(parts, rows.labels, *scores);
  }

  /// The scores that the parts of the vocabulary give together.
  static void add(const tensor::Tensor& found, const std::vector<PassRows::Label>& labels,
                  std::vector<Score>& scores) {
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
                               const std::function<void(std::size_t)>& told, SharedContexts contexts) {
  check(texts, model.config());
  std::vector<Score> scores(texts.size());
  const std::vector<std::size_t> alike = first_alike(texts);
  Scorer scorer(model, run, texts);
  const auto ranks = static_cast<std::size_t>(share.ranks), rank = static_cast<std::size_t>(share.rank);
  std::size_t through = 0;
  const auto score_all = [&](const std::vector<Group>& groups) {
    const std::vector<Batch> batches = batches_of(texts, groups, most_rows, model.config());
    for (std::size_t round = 0; round < batches.size(); round += ranks) {
      const bool own = round + rank < batches.size();
      // A rank without a batch of its own repeats one, so that the others find its share of the weights.
      scorer.score(own ? batches[round + rank] : batches.back(), own ? &scores : nullptr);
      for (std::size_t i = round; i < std::min(round + ranks, batches.size()); ++i)
        through += batches[i].texts();
      if (told) told(through);
    }
  };
  // Ranks run as many passes, so those that go on in a second one are apart.
  std::vector<Group> groups = groups_of(texts, alike, most_rows, model.config(), contexts);
  const auto once = std::stable_partition(groups.begin(), groups.end(), [&](const Group& group) {
    return rows_of(texts, group, model.config()).behind == 0;
  });
  score_all({groups.begin(), once}), score_all({once, groups.end()});
  for (std::size_t i = 0; i < texts.size(); ++i) scores[i] = scores[alike[i]];
  return scores;
}

}  // namespace sherd::models
