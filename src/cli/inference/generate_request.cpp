#include "cli/inference/generate_request.h"

#include <algorithm>
#include <cstdio>
#include <deque>

#include "base/log.h"
#include "base/text/excerpt.h"
#include "cli/inference/growing_text.h"

namespace sherd::cli {
namespace {

/// The texts of a request on one rank, all of which go through the same tokens; rank 0 writes.
class RequestTexts {
 public:
  RequestTexts(const Request& request, bool writes, bool alone)
      : request_(request), writes_(writes), alone_(alone) {
    for (std::size_t i = 0; i < request.prompts.size(); ++i) {
      const std::vector<std::int32_t>& prompt = request.prompts[i];
      growing_.emplace_back(request.from.tokenizer(), request.answers ? std::vector<std::int32_t>() : prompt,
                            request.stops, request.drop);
      // The first text has the seed's own stream, as a single one does.
      const RandomKey key = i == 0 ? request.sampling.key : request.sampling.key.at(i);
      texts_.push_back({prompt, request.max_tokens, key});
    }
    tokens_.resize(texts_.size());
    if (streams() && request.echo) print(request.from.tokenizer().decode(texts_[0].prompt));
  }

  const std::vector<models::TextRequest>& texts() const { return texts_; }

  /// Whether the text goes on.
  bool add(std::size_t text, std::int32_t id) {
    ++tokens_[text];
    GrowingText& growing = growing_[text];
    const bool ends =
        std::find(request_.end_ids.begin(), request_.end_ids.end(), id) != request_.end_ids.end();
    const bool goes_on = !ends && growing.add(id);
    if (streams()) print(growing.take(!goes_on));
    if (!goes_on || tokens_[text] == request_.max_tokens) finish(text, goes_on ? "length" : "stop");
    return goes_on &&
           (!alone_ || !streams() || std::ferror(stdout) == 0);  // of which other ranks know nothing
  }

  const std::string& text(std::size_t text) const { return growing_[text].text(); }

  void end() {
    if (!streams()) return;
    print(growing_[0].take(true));
    std::fputc('\n', stdout);  // the program tells of an output that cannot be written
  }

 private:
  bool streams() const { return writes_ && !request_.completions; }
  static void print(std::string_view text) {
    std::fwrite(text.data(), 1, text.size(), stdout);
    std::fflush(stdout);
  }
  void finish(std::size_t text, const char* why) {
    if (!writes_ || !request_.completions) return;
    request_.completions->add(text, {growing_[text].text(), static_cast<std::size_t>(tokens_[text]), why});
  }

  const Request& request_;
  bool writes_, alone_;
  std::deque<GrowingText> growing_;
  std::vector<models::TextRequest> texts_;
  std::vector<std::int64_t> tokens_;
};

std::string fixed(double value, int digits) {
  char text[64];
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  return text;
}

std::string rate(std::int64_t tokens, double seconds) {
  return cat(tokens, " tokens in ", fixed(seconds, 2), " s",
             seconds > 0 ? cat(" (", fixed(static_cast<double>(tokens) / seconds, 1), " tokens/s)") : "");
}

void tell(const models::GenerationStats& stats, const InferenceModel& from, std::size_t texts) {
  const device::Ledger& ledger = from.device().ledger();
  const auto mib = [](std::uint64_t bytes) { return fixed(static_cast<double>(bytes) / 0x1p20, 1) + " MiB"; };
  log_info(counted(static_cast<std::int64_t>(texts), "text"), ": read ",
           rate(stats.prompt_tokens, stats.prefill_seconds), ", then generated ",
           rate(stats.decoded, stats.decode_seconds), " in ", stats.decode_passes,
           stats.decode_passes == 1 ? " pass" : " passes",
           stats.reread > 0 ? cat(", read texts again ", counted(stats.reread, "time")) : "",
           "; keys and values ", mib(stats.cache_bytes), ", device memory ",
           mib(ledger.peak(device::Tier::device)), " at most");
}

models::GenerationStats run(const Request& request, InferenceModel& from, RequestTexts& texts) {
  const models::GenerationStats stats =
      models::generate_texts(from.model(), from.run(), texts.texts(), request.batch, request.sampling,
                             [&](std::size_t text, std::int32_t id) { return texts.add(text, id); });
  texts.end();
  return stats;
}

}  // namespace

void generate(const Request& request, const DistributedPtr& dist) {
  InferenceModel from(request.from.reader(), request.from.config(), dist);
  RequestTexts texts(request, dist->rank() == 0, dist->world_size() == 1);
  const models::GenerationStats stats = run(request, from, texts);
  if (dist->rank() == 0 && request.completions) tell(stats, from, texts.texts().size());
}

std::string generate_one(const Request& request, InferenceModel& from, const DistributedPtr& dist) {
  RequestTexts texts(request, dist->rank() == 0, dist->world_size() == 1);
  run(request, from, texts);
  return texts.text(0);
}

}  // namespace sherd::cli
