#include "models/inference/generate.h"

#include <algorithm>
#include <chrono>
#include <deque>
#include <utility>

#include "autograd/key_cache.h"

namespace sherd::models {
namespace {

/// Prompts are read in rows that are a multiple of this, so that few shapes of products need to be prepared.
constexpr std::int64_t row_step = 32;

/// A text that has a place in the cache.
struct Text {
  std::size_t index;  ///< the request's
  std::int64_t place;
  std::vector<std::int32_t> tokens;
  std::int64_t virtual_tokens;         ///< in front of them
  std::vector<std::int32_t> source{};  ///< what an encoder reads; tokens are then the decoder's alone
  std::int64_t begin = 0;              ///< the token behind these
  std::int64_t stored = 0;             ///< positions whose keys are there
  std::int64_t made = 0;

  /// Positions, the unread ones included.
  std::int64_t end() const { return virtual_tokens + std::ssize(tokens) - begin; }
  std::int64_t unread() const { return end() - stored; }
};

/// As many positions as some text needs: the last token is not read.
std::int64_t positions_for(const Gpt& model, std::span<const TextRequest> texts) {
  std::int64_t most = 1;
  if (model.config().has_encoder()) {
    for (const TextRequest& text : texts) most = std::max(most, text.max_tokens);
    return std::min(most, model.config().target_length());
  }
  for (const TextRequest& text : texts)
    most = std::max(most, std::ssize(text.prompt) + std::max<std::int64_t>(0, text.max_tokens) - 1);
  return model.config().adapter.virtual_tokens() + std::min(most, model.config().max_text());
}

class Texts {
 public:
  Texts(Gpt& model, const RunPass& run, std::span<const TextRequest> requests, std::int64_t batch,
        const Sampling& sampling, const OnToken& on_token)
      : model_(model),
        run_(run),
        requests_(requests),
        sampling_(sampling),
        on_token_(on_token),
        prompt_(model.config().prompt()),
        cache_(std::min(batch, std::ssize(requests)), positions_for(model, requests)) {
    for (std::int64_t place = cache_.texts(); place > 0; --place) free_.push_back(place - 1);
  }

  GenerationStats generate() {
    while (begin_texts(), !texts_.empty()) {
      if (const std::vector<Text*> texts = to_read(); !texts.empty())
        prefill(texts);
      else
        decode();
      std::erase_if(texts_, [](const Text& text) { return text.place < 0; });
    }
    stats_.cache_bytes = cache_.bytes();
    return stats_;
  }

 private:
  void begin_texts() {
    for (; !free_.empty() && next_ < requests_.size(); ++next_) {
      const TextRequest& request = requests_[next_];
      if (request.max_tokens <= 0) continue;
      texts_.push_back({next_, free_.back(), request.prompt, std::ssize(prompt_)});
      free_.pop_back();
      Text& text = texts_.back();
      if (model_.config().has_encoder()) {
        text.source = std::exchange(text.tokens, {});
        if (const std::int64_t most = model_.config().encoder.seq_length; std::ssize(text.source) > most)
          text.source.resize(static_cast<std::size_t>(most));
        text.tokens = {static_cast<std::int32_t>(model_.config().decoder_start_token_id)};
        continue;
      }
      text.begin = std::max<std::int64_t>(0, std::ssize(text.tokens) - model_.config().max_text());
    }
  }

  /// Texts none of whose keys are there: as many as a pass over prompts takes.
  std::vector<Text*> to_read() {
    std::vector<Text*> out;
    std::int64_t longest = 0;
    for (Text& text : texts_) {
      if (text.stored > 0) continue;
      longest = std::max(longest, text.end() + std::ssize(text.source));
      if (!out.empty() && (std::ssize(out) + 1) * longest > most_prompt_rows) break;
      out.push_back(&text);
    }
    return out;
  }

  void prefill(const std::vector<Text*>& texts) {
    const auto start = std::chrono::steady_clock::now();
    std::int64_t longest = 0;
    for (const Text* text : texts) {
      longest = std::max(longest, text->unread());
      stats_.prompt_tokens += text->unread() + std::ssize(text->source);
    }
    const std::int64_t rows = longest == 1 ? 1 : (longest + row_step - 1) / row_step * row_step;
    pass(texts, std::min(rows, cache_.positions()));
    ++stats_.prefill_passes;
    stats_.prefill_seconds += seconds_since(start);
  }

  void decode() {
    const auto start = std::chrono::steady_clock::now();
    std::vector<Text*> texts;
    for (Text& text : texts_) texts.push_back(&text);
    pass(texts, 1);
    ++stats_.decode_passes;
    stats_.decoded += std::ssize(texts);
    stats_.decode_seconds += seconds_since(start);
  }

  static double seconds_since(std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }

  /// Reads what is unread of the texts, in a batch of `rows` rows behind those of sources that begin, and
  /// takes a token for each.
  void pass(const std::vector<Text*>& texts, std::int64_t rows) {
    std::int64_t source = 0;
    for (const Text* text : texts)
      if (text->stored == 0) source = std::max(source, std::ssize(text->source));
    source = std::min((source + row_step - 1) / row_step * row_step, model_.config().encoder.seq_length);
    std::vector<std::int32_t> ids(texts.size() * static_cast<std::size_t>(source + rows), 0);
    std::vector<autograd::KeyCache::Rows> places;
    for (std::size_t i = 0; i < texts.size(); ++i) {
      Text& text = *texts[i];
      auto to = ids.begin() + static_cast<std::ptrdiff_t>(i) * (source + rows);
      if (source > 0) std::copy(text.source.begin(), text.source.end(), to), to += source;
      std::int64_t unread = text.unread();
      if (text.stored == 0) to = std::copy(prompt_.begin(), prompt_.end(), to), unread -= std::ssize(prompt_);
      std::copy(text.tokens.end() - unread, text.tokens.end(), to);
      places.push_back({text.place, text.stored, text.unread(), source > 0 ? std::ssize(text.source) : 0});
      text.stored = text.end();
    }
    tensor::Tensor logits;
    run_([&](Tape& tape) {
      const autograd::WithKeyCache continues(tape, cache_);
      cache_.begin(tape.device(), std::move(places), rows, source);
      const auto tokens =
          tensor::Tensor::of<std::int32_t>(tape.device(), {std::ssize(texts), source + rows}, ids);
      logits = tape.on_host(model_.next_logits(tape, tokens), DType::f32);
    });
    const auto vocabulary = static_cast<std::size_t>(model_.config().vocab_size);
    for (std::size_t i = 0; i < texts.size(); ++i)
      take({logits.data<float>() + static_cast<std::int64_t>(i) * logits.shape()[1], vocabulary}, *texts[i]);
  }

  void take(std::span<const float> logits, Text& text) {
    const TextRequest& request = requests_[text.index];
    Sampling sampling = sampling_;
    sampling.key = request.key;
    text.tokens.push_back(sample_token(logits, sampling, static_cast<std::uint64_t>(text.made), text.tokens));
    ++text.made, ++stats_.tokens;
    const bool goes_on = on_token_(text.index, text.tokens.back()),
               full = !text.source.empty() && text.end() > cache_.positions();
    if (!goes_on || full || text.made == request.max_tokens) {
      free_.push_back(text.place);
      text.place = -1;
    } else if (text.end() > model_.config().seq_length) {
      text.begin = std::ssize(text.tokens) - std::max<std::int64_t>(1, model_.config().max_text() / 2);
      text.stored = 0;
      ++stats_.reread;
    }
  }

  Gpt& model_;
  const RunPass& run_;
  std::span<const TextRequest> requests_;
  const Sampling& sampling_;
  const OnToken& on_token_;
  std::vector<std::int32_t> prompt_;  ///< virtual tokens, which stay in front of what a text becomes
  autograd::KeyCache cache_;
  std::vector<std::int64_t> free_;  ///< places, the next one last
  std::deque<Text> texts_;
  std::size_t next_ = 0;
  GenerationStats stats_;
};

}  // namespace

GenerationStats generate_texts(Gpt& model, const RunPass& run, std::span<const TextRequest> texts,
                               std::int64_t batch, const Sampling& sampling, const OnToken& on_token) {
  require(batch >= 1, "generation takes a text at a time or more, not ", batch);
  check_sampling(sampling);
  for (const TextRequest& text : texts)
    require(!text.prompt.empty(), "generation needs a prompt of at least one token");
  if (texts.empty()) return {};
  return Texts(model, run, texts, batch, sampling, on_token).generate();
}

std::vector<std::int32_t> generate(Gpt& model, autograd::Tape& tape, std::span<const std::int32_t> prompt,
                                   std::int64_t max_tokens, const Sampling& sampling,
                                   const std::function<bool(std::int32_t)>& on_token) {
  const RunPass run = [&](const std::function<void(Tape&)>& body) {
    const bool training = std::exchange(tape.training, false);
    try {
      body(tape);
    } catch (...) {
      tape.training = training;
      throw;
    }
    tape.training = training;
  };
  std::vector<std::int32_t> out;
  const TextRequest request{{prompt.begin(), prompt.end()}, max_tokens, sampling.key};
  generate_texts(model, run, std::span(&request, 1), 1, sampling, [&](std::size_t, std::int32_t token) {
    out.push_back(token);
    return !on_token || on_token(token);
  });
  return out;
}

}  // namespace sherd::models
