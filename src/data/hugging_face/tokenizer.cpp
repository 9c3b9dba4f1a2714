#include "data/hugging_face/tokenizer.h"

#include <algorithm>

#include "base/error.h"
#include "base/log.h"
#include "base/text/excerpt.h"
#include "base/text/utf8.h"
#include "data/hugging_face/files_beside.h"
#include "data/hugging_face/steps/unicode.h"
#include "data/hugging_face/tokenizer_file.h"

namespace sherd::data {
namespace {

constexpr std::string_view end_option = "eod=", begin_option = "bos=";

/// A thread's own memory while it encodes.
struct EncodeSpace {
  MatchSpace matches = {};
  PreTokenSpace pieces{matches};
  BpeSpace words = {};
  std::string valid = {}, normalized = {};
  std::vector<AddedTokens::Found> found = {}, found_normalized = {};
};

std::unique_ptr<const WordModel> model_of(const TokenizerFile& file) {
  if (file.unigram) return make_unigram(file.model, *file.unigram);
  return file.word_piece ? make_word_piece(file.model, *file.word_piece) : make_bpe(file.model);
}

class HuggingFaceTokenizer final : public Tokenizer {
 public:
  HuggingFaceTokenizer(TokenizerFile file, const HuggingFaceSpec& spec)
      : model_(model_of(file)),
        normalizer_(std::move(file.normalizer)),
        added_(std::move(file.added), &normalizer_),
        pre_tokenizer_(std::move(file.pre_tokenizer)),
        spec_(spec.text()) {
    if (file.decoder) decoder_.emplace(std::move(*file.decoder));
    end_ = id_named(*spec.end, "eod");
    if (!spec.begin->empty()) begin_ = id_named(*spec.begin, "bos");
  }

  using Tokenizer::encode;
  void encode(std::string_view text, const EncodeOptions& how,
              std::vector<std::int32_t>& ids) const override {
    std::unique_ptr<EncodeSpace> space = spaces_.take();
    text = valid_utf8(text, space->valid);
    added_.find(text, false, how.special_tokens, space->found);
    std::size_t at = 0;
    for (const AddedTokens::Found& found : space->found) {
      encode_text({text.substr(at, found.begin - at), behind(how.behind, at)}, how, *space, ids);
      ids.push_back(found.token->id);
      at = found.end;
    }
    encode_text({text.substr(at), behind(how.behind, at)}, how, *space, ids);
    spaces_.give_back(std::move(space));
  }

  std::string decode(std::span<const std::int32_t> ids) const override {
    std::vector<std::string> tokens;
    for (const std::int32_t id : ids) {
      require(id >= 0 && id < vocab_size(), "token ", id, " is outside the vocabulary of ", vocab_size(),
              " of ", spec_);
      const AddedToken* added = added_.of_id(id);
      std::string token = added ? added_.written(*added) : std::string(model_->vocabulary().token(id));
      if (!token.empty() && !is_special(id)) tokens.push_back(std::move(token));
    }
    if (decoder_) return decoder_->decode(std::move(tokens));
    std::string text;
    for (const std::string& token : tokens) text += cat(&token == tokens.data() ? "" : " ", token);
    return text;
  }

  std::int64_t vocab_size() const override { return std::max(model_->vocabulary().end(), added_.end()); }
  std::int32_t end_of_document() const override { return end_; }
  std::optional<std::int32_t> begin_of_document() const override { return begin_; }
  std::optional<std::int32_t> token_id(std::string_view token) const override {
    const AddedToken* added = added_.named(token);
    return added ? std::optional(added->id) : model_->vocabulary().id(token);
  }
  std::string token(std::int32_t id) const override {
    const AddedToken* added = added_.of_id(id);
    return added ? added->content : std::string(model_->vocabulary().token(id));
  }
  std::vector<Spelled> special_tokens_in(std::string_view text) const override {
    std::vector<Spelled> out;
    std::vector<AddedTokens::Found> found;
    std::size_t at = 0;
    // Templates write special tokens by their contents, also those that are looked for in normalized text.
    const auto between = [&](std::size_t end) {
      for (const AddedToken* token : added_.normalized_specials())
        for (std::size_t begin = at, size = token->content.size();
             (begin = text.find(token->content, begin)) < end && begin + size <= end; begin += size)
          out.push_back({token->id, begin, begin + size});
    };
    added_.find(text, false, true, found);
    for (const AddedTokens::Found& each : found) {
      between(each.begin);
      if (each.token->special) out.push_back({each.token->id, each.begin, each.end});
      at = each.end;
    }
    between(text.size());
    std::sort(out.begin(), out.end(), [](const Spelled& a, const Spelled& b) { return a.begin < b.begin; });
    return out;
  }
  bool is_special(std::int32_t id) const override {
    const AddedToken* added = added_.of_id(id);
    return id == end_ || id == begin_ ||
           added_.is_special(added ? added_.written(*added) : std::string(model_->vocabulary().token(id)));
  }
  bool lossless() const override { return false; }  // bytes that are no UTF-8 become U+FFFD
  const std::string& spec() const override { return spec_; }

 private:
  std::int32_t id_named(const std::string& token, const char* option) const {
    const std::optional<std::int32_t> id = token_id(token);
    if (!id)
      fail(ErrorKind::config, "'", spec_, "': ", option, "=", excerpt(token), " is no token of its own");
    return *id;
  }

  static EncodeOptions::Behind behind(EncodeOptions::Behind of_all, std::size_t at) {
    return at == 0 ? of_all : EncodeOptions::Behind::token;
  }

  /// Text without tokens of those that are looked for before it is normalised.
  void encode_text(PreToken piece, const EncodeOptions& how, EncodeSpace& space,
                   std::vector<std::int32_t>& ids) const {
    if (piece.text.empty()) return;
    if (piece.behind == EncodeOptions::Behind::nothing) piece.of_first = utf8_length(piece.text);
    piece.text = normalizer_.apply(piece.text, space.normalized, space.matches,
                                   piece.behind == EncodeOptions::Behind::text, &piece.of_first);
    added_.find(piece.text, true, how.special_tokens, space.found_normalized);
    std::size_t at = 0;
    for (const AddedTokens::Found& found : space.found_normalized) {
      encode_pieces(piece.part(at, found.begin - at), space, ids);
      ids.push_back(found.token->id);
      at = found.end;
    }
    encode_pieces(piece.part(at), space, ids);
  }

  void encode_pieces(const PreToken& piece, EncodeSpace& space, std::vector<std::int32_t>& ids) const {
    pre_tokenizer_.split(piece, space.pieces);
    for (const PreToken& part : space.pieces.pieces) model_->encode(part.text, space.words, ids);
  }

  std::unique_ptr<const WordModel> model_;
  Normalizer normalizer_;
  AddedTokens added_;
  PreTokenizer pre_tokenizer_;
  std::optional<Decoder> decoder_;
  std::string spec_;
  std::int32_t end_ = 0;
  std::optional<std::int32_t> begin_;
  mutable SpacePool<EncodeSpace> spaces_;
};

/// transformers builds some tokenizers anew, by that setting; ids here are the file's.
void tell_of_prefix_space(bool asked, const TokenizerFile& file) {
  using Step = PreTokenizerStep;
  const auto prefixes = [](const Step& step) {
    return step.kind == PreTokenizerKind::byte_level ? step.prefix_space
                                                     : step.prepend != Step::Prepend::never;
  };
  const auto step = std::find_if(file.pre_tokenizer.begin(), file.pre_tokenizer.end(),
                                 [](const Step& each) { return each.kind != PreTokenizerKind::split; });
  if (step == file.pre_tokenizer.end() || prefixes(*step) == asked) return;
  log_warning(
      "tokenizer_config.json says add_prefix_space ", asked ? "true" : "false",
      ", and tokenizer.json does the opposite: ids are tokenizer.json's, where transformers' may differ "
      "at the beginning of texts; save the tokenizer anew by transformers to have its");
}

/// Fills in what `spec` leaves open, from the file and those beside it.
void complete(HuggingFaceSpec& spec, const TokenizerFile& file) {
  if (spec.end && spec.begin) return;
  const DocumentEnds ends = document_ends_beside(std::filesystem::path(spec.path).parent_path());
  if (ends.prefix_space) tell_of_prefix_space(*ends.prefix_space, file);
  if (!spec.begin) spec.begin = ends.without_begin ? "" : file.begin;
  if (spec.end) return;
  spec.end = ends.end.empty() && !ends.end_id ? file.end : ends.end;
  if (ends.end_id) spec.end = file.token_of(*ends.end_id);
  if (spec.end->empty())
    fail(ErrorKind::config, "'", spec.path, "': ",
         ends.end_id
             ? cat("eos_token_id beside it is ", *ends.end_id, ", which no token has")
             : std::string("no tokenizer_config.json, generation_config.json or config.json beside it says "
                           "which token ends a document (eos_token, or a number as eos_token_id), nor does a "
                           "post-processor"),
         "; give it as hf:", spec.path, "?eod=TOKEN");
}

/// A path that ends like an option which there is not, and is no file's.
void refuse_other_options(const std::string& path) {
  const std::size_t mark = path.rfind('?');
  const std::size_t equals = path.find('=', mark == std::string::npos ? path.size() : mark);
  std::error_code none;
  if (equals == std::string::npos || std::filesystem::exists(path, none)) return;
  fail(ErrorKind::config, "tokenizer 'hf:", excerpt(path), "': there is no option '",
       excerpt(path.substr(mark + 1, equals - mark - 1)),
       "'; options are eod=TOKEN, which ends a document, and bos=TOKEN, which begins one (bos=: none)");
}

}  // namespace

HuggingFaceSpec HuggingFaceSpec::parse(const std::string& spec) {
  const std::string rest = spec.substr(spec.find(':') + 1);
  const std::size_t options = std::min(rest.find(cat('?', end_option)), rest.find(cat('?', begin_option)));
  refuse_other_options(rest.substr(0, options));
  HuggingFaceSpec out{rest.substr(0, options), std::nullopt, std::nullopt};
  for (std::size_t at = options; at < rest.size();) {
    const std::size_t end = std::min(
        {rest.find(cat('&', end_option), at + 1), rest.find(cat('&', begin_option), at + 1), rest.size()});
    const bool ends = rest.compare(at + 1, end_option.size(), end_option) == 0;
    (ends ? out.end : out.begin) = rest.substr(at + 1 + end_option.size(), end - at - 1 - end_option.size());
    at = end;
  }
  return out;
}

std::string HuggingFaceSpec::text() const {
  std::string out = "hf:" + path;
  char mark = '?';
  if (end) out += cat(std::exchange(mark, '&'), end_option, *end);
  if (begin) out += cat(mark, begin_option, *begin);
  return out;
}

std::shared_ptr<const Tokenizer> make_hugging_face(const std::string& bytes, HuggingFaceSpec spec) {
  try {
    TokenizerFile file = parse_tokenizer_file(bytes);
    complete(spec, file);
    return std::make_shared<HuggingFaceTokenizer>(std::move(file), spec);
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::config) throw;
    fail(error.kind(), "'", spec.path, "': ", error.what());
  }
}

}  // namespace sherd::data
